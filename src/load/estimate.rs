//! How long a prefill takes: what an embedder's model may answer, and what a rank's own past teaches.
//!
//! Owns the question ([`PrefillEstimator`]) and the built-in answer ([`LearnedRate`]). Promises that no single
//! observation moves a learned rate far, whatever it claims, and that the rate stays within bounds. Leaves to others
//! who observes ([`SpeedMeter`](super::SpeedMeter)), and what an estimate is used for.

use std::time::Duration;

use crate::protocol::{Timestamp, WorkerRank};

/// A prefill whose duration is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillFacts {
    /// Where it would run.
    pub rank: WorkerRank,
    /// Tokens to compute.
    pub new_tokens: u32,
    /// Tokens before those that the rank has cached: attention reads them.
    pub cached_tokens: u32,
    /// Prompts computed together with it, itself included. The router asks about one alone: 1.
    pub batch: u32,
}

/// An embedder's model of its engines.
///
/// Asked inside the scheduler's turn, so it must answer at once: look up, compute, never wait. A closure will do.
///
/// ```
/// use std::time::Duration;
/// use pointsman::load::{PrefillEstimator, PrefillFacts};
/// use pointsman::protocol::{WorkerId, WorkerRank};
///
/// let measured = |facts: &PrefillFacts| Some(Duration::from_micros(4_000 + 90 * u64::from(facts.new_tokens)));
/// let rank = WorkerRank::new(WorkerId(1), 0);
/// let facts = PrefillFacts { rank, new_tokens: 1_000, cached_tokens: 0, batch: 1 };
/// assert_eq!(measured.estimate(&facts), Some(Duration::from_millis(94)));
/// ```
pub trait PrefillEstimator: Send + Sync {
    /// How long it takes on an otherwise idle rank; `None` when the model cannot say.
    fn estimate(&self, facts: &PrefillFacts) -> Option<Duration>;
}

impl<F: Fn(&PrefillFacts) -> Option<Duration> + Send + Sync> PrefillEstimator for F {
    fn estimate(&self, facts: &PrefillFacts) -> Option<Duration> {
        self(facts)
    }
}

/// Prefill tokens a second of one rank, learned from the prefills it completes.
///
/// A rank is taken to compute one prompt after the other, so a prefill ran from its booking, or from the completion
/// before it if that was later. What is averaged is time a token, for durations are what is asked for, with weights
/// that halve every 16 samples. A sample further than a factor of 4 from the average counts as if it were at that
/// distance, so that one moves a learned rate by at most an eighth down or a thirtieth up, and the first by at most
/// 3/8 down or 3/17 up. Any constant rate within the bounds is met to 5 % within 256 samples; the usual ones, from
/// 1,000 to 100,000 tokens a second, within 128.
///
/// Prefills of fewer than 256 tokens teach nothing: fixed costs dominate them. Engines complete prompts that they
/// computed together at the same moment, so completions closer than 5 ms are put together, their tokens and their time,
/// before they count as one sample. One number cannot say that long prompts are slower a token: the rate is that of the
/// prompts a rank gets.
///
/// ```
/// use pointsman::load::LearnedRate;
/// use pointsman::protocol::Timestamp;
///
/// let mut rate = LearnedRate::default();
/// assert_eq!(rate.tokens_per_second(), LearnedRate::PRIOR);
/// for second in 0..60 {
///     let booked = Timestamp(second * 1_000_000_000);
///     rate.observe(20_000, booked, booked + std::time::Duration::from_secs(1)); // 20,000 tokens a second
/// }
/// assert!((rate.tokens_per_second() - 20_000.0).abs() < 1_000.0);
/// assert!((rate.estimate(10_000).as_secs_f64() - 0.5).abs() < 0.025);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnedRate {
    seconds_per_token: f64,
    samples: u32,
    /// The latest completion.
    completed: Timestamp,
    /// What completed too close together to be a sample by itself.
    pending: Work,
}

/// Tokens computed, and the time that took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Work {
    tokens: u64,
    time: Duration,
}

/// The least share of a sample in the average: 1 − 2^(−1/16).
const SHARE_MIN: f64 = 0.042_396_4;

