//! What must hold between the parts of an index.
//!
//! Owns nothing. Promises to find a broken promise of any part or between parts; costs a visit to everything.

use super::Index;
use super::tree::Holder;
use crate::protocol::StorageTier;

impl Index {
    /// Checks every invariant of the index and its parts. For tests: visits every block.
    ///
    /// # Panics
    /// When an invariant is broken.
    ///
    /// ```
    /// pointsman::index::Index::new().check_invariants();
    /// ```
    pub fn check_invariants(&self) {
        let seated = self.ranks.iter().flatten().count();
        assert_eq!(self.registry.len(), seated, "every rank has a seat of its own");
        for (id, slot) in &self.registry {
            assert_eq!(self.rank(*slot).id, *id, "every rank sits where the registry says");
        }
        assert_eq!(self.bytes_used(), self.bytes(), "no byte is missed");
        for tier in StorageTier::ALL {
            self.check_tier(tier);
        }
        for &slot in self.registry.values() {
            self.check_waiting(slot);
        }
    }

    /// Spans and holders are two sides of the same thing.
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
                assert!(node.holders.contains(&holder), "the tree says what the span says");
                spans += 1;
            }
        }
        assert_eq!(self.shape(tier).holders, spans, "every holder has its span");
    }

    fn check_waiting(&self, slot: crate::protocol::Slot) {
        let rank = self.rank(slot);
        let Some(waiting) = rank.waiting() else { return };
        waiting.check_invariants();
        for ((tier, name), block) in waiting.sorted() {
            let knows = |tier, name| rank.residence(tier).is_some_and(|residence| residence.find(name).is_some());
            assert!(!knows(tier, name), "no block of a tier both waits and is held");
            let parent_known = StorageTier::ALL.into_iter().any(|tier| knows(tier, block.parent));
            assert!(!parent_known, "no block waits for a parent that is known");
        }
    }
}
