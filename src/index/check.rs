//! Invariants across the parts of an index.
//!
//! Checks each part and the relations between parts. Visits all data.

use super::Index;
use super::tree::Holder;
use crate::protocol::StorageTier;

impl Index {
    /// Checks every invariant of the index and its parts. For tests: visits every block.
    ///
    /// # Panics
    /// If an invariant is violated.
    ///
    /// ```
    /// pointsman::internals::index::Index::new().check_invariants();
    /// ```
    pub fn check_invariants(&self) {
        let registered = self.ranks.iter().flatten().count();
        assert_eq!(self.registry.len(), registered, "each registered rank has its own slot");
        for (id, slot) in &self.registry {
            assert_eq!(self.rank(*slot).id, *id, "each rank is in the slot that the registry records");
        }
        assert_eq!(self.bytes_used(), self.bytes(), "counted bytes match the visited bytes");
        for tier in StorageTier::ALL {
            self.check_tier(tier);
        }
        for &slot in self.registry.values() {
            self.check_waiting(slot);
        }
        self.check_groups();
    }

    /// Spans and holders must agree: both describe the same blocks.
    fn check_tier(&self, tier: StorageTier) {
        let Some(tree) = self.tree(tier) else { return };
        tree.check_invariants();
        let mut spans = 0;
        for &slot in self.registry.values() {
            let Some(residence) = self.rank(slot).residence(tier) else { continue };
            residence.check_invariants();
            for (id, span) in residence.spans() {
                let node = tree.node(span.node);
                let holder = Holder { slot, span: id, cut: span.cut(), extent: span.extent() };
                assert!(node.holders.contains(&holder), "the tree's holder matches the span");
                spans += 1;
            }
        }
        assert_eq!(self.shape(tier)[2], spans, "every holder has a span");
    }

    fn check_waiting(&self, slot: crate::protocol::Slot) {
        let rank = self.rank(slot);
        let Some(waiting) = rank.waiting() else { return };
        waiting.check_invariants();
        for ((tier, name), block) in waiting.sorted() {
            let knows = |tier, name| rank.residence(tier).is_some_and(|residence| residence.find(name).is_some());
            assert!(!knows(tier, name), "no block of a tier is both pending and held");
            let parent_known = StorageTier::ALL.into_iter().any(|tier| knows(tier, block.parent));
            assert!(!parent_known, "no block is pending behind a known parent");
        }
    }
}
