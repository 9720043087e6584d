//! How fast a rank's engine computes: what is assumed, what is learned, and how it is read without a message.
//!
//! Owns the four numbers of [`EngineSpeed`] and the cell in which a rank's sequence actor publishes them, beside the
//! board: a slot there is two full cache lines, and this changes less often. Promises that a reader sees numbers
//! that were published, or none; of two publications in a row it may see parts of both, which are as good as
//! either. Leaves learning to [`LearnedRate`] and [`LearnedStep`](super::LearnedStep).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::LearnedRate;

/// What a rank's engine takes for its work.
///
/// A step, which gives each running request one token, takes `step_seconds`, `request_seconds` for each of them, and
/// `block_seconds` for each KV block they read. Prompts take their [work](work_tokens) at `work_tokens_per_second`.
///
/// ```
/// use pointsman::load::EngineSpeed;
///
/// let speed = EngineSpeed { step_seconds: 0.004, request_seconds: 20e-6, block_seconds: 4e-6, ..EngineSpeed::prior(64) };
/// assert!((speed.step(10.0, 1_000.0) - 0.0082).abs() < 1e-9);
/// assert!((speed.prefill(10_000.0) - 1.0).abs() < 1e-9);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EngineSpeed {
    /// Tokens of prefill work computed in a second.
    pub work_tokens_per_second: f64,
    /// Any step, in seconds.
    pub step_seconds: f64,
    /// Each running request's share of a step, in seconds.
    pub request_seconds: f64,
    /// Each KV block's share of a step, in seconds.
    pub block_seconds: f64,
}

/// Tokens of context at which attention makes a prompt token cost twice what it costs without any.
///
/// A token takes two operations a parameter, and attention four a layer, hidden dimension and token of context. For a
/// dense model of 8 billion parameters (32 layers of 4,096) that is 1.6e10 and 5.2e5: equal at some 31,000 tokens; the
/// published times of such models give 33,000. Larger models have it later (70 billion: 53,000), so that long prompts
/// are then taken to be somewhat dearer than they are.
pub const ATTENTION_TOKENS: f64 = 33_000.0;

/// The work of computing `new_tokens` behind `cached_tokens`, in tokens without context: attention reads what stands
/// before each token.
///
/// ```
/// use pointsman::load::{ATTENTION_TOKENS, work_tokens};
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
    /// What is assumed of an engine of which nothing is known, with blocks of `block_size` tokens: the steps of 8 billion
    /// parameters on an H100, which reads a token's keys and values in 65 ns, and a prefill at less than half its speed,
    /// for the first prompts teach that quickly.
    #[must_use]
    pub fn prior(block_size: u32) -> Self {
        Self {
            work_tokens_per_second: LearnedRate::PRIOR,
            step_seconds: 0.004,
            request_seconds: 20e-6,
            block_seconds: 65e-9 * f64::from(block_size.max(1)),
        }
    }

    /// How long a step takes with `requests` running that read `blocks` KV blocks, in seconds.
    #[must_use]
    pub fn step(&self, requests: f64, blocks: f64) -> f64 {
        self.step_seconds + self.request_seconds * requests + self.block_seconds * blocks
    }

    /// How long `work_tokens` of prefill take by themselves, in seconds.
    #[must_use]
    pub fn prefill(&self, work_tokens: f64) -> f64 {
        work_tokens / self.work_tokens_per_second
    }
}

/// A rank's speed as its sequence actor has published it.
///
/// Relaxed on all sides: each number stands alone, and a stale one is as good as a learned one ever is.
///
/// ```
/// use std::time::Duration;
/// use pointsman::load::{EngineSpeed, SpeedCell};
///
/// let cell = SpeedCell::default();
/// assert_eq!((cell.work_tokens_per_second(), cell.prefill_time(500.0)), (None, None));
/// cell.publish(&EngineSpeed { work_tokens_per_second: 10_000.0, ..EngineSpeed::prior(64) });
/// assert_eq!(cell.prefill_time(500.0), Some(Duration::from_millis(50)));
/// assert_eq!(cell.output_tokens(), None);
/// cell.publish_output(300.0);
/// assert_eq!(cell.output_tokens(), Some(300.0));
/// ```
#[derive(Debug, Default)]
pub struct SpeedCell {
    /// Bits of an `f32`; 0 while nothing is known.
    work_rate: AtomicU32,
    /// Bits of `f32`s: a step's, a request's and a block's seconds.
    step: [AtomicU32; 3],
    /// Bits of an `f32`; 0 while nothing is known.
    output_tokens: AtomicU32,
}