/// A sample further than this factor from the average counts as if it were at that distance.
const REACH: f64 = 4.0;

/// Less time than this is put together with the next: completions are reported to within some milliseconds.
const TIME_MIN: Duration = Duration::from_millis(5);

impl LearnedRate {
    /// Tokens a second where nothing is known.
    pub const PRIOR: f64 = 10_000.0;

    /// Samples that the prior is worth.
    pub const PRIOR_SAMPLES: u32 = 4;

    /// Samples after which what was learned before counts half.
    pub const HALF_LIFE_SAMPLES: u32 = 16;

    /// Least tokens a second.
    pub const MIN: f64 = 100.0;

    /// Most tokens a second.
    pub const MAX: f64 = 1_000_000.0;

    /// Shorter prefills teach nothing.
    pub const TOKENS_MIN: u32 = 256;

    /// Begins with a rate that is worth [`Self::PRIOR_SAMPLES`] samples, brought within bounds.
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

    /// The same with another rate, which is worth [`Self::PRIOR_SAMPLES`] samples: what was learned long ago counts no
    /// more than a prior.
    #[must_use]
    pub fn restarted(&self, tokens_per_second: f64) -> Self {
        let Self { completed, pending, .. } = *self;
        Self { completed, pending, ..Self::from_prior(tokens_per_second) }
    }

