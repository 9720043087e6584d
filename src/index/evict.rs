//! Eviction: keeps an index within its byte budget.
//!
//! After every event the index owns at most the budgeted bytes, provided that the budget exceeds the cost of the empty
//! ranks. Eviction can only lower overlaps. The trees are shared by all ranks; the rest of the budget is shared evenly
//! between the ranks. As long as everything fits, a rank may exceed its share. When the budget is exceeded, the rank
//! with the most bytes evicts blocks. That rank is above its share, so a rank within its share loses nothing to others.
//!
//! Names of cache groups are evicted with the blocks of the device tier; the groups stay known, so that they still restrict.
//! Eviction order: first blocks that wait for a parent; then leaves before their ancestors, least recently stored or
//! queried first. Stamps are kept per run, not per block: one stamp for the part up to the last fork and one for the
//! part after it. A store stamps the path to its blocks as a query does, so no run is newer than its parent, and the
//! order of stamps is leaf first. Stamps begin when half of the budget is used: a budget that never fills costs nearly
//! nothing. Runs from before count as the oldest.
//!
//! Cost: eviction visits every span of one rank, therefore it removes one 16th of the rank's blocks per batch. This
//! visits and sorts at most 16 spans per evicted block, and about one if runs are tens of blocks long. The owner of the
//! index is blocked for the duration of a batch. Room for table growth is freed before a store, because tables cannot
//! be shrunk back afterwards. While an event is applied, the budget may be exceeded by the blocks of the event, the
//! list of spans, and the old name table during a rebuild.

use std::cmp::Reverse;
use std::mem::{size_of, take};

use super::budget::{Budget, BudgetState};
use super::hold::HeldBlocks;
use super::rank::{RankBlocks, lower_idx};
use super::table::Spot;
use super::tree::Holder;
use super::waiting::PendingBlocks;
use super::{Applied, Index};
use crate::protocol::{KvEvent, RouterEvent, Slot, StorageTier, StoredBlock, WorkerRank};

/// Divisor of a rank's blocks per eviction batch. A batch frees about a 32nd of the rank's bytes and makes table room
/// for the same number of new blocks.
const BATCH: usize = 16;
/// Bytes per block: 8 on the run and 8 in the span.
const BLOCK_BYTES: usize = 16;

/// Slot, tier and number of blocks of the next store.
type PendingStore = (Slot, StorageTier, usize);

/// The blocks of a span from `from` on, which can be evicted without leaving a hole.
struct Leaf {
    stamp: u16,
    /// Number of prompt blocks before it.
    depth: u32,
    tier: StorageTier,
    span: u32,
    from: u32,
}

impl Index {
    /// Sets or lifts the limit on the heap bytes that the index owns. Evicts immediately if the limit is exceeded.
    ///
    /// Evicted blocks are treated as removed: a later store behind them has an unknown parent, and their removal counts
    /// as [`Applied::evicted_removals`]. The holdings of a rank are complete again after the rank is cleared.
    ///
    /// ```
    /// use pointsman::internals::index::Index;
    ///
    /// let mut index = Index::new();
    /// index.set_budget(Some(64 << 20));
    /// assert!(index.bytes_used() <= 64 << 20);
    /// ```
    pub fn set_budget(&mut self, bytes_max: Option<u64>) {
        let bytes_max = bytes_max.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        match (bytes_max, &mut self.budget) {
            (None, budget) => *budget = None,
            (Some(bytes_max), Some(budget)) => budget.bytes_max = bytes_max,
            (Some(bytes_max), budget @ None) => {
                let mut new = Box::new(Budget::new(bytes_max));
                for rank in self.ranks.iter_mut().flatten() {
                    rank.counted = size_of::<RankBlocks>() + rank.bytes();
                    new.ranks_bytes += rank.counted;
                }
                *budget = Some(new);
            }
        }
        self.keep_within(None);
    }

