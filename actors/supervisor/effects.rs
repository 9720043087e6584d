//! Performance of membership effects.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::children::sequence_handle;
use super::messages::{DrainAck, MembershipReply, RetireAck, SupervisorMsg};
use super::state::{RankActor, SupervisorState};
use crate::actors::delivery::ActorResult;
use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::strand::Strand;
use crate::actors::health::HealthMsg;
use crate::actors::radix::{RadixMsg, registered};
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::sequence::table::SequenceAddress;
use crate::actors::views::kv_source::SourceCell;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::rank_counts::RankCounts;
use crate::actors::views::status::RouterPhase;
use crate::actors::views::worker::WorkerEntry;
use crate::config::RouterConfig;
use crate::load::PromptLimits;
use crate::membership::{Child, MembershipEffect, RankDescription};
use crate::protocol::{Generation, PoolBlockSize, Slot, WorkerId, WorkerRank};
use crate::schedule::{Input, RankCells};
use crate::select::RankTraits;
use crate::shell::supervisor::SupervisorInput;

impl SupervisorState {
    pub(super) async fn perform(&mut self, effect: MembershipEffect<MembershipReply>) -> ActorResult {
        match effect {
            MembershipEffect::UseBlockSize(size) => self.use_block_size(size),
            MembershipEffect::Replace(child) => self.replace(child).await?,
            MembershipEffect::StartRank { rank, slot, generation, endpoint, description, restricted } => {
                let entry = self.new_entry(rank, (slot, generation), endpoint, &description);
                self.start_rank(entry, &description.traits, restricted).await?;
            }
            MembershipEffect::DescribeRank { slot, description, .. } => self.describe_rank(slot, &description),
            MembershipEffect::RestrictRank { slot, generation, restricted } => {
                self.dependencies.strands.scheduler.tell(SchedulerMsg::Cordon {
                    slot,
                    generation,
                    cordoned: restricted,
                });
            }
            MembershipEffect::DrainRank { slot, generation } => {
                let ack = Acknowledgement::new(DrainAck { supervisor: self.myself.clone(), slot, generation });
                self.dependencies.strands.scheduler.tell(SchedulerMsg::Drain { slot, generation, ack });
            }
            MembershipEffect::RetireRank { slot, generation } => self.retire_rank(slot, generation),
            MembershipEffect::ReleaseRank { slot, generation } => self.release_rank(slot, generation),
            #[cfg(feature = "zmq")]
            MembershipEffect::StartReader(slot) => self.start_reader(slot).await?,
            #[cfg(feature = "zmq")]
            MembershipEffect::StopReader(slot) => self.stop_reader(slot),
            #[cfg(feature = "zmq")]
            MembershipEffect::ClearBlocks(slot) => self.clear_blocks(slot),
            #[cfg(feature = "zmq")]
            MembershipEffect::AbandonReader { slot, deaths, reason } => self.abandon_reader(slot, deaths, &reason),
            // `MembershipRules::has_reader` is false in this build.
            #[cfg(not(feature = "zmq"))]
            MembershipEffect::StartReader(_)
            | MembershipEffect::StopReader(_)
            | MembershipEffect::ClearBlocks(_)
            | MembershipEffect::AbandonReader { .. } => {}
            MembershipEffect::StartDrainTimer { worker, drain, deadline } => {
                self.start_drain_timer(worker, drain, deadline);
            }
            MembershipEffect::Restart { child, reason, lost } => self.restart(child, &reason, &lost).await?,
            MembershipEffect::Fail { child, reason } => self.fail(child, &reason),
            MembershipEffect::Report(report) => self.report(report),
            MembershipEffect::PublishCold => {
                self.dependencies.views.cold.send_replace(self.shell.membership().cold().clone());
            }
            MembershipEffect::PublishSources => {
                self.dependencies.views.discovery.send_replace(self.shell.membership().sources().to_vec());
            }
            MembershipEffect::PublishWorkers => self.publish_workers(),
            MembershipEffect::Reply { to, result } => drop(to.send(result)),
        }
        Ok(())
    }

    /// The actors that start from here on have the size, and requests that are prepared from here on.
    fn use_block_size(&mut self, size: PoolBlockSize) {
        let config = RouterConfig { block_size: Some(size.tokens), ..(*self.dependencies.config).clone() };
        self.dependencies.config = Arc::new(config);
        self.dependencies.views.block_size.set(size);
        #[cfg(feature = "zmq")]
        if size.origin.is_settled() {
            let ranks = self.dependencies.views.restores.drop_other_sizes(size.tokens);
            if ranks > 0 {
                let (pool, block_size) = (&self.dependencies.config.pool, size.tokens);
                tracing::warn!(pool, block_size, ranks, "index snapshot dropped: its blocks have another size");
            }
        }
    }

