//! Names of the blocks of one rank about whose copies there are doubts: [`super::doubt`].

use std::mem::size_of;

use ahash::RandomState;
use hashbrown::HashMap;

use super::copies::COPIES_MAX;
use crate::protocol::{BlockHash, EngineHash};

/// The name of the block before, and the content.
pub(super) type Place = (Option<EngineHash>, BlockHash);

/// Doubts about the blocks of one rank in its device tier, at most [`COPIES_MAX`].
#[derive(Debug)]
pub(super) struct Doubts {
    /// Number of stores that may be further copies, by the name of a held block.
    repeated: HashMap<EngineHash, u32, RandomState>,
    /// Blocks that are removed, but may have a further copy.
    removed: HashMap<EngineHash, Place, RandomState>,
    /// Their names.
    places: HashMap<Place, EngineHash, RandomState>,
}

impl Doubts {
    pub(super) fn new(hasher: &RandomState) -> Self {
        let (repeated, removed) = (HashMap::with_hasher(hasher.clone()), HashMap::with_hasher(hasher.clone()));
        Self { repeated, removed, places: HashMap::with_hasher(hasher.clone()) }
    }

    /// Notes a store that may be a further copy. Without room, all earlier doubts end.
    pub(super) fn repeat(&mut self, name: EngineHash) {
        if self.repeated.len() + self.removed.len() >= COPIES_MAX as usize {
            let hasher = self.repeated.hasher().clone();
            *self = Self::new(&hasher);
        }
        *self.repeated.entry(name).or_default() += 1;
    }

    /// Notes a removed block. Blocks with the place of another one are not restored.
    pub(super) fn remove(&mut self, name: EngineHash, place: Place) {
        if self.at(&place).is_none() {
            self.places.insert(place, name);
            self.removed.insert(name, place);
        }
    }

    /// The name of the removed block at a place.
    pub(super) fn at(&self, place: &Place) -> Option<EngineHash> {
        self.places.get(place).copied()
    }

    /// Whether a block is removed and may have a further copy.
    pub(super) fn is_removed(&self, name: EngineHash) -> bool {
        self.removed.contains_key(&name)
    }

    /// Ends the doubt about a removed block. Returns whether there was any.
    pub(super) fn end(&mut self, name: EngineHash) -> bool {
        self.removed.remove(&name).is_some_and(|place| self.places.remove(&place).is_some())
    }

    /// Takes one of the stores that may be further copies.
    pub(super) fn take_repeated(&mut self, name: EngineHash) -> bool {
        let Some(stores) = self.repeated.get_mut(&name) else { return false };
        *stores -= 1;
        if *stores == 0 {
            self.repeated.remove(&name);
        }
        true
    }

    pub(super) fn bytes(&self) -> usize {
        let Self { repeated, removed, places } = self;
        size_of::<Self>() + repeated.allocation_size() + removed.allocation_size() + places.allocation_size()
    }
}
