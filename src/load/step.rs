//! Step time of an engine, learned from the durations of known numbers of steps.
//!
//! Fits three numbers: seconds per step, per running request and per KV block. Each stays within a factor of 100 of its
//! prior, for any input. The step time is accurate at loads similar to the observed ones, even if requests and blocks
//! grew together and cannot be distinguished. [`SpeedMeter`](super::SpeedMeter) provides the samples and subtracts the
//! time of prefills.

use super::EngineSpeed;

/// Steps of an engine observed together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSample {
    /// Number of steps.
    pub steps: f64,
    /// Their total time, without prefills.
    pub seconds: f64,
    /// Average number of running requests.
    pub requests: f64,
    /// Average number of KV blocks read.
    pub blocks: f64,
}

/// Seconds per step, running request and KV block, learned from [`StepSample`]s.
///
/// Least squares of relative errors. The weight of a sample is its number of steps divided by the running requests,
/// because each of them reports the same steps; so earlier samples have half their weight after 16,384 steps of the
/// engine, independent of the number of reporting requests. The unknowns are three factors between the engine and its
/// prior. They are regularised towards their common value, with the weight of a few steps, and that value towards 1:
/// costs that the samples do not distinguish are scaled alike. A sample beyond a factor of 4 from the expected value is
/// clamped to that distance.
///
/// A sample costs a dozen divisions and about 100 multiplications and additions, about 200 ns, without allocation and
/// without a loop over earlier samples.
///
/// ```
/// use pointsman::internals::load::{EngineSpeed, LearnedStep, StepSample};
///
/// let mut step = LearnedStep::new(64);
/// assert_eq!(step.on(EngineSpeed::prior(64)), EngineSpeed::prior(64));
/// for n in 0..200 {
///     let requests = f64::from(1 + n % 40);
///     let blocks = requests * f64::from(20 + n % 7);
///     let seconds = 64.0 * (0.010 + 50e-6 * requests + 10e-6 * blocks);
///     step.observe(&StepSample { steps: 64.0, seconds, requests, blocks });
/// }
/// let learned = step.on(EngineSpeed::prior(64)).step(30.0, 700.0);
/// assert!((learned / 0.0185 - 1.0).abs() < 0.02, "{learned}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnedStep {
    /// Prior of any engine in seconds, the centre of the bounds.
    prior: [f64; TERMS],
    /// Starting point in seconds.
    base: [f64; TERMS],
    /// Learned multiples of `base`.
    factors: [f64; TERMS],
    /// Weighted products of the terms' shares of a step at `base`.
    products: [[f64; TERMS]; TERMS],
    /// Weighted products of those shares with the observed multiple.
    seen: [f64; TERMS],
    samples: u32,
}

/// Step, requests, blocks.
const TERMS: usize = 3;

/// Maximum factor between a sample and the expected value; samples beyond it are clamped.
const REACH: f64 = 4.0;

/// Maximum weight of a sample in steps: a sample over many reports is late rather than precise.
const WEIGHT_MAX: f64 = 256.0;

/// Regularisation weight in steps. Small, because reports are accurate to some hundredths and a request may cost ten
/// times its prior, of which most steps show little.
const REGULARIZATION_STEPS: f64 = 0.25;

/// Coordinate descent rounds. They start from the previous solution, so few are sufficient.
const ROUNDS: usize = 2;

impl LearnedStep {
    /// Number of steps after which earlier samples have half their weight.
    pub const HALF_LIFE_STEPS: f64 = 16_384.0;

    /// Weight of the prior in steps.
    pub const PRIOR_STEPS: f64 = 128.0;

    /// Maximum factor between the learned values and [`EngineSpeed::prior`].
    pub const BOUND: f64 = 100.0;