    fn new_entry(
        &self,
        rank: WorkerRank,
        (slot, generation): (Slot, Generation),
        endpoint: Arc<str>,
        description: &RankDescription,
    ) -> Arc<RankEntry> {
        Arc::new(RankEntry {
            rank,
            slot,
            generation,
            endpoint,
            number_at_worker: AtomicU32::new(description.number_at_worker.unwrap_or(RankEntry::ALONE)),
            since: self.dependencies.clock.now(),
            cells: RankCells::default(),
            stalls: Arc::default(),
            source: Arc::new(SourceCell::new(rank, &self.dependencies.views.ranks.degraded)),
            failing: AtomicBool::new(false),
            counts: RankCounts::default(),
        })
    }

    async fn start_rank(&mut self, entry: Arc<RankEntry>, traits: &Arc<RankTraits>, restricted: bool) -> ActorResult {
        let strand = Strand::closed();
        let actor = self.start_sequence(&entry, &strand).await?;
        let address = SequenceAddress { entry: Arc::clone(&entry), strand: Arc::clone(&strand) };
        self.dependencies.strands.sequences.insert(entry.slot, entry.generation, Arc::new(address));
        self.dependencies.views.ranks.insert(&entry);
        self.register(&entry, traits);
        self.dependencies
            .strands
            .scheduler
            .tell(SchedulerMsg::Admit(sequence_handle(&entry, &strand, traits, restricted)));
        self.shell.insert(entry.slot, RankActor { entry, strand, actor });
        Ok(())
    }

    fn describe_rank(&self, slot: Slot, description: &RankDescription) {
        let Some(RankActor { entry, .. }) = self.shell.rank(slot) else { return };
        entry.number_at_worker.store(description.number_at_worker.unwrap_or(RankEntry::ALONE), Ordering::Relaxed);
        self.register(entry, &description.traits);
        let (generation, traits) = (entry.generation, Arc::clone(&description.traits));
        self.dependencies.strands.scheduler.tell(SchedulerMsg::Input(Input::Describe { slot, generation, traits }));
    }

    /// Registers a rank, or its changed capacity, with its index shard.
    fn register(&self, entry: &RankEntry, traits: &RankTraits) {
        if let Some(shard) = self.dependencies.strands.shards.of(entry.rank) {
            shard.tell(RadixMsg::Register(registered(entry, traits)));
        }
    }

    /// The index removes the rank immediately; the scheduler forwards the retirement after its last booking.
    fn retire_rank(&self, slot: Slot, generation: Generation) {
        if let Some(RankActor { entry, .. }) = self.shell.rank(slot)
            && let Some(shard) = self.dependencies.strands.shards.of(entry.rank)
        {
            shard.tell(RadixMsg::Remove(entry.rank));
        }
        let ack = Acknowledgement::new(RetireAck { supervisor: self.myself.clone(), slot, generation });
        self.dependencies.strands.scheduler.tell(SchedulerMsg::Retire { slot, generation, ack });
    }

    fn release_rank(&mut self, slot: Slot, generation: Generation) {
        let Some(RankActor { strand, actor, .. }) = self.shell.release(slot) else { return };
        self.children.remove(&actor);
        self.dependencies.strands.sequences.remove(slot);
        self.dependencies.views.ranks.remove(slot);
        strand.close();
        for lease in self.shell.left_behind(slot, generation) {
            self.dependencies.ender.end(&lease);
        }
    }

    fn start_drain_timer(&self, worker: WorkerId, drain: u64, deadline: Duration) {
        let myself = self.myself.clone();
        tokio::spawn(async move {
            tokio::time::sleep(deadline).await;
            drop(myself.send_message(SupervisorMsg::Shell(SupervisorInput::DrainTimedOut { worker, drain })));
        });
    }

    fn fail(&self, child: Child, reason: &str) {
        tracing::error!(role = child.name(), reason, "actor died and the restart budget is exhausted: router failed");
        self.dependencies.views.status.enter(RouterPhase::Failed);
        self.myself.stop(Some("restart budget exhausted".to_owned()));
        self.dependencies.close();
    }

    fn publish_workers(&self) {
        let workers = self.shell.membership().workers();
        let entries = workers.iter().map(|(worker, known)| WorkerEntry {
            worker: *worker,
            config: known.config.clone(),
            ranks: known.slots.keys().copied().collect(),
            draining: known.draining,
            cordoned: known.cordoned,
        });
        let configs = workers.values().map(|worker| &worker.config);
        let limits = PromptLimits::of(configs, self.dependencies.config.block_size_or_assumed());
        self.dependencies.views.fleet.publish(entries.collect(), limits);
        self.dependencies.strands.health.tell(HealthMsg::MembersChanged);
    }
}
