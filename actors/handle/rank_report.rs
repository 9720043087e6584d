//! Published state of ranks, shadow policies and other replicas.
//!
//! Read without a message to an actor, for pages that are computed several times per second.

use std::collections::BTreeMap;

use super::router::Router;
use crate::actors::views::rank_report::RankReport;
use crate::actors::views::shadows::ShadowTotals;
use crate::protocol::{Timestamp, WorkerRank};
use crate::replica::PeerStatus;

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
    /// let router = Router::builder(RouterConfig { block_size: Some(4), ..RouterConfig::default() }).start().await?;
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
        for entry in self.views().ranks.all() {
            reports
                .entry(entry.rank)
                .or_insert_with(|| RankReport { rank: entry.rank, ..RankReport::default() })
                .add(&entry, now);
        }
        reports.into_values().collect()
    }

    /// Totals of the shadow policies (`shadow.policies`), in the order of the configuration; empty before the first
    /// sampled decision. Does not block.
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