impl SpeedCell {
    /// Publishes a speed, all of it. Only the rank's sequence actor may call this. A rate that is no positive number
    /// means that none is known.
    pub fn publish(&self, speed: &EngineSpeed) {
        self.publish_step(speed);
        self.publish_rate(speed.work_tokens_per_second);
    }

    /// Publishes how fast it prefills, and leaves what is known of steps.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_rate(&self, work_tokens_per_second: f64) {
        self.work_rate.store(known_bits(work_tokens_per_second as f32), Ordering::Relaxed);
    }

    /// Publishes what a step takes, and leaves what is known of prefills.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_step(&self, speed: &EngineSpeed) {
        let seconds = [speed.step_seconds, speed.request_seconds, speed.block_seconds];
        for (cell, seconds) in self.step.iter().zip(seconds) {
            cell.store((seconds as f32).to_bits(), Ordering::Relaxed);
        }
    }

    /// Publishes how many tokens a request generates. Only the rank's sequence actor may call this. What is no positive
    /// number means that nothing is known.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned number has")]
    pub fn publish_output(&self, tokens: f64) {
        self.output_tokens.store(known_bits(tokens as f32), Ordering::Relaxed);
    }

    /// Tokens that a request of this rank has generated on average, by its reports of whole blocks, if any has ended.
    /// Short ones end first, so that it rises for as long as a request lasts.
    #[must_use]
    pub fn output_tokens(&self) -> Option<f64> {
        let tokens = self.output_tokens.load(Ordering::Relaxed);
        (tokens != 0).then(|| f64::from(f32::from_bits(tokens)))
    }

    /// The speed, if anything of it is known; `otherwise` stands for what is not.
    #[must_use]
    pub fn speed_or(&self, otherwise: EngineSpeed) -> EngineSpeed {
        let [step_seconds, request_seconds, block_seconds] =
            self.step.each_ref().map(|cell| f64::from(f32::from_bits(cell.load(Ordering::Relaxed))));
        let work_tokens_per_second = self.work_tokens_per_second().unwrap_or(otherwise.work_tokens_per_second);
        if step_seconds > 0.0 {
            EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds }
        } else {
            EngineSpeed { work_tokens_per_second, ..otherwise }
        }
    }

    /// How fast it prefills, if that is known.
    #[must_use]
    pub fn work_tokens_per_second(&self) -> Option<f64> {
        let rate = self.work_rate.load(Ordering::Relaxed);
        (rate != 0).then(|| f64::from(f32::from_bits(rate)))
    }

    /// How long `work_tokens` of prefill take at that speed, if one is known.
    #[must_use]
    pub fn prefill_time(&self, work_tokens: f64) -> Option<Duration> {
        // A rate near zero, which nobody learns, would take longer than a duration can say.
        let seconds = work_tokens / self.work_tokens_per_second()?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

/// The bits of a positive number; 0 for what is none.
fn known_bits(number: f32) -> u32 {
    if number.is_normal() && number > 0.0 { number.to_bits() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_rate_is_unknown() {
        let cell = SpeedCell::default();
        let rate = |work_tokens_per_second| EngineSpeed { work_tokens_per_second, ..EngineSpeed::prior(64) };
        for unknown in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e-60, 1e60] {
            cell.publish(&rate(7.0));
            cell.publish(&rate(unknown));
            assert_eq!(cell.work_tokens_per_second(), None, "{unknown}");
        }
        cell.publish(&rate(f64::from(f32::MIN_POSITIVE)));
        assert_eq!(cell.prefill_time(1e12), Some(Duration::MAX));
        assert_eq!(cell.prefill_time(0.0), Some(Duration::ZERO));
    }

    #[test]
    fn what_is_no_length_is_unknown() {
        let cell = SpeedCell::default();
        for unknown in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            cell.publish_output(7.0);
            cell.publish_output(unknown);
            assert_eq!(cell.output_tokens(), None, "{unknown}");
        }
    }

    #[test]
    fn what_is_published_is_read() {
        let cell = SpeedCell::default();
        let speed = EngineSpeed {
            work_tokens_per_second: 25e3,
            step_seconds: 0.5,
            request_seconds: 0.25,
            block_seconds: 0.125,
        };
        cell.publish(&speed);
        assert_eq!(cell.speed_or(EngineSpeed::prior(64)), speed);
    }

    #[test]
    fn half_a_prompt_after_the_other_is_the_work_of_the_whole() {
        let halves = work_tokens(6_000, 0) + work_tokens(6_000, 6_000);
        assert!((halves / work_tokens(12_000, 0) - 1.0).abs() < 1e-12, "{halves}");
    }
}
