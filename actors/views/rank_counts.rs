//! Counts of the requests of one rank, added by the tasks of the callers and read once per second.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the rank joined.
#[derive(Debug, Default)]
pub(crate) struct RankCounts {
    placements: AtomicU64,
    prompt_tokens: AtomicU64,
    predicted_tokens: AtomicU64,
    delivered_tokens: AtomicU64,
}

/// Values of [`RankCounts`]. Those of one request may be partly included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankTotals {
    /// Requests placed on the rank.
    pub(crate) placements: u64,
    /// Prompt tokens of requests with a report of cached tokens.
    pub(crate) prompt_tokens: u64,
    /// Cached tokens of these prompts, as predicted at placement.
    pub(crate) predicted_tokens: u64,
    /// Cached tokens of these prompts, as reported.
    pub(crate) delivered_tokens: u64,
}

impl RankCounts {
    /// Counts a placed request.
    pub(crate) fn placed(&self) {
        self.placements.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the report of a request.
    pub(crate) fn reported(&self, prompt_tokens: u32, predicted_tokens: u32, delivered_tokens: u32) {
        self.prompt_tokens.fetch_add(prompt_tokens.into(), Ordering::Relaxed);
        self.predicted_tokens.fetch_add(predicted_tokens.into(), Ordering::Relaxed);
        self.delivered_tokens.fetch_add(delivered_tokens.into(), Ordering::Relaxed);
    }

    pub(crate) fn totals(&self) -> RankTotals {
        RankTotals {
            placements: self.placements.load(Ordering::Relaxed),
            prompt_tokens: self.prompt_tokens.load(Ordering::Relaxed),
            predicted_tokens: self.predicted_tokens.load(Ordering::Relaxed),
            delivered_tokens: self.delivered_tokens.load(Ordering::Relaxed),
        }
    }
}

impl RankTotals {
    /// The increase since `earlier` totals of the same counts.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            placements: self.placements.saturating_sub(earlier.placements),
            prompt_tokens: self.prompt_tokens.saturating_sub(earlier.prompt_tokens),
            predicted_tokens: self.predicted_tokens.saturating_sub(earlier.predicted_tokens),
            delivered_tokens: self.delivered_tokens.saturating_sub(earlier.delivered_tokens),
        }
    }
}