    /// Fill level of the index; `None` without a budget. Constant cost.
    #[must_use]
    pub fn budget_state(&self) -> Option<BudgetState> {
        let budget = self.budget.as_ref()?;
        let (bytes_max, bytes) = (budget.bytes_max as u64, self.bytes_used() as u64);
        Some(BudgetState { bytes_max, bytes, evicted_blocks: budget.evicted_blocks })
    }

    /// Heap bytes that the index owns, from running totals; equal to [`Index::bytes`]. Constant cost with a budget, one
    /// step per rank without.
    #[must_use]
    pub fn bytes_used(&self) -> usize {
        let ranks = || self.ranks.iter().flatten().map(|rank| size_of::<RankBlocks>() + rank.bytes()).sum();
        let ranks = self.budget.as_ref().map_or_else(ranks, |budget| budget.ranks_bytes);
        let lower = self.lower.iter().flatten().map(|tree| tree.bytes()).sum::<usize>();
        self.container_bytes() + ranks + self.device.bytes() + lower
    }

    /// Number of blocks that the rank in `slot` holds, counted once per tier. Constant cost.
    #[must_use]
    pub fn held_blocks_of(&self, slot: Slot) -> usize {
        let rank = self.ranks.get(slot.index()).and_then(Option::as_ref);
        rank.map_or(0, |rank| rank.held_blocks())
    }

    /// Number of blocks evicted from the rank in `slot` since it was registered or last cleared. At zero, the holdings
    /// of the rank are complete.
    #[must_use]
    pub fn evicted_blocks_of(&self, slot: Slot) -> u64 {
        let rank = self.ranks.get(slot.index()).and_then(Option::as_ref);
        rank.map_or(0, |rank| rank.evicted_blocks)
    }

    /// [`Index::apply`] for an index with a budget.
    pub(super) fn apply_within_budget(&mut self, slot: Slot, event: &RouterEvent) -> Applied {
        let now = self.is_filling().then(|| self.tick());
        let mut evicted = 0;
        let stored = match &event.data {
            KvEvent::Stored { parent, blocks } => Some((parent, blocks.last().map(|block| block.engine_hash))),
            KvEvent::Offloaded { parent, blocks } => Some((parent, blocks.last().map(|(name, _)| *name))),
            KvEvent::Removed { .. }
            | KvEvent::Cleared
            | KvEvent::TierCleared
            | KvEvent::GroupStored { .. }
            | KvEvent::GroupRemoved { .. } => None,
        };
        if let Some((parent, _)) = stored {
            // Stamps the parent first, so that the eviction below removes it last.
            if let (Some(parent), Some(now)) = (parent, now) {
                self.stamp(slot, event.tier, *parent, now);
            }
            evicted += self.keep_within(Some((slot, event.tier, event.data.block_count())));
        }
        let mut applied = self.change(slot, event);
        if let (KvEvent::Stored { blocks, .. }, 1..) = (&event.data, applied.unknown_parents) {
            evicted += self.forget_misplaced(slot, blocks);
        }
        if let (Some((_, Some(last))), Some(now)) = (stored, now) {
            self.stamp(slot, event.tier, last, now);
        }
        if self.rank(slot).evicted_blocks > 0 {
            applied.evicted_removals = take(&mut applied.unknown_removals);
        }
        self.recount(slot);
        evicted += self.keep_within(None);
        Applied { evicted, ..applied }
    }

    /// Marks restored contents of a rank as incomplete, after its last clear: a budget had evicted this number of
    /// blocks. Without a budget it has no effect.
    pub fn restore_evicted(&mut self, rank: WorkerRank, blocks: u64) {
        let slot = self.slot_of(rank).filter(|_| self.budget.is_some());
        if let Some(rank) = slot.and_then(|slot| self.ranks[slot.index()].as_mut()) {
            rank.evicted_blocks += blocks;
        }
    }

    /// Updates the byte count of the rank in `slot`.
    pub(super) fn recount(&mut self, slot: Slot) {
        let Some(budget) = &mut self.budget else { return };
        let Some(rank) = &mut self.ranks[slot.index()] else { return };
        let counted = size_of::<RankBlocks>() + rank.bytes();
        budget.ranks_bytes = budget.ranks_bytes + counted - rank.counted;
        rank.counted = counted;
    }

