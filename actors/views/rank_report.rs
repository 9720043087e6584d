//! Booked load and requests of one rank, summed over its entries.

use std::time::Duration;

use super::rank::RankEntry;
use crate::protocol::{Timestamp, WorkerRank};

/// Booked load and requests of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankReport {
    /// The rank.
    pub rank: WorkerRank,
    /// Booked requests.
    pub active_requests: u64,
    /// KV blocks of the booked requests.
    pub active_blocks: u64,
    /// Prompt tokens that the rank has still to compute.
    pub prefill_tokens: u64,
    /// Expected time until these are computed; zero without a learned speed.
    pub prefill_wait: Duration,
    /// Indexed blocks, over all tiers.
    pub held_blocks: u64,
    /// Requests placed on the rank since it joined.
    pub placements: u64,
    /// Prompt tokens of its requests with a report of cached tokens, since it joined.
    pub prompt_tokens: u64,
    /// Cached tokens of these prompts, as predicted at placement.
    pub predicted_tokens: u64,
    /// Cached tokens of these prompts, as reported.
    pub delivered_tokens: u64,
}

impl RankReport {
    /// Adds an entry of the rank, which has two while one is retiring. Returns whether the load is included: not while
    /// its board is being written.
    pub(crate) fn add(&mut self, entry: &RankEntry, now: Timestamp) -> bool {
        self.held_blocks += u64::from(entry.cells.holdings.held_blocks());
        let totals = entry.counts.totals();
        self.placements += totals.placements;
        self.prompt_tokens += totals.prompt_tokens;
        self.predicted_tokens += totals.predicted_tokens;
        self.delivered_tokens += totals.delivered_tokens;
        let Some(load) = entry.cells.board.read() else { return false };
        self.active_requests += u64::from(load.requests);
        self.active_blocks += u64::from(load.active_blocks);
        self.prefill_tokens = self.prefill_tokens.saturating_add(load.prefill.bounds(now).1);
        self.prefill_wait = self.prefill_wait.saturating_add(load.prefill.wait(now).0);
        true
    }
}
