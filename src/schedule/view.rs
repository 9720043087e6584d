//! The scheduler's view of a rank's load, between bounds.
//!
//! Combines board, reply and overlay. `rank` selects the Books that count.

use std::time::Duration;

use crate::load::{BoardLoad, PeerLoad, RankLoad};
use crate::protocol::Timestamp;

/// A rank's load between bounds (each lowest, highest).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    pub(super) active_blocks: (u64, u64),
    pub(super) prefill_tokens: (u64, u64),
    pub(super) requests: u32,
    /// Blocks that a step reads, shared ones counted once per request. Saturates.
    pub(super) read_blocks: u32,
}

/// Prefill backlog ahead of a new request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wait {
    /// How long the prefills take whose durations are modelled.
    pub(super) modelled: Duration,
    /// The tokens of the others.
    pub(super) unmodelled_tokens: u64,
}

/// What a Book adds to its rank's load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Added {
    pub(super) blocks: (u64, u64),
    pub(super) read_blocks: u32,
    pub(super) prefill_tokens: u64,
    pub(super) prefill_duration: Option<Duration>,
}

impl View {
    pub(super) fn of(load: &BoardLoad, now: Timestamp) -> Self {
        let active_blocks = u64::from(load.active_blocks);
        Self {
            active_blocks: (active_blocks, active_blocks),
            prefill_tokens: load.prefill.bounds(now),
            requests: load.requests,
            read_blocks: load.read_blocks,
        }
    }

    pub(super) fn exactly(load: &RankLoad) -> Self {
        let active_blocks = u64::from(load.active_blocks);
        Self {
            active_blocks: (active_blocks, active_blocks),
            prefill_tokens: (load.prefill_tokens, load.prefill_tokens),
            requests: load.requests,
            read_blocks: load.read_blocks,
        }
    }

    /// Adds the load by other replicas, of whose prefills `prefill_tokens` are left.
    pub(super) fn add_peers(&mut self, peers: &PeerLoad, prefill_tokens: u64) {
        let blocks = u64::from(peers.active_blocks);
        self.active_blocks = (self.active_blocks.0 + blocks, self.active_blocks.1.saturating_add(blocks));
        let (least, most) = self.prefill_tokens;
        self.prefill_tokens = (least + prefill_tokens, most.saturating_add(prefill_tokens));
        self.requests = self.requests.saturating_add(peers.requests);
        self.read_blocks = self.read_blocks.saturating_add(peers.read_blocks);
    }

    pub(super) fn add(&mut self, added: Added) {
        let add = |sum: &mut u64, more| *sum = sum.saturating_add(more); // a bound may be "at least u64::MAX"
        add(&mut self.active_blocks.0, added.blocks.0);
        add(&mut self.active_blocks.1, added.blocks.1);
        add(&mut self.prefill_tokens.0, added.prefill_tokens);
        add(&mut self.prefill_tokens.1, added.prefill_tokens);
        self.requests = self.requests.saturating_add(1);
        self.read_blocks = self.read_blocks.saturating_add(added.read_blocks);
    }
}

impl Wait {
    /// Both backlogs.
    pub(super) fn and(self, more: Self) -> Self {
        Self {
            modelled: self.modelled.saturating_add(more.modelled),
            unmodelled_tokens: self.unmodelled_tokens.saturating_add(more.unmodelled_tokens),
        }
    }

    pub(super) fn of(load: &BoardLoad, now: Timestamp) -> Self {
        let (modelled, unmodelled_tokens) = load.prefill.wait(now);
        Self { modelled, unmodelled_tokens }
    }

    pub(super) fn add(&mut self, added: Added) {
        match added.prefill_duration {
            Some(duration) => self.modelled = self.modelled.saturating_add(duration),
            None => self.unmodelled_tokens = self.unmodelled_tokens.saturating_add(added.prefill_tokens),
        }
    }
}
