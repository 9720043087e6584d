//! Names of the blocks of one rank that answers prove: [`super::prove`].
//!
//! A name lasts from its last proof for the rest of that period and one more.

use std::mem::{size_of, swap};

use ahash::RandomState;
use hashbrown::HashSet;

use crate::protocol::EngineHash;

/// Names of the proven blocks of one rank.
#[derive(Debug)]
pub(super) struct ProvenNames {
    /// Proven since the last turn, and before it.
    recent: HashSet<EngineHash, RandomState>,
    older: HashSet<EngineHash, RandomState>,
}

impl ProvenNames {
    pub(super) fn new(hasher: &RandomState) -> Self {
        Self { recent: HashSet::with_hasher(hasher.clone()), older: HashSet::with_hasher(hasher.clone()) }
    }

    /// Ends a period. Returns the names that were not proven in it.
    pub(super) fn turn(&mut self) -> Vec<EngineHash> {
        swap(&mut self.recent, &mut self.older);
        let ended = self.recent.drain().collect();
        self.recent.shrink_to_fit();
        ended
    }

    pub(super) fn contains(&self, name: EngineHash) -> bool {
        self.recent.contains(&name) || self.older.contains(&name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = EngineHash> {
        self.recent.iter().chain(&self.older).copied()
    }

    pub(super) fn add(&mut self, name: EngineHash) {
        self.older.remove(&name);
        self.recent.insert(name);
    }

    pub(super) fn remove(&mut self, name: EngineHash) -> bool {
        self.recent.remove(&name) || self.older.remove(&name)
    }

    pub(super) fn len(&self) -> usize {
        self.recent.len() + self.older.len()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.recent.allocation_size() + self.older.allocation_size()
    }
}
