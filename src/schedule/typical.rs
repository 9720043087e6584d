//! What is typical of the pool, for want of better: learned from its decisions.
//!
//! Owns running means over the last placements. Promises that one placement moves none of them far. Leaves to ranks
//! what is known of each of them.

use crate::load::{EngineSpeed, SpeedCell};

/// Running means, each over some 64 placements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Typical {
    /// Speed of a rank.
    pub(super) speed: EngineSpeed,
    /// Output tokens of a request.
    pub(super) output_tokens: f64,
    /// Share of the prompt tokens that is found cached.
    cached_share: f64,
}

/// Share of the newest in a mean.
const SHARE: f64 = 1.0 / 64.0;

/// Output tokens where nobody has reported any.
const OUTPUT_TOKENS_UNKNOWN: f64 = 256.0;

/// Share of the mean worth of a block that the next one to go is worth: engines push out what was used longest ago.
const OLDEST_WORTH: f64 = 0.25;

/// Most times that a block is taken to be found again.
const HITS_MAX: f64 = 4.0;

impl Typical {
    /// Nothing is known but the blocks' size.
    pub(super) fn new(speed: EngineSpeed) -> Self {
        Self { speed, output_tokens: OUTPUT_TOKENS_UNKNOWN, cached_share: 0.0 }
    }

    /// Counts a placement in; of a prompt of 0 tokens, nothing is said about caches.
    pub(super) fn placed(&mut self, isl_tokens: u32, cached_tokens: u32, cell: &SpeedCell) {
        let toward = |mean: &mut f64, value: f64| *mean += SHARE * (value - *mean);
        if isl_tokens > 0 {
            toward(&mut self.cached_share, f64::from(cached_tokens.min(isl_tokens)) / f64::from(isl_tokens));
        }
        if let Some(tokens) = cell.output_tokens() {
            toward(&mut self.output_tokens, tokens);
        }
        let speed = cell.speed_or(self.speed);
        let EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds } = &mut self.speed;
        toward(work_tokens_per_second, speed.work_tokens_per_second);
        toward(step_seconds, speed.step_seconds);
        toward(request_seconds, speed.request_seconds);
        toward(block_seconds, speed.block_seconds);
    }

    /// Seconds of prefill that are lost later for each one whose blocks push others out. Where a share h of all blocks is
    /// found, each that is computed is found h / (1 − h) times on average; those that go next, less often.
    pub(super) fn displaced(&self) -> f64 {
        let hits = self.cached_share / (1.0 - self.cached_share); // infinite where all is found
        OLDEST_WORTH * hits.min(HITS_MAX)
    }
}