    /// Evicts until the index fits its budget, including the growth of `next`. Returns the number of evicted blocks.
    pub(super) fn keep_within(&mut self, next: Option<PendingStore>) -> u64 {
        let Some(bytes_max) = self.budget.as_ref().map(|budget| budget.bytes_max) else { return 0 };
        let bytes = self.bytes_with(next);
        if let Some(budget) = &mut self.budget {
            budget.is_filling = bytes > bytes_max / 2;
        }
        if bytes <= bytes_max {
            return 0;
        }
        let mut evicted = 0;
        while self.bytes_with(next) > bytes_max {
            let Some(slot) = self.heaviest() else { break };
            evicted += self.evict_from(slot, bytes_max, next);
            self.compact_trees();
        }
        evicted
    }

    fn is_filling(&self) -> bool {
        self.budget.as_ref().is_some_and(|budget| budget.is_filling)
    }

    /// Returns the stamp for the runs that an event visits.
    fn tick(&mut self) -> u16 {
        let runs = self.runs();
        let budget = self.budget.as_ref().expect("only an index with a budget is stamped");
        let spent = budget.wind();
        let now = budget.tick(runs);
        for tree in std::iter::once(&mut self.device).chain(self.lower.iter_mut().flatten().map(|tree| &mut **tree)) {
            if spent {
                tree.halve_stamps();
            }
            tree.now = now;
        }
        now
    }

    /// Stamps the path to the named block in `tier`, or in the nearest tier that holds it.
    fn stamp(&self, slot: Slot, tier: StorageTier, name: crate::protocol::EngineHash, now: u16) {
        for tier in std::iter::once(tier).chain(StorageTier::ALL) {
            if let Some(at) = self.find(slot, tier, name) {
                self.tree(tier).expect("a block was found in this tree").stamp_path(at, now);
                return;
            }
        }
    }

    /// Removes names that the engine stored behind an evicted parent. The index cannot place them, and their old
    /// positions are no longer valid.
    fn forget_misplaced(&mut self, slot: Slot, blocks: &[StoredBlock]) -> u64 {
        if self.rank(slot).evicted_blocks == 0 {
            return 0;
        }
        let names: Vec<_> = blocks.iter().map(|block| block.engine_hash).collect();
        let mut held = self.blocks(slot, StorageTier::Device);
        let before = held.residence.held_blocks();
        held.forget(&names);
        let evicted = (before - held.residence.held_blocks()) as u64;
        self.note_evicted(slot, evicted);
        evicted
    }

    fn note_evicted(&mut self, slot: Slot, blocks: u64) {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        rank.evicted_blocks += blocks;
        self.budget.as_mut().expect("only an index with a budget evicts").evicted_blocks += blocks;
    }

    fn bytes_with(&self, next: Option<PendingStore>) -> usize {
        let growth = next.map_or(0, |(slot, tier, blocks)| {
            let tree = self.tree(tier).map_or(0, |tree| tree.growth());
            let residence = self.rank(slot).residence(tier).map_or(0, |residence| residence.growth(blocks));
            tree + residence + blocks * BLOCK_BYTES
        });
        self.bytes_used() + growth
    }

    /// The rank with the most own bytes, among the ranks with anything to evict.
    fn heaviest(&self) -> Option<Slot> {
        let ranks = (0..).map(Slot).zip(&self.ranks).filter_map(|(slot, rank)| Some((slot, rank.as_deref()?)));
        let ranks = ranks.filter(|(_, rank)| rank.removable() + rank.group_names() > 0);
        let heaviest = ranks.max_by_key(|(_, rank)| rank.counted);
        heaviest.map(|(slot, _)| slot)
    }

