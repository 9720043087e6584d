//! Engine speed of a rank: priors, learned values, and their publication without messages.
//!
//! Defines the four numbers of [`EngineSpeed`] and the cell in which a rank's sequence actor publishes them. The cell
//! is separate from the board, whose slots are two full cache lines and change more often. A reader sees published
//! numbers or none; between two consecutive publications it may see parts of both, which is harmless.
//!
//! A rank without work provides no samples, so without correction a rank that was once slow would never be selected
//! again. Therefore learned values age: after [`SpeedCell::FRESH`] without a sample they approach the typical values of
//! the pool, with half of the difference remaining after each [`SpeedCell::HALF_LIFE`]. [`LearnedRate`] and
//! [`LearnedStep`](super::LearnedStep) do the learning.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::{LearnedRate, PredictionBias};
use crate::protocol::Timestamp;
use crate::record::bytes::recorded;

/// Time costs of a rank's engine.
///
/// A step, which generates one token per running request, takes `step_seconds`, plus `request_seconds` per running
/// request, plus `block_seconds` per KV block read. Prefills process their [work](work_tokens) at
/// `work_tokens_per_second`.
///
/// ```
/// use pointsman::internals::load::EngineSpeed;
///
/// let speed = EngineSpeed { step_seconds: 0.004, request_seconds: 20e-6, block_seconds: 4e-6, ..EngineSpeed::prior(64) };
/// assert!((speed.step(10.0, 1_000.0) - 0.0082).abs() < 1e-9);
/// assert!((speed.prefill(10_000.0) - 1.0).abs() < 1e-9);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EngineSpeed {
    /// Prefill work in tokens per second.
    pub work_tokens_per_second: f64,
    /// Fixed time of a step in seconds.
    pub step_seconds: f64,
    /// Time per running request of a step, in seconds.
    pub request_seconds: f64,
    /// Time per KV block of a step, in seconds.
    pub block_seconds: f64,
}

/// Tokens of context at which attention doubles the cost of a prompt token.
///
/// A token takes two operations per parameter, and attention takes four per layer, hidden dimension and token of
/// context. For a dense model of 8 billion parameters (32 layers of 4,096) these are 1.6e10 and 5.2e5, equal at about
/// 31,000 tokens; published times of such models give 33,000. Larger models have a higher value (70 billion: 53,000),
/// so the cost of long prompts is slightly overestimated for them.
pub const ATTENTION_TOKENS: f64 = 33_000.0;

/// Work of computing `new_tokens` after `cached_tokens`, in tokens without context: attention reads the context of each
/// token.
///
/// ```
/// use pointsman::internals::load::{work_tokens, ATTENTION_TOKENS};
///
/// assert_eq!(work_tokens(100, ATTENTION_TOKENS as u32) as u32, 200);
/// assert_eq!(work_tokens(0, 500), 0.0);
/// ```
#[must_use]
pub fn work_tokens(new_tokens: u32, cached_tokens: u32) -> f64 {
    let new = f64::from(new_tokens);
    new * (1.0 + (f64::from(cached_tokens) + new / 2.0) / ATTENTION_TOKENS)
}

impl EngineSpeed {
    /// Prior of an unknown engine with blocks of `block_size` tokens: the step time of 8 billion parameters on an H100,
    /// which reads a token's keys and values in 65 ns, and less than half its prefill rate, because the first prompts
    /// correct the rate quickly.
    #[must_use]
    pub fn prior(block_size: u32) -> Self {
        Self {
            work_tokens_per_second: LearnedRate::PRIOR,
            step_seconds: 0.004,
            request_seconds: 20e-6,
            block_seconds: 65e-9 * f64::from(block_size.max(1)),
        }
    }

    /// Time of a step with `requests` running requests that read `blocks` KV blocks, in seconds.
    #[must_use]
    pub fn step(&self, requests: f64, blocks: f64) -> f64 {
        self.step_seconds + self.request_seconds * requests + self.block_seconds * blocks
    }

    /// Time of `work_tokens` of prefill alone, in seconds.
    #[must_use]
    pub fn prefill(&self, work_tokens: f64) -> f64 {
        work_tokens / self.work_tokens_per_second
    }
}

