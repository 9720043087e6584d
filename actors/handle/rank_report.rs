//! Published state of ranks, shadow policies and other replicas.
//!
//! Read without a message to an actor, for pages that are computed several times per second.

use std::collections::BTreeMap;
use std::time::Duration;

use super::router::Router;
use crate::actors::views::shadows::ShadowTotals;
use crate::protocol::{Timestamp, WorkerRank};
use crate::replica::PeerStatus;

/// Booked load and requests of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankReport {
    /// The rank.
    pub rank: WorkerRank,
    /// Booked requests.
    pub active_requests: u64,
    /// KV blocks of the booked requests.
    pub active_blocks: u64,
    /// Prompt tokens that the rank has still to compute.
    pub prefill_tokens: u64,
    /// Expected time until these are computed; zero without a learned speed.
    pub prefill_wait: Duration,
    /// Indexed blocks, over all tiers.
    pub held_blocks: u64,
    /// Requests placed on the rank since it joined.
    pub placements: u64,
    /// Prompt tokens of its requests with a report of cached tokens, since it joined.
    pub prompt_tokens: u64,
    /// Cached tokens of these prompts, as predicted at placement.
    pub predicted_tokens: u64,
    /// Cached tokens of these prompts, as reported.
    pub delivered_tokens: u64,
}

impl RankReport {
    fn idle(rank: WorkerRank) -> Self {
        Self {
            rank,
            active_requests: 0,
            active_blocks: 0,
            prefill_tokens: 0,
            prefill_wait: Duration::ZERO,
            held_blocks: 0,
            placements: 0,
            prompt_tokens: 0,
            predicted_tokens: 0,
            delivered_tokens: 0,
        }
    }
}

impl Router {
    /// Booked load and requests of every registered rank, in rank order. The values are those of the metrics
    /// `pointsman_rank_*`. Visits every rank and does not block.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use pointsman::protocol::WorkerId;
    /// use pointsman::{Prompt, RouteRequest, Router, RouterConfig};
    ///
    /// let router = Router::builder(RouterConfig { block_size: 4, ..RouterConfig::default() }).start().await?;
    /// router.register_workers([WorkerId(1)]).await?;
    /// let placement = router.route(RouteRequest::new("a", Prompt::Tokens(&[1; 8]))).await?;
    /// assert_eq!(router.rank_reports()[0].active_requests, 1);
    /// # drop(placement);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn rank_reports(&self) -> Vec<RankReport> {
        let now = self.edge().clock.now();
        let mut reports: BTreeMap<WorkerRank, RankReport> = BTreeMap::new();
        // A rank has two entries while one is retiring.
        for entry in self.views().ranks.all() {
            let report = reports.entry(entry.rank).or_insert_with(|| RankReport::idle(entry.rank));
            report.held_blocks += u64::from(entry.holdings.held_blocks());
            let totals = entry.counts.totals();
            report.placements += totals.placements;
            report.prompt_tokens += totals.prompt_tokens;
            report.predicted_tokens += totals.predicted_tokens;
            report.delivered_tokens += totals.delivered_tokens;
            // Of a board that is being written, the next call has the load.
            let Some(load) = entry.board.read() else { continue };
            report.active_requests += u64::from(load.requests);
            report.active_blocks += u64::from(load.active_blocks);
            report.prefill_tokens = report.prefill_tokens.saturating_add(load.prefill.bounds(now).1);
            report.prefill_wait = report.prefill_wait.saturating_add(load.prefill.wait(now).0);
        }
        reports.into_values().collect()
    }

    /// Totals of the [shadow policies](crate::config::ShadowConfig), in the order of the configuration; empty before the
    /// first sampled decision. Does not block.
    #[must_use]
    pub fn shadow_totals(&self) -> Vec<ShadowTotals> {
        self.views().shadows.get().to_vec()
    }

    /// Other replicas that share their load with this router, with their ages now. Empty without a replica bus. Does
    /// not block.
    #[must_use]
    pub fn replica_peers(&self) -> Vec<PeerStatus> {
        let now = self.edge().clock.now();
        let published = self.views().replica_peers.get();
        published.statuses.iter().map(|status| aged(*status, published.at, now)).collect()
    }
}

/// The status at `now`, from one at `at`.
fn aged(status: PeerStatus, at: Timestamp, now: Timestamp) -> PeerStatus {
    PeerStatus { summary_age: status.summary_age.saturating_add(now.since(at)), ..status }
}
