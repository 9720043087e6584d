//! Speculative entries: expected contents of ranks' caches, derived from routing decisions.
//!
//! Holds one shard's speculative entries. For engines without KV events they are the only information about caches;
//! beside events they cover the interval between a routing decision and the engine's events. One structure implements
//! four models ([`SpeculationModel`]):
//!
//! - **Time to live.** A prompt counts as cached on its rank until a fixed time after it was last routed there. This
//!   applies to each prefix: a longer prompt keeps its beginning alive.
//! - **Modelled LRU.** A rank holds blocks up to its capacity. A booking holds the blocks of its prompt and private
//!   blocks, which match no other prompt: the partial last block and the output. After the release of the booking the
//!   blocks stay until room is needed; the earliest released are evicted first, within a prompt the deepest first.
//!   Blocks in use stay even over capacity.
//! - **Until events.** Time to live for ranks that publish no events; no speculative entries for the others.
//! - **Beside events.** A routed prompt counts as cached until the engine's own events report its blocks (*confirmed*),
//!   remove blocks reported before (*retracted*), or the time to live ends: then the missing blocks were *wrong*.
//!
//! Speculative entries have no holes: a rank with an entry for a block has entries for all earlier blocks. Each
//! speculative block is counted once in [`SpeculationCounts`], when the last prompt that needs it is removed. No event,
//! decision or release is an error: unknown ranks, generations and bookings are ignored.
//!
//! Cost per routed prompt: its comparison with the existing entries and one step per run, none per block. An event
//! checks each entry of its rank only; with more than 64 entries, only some events do. The module has no clock;
//! [`SpeculativePrompts::expire`] removes expired entries.
//!
//! Limits: the model of an engine is inexact. The engine's prefix cache may evict by other rules, and output blocks
//! never match, although the next turn of a conversation starts with them.

mod events;
mod ranks;
mod trie;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::config::{EventMode, RouterConfig, SpeculativeModel};
use crate::hashing::HashedPrompt;
use crate::index::depth::Depths;
use crate::index::{Index, Overlaps};
use crate::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp, WorkerRank};
use ranks::{PredictorRank, PredictorRanks};
use trie::{LruEntry, Tries};

/// Time to live of speculative entries, and the events that end them earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeculationModel {
    /// A routed prompt counts as cached for a fixed time after it was last routed.
    Ttl(Duration),
    /// Ranks hold blocks up to their capacity and evict the least recently used. The time is for ranks of unknown capacity.
    Lru(Duration),
    /// On ranks without events, a routed prompt counts as cached for a fixed time after it was last routed. On other
    /// ranks only the events count.
    UntilEvents(Duration),
    /// A routed prompt counts as cached until events report it, at most for the time to live.
    BesideEvents(Duration),
}

impl SpeculationModel {
    /// The model for a configuration; `None` if only events or load decide.
    ///
    /// ```
    /// use pointsman::RouterConfig;
    /// use pointsman::internals::predict::SpeculationModel;
    ///
    /// let mut config = RouterConfig::default();
    /// assert_eq!(SpeculationModel::of(&config), None);
    /// config.events.mode = pointsman::config::EventMode::Off;
    /// assert!(matches!(SpeculationModel::of(&config), Some(SpeculationModel::Ttl(_))));
    /// ```
    #[must_use]
    pub fn of(config: &RouterConfig) -> Option<Self> {
        if !config.has_index() {
            return None;
        }
        let ttl = Duration::from_millis(config.index.speculative.ttl_ms);
        match (config.events.mode, config.index.speculative.model) {
            (EventMode::On, _) => config
                .index
                .speculative
                .with_events_ttl_ms
                .map(|ttl_ms| Self::BesideEvents(Duration::from_millis(ttl_ms))),
            (EventMode::Auto, _) => Some(Self::UntilEvents(ttl)),
            (EventMode::Off, SpeculativeModel::Ttl) => Some(Self::Ttl(ttl)),
            (EventMode::Off, SpeculativeModel::Lru) => Some(Self::Lru(ttl)),
        }
    }

