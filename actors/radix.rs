//! The radix actor: one an index shard, owner of its prefix index.
//!
//! Owns the [`Index`] of the ranks assigned to the shard. Promises that a rank's events apply in the order they were
//! sent, and that a query sees every event accepted before it. Leaves to the supervisor which ranks are its own, and
//! restarted, it knows them but not what they hold: they are cold until each is sent again from a `Cleared` on.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use ractor::ActorRef;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::gather::{Leg, Onward};
use super::scheduler::{Scheduler, SchedulerMsg, Ticket};
use super::supervisor::SupervisorMsg;
use super::turn::{After, Step, Turn};
use crate::index::{Applied, Extension, Hit, Index, Overlaps};
use crate::protocol::{BlockHash, Generation, KvEvent, RouterEvent, Slot, WorkerRank};
use crate::schedule::Request;
use crate::select::{RankOverlap, TierOverlap};

/// Which shard keeps a rank: a pure function, so that everyone agrees without asking.
pub(crate) fn shard_of(rank: WorkerRank, shards: usize) -> usize {
    // Ranks of one worker, and workers numbered in a row, go round the shards.
    let mixed = rank.worker.0.wrapping_add(u64::from(rank.rank));
    usize::try_from(mixed % shards.max(1) as u64).unwrap_or(0)
}

/// What an index shard can be told.
pub(crate) enum RadixMsg {
    /// How much of these blocks does each rank hold?
    Overlap(Leg<RankOverlap, OverlapNext>),
    /// Apply these events, all of ranks of this shard.
    Apply {
        events: Vec<RouterEvent>,
        /// Their place in the queue.
        permit: OwnedSemaphorePermit,
    },
    /// A rank joins.
    Register { rank: WorkerRank, slot: Slot, generation: Generation },
    /// A rank leaves, with what it held.
    Remove { rank: WorkerRank },
    /// Say when everything before this has been applied.
    Flush(oneshot::Sender<()>),
    /// Write out what is held, as events that rebuild it.
    Dump(oneshot::Sender<Vec<RouterEvent>>),
    /// A drill: panic, or hold the turn until told to go on.
    #[cfg(feature = "faults")]
    Fault(super::faults::Trip),
}

/// Where overlaps go on to, with the request they belong to.
pub(crate) struct OverlapNext {
    pub(crate) hashes: Arc<[BlockHash]>,
    pub(crate) request: std::sync::Mutex<Option<Request<Ticket>>>,
    pub(crate) scheduler: Weak<Turn<Scheduler>>,
}

impl Onward<RankOverlap> for OverlapNext {
    fn onward(&self, overlaps: Vec<RankOverlap>) {
        let request = self.request.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let (Some(request), Some(scheduler)) = (request, self.scheduler.upgrade()) {
            scheduler.tell(SchedulerMsg::Decide(Request { overlaps, ..request }));
        }
    }
}

/// One shard of the index.
pub(crate) struct Radix {
    index: Index,
    found: Overlaps,
    /// Restarts of this shard.
    incarnation: u32,
    /// Ranks that must be sent again.
    cold: BTreeSet<WorkerRank>,
    supervisor: ActorRef<SupervisorMsg>,
    counters: Counters,
}

/// What a shard answers once its turn is given back.
pub(crate) enum RadixAfter {
    Overlap(#[expect(dead_code, reason = "dropping it is the answer")] Leg<RankOverlap, OverlapNext>),
    Flushed(oneshot::Sender<()>),
    Dumped(oneshot::Sender<Vec<RouterEvent>>, Vec<RouterEvent>),
}

impl Radix {
    /// A shard that knows its ranks and not what they hold. After a loss, all of them are cold.
    pub(crate) fn new(
        ranks: impl IntoIterator<Item = (WorkerRank, Slot, Generation)>,
        incarnation: u32,
        cold: BTreeSet<WorkerRank>,
        supervisor: ActorRef<SupervisorMsg>,
    ) -> Self {
        let mut index = Index::new();
        for (rank, slot, generation) in ranks {
            index.register(rank, slot, generation);
        }
        Self { index, found: Overlaps::default(), incarnation, cold, supervisor, counters: Counters::new() }
    }

