//! Radix actor: one per index shard, owner of the shard's prefix index.
//!
//! Owns the [`Index`] of the ranks assigned to the shard by the supervisor. Events of a rank apply in the order of
//! their sending. A query includes every event accepted and every decision reported before it (see [`speculation`]).
//! After a restart the shard has its ranks without their contents: each rank is cold until its contents are sent again,
//! beginning with a `Cleared` event.

pub(crate) mod claim;
pub(crate) mod shards;
mod speculation;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actors::delivery::join::{Continuation, Join, ReplyToken};
use crate::actors::delivery::strand::{ActorState, DeferredReply};
use crate::actors::io::clock::Clock;
use crate::actors::telemetry::Pool;
use crate::actors::views::incarnation::CurrentIncarnation;
use crate::actors::views::kv_source::{DegradedSources, SourceCell};
use crate::actors::views::rank::RankEntry;
use crate::config::RouterConfig;
use crate::index::{Applied, BudgetState, Extension, Hit, Holdings, Index, Overlaps};
#[cfg(feature = "zmq")]
use crate::index::{BlockDigest, RankDump};
#[cfg(feature = "zmq")]
use crate::ingest::BlockName;
use crate::predict::SpeculativePrompt;
use crate::protocol::{BlockHash, BookingId, Generation, KvEvent, RouterEvent, Slot, WorkerRank};
#[cfg(feature = "replicas")]
use crate::replica::RoutedPrompt;
use crate::select::{RankOverlap, RankTraits, TierOverlap};
use speculation::SpeculativeEntries;

/// Shard of a rank: a pure function, so every sender computes the same shard.
pub(crate) fn shard_of(rank: WorkerRank, shards: usize) -> usize {
    // Distributes the ranks of one worker, and workers with consecutive ids, round-robin over the shards.
    let mixed = rank.worker.0.wrapping_add(u64::from(rank.rank));
    usize::try_from(mixed % shards.max(1) as u64).unwrap_or(0)
}

