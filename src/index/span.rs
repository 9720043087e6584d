//! What one rank holds, in one tier, of one run of the tree.
//!
//! Owns the engine's name of each held block of the run and the knowledge which blocks those are: a leading
//! stretch and, rarely, stretches behind holes. Promises that the list of names ends with the last held block.
//! Leaves the finding of blocks by name to [`super::residence`] and the publishing of the result to
//! [`super::hold`].

use std::mem::size_of;

use super::arena::{give_back, make_room};
use crate::protocol::EngineHash;

/// Consecutive held blocks: offsets `start..end` of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// One rank's blocks of one run.
#[derive(Debug, Default)]
pub(super) struct Span {
    /// The run's node.
    pub(super) node: u32,
    /// Number of leading blocks of the run that are held.
    cut: u32,
    /// The name of each block by its offset in the run. Entries of blocks that are not held mean nothing.
    names: Vec<EngineHash>,
    /// Held stretches behind the first hole: ascending, with a hole before each. Nearly always empty.
    beyond: Vec<Stretch>,
}

impl Span {
    /// A span that holds nothing yet, with room for exactly `len` names.
    pub(super) fn on(node: u32, len: usize) -> Self {
        Self { node, cut: 0, names: Vec::with_capacity(len), beyond: Vec::new() }
    }

    /// Number of leading blocks held.
    pub(super) fn cut(&self) -> u32 {
        self.cut
    }

    /// One past the offset of the last held block; zero when nothing is held.
    pub(super) fn extent(&self) -> u32 {
        self.beyond.last().map_or(self.cut, |last| last.end)
    }

    /// The name of the block at `offset`, which must be held.
    pub(super) fn name(&self, offset: u32) -> EngineHash {
        self.names[offset as usize]
    }

    /// The names of a stretch of held blocks.
    pub(super) fn names(&self, stretch: Stretch) -> &[EngineHash] {
        &self.names[stretch.start as usize..stretch.end as usize]
    }

    /// Gives the block at `offset` another name.
    pub(super) fn rename(&mut self, offset: u32, name: EngineHash) {
        self.names[offset as usize] = name;
    }

    /// Whether [`Span::extend`] may be used at `offset`.
    pub(super) fn ends_at(&self, offset: u32) -> bool {
        self.cut == offset && self.names.len() == offset as usize
    }

    /// Puts names behind the last held block's. Until [`Span::keep`] says how many are held, none is.
    pub(super) fn extend(&mut self, names: impl ExactSizeIterator<Item = EngineHash>) {
        debug_assert!(self.ends_at(self.cut), "a block may only be appended where no hole is");
        make_room(&mut self.names, names.len());
        self.names.extend(names);
    }

    /// Holds blocks up to `cut`, whose names [`Span::extend`] brought, and drops the names of those behind.
    pub(super) fn keep(&mut self, cut: u32) {
        self.names.truncate(cut as usize);
        self.cut = cut;
    }

    /// Holds the block at `offset`, which was not held.
    pub(super) fn hold(&mut self, offset: u32, name: EngineHash) {
        debug_assert!(!self.holds(offset), "a block is held once, further names are aliases");
        let more = (offset as usize + 1).saturating_sub(self.names.len());
        make_room(&mut self.names, more);
        self.names.resize(self.names.len() + more, EngineHash::default());
        self.names[offset as usize] = name;
        // `next` is the first stretch that starts behind the block; the one before it may end right here.
        let next = self.beyond.partition_point(|stretch| stretch.start <= offset);
        let joins_next = self.beyond.get(next).is_some_and(|stretch| stretch.start == offset + 1);
        let end = if joins_next { self.beyond.remove(next).end } else { offset + 1 };
        if offset == self.cut {
            self.cut = end;
        } else if next > 0 && self.beyond[next - 1].end == offset {
            self.beyond[next - 1].end = end;
        } else {
            self.beyond.insert(next, Stretch { start: offset, end });
        }
    }

    /// Gives up the block at `offset`, which was held. Returns by how many heap bytes the span grew: a new hole is
    /// noted, but the last block, which is what nearly always goes, leaves none.
    pub(super) fn release(&mut self, offset: u32) -> usize {
        debug_assert!(self.holds(offset), "only a held block can be given up");
        if offset + 1 == self.cut && self.beyond.is_empty() {
            self.cut = offset;
            self.names.truncate(offset as usize);
            return 0;
        }
        let before = self.beyond.capacity();
        if offset < self.cut {
            if offset + 1 < self.cut {
                self.beyond.insert(0, Stretch { start: offset + 1, end: self.cut });
            }
            self.cut = offset;
        } else {
            let at = self.beyond.partition_point(|stretch| stretch.end <= offset);
            let Stretch { start, end } = self.beyond[at];
            match (start < offset, offset + 1 < end) {
                (false, false) => drop(self.beyond.remove(at)),
                (false, true) => self.beyond[at].start = offset + 1,
                (true, false) => self.beyond[at].end = offset,
                (true, true) => {
                    self.beyond[at].end = offset;
                    self.beyond.insert(at + 1, Stretch { start: offset + 1, end });
                }
            }
        }
        self.names.truncate(self.extent() as usize);
        (self.beyond.capacity() - before) * size_of::<Stretch>()
    }

    /// Gives back memory that blocks given up do not need any more. Apart from [`Span::release`], for most spans
    /// that shrink are gone a moment later.
    pub(super) fn settle(&mut self) {
        give_back(&mut self.names);
        give_back(&mut self.beyond);
    }

    /// Whether the block at `offset` is held.
    pub(super) fn holds(&self, offset: u32) -> bool {
        self.end_from(offset).is_some()
    }

    /// Where the held stretch with the block at `offset` ends; `None` when the block is not held.
    pub(super) fn end_from(&self, offset: u32) -> Option<u32> {
        if offset < self.cut {
            return Some(self.cut);
        }
        let stretch = self.beyond.get(self.beyond.partition_point(|stretch| stretch.end <= offset))?;
        (stretch.start <= offset).then_some(stretch.end)
    }

    /// Every held stretch, ascending.
    pub(super) fn stretches(&self) -> impl Iterator<Item = Stretch> {
        (self.cut > 0).then_some(Stretch { start: 0, end: self.cut }).into_iter().chain(self.beyond.iter().copied())
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        self.names.capacity() * size_of::<EngineHash>() + self.beyond.capacity() * size_of::<Stretch>()
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        assert_eq!(self.names.len(), self.extent() as usize, "names end with the last held block");
        let mut end = self.cut;
        for stretch in &self.beyond {
            assert!(end < stretch.start, "a hole stands before each stretch");
            assert!(stretch.start < stretch.end, "no stretch is empty");
            end = stretch.end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_holding_and_releasing_agrees_with_a_bit_set() {
        // All 6-bit walks: from each set of held blocks, toggle each block.
        for held in 0_u32..64 {
            for toggled in 0..6 {
                let mut span = Span::default();
                for offset in (0..6).rev().filter(|offset| held >> offset & 1 == 1) {
                    span.hold(offset, EngineHash(u64::from(offset)));
                }
                if span.holds(toggled) {
                    span.release(toggled);
                } else {
                    span.hold(toggled, EngineHash(u64::from(toggled)));
                }
                span.check_invariants();
                let expected = held ^ (1 << toggled);
                let actual = (0..6).filter(|&offset| span.holds(offset)).fold(0, |bits, offset| bits | 1 << offset);
                assert_eq!(actual, expected);
                assert_eq!(span.cut(), expected.trailing_ones());
                assert_eq!(span.extent(), 32 - expected.leading_zeros());
            }
        }
    }
}
