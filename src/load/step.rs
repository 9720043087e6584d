//! What a step of an engine takes, learned from how long known numbers of steps took.
//!
//! Owns the fit of three numbers: seconds a step, a running request and a KV block. Promises that each stays within a
//! factor of 100 of what is assumed at first, whatever is claimed, and that a step's time is met at loads like those
//! seen, even if requests and blocks grew together and nothing tells them apart. Leaves to others who observes
//! ([`SpeedMeter`](super::SpeedMeter)), and what prefills took of the time.

use super::EngineSpeed;

/// Steps of an engine that were watched together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSample {
    /// How many.
    pub steps: f64,
    /// What they took together, without prefills.
    pub seconds: f64,
    /// Requests running, on average.
    pub requests: f64,
    /// KV blocks that they read, on average.
    pub blocks: f64,
}

/// Seconds a step, a running request and a KV block, learned from [`StepSample`]s.
///
/// Least squares of relative errors. A sample weighs as many steps as were seen, shared among the requests running, for
/// each of them reports the same steps; so what was learned counts half after 16,384 steps of the engine, however many
/// requests tell of them. Unknown are three factors by which the engine differs from what was assumed. They are pulled
/// towards their common value, with the weight of a few steps, and that value towards 1: what the samples do not tell
/// apart is taken to be slower or faster alike. A sample further than a factor of 4 from what was expected counts as if
/// it were at that distance.
///
/// A sample costs a dozen divisions and some 100 multiplications and additions, about 200 ns: no allocation, no loop over
/// the past.
///
/// ```
/// use pointsman::load::{EngineSpeed, LearnedStep, StepSample};
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
    /// What is assumed of any engine, in seconds: the bounds are around it.
    prior: [f64; TERMS],
    /// Where learning began, in seconds.
    base: [f64; TERMS],
    /// What the engine takes, as multiples of `base`.
    factors: [f64; TERMS],
    /// Weighted products of the shares that the terms have of a step at `base`.
    products: [[f64; TERMS]; TERMS],
    /// Weighted products of those shares with the multiple seen.
    seen: [f64; TERMS],
    samples: u32,
}

/// A step, its requests, its blocks.
const TERMS: usize = 3;

/// A sample further than this factor from what was expected counts as if it were at that distance.
const REACH: f64 = 4.0;

/// The most steps that one sample weighs: one that spans many reports is rather late than precise.
const WEIGHT_MAX: f64 = 256.0;

/// Steps that hold the three factors together. Few, for reports are off by some hundredths, and a request may well cost
/// ten times what was assumed, of which nearly all steps show but little.
const TOGETHER_STEPS: f64 = 0.25;

/// Rounds of solving for one factor after the other. They go on from what was known, so a few do.
const ROUNDS: usize = 2;

impl LearnedStep {
    /// Steps after which what was learned before counts half.
    pub const HALF_LIFE_STEPS: f64 = 16_384.0;

    /// Steps that what is assumed at first is worth.
    pub const PRIOR_STEPS: f64 = 128.0;

    /// How far what is learned can be from [`EngineSpeed::prior`], as a factor.
    pub const BOUND: f64 = 100.0;

