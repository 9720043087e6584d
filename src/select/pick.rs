//! Choice among candidates by cost, with seeded draws.
//!
//! Resolves ties and temperatures. Every draw is a hash of (seed, request number, rank), never a shared stream, so that
//! adding a rank or losing a message changes no other decision.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::protocol::WorkerRank;

/// Random source of one decision.
///
/// ```
/// use pointsman::protocol::{WorkerId, WorkerRank};
/// use pointsman::internals::select::Draw;
///
/// let (a, b) = (WorkerRank::new(WorkerId(1), 0), WorkerRank::new(WorkerId(2), 0));
/// let draw = Draw { seed: 7, request: 3 };
/// assert_eq!(draw.key(a), draw.key(a));
/// assert_ne!(draw.key(a), draw.key(b));
/// assert_eq!(draw.cheapest([("dear", a, 2.0), ("cheap", b, 1.0)]), Some("cheap"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Seed of the router.
    pub seed: u64,
    /// Number of the request, assigned by the scheduler.
    pub request: u64,
}

impl Draw {
    /// Random key of the rank in this decision: uniform, and independent between ranks and requests.
    #[must_use]
    pub fn key(&self, rank: WorkerRank) -> u64 {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.request.to_le_bytes());
        bytes[8..16].copy_from_slice(&rank.worker.0.to_le_bytes());
        bytes[16..].copy_from_slice(&rank.rank.to_le_bytes());
        xxh3_64_with_seed(&bytes, self.seed)
    }

    /// A number in [0, 1) for the decision as a whole.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit f64 exactly")]
    pub fn unit(&self) -> f64 {
        (xxh3_64_with_seed(&self.request.to_le_bytes(), self.seed) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The candidate with the lowest cost; exact ties go to the highest random key, so each is equally likely.
    pub fn cheapest<T>(&self, candidates: impl IntoIterator<Item = (T, WorkerRank, f64)>) -> Option<T> {
        let mut best: Option<(T, WorkerRank, f64)> = None;
        for candidate in candidates {
            let wins = match &best {
                None => true,
                Some((_, champion, least)) => {
                    let (_, rank, cost) = &candidate;
                    cost < least || cost == least && self.key(*rank) > self.key(*champion)
                }
            };
            if wins {
                best = Some(candidate);
            }
        }
        best.map(|(chosen, ..)| chosen)
    }

    /// Position drawn with the [`softmax`] probabilities of the costs at `temperature` > 0.
    #[must_use]
    pub fn sampled(&self, costs: &[f64], temperature: f64) -> Option<usize> {
        let (unit, mut reached) = (self.unit(), 0.0);
        for (position, probability) in softmax(costs, temperature).into_iter().enumerate() {
            reached += probability;
            if reached >= unit {
                return Some(position);
            }
        }
        costs.len().checked_sub(1) // rounding left the sum of the probabilities slightly below one
    }
}

/// Probabilities proportional to exp(−(cost − least) / ((most − least) · temperature)).
///
/// Uniform for equal costs. Depends on relative costs only (reference: NVIDIA Dynamo 1.6.1's picker).
#[must_use]
pub fn softmax(costs: &[f64], temperature: f64) -> Vec<f64> {
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for &cost in costs {
        (least, most) = (least.min(cost), most.max(cost));
    }
    let mut scale = 1.0;
    if (most - least).is_infinite() {
        scale = least.abs().max(most.abs());
    }
    let range = most / scale - least / scale;
    let weight = |cost: f64| {
        let position = if range > 0.0 { (cost / scale - least / scale) / range } else { 0.0 };
        (-position / temperature).exp()
    };
    let total: f64 = costs.iter().map(|&cost| weight(cost)).sum();
    costs.iter().map(|&cost| weight(cost) / total).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::WorkerId;

    fn close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 5e-7, "{got:?} is not {want:?}");
        }
    }

    /// Table of the reference.
    #[test]
    fn softmax_table() {
        let costs = [10.0, 20.0, 40.0];
        close(&softmax(&costs, 0.1), &[0.965_512, 0.034_444, 0.000_044]);
        close(&softmax(&costs, 0.5), &[0.606_519, 0.311_397, 0.082_083]);
        close(&softmax(&costs, 1.0), &[0.479_752, 0.343_757, 0.176_491]);
        close(&softmax(&costs, 2.0), &[0.407_662, 0.345_078, 0.247_260]);
        close(&softmax(&[1.0, 1.001], 1.0), &[0.731_059, 0.268_941]);
        close(&softmax(&[1.0, 1000.0], 1.0), &[0.731_059, 0.268_941]);
        close(&softmax(&[3.0, 3.0, 3.0, 3.0], 0.5), &[0.25; 4]);
        close(&softmax(&[-f64::MAX, f64::MAX], 1.0), &[0.731_059, 0.268_941]);
    }

    #[test]
    fn ties_fall_evenly_and_repeat_with_the_seed() {
        let ranks: Vec<_> = (0..4).map(|n| WorkerRank::new(WorkerId(n), 0)).collect();
        let mut won = [0u32; 4];
        for request in 0..4000 {
            let draw = Draw { seed: 1, request };
            let pick = || draw.cheapest(ranks.iter().enumerate().map(|(n, &r)| (n, r, 5.0)));
            assert_eq!(pick(), pick());
            won[pick().expect("four candidates")] += 1;
        }
        assert!(won.iter().all(|&n| (900..1100).contains(&n)), "{won:?}");
    }

    #[test]
    fn sampling_follows_the_probabilities() {
        let mut drawn = [0u32; 3];
        for request in 0..10_000 {
            drawn[Draw { seed: 3, request }.sampled(&[10.0, 20.0, 40.0], 1.0).expect("three")] += 1;
        }
        for (count, share) in drawn.iter().zip([0.4798, 0.3438, 0.1765]) {
            assert!((f64::from(*count) / 10_000.0 - share).abs() < 0.02, "{drawn:?}");
        }
        assert_eq!(Draw { seed: 3, request: 1 }.sampled(&[], 1.0), None);
    }
}
