//! Shell of an index shard: the prefix index of some ranks, and the speculative entries beside it.
//!
//! Events of a rank apply in the order of their sending. A query includes every event accepted and every decision reported
//! before it. After a restart the shard has its ranks without their contents: each rank is cold until its contents are
//! sent again, beginning with a `Cleared` event.
//!
//! Expired speculative entries are dropped at the next query, decision or event: there is no timer. Output blocks are
//! counted at the end of a booking, one message per booking instead of one per block, so a modelled cache appears emptier
//! than it is, by the output in progress.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{CurrentIncarnation, Defect};
use crate::config::{RouterConfig, SpeculativeConfig};
use crate::index::{Applied, BlockDigest, Extension, Hit, Holdings, Index, Overlaps, RankDump};
use crate::ingest::BlockName;
use crate::predict::{SpeculationModel, SpeculativePrompt, SpeculativePrompts};
use crate::protocol::{
    BlockHash, BookingId, Generation, KvEvent, RouterEvent, Slot, TimeSource, Timestamp, WorkerRank,
};
#[cfg(feature = "replicas")]
use crate::replica::{RoutedPrompt, RoutedPrompts};
use crate::select::{RankOverlap, TierOverlap};

/// Maximum number of blocks of decisions to send.
#[cfg(feature = "replicas")]
const ROUTED_QUEUE_BLOCKS_MAX: usize = 65_536;

/// Shard of a rank: a pure function, so every sender computes the same shard.
pub fn shard_of(rank: WorkerRank, shards: usize) -> usize {
    // Distributes the ranks of one worker, and workers with consecutive ids, round-robin over the shards.
    let mixed = rank.worker.0.wrapping_add(u64::from(rank.rank));
    usize::try_from(mixed % shards.max(1) as u64).unwrap_or(0)
}

/// Messages to an index shard: `Q` is an overlap query, `P` a permit, and `S` the event source of a rank.
pub enum ShardMsg<Q, P, S> {
    /// Overlap query.
    Overlap(Q),
    /// Apply these events, all for ranks of this shard.
    Apply {
        /// The events.
        events: Vec<RouterEvent>,
        /// Set if all events belong to one rank: its slot and generation. Events of an earlier generation are dropped.
        only: Option<(Slot, Generation)>,
        /// Permit of the shard's gate.
        permit: P,
    },
    /// Add a rank.
    Register(RegisteredRank<S>),
    /// Remove a rank with its contents.
    Remove(WorkerRank),
    /// The scheduler has routed this prompt to this rank.
    Routed {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Booking of the prompt.
        booking: Option<BookingId>,
        /// The prompt.
        speculative_prompt: SpeculativePrompt,
    },
    /// The embedder or another replica has routed this prompt to this rank.
    Recorded {
        /// The rank.
        rank: WorkerRank,
        /// The prompt.
        speculative_prompt: SpeculativePrompt,
        /// Whether another replica has decided.
        is_remote: bool,
        /// Permit of the shard's gate.
        permit: P,
    },
    /// An engine has taken the first blocks of a prompt from its cache.
    Proven {
        /// The rank.
        rank: WorkerRank,
        /// Its generation. Messages of an earlier one are dropped.
        generation: Generation,
        /// The prompt.
        prompt: Arc<[BlockHash]>,
        /// Number of blocks taken from the cache.
        blocks: u32,
        /// Whether events of the rank are lost for good.
        is_cold: bool,
        /// Permit of the shard's gate.
        permit: P,
    },
    /// A booking in a modelled cache has ended.
    Released {
        /// The booking.
        booking: BookingId,
        /// Blocks of its output.
        output_blocks: u32,
    },
    /// The engine no longer has these blocks of the rank.
    Forget {
        /// The rank.
        rank: WorkerRank,
        /// Its generation. Messages of an earlier one are dropped.
        generation: Generation,
        /// The blocks.
        names: Vec<BlockName>,
    },
    /// The contents of the rank are restored from an index with a budget, which had evicted blocks of them.
    RestoreEvicted {
        /// The rank.
        rank: WorkerRank,
        /// Its generation. Messages of an earlier one are dropped.
        generation: Generation,
        /// Number of evicted blocks.
        blocks: u64,
    },
}

/// An overlap query, with the right to respond.
pub trait OverlapQueryToken {
    /// Block hashes of the prompt.
    fn hashes(&self) -> &[BlockHash];
    /// Number of leading blocks that an engine can take from its cache; it computes at least the last token.
    fn reusable_blocks(&self) -> u32;
    /// Adds overlaps of the prompt with ranks.
    fn extend(&self, overlaps: impl Iterator<Item = RankOverlap>);
}

