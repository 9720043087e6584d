//! Inputs and effects of the membership machine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::discovery::DiscoveryError;
use crate::error::MembershipError;
use crate::protocol::{Generation, PoolBlockSize, Slot, WorkerConfig, WorkerId, WorkerMap, WorkerRank};
use crate::select::RankTraits;

/// Input of the membership machine. `R` is the reply channel of a caller.
#[derive(Debug)]
pub enum MembershipInput<R> {
    /// The embedder adds or changes a worker. Reply: when the effects before it are performed.
    Upsert {
        /// Id of the worker.
        worker: WorkerId,
        /// Complete configuration.
        config: Box<WorkerConfig>,
        /// Reply channel.
        reply: R,
    },
    /// The embedder removes a worker. Reply: when all of its ranks have retired.
    Remove {
        /// Id of the worker.
        worker: WorkerId,
        /// Reply channel.
        reply: R,
    },
    /// The worker gets no new requests and leaves after its last booking or at the deadline. Reply: when it has left,
    /// with the number of bookings that were cut off.
    Drain {
        /// Id of the worker.
        worker: WorkerId,
        /// Longest duration of the drain.
        deadline: Duration,
        /// Reply channel.
        reply: R,
    },
    /// Ends a drain, or lets discovery add a worker again that was drained or removed.
    Undrain {
        /// Id of the worker.
        worker: WorkerId,
        /// Reply channel.
        reply: R,
    },
    /// Stops new requests to a worker, or permits them again. Bookings and index entries stay.
    Cordon {
        /// Id of the worker.
        worker: WorkerId,
        /// Whether new requests are stopped.
        cordoned: bool,
        /// Reply channel.
        reply: R,
    },
    /// Acknowledgement of [`MembershipEffect::DrainRank`].
    RankDrained {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Bookings on the rank. Above 0 if the acknowledgement was lost with a sequence actor.
        rank_bookings: usize,
        /// Bookings on all ranks of the worker, retiring ranks included.
        worker_bookings: usize,
    },
    /// The deadline of [`MembershipEffect::StartDrainTimer`] has passed.
    DrainTimedOut {
        /// Id of the worker.
        worker: WorkerId,
        /// Number of the drain. An earlier drain of the worker may have ended before its deadline.
        drain: u64,
        /// Bookings on all ranks of the worker, retiring ranks included.
        worker_bookings: usize,
    },
    /// Acknowledgement of [`MembershipEffect::RetireRank`].
    RankRetired {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
    },
    /// One more discovery source of this name; its number is the count of earlier sources. Lower numbers have precedence.
    SourceAdded(String),
    /// A source has returned a value. Recorded only: [`MembershipInput::Reconcile`] applies it.
    SourceUpdated {
        /// Number of the source.
        source: usize,
        /// The value.
        update: SourceUpdate,
    },
    /// Compares the workers that sources name with the registered workers, and applies the difference.
    Reconcile,
    /// The KV events of a rank have this block size.
    EventsSized {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Tokens per block.
        tokens: u32,
    },
    /// The blocks of a cold rank were sent again.
    RankWarmed {
        /// The rank.
        rank: WorkerRank,
        /// Index shard of the rank.
        shard: usize,
        /// Incarnation of the shard that received the blocks. Earlier incarnations are ignored.
        incarnation: u32,
    },
    /// An actor has died.
    ChildDied {
        /// The actor.
        child: Child,
        /// Panic message or error.
        reason: String,
        /// Ranks of a dead index shard, and whether KV events of each had been applied. Empty for other actors.
        shard_ranks: BTreeMap<WorkerRank, bool>,
    },
}

/// Value of a discovery source.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceUpdate {
    /// Complete set of workers.
    Workers(WorkerMap),
    /// No new set. The last valid set stays in force.
    Failed(DiscoveryError),
    /// No further values. The last valid set stays in force.
    Closed,
}

/// Supervised actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Child {
    /// Scheduler actor.
    Scheduler,
    /// Index shard with this number.
    IndexShard(usize),
    /// Sequence actor of the rank in this slot.
    Sequence(Slot),
    /// Reader of the KV events of the rank in this slot.
    Reader(Slot),
    /// Health actor.
    Health,
    /// Actor that polls engine loads.
    EngineLoads,
    /// Actor of the discovery source with this number.
    Source(usize),
}

impl Child {
    /// All names.
    pub const NAMES: &[&str] = &["scheduler", "radix", "sequence", "ingest", "health", "engine_loads", "discovery"];

    /// Name in log fields and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::IndexShard(_) => "radix",
            Self::Sequence(_) => "sequence",
            Self::Reader(_) => "ingest",
            Self::Health => "health",
            Self::EngineLoads => "engine_loads",
            Self::Source(_) => "discovery",
        }
    }
}

