//! Cache groups beside the main attention: the lengths at which they allow a hit.
//!
//! A hybrid model needs every group of its layers at the end of a hit: a sliding window the blocks inside the window, a
//! Mamba layer the state behind the last block, a second group with full attention all blocks. The index knows what a
//! group holds by name only. The name of a block is the same in each group, so the device tier has its position: a hit of
//! a rank is the longest one, up to its leading blocks in the device tier, before whose end each group holds the names of
//! its window. This is the result of the engine, which shortens the hit group by group until no group shortens it any
//! more. A group may hold names that the device tier does not, and keeps them until they are removed.
//!
//! A group is known from its first store until the rank is cleared. Ranks without groups pay one comparison per query.
//! For other ranks a query looks up the names of the windows, and those of the blocks that it leaves out. Cost of a held
//! name: about 15 bytes.

use std::mem::size_of;
use std::num::NonZeroU32;
use std::ops::Range;

use ahash::RandomState;
use hashbrown::HashSet;
use smallvec::SmallVec;

use super::copies::Copies;
use super::residence::Residence;
use super::span::Stretch;
use super::table::Spot;
use super::tree::RunNode;
use crate::protocol::{EngineHash, KvEvent, Slot};

/// The groups of one rank.
#[derive(Debug)]
pub(super) struct CacheGroups {
    /// By number.
    held: Vec<HeldGroup>,
    /// Whether the last store of the device tier at the start of a prompt was a computation, not a report of a hit. The
    /// first one is.
    pub(super) has_computed: bool,
    /// Whether such a store was a report for certain.
    pub(super) has_reported: bool,
}

/// Names that one group holds.
#[derive(Debug)]
struct HeldGroup {
    number: u8,
    window_blocks: NonZeroU32,
    names: HashSet<EngineHash, RandomState>,
    copies: Copies,
}

/// A rank's leading blocks of one run.
struct Piece {
    /// Number of prompt blocks before the run.
    depth: u32,
    span: u32,
    blocks: u32,
}

/// A rank's leading blocks of a prompt.
pub(super) struct HeldPath<'a> {
    residence: &'a Residence,
    pieces: SmallVec<[Piece; 8]>,
}

impl Default for CacheGroups {
    fn default() -> Self {
        Self { held: Vec::new(), has_computed: true, has_reported: false }
    }
}

impl CacheGroups {
    /// Stores names in a group. As in the device tier, a repeated store is another copy, unless it reports a hit. Such a
    /// report names every block of the hit, of which the group holds those of its window for certain.
    pub(super) fn store(
        &mut self,
        (number, window_blocks): (u8, NonZeroU32),
        starts_prompt: bool,
        names: &[EngineHash],
        hasher: &RandomState,
    ) {
        let is_report = starts_prompt && !self.has_computed;
        let held = self.held(number, window_blocks, hasher);
        let certain = if is_report { window_blocks.get() as usize } else { names.len() };
        for name in &names[names.len().saturating_sub(certain)..] {
            if !held.names.insert(*name) && !is_report {
                held.copies.add(*name);
            } else {
                held.copies.announce(*name);
            }
        }
    }

    /// Removes one copy of each name from a group. Returns the number of known names.
    pub(super) fn remove(&mut self, number: u8, names: &[EngineHash]) -> usize {
        self.held.iter_mut().find(|held| held.number == number).map_or(0, |held| held.remove(names))
    }

    /// The names of a group; adds an unknown one, and updates its window.
    fn held(&mut self, number: u8, window_blocks: NonZeroU32, hasher: &RandomState) -> &mut HeldGroup {
        let at = match self.held.binary_search_by_key(&number, |held| held.number) {
            Ok(at) => at,
            Err(at) => {
                let (names, copies) = (HashSet::with_hasher(hasher.clone()), Copies::new(hasher));
                self.held.insert(at, HeldGroup { number, window_blocks, names, copies });
                at
            }
        };
        self.held[at].window_blocks = window_blocks;
        &mut self.held[at]
    }

