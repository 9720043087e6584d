//! Keeping to a budget: whose blocks go, and which.
//!
//! Owns nothing. Promises that after every event the index owns no more bytes than its budget, as long as that is
//! more than the ranks cost that hold nothing, and that evicting only ever lowers an answer. Who pays: the tree,
//! which ranks share, is everybody's cost; what the budget leaves beside it is shared evenly. While all fits, any
//! rank may have more than its share. When it does not, the rank that has most gives up blocks, and that one has
//! more than its share: who keeps to it loses nothing for others.
//!
//! What goes: first what waits for a parent; then leaves before what they lead back to, and among leaves what was
//! stored or asked for least recently. Runs are stamped, not blocks, with one stamp for the part up to the last
//! fork and one for what lies behind. A store stamps the way to it as a question does, so no run is younger than
//! what it continues, and the order of stamps is leaf first by itself.
//!
//! Costs: evicting looks at every span of one rank, so it takes a 16th of the rank's blocks at a time: at most 16
//! spans looked at and sorted for each block that goes, and about one where runs are tens of blocks long. The owner of
//! the index pauses for a batch. What a store is about to add to tables is made room for before it comes: it could
//! not be taken back. While an event is applied its own blocks may stand above the budget, and the list of spans, and
//! while a table of names is built anew, the old one.

use std::cmp::Reverse;
use std::mem::{size_of, take};

use super::budget::{Budget, BudgetState};
use super::rank::{Rank, lower_idx};
use super::table::Spot;
use super::tree::Holder;
use super::waiting::Waiting;
use super::{Applied, Index, hold};
use crate::protocol::{KvEvent, RouterEvent, Slot, StorageTier, StoredBlock};

/// What part of a rank's blocks is evicted at a time. It makes a 32nd of the rank's bytes free or so, and room in
/// tables for as many blocks to come.
const BATCH: usize = 16;
/// Bytes of a block on a run and in a span.
const BLOCK_BYTES: usize = 16;

/// A store that is about to come.
type Ask = (Slot, StorageTier, usize);

/// The end of a span from `from` on, which may be evicted at once.
struct Leaf {
    stamp: u16,
    /// How far into a prompt it starts.
    depth: u32,
    tier: StorageTier,
    span: u32,
    from: u32,
}