    fn on_overlap(&mut self, leg: Leg<RankOverlap, OverlapNext>) -> RadixAfter {
        self.index.overlaps(&leg.next().hashes, &mut self.found);
        if !self.found.hits().is_empty() {
            leg.extend(self.found.iter().map(rank_overlap));
        }
        RadixAfter::Overlap(leg)
    }

    fn on_apply(&mut self, events: &[RouterEvent]) {
        let mut applied = Applied::default();
        for event in events {
            applied += self.index.apply(event);
            if matches!(event.data, KvEvent::Cleared) && self.cold.remove(&event.rank) {
                // What follows a clear is everything the rank holds: it is known again.
                drop(
                    self.supervisor
                        .send_message(SupervisorMsg::Warmed { rank: event.rank, incarnation: self.incarnation }),
                );
            }
        }
        self.counters.count(&applied);
    }

    fn on_remove(&mut self, rank: WorkerRank) {
        self.index.remove_rank(rank);
        self.cold.remove(&rank);
    }
}

fn rank_overlap((hit, beyond): (Hit, Extension)) -> RankOverlap {
    let overlap = TierOverlap {
        device_blocks: hit.device_blocks,
        host_pinned_blocks: beyond.host_pinned_blocks,
        disk_blocks: beyond.disk_blocks,
        external_blocks: beyond.external_blocks,
    };
    RankOverlap { slot: hit.slot, generation: hit.generation, overlap }
}

impl Step for Radix {
    type Msg = RadixMsg;
    type After = RadixAfter;

    fn step(&mut self, msg: RadixMsg) -> Option<RadixAfter> {
        match msg {
            RadixMsg::Overlap(leg) => return Some(self.on_overlap(leg)),
            RadixMsg::Apply { events, permit } => {
                self.on_apply(&events);
                drop(permit);
            }
            RadixMsg::Register { rank, slot, generation } => drop(self.index.register(rank, slot, generation)),
            RadixMsg::Remove { rank } => self.on_remove(rank),
            RadixMsg::Flush(answer) => return Some(RadixAfter::Flushed(answer)),
            RadixMsg::Dump(answer) => return Some(RadixAfter::Dumped(answer, self.index.dump())),
            #[cfg(feature = "faults")]
            RadixMsg::Fault(trip) => trip.happen(),
        }
        None
    }
}

impl After for RadixAfter {
    fn deliver(self) {
        match self {
            Self::Flushed(answer) => drop(answer.send(())),
            Self::Dumped(answer, events) => drop(answer.send(events)),
            Self::Overlap(_) => {}
        }
    }
}

/// Metric handles, held so that no message looks one up.
struct Counters {
    stored: metrics::Counter,
    duplicates: metrics::Counter,
    waiting: metrics::Counter,
    removed: metrics::Counter,
    unknown_removals: metrics::Counter,
    unknown_parents: metrics::Counter,
    unknown_ranks: metrics::Counter,
}

impl Counters {
    fn new() -> Self {
        let blocks = |result: &'static str| metrics::counter!("pointsman_kv_event_blocks_total", "result" => result);
        let refused = |reason: &'static str| metrics::counter!("pointsman_kv_events_refused_total", "reason" => reason);
        Self {
            stored: blocks("stored"),
            duplicates: blocks("duplicate"),
            waiting: blocks("waiting"),
            removed: blocks("removed"),
            unknown_removals: blocks("unknown_removal"),
            unknown_parents: refused("unknown_parent"),
            unknown_ranks: refused("unknown_rank"),
        }
    }

    fn count(&self, applied: &Applied) {
        let counts = [
            (&self.stored, applied.stored + applied.adopted),
            (&self.duplicates, applied.duplicates),
            (&self.waiting, applied.waiting),
            (&self.removed, applied.removed),
            (&self.unknown_removals, applied.unknown_removals),
            (&self.unknown_parents, applied.unknown_parents),
            (&self.unknown_ranks, applied.unknown_ranks),
        ];
        for (counter, count) in counts {
            if count > 0 {
                counter.increment(count);
            }
        }
    }
}
