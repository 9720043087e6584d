//! Prefill duration estimates: the interface for an embedder's model, and a rate learned per rank.
//!
//! Defines the interface ([`PrefillEstimator`]) and the built-in estimate ([`LearnedRate`]). A single observation
//! changes a learned rate only by a bounded factor, and the rate stays within fixed bounds.
//! [`SpeedMeter`](super::SpeedMeter) provides the observations.

use std::time::Duration;

use crate::protocol::{Timestamp, WorkerRank};

/// An embedder's model of its engines: the duration of a prefill on an otherwise idle rank, by the rank, the tokens to
/// compute, and the cached tokens before them, which attention reads. `None` if the model has no estimate. Called on the
/// scheduler's strand, so it must return quickly and never block.
pub type PrefillEstimator = dyn Fn(WorkerRank, u32, u32) -> Option<Duration> + Send + Sync;

/// Prefill throughput of one rank in tokens per second, learned from its completed prefills.
///
/// A rank is assumed to compute one prompt after the other, so a prefill runs from its booking, or from the previous
/// completion if that was later. The average is over time per token, because durations are the output, with weights
/// that halve every 16 samples. A sample beyond a factor of 4 from the average is clamped to that distance, so one
/// sample changes a learned rate by at most an eighth down or a thirtieth up, and the first by at most 3/8 down or 3/17
/// up. Any constant rate within the bounds is learned to 5 % within 256 samples; common rates, from 1,000 to 100,000
/// tokens per second, within 128.
///
/// The step that computes the end of a prompt also decodes a token of each running request, so its duration without the
/// prompt does not count. With 250 long requests it is 0.1 s, six times the prefill of 400 tokens beside it.
///
/// Prefills of fewer than 256 tokens are ignored, because fixed costs dominate them. Engines complete prompts computed
/// together at the same moment; therefore completions less than 5 ms apart are merged, with their tokens and time, into
/// one sample. A single number cannot represent that long prompts take more time per token: the rate is valid for the
/// prompts that the rank receives.
///
/// ```
/// use pointsman::internals::load::LearnedRate;
/// use pointsman::protocol::Timestamp;
///
/// let mut rate = LearnedRate::default();
/// assert_eq!(rate.tokens_per_second(), LearnedRate::PRIOR);
/// for second in 0..60 {
///     let booked = Timestamp(second * 1_000_000_000);
///     let time = rate.completed(booked, booked + std::time::Duration::from_secs(1));
///     rate.observe(20_000, time, 0.0); // 20,000 tokens a second
/// }
/// assert!((rate.tokens_per_second() - 20_000.0).abs() < 1_000.0);
/// assert!(!rate.observe(LearnedRate::TOKENS_MIN - 1, std::time::Duration::from_secs(9), 0.0)); // too short
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnedRate {
    seconds_per_token: f64,
    samples: u32,
    /// Time of the latest completion.
    completed: Timestamp,
    /// Completions too close together for a sample of their own.
    pending: Work,
}

/// Computed tokens and their time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Work {
    tokens: u64,
    time: Duration,
}

/// Minimum weight of a sample in the average: 1 − 2^(−1/16).
const SHARE_MIN: f64 = 0.042_396_4;

/// Maximum factor between a sample and the average; samples beyond it are clamped.
const REACH: f64 = 4.0;

/// Minimum share of a sample's time that is its prefill, because step times are estimates.
const PREFILL_SHARE_MIN: f64 = 0.2;

/// Minimum time of a sample; shorter ones are merged with the next. Completions are reported with an accuracy of a few
/// milliseconds.
const TIME_MIN: Duration = Duration::from_millis(5);

impl LearnedRate {
    /// Tokens per second before the first sample.
    pub const PRIOR: f64 = 10_000.0;

    /// Weight of the prior in samples.
    pub const PRIOR_SAMPLES: u32 = 4;

    /// Minimum tokens per second.
    pub const MIN: f64 = 100.0;

    /// Maximum tokens per second.
    pub const MAX: f64 = 1_000_000.0;

    /// Minimum tokens of a prefill that is used as a sample.
    pub const TOKENS_MIN: u32 = 256;

    /// Starts with a rate that has the weight of [`Self::PRIOR_SAMPLES`] samples, clamped to the bounds.
    #[must_use]
    pub fn from_prior(tokens_per_second: f64) -> Self {
        let known = if tokens_per_second.is_nan() { Self::PRIOR } else { tokens_per_second };
        Self {
            seconds_per_token: 1.0 / known.clamp(Self::MIN, Self::MAX),
            samples: 0,
            completed: Timestamp::default(),
            pending: Work::default(),
        }
    }

    /// The same state with another rate, which has the weight of [`Self::PRIOR_SAMPLES`] samples: an outdated rate
    /// counts no more than a prior.
    #[must_use]
    pub fn restarted(&self, tokens_per_second: f64) -> Self {
        let Self { completed, pending, .. } = *self;
        Self { completed, pending, ..Self::from_prior(tokens_per_second) }
    }

