//! Further names of blocks: all but the oldest name of a block, which is in its span.
//!
//! Few engines give a block two names, but an engine may give it any number of names. The further names of a block are
//! linked in a ring from the oldest to the newest, so that each change has constant cost.

use std::mem::size_of;

use ahash::RandomState;
use hashbrown::HashMap;

use super::table::Spot;
use crate::protocol::EngineHash;

/// Further names of all blocks of one rank in one tier.
#[derive(Debug)]
pub(super) struct Aliases {
    names: HashMap<EngineHash, Alias, RandomState>,
    /// The oldest further name of each block that has any.
    oldest: HashMap<Spot, EngineHash, RandomState>,
}

/// The block of a name, and the neighbours of the name in the ring of this block.
#[derive(Clone, Copy, Debug)]
struct Alias {
    spot: Spot,
    older: EngineHash,
    newer: EngineHash,
}

impl Aliases {
    pub(super) fn new(hasher: &RandomState) -> Self {
        Self { names: HashMap::with_hasher(hasher.clone()), oldest: HashMap::with_hasher(hasher.clone()) }
    }

    /// The block with that further name.
    pub(super) fn spot(&self, name: EngineHash) -> Option<Spot> {
        self.names.get(&name).map(|alias| alias.spot)
    }

    /// The oldest further name of a block.
    pub(super) fn oldest(&self, spot: Spot) -> Option<EngineHash> {
        self.oldest.get(&spot).copied()
    }

    /// Adds a name that is new to the rank.
    pub(super) fn add(&mut self, spot: Spot, name: EngineHash) {
        let oldest = *self.oldest.entry(spot).or_insert(name);
        let newest = self.names.get(&oldest).map_or(name, |alias| alias.older);
        self.names.insert(name, Alias { spot, older: newest, newer: oldest });
        self.link(newest, name);
        self.link(name, oldest);
    }

    /// Removes a name. Returns whether it existed.
    pub(super) fn remove(&mut self, name: EngineHash) -> bool {
        let Some(Alias { spot, older, newer }) = self.names.remove(&name) else { return false };
        if newer == name {
            self.oldest.remove(&spot);
            return true;
        }
        self.link(older, newer);
        if let Some(oldest) = self.oldest.get_mut(&spot).filter(|oldest| **oldest == name) {
            *oldest = newer;
        }
        true
    }

    fn link(&mut self, older: EngineHash, newer: EngineHash) {
        self.names.get_mut(&older).expect("names in a ring are known").newer = newer;
        self.names.get_mut(&newer).expect("names in a ring are known").older = older;
    }

    /// The further names of a block, oldest first.
    pub(super) fn of(&self, spot: Spot) -> impl Iterator<Item = EngineHash> {
        let oldest = self.oldest(spot);
        let newer = move |name: &EngineHash| Some(self.names[name].newer).filter(|newer| Some(*newer) != oldest);
        std::iter::successors(oldest, newer)
    }

    /// Every name, in any order.
    pub(super) fn names(&self) -> impl Iterator<Item = EngineHash> {
        self.names.keys().copied()
    }

    /// Every block with further names, in order.
    pub(super) fn spots(&self) -> Vec<Spot> {
        let mut spots: Vec<_> = self.oldest.keys().copied().collect();
        spots.sort_unstable_by_key(|spot| (spot.span, spot.offset));
        spots
    }

    /// Number of names.
    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    /// Heap bytes, including this struct.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.names.allocation_size() + self.oldest.allocation_size()
    }

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        assert!(self.len() > 0, "the table of aliases exists only while there are aliases");
        let spots = self.spots();
        assert!(spots.iter().all(|spot| self.of(*spot).all(|name| self.spot(name) == Some(*spot))));
        assert_eq!(spots.iter().map(|spot| self.of(*spot).count()).sum::<usize>(), self.len(), "a name in no ring");
    }
}