/// A rank's speed as published by its sequence actor.
///
/// All accesses are relaxed: each number is independent, and learned values are approximate in any case.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::load::{EngineSpeed, SpeedCell};
/// use pointsman::protocol::Timestamp;
///
/// let cell = SpeedCell::default();
/// assert_eq!((cell.work_tokens_per_second(), cell.prefill_time(500.0)), (None, None));
/// cell.publish(&EngineSpeed { work_tokens_per_second: 10_000.0, ..EngineSpeed::prior(64) }, Timestamp(0));
/// assert_eq!(cell.prefill_time(500.0), Some(Duration::from_millis(50)));
/// assert_eq!(cell.output_tokens(), None);
/// cell.publish_output(300.0);
/// assert_eq!(cell.output_tokens(), Some(300.0));
/// ```
#[derive(Debug, Default)]
pub struct SpeedCell {
    /// Bits of an `f32`; 0 while unknown.
    work_rate: AtomicU32,
    /// Bits of `f32`s: seconds per step, request and block.
    step: [AtomicU32; 3],
    /// Bits of an `f32`; 0 while unknown.
    output_tokens: AtomicU32,
    /// Times of the last samples of the rate and of the step, in [ticks](tick).
    learned_at: [AtomicU32; 2],
    /// Bits of `f32`s: factors that correct predictions, of the time to first token and between tokens. 0 while unknown.
    bias: [AtomicU32; 2],
    /// Times of their last samples, in ticks.
    bias_at: [AtomicU32; 2],
    /// Typical values of the pool as bits of `f32`s: rate, step, request and block. Written by the scheduler.
    typical: [AtomicU32; 4],
}

/// Copy of everything that a rank's sequence actor has published in its [`SpeedCell`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeedSample([u32; SpeedSample::WORDS]);

impl SpeedSample {
    /// Number of words.
    pub(crate) const WORDS: usize = 11;

    pub(crate) fn to_words(self) -> [u32; Self::WORDS] {
        self.0
    }

    pub(crate) fn from_words(words: [u32; Self::WORDS]) -> Self {
        Self(words)
    }
}

recorded! {
    SpeedSample { 0 }
    PublishedSpeed { work_rate, step }
}

/// A time in units of 2^26 ns (67 ms); 32 bits cover nine years.
#[expect(clippy::cast_possible_truncation, reason = "32 bits of such units are nine years")]
fn tick(at: Timestamp) -> u32 {
    (at.0 >> 26) as u32
}

/// Copy of a [`SpeedCell`]'s speed: the rate and the seconds of a step, a request and a block. Each may be unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishedSpeed {
    /// Bits of an `f32`; 0 while the rate is unknown.
    work_rate: u32,
    /// Bits of `f32`s.
    step: [u32; 3],
}