/// Messages to an index shard.
pub(crate) enum RadixMsg {
    /// Overlap query.
    Overlap(ReplyToken<RankOverlap, dyn OverlapQuery>),
    /// Apply these events, all for ranks of this shard.
    Apply {
        events: Vec<RouterEvent>,
        /// Set if all events belong to one rank: its slot and generation. Events of an earlier generation are dropped.
        only: Option<(Slot, Generation)>,
        /// Permit of the shard's gate.
        permit: OwnedSemaphorePermit,
    },
    /// Add a rank.
    Register(RegisteredRank),
    /// Remove a rank with its contents.
    Remove { rank: WorkerRank },
    /// The scheduler has routed this prompt to this rank.
    Routed { slot: Slot, generation: Generation, booking: Option<BookingId>, speculative_prompt: SpeculativePrompt },
    /// The embedder or another replica has routed this prompt to this rank.
    Recorded {
        rank: WorkerRank,
        speculative_prompt: SpeculativePrompt,
        /// Whether another replica has decided.
        is_remote: bool,
        /// Permit of the shard's gate.
        permit: OwnedSemaphorePermit,
    },
    /// Reply with own decisions for the other replicas, at most this many blocks, and the number of those dropped.
    #[cfg(feature = "replicas")]
    TakeRouted { blocks_max: usize, reply: oneshot::Sender<(Vec<RoutedPrompt>, u64)> },
    /// A booking in a modelled cache has ended.
    Released { booking: BookingId, output_blocks: u32 },
    /// Reply when all earlier messages have been applied.
    Flush(oneshot::Sender<()>),
    /// Reply with the contents of one rank, as events that rebuild them. A step for a whole shard could last too long.
    Dump { rank: WorkerRank, reply: oneshot::Sender<Vec<RouterEvent>> },
    /// Reply with the contents of one rank, including all earlier events; `None` if they were lost or the generation has
    /// ended.
    #[cfg(feature = "zmq")]
    DumpRank { rank: WorkerRank, generation: Generation, reply: oneshot::Sender<Option<RankDump>> },
    /// Reply with the digest of the rank after all earlier events; `None` if its contents are incomplete or the
    /// generation has ended.
    #[cfg(feature = "zmq")]
    Digest { rank: WorkerRank, generation: Generation, reply: oneshot::Sender<Option<BlockDigest>> },
    /// Reply with the names in this digest; `None` in the same cases.
    #[cfg(feature = "zmq")]
    Names { rank: WorkerRank, generation: Generation, reply: oneshot::Sender<Option<Vec<BlockName>>> },
    /// The engine no longer has these blocks of the rank.
    #[cfg(feature = "zmq")]
    Forget { rank: WorkerRank, generation: Generation, names: Vec<BlockName> },
    /// The contents of the rank are restored from an index with a budget, which had evicted blocks of them.
    #[cfg(feature = "zmq")]
    RestoreEvicted { rank: WorkerRank, generation: Generation, blocks: u64 },
    /// Injected fault: panic, or hold the strand until released.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// Registration of a rank at its shard.
pub(crate) struct RegisteredRank {
    pub(crate) rank: WorkerRank,
    pub(crate) slot: Slot,
    pub(crate) generation: Generation,
    /// Cell in which the shard publishes the number of blocks on the rank.
    pub(crate) holdings: Arc<Holdings>,
    /// State of the rank's event source.
    pub(crate) source: Arc<SourceCell>,
    /// Number of KV blocks of the rank, if known.
    pub(crate) capacity_blocks: Option<u32>,
}

impl RegisteredRank {
    pub(crate) fn of(entry: &RankEntry, traits: &RankTraits) -> Self {
        let RankEntry { rank, slot, generation, .. } = *entry;
        let (holdings, source) = (Arc::clone(&entry.holdings), Arc::clone(&entry.source));
        Self { rank, slot, generation, holdings, source, capacity_blocks: traits.total_kv_blocks }
    }
}

/// Continuation of an overlap query, with the prompt's block hashes.
pub(crate) trait OverlapQuery: Continuation<RankOverlap> {
    fn hashes(&self) -> &Arc<[BlockHash]>;
}

/// Creates one more token of an overlap query, for a shard.
pub(crate) fn overlap_token<C: OverlapQuery + 'static>(
    query: &ReplyToken<RankOverlap, C>,
) -> ReplyToken<RankOverlap, dyn OverlapQuery> {
    query.fork_unsized(|join| -> Arc<Join<RankOverlap, dyn OverlapQuery>> { join })
}

/// Dependencies of a shard.
pub(crate) struct RadixDependencies<'a> {
    pub(crate) config: &'a RouterConfig,
    pub(crate) clock: Clock,
    pub(crate) pool: &'a Pool,
    pub(crate) degraded: DegradedSources,
    /// Incarnation of the present shard, and of this one.
    pub(crate) incarnation: (Arc<CurrentIncarnation>, u32),
    /// Called when the contents of a cold rank begin to arrive again.
    pub(crate) on_resync: Box<dyn Fn(WorkerRank) + Send>,
}

/// One shard of the index.
pub(crate) struct Radix {
    index: Index,
    /// By slot: the published holdings of a rank and the state of its source.
    registered: Vec<Option<(Arc<Holdings>, Arc<SourceCell>)>>,
    /// Ranks of the router with a degraded event stream.
    degraded: DegradedSources,
    found: Overlaps,
    /// Present if decisions create speculative entries.
    speculative: Option<SpeculativeEntries>,
    /// Ranks whose contents must be sent again.
    cold: BTreeSet<WorkerRank>,
    clock: Clock,
    on_resync: Box<dyn Fn(WorkerRank) + Send>,
    /// Incarnation of the present shard, and of this one.
    incarnation: (Arc<CurrentIncarnation>, u32),
    counters: EventCounters,
    /// `None` without a byte budget.
    gauges: Option<BudgetGauges>,
}

