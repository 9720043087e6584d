//! Blocks of one rank in one run of one tier.
//!
//! Holds the engine hash of each held block. The set of held blocks is a leading stretch plus, if there are holes, one
//! bit per block. The list of names ends with the last held block. Holding or releasing a block has constant cost,
//! independent of its position and of the number of holes, apart from a scan of 64 bits at a time to the next hole.
//! [`super::residence`] looks blocks up by name, and [`super::hold`] publishes changes to the tree.

use std::mem::size_of;

use super::arena::{give_back, make_room};
use super::steps;
use crate::protocol::EngineHash;

/// Number of blocks per word of [`Span::held`].
const WORD: u32 = u64::BITS;

/// Consecutive held blocks: offsets `start..end` of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// One rank's blocks of one run.
#[derive(Debug, Default)]
pub(super) struct Span {
    /// Number of the run's node.
    pub(super) node: u32,
    /// Number of held leading blocks of the run.
    cut: u32,
    /// Name of each block by its offset in the run. Entries of blocks that are not held are undefined.
    names: Vec<EngineHash>,
    /// One bit per name: whether its block is held. Empty if there is no hole, which is the common case.
    held: Vec<u64>,
}

impl Span {
    /// An empty span with room for exactly `len` names.
    pub(super) fn on(node: u32, len: usize) -> Self {
        Self { node, cut: 0, names: Vec::with_capacity(len), held: Vec::new() }
    }

    /// Number of held leading blocks.
    pub(super) fn cut(&self) -> u32 {
        self.cut
    }

    /// One past the offset of the last held block; zero for an empty span.
    pub(super) fn extent(&self) -> u32 {
        self.names.len() as u32
    }

    /// Name of the held block at `offset`.
    pub(super) fn name(&self, offset: u32) -> EngineHash {
        self.names[offset as usize]
    }

    /// Names of a stretch of held blocks.
    pub(super) fn names(&self, stretch: Stretch) -> &[EngineHash] {
        &self.names[stretch.start as usize..stretch.end as usize]
    }

    /// Changes the name of the block at `offset`.
    pub(super) fn rename(&mut self, offset: u32, name: EngineHash) {
        self.names[offset as usize] = name;
    }

    /// Whether [`Span::extend`] is allowed at `offset`.
    pub(super) fn ends_at(&self, offset: u32) -> bool {
        self.cut == offset && self.names.len() == offset as usize && self.held.is_empty()
    }

    /// Appends names behind the last held block. The new blocks are not held until [`Span::keep`].
    pub(super) fn extend(&mut self, names: impl ExactSizeIterator<Item = EngineHash>) {
        debug_assert!(self.ends_at(self.cut), "blocks are appended only to a span without holes");
        make_room(&mut self.names, names.len());
        self.names.extend(names);
    }

    /// Holds the blocks up to `cut`, whose names [`Span::extend`] appended, and drops the later names.
    pub(super) fn keep(&mut self, cut: u32) {
        self.names.truncate(cut as usize);
        self.cut = cut;
    }

    /// Holds the block at `offset`, which must not be held.
    pub(super) fn hold(&mut self, offset: u32, name: EngineHash) {
        debug_assert!(!self.holds(offset), "the block is not held yet; further names are aliases");
        let more = (offset + 1).saturating_sub(self.extent());
        let has_holes = !self.held.is_empty() || offset > self.cut;
        if has_holes && self.held.is_empty() {
            self.create_bits(self.extent());
        }
        make_room(&mut self.names, more as usize);
        self.names.resize(self.names.len() + more as usize, EngineHash::default());
        self.names[offset as usize] = name;
        if !has_holes {
            self.cut = offset + 1;
            return;
        }
        let words = self.extent().div_ceil(WORD) as usize;
        let more_words = words - self.held.len();
        make_room(&mut self.held, more_words);
        self.held.resize(words, 0);
        self.held[(offset / WORD) as usize] |= 1 << (offset % WORD);
        if offset == self.cut {
            self.cut = self.next_hole(offset);
        }
        if self.cut == self.extent() {
            self.held = Vec::new();
        }
    }

    /// Releases the held block at `offset`. Returns the number of heap bytes by which the span grew: the first hole
    /// allocates the bits, but removing the last block, the common case, creates no hole.
    pub(super) fn release(&mut self, offset: u32) -> usize {
        debug_assert!(self.holds(offset), "only a held block can be released");
        let (extent, before) = (self.extent(), self.held.capacity());
        if self.held.is_empty() {
            if offset + 1 == extent {
                self.cut = offset;
                self.names.truncate(offset as usize);
                return 0;
            }
            self.create_bits(extent);
        }
        self.held[(offset / WORD) as usize] &= !(1 << (offset % WORD));
        self.cut = self.cut.min(offset);
        if offset + 1 == extent {
            let words = self.held.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
            steps::add(self.held.len() - words);
            self.held.truncate(words);
            let last = self.held.last().map_or(0, |word| words as u32 * WORD - word.leading_zeros());
            self.names.truncate(last as usize);
        }
        (self.held.capacity() - before) * size_of::<u64>()
    }