    /// Starts with the prior of any engine with blocks of `block_size` tokens.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self::from_known(&EngineSpeed::prior(block_size), block_size)
    }

    /// Starts with the step time of `known`, clamped to the bounds, with a weight of [`Self::PRIOR_STEPS`].
    #[must_use]
    pub fn from_known(known: &EngineSpeed, block_size: u32) -> Self {
        let terms = |speed: &EngineSpeed| [speed.step_seconds, speed.request_seconds, speed.block_seconds];
        let prior = terms(&EngineSpeed::prior(block_size));
        let mut base = terms(known);
        for (base, prior) in base.iter_mut().zip(prior) {
            let known = if base.is_nan() { prior } else { *base };
            *base = known.clamp(prior / Self::BOUND, prior * Self::BOUND);
        }
        Self { prior, base, factors: [1.0; TERMS], products: [[0.0; TERMS]; TERMS], seen: [0.0; TERMS], samples: 0 }
    }

    /// Learns from a sample. Returns false for a sample without time or steps, or with extreme numbers, which is
    /// ignored.
    pub fn observe(&mut self, sample: &StepSample) -> bool {
        let StepSample { steps, seconds, requests, blocks } = *sample;
        let is_sane = |number: f64| (0.0..1e12).contains(&number);
        let is_sample = steps >= 1.0 && seconds > 0.0 && [steps, seconds, requests, blocks].into_iter().all(is_sane);
        if !is_sample {
            return false;
        }
        let [step, request, block] = self.base;
        let terms = [step, request * requests, block * blocks];
        let assumed = terms.iter().sum::<f64>();
        let shares = terms.map(|term| term / assumed);
        let expected: f64 = (0..TERMS).map(|at| shares[at] * self.factors[at]).sum();
        let multiple = (seconds / (steps * assumed)).clamp(expected / REACH, expected * REACH);
        let weight = (steps / requests.max(1.0)).min(WEIGHT_MAX);
        let kept = 1.0 - weight * (std::f64::consts::LN_2 / Self::HALF_LIFE_STEPS); // approximates the power of 2
        for (row, share) in shares.into_iter().enumerate() {
            for (product, other) in self.products[row].iter_mut().zip(shares) {
                *product = *product * kept + weight * share * other;
            }
            self.seen[row] = self.seen[row] * kept + weight * share * multiple;
        }
        self.samples = self.samples.saturating_add(1);
        self.solve();
        true
    }

    /// Least squares within bounds by coordinate descent. In contrast to a matrix inverse, this is stable if the
    /// samples do not distinguish two factors, and a factor at its bound leaves its part to the others.
    fn solve(&mut self) {
        let weight: f64 = self.products.iter().flatten().sum();
        let common = (self.seen.iter().sum::<f64>() + Self::PRIOR_STEPS) / (weight + Self::PRIOR_STEPS);
        for at in (0..TERMS).cycle().take(ROUNDS * TERMS) {
            let row = &self.products[at];
            let others: f64 =
                (0..TERMS).filter(|other| *other != at).map(|other| row[other] * self.factors[other]).sum();
            let factor = (self.seen[at] - others + REGULARIZATION_STEPS * common) / (row[at] + REGULARIZATION_STEPS);
            let unit = self.prior[at] / self.base[at];
            self.factors[at] = factor.clamp(unit / Self::BOUND, unit * Self::BOUND);
        }
        debug_assert!(self.factors.iter().all(|factor| factor.is_finite()), "{self:?}");
    }

    /// `speed` with the learned step time.
    #[must_use]
    pub fn on(&self, speed: EngineSpeed) -> EngineSpeed {
        let [step_seconds, request_seconds, block_seconds] = std::array::from_fn(|at| self.base[at] * self.factors[at]);
        EngineSpeed { step_seconds, request_seconds, block_seconds, ..speed }
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If a number is out of bounds, or the sums are invalid.
    pub fn check_invariants(&self) {
        for at in 0..TERMS {
            let multiple = self.base[at] * self.factors[at] / self.prior[at];
            let bound = Self::BOUND * (1.0 + 1e-9);
            assert!((1.0 / bound..=bound).contains(&multiple), "term {at} is {multiple} times the prior");
            assert!(self.seen[at] >= 0.0 && self.seen[at].is_finite(), "{:?}", self.seen);
            for other in 0..TERMS {
                let product = self.products[at][other];
                assert!(product >= 0.0 && product.is_finite(), "{:?}", self.products);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn engine(step_seconds: f64, request_seconds: f64, block_seconds: f64) -> EngineSpeed {
        EngineSpeed { step_seconds, request_seconds, block_seconds, ..EngineSpeed::prior(64) }
    }

    fn sample(truth: &EngineSpeed, requests: f64, blocks: f64) -> StepSample {
        StepSample { steps: 64.0, seconds: 64.0 * truth.step(requests, blocks), requests, blocks }
    }

    fn off(step: &LearnedStep, truth: &EngineSpeed, requests: f64, blocks: f64) -> f64 {
        (step.on(*truth).step(requests, blocks) / truth.step(requests, blocks) - 1.0).abs()
    }

    /// Varying loads by time `n`: 1 to 60 requests of 5 to 120 blocks.
    fn load(n: u32) -> (f64, f64) {
        let requests = f64::from(1 + (n * 7) % 60);
        (requests, requests * f64::from(5 + (n * 11) % 116))
    }

    #[test]
    fn correlated_loads_are_fitted_together() {
        let truth = engine(0.010, 100e-6, 5e-6);
        let mut step = LearnedStep::new(64);
        for n in 0..4_000 {
            let requests = f64::from(1 + n % 50);
            step.observe(&sample(&truth, requests, 30.0 * requests));
            step.check_invariants();
        }
        for requests in [1.0, 10.0, 25.0, 50.0] {
            let off = off(&step, &truth, requests, 30.0 * requests);
            assert!(off < 0.02, "{off} at {requests}");
        }
        let beside = off(&step, &truth, 25.0, 1_500.0);
        assert!(beside < 0.25, "{beside}: the samples do not distinguish requests from blocks");
    }

    #[test]
    fn rare_outliers_have_little_effect() {
        let truth = engine(0.008, 40e-6, 8e-6);
        let mut step = LearnedStep::new(64);
        for n in 0..4_000 {
            let (requests, blocks) = load(n);
            step.observe(&sample(&truth, requests, blocks));
            if n % 50 == 49 {
                step.observe(&StepSample { seconds: 3_600.0, ..sample(&truth, requests, blocks) });
                step.check_invariants();
            }
            if n > 100 {
                let off = off(&step, &truth, 20.0, 1_000.0);
                assert!(off < 0.15, "{off} after {n}");
            }
        }
    }

    #[test]
    fn changed_engine_is_learned_again() {
        let (fast, slow) = (engine(0.004, 20e-6, 4e-6), engine(0.040, 200e-6, 40e-6));
        let mut step = LearnedStep::new(64);
        for (truth, samples) in [(&fast, 8_000), (&slow, 30_000)] {
            for n in 0..samples {
                let (requests, blocks) = load(n);
                step.observe(&sample(truth, requests, blocks));
            }
        }
        let off = off(&step, &slow, 20.0, 1_000.0);
        assert!(off < 0.1, "{off}");
    }

    proptest! {
        #[test]
        fn learned_values_stay_within_bounds(
            samples in prop::collection::vec(
                (0.0..1e6f64, -9.0..9.0f64, prop_oneof![Just(0.0), Just(1.0), 0.0..1e9f64], 0.0..1e9f64),
                1..200,
            ),
            block_size in 1..4_096u32,
        ) {
            let mut step = LearnedStep::new(block_size);
            for (steps, magnitude, requests, blocks) in samples {
                step.observe(&StepSample { steps, seconds: 10_f64.powf(magnitude), requests, blocks });
                step.check_invariants();
            }
        }

        #[test]
        fn engines_within_bounds_are_accurate_at_observed_loads(
            step_seconds in 0.001..0.1f64,
            request_seconds in 5e-6..250e-6f64,
            block_seconds in 1e-6..50e-6f64,
            start in 0..1_000u32,
            noise_seed in any::<u32>(),
        ) {
            let truth = engine(step_seconds, request_seconds, block_seconds);
            let mut step = LearnedStep::new(64);
            let mut state = noise_seed;
            for n in start..start + 1_000 {
                let (requests, blocks) = load(n);
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let noise = 1.0 + 0.1 * (f64::from(state >> 8) / f64::from(1 << 24) - 0.5);
                let exact = sample(&truth, requests, blocks);
                step.observe(&StepSample { seconds: exact.seconds * noise, ..exact });
            }
            for n in start..start + 60 {
                let (requests, blocks) = load(n);
                let off = off(&step, &truth, requests, blocks);
                // Samples with noise of up to 5 % leave the fit off by up to 10 % in rare cases.
                prop_assert!(off < 0.15, "{off} at {requests} and {blocks}");
            }
        }
    }
}