/// Replies delivered after the shard's strand is released.
pub(crate) enum RadixReply {
    Overlap(#[expect(dead_code, reason = "dropping it is the reply")] ReplyToken<RankOverlap, dyn OverlapQuery>),
    Flushed(oneshot::Sender<()>),
    Dumped(oneshot::Sender<Vec<RouterEvent>>, Vec<RouterEvent>),
    #[cfg(feature = "zmq")]
    Digest(oneshot::Sender<Option<BlockDigest>>, Option<BlockDigest>),
    #[cfg(feature = "zmq")]
    Names(oneshot::Sender<Option<Vec<BlockName>>>, Option<Vec<BlockName>>),
    #[cfg(feature = "zmq")]
    DumpedRank(oneshot::Sender<Option<RankDump>>, Option<RankDump>),
    #[cfg(feature = "replicas")]
    TakenRouted(oneshot::Sender<(Vec<RoutedPrompt>, u64)>, (Vec<RoutedPrompt>, u64)),
}

impl Radix {
    /// A shard with its registered ranks and empty contents. After a loss, all ranks are cold.
    pub(crate) fn new(
        dependencies: RadixDependencies<'_>,
        shard: usize,
        registered: impl IntoIterator<Item = RegisteredRank>,
        cold: BTreeSet<WorkerRank>,
    ) -> Self {
        let RadixDependencies { config, clock, pool, degraded, incarnation, on_resync } = dependencies;
        let (speculative, budget) =
            (SpeculativeEntries::of(config, shard, clock, pool), ShardBudget::of(config, shard));
        let (mut index, found, counters) = (Index::new(), Overlaps::default(), EventCounters::new(pool));
        index.set_budget(budget.bytes_max);
        let (known, gauges) = (Vec::new(), budget.gauges(pool));
        let mut radix = Self {
            index,
            registered: known,
            degraded,
            found,
            speculative,
            cold,
            clock,
            on_resync,
            incarnation,
            counters,
            gauges,
        };
        for registered_rank in registered {
            radix.on_register(registered_rank);
        }
        radix
    }

    fn on_register(&mut self, registered_rank: RegisteredRank) {
        let RegisteredRank { rank, slot, generation, holdings, source, capacity_blocks } = registered_rank;
        if let Some(speculative) = &mut self.speculative {
            speculative.register(rank, slot, generation, capacity_blocks);
        }
        if self.index.register(rank, slot, generation) {
            if holdings.held_blocks() > 0 && self.index.held_blocks_of(slot) == 0 {
                holdings.publish(0, self.clock.now()); // after a loss, the published value is outdated
            }
            if self.registered.len() <= slot.index() {
                self.registered.resize(slot.index() + 1, None);
            }
            self.registered[slot.index()] = Some((holdings, source));
            self.show_budget();
        }
    }

    fn on_routed(
        &mut self,
        place: (Slot, Generation),
        booking: Option<BookingId>,
        speculative_prompt: &SpeculativePrompt,
        is_remote: bool,
    ) {
        let Some(speculative) = &mut self.speculative else { return };
        let rank = speculative.routed(place, booking, speculative_prompt, &self.index);
        #[cfg(feature = "replicas")]
        if let Some(rank) = rank.filter(|_| !is_remote) {
            speculative.queue_routed(rank, speculative_prompt);
        }
        #[cfg(not(feature = "replicas"))]
        let _ = (rank, is_remote);
    }

    /// Ignores a rank that has been removed.
    fn on_recorded(&mut self, rank: WorkerRank, speculative_prompt: &SpeculativePrompt, is_remote: bool) {
        if let Some(slot) = self.index.slot_of(rank) {
            self.on_routed((slot, self.index.generation(slot)), None, speculative_prompt, is_remote);
        }
    }

