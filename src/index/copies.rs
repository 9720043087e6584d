//! Further copies of blocks, and what a removal removes.
//!
//! An engine without de-duplication stores each copy of a block under the same name. vLLM removes each copy as well, a
//! proposed version only the last one (vllm#55092). Until the engine shows which, every copy needs its own removal. Two
//! removals without a store between them are removals of single copies. Each block of the device tier occupies a block
//! of the engine's pool: if a rank holds more, removals have removed all copies, and a name whose last event is a
//! removal is gone.

use std::mem::take;

use ahash::RandomState;
use hashbrown::{HashMap, HashSet};

use crate::protocol::EngineHash;

/// Limit of the counted further copies of all blocks. Bounds the memory that a publisher can use by storing one block
/// repeatedly; a copy beyond the limit counts as [`Applied::duplicates`](super::Applied::duplicates).
pub(super) const COPIES_MAX: u32 = 1 << 16;

/// Further copies of the blocks of one rank in one tier or cache group.
#[derive(Debug)]
pub(super) struct Copies {
    /// Number of copies beyond the first, by name. Every number is positive.
    further: HashMap<EngineHash, u32, RandomState>,
    pub(super) total: u32,
    /// Whether a removal removes one copy only, once proven.
    removes_one: Option<bool>,
    /// Held names whose last event is a removal, while the meaning of removals is not proven.
    reduced: HashSet<EngineHash, RandomState>,
}

impl Copies {
    pub(super) fn new(hasher: &RandomState) -> Self {
        let (further, reduced) = (HashMap::with_hasher(hasher.clone()), HashSet::with_hasher(hasher.clone()));
        Self { further, total: 0, removes_one: None, reduced }
    }

    /// Counts another copy of a held name. Returns false at the limit, or if removals remove all copies.
    pub(super) fn add(&mut self, name: EngineHash) -> bool {
        self.announce(name);
        if self.total == COPIES_MAX || self.removes_one == Some(false) {
            return false;
        }
        self.total += 1;
        *self.further.entry(name).or_default() += 1;
        true
    }

    /// Records that the engine holds a name.
    pub(super) fn announce(&mut self, name: EngineHash) {
        self.reduced.remove(&name);
    }

    pub(super) fn contains(&self, name: EngineHash) -> bool {
        self.further.contains_key(&name)
    }

    /// Removes one further copy, if there is any.
    pub(super) fn take(&mut self, name: EngineHash) -> bool {
        if self.reduced.contains(&name) {
            self.removes_one = Some(true);
            self.reduced = HashSet::with_hasher(self.further.hasher().clone());
        }
        let Some(further) = self.further.get_mut(&name) else { return false };
        (*further, self.total) = (*further - 1, self.total - 1);
        if *further == 0 {
            self.further.remove(&name);
        }
        if self.removes_one.is_none() {
            self.reduced.insert(name);
        }
        self.shrink();
        true
    }

    /// Drops the further copies of a name.
    pub(super) fn forget(&mut self, name: EngineHash) {
        self.reduced.remove(&name);
        self.total -= self.further.remove(&name).unwrap_or_default();
        self.shrink();
    }

    /// Ends the counting if nothing disproves that removals remove all copies. Returns the names that are gone.
    pub(super) fn end(&mut self) -> Vec<EngineHash> {
        if !self.reduced.is_empty() {
            (self.removes_one, self.total) = (Some(false), 0);
            self.further = HashMap::with_hasher(self.further.hasher().clone());
        }
        take(&mut self.reduced).into_iter().collect()
    }

    fn shrink(&mut self) {
        if self.further.len() < self.further.capacity() / 4 {
            self.further.shrink_to(self.further.len() * 2);
        }
    }

    /// Each further copy by its name, ordered.
    pub(super) fn names(&self) -> Vec<EngineHash> {
        let copies = self.further.iter().flat_map(|(name, further)| (0..*further).map(|_| *name));
        let mut names: Vec<_> = copies.collect();
        names.sort_unstable();
        names
    }

    /// Held names whose last event is a removal, ordered.
    pub(super) fn reduced(&self) -> Vec<EngineHash> {
        let mut names: Vec<_> = self.reduced.iter().copied().collect();
        names.sort_unstable();
        names
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        self.further.allocation_size() + self.reduced.allocation_size()
    }

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self, is_held: impl Fn(EngineHash) -> bool) {
        assert!(self.further.iter().all(|(name, further)| *further > 0 && is_held(*name)));
        assert!(self.reduced.iter().all(|name| is_held(*name)));
        assert!(self.total == self.further.values().sum::<u32>() && self.total <= COPIES_MAX);
        assert!(self.reduced.is_empty() || self.removes_one.is_none());
        assert!(self.total == 0 || self.removes_one != Some(false));
    }
}