    /// Begins with what is assumed of any engine with blocks of `block_size` tokens.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self::from_known(&EngineSpeed::prior(block_size), block_size)
    }

    /// Begins with the step of `known`, brought within bounds, which is worth [`Self::PRIOR_STEPS`].
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

    /// Learns from a sample; whether it did. One without time, without steps or of absurd numbers teaches nothing.
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
        let kept = 1.0 - weight * (std::f64::consts::LN_2 / Self::HALF_LIFE_STEPS); // near enough to the power of 2
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

    /// The least squares within bounds, by solving for one factor after the other: unlike an inverse, this has nothing
    /// to lose where the samples cannot tell two factors apart, and a factor at its bound leaves its part to the others.
    fn solve(&mut self) {
        let weight: f64 = self.products.iter().flatten().sum();
        let common = (self.seen.iter().sum::<f64>() + Self::PRIOR_STEPS) / (weight + Self::PRIOR_STEPS);
        for at in (0..TERMS).cycle().take(ROUNDS * TERMS) {
            let row = &self.products[at];
            let others: f64 =
                (0..TERMS).filter(|other| *other != at).map(|other| row[other] * self.factors[other]).sum();
            let factor = (self.seen[at] - others + TOGETHER_STEPS * common) / (row[at] + TOGETHER_STEPS);
            let unit = self.prior[at] / self.base[at];
            self.factors[at] = factor.clamp(unit / Self::BOUND, unit * Self::BOUND);
        }
        debug_assert!(self.factors.iter().all(|factor| factor.is_finite()), "{self:?}");
    }

    /// The same speed with the step as learned so far.
    #[must_use]
    pub fn on(&self, speed: EngineSpeed) -> EngineSpeed {
        let [step_seconds, request_seconds, block_seconds] = std::array::from_fn(|at| self.base[at] * self.factors[at]);
        EngineSpeed { step_seconds, request_seconds, block_seconds, ..speed }
    }

    /// Samples learned from.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// For tests.
    ///
    /// # Panics
    /// If a number is out of bounds, or the sums are not those of samples.
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

    /// Loads that wander, `n` being the time: 1 to 60 requests of 5 to 120 blocks.
    fn load(n: u32) -> (f64, f64) {
        let requests = f64::from(1 + (n * 7) % 60);
        (requests, requests * f64::from(5 + (n * 11) % 116))
    }

    #[test]
    fn a_constant_engine_is_learned_whatever_it_is() {
        let prior = EngineSpeed::prior(64);
        let rows = [
            (prior, 1),
            (engine(0.008, 40e-6, 8.32e-6), 30), // half as fast
            (engine(0.002, 10e-6, 2.08e-6), 30), // twice as fast
            (engine(0.020, 20e-6, 1e-6), 400),
            (engine(0.004, 400e-6, 4e-6), 800),
            (engine(0.001, 20e-6, 40e-6), 800),
            (engine(0.3, 1e-3, 1e-4), 800),
        ];
        for (truth, samples) in rows {
            let mut step = LearnedStep::new(64);
            for n in 0..samples {
                let (requests, blocks) = load(n);
                assert!(step.observe(&sample(&truth, requests, blocks)));
                step.check_invariants();
            }
            for n in 0..60 {
                let (requests, blocks) = load(n);
                let off = off(&step, &truth, requests, blocks);
                assert!(off < 0.10, "{off} at {requests} requests and {blocks} blocks of {truth:?}: {step:?}");
            }
        }
    }

    #[test]
    fn what_grows_together_is_met_together() {
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
        assert!(beside < 0.25, "{beside}: nothing said which of them costs");
    }

    #[test]
    fn one_load_alone_scales_all_alike() {
        let truth = engine(0.012, 60e-6, 12.48e-6); // three times the prior
        let mut step = LearnedStep::new(64);
        for _ in 0..4_000 {
            step.observe(&sample(&truth, 10.0, 300.0));
        }
        let off = off(&step, &truth, 60.0, 5_000.0);
        assert!(off < 0.03, "{off} far from all that was seen");
    }

    #[test]
    fn a_rare_outlier_hardly_shows() {
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
    fn an_engine_that_changes_is_met_again() {
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

    #[test]
    fn what_is_no_sample_teaches_nothing() {
        let good = StepSample { steps: 64.0, seconds: 1.0, requests: 3.0, blocks: 9.0 };
        let mut step = LearnedStep::new(64);
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e30] {
            for sample in [
                StepSample { steps: bad, ..good },
                StepSample { seconds: bad, ..good },
                StepSample { requests: bad, ..good },
                StepSample { blocks: bad, ..good },
            ] {
                assert!(!step.observe(&sample), "{sample:?}");
            }
        }
        assert!(
            !step.observe(&StepSample { seconds: 0.0, ..good }) && !step.observe(&StepSample { steps: 0.0, ..good })
        );
        assert_eq!(step, LearnedStep::new(64));
    }

    #[test]
    fn what_was_known_is_brought_within_bounds() {
        let prior = EngineSpeed::prior(16);
        let known = EngineSpeed { step_seconds: 1e9, request_seconds: f64::NAN, block_seconds: -1.0, ..prior };
        let begun = LearnedStep::from_known(&known, 16).on(prior);
        assert_eq!(begun.request_seconds, prior.request_seconds);
        assert!((begun.step_seconds / prior.step_seconds - 100.0).abs() < 1e-9);
        assert!((begun.block_seconds / prior.block_seconds - 0.01).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn whatever_is_claimed_stays_within_bounds(
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
        fn any_engine_within_reach_is_met_where_it_was_seen(
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
                prop_assert!(off < 0.10, "{off} at {requests} and {blocks}");
            }
        }
    }
}