    fn on_overlap(&mut self, token: ReplyToken<RankOverlap, dyn OverlapQuery>) -> RadixReply {
        self.index.overlaps(token.continuation().hashes(), &mut self.found);
        if let Some(speculative) = &mut self.speculative {
            speculative.merge_into(token.continuation().hashes(), &mut self.found);
        }
        if !self.found.hits().is_empty() {
            match self.degraded.load(Ordering::Relaxed) {
                0 if self.found.extensions().is_empty() => token.extend(self.found.hits().iter().map(device_overlap)),
                0 => token.extend(self.found.iter().map(rank_overlap)),
                _ => token.extend(self.found.iter().map(|found| self.as_trusted(rank_overlap(found)))),
            }
        }
        RadixReply::Overlap(token)
    }

    /// Scales an overlap by the weight of its stream state.
    fn as_trusted(&self, found: RankOverlap) -> RankOverlap {
        let Some(Some((_, source))) = self.registered.get(found.slot.index()) else { return found };
        let TierOverlap { device_blocks, host_pinned_blocks, disk_blocks, external_blocks } = found.overlap;
        let overlap = TierOverlap {
            device_blocks: source.credited(device_blocks),
            host_pinned_blocks: source.credited(host_pinned_blocks),
            disk_blocks: source.credited(disk_blocks),
            external_blocks: source.credited(external_blocks),
        };
        RankOverlap { overlap, ..found }
    }

    fn on_apply(&mut self, events: &[RouterEvent], only: Option<(Slot, Generation)>) {
        let is_there = |(slot, generation)| {
            let registered = events.first().and_then(|event| self.index.slot_of(event.rank));
            registered == Some(slot) && self.index.generation(slot) == generation
        };
        if !only.is_none_or(is_there) {
            self.counters.unknown_ranks.increment(events.len() as u64);
            return;
        }

        if let Some(speculative) = &mut self.speculative {
            speculative.expire();
            let events = if speculative.is_until_events() { events } else { &[] };
            for event in events {
                // `Cleared` for a rank without a reader means that the rank publishes no events any more.
                let slot = self.index.slot_of(event.rank);
                let registered_rank = slot.and_then(|slot| self.registered.get(slot.index())?.as_ref());
                let is_read = registered_rank.is_some_and(|(_, source)| source.state().is_some());
                speculative.set_publishes(event.rank, is_read || !matches!(event.data, KvEvent::Cleared));
            }
        }
        let mut applied = Applied::default();
        for (n, event) in events.iter().enumerate() {
            applied += self.index.apply(event);
            if let Some(speculative) = &mut self.speculative {
                speculative.observe(event, &self.index);
            }
            if events.get(n + 1).is_none_or(|next| next.rank != event.rank) {
                self.publish_holdings(event.rank);
            }
            if matches!(event.data, KvEvent::Cleared) && self.cold.remove(&event.rank) {
                // The events after a clear describe the complete contents, so the rank is no longer cold.
                (self.on_resync)(event.rank);
            }
        }
        self.counters.count(&applied);
        if let Some(speculative) = &mut self.speculative {
            speculative.count();
        }
        self.show_budget();
    }

    /// Whether a step hung and a successor has replaced this shard, which alone publishes from then on.
    fn is_replaced(&self) -> bool {
        let (current, own) = &self.incarnation;
        !current.is(*own)
    }

    fn show_budget(&mut self) {
        if self.is_replaced() {
            return;
        }
        if let (Some(gauges), Some(state)) = (&mut self.gauges, self.index.budget_state()) {
            gauges.show(state);
        }
    }

    fn publish_holdings(&self, rank: WorkerRank) {
        if self.is_replaced() {
            return;
        }
        let Some(slot) = self.index.slot_of(rank) else { return };
        if let Some(Some((holdings, _))) = self.registered.get(slot.index()) {
            holdings.publish(self.index.held_blocks_of(slot), self.clock.now());
        }
    }

    #[cfg(feature = "zmq")]
    fn dump_rank(&self, rank: WorkerRank, generation: Generation) -> Option<RankDump> {
        let is_known = self.is_there(rank, generation) && !self.cold.contains(&rank);
        if is_known { self.index.dump_rank(rank) } else { None }
    }