    /// The longest hit of at most `blocks` that every group allows.
    pub(super) fn longest(&self, path: &HeldPath<'_>, blocks: u32) -> u32 {
        let mut hit = blocks;
        loop {
            let before = hit;
            for held in &self.held {
                // No longer hit is allowed: its window begins no later, so it contains the missing block as well.
                let window = |hit: u32| hit.saturating_sub(held.window_blocks.get())..hit;
                while let Some(missing) = path.first_missing(held, window(hit)) {
                    hit = missing;
                }
            }
            if hit == before {
                return hit;
            }
        }
    }

    pub(super) fn names(&self) -> usize {
        self.held.iter().map(|held| held.names.len()).sum()
    }

    /// Drops the names that the device tier does not hold, and all further copies. The groups stay known.
    pub(super) fn keep_only(&mut self, device: &Residence) {
        for held in &mut self.held {
            held.names.retain(|name| device.find(*name).is_some());
            held.copies = Copies::new(held.names.hasher());
            held.names.shrink_to_fit();
        }
    }

    /// Drops the names of which removals have removed all copies.
    pub(super) fn end_copies(&mut self) {
        for held in &mut self.held {
            held.copies.end().iter().for_each(|name| _ = held.names.remove(name));
        }
    }

    /// Events that rebuild the groups: every name, and then once more for each further copy.
    pub(super) fn dump(&self) -> impl Iterator<Item = KvEvent> {
        self.held.iter().map(|held| {
            let mut blocks: Vec<_> = held.names.iter().copied().collect();
            blocks.sort_unstable();
            blocks.append(&mut held.copies.names());
            let HeldGroup { number: group, window_blocks, .. } = *held;
            KvEvent::GroupStored { group, window_blocks, starts_prompt: false, blocks }
        })
    }

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        assert!(self.held.is_sorted_by(|a, b| a.number < b.number), "groups are sorted and unique by number");
        for held in &self.held {
            held.copies.check_invariants(|name| held.names.contains(&name));
        }
    }

    /// Heap bytes, including this struct.
    pub(super) fn bytes(&self) -> usize {
        let tables = |held: &HeldGroup| held.names.allocation_size() + held.copies.bytes();
        size_of::<Self>() + self.held.capacity() * size_of::<HeldGroup>() + self.held.iter().map(tables).sum::<usize>()
    }
}

impl HeldGroup {
    /// Removes one copy of each name. Returns the number of known names.
    fn remove(&mut self, names: &[EngineHash]) -> usize {
        let mut removed = 0;
        for name in names {
            removed += usize::from(self.copies.take(*name) || self.names.remove(name));
        }
        if self.names.len() < self.names.capacity() / 4 {
            self.names.shrink_to(self.names.len() * 2);
        }
        removed
    }
}

impl<'a> HeldPath<'a> {
    /// The first `blocks` blocks of the runs, which the rank holds.
    pub(super) fn new(residence: &'a Residence, slot: Slot, nodes: &[&RunNode], blocks: u32) -> Self {
        let mut pieces = SmallVec::<[Piece; 8]>::new();
        for (at, node) in nodes.iter().enumerate().take_while(|(_, node)| node.depth < blocks) {
            let end = nodes.get(at + 1).map_or(blocks, |next| next.depth.min(blocks));
            let held = node.holders.binary_search_by_key(&slot, |holder| holder.slot);
            let holder = node.holders[held.expect("a rank holds the runs of its leading blocks")];
            pieces.push(Piece { depth: node.depth, span: holder.span, blocks: end - node.depth });
        }
        Self { residence, pieces }
    }

    /// The first block in `range` that a group does not hold under any of its names.
    fn first_missing(&self, held: &HeldGroup, range: Range<u32>) -> Option<u32> {
        for Piece { depth, span, blocks } in &self.pieces {
            let (start, end) = (range.start.max(*depth) - depth, range.end.saturating_sub(*depth).min(*blocks));
            if start >= end {
                continue;
            }
            let names = self.residence.span(*span).names(Stretch { start, end }).iter();
            let missing = (start..end).zip(names).find(|(offset, name)| {
                let mut others = self.residence.names_of(Spot { span: *span, offset: *offset });
                !held.names.contains(*name) && !others.any(|name| held.names.contains(&name))
            });
            if let Some((offset, _)) = missing {
                return Some(depth + offset);
            }
        }
        None
    }
}