impl Index {
    /// Bounds the heap bytes that the index owns, from now on, or lifts the bound. What is too much goes at once.
    ///
    /// Evicted blocks are forgotten as if they had been removed: what is stored behind them later has an unknown
    /// parent, and their removal finds nothing ([`Applied::evicted_removals`]). A rank is known in full again
    /// after it was cleared.
    ///
    /// ```
    /// use pointsman::index::Index;
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
                    rank.counted = size_of::<Rank>() + rank.bytes();
                    new.ranks_bytes += rank.counted;
                }
                *budget = Some(new);
            }
        }
        self.keep_within(None);
    }

    /// How full the index is; `None` without a budget. Costs the same however much is held.
    #[must_use]
    pub fn budget_state(&self) -> Option<BudgetState> {
        let budget = self.budget.as_ref()?;
        let (bytes_max, bytes) = (budget.bytes_max as u64, self.bytes_used() as u64);
        Some(BudgetState { bytes_max, bytes, evicted_blocks: budget.evicted_blocks })
    }

    /// Heap bytes that the index owns, equal to [`Index::bytes`] but as counted when they changed. Costs the same
    /// however much is held; without a budget, a step a rank.
    #[must_use]
    pub fn bytes_used(&self) -> usize {
        let ranks = || self.ranks.iter().flatten().map(|rank| size_of::<Rank>() + rank.bytes()).sum();
        let ranks = self.budget.as_ref().map_or_else(ranks, |budget| budget.ranks_bytes);
        let lower = self.lower.iter().flatten().map(|tree| tree.bytes()).sum::<usize>();
        self.bytes_around() + ranks + self.device.bytes() + lower
    }

    /// Number of blocks that the rank in `slot` holds, each counted once per tier. Costs the same however many.
    #[must_use]
    pub fn held_blocks_of(&self, slot: Slot) -> usize {
        let rank = self.ranks.get(slot.index()).and_then(Option::as_ref);
        rank.map_or(0, |rank| rank.held_blocks())
    }

    /// Number of blocks evicted from the rank in `slot` since it was registered or last cleared. While that is
    /// zero, what is known of the rank is all that it said.
    #[must_use]
    pub fn evicted_blocks_of(&self, slot: Slot) -> u64 {
        let rank = self.ranks.get(slot.index()).and_then(Option::as_ref);
        rank.map_or(0, |rank| rank.evicted_blocks)
    }

    /// [`Index::apply`], for an index with a budget.
    pub(super) fn apply_within_budget(&mut self, slot: Slot, event: &RouterEvent) -> Applied {
        let now = self.tick();
        let mut evicted = 0;
        if let KvEvent::Stored { parent, blocks } = &event.data {
            // What the blocks are to be stored behind should be the last to go for them.
            parent.inspect(|parent| self.stamp(slot, event.tier, *parent, now));
            evicted += self.keep_within(Some((slot, event.tier, blocks.len())));
        }
        let mut applied = self.change(slot, event);
        if let KvEvent::Stored { blocks, .. } = &event.data {
            if applied.unknown_parents > 0 {
                evicted += self.forget_misplaced(slot, blocks);
            }
            blocks.last().inspect(|last| self.stamp(slot, event.tier, last.engine_hash, now));
        }
        if self.rank(slot).evicted_blocks > 0 {
            applied.evicted_removals = take(&mut applied.unknown_removals);
        }
        self.recount(slot);
        evicted += self.keep_within(None);
        Applied { evicted, ..applied }
    }

    /// Looks again at what the rank in `slot` has for itself.
    pub(super) fn recount(&mut self, slot: Slot) {
        let Some(budget) = &mut self.budget else { return };
        let Some(rank) = &mut self.ranks[slot.index()] else { return };
        let counted = size_of::<Rank>() + rank.bytes();
        budget.ranks_bytes = budget.ranks_bytes + counted - rank.counted;
        rank.counted = counted;
    }

    /// Evicts until the budget is kept, also with what `ask` will add to tables. Returns the number of blocks.
    pub(super) fn keep_within(&mut self, ask: Option<Ask>) -> u64 {
        let Some(bytes_max) = self.budget.as_ref().map(|budget| budget.bytes_max) else { return 0 };
        if self.bytes_with(ask) <= bytes_max {
            return 0;
        }
        let mut evicted = 0;
        while self.bytes_with(ask) > bytes_max {
            let Some(slot) = self.heaviest() else { break };
            evicted += self.evict_from(slot, bytes_max, ask);
            self.compact_trees();
        }
        evicted
    }

    /// A new stamp, for the runs that an event comes to.
    fn tick(&mut self) -> u16 {
        let runs = self.runs();
        let budget = self.budget.as_ref().expect("stamps are for a budget");
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

    /// Stamps the way to a block of that name in a tier, or in the nearest that has it.
    fn stamp(&self, slot: Slot, tier: StorageTier, name: crate::protocol::EngineHash, now: u16) {
        for tier in std::iter::once(tier).chain(StorageTier::ALL) {
            if let Some(at) = self.find(slot, tier, name) {
                self.tree(tier).expect("a block was found in this tree").stamp_path(at, now);
                return;
            }
        }
    }

    /// Forgets names that moved to where the index cannot follow, behind an evicted parent. Otherwise they would
    /// still stand for blocks that the rank holds no more.
    fn forget_misplaced(&mut self, slot: Slot, blocks: &[StoredBlock]) -> u64 {
        if self.rank(slot).evicted_blocks == 0 {
            return 0;
        }
        let names: Vec<_> = blocks.iter().map(|block| block.engine_hash).collect();
        let (tree, residence) = self.parts(slot, StorageTier::Device);
        let held = residence.held_blocks();
        hold::forget(tree, residence, slot, &names);
        let evicted = (held - residence.held_blocks()) as u64;
        self.note_evicted(slot, evicted);
        evicted
    }

    fn note_evicted(&mut self, slot: Slot, blocks: u64) {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        rank.evicted_blocks += blocks;
        self.budget.as_mut().expect("nothing is evicted without a budget").evicted_blocks += blocks;
    }

    fn bytes_with(&self, ask: Option<Ask>) -> usize {
        let growth = ask.map_or(0, |(slot, tier, blocks)| {
            let tree = self.tree(tier).map_or(0, |tree| tree.growth());
            let residence = self.rank(slot).residence(tier).map_or(0, |residence| residence.growth(blocks));
            tree + residence + blocks * BLOCK_BYTES
        });
        self.bytes_used() + growth
    }

    /// The rank that has most for itself, among those with anything to give up.
    fn heaviest(&self) -> Option<Slot> {
        let ranks = (0..).map(Slot).zip(&self.ranks).filter_map(|(slot, rank)| Some((slot, rank.as_deref()?)));
        let heaviest = ranks.filter(|(_, rank)| rank.removable() > 0).max_by_key(|(_, rank)| rank.counted);
        heaviest.map(|(slot, _)| slot)
    }

    /// Makes a rank give up what waits, or what its tables do not need, or else a batch of its blocks.
    fn evict_from(&mut self, slot: Slot, bytes_max: usize, ask: Option<Ask>) -> u64 {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let waiting = rank.waiting().map_or(0, Waiting::len) as u64;
        if waiting > 0 {
            *rank.waiting_mut(&self.hasher) = Waiting::new(self.hasher.clone());
            self.recount(slot);
            self.note_evicted(slot, waiting);
            return waiting;
        }
        self.fit(slot);
        if self.bytes_with(ask) <= bytes_max {
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
        let evicted = (held - self.rank(slot).held_blocks()) as u64;
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        if rank.removable() == 0 {
            let evicted_blocks = rank.evicted_blocks;
            rank.reset(&self.hasher); // room for few names is not kept for none
            rank.evicted_blocks = evicted_blocks;
            self.recount(slot);
        }
        self.note_evicted(slot, evicted);
        evicted
    }

    /// Evicts the last blocks of a leaf, at most so many. Returns whether there were any.
    fn evict_end(&mut self, slot: Slot, leaf: &Leaf, blocks: usize) -> bool {
        let (tree, residence) = self.parts(slot, leaf.tier);
        if residence.held_blocks() == 0 {
            return false; // its numbers mean nothing any more
        }
        let extent = residence.span(leaf.span).extent();
        if extent <= leaf.from {
            return false;
        }
        let offsets = leaf.from.max(extent.saturating_sub(u32::try_from(blocks).unwrap_or(u32::MAX)))..extent;
        let names = |offset| residence.names_of(Spot { span: leaf.span, offset });
        let names: Vec<_> = offsets.rev().flat_map(names).collect();
        hold::forget(tree, residence, slot, &names);
        self.recount(slot);
        true
    }

    /// All that a rank holds, in the order in which it may be evicted.
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

    /// Gives back what a rank's tables and lists do not need any more.
    fn fit(&mut self, slot: Slot) {
        let tiers: Vec<_> = self.rank(slot).residences().map(|(tier, _)| tier).collect();
        for tier in tiers {
            let (tree, residence) = self.parts(slot, tier);
            residence.fit(|span, id| {
                tree.publish(span.node, Holder { slot, span: id, cut: span.cut(), extent: span.extent() });
            });
        }
        self.recount(slot);
    }

    /// Gives back what the trees do not need any more, once that is much.
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
