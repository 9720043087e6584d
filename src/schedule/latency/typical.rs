//! Typical values of the pool, learned from its decisions, as fallback for unknown values.
//!
//! Running means over the last placements, and the median speed of the ranks. One placement moves no mean far, and
//! fewer than half of the ranks cannot move the speed far.

use std::time::Duration;

use crate::load::{EngineSpeed, PublishedSpeed};
use crate::protocol::Timestamp;
use crate::record::bytes::recorded;
use crate::schedule::LoadView;
use crate::schedule::rank::{About, Rank};

/// Running means cover about 64 placements each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::schedule) struct Typical {
    /// Typical speed of a rank: per parameter the median over ranks with fresh values, else with any.
    pub(in crate::schedule) speed: EngineSpeed,
    /// Time of its computation.
    speed_at: Option<Timestamp>,
    /// Output tokens of a request.
    pub(in crate::schedule) output_tokens: f64,
    /// Mean duration of the queued prefills of a rank, in seconds, at the last update of speeds.
    pub(in crate::schedule) wait_seconds: f64,
    /// Mean duration of a step as a multiple of an empty one, at the last update of speeds.
    pub(in crate::schedule) step_ratio: f64,
    /// Share of cached prompt tokens.
    cached_share: f64,
}

recorded! {
    Typical { speed, speed_at, output_tokens, wait_seconds, step_ratio, cached_share }
}

/// Weight of the newest value in a mean.
const SHARE: f64 = 1.0 / 64.0;

/// Interval of aging and of the median.
const SPEED_EVERY: Duration = Duration::from_millis(250);

/// Output tokens before any report.
const OUTPUT_TOKENS_UNKNOWN: f64 = 256.0;

/// Maximum share of evicted blocks that are requested again. Measured on documents: 0.66 to 0.79.
const REUSE_MAX: f64 = 0.8;

impl Typical {
    /// Initial values: only the block size is known.
    pub(in crate::schedule) fn new(speed: EngineSpeed) -> Self {
        Self {
            speed,
            speed_at: None,
            output_tokens: OUTPUT_TOKENS_UNKNOWN,
            wait_seconds: 0.0,
            step_ratio: 1.0,
            cached_share: 0.0,
        }
    }

    /// Adds a placement; an empty prompt does not affect the cached share.
    pub(in crate::schedule) fn placed(&mut self, prompt_tokens: u32, cached_tokens: u32, output_tokens: Option<f64>) {
        let toward = |mean: &mut f64, value: f64| *mean += SHARE * (value - *mean);
        if prompt_tokens > 0 {
            toward(&mut self.cached_share, f64::from(cached_tokens.min(prompt_tokens)) / f64::from(prompt_tokens));
        }
        if let Some(tokens) = output_tokens {
            toward(&mut self.output_tokens, tokens);
        }
    }

    /// Updates the median speed and the ranks' aged speeds, at most once per [`SPEED_EVERY`]. Returns the new median.
    pub(in crate::schedule) fn update_speeds<'a, V: LoadView>(
        &mut self,
        ranks: impl Iterator<Item = &'a mut Rank>,
        loads: &V,
        now: Timestamp,
    ) -> Option<EngineSpeed> {
        if self.speed_at.is_some_and(|last| now.since(last) < SPEED_EVERY) {
            return None;
        }
        self.speed_at = Some(now);
        let ranks: Vec<&mut Rank> = ranks.collect();
        let known: Vec<Known> = ranks
            .iter()
            .map(|rank| loads.with_speed(rank.slot(), |cell| Known::of(cell.published(), cell.weights(now))))
            .collect();
        let EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds } = self.speed;
        let typical = [work_tokens_per_second.recip(), step_seconds, request_seconds, block_seconds];
        let [token_seconds, step_seconds, request_seconds, block_seconds] = std::array::from_fn(|number| {
            median(known.iter().filter_map(|known| known.seconds[number])).unwrap_or(typical[number])
        });
        let work_tokens_per_second = token_seconds.recip();
        self.speed = EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds };
        for (rank, known) in ranks.into_iter().zip(&known) {
            rank.about.aged_speed = known.aged(&self.speed);
        }
        Some(self.speed)
    }

    /// Share of evicted blocks that will be requested again, estimated by the cached share of prompts.
    pub(in crate::schedule) fn reuse(&self) -> f64 {
        self.cached_share.min(REUSE_MAX)
    }
}