    /// Learns from a prefill of `tokens` computed tokens; whether the rate was touched.
    pub fn observe(&mut self, tokens: u32, booked: Timestamp, completed: Timestamp) -> bool {
        if tokens < Self::TOKENS_MIN {
            return false; // it may have slipped in beside a long one, so not even its end says anything
        }
        let started = booked.max(self.completed);
        self.completed = completed.max(self.completed);
        self.pending.tokens = self.pending.tokens.saturating_add(u64::from(tokens));
        self.pending.time = self.pending.time.saturating_add(completed.since(started));
        let taken = self.pending.time >= TIME_MIN;
        if taken {
            let Work { tokens, time } = std::mem::take(&mut self.pending);
            self.sample(time.as_secs_f64() / tokens as f64);
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

    /// The rate as learned so far.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        1.0 / self.seconds_per_token
    }

    /// How long a prefill of `tokens` takes at that rate.
    #[must_use]
    pub fn estimate(&self, tokens: u32) -> Duration {
        Duration::from_secs_f64(f64::from(tokens) * self.seconds_per_token)
    }

    /// Samples learned from.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// For tests.
    ///
    /// # Panics
    /// If the rate is out of bounds, or a sample is overdue.
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

    /// A rank that computes at one rate, `together` prompts of `tokens` at a time, with pauses between.
    struct Engine {
        tokens_per_second: f64,
        tokens: u32,
        together: u32,
        pause: Duration,
        now: Timestamp,
    }

    impl Engine {
        fn steady(tokens_per_second: f64) -> Self {
            Self { tokens_per_second, tokens: 4096, together: 1, pause: Duration::ZERO, now: Timestamp::default() }
        }

        /// Teaches until `samples` samples are taken.
        fn teach(&mut self, rate: &mut LearnedRate, samples: u32) {
            while rate.samples() < samples {
                let booked = self.now + self.pause;
                let seconds = f64::from(self.tokens) * f64::from(self.together) / self.tokens_per_second;
                self.now = booked + Duration::from_secs_f64(seconds);
                for _ in 0..self.together {
                    rate.observe(self.tokens, booked, self.now);
                    rate.check_invariants();
                }
            }
        }
    }

    fn off(rate: &LearnedRate, truth: f64) -> f64 {
        (truth / rate.tokens_per_second() - 1.0).abs()
    }

    #[test]
    fn a_share_halves_the_past_in_16_samples() {
        let half = (1.0 - SHARE_MIN).powi(LearnedRate::HALF_LIFE_SAMPLES.cast_signed());
        assert!((half - 0.5).abs() < 1e-5, "{half}");
    }

    #[test]
    fn a_constant_rate_is_learned_in_time() {
        let rows = [(100.0, 256), (1_000.0, 128), (9_000.0, 16), (30_000.0, 128), (100_000.0, 128), (1_000_000.0, 256)];
        for (truth, samples) in rows {
            let mut rate = LearnedRate::default();
            Engine::steady(truth).teach(&mut rate, samples);
            assert!(off(&rate, truth) < 0.05, "{} after {samples} samples of {truth}", rate.tokens_per_second());
        }
        let mut slowed = LearnedRate::from_prior(100_000.0);
        let mut engine = Engine::steady(100_000.0);
        engine.teach(&mut slowed, 1_000);
        engine.tokens_per_second = 10_000.0;
        engine.teach(&mut slowed, 1_128);
        assert!(off(&slowed, 10_000.0) < 0.05, "{} after the engine slowed", slowed.tokens_per_second());
    }

    #[test]
    fn rates_beyond_the_bounds_are_met_at_the_bounds() {
        for (truth, bound) in [(1.0, LearnedRate::MIN), (1e9, LearnedRate::MAX)] {
            let mut rate = LearnedRate::default();
            Engine::steady(truth).teach(&mut rate, 512);
            assert!(off(&rate, bound) < 1e-6, "{} for {truth}", rate.tokens_per_second());
        }
        for (prior, bound) in [(0.0, 100.0), (f64::INFINITY, 1e6), (f64::NAN, 1e4)] {
            assert!(off(&LearnedRate::from_prior(prior), bound) < 1e-9, "{prior}");
        }
    }

    #[test]
    fn a_rare_outlier_hardly_shows() {
        let (mut rate, mut engine) = (LearnedRate::default(), Engine::steady(20_000.0));
        engine.teach(&mut rate, 200);
        for samples in 4..20 {
            engine.teach(&mut rate, samples * 50);
            let paused_for_an_hour = Duration::from_secs(3600);
            rate.observe(4096, engine.now, engine.now + paused_for_an_hour);
            engine.now = engine.now + paused_for_an_hour;
            assert!(off(&rate, 20_000.0) < 0.15, "{}", rate.tokens_per_second());
        }
    }

    #[test]
    fn no_time_and_time_that_runs_backwards_are_no_samples() {
        let mut rate = LearnedRate::default();
        for n in 0..100 {
            assert!(!rate.observe(4096, Timestamp(1_000_000_000), Timestamp(1_000_000_000 - n)));
            rate.check_invariants();
        }
        assert_eq!((rate.samples(), rate.tokens_per_second()), (0, LearnedRate::PRIOR));
        let second = Duration::from_secs(1);
        assert!(rate.observe(4096, Timestamp(1_000_000_000), Timestamp(1_000_000_000) + second));
        assert!(off(&rate, LearnedRate::PRIOR) < 0.2, "{}: one sample", rate.tokens_per_second());
    }

    #[test]
    fn short_prefills_teach_nothing() {
        let mut rate = LearnedRate::default();
        assert!(!rate.observe(LearnedRate::TOKENS_MIN - 1, Timestamp(0), Timestamp(9_000_000_000)));
        assert_eq!(rate, LearnedRate::default());
    }

    proptest! {
        #[test]
        fn any_constant_rate_is_learned_however_prompts_are_grouped(
            truth in 1_000.0..100_000.0f64,
            tokens in 1_024..50_000u32,
            together in 1..16u32,
            pause_ms in 0..1_000u64,
        ) {
            let mut rate = LearnedRate::default();
            let pause = Duration::from_millis(pause_ms);
            Engine { tokens, together, pause, ..Engine::steady(truth) }.teach(&mut rate, 160);
            prop_assert!(off(&rate, truth) < 0.05, "{} for {truth}", rate.tokens_per_second());
        }

        #[test]
        fn no_observation_moves_the_rate_far(
            observations in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u64>(), 0..70u32), 1..200),
        ) {
            let mut rate = LearnedRate::default();
            for (tokens, booked, completed, shift) in observations {
                let before = rate;
                let (booked, completed) = (Timestamp(booked >> shift.min(63)), Timestamp(completed >> shift.min(63)));
                let touched = rate.observe(tokens >> (shift % 20), booked, completed);
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