    /// Frees memory of one rank: its pending blocks, else the spare room of its tables, else a batch of its blocks.
    fn evict_from(&mut self, slot: Slot, bytes_max: usize, next: Option<PendingStore>) -> u64 {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let waiting = rank.waiting().map_or(0, PendingBlocks::len) as u64;
        if waiting > 0 {
            *rank.waiting_mut(&self.hasher) = PendingBlocks::new(self.hasher.clone());
            self.recount(slot);
            self.note_evicted(slot, waiting);
            return waiting;
        }
        self.fit(slot);
        if self.bytes_with(next) <= bytes_max {
            return 0;
        }
        let held = self.rank(slot).held_blocks();
        let least = held - held.div_ceil(BATCH);
        for leaf in self.leaves(slot) {
            let mut more = true;
            while more {
                let excess = self.rank(slot).held_blocks() - least;
                more = excess > 0 && self.evict_end(slot, &leaf, excess);
            }
        }
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let evicted = (held - rank.held_blocks() + rank.trim_groups()) as u64;
        rank.doubts = None;
        if rank.removable() == 0 {
            let (evicted_blocks, groups) = (rank.evicted_blocks, rank.groups.take());
            rank.reset(&self.hasher); // returns the table memory of an empty rank
            (rank.evicted_blocks, rank.groups) = (evicted_blocks, groups);
        }
        self.recount(slot);
        self.note_evicted(slot, evicted);
        evicted
    }

    /// Evicts the last blocks of a leaf, at most `blocks`. Returns whether there were any.
    fn evict_end(&mut self, slot: Slot, leaf: &Leaf, blocks: usize) -> bool {
        let mut held = self.blocks(slot, leaf.tier);
        if held.residence.held_blocks() == 0 {
            return false; // span numbers are invalid once the residence is empty
        }
        let extent = held.residence.span(leaf.span).extent();
        if extent <= leaf.from {
            return false;
        }
        let offsets = leaf.from.max(extent.saturating_sub(u32::try_from(blocks).unwrap_or(u32::MAX)))..extent;
        let names = |offset| held.residence.names_of(Spot { span: leaf.span, offset });
        let names: Vec<_> = offsets.rev().flat_map(names).collect();
        held.forget(&names);
        self.recount(slot);
        true
    }

    /// All spans of a rank, in eviction order.
    fn leaves(&self, slot: Slot) -> Vec<Leaf> {
        let rank = self.rank(slot);
        let mut leaves = Vec::new();
        for (tier, residence) in rank.residences() {
            let tree = self.tree(tier).expect("a rank that holds blocks of a tier made its tree");
            for (span, reach) in residence.spans() {
                let node = tree.node(reach.node);
                let (hit_at, end_hit_at, forked) = node.stamps();
                let leaf = |stamp, from| Leaf { stamp, depth: node.depth + from, tier, span, from };
                if forked > 0 {
                    leaves.push(leaf(hit_at, 0));
                }
                if reach.extent() > forked {
                    leaves.push(leaf(end_hit_at, forked));
                }
            }
        }
        leaves.sort_unstable_by_key(|leaf| (leaf.stamp, Reverse(leaf.depth), leaf.tier, leaf.span));
        leaves
    }

    /// Shrinks the tables and lists of a rank.
    fn fit(&mut self, slot: Slot) {
        let tiers: Vec<_> = self.rank(slot).residences().map(|(tier, _)| tier).collect();
        for tier in tiers {
            let HeldBlocks { tree, residence, slot } = self.blocks(slot, tier);
            residence.fit(|span, id| {
                tree.publish(span.node, Holder { slot, span: id, cut: span.cut(), extent: span.extent() });
            });
        }
        self.recount(slot);
    }

    /// Shrinks the trees that have many vacant nodes.
    fn compact_trees(&mut self) {
        for tier in StorageTier::ALL {
            let tree = match lower_idx(tier) {
                None => Some(&mut self.device),
                Some(idx) => self.lower[idx].as_deref_mut(),
            };
            let Some(moved) = tree.and_then(|tree| tree.compact()) else { continue };
            for rank in self.ranks.iter_mut().flatten().filter(|rank| rank.residence(tier).is_some()) {
                rank.residence_mut(tier, &self.hasher).renumber(|node| moved.of(node));
            }
        }
    }
}
