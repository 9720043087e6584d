//! Counters of each rank, and the share of the busiest one.
//!
//! Requests add to the counts of the rank entry. A sweep adds the increase since the previous sweep to the counters, so
//! a rank that joins again continues its series, and the counters of a removed rank are not touched any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge};

use super::{Pool, as_f64};
use crate::actors::views::rank::RankEntry;
use crate::actors::views::rank_counts::RankTotals;
use crate::protocol::{Timestamp, WorkerRank};

/// Time constant of the decay of placements in the share of the busiest rank.
const SHARE_WINDOW: Duration = Duration::from_secs(60);

/// Decayed number of placements below which there is no share.
const SHARE_PLACEMENTS_MIN: f64 = 0.5;

/// Counters by rank.
pub(crate) struct RankCounters {
    pool: Pool,
    ranks: BTreeMap<WorkerRank, OneRank>,
    /// Totals at the last sweep, by incarnation of the entry.
    seen: BTreeMap<u64, RankTotals>,
    busiest: Gauge,
    swept_at: Timestamp,
}

struct OneRank {
    placements: Counter,
    prompt_tokens: Counter,
    predicted_tokens: Counter,
    delivered_tokens: Counter,
    /// Number of placements, each decaying with [`SHARE_WINDOW`].
    recent_placements: f64,
}

impl RankCounters {
    pub(crate) fn new(pool: &Pool) -> Self {
        Self {
            pool: pool.clone(),
            ranks: BTreeMap::new(),
            seen: BTreeMap::new(),
            busiest: pool.gauge("pointsman_busiest_rank_ratio", &[]),
            swept_at: Timestamp::default(),
        }
    }

    /// Adds the counts of the entries since the last sweep.
    pub(crate) fn sweep(&mut self, entries: &[Arc<RankEntry>], now: Timestamp) {
        let decay = (-(now.since(self.swept_at).as_secs_f64() / SHARE_WINDOW.as_secs_f64())).exp();
        self.swept_at = now;
        let present: BTreeSet<WorkerRank> = entries.iter().map(|entry| entry.rank).collect();
        self.ranks.retain(|rank, _| present.contains(rank));
        self.ranks.values_mut().for_each(|rank| rank.recent_placements *= decay);
        let mut seen = BTreeMap::new();
        for entry in entries {
            let totals = entry.counts.totals();
            let before = self.seen.get(&entry.incarnation()).copied().unwrap_or_default();
            seen.insert(entry.incarnation(), totals);
            let rank = self.ranks.entry(entry.rank).or_insert_with(|| OneRank::new(&self.pool, entry.rank));
            rank.add(totals.since(before));
        }
        self.seen = seen;
        let recent = || self.ranks.values().map(|rank| rank.recent_placements);
        let (sum, most) = (recent().sum::<f64>(), recent().fold(0.0, f64::max));
        self.busiest.set(if sum < SHARE_PLACEMENTS_MIN { 0.0 } else { most / sum });
    }
}

impl OneRank {
    fn new(pool: &Pool, rank: WorkerRank) -> Self {
        let (worker, rank) = (rank.worker.0.to_string(), rank.rank.to_string());
        let tokens = |side| {
            let labels = &[("worker", worker.as_str()), ("rank", &rank), ("side", side)];
            pool.counter("pointsman_rank_prediction_tokens_total", labels)
        };
        Self {
            placements: pool.counter("pointsman_rank_placements_total", &[("worker", &worker), ("rank", &rank)]),
            prompt_tokens: tokens("prompt"),
            predicted_tokens: tokens("predicted"),
            delivered_tokens: tokens("delivered"),
            recent_placements: 0.0,
        }
    }

    fn add(&mut self, increase: RankTotals) {
        // Increments by 0 keep the series of an idle rank on a page with expiring series.
        self.placements.increment(increase.placements);
        self.prompt_tokens.increment(increase.prompt_tokens);
        self.predicted_tokens.increment(increase.predicted_tokens);
        self.delivered_tokens.increment(increase.delivered_tokens);
        self.recent_placements += as_f64(increase.placements);
    }
}
