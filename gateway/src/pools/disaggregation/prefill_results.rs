//! Counts of requests with two legs, for reports: by place of the prefill, and by pair of ranks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pointsman::protocol::WorkerRank;

use super::PrefillResult;

/// Maximum number of pairs. The one with the fewest legs makes room for another.
const PAIRS_MAX: usize = 4_096;

/// A prefill rank and a decode rank.
pub(crate) type RankPair = (WorkerRank, WorkerRank);

/// Counts since the start of the gateway.
#[derive(Debug, Default)]
pub(super) struct LegCounts {
    results: [AtomicU64; PrefillResult::ALL.len()],
    pairs: Mutex<BTreeMap<RankPair, u64>>,
}

impl LegCounts {
    /// Counts a served request.
    pub(super) fn served(&self, result: PrefillResult) {
        self.results[result as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a prefill leg.
    pub(super) fn sent(&self, pair: RankPair) {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        if pairs.len() >= PAIRS_MAX && !pairs.contains_key(&pair) {
            let rarest = pairs.iter().min_by_key(|(_, legs)| **legs).map(|(pair, _)| *pair);
            rarest.map(|rarest| pairs.remove(&rarest));
        }
        *pairs.entry(pair).or_default() += 1;
    }

    pub(super) fn results(&self) -> Vec<(PrefillResult, u64)> {
        let count = |result: PrefillResult| (result, self.results[result as usize].load(Ordering::Relaxed));
        PrefillResult::ALL.map(count).to_vec()
    }

    pub(super) fn pairs(&self) -> Vec<(RankPair, u64)> {
        let pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.iter().map(|(pair, legs)| (*pair, *legs)).collect()
    }
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerId;

    use super::*;

    #[test]
    fn the_number_of_pairs_is_bounded() {
        let rank = |n| WorkerRank::new(WorkerId(n), 0);
        let counts = LegCounts::default();
        for n in 0..PAIRS_MAX as u64 {
            counts.sent((rank(n), rank(0)));
            counts.sent((rank(n), rank(0)));
        }
        counts.sent((rank(7), rank(0)));
        counts.sent((rank(u64::MAX), rank(0)));
        let pairs = counts.pairs();
        assert_eq!(pairs.len(), PAIRS_MAX);
        assert!(pairs.contains(&((rank(7), rank(0)), 3)) && pairs.contains(&((rank(u64::MAX), rank(0)), 1)));
    }
}