impl PublishedSpeed {
    /// The speed, with `otherwise` for the unknown parts.
    #[must_use]
    #[inline]
    pub fn or(&self, otherwise: EngineSpeed) -> EngineSpeed {
        let [step_seconds, request_seconds, block_seconds] = self.step.map(|bits| f64::from(f32::from_bits(bits)));
        let work_tokens_per_second = self.work_tokens_per_second().unwrap_or(otherwise.work_tokens_per_second);
        if step_seconds > 0.0 {
            EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds }
        } else {
            EngineSpeed { work_tokens_per_second, ..otherwise }
        }
    }

    /// The speed with the pool's `typical` one mixed in: `weights` are those of the rate and of the step, 1 while fresh
    /// ([`SpeedCell::weights`]).
    #[must_use]
    pub fn aged(&self, weights: [f64; 2], typical: &EngineSpeed) -> EngineSpeed {
        let known = self.or(*typical);
        let [rate, step] = weights;
        let slowness = |own: f64, usual: f64| mixed(own.recip(), usual.recip(), step).recip();
        EngineSpeed {
            work_tokens_per_second: mixed(known.work_tokens_per_second, typical.work_tokens_per_second, rate),
            step_seconds: slowness(known.step_seconds, typical.step_seconds),
            request_seconds: slowness(known.request_seconds, typical.request_seconds),
            block_seconds: slowness(known.block_seconds, typical.block_seconds),
        }
    }

    /// Tokens of prefill work per second, if known.
    #[must_use]
    #[inline]
    pub fn work_tokens_per_second(&self) -> Option<f64> {
        (self.work_rate != 0).then(|| f64::from(f32::from_bits(self.work_rate)))
    }

    /// Duration of `work_tokens` of prefill, if the rate is known.
    #[must_use]
    pub fn prefill_time(&self, work_tokens: f64) -> Option<Duration> {
        // A rate near zero, which is never learned, takes longer than a `Duration` holds.
        let seconds = work_tokens / self.work_tokens_per_second()?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

impl SpeedCell {
    /// Time after the last sample during which a speed has full weight.
    pub const FRESH: Duration = Duration::from_secs(30);

    /// Later half-life of the difference to the typical speed.
    pub const HALF_LIFE: Duration = Duration::from_secs(20);

    /// The speed at `now`: the learned speed weighted by its age, and the typical speed for the rest.
    ///
    /// The averages are over tokens per second and steps per second: a rank that was a hundred times slower than the
    /// others counts as 1.2 times slower after three half-lives.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::internals::load::{EngineSpeed, SpeedCell};
    /// use pointsman::protocol::Timestamp;
    ///
    /// let (cell, typical) = (SpeedCell::default(), EngineSpeed::prior(64));
    /// cell.publish(&EngineSpeed { work_tokens_per_second: 100.0, ..typical }, Timestamp(0));
    /// let after = |age| cell.speed_at(Timestamp(0) + age, &typical).work_tokens_per_second;
    /// assert_eq!(after(SpeedCell::FRESH), 100.0);
    /// let half = after(SpeedCell::FRESH + SpeedCell::HALF_LIFE);
    /// assert!((half / 5_050.0 - 1.0).abs() < 0.01, "{half}");
    /// ```
    #[must_use]
    pub fn speed_at(&self, now: Timestamp, typical: &EngineSpeed) -> EngineSpeed {
        self.published().aged(self.weights(now), typical)
    }

    /// Weights of the rate and of the step at `now`: 1 while they are fresh, then falling.
    #[must_use]
    pub fn weights(&self, now: Timestamp) -> [f64; 2] {
        self.learned_at.each_ref().map(|learned_at| Self::weight(learned_at.load(Ordering::Relaxed), now))
    }

    /// Weight at `now` of a value of this tick.
    fn weight(learned_at: u32, now: Timestamp) -> f64 {
        let stale = tick(now).saturating_sub(learned_at).saturating_sub(tick(Timestamp(0) + Self::FRESH));
        if stale == 0 {
            return 1.0;
        }
        (-((u64::from(stale) << 26) as f64) / Self::HALF_LIFE.as_nanos() as f64).exp2()
    }

    /// The published factors that correct predictions, if known.
    #[must_use]
    pub fn bias(&self) -> [Option<f64>; 2] {
        self.bias.each_ref().map(|cell| {
            let bits = cell.load(Ordering::Relaxed);
            (bits != 0).then(|| f64::from(f32::from_bits(bits)))
        })
    }

    /// The factors at `now`. They age like speeds, towards 1, so that a rank is tried again that predictions have
    /// excluded.
    ///
    /// ```
    /// use pointsman::internals::load::SpeedCell;
    /// use pointsman::protocol::Timestamp;
    ///
    /// let cell = SpeedCell::default();
    /// assert_eq!(cell.bias_at(Timestamp(0)).ttft, 1.0);
    /// cell.publish_bias(0, 4.0, Timestamp(0));
    /// assert_eq!(cell.bias_at(Timestamp(0)).ttft, 4.0);
    /// let later = cell.bias_at(Timestamp(0) + SpeedCell::FRESH + SpeedCell::HALF_LIFE).ttft;
    /// assert!((later - 2.0).abs() < 0.02, "half of the logarithm: {later}");
    /// ```
    #[must_use]
    pub fn bias_at(&self, now: Timestamp) -> PredictionBias {
        let [ttft, itl] = std::array::from_fn(|which| {
            let Some(factor) = self.bias()[which] else { return 1.0 };
            let weight = Self::weight(self.bias_at[which].load(Ordering::Relaxed), now);
            if weight >= 1.0 { factor } else { factor.powf(weight) }
        });
        PredictionBias { ttft, itl }
    }

    /// Publishes a factor: of the time to first token (0) or between tokens (1). Only the rank's sequence actor may call
    /// this.
    ///
    /// # Panics
    /// If `which` is neither 0 nor 1.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_bias(&self, which: usize, factor: f64, now: Timestamp) {
        self.bias_at[which].store(tick(now), Ordering::Relaxed);
        self.bias[which].store(known_bits(factor as f32), Ordering::Relaxed);
    }

    /// Copy of the published values.
    #[must_use]
    pub fn sample(&self) -> SpeedSample {
        let [step, request, block] = &self.step;
        let [[rate_at, step_at], [ttft, itl], [ttft_at, itl_at]] = [&self.learned_at, &self.bias, &self.bias_at];
        let cells =
            [&self.work_rate, step, request, block, &self.output_tokens, rate_at, step_at, ttft, itl, ttft_at, itl_at];
        SpeedSample(cells.map(|cell| cell.load(Ordering::Relaxed)))
    }

    /// Publishes the values of a sample.
    pub fn restore(&self, sample: &SpeedSample) {
        let [work_rate, step, request, block, output_tokens, rate_at, step_at, ttft, itl, ttft_at, itl_at] = sample.0;
        let store = |cells: &[AtomicU32], words: &[u32]| {
            cells.iter().zip(words).for_each(|(cell, word)| cell.store(*word, Ordering::Relaxed));
        };
        self.work_rate.store(work_rate, Ordering::Relaxed);
        store(&self.step, &[step, request, block]);
        self.output_tokens.store(output_tokens, Ordering::Relaxed);
        store(&self.learned_at, &[rate_at, step_at]);
        store(&self.bias, &[ttft, itl]);
        store(&self.bias_at, &[ttft_at, itl_at]);
    }

    /// The published speed.
    #[must_use]
    #[inline]
    pub fn published(&self) -> PublishedSpeed {
        PublishedSpeed {
            work_rate: self.work_rate.load(Ordering::Relaxed),
            step: self.step.each_ref().map(|cell| cell.load(Ordering::Relaxed)),
        }
    }

    /// Publishes the typical speed of the pool. Only the scheduler may call this.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_typical(&self, typical: &EngineSpeed) {
        let EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds } = *typical;
        let numbers = [work_tokens_per_second, step_seconds, request_seconds, block_seconds];
        for (cell, number) in self.typical.iter().zip(numbers) {
            cell.store(known_bits(number as f32), Ordering::Relaxed);
        }
    }

    /// The typical speed of the pool, if published.
    #[must_use]
    pub fn typical(&self) -> Option<EngineSpeed> {
        let numbers = self.typical.each_ref().map(|cell| f64::from(f32::from_bits(cell.load(Ordering::Relaxed))));
        let [work_tokens_per_second, step_seconds, request_seconds, block_seconds] = numbers;
        let is_known = numbers.iter().all(|number| *number > 0.0);
        is_known.then_some(EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds })
    }

    /// Publishes a complete speed. Only the rank's sequence actor may call this. A rate that is not a positive number
    /// means unknown.
    pub fn publish(&self, speed: &EngineSpeed, now: Timestamp) {
        self.publish_step(speed, now);
        self.publish_rate(speed.work_tokens_per_second, now);
    }

    /// Publishes the prefill rate only.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_rate(&self, work_tokens_per_second: f64, now: Timestamp) {
        self.learned_at[0].store(tick(now), Ordering::Relaxed);
        self.work_rate.store(known_bits(work_tokens_per_second as f32), Ordering::Relaxed);
    }

    /// Publishes the step time only.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_step(&self, speed: &EngineSpeed, now: Timestamp) {
        self.learned_at[1].store(tick(now), Ordering::Relaxed);
        let seconds = [speed.step_seconds, speed.request_seconds, speed.block_seconds];
        for (cell, seconds) in self.step.iter().zip(seconds) {
            cell.store((seconds as f32).to_bits(), Ordering::Relaxed);
        }
    }

    /// Publishes the output length of requests. Only the rank's sequence actor may call this. A value that is not a
    /// positive number means unknown.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_output(&self, tokens: f64) {
        self.output_tokens.store(known_bits(tokens as f32), Ordering::Relaxed);
    }

    /// Mean generated tokens of the rank's requests, from reports of whole blocks; `None` before the first request
    /// ends. Short requests end first, so the mean rises for the duration of a request.
    #[must_use]
    pub fn output_tokens(&self) -> Option<f64> {
        let tokens = self.output_tokens.load(Ordering::Relaxed);
        (tokens != 0).then(|| f64::from(f32::from_bits(tokens)))
    }

    /// The learned speed, with `otherwise` for unknown values.
    #[must_use]
    pub fn speed_or(&self, otherwise: EngineSpeed) -> EngineSpeed {
        self.published().or(otherwise)
    }

    /// The prefill rate, if known.
    #[must_use]
    pub fn work_tokens_per_second(&self) -> Option<f64> {
        self.published().work_tokens_per_second()
    }

    /// Time of `work_tokens` of prefill at that rate, if known.
    #[must_use]
    pub fn prefill_time(&self, work_tokens: f64) -> Option<Duration> {
        self.published().prefill_time(work_tokens)
    }
}