/// State of the event source of a rank.
pub trait SourceState {
    /// The part of an overlap that the state of the stream permits to count.
    fn credited(&self, blocks: u32) -> u32;
    /// Whether the router reads the events of the rank itself.
    fn is_read(&self) -> bool;
}

/// Registration of a rank at its shard.
pub struct RegisteredRank<S> {
    /// The rank.
    pub rank: WorkerRank,
    /// Its slot.
    pub slot: Slot,
    /// Generation of the slot.
    pub generation: Generation,
    /// Cell in which the shard publishes the number of blocks on the rank.
    pub holdings: Arc<Holdings>,
    /// State of the rank's event source.
    pub source: S,
    /// Number of KV blocks of the rank, if known.
    pub capacity_blocks: Option<u32>,
}

/// Effect of a step.
pub enum ShardEffect<Q> {
    /// The query has its overlaps; dropping the token completes it.
    Replied(Q),
    /// Events were applied.
    Applied(Applied),
    /// Events of a rank that is not registered were dropped: their number.
    UnknownRank(u64),
    /// The contents of a cold rank have begun to arrive again.
    Resynced(WorkerRank),
}

/// Shared cells of a shard.
pub struct ShardCells {
    /// Number of ranks of the router with a degraded event stream.
    pub degraded: Arc<AtomicUsize>,
    /// Incarnation of the present shard, and of this one.
    pub incarnation: (Arc<CurrentIncarnation>, u32),
}

/// One shard of the index. See the module documentation.
pub struct ShardShell<S> {
    index: Index,
    /// By slot: the published holdings of a rank and the state of its source.
    registered: Vec<Option<(Arc<Holdings>, S)>>,
    cells: ShardCells,
    found: Overlaps,
    /// Present if decisions create speculative entries.
    speculative: Option<SpeculativePrompts>,
    /// Own decisions to send to other replicas, once these exist.
    #[cfg(feature = "replicas")]
    routed: Option<RoutedPrompts>,
    /// Ranks whose contents must be sent again.
    cold: BTreeSet<WorkerRank>,
}

impl<S: SourceState> ShardShell<S> {
    /// A shard with its registered ranks and empty contents. After a loss, all ranks are cold. Byte budget and speculative
    /// entries are divided evenly over the shards, like the ranks.
    pub fn new(
        config: &RouterConfig,
        cells: ShardCells,
        registered: impl IntoIterator<Item = RegisteredRank<S>>,
        cold: BTreeSet<WorkerRank>,
        time: &impl TimeSource,
    ) -> Self {
        let shards = config.index.shards.max(1);
        let blocks_max = u64::from(SpeculativeConfig::BLOCKS_MAX / shards).max(1);
        let mut index = Index::new();
        index.set_budget(config.index.bytes_max.map(|bytes| bytes / u64::from(shards)));
        let mut shell = Self {
            index,
            registered: Vec::new(),
            cells,
            found: Overlaps::default(),
            speculative: SpeculationModel::of(config).map(|model| SpeculativePrompts::new(model, blocks_max)),
            #[cfg(feature = "replicas")]
            routed: None,
            cold,
        };
        for rank in registered {
            shell.on_register(rank, time);
        }
        shell
    }

    /// Handles one message, and adds its effects to `effects`.
    pub fn step<Q: OverlapQueryToken, P>(
        &mut self,
        msg: ShardMsg<Q, P, S>,
        time: &impl TimeSource,
        effects: &mut Vec<ShardEffect<Q>>,
    ) {
        match msg {
            ShardMsg::Overlap(query) => {
                self.on_overlap(&query, time);
                effects.push(ShardEffect::Replied(query));
            }
            ShardMsg::Apply { events, only, permit } => {
                self.on_apply(&events, only, time, effects);
                drop(permit);
            }
            ShardMsg::Register(rank) => self.on_register(rank, time),
            ShardMsg::Remove(rank) => self.on_remove(rank),
            ShardMsg::Routed { slot, generation, booking, speculative_prompt } => {
                self.on_routed((slot, generation), booking, &speculative_prompt, false, time.now());
            }
            ShardMsg::Recorded { rank, speculative_prompt, is_remote, permit } => {
                // A removed rank is ignored.
                if let Some(slot) = self.index.slot_of(rank) {
                    let place = (slot, self.index.generation(slot));
                    self.on_routed(place, None, &speculative_prompt, is_remote, time.now());
                }
                drop(permit);
            }
            ShardMsg::Proven { rank, generation, prompt, blocks, is_cold, permit } => {
                // The events of a cold shard are about to be replayed.
                if self.is_there(rank, generation) && !self.is_cold(rank) {
                    let now = time.now();
                    effects.push(ShardEffect::Applied(self.index.prove(rank, &prompt, blocks, is_cold, now)));
                    self.publish_holdings(rank, now);
                }
                drop(permit);
            }
            ShardMsg::Released { booking, output_blocks } => {
                if let Some(speculative) = &mut self.speculative {
                    speculative.output_blocks(booking, output_blocks);
                    speculative.released(booking, time.now());
                }
            }
            ShardMsg::Forget { rank, generation, names } => {
                if self.is_there(rank, generation) {
                    self.index.forget(rank, &names);
                    self.publish_holdings(rank, time.now());
                }
            }
            ShardMsg::RestoreEvicted { rank, generation, blocks } => {
                if self.is_there(rank, generation) {
                    self.index.restore_evicted(rank, blocks);
                }
            }
        }
    }

