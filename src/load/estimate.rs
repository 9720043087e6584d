//! Prefill duration estimates: the interface for an embedder's model, and a rate learned per rank.
//!
//! Defines the interface ([`PrefillEstimator`]) and the built-in estimate ([`LearnedRate`]). After the first ones, a single
//! observation changes a learned rate only by a bounded factor, and the rate stays within fixed bounds.
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
/// sample changes a learned rate by at most an eighth down or a thirtieth up. Engines differ by a factor of a thousand,
/// so a rate starts as the geometric mean of a prior and its first samples, whatever they are.
///
/// The step that computes the end of a prompt also decodes a token of each running request, so its duration without the
/// prompt does not count. With 250 long requests it is 0.1 s, six times the prefill of 400 tokens beside it.
///
/// Prefills of fewer than 256 tokens are ignored, because fixed costs dominate them, unless the first ones take a
/// second. Engines complete prompts computed together at the same moment; therefore completions less than 5 ms apart are
/// merged, with their tokens and time, into one sample. A single number cannot represent that long prompts take more time
/// per token: the rate is valid for the prompts that the rank receives.
///
/// ```
/// use pointsman::internals::load::LearnedRate;
/// use pointsman::protocol::Timestamp;
///
/// let mut rate = LearnedRate::from_known(LearnedRate::PRIOR);
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
    /// Weight in samples of the rate at the start.
    known_samples: u32,
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
    pub const PRIOR_SAMPLES: u32 = 1;

    /// Weight of a known rate in samples.
    pub const KNOWN_SAMPLES: u32 = 4;

    /// Number of samples after which an unknown rate is known.
    pub const FIRST_SAMPLES: u32 = 8;

    /// Minimum tokens per second.
    pub const MIN: f64 = 10.0;

    /// Maximum tokens per second.
    pub const MAX: f64 = 1_000_000.0;

    /// Minimum tokens of a prefill that is used as a sample.
    pub const TOKENS_MIN: u32 = 256;

    /// Minimum tokens and time of a shorter one, while the rate is unknown. The time does not count: fixed costs are below it.
    pub const SHORT_MIN: (u32, Duration) = (32, Duration::from_secs(1));

    /// Starts with a rate that has the weight of [`Self::KNOWN_SAMPLES`] samples, clamped to the bounds. The prior itself has
    /// the weight of [`Self::PRIOR_SAMPLES`].
    #[must_use]
    pub fn from_known(tokens_per_second: f64) -> Self {
        let known = if tokens_per_second.is_nan() { Self::PRIOR } else { tokens_per_second };
        Self {
            seconds_per_token: 1.0 / known.clamp(Self::MIN, Self::MAX),
            samples: 0,
            known_samples: if known == Self::PRIOR { Self::PRIOR_SAMPLES } else { Self::KNOWN_SAMPLES },
            completed: Timestamp::default(),
            pending: Work::default(),
        }
    }

    /// The same state with another rate, which has the weight of [`Self::KNOWN_SAMPLES`] samples, as an outdated one has.
    #[must_use]
    pub fn restarted(&self, tokens_per_second: f64) -> Self {
        Self { completed: self.completed, pending: self.pending, ..Self::from_known(tokens_per_second) }
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
        let is_new = self.known_samples == Self::PRIOR_SAMPLES && self.samples < Self::FIRST_SAMPLES;
        let is_short = tokens < Self::TOKENS_MIN;
        let (tokens_min, fixed) = if is_short && is_new { Self::SHORT_MIN } else { (Self::TOKENS_MIN, Duration::ZERO) };
        if tokens < tokens_min || time < fixed {
            return false;
        }
        let time = time - fixed;
        self.pending.tokens = self.pending.tokens.saturating_add(u64::from(tokens));
        self.pending.time = self.pending.time.saturating_add(time);
        let taken = self.pending.time >= TIME_MIN;
        if taken {
            let Work { tokens, time } = std::mem::take(&mut self.pending);
            let seconds = time.as_secs_f64();
            self.sample((seconds - step_seconds).max(seconds * PREFILL_SHARE_MIN) / tokens as f64, is_new);
        }
        taken
    }

    fn sample(&mut self, seconds_per_token: f64, is_new: bool) {
        self.samples = self.samples.saturating_add(1);
        let weight = self.samples.saturating_add(self.known_samples);
        let (mean, share) = (self.seconds_per_token, SHARE_MIN.max(1.0 / f64::from(weight)));
        let next = if is_new {
            mean.powf(1.0 - share) * seconds_per_token.powf(share)
        } else {
            mean + share * (seconds_per_token.clamp(mean / REACH, mean * REACH) - mean)
        };
        self.seconds_per_token = next.clamp(1.0 / Self::MAX, 1.0 / Self::MIN);
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
        assert!((1.0 / Self::MAX..=1.0 / Self::MIN).contains(&self.seconds_per_token), "{}", self.seconds_per_token);
        assert!(self.pending.time < TIME_MIN, "{:?} should be a sample", self.pending);
        assert!(self.pending.tokens > 0 || self.pending.time.is_zero(), "time without tokens: {:?}", self.pending);
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
    fn unknown_rate_is_learned_from_its_first_samples() {
        for (truth, near, samples) in
            [(10.0, 5.0, 128), (100.0, 3.0, 64), (9_000.0, 1.05, 8), (100_000.0, 1.5, 128), (1_000_000.0, 2.0, 256)]
        {
            let (mut rate, mut engine) = (LearnedRate::from_known(LearnedRate::PRIOR), SteadyEngine::steady(truth));
            engine.teach(&mut rate, 8);
            let factor = (rate.tokens_per_second() / truth).max(truth / rate.tokens_per_second());
            assert!(factor < near, "{factor} after 8 samples of {truth}");
            engine.teach(&mut rate, samples);
            assert!(off(&rate, truth) < 0.05, "{} after {samples} samples of {truth}", rate.tokens_per_second());
        }
        let (mut cold, mut engine) =
            (LearnedRate::from_known(LearnedRate::PRIOR), SteadyEngine::steady(LearnedRate::PRIOR / 50.0));
        engine.teach(&mut cold, 1);
        engine.tokens_per_second = LearnedRate::PRIOR;
        engine.teach(&mut cold, 8);
        let factor = LearnedRate::PRIOR / cold.tokens_per_second();
        assert!((1.0..1.7).contains(&factor), "{factor} times slower, 7 samples after a cold start");
        let mut slowed = LearnedRate::from_known(100_000.0);
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
            let mut rate = LearnedRate::from_known(20_000.0);
            for (tokens, booked, completed, shift) in observations {
                let before = rate;
                let (booked, completed) = (Timestamp(booked >> shift.min(63)), Timestamp(completed >> shift.min(63)));
                let time = rate.completed(booked, completed);
                let touched = rate.observe(tokens >> (shift % 20), time, step_seconds);
                rate.check_invariants();
                prop_assert_eq!(rate.samples(), before.samples() + u32::from(touched));
                let moved = rate.seconds_per_token / before.seconds_per_token;
                let share = SHARE_MIN.max(1.0 / f64::from(rate.samples() + LearnedRate::KNOWN_SAMPLES));
                prop_assert!((1.0 - 0.75 * share - 1e-9..=1.0 + 3.0 * share + 1e-9).contains(&moved), "by {moved}");
                prop_assert!(touched || moved == 1.0);
            }
        }
    }
}