    /// Whether the shard has the events of the rank without a loss, and evicted none of its blocks.
    #[cfg(feature = "zmq")]
    fn is_whole(&self, rank: WorkerRank, generation: Generation) -> bool {
        let evicted_blocks = self.index.slot_of(rank).map(|slot| self.index.evicted_blocks_of(slot));
        self.is_there(rank, generation) && !self.cold.contains(&rank) && evicted_blocks == Some(0)
    }

    #[cfg(feature = "zmq")]
    fn is_there(&self, rank: WorkerRank, generation: Generation) -> bool {
        self.index.slot_of(rank).is_some_and(|slot| self.index.generation(slot) == generation)
    }

    fn on_remove(&mut self, rank: WorkerRank) {
        self.index.remove_rank(rank);
        if let Some(speculative) = &mut self.speculative {
            speculative.remove(rank);
        }
        self.cold.remove(&rank);
        self.show_budget();
    }
}

/// Overlap of a rank without blocks in lower tiers.
fn device_overlap(hit: &Hit) -> RankOverlap {
    let overlap = TierOverlap { device_blocks: hit.device_blocks, ..TierOverlap::default() };
    RankOverlap { slot: hit.slot, generation: hit.generation, overlap }
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

impl ActorState for Radix {
    type Msg = RadixMsg;
    type Deferred = RadixReply;

    fn step(&mut self, msg: RadixMsg) -> Option<RadixReply> {
        match msg {
            RadixMsg::Overlap(token) => return Some(self.on_overlap(token)),
            RadixMsg::Apply { events, only, permit } => {
                self.on_apply(&events, only);
                drop(permit);
            }
            RadixMsg::Register(registered_rank) => self.on_register(registered_rank),
            RadixMsg::Remove { rank } => self.on_remove(rank),
            RadixMsg::Routed { slot, generation, booking, speculative_prompt } => {
                self.on_routed((slot, generation), booking, &speculative_prompt, false);
            }
            RadixMsg::Recorded { rank, speculative_prompt, is_remote, permit } => {
                self.on_recorded(rank, &speculative_prompt, is_remote);
                drop(permit);
            }
            #[cfg(feature = "replicas")]
            RadixMsg::TakeRouted { blocks_max, reply } => {
                let taken = self.speculative.as_mut().map(|speculative| speculative.take_routed(blocks_max));
                return Some(RadixReply::TakenRouted(reply, taken.unwrap_or_default()));
            }
            RadixMsg::Released { booking, output_blocks } => {
                if let Some(speculative) = &mut self.speculative {
                    speculative.released(booking, output_blocks);
                }
            }
            RadixMsg::Flush(answer) => return Some(RadixReply::Flushed(answer)),
            RadixMsg::Dump { rank, reply } => {
                let dump = self.index.dump_rank(rank).unwrap_or_default();
                return Some(RadixReply::Dumped(reply, dump.events));
            }
            #[cfg(feature = "zmq")]
            RadixMsg::DumpRank { rank, generation, reply } => {
                return Some(RadixReply::DumpedRank(reply, self.dump_rank(rank, generation)));
            }
            #[cfg(feature = "zmq")]
            RadixMsg::Digest { rank, generation, reply } => {
                let digest = self.is_whole(rank, generation).then(|| self.index.digest_of(rank)).flatten();
                return Some(RadixReply::Digest(reply, digest));
            }
            #[cfg(feature = "zmq")]
            RadixMsg::Names { rank, generation, reply } => {
                let names = self.is_whole(rank, generation).then(|| self.index.names_of(rank));
                return Some(RadixReply::Names(reply, names));
            }
            #[cfg(feature = "zmq")]
            RadixMsg::Forget { rank, generation, names } => {
                if self.is_there(rank, generation) {
                    self.index.forget(rank, &names);
                    self.publish_holdings(rank);
                }
            }
            #[cfg(feature = "zmq")]
            RadixMsg::RestoreEvicted { rank, generation, blocks } => {
                if self.is_there(rank, generation) {
                    self.index.restore_evicted(rank, blocks);
                }
            }
            #[cfg(feature = "faults")]
            RadixMsg::Fault(injected) => injected.apply(),
        }
        None
    }
}

impl DeferredReply for RadixReply {
    fn deliver(self) {
        match self {
            Self::Flushed(answer) => drop(answer.send(())),
            Self::Dumped(answer, events) => drop(answer.send(events)),
            #[cfg(feature = "zmq")]
            Self::DumpedRank(reply, events) => drop(reply.send(events)),
            #[cfg(feature = "zmq")]
            Self::Digest(reply, digest) => drop(reply.send(digest)),
            #[cfg(feature = "zmq")]
            Self::Names(reply, names) => drop(reply.send(names)),
            #[cfg(feature = "replicas")]
            Self::TakenRouted(reply, taken) => drop(reply.send(taken)),
            Self::Overlap(_) => {}
        }
    }
}

/// Metric handles, cached so that no message resolves one.
struct EventCounters {
    stored: metrics::Counter,
    duplicates: metrics::Counter,
    copies: metrics::Counter,
    waiting: metrics::Counter,
    removed: metrics::Counter,
    unknown_removals: metrics::Counter,
    evicted_removals: metrics::Counter,
    unknown_parents: metrics::Counter,
    unknown_ranks: metrics::Counter,
}

impl EventCounters {
    fn new(pool: &Pool) -> Self {
        let blocks = |result| pool.counter("pointsman_kv_event_blocks_total", &[("result", result)]);
        let refused = |reason| pool.counter("pointsman_kv_events_refused_total", &[("reason", reason)]);
        Self {
            stored: blocks("stored"),
            duplicates: blocks("duplicate"),
            copies: blocks("copy"),
            waiting: blocks("waiting"),
            removed: blocks("removed"),
            unknown_removals: blocks("unknown_removal"),
            evicted_removals: blocks("evicted_removal"),
            unknown_parents: refused("unknown_parent"),
            unknown_ranks: refused("unknown_rank"),
        }
    }

    fn count(&self, applied: &Applied) {
        let counts = [
            (&self.stored, applied.stored + applied.adopted),
            (&self.duplicates, applied.duplicates),
            (&self.copies, applied.copies),
            (&self.waiting, applied.waiting),
            (&self.removed, applied.removed),
            (&self.unknown_removals, applied.unknown_removals),
            (&self.evicted_removals, applied.evicted_removals),
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

/// Byte budget of a shard's index.
pub(crate) struct ShardBudget {
    shard: usize,
    bytes_max: Option<u64>,
}

impl ShardBudget {
    /// An equal share of the budget of all shards.
    pub(crate) fn of(config: &RouterConfig, shard: usize) -> Self {
        let shards = u64::from(config.index.shards.max(1));
        Self { shard, bytes_max: config.index.bytes_max.map(|bytes| bytes / shards) }
    }

    fn gauges(&self, pool: &Pool) -> Option<BudgetGauges> {
        self.bytes_max?;
        let shard = self.shard.to_string();
        Some(BudgetGauges {
            bytes: pool.gauge("pointsman_index_bytes", &[("shard", &shard)]),
            evicted_blocks: pool.counter("pointsman_index_evicted_blocks_total", &[("shard", &shard)]),
            shown: 0,
        })
    }
}

/// Gauges of a shard with a byte budget.
struct BudgetGauges {
    bytes: metrics::Gauge,
    evicted_blocks: metrics::Counter,
    /// Evicted blocks counted so far.
    shown: u64,
}

impl BudgetGauges {
    fn show(&mut self, state: BudgetState) {
        self.bytes.set(state.bytes as f64);
        if state.evicted_blocks > self.shown {
            self.evicted_blocks.increment(state.evicted_blocks - self.shown);
            self.shown = state.evicted_blocks;
        }
    }
}