    fn ttl(self) -> Duration {
        match self {
            Self::Ttl(ttl) | Self::UntilEvents(ttl) | Self::BesideEvents(ttl) | Self::Lru(ttl) => ttl,
        }
    }
}

/// Expected effect of a routed prompt on its rank's cache.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::hashing::{HashScheme, HashedPrompt};
/// use pointsman::internals::hashing::{BlockHasher, MmBlocks};
/// use pointsman::internals::predict::SpeculativePrompt;
///
/// let block_size = NonZeroU32::new(4).expect("not zero");
/// let hasher = BlockHasher::new(HashScheme::new(block_size));
/// let prompt = HashedPrompt::from_tokens(&hasher, &[1, 2, 3, 4, 5, 6], &MmBlocks::NONE);
/// let speculative_prompt = SpeculativePrompt::of(&prompt, block_size.get());
/// assert_eq!((speculative_prompt.hashes.len(), speculative_prompt.private_blocks), (1, 1));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeculativePrompt {
    /// Complete blocks of the prompt.
    pub hashes: Arc<[BlockHash]>,
    /// Additional blocks that match no other prompt.
    pub private_blocks: u32,
}

impl SpeculativePrompt {
    /// The entry of a prompt in blocks of `block_size` tokens; blocks not covered by its hashes are private.
    #[must_use]
    pub fn of(prompt: &HashedPrompt, block_size: u32) -> Self {
        let blocks = prompt.prompt_tokens().div_ceil(block_size.max(1) as usize);
        let private_blocks = blocks.saturating_sub(prompt.block_hashes().len());
        let private_blocks = u32::try_from(private_blocks).unwrap_or(u32::MAX);
        Self { hashes: Arc::clone(prompt.block_hashes()), private_blocks }
    }
}

/// Outcomes of speculative blocks, each counted once per rank. Blocks that the engine had reported before are not
/// speculative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeculationCounts {
    /// Speculative blocks created.
    pub speculated: u64,
    /// Reported by the engine.
    pub confirmed: u64,
    /// Beside events: not reported in time.
    pub wrong: u64,
    /// Removed by the engine after a report, or the rank was cleared or removed.
    pub retracted: u64,
    /// Evicted from the modelled cache, or to respect the limit of all entries.
    pub evicted: u64,
    /// Without events: not routed again in time.
    pub expired: u64,
}

/// The speculative entries of a shard. See the module documentation.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::index::{Index, Overlaps};
/// use pointsman::internals::predict::{SpeculationModel, SpeculativePrompt, SpeculativePrompts};
/// use pointsman::internals::protocol::{Generation, Slot};
/// use pointsman::protocol::{BlockHash, Timestamp, WorkerId, WorkerRank};
///
/// let mut predictions = SpeculativePrompts::new(SpeculationModel::Ttl(Duration::from_secs(120)), 1 << 20);
/// predictions.register(WorkerRank::new(WorkerId(7), 0), Slot(0), Generation(1), None);
/// let index = Index::new();
/// let start = Timestamp::default();
/// let speculative_prompt = SpeculativePrompt { hashes: [1, 2, 3].map(BlockHash).into(), private_blocks: 1 };
/// predictions.routed(Slot(0), Generation(1), None, &speculative_prompt, &index, start);
///
/// let mut overlaps = Overlaps::default();
/// index.overlaps(&[BlockHash(1), BlockHash(2)], &mut overlaps);
/// predictions.merge_into(&[BlockHash(1), BlockHash(2)], &mut overlaps);
/// assert_eq!(overlaps.hits()[0].device_blocks, 2);
/// predictions.expire(start + Duration::from_secs(120));
/// assert_eq!(predictions.speculative_blocks(), 0);
/// ```
#[derive(Debug)]
pub struct SpeculativePrompts {
    kind: SpeculationModel,
    blocks_max: u64,
    ranks: PredictorRanks,
    tries: Tries,
    depths: Depths,
    /// Ends of remembered prompts on ranks with a time to live, oldest first.
    aging: BTreeMap<u64, u32>,
    /// Ends of remembered prompts on ranks with a capacity, oldest first.
    capped: BTreeMap<u64, u32>,
    /// Unreleased bookings.
    claims: BTreeMap<BookingId, Claim>,
    /// Number of LRU entries created so far.
    stamps: u64,
    /// Sum of the blocks of all remembered prompts, shared blocks counted repeatedly.
    named: u64,
    /// Number of distinct pairs of a rank and a block.
    speculative: u64,
    counts: SpeculationCounts,
    /// The latest time received; it never decreases.
    now: Timestamp,
}

