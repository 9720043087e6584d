//! Hashes of the last applied payloads.
//!
//! They belong to consecutive sequence numbers up to the last applied one, so numbers are not stored. All memory is
//! allocated at construction. The source keeps the last sequence number.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

/// Hashes of the last applied payloads, oldest first.
#[derive(Clone, Debug)]
pub(super) struct PayloadHashes {
    hashes: VecDeque<u64>,
    remembered_max: usize,
}

/// Result of comparing a payload with an applied message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PayloadMatch {
    Same,
    Other,
    Forgotten,
}

impl PayloadHashes {
    pub(super) fn new(remembered_max: usize) -> Self {
        let remembered_max = remembered_max.clamp(1, 1 << 20);
        Self { hashes: VecDeque::with_capacity(remembered_max), remembered_max }
    }

    /// Hashes of earlier payloads, the last one at the end. Keeps the last ones if there are too many.
    pub(super) fn resumed(remembered_max: usize, hashes: &[u64]) -> Self {
        let mut resumed = Self::new(remembered_max);
        let kept = hashes.len().min(resumed.remembered_max);
        resumed.hashes.extend(&hashes[hashes.len() - kept..]);
        resumed
    }

    /// The last hashes, at most `hashes_max`, the last one at the end.
    pub(super) fn last(&self, hashes_max: usize) -> Vec<u64> {
        self.hashes.iter().skip(self.hashes.len().saturating_sub(hashes_max)).copied().collect()
    }

    pub(super) fn push(&mut self, payload: &[u8]) {
        if self.hashes.len() == self.remembered_max {
            self.hashes.pop_front();
        }
        self.hashes.push_back(xxh3_64(payload));
    }

    /// Compares `payload` with the message `back` numbers before the last applied one.
    pub(super) fn recall(&self, back: u64, payload: &[u8]) -> PayloadMatch {
        let at = usize::try_from(back).ok().and_then(|back| self.hashes.len().checked_sub(back.saturating_add(1)));
        match at.and_then(|at| self.hashes.get(at)) {
            Some(hash) if *hash == xxh3_64(payload) => PayloadMatch::Same,
            Some(_) => PayloadMatch::Other,
            None => PayloadMatch::Forgotten,
        }
    }

    pub(super) fn clear(&mut self) {
        self.hashes.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.hashes.len()
    }

    pub(super) fn check_invariants(&self) {
        assert!(self.hashes.len() <= self.remembered_max, "the number of hashes is bounded");
    }
}
