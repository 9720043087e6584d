//! Ingest actor: one per rank whose engine publishes KV events.
//!
//! Owns the task that reads the events (`reader`). A panic of the reader affects no other part and is reported to the
//! supervisor as the death of this actor. A removed rank is not read any more. `ingest::Source` interprets the sequence
//! of events, and `wire` decodes their bytes. No message of a request passes through this actor.

mod audit;
mod auditor;
mod dependencies;
mod reader;
mod restore;
mod snapshot_reply;

use std::sync::Arc;

use ractor::{Actor, ActorRef};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::actors::delivery::ActorResult;
use crate::actors::views::rank::RankEntry;
use crate::config::RouterConfig;
use crate::ingest::SourceConfig;
use crate::protocol::{WorkerConfig, WorkerConfigError};
use crate::wire::{DecoderLimits, WireConfig};
pub(crate) use dependencies::IngestDependencies;
pub(crate) use reader::{Arguments, ReaderCommand};
pub(crate) use snapshot_reply::SnapshotReply;

/// Maximum number of queued commands for a reader; repeated replay requests are redundant.
const COMMANDS_MAX: usize = 4;

/// Messages to an ingest actor.
pub(crate) enum IngestMsg {
    /// Command for the reader.
    Command(ReaderCommand),
    /// The reader has panicked.
    Died(String),
}

/// The ingest actor; see the module documentation.
pub(crate) struct Ingest;

impl Arguments {
    /// Arguments to read the events of `entry`; `None` if it has no events or they are disabled.
    pub(crate) fn of(
        config: &RouterConfig,
        dependencies: IngestDependencies,
        entry: &Arc<RankEntry>,
        worker: &WorkerConfig,
    ) -> Result<Option<Self>, WorkerConfigError> {
        let is_read = config.events.mode.reads_events() && config.has_index();
        let Some(endpoints) = worker.kv_events_of(entry.rank.rank)?.filter(|_| is_read) else { return Ok(None) };
        let source = SourceConfig {
            has_replay: endpoints.replay_endpoint.is_some(),
            capacity_blocks: worker.total_kv_blocks,
            block_size: Some(config.block_size_or_assumed()),
            seed: config.seed ^ entry.rank.worker.0.rotate_left(32) ^ u64::from(entry.rank.rank),
            ..SourceConfig::default()
        };
        let wire = wire_config(config, entry, worker);
        let (entry, audit_interval_ms) = (Arc::clone(entry), config.events.audit_interval_ms);
        Ok(Some(Self { dependencies, entry, endpoints, source, wire, audit_interval_ms }))
    }
}

fn wire_config(config: &RouterConfig, entry: &RankEntry, worker: &WorkerConfig) -> WireConfig {
    let start = worker.data_parallel_start_rank;
    WireConfig {
        rank: entry.rank,
        ranks: start..start + worker.data_parallel_size,
        block_size: config.block_size_nonzero(),
        is_eagle: config.is_eagle,
        limits: DecoderLimits::default(),
    }
}

/// State of the ingest actor.
pub(crate) struct IngestState {
    reader: AbortHandle,
    commands: mpsc::Sender<ReaderCommand>,
}

impl Drop for IngestState {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Actor for Ingest {
    type Msg = IngestMsg;
    type State = IngestState;
    type Arguments = Arguments;

    async fn pre_start(&self, myself: ActorRef<IngestMsg>, arguments: Arguments) -> ActorResult<IngestState> {
        arguments.entry.source.begin(&arguments.endpoints.endpoint);
        let (commands, heard) = mpsc::channel(COMMANDS_MAX);
        let task = tokio::spawn(reader::read(arguments, heard));
        let watched = task.abort_handle();
        tokio::spawn(async move {
            if let Err(error) = task.await
                && error.is_panic()
            {
                drop(myself.send_message(IngestMsg::Died(error.to_string())));
            }
        });
        Ok(IngestState { reader: watched, commands })
    }

    async fn handle(&self, _: ActorRef<IngestMsg>, msg: IngestMsg, state: &mut IngestState) -> ActorResult {
        match msg {
            // Full: a replay request is queued, the rank is not part of this snapshot, or the contents stay pending for
            // the successor of the reader.
            IngestMsg::Command(command) => drop(state.commands.try_send(command)),
            IngestMsg::Died(reason) => return Err(reason.into()),
        }
        Ok(())
    }
}