    fn on_register(&mut self, registered: RegisteredRank<S>, time: &impl TimeSource) {
        let RegisteredRank { rank, slot, generation, holdings, source, capacity_blocks } = registered;
        if Defect::RegistrationIgnored.is_planted() {
            return;
        }
        if let Some(speculative) = &mut self.speculative {
            speculative.register(rank, slot, generation, capacity_blocks);
        }
        if self.index.register(rank, slot, generation) {
            self.index.set_pool(rank, capacity_blocks);
            if holdings.held_blocks() > 0 && self.index.held_blocks_of(slot) == 0 {
                holdings.publish(0, time.now()); // after a loss, the published value is outdated
            }
            if self.registered.len() <= slot.index() {
                self.registered.resize_with(slot.index() + 1, || None);
            }
            self.registered[slot.index()] = Some((holdings, source));
        }
    }

    fn on_routed(
        &mut self,
        (slot, generation): (Slot, Generation),
        booking: Option<BookingId>,
        prompt: &SpeculativePrompt,
        is_remote: bool,
        now: Timestamp,
    ) {
        let Some(speculative) = &mut self.speculative else { return };
        let rank = speculative.routed(slot, generation, booking, prompt, &self.index, now).filter(|_| !is_remote);
        #[cfg(feature = "replicas")]
        if let Some((rank, routed)) = rank.zip(self.routed.as_mut()) {
            routed.push(RoutedPrompt { rank, hashes: Arc::clone(&prompt.hashes) });
        }
        #[cfg(not(feature = "replicas"))]
        let _ = rank;
    }

