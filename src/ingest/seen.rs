//! What the last applied messages looked like.
//!
//! Owns their hashes. They stand for consecutive numbers up to the last applied one, so no number is kept. Promises
//! never to allocate after its making. Leaves to the source which number was the last.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

/// Hashes of the last applied payloads, oldest first.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    hashes: VecDeque<u64>,
    remembered_max: usize,
}

/// What is remembered of a message that should have been applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Same,
    Other,
    Forgotten,
}

impl Seen {
    pub(super) fn new(remembered_max: usize) -> Self {
        let remembered_max = remembered_max.clamp(1, 1 << 20);
        Self { hashes: VecDeque::with_capacity(remembered_max), remembered_max }
    }

    pub(super) fn push(&mut self, payload: &[u8]) {
        if self.hashes.len() == self.remembered_max {
            self.hashes.pop_front();
        }
        self.hashes.push_back(xxh3_64(payload));
    }

    /// What is known of the message `back` numbers before the last applied one.
    pub(super) fn recall(&self, back: u64, payload: &[u8]) -> Memory {
        let at = usize::try_from(back).ok().and_then(|back| self.hashes.len().checked_sub(back.saturating_add(1)));
        match at.and_then(|at| self.hashes.get(at)) {
            Some(hash) if *hash == xxh3_64(payload) => Memory::Same,
            Some(_) => Memory::Other,
            None => Memory::Forgotten,
        }
    }

    pub(super) fn clear(&mut self) {
        self.hashes.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.hashes.len()
    }

    pub(super) fn check_invariants(&self) {
        assert!(self.hashes.len() <= self.remembered_max, "only so many are remembered");
    }
}