/// A booking on a rank with a capacity.
#[derive(Clone, Copy, Debug)]
struct Claim {
    slot: Slot,
    end: u32,
    private_blocks: u32,
}

/// Reason for removing a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RemovalReason {
    Confirmed,
    Expired,
    Retracted,
    Evicted,
}

impl SpeculativePrompts {
    /// Creates an empty set of entries. `blocks_max` limits the sum of the blocks of remembered prompts; the oldest are
    /// removed first.
    #[must_use]
    pub fn new(kind: SpeculationModel, blocks_max: u64) -> Self {
        Self {
            kind,
            blocks_max,
            ranks: PredictorRanks::default(),
            tries: Tries::new(),
            depths: Depths::new(),
            aging: BTreeMap::new(),
            capped: BTreeMap::new(),
            claims: BTreeMap::new(),
            stamps: 0,
            named: 0,
            speculative: 0,
            counts: SpeculationCounts::default(),
            now: Timestamp::default(),
        }
    }

    /// Registers `rank` in `slot`, as [`Index::register`] does. The capacity affects only a modelled LRU; a changed
    /// capacity is adopted, and a change between known and unknown restarts the rank without entries.
    pub fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation, capacity_blocks: Option<u32>) {
        let capacity = capacity_blocks.filter(|_| matches!(self.kind, SpeculationModel::Lru(_))).map(u64::from);
        if let Some(entry) = self.ranks.get_mut(slot) {
            if entry.generation > generation {
                return;
            }
            let stays = (entry.rank, entry.generation) == (rank, generation);
            if stays && entry.capacity.is_some() == capacity.is_some() {
                entry.capacity = capacity;
                return self.evict(slot);
            }
            let occupant = entry.rank;
            self.remove_rank(occupant);
        }
        self.remove_rank(rank);
        let root = self.tries.add_root(slot);
        self.ranks.insert(slot, PredictorRank::new(rank, generation, capacity, root));
    }

    /// Removes a rank and its entries. Visits every booking.
    pub fn remove_rank(&mut self, rank: WorkerRank) {
        let Some(slot) = self.ranks.slot_of(rank) else { return };
        let of_rank = |(_, claim): &(BookingId, Claim)| claim.slot == slot;
        let claims: Vec<_> = self.claims.iter().map(|(id, claim)| (*id, *claim)).filter(of_rank).collect();
        for (booking, _) in claims {
            self.end_booking(booking);
        }
        self.forget(slot, RemovalReason::Retracted);
        if let Some(entry) = self.ranks.remove(slot) {
            self.tries.remove_root(entry.root);
        }
    }

    /// Records that a prompt was routed to the rank in `slot` with this generation. Returns the rank if it has an entry
    /// now. On a rank with a capacity, a given booking is held until [`SpeculativePrompts::released`]. Repetition has no
    /// effect. `index` contains the blocks reported by the engines, which require no entry.
    pub fn routed(
        &mut self,
        slot: Slot,
        generation: Generation,
        booking: Option<BookingId>,
        speculative_prompt: &SpeculativePrompt,
        index: &Index,
        now: Timestamp,
    ) -> Option<WorkerRank> {
        self.expire(now);
        // The events of a publishing rank report all blocks.
        let entry = self.ranks.get(slot).filter(|entry| entry.generation == generation && !entry.publishes)?;
        let (rank, root, is_capped) = (entry.rank, entry.root, entry.capacity.is_some());
        let booking = booking.filter(|_| is_capped);
        if booking.is_some_and(|booking| self.claims.contains_key(&booking)) {
            return None;
        }
        let blocks = speculative_prompt.hashes.len() as u32;
        let real_blocks = match self.kind {
            SpeculationModel::BesideEvents(_) => index.device_depth(slot, &speculative_prompt.hashes),
            SpeculationModel::Ttl(_) | SpeculationModel::UntilEvents(_) | SpeculationModel::Lru(_) => 0,
        };
        if real_blocks == blocks && booking.is_none() {
            return None; // no block is missing, or the prompt is empty
        }
        let end = self.enter(slot, root, &speculative_prompt.hashes, real_blocks);
        if let Some(booking) = booking {
            self.tries.claim(end);
            self.claims.insert(booking, Claim { slot, end, private_blocks: speculative_prompt.private_blocks });
            self.ranks.expect_mut(slot).private_active += u64::from(speculative_prompt.private_blocks);
        } else {
            let stamp = self.next_stamp();
            self.remember(end, LruEntry { stamp, at: self.now, real_blocks });
        }
        self.evict(slot);
        self.keep_bound();
        Some(rank)
    }

    /// Adds private output blocks to a booking.
    pub fn output_blocks(&mut self, booking: BookingId, blocks: u32) {
        let Some(claim) = self.claims.get_mut(&booking) else { return };
        let added = blocks.min(u32::MAX - claim.private_blocks);
        claim.private_blocks += added;
        let slot = claim.slot;
        self.ranks.expect_mut(slot).private_active += u64::from(added);
        self.evict(slot);
    }

    /// Releases a booking: its blocks may be evicted when room is needed.
    pub fn released(&mut self, booking: BookingId, now: Timestamp) {
        self.expire(now);
        if let Some(slot) = self.end_booking(booking) {
            self.evict(slot);
            self.keep_bound();
        }
    }

    /// Whether the model depends on which ranks publish events.
    #[must_use]
    pub fn is_until_events(&self) -> bool {
        matches!(self.kind, SpeculationModel::UntilEvents(_))
    }

    /// Sets whether a rank publishes events, for [`SpeculationModel::UntilEvents`]: a publishing rank has no
    /// speculative entries. Initially ranks do not publish.
    pub fn set_publishes(&mut self, rank: WorkerRank, publishes: bool) {
        if !self.is_until_events() {
            return;
        }
        let Some(slot) = self.ranks.slot_of(rank) else { return };
        let before = std::mem::replace(&mut self.ranks.expect_mut(slot).publishes, publishes);
        if publishes && !before {
            self.forget(slot, RemovalReason::Retracted);
        }
    }

    /// Removes the entries of a rank whose cache was cleared, except those held by bookings.
    pub fn clear(&mut self, rank: WorkerRank) {
        if let Some(slot) = self.ranks.slot_of(rank) {
            self.forget(slot, RemovalReason::Retracted);
        }
    }

    /// Removes the entries that expired by `now`. One step per removed prompt.
    pub fn expire(&mut self, now: Timestamp) {
        self.now = self.now.max(now);
        let ttl = self.kind.ttl();
        while let Some((_, &end)) = self.aging.first_key_value() {
            if self.tries.lru(end).is_some_and(|lru| lru.at + ttl > self.now) {
                return;
            }
            self.take(end, u32::MAX, RemovalReason::Expired);
        }
    }

    /// Raises each rank's device hit to its speculative depth, and adds ranks that only have speculative entries: the
    /// result is the maximum of both. Lower-tier blocks count from that depth on; speculative entries never add to
    /// them.
    pub fn merge_into(&self, hashes: &[BlockHash], overlaps: &mut Overlaps) {
        if self.speculative > 0 {
            let generation = |slot| self.ranks.get(slot).map(|entry| entry.generation).unwrap_or_default();
            self.depths.merge_into(hashes, generation, overlaps);
        }
    }

    /// Outcomes so far.
    #[must_use]
    pub fn counts(&self) -> SpeculationCounts {
        self.counts
    }

    /// Number of current speculative blocks, each counted once per rank.
    #[must_use]
    pub fn speculative_blocks(&self) -> u64 {
        self.speculative
    }

    /// Heap bytes owned, including the hashes of remembered prompts. Visits everything; not for hot paths.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // The node sizes of B-trees are not accessible; nodes are assumed to be two thirds full.
        let orders = (self.aging.len() + self.capped.len()) * size_of::<(u64, u32)>() * 3;
        let claims = self.claims.len() * size_of::<(BookingId, Claim)>() * 3 / 2;
        orders + claims + self.ranks.bytes() + self.tries.bytes() + self.depths.bytes()
    }

    /// Checks the invariants, for tests. Visits everything.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn check_invariants(&self) {
        self.depths.check_invariants();
        self.tries.check_invariants(self.ranks.iter().count());
        let (mut speculative, mut remembered, mut named) = (0, 0, 0);
        for (slot, entry) in self.ranks.iter() {
            assert_eq!(entry.blocks, self.tries.block_count(slot), "a rank's blocks are counted");
            let of_slot = self.claims.values().filter(|claim| claim.slot == slot);
            let private = of_slot.map(|claim| u64::from(claim.private_blocks)).sum::<u64>();
            assert_eq!(entry.private_active, private, "private blocks in use are counted");
            entry.check_invariants();
            speculative += entry.blocks;
            for (stamp, &end) in &entry.ends {
                let order = if entry.capacity.is_some() { &self.capped } else { &self.aging };
                assert_eq!(order.get(stamp), Some(&end), "entries of a rank are ordered");
                assert_eq!(self.tries.lru(end).map(|lru| lru.stamp), Some(*stamp), "and its end is remembered");
                assert_eq!(self.tries.slot(end), slot, "on the rank's own trie");
                remembered += 1;
                named += u64::from(self.tries.prompt(end).1);
            }
        }
        assert_eq!(remembered, self.aging.len() + self.capped.len(), "the order contains only remembered entries");
        assert_eq!((speculative, named), (self.speculative, self.named), "blocks are counted");
        assert!(self.named <= self.blocks_max, "the bound is kept");
        assert!(self.claims.values().all(|claim| self.ranks.get(claim.slot).is_some()), "no booking outlives its rank");
    }

    /// Inserts a prompt into a rank's trie. The caller then claims or remembers its end.
    fn enter(&mut self, slot: Slot, root: u32, hashes: &Arc<[BlockHash]>, known_blocks: u32) -> u32 {
        let entry = self.ranks.expect_mut(slot);
        let order = if entry.capacity.is_some() { &mut self.capped } else { &mut self.aging };
        let named = &mut self.named;
        let entered = self.tries.enter(root, hashes, known_blocks, |lru, depth| {
            order.remove(&lru.stamp);
            entry.ends.remove(&lru.stamp);
            *named -= u64::from(depth);
        });
        let blocks = hashes.len() as u32;
        if entered.shared_blocks < blocks {
            self.depths.raise(slot, hashes);
            let added = u64::from(blocks - entered.shared_blocks);
            entry.blocks += added;
            self.speculative += added;
            self.counts.speculated += u64::from(blocks - entered.shared_blocks.max(known_blocks));
        }
        entered.end
    }

    /// Remembers the end of a prompt in LRU order, unless a booking holds it.
    fn remember(&mut self, end: u32, lru: LruEntry) {
        if self.tries.is_root(end) || self.tries.is_claimed(end) {
            return; // a prompt without blocks, or one that is remembered when its booking is released
        }
        let entry = self.ranks.expect_mut(self.tries.slot(end));
        let order = if entry.capacity.is_some() { &mut self.capped } else { &mut self.aging };
        order.insert(lru.stamp, end);
        entry.ends.insert(lru.stamp, end);
        self.named += u64::from(self.tries.prompt(end).1);
        let before = self.tries.set_lru(end, Some(lru));
        debug_assert_eq!(before, None, "an end is stored once");
    }

    /// Removes up to `blocks_max` blocks from the end of a remembered prompt, except blocks that other prompts need.
    /// Forgets the prompt unless further blocks are removable.
    fn take(&mut self, end: u32, blocks_max: u32, reason: RemovalReason) {
        let Some(lru) = self.tries.set_lru(end, None) else { return };
        let slot = self.tries.slot(end);
        let (hashes, depth) = self.tries.prompt(end);
        let (hashes, depth_end) = (Arc::clone(hashes), self.tries.depth_end(end));
        let entry = self.ranks.expect_mut(slot);
        let order = if entry.capacity.is_some() { &mut self.capped } else { &mut self.aging };
        order.remove(&lru.stamp);
        entry.ends.remove(&lru.stamp);
        self.named -= u64::from(depth);
        let (mut keep, counts, kind) = (depth, &mut self.counts, self.kind);
        let rest = self.tries.give_up(end, blocks_max, |blocks, speculated| {
            keep = blocks.start;
            if speculated {
                let real = lru.real_blocks.clamp(blocks.start, blocks.end);
                counts.count(kind, reason, u64::from(real - blocks.start), u64::from(blocks.end - real));
            }
        });
        if keep < depth {
            let depth_end = depth_end.unwrap_or_else(|| self.depths.end_of(&hashes[..depth as usize]));
            let depth_end = self.depths.lower(slot, depth_end, depth - keep);
            if let Some(rest) = rest {
                self.tries.set_depth_end(rest, depth_end);
            }
            entry.blocks -= u64::from(depth - keep);
            self.speculative -= u64::from(depth - keep);
        }
        if let Some(rest) = rest {
            self.remember(rest, lru);
        }
    }

    /// Ends a booking. Returns its slot, or `None` for an unknown booking.
    fn end_booking(&mut self, booking: BookingId) -> Option<Slot> {
        let Claim { slot, end, private_blocks } = self.claims.remove(&booking)?;
        let stamp = self.next_stamp();
        self.ranks.expect_mut(slot).release_private(stamp, private_blocks);
        self.tries.unclaim(end);
        self.remember(end, LruEntry { stamp, at: self.now, real_blocks: 0 });
        Some(slot)
    }

    /// Evicts from a modelled cache until it fits its capacity or all remaining blocks are in use.
    fn evict(&mut self, slot: Slot) {
        while let Some(entry) = self.ranks.get_mut(slot) {
            let over = entry.blocks_over_capacity();
            if over == 0 {
                return;
            }
            let over = u32::try_from(over).unwrap_or(u32::MAX);
            let oldest = entry.ends.first_key_value().map(|(stamp, end)| (*stamp, *end));
            // A booking's private blocks are deeper than its prompt's.
            if entry.evict_private(oldest.map(|(stamp, _)| stamp), over) {
                continue;
            }
            let Some((_, end)) = oldest else { return };
            self.take(end, over, RemovalReason::Evicted);
        }
    }

    /// Removes the oldest prompts until the limit is respected.
    fn keep_bound(&mut self) {
        while self.named > self.blocks_max {
            let heads = [self.aging.first_key_value(), self.capped.first_key_value()];
            let Some((_, &end)) = heads.into_iter().flatten().min() else { return };
            self.take(end, u32::MAX, RemovalReason::Evicted);
        }
    }

    /// Removes the entries of a rank except those held by bookings.
    fn forget(&mut self, slot: Slot, reason: RemovalReason) {
        while let Some((_, &end)) = self.ranks.get(slot).and_then(|entry| entry.ends.first_key_value()) {
            self.take(end, u32::MAX, reason);
        }
    }

    fn next_stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }
}

impl SpeculationCounts {
    /// Counts removed speculative blocks: those reported by the engine, and the others.
    fn count(&mut self, kind: SpeculationModel, reason: RemovalReason, named: u64, unnamed: u64) {
        match (reason, kind) {
            (RemovalReason::Expired, SpeculationModel::BesideEvents(_)) => {
                self.confirmed += named;
                self.wrong += unnamed;
            }
            (
                RemovalReason::Expired,
                SpeculationModel::Ttl(_) | SpeculationModel::UntilEvents(_) | SpeculationModel::Lru(_),
            ) => self.expired += named + unnamed,
            (RemovalReason::Confirmed, _) => self.confirmed += named + unnamed,
            (RemovalReason::Retracted, _) => self.retracted += named + unnamed,
            (RemovalReason::Evicted, _) => self.evicted += named + unnamed,
        }
    }
}

#[cfg(test)]
mod tests;
