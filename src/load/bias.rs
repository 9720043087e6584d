//! Bias of latency predictions, learned per rank: typical observed time as a multiple of the predicted one.
//!
//! A prediction follows from learned speeds, and has errors of its own: network time, prompts too short to teach the
//! prefill rate, prefills of others between the tokens of a response. The bias corrects what these have in common. It
//! scales the prediction only, never a cost.

use serde::Serialize;

/// Factors that correct the predictions for one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictionBias {
    /// Of the time to first token.
    pub ttft: f64,
    /// Of the time between tokens.
    pub itl: f64,
}

impl Default for PredictionBias {
    /// No correction.
    fn default() -> Self {
        Self { ttft: 1.0, itl: 1.0 }
    }
}

/// Median ratio of observed to predicted times, with bounded steps.
///
/// Each sample moves the logarithm of the factor towards that of its ratio by at most a step. Samples beyond a step
/// count alike, so the factor converges to the median, and no outlier moves it far. The first step is 1/4 (a factor of
/// 1.28), the n-th 1/(4·n), down to 1/50.
///
/// ```
/// use pointsman::internals::load::LearnedBias;
///
/// let mut bias = LearnedBias::default();
/// bias.observe(0.050, 0.100);
/// assert!((bias.factor().ln() - 0.25).abs() < 1e-9, "{}", bias.factor());
/// (0..20).for_each(|_| bias.observe(0.050, 0.100));
/// assert!((bias.factor() - 2.0).abs() < 1e-9);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LearnedBias {
    /// Logarithm of the factor.
    log: f64,
    samples: u32,
}

impl LearnedBias {
    /// Minimum of the factor, and inverse of its maximum.
    pub const MIN: f64 = 0.25;

    /// First step.
    const STEP_MAX: f64 = 0.25;

    /// Step after many samples.
    const STEP_MIN: f64 = 0.02;

    /// Starts with a known factor.
    #[must_use]
    pub fn from_known(factor: f64) -> Self {
        let log = if factor > 0.0 { factor.ln().clamp(Self::MIN.ln(), -Self::MIN.ln()) } else { 0.0 };
        Self { log, samples: 0 }
    }

    /// Learns from one predicted time without correction, and the observed one, in the same unit. Times that are not
    /// positive numbers are ignored.
    pub fn observe(&mut self, predicted: f64, observed: f64) {
        let error = (observed / predicted).ln() - self.log;
        if !error.is_finite() {
            return;
        }
        self.samples = self.samples.saturating_add(1);
        let step = (Self::STEP_MAX / f64::from(self.samples)).max(Self::STEP_MIN);
        self.log = (self.log + error.clamp(-step, step)).clamp(Self::MIN.ln(), -Self::MIN.ln());
    }

    /// The factor, from [`Self::MIN`] to its inverse.
    #[must_use]
    pub fn factor(&self) -> f64 {
        self.log.exp()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn outliers_and_unusable_times_do_not_move_the_factor_far() {
        let mut bias = LearnedBias::default();
        (0..60).for_each(|n| bias.observe(1.0, if n % 5 == 4 { 100.0 } else { 1.5 }));
        assert!((1.4..1.65).contains(&bias.factor()), "near the median: {}", bias.factor());
        let before = bias;
        for (predicted, observed) in [(0.0, 1.0), (1.0, 0.0), (1.0, f64::NAN), (-1.0, 1.0), (f64::INFINITY, 1.0)] {
            bias.observe(predicted, observed);
        }
        assert_eq!(bias, before);
    }

    proptest! {
        /// Of ratios spread over a factor of 4, two thirds lie within a factor of 2 of the correction, and it is within
        /// its bounds for any input.
        #[test]
        fn factors_approach_the_median_within_bounds(center in 0.01f64..100.0, spread in 1.0f64..2.0) {
            let mut bias = LearnedBias::default();
            for n in 0..400 {
                let at = f64::from(n * 7 % 11) / 5.0 - 1.0; // from -1 to 1, in turn
                bias.observe(3.0, 3.0 * center * spread.powf(at));
            }
            let expected = center.clamp(LearnedBias::MIN, 1.0 / LearnedBias::MIN);
            prop_assert!((bias.factor() / expected).ln().abs() < 0.15, "{} for {center}", bias.factor());
        }
    }
}