    fn on_overlap(&mut self, query: &impl OverlapQueryToken, time: &impl TimeSource) {
        if self.index.has_proven() {
            self.index.expire_proven(time.now());
        }
        self.index.reusable_overlaps(query.hashes(), query.reusable_blocks(), &mut self.found);
        if let Some(speculative) = &mut self.speculative {
            speculative.expire(time.now());
            speculative.merge_into(query.hashes(), &mut self.found);
        }
        if !self.found.hits().is_empty() {
            match self.cells.degraded.load(Ordering::Relaxed) {
                0 if self.found.extensions().is_empty() => query.extend(self.found.hits().iter().map(device_overlap)),
                0 => query.extend(self.found.iter().map(rank_overlap)),
                _ => query.extend(self.found.iter().map(|found| self.as_trusted(rank_overlap(found)))),
            }
        }
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

    fn on_apply<Q>(
        &mut self,
        events: &[RouterEvent],
        only: Option<(Slot, Generation)>,
        time: &impl TimeSource,
        effects: &mut Vec<ShardEffect<Q>>,
    ) {
        let is_there = |(slot, generation)| {
            let registered = events.first().and_then(|event| self.index.slot_of(event.rank));
            registered == Some(slot) && self.index.generation(slot) == generation
        };
        if !only.is_none_or(is_there) {
            return effects.push(ShardEffect::UnknownRank(events.len() as u64));
        }
        if let Some(speculative) = &mut self.speculative {
            speculative.expire(time.now());
            let events = if speculative.is_until_events() { events } else { &[] };
            for event in events {
                // `Cleared` for a rank without a reader means that the rank publishes no events any more.
                let slot = self.index.slot_of(event.rank);
                let registered = slot.and_then(|slot| self.registered.get(slot.index())?.as_ref());
                let is_read = registered.is_some_and(|(_, source)| source.is_read());
                speculative.set_publishes(event.rank, is_read || !matches!(event.data, KvEvent::Cleared));
            }
        }
        let mut applied = Applied::default();
        for (n, event) in events.iter().enumerate() {
            if Defect::RemovalIgnored.is_planted() && matches!(event.data, KvEvent::Removed { .. }) {
                continue;
            }
            applied += self.index.apply(event);
            if let Some(speculative) = &mut self.speculative {
                speculative.observe(event, &self.index);
                if matches!(event.data, KvEvent::Cleared) {
                    speculative.clear(event.rank);
                }
            }
            if events.get(n + 1).is_none_or(|next| next.rank != event.rank) {
                let now = time.now();
                self.index.expire_proven(now);
                self.publish_holdings(event.rank, now);
            }
            if matches!(event.data, KvEvent::Cleared)
                && !Defect::ColdForever.is_planted()
                && self.cold.remove(&event.rank)
            {
                // The events after a clear describe the complete contents, so the rank is no longer cold.
                effects.push(ShardEffect::Resynced(event.rank));
            }
        }
        effects.push(ShardEffect::Applied(applied));
    }

    fn publish_holdings(&self, rank: WorkerRank, now: Timestamp) {
        if self.is_replaced() {
            return;
        }
        let Some(slot) = self.index.slot_of(rank) else { return };
        if let Some(Some((holdings, _))) = self.registered.get(slot.index()) {
            let held_blocks = self.index.held_blocks_of(slot);
            // A clear by an operator does not mean that the rank publishes events.
            if held_blocks > 0 || holdings.changed_at().is_some() {
                holdings.publish(held_blocks, now);
            }
        }
    }

    fn on_remove(&mut self, rank: WorkerRank) {
        if Defect::RankKept.is_planted() {
            return;
        }
        self.index.remove_rank(rank);
        if let Some(speculative) = &mut self.speculative {
            speculative.remove_rank(rank);
        }
        self.cold.remove(&rank);
    }

    /// Whether a step hung and a successor has replaced this shard, which alone publishes from then on.
    pub fn is_replaced(&self) -> bool {
        let (current, own) = &self.cells.incarnation;
        !current.is(*own)
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The speculative entries, if decisions create them.
    pub fn speculative(&self) -> Option<&SpeculativePrompts> {
        self.speculative.as_ref()
    }

    /// Whether the contents of a rank must be sent again.
    pub fn is_cold(&self, rank: WorkerRank) -> bool {
        self.cold.contains(&rank)
    }

    /// The contents of a rank, as events that rebuild them. A step for a whole shard could last too long.
    pub fn dump(&self, rank: WorkerRank) -> Vec<RouterEvent> {
        self.index.dump_rank(rank).unwrap_or_default().events
    }

    /// The contents of a rank, including all earlier events; `None` if they were lost or the generation has ended.
    pub fn dump_rank(&self, rank: WorkerRank, generation: Generation) -> Option<RankDump> {
        let is_known = self.is_there(rank, generation) && (!self.is_cold(rank) || Defect::ColdRankDumped.is_planted());
        if is_known { self.index.dump_rank(rank) } else { None }
    }

    /// The digest of a rank after all earlier events; `None` if its contents are incomplete or the generation has ended.
    pub fn digest(&self, rank: WorkerRank, generation: Generation) -> Option<BlockDigest> {
        self.is_whole(rank, generation).then(|| self.index.digest_of(rank)).flatten()
    }

    /// The names in the digest; `None` in the same cases.
    pub fn names(&self, rank: WorkerRank, generation: Generation) -> Option<Vec<BlockName>> {
        self.is_whole(rank, generation).then(|| self.index.names_of(rank))
    }

    /// Own decisions to send to the other replicas, at most `blocks_max` blocks, and the number of those dropped before.
    #[cfg(feature = "replicas")]
    pub fn take_routed(&mut self, blocks_max: usize) -> (Vec<RoutedPrompt>, u64) {
        if self.speculative.is_none() {
            return (Vec::new(), 0);
        }
        let routed = self.routed.get_or_insert_with(|| RoutedPrompts::new(ROUTED_QUEUE_BLOCKS_MAX));
        (routed.take(blocks_max), routed.take_dropped())
    }

    /// Whether the shard has the events of the rank without a loss, and evicted none of its blocks.
    fn is_whole(&self, rank: WorkerRank, generation: Generation) -> bool {
        let evicted_blocks = self.index.slot_of(rank).map(|slot| self.index.evicted_blocks_of(slot));
        self.is_there(rank, generation) && !self.is_cold(rank) && evicted_blocks == Some(0)
    }

    fn is_there(&self, rank: WorkerRank, generation: Generation) -> bool {
        self.index.slot_of(rank).is_some_and(|slot| self.index.generation(slot) == generation)
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