/// Effect of the membership machine. Effects are performed in order, after the step that returned them.
#[derive(Debug, PartialEq)]
pub enum MembershipEffect<R> {
    /// Uses this block size from now on. [`MembershipEffect::Replace`] follows for each actor that depends on it.
    UseBlockSize(PoolBlockSize),
    /// Replaces a running actor by a successor with the present block size.
    Replace(Child),
    /// Starts the sequence actor of a rank, registers the rank with its index shard and admits it to the scheduler.
    StartRank {
        /// The rank.
        rank: WorkerRank,
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Endpoint of the worker.
        endpoint: Arc<str>,
        /// Description of the rank.
        description: RankDescription,
        /// True if the rank gets no new requests.
        restricted: bool,
    },
    /// Publishes the changed description of a running rank.
    DescribeRank {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Description of the rank.
        description: RankDescription,
    },
    /// Stops or permits new requests to a running rank.
    RestrictRank {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Whether new requests are stopped.
        restricted: bool,
    },
    /// Stops new requests to a rank; acknowledged with [`MembershipInput::RankDrained`] after its last booking.
    DrainRank {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
    },
    /// Removes a rank from index and scheduler and ends its bookings; acknowledged with
    /// [`MembershipInput::RankRetired`].
    RetireRank {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
    },
    /// Stops the sequence actor of a retired rank and frees its slot.
    ReleaseRank {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
    },
    /// Starts a reader of the KV events of a rank, with the present configuration of its worker.
    StartReader(Slot),
    /// Stops the reader of a rank.
    StopReader(Slot),
    /// Removes the blocks of a rank whose KV events are no longer read.
    ClearBlocks(Slot),
    /// Reports that the restart budget of a reader is spent: the overlap of its rank no longer counts.
    AbandonReader {
        /// Slot of the rank.
        slot: Slot,
        /// Deaths of the reader.
        deaths: u32,
        /// Reason of the last death.
        reason: String,
    },
    /// Sends [`MembershipInput::DrainTimedOut`] after the deadline.
    StartDrainTimer {
        /// Id of the worker.
        worker: WorkerId,
        /// Number of the drain.
        drain: u64,
        /// Delay.
        deadline: Duration,
    },
    /// Starts a dead actor again.
    Restart {
        /// The actor.
        child: Child,
        /// Reason of its death.
        reason: String,
        /// Ranks whose blocks were lost with an index shard.
        lost: Vec<WorkerRank>,
    },
    /// The restart budget is spent: the router fails.
    Fail {
        /// The actor that died last.
        child: Child,
        /// Reason of its death.
        reason: String,
    },
    /// Logs a change.
    Report(MembershipReport),
    /// Publishes [`Membership::cold`](super::Membership::cold).
    PublishCold,
    /// Publishes [`Membership::sources`](super::Membership::sources).
    PublishSources,
    /// Publishes [`Membership::workers`](super::Membership::workers).
    PublishWorkers,
    /// Replies to a caller.
    Reply {
        /// Reply channel.
        to: R,
        /// Bookings that were cut off (0 unless the input was [`MembershipInput::Drain`]), or the reason of a rejection.
        result: Result<usize, MembershipError>,
    },
}

/// Description of a rank from the configuration of its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankDescription {
    /// Number among the ranks of the worker, from 0; `None` for the only rank of a worker.
    pub number_at_worker: Option<u32>,
    /// Capacities and labels.
    pub traits: Arc<RankTraits>,
}

/// Change worth a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipReport {
    /// The block size of the pool, or its origin, has changed.
    BlockSize {
        /// The size before.
        before: PoolBlockSize,
        /// The present size.
        now: PoolBlockSize,
    },
    /// A worker was registered.
    Joined {
        /// Id of the worker.
        worker: WorkerId,
        /// Endpoint of the worker.
        endpoint: String,
        /// Number of ranks.
        ranks: usize,
        /// Name of the source, or [`BY_HAND`](super::BY_HAND).
        source: String,
    },
    /// A worker was removed; its ranks retire.
    Left {
        /// Id of the worker.
        worker: WorkerId,
        /// Endpoint of the worker.
        endpoint: String,
        /// Number of ranks.
        ranks: usize,
        /// Name of the source, or [`BY_HAND`](super::BY_HAND).
        source: String,
    },
    /// The source of a worker drains it.
    Drains {
        /// Id of the worker.
        worker: WorkerId,
        /// Endpoint of the worker.
        endpoint: String,
        /// Name of the source.
        source: String,
    },
    /// The drain of a worker by its source has ended bookings.
    CutOff {
        /// Id of the worker.
        worker: WorkerId,
        /// Endpoint of the worker.
        endpoint: Option<String>,
        /// Number of bookings.
        bookings: usize,
    },
    /// A worker states no `max_num_batched_tokens`, and a limit is a share of it. Reported once a router.
    CapacityUnstated {
        /// Endpoint of the worker.
        endpoint: String,
    },
    /// Two sources name one worker, or its engine.
    Conflict {
        /// Id of the worker that is ignored.
        worker: WorkerId,
        /// Endpoint of the worker, at the source that has precedence if it names the worker.
        endpoint: Option<String>,
        /// Name of the source that has precedence.
        used: String,
        /// Name of the other source.
        ignored: String,
    },
    /// A source failed, and its error differs from the previous one.
    SourceFailed {
        /// Name of the source.
        source: String,
        /// The error.
        error: String,
        /// Workers of its last valid set; `None` before the first set.
        workers: Option<usize>,
    },
    /// A source has returned a set after an error.
    SourceRecovered {
        /// Name of the source.
        source: String,
        /// Workers in the set.
        workers: usize,
    },
    /// A source names a worker that breaks a rule. Reported once an error.
    WorkerRefused {
        /// Id of the worker.
        worker: WorkerId,
        /// Endpoint of the worker.
        endpoint: Option<String>,
        /// The rule.
        error: String,
    },
    /// The reader of a rank died and is started again.
    ReaderRestarted {
        /// Slot of the rank.
        slot: Slot,
        /// Reason of its death.
        reason: String,
    },
}