impl About {
    /// The `published` speed, aged if necessary, with `typical` for its unknown parts, and with [`significant`]
    /// differences of the prefill rate only.
    #[inline]
    pub(in crate::schedule) fn speed(&self, published: PublishedSpeed, typical: EngineSpeed) -> EngineSpeed {
        let own = match &self.aged_speed {
            Some((of, aged)) if *of == published => *aged,
            Some(_) | None => published.or(typical),
        };
        let work_tokens_per_second = significant(own.work_tokens_per_second, typical.work_tokens_per_second);
        EngineSpeed { work_tokens_per_second, ..own }
    }
}

/// Ratio up to which two prefill rates count as equal. Prompts are computed beside decodes, so the learned rates of equal
/// engines differ by up to this ratio with their load (docs/policies.md).
const EQUAL_RATES: f64 = 1.25;

/// The rate without insignificant differences from the `typical` one: no difference up to a ratio of [`EQUAL_RATES`],
/// and the whole difference from its square on.
#[inline]
fn significant(rate: f64, typical: f64) -> f64 {
    let ratio = rate / typical;
    let distance = ratio.max(ratio.recip());
    if distance <= EQUAL_RATES {
        return typical;
    }
    if distance >= EQUAL_RATES * EQUAL_RATES {
        return rate;
    }
    let part = (distance / EQUAL_RATES).powi(2);
    if ratio > 1.0 { typical * part } else { typical / part }
}

/// A measured time in seconds, and whether it is fresh.
type Shown = (f64, bool);

/// Measured times of one rank: seconds per work token, step, request and block.
struct Known {
    published: PublishedSpeed,
    weights: [f64; 2],
    seconds: [Option<Shown>; 4],
}

impl Known {
    fn of(published: PublishedSpeed, weights: [f64; 2]) -> Self {
        let nothing = EngineSpeed {
            work_tokens_per_second: f64::INFINITY,
            step_seconds: 0.0,
            request_seconds: 0.0,
            block_seconds: 0.0,
        };
        let known = published.or(nothing);
        let [rate, step] = weights.map(|weight| weight >= 1.0);
        let shown = |seconds: f64, is_fresh: bool| (seconds > 0.0).then_some((seconds, is_fresh));
        let token_seconds = known.work_tokens_per_second.recip();
        Self {
            published,
            weights,
            seconds: [
                shown(token_seconds, rate),
                shown(known.step_seconds, step),
                shown(known.request_seconds, step),
                shown(known.block_seconds, step),
            ],
        }
    }

    /// The aged speed, unless the published one is fresh.
    fn aged(&self, typical: &EngineSpeed) -> Option<(PublishedSpeed, EngineSpeed)> {
        let is_fresh = self.weights.iter().all(|weight| *weight >= 1.0);
        (!is_fresh).then(|| (self.published, self.published.aged(self.weights, typical)))
    }
}

/// Median of the fresh values, or of all if none is fresh; `None` without values. Of two middle values the shorter,
/// because a rank assumed to be fast is tried and corrected.
fn median(shown: impl Iterator<Item = Shown>) -> Option<f64> {
    let mut shown: Vec<Shown> = shown.collect();
    if shown.iter().any(|(_, is_fresh)| *is_fresh) {
        shown.retain(|(_, is_fresh)| *is_fresh);
    }
    shown.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    shown.get(shown.len().saturating_sub(1) / 2).map(|(number, _)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_outlier_does_not_move_the_median() {
        let fresh = |numbers: &[f64]| median(numbers.iter().map(|number| (*number, true)));
        assert_eq!(fresh(&[]), None);
        assert_eq!(fresh(&[7.0]), Some(7.0));
        assert_eq!(fresh(&[0.2, 20.0, 0.21, 0.19]), Some(0.2));
        assert_eq!(fresh(&[20.0, 0.2]), Some(0.2), "the faster of two");
    }

    #[test]
    fn small_differences_of_rates_are_insignificant() {
        let close = |rate: f64, wanted: f64| assert!((significant(rate, 100.0) - wanted).abs() < 1e-9, "{rate}");
        close(100.0, 100.0);
        close(124.0, 100.0);
        close(81.0, 100.0);
        close(125.0 * 1.25, 125.0 * 1.25);
        close(50.0, 50.0);
        close(300.0, 300.0);
        let mut last = 0.0;
        for rate in 1..400 {
            let rate = significant(f64::from(rate), 100.0);
            assert!(rate >= last && rate - last < 3.0, "neither falls nor jumps");
            last = rate;
        }
    }

    #[test]
    fn stale_values_count_if_no_value_is_fresh() {
        assert_eq!(median([(1.0, false), (2.0, false), (9.0, true)].into_iter()), Some(9.0));
        assert_eq!(median([(1.0, false), (2.0, false), (9.0, false)].into_iter()), Some(2.0));
    }
}
