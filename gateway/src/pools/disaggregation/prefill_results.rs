//! Counts of requests with two legs, for reports: by place of the prefill, and by pair of ranks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::Counter;
use parking_lot::Mutex;
use pointsman::named;
use pointsman::protocol::WorkerRank;

use crate::observe::metric::metric_table;

metric_table! {
    PREFILLS: counter "pointsman_gateway_prefills_total" ["model", "result"] =
        "Requests to models with a prefill pool: `remote` with the prefill on another rank, `skipped` because little \
         is left to compute or the prefill rank is busy, `unsplit` because of a field that does not allow it, \
         `fallback` after the failure of the prefill pool, `complete` if the prefill leg was the whole response.";
}

named! {
/// Place of the prefill of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillResult {
    /// On a prefill rank.
    Remote = "remote",
    /// On the decode rank, because it is faster there.
    Skipped = "skipped",
    /// On the decode rank, because the request cannot have two legs.
    Unsplit = "unsplit",
    /// On the decode rank, because no prefill rank computed it.
    Fallback = "fallback",
    /// On a prefill rank, which has also generated the whole response.
    Complete = "complete",
}
}

/// Maximum number of pairs. The one with the fewest legs makes room for another.
const PAIRS_MAX: usize = 4_096;

/// A prefill rank and a decode rank.
pub(crate) type RankPair = (WorkerRank, WorkerRank);

/// Counts since the start of the gateway.
pub(crate) struct LegCounts {
    counters: [Counter; PrefillResult::ALL.len()],
    results: [AtomicU64; PrefillResult::ALL.len()],
    pairs: Mutex<BTreeMap<RankPair, u64>>,
}

impl LegCounts {
    /// Counts of the model with this name.
    pub(crate) fn new(model: &str) -> Self {
        let counter = |result: PrefillResult| metrics::counter!(PREFILLS.name, "model" => model.to_owned(), "result" => result.name());
        Self { counters: PrefillResult::ALL.map(counter), results: Default::default(), pairs: Mutex::default() }
    }

    /// Counts a served request.
    pub(crate) fn served(&self, result: PrefillResult) {
        self.counters[result as usize].increment(1);
        self.results[result as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a prefill leg.
    pub(crate) fn sent(&self, pair: RankPair) {
        let mut pairs = self.pairs.lock();
        if pairs.len() >= PAIRS_MAX && !pairs.contains_key(&pair) {
            let rarest = pairs.iter().min_by_key(|(_, legs)| **legs).map(|(pair, _)| *pair);
            rarest.map(|rarest| pairs.remove(&rarest));
        }
        *pairs.entry(pair).or_default() += 1;
    }

    pub(crate) fn results(&self) -> Vec<(PrefillResult, u64)> {
        let count = |result: PrefillResult| (result, self.results[result as usize].load(Ordering::Relaxed));
        PrefillResult::ALL.map(count).to_vec()
    }

    pub(crate) fn pairs(&self) -> Vec<(RankPair, u64)> {
        let pairs = self.pairs.lock();
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
        let counts = LegCounts::new("m");
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