    /// Shrinks the lists. Separate from [`Span::release`], because most shrinking spans are freed soon afterwards.
    pub(super) fn shrink(&mut self) {
        give_back(&mut self.names);
        if self.cut == self.extent() {
            self.held = Vec::new();
        } else {
            give_back(&mut self.held);
        }
    }

    /// Whether the block at `offset` is held.
    pub(super) fn holds(&self, offset: u32) -> bool {
        offset < self.cut
            || self.held.get((offset / WORD) as usize).is_some_and(|word| word >> (offset % WORD) & 1 == 1)
    }

    /// End of the held stretch that contains `offset`; `None` if the block is not held.
    pub(super) fn end_from(&self, offset: u32) -> Option<u32> {
        if offset < self.cut {
            return Some(self.cut);
        }
        self.holds(offset).then(|| self.next_hole(offset))
    }

    /// Every held stretch, ascending.
    pub(super) fn stretches(&self) -> impl Iterator<Item = Stretch> {
        let mut end = 0;
        std::iter::from_fn(move || {
            let start = self.next_held(end)?;
            end = self.end_from(start)?;
            Some(Stretch { start, end })
        })
    }

    /// Creates the bits for the first `extent` blocks, which are all held.
    fn create_bits(&mut self, extent: u32) {
        let words = extent.div_ceil(WORD) as usize;
        steps::add(words);
        make_room(&mut self.held, words);
        self.held.resize(words, u64::MAX);
        if let Some(last) = self.held.last_mut().filter(|_| !extent.is_multiple_of(WORD)) {
            *last = (1 << (extent % WORD)) - 1;
        }
    }

    /// The first block at or after `offset` that is not held. Requires the bits.
    fn next_hole(&self, offset: u32) -> u32 {
        let first = (offset / WORD) as usize;
        // Bits before `offset` are treated as held.
        let mut word = !self.held[first] & (u64::MAX << (offset % WORD));
        let mut at = first;
        while word == 0 {
            steps::add(1);
            at += 1;
            word = self.held.get(at).map_or(u64::MAX, |held| !held);
        }
        (at as u32 * WORD + word.trailing_zeros()).min(self.extent())
    }

    /// The first held block at or after `offset`.
    fn next_held(&self, offset: u32) -> Option<u32> {
        if offset < self.cut {
            return Some(offset);
        }
        let first = (offset / WORD) as usize;
        let rest = self.held.get(first..)?.iter().enumerate();
        let mut words =
            rest.map(|(at, word)| if at == 0 { (at, word & (u64::MAX << (offset % WORD))) } else { (at, *word) });
        let (at, word) = words.find(|(_, word)| *word != 0)?;
        Some((first + at) as u32 * WORD + word.trailing_zeros())
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        self.names.capacity() * size_of::<EngineHash>() + self.held.capacity() * size_of::<u64>()
    }

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        let extent = self.extent();
        if self.held.is_empty() {
            return assert_eq!(self.cut, extent, "a span without bits has no holes");
        }
        assert!(self.cut < extent, "a span with bits has a hole");
        assert_eq!(self.held.len(), extent.div_ceil(WORD) as usize, "one bit per name");
        assert_eq!(self.held[0] & 1, u64::from(self.cut > 0));
        assert_eq!(self.next_hole(0), self.cut, "`cut` is the first hole");
        assert!(self.holds(extent - 1), "names end with the last held block");
        assert_eq!(extent.div_ceil(WORD) * WORD - extent, self.held[self.held.len() - 1].leading_zeros());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Several thousand blocks; releases every block or every second block and holds them again, in both orders.
    #[test]
    fn cost_per_hole_is_independent_of_their_number() {
        for (stride, is_forward) in [(1, true), (1, false), (2, true), (2, false)] {
            let cost = |blocks: u32| {
                let mut span = Span::on(1, 0);
                (0..blocks).for_each(|offset| span.hold(offset, EngineHash(u64::from(offset))));
                let mut order: Vec<u32> = (0..blocks - 1).step_by(stride).collect();
                if !is_forward {
                    order.reverse();
                }
                let started = steps::count();
                order.iter().for_each(|offset| _ = span.release(*offset));
                span.check_invariants();
                assert_eq!(span.stretches().count(), if stride == 1 { 1 } else { blocks as usize / 2 });
                order.iter().for_each(|offset| span.hold(*offset, EngineHash(u64::from(*offset))));
                span.check_invariants();
                steps::count() - started
            };
            let (small, large) = (cost(4_096), cost(32_768));
            assert!(large <= 10 * small + 64, "stride {stride}: {small} steps, {large} for eight times as many blocks");
        }
    }
}