    /// Records the completion of a prefill, and returns the time that it took.
    pub fn completed(&mut self, booked: Timestamp, completed: Timestamp) -> Duration {
        let started = booked.max(self.completed);
        self.completed = completed.max(self.completed);
        completed.since(started)
    }

    /// Learns from a prefill of `tokens` computed tokens in `time`, on a rank whose decode steps take `step_seconds`.
    /// Returns whether the rate changed.
    pub fn observe(&mut self, tokens: u32, time: Duration, step_seconds: f64) -> bool {
        if tokens < Self::TOKENS_MIN {
            return false;
        }
        self.pending.tokens = self.pending.tokens.saturating_add(u64::from(tokens));
        self.pending.time = self.pending.time.saturating_add(time);
        let taken = self.pending.time >= TIME_MIN;
        if taken {
            let Work { tokens, time } = std::mem::take(&mut self.pending);
            let seconds = time.as_secs_f64();
            self.sample((seconds - step_seconds).max(seconds * PREFILL_SHARE_MIN) / tokens as f64);
        }
        taken
    }

    fn sample(&mut self, seconds_per_token: f64) {
        self.samples = self.samples.saturating_add(1);
        let known = f64::from(self.samples) + f64::from(Self::PRIOR_SAMPLES);
        let (mean, share) = (self.seconds_per_token, SHARE_MIN.max(1.0 / known));
        let near = seconds_per_token.clamp(mean / REACH, mean * REACH);
        self.seconds_per_token = (mean + share * (near - mean)).clamp(1.0 / Self::MAX, 1.0 / Self::MIN);
        debug_assert!(self.seconds_per_token.is_finite(), "a rate of {near} after {mean}");
    }

    /// The learned rate.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        1.0 / self.seconds_per_token
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If the rate is out of bounds, or a complete sample is pending.
    pub fn check_invariants(&self) {
        let (least, most) = (1.0 / Self::MAX, 1.0 / Self::MIN);
        assert!((least..=most).contains(&self.seconds_per_token), "{} s a token", self.seconds_per_token);
        assert!(self.pending.time < TIME_MIN, "{:?} should be a sample", self.pending);
        assert!(self.pending.tokens > 0 || self.pending.time.is_zero(), "time without tokens: {:?}", self.pending);
    }
}

impl Default for LearnedRate {
    fn default() -> Self {
        Self::from_prior(Self::PRIOR)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A rank with a constant rate.
    struct SteadyEngine {
        tokens_per_second: f64,
        now: Timestamp,
    }

    impl SteadyEngine {
        fn steady(tokens_per_second: f64) -> Self {
            Self { tokens_per_second, now: Timestamp::default() }
        }

        /// Runs until `samples` samples are taken.
        fn teach(&mut self, rate: &mut LearnedRate, samples: u32) {
            while rate.samples() < samples {
                let booked = self.now;
                self.now = booked + Duration::from_secs_f64(4096.0 / self.tokens_per_second);
                let time = rate.completed(booked, self.now);
                rate.observe(4096, time, 0.0);
                rate.check_invariants();
            }
        }
    }

    fn off(rate: &LearnedRate, truth: f64) -> f64 {
        (truth / rate.tokens_per_second() - 1.0).abs()
    }

    #[test]
    fn constant_rate_is_learned_within_the_documented_samples() {
        let rows = [(100.0, 256), (1_000.0, 128), (9_000.0, 16), (30_000.0, 128), (100_000.0, 128), (1_000_000.0, 256)];
        for (truth, samples) in rows {
            let mut rate = LearnedRate::default();
            SteadyEngine::steady(truth).teach(&mut rate, samples);
            assert!(off(&rate, truth) < 0.05, "{} after {samples} samples of {truth}", rate.tokens_per_second());
        }
        let mut slowed = LearnedRate::from_prior(100_000.0);
        let mut engine = SteadyEngine::steady(100_000.0);
        engine.teach(&mut slowed, 1_000);
        engine.tokens_per_second = 10_000.0;
        engine.teach(&mut slowed, 1_128);
        assert!(off(&slowed, 10_000.0) < 0.05, "{} after the engine slowed", slowed.tokens_per_second());
    }

    proptest! {
        #[test]
        fn rate_change_per_observation_is_bounded(
            observations in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u64>(), 0..70u32), 1..200),
            step_seconds in 0.0..10.0,
        ) {
            let mut rate = LearnedRate::default();
            for (tokens, booked, completed, shift) in observations {
                let before = rate;
                let (booked, completed) = (Timestamp(booked >> shift.min(63)), Timestamp(completed >> shift.min(63)));
                let time = rate.completed(booked, completed);
                let touched = rate.observe(tokens >> (shift % 20), time, step_seconds);
                rate.check_invariants();
                prop_assert_eq!(rate.samples(), before.samples() + u32::from(touched));
                let moved = rate.seconds_per_token / before.seconds_per_token;
                let share = SHARE_MIN.max(1.0 / f64::from(rate.samples() + LearnedRate::PRIOR_SAMPLES));
                prop_assert!((1.0 - 0.75 * share - 1e-9..=1.0 + 3.0 * share + 1e-9).contains(&moved), "by {moved}");
                prop_assert!(touched || moved == 1.0);
            }
        }
    }
}