/// Weighted average: `own_share` of `own`, the rest of `usual`.
fn mixed(own: f64, usual: f64, own_share: f64) -> f64 {
    if own_share >= 1.0 { own } else { usual + own_share * (own - usual) }
}

/// The bits of a positive number; 0 for other values.
fn known_bits(number: f32) -> u32 {
    if number.is_normal() && number > 0.0 { number.to_bits() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_rates_are_unknown() {
        let cell = SpeedCell::default();
        let rate = |work_tokens_per_second| EngineSpeed { work_tokens_per_second, ..EngineSpeed::prior(64) };
        for unknown in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e-60, 1e60] {
            cell.publish(&rate(7.0), Timestamp(0));
            cell.publish(&rate(unknown), Timestamp(0));
            assert_eq!(cell.work_tokens_per_second(), None, "{unknown}");
        }
        cell.publish(&rate(f64::from(f32::MIN_POSITIVE)), Timestamp(0));
        assert_eq!(cell.prefill_time(1e12), Some(Duration::MAX));
        assert_eq!(cell.prefill_time(0.0), Some(Duration::ZERO));
    }

    #[test]
    fn outdated_speed_approaches_the_typical_one() {
        let (cell, typical) = (SpeedCell::default(), EngineSpeed::prior(64));
        let slow = EngineSpeed {
            work_tokens_per_second: typical.work_tokens_per_second / 100.0,
            step_seconds: typical.step_seconds * 100.0,
            request_seconds: typical.request_seconds * 100.0,
            block_seconds: typical.block_seconds * 100.0,
        };
        let begin = Timestamp(5_000_000_000);
        cell.publish(&slow, begin);
        let after = |seconds| cell.speed_at(begin + Duration::from_secs(seconds), &typical);
        assert!((after(29).prefill(1.0) / slow.prefill(1.0) - 1.0).abs() < 1e-6, "fresh");
        for (seconds, most) in [(60, 3.0), (90, 1.2), (120, 1.06)] {
            let aged = after(seconds);
            let prefill = aged.prefill(1e4) / typical.prefill(1e4);
            let step = aged.step(10.0, 1e3) / typical.step(10.0, 1e3);
            assert!((1.0..most).contains(&prefill) && (1.0..most).contains(&step), "{prefill} {step} at {seconds} s");
        }
        cell.publish_rate(slow.work_tokens_per_second, begin + Duration::from_secs(120));
        assert!(after(121).prefill(1.0) > 90.0 * typical.prefill(1.0), "one sample refreshes the value");
    }

    #[test]
    fn work_of_two_halves_is_the_work_of_the_whole() {
        let halves = work_tokens(6_000, 0) + work_tokens(6_000, 6_000);
        assert!((halves / work_tokens(12_000, 0) - 1.0).abs() < 1e-12, "{halves}");
    }
}
