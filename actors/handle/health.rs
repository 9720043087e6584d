//! Health of the ranks and the load that their engines report.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::attempts::RESTART_WAIT;
use super::router::Router;
use crate::actors::engine_load;
use crate::actors::health::HealthMsg;
use crate::actors::views::rank::RankEntry;
use crate::engine_load::{EngineLoadFact, EngineReading};
use crate::error::Down;
use crate::health::{Outcome, RankHealth};
use crate::protocol::WorkerRank;

impl Router {
    /// Reports the outcome of a request to a rank, for embedders that book by request id. Embedders with a placement
    /// use [`Placement::outcome`](crate::Placement::outcome). An unknown rank is ignored. Visits every rank.
    pub fn report_outcome(&self, rank: WorkerRank, outcome: Outcome) {
        if let Some(entry) = self.views().ranks.of_rank(rank) {
            self.edge().report_outcome(&entry, outcome, None);
        }
    }

    /// Health of each rank with its reason, in rank order.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn rank_health(&self) -> Result<Vec<RankHealth>, Down> {
        loop {
            self.views().status.up()?;
            let before = self.views().status.state();
            let (sender, answer) = oneshot::channel();
            self.strands().health.tell(HealthMsg::Report(sender));
            if let Some(report) = self.views().status.reply_of(answer, before).await {
                return Ok(report);
            }
            // If the reply is lost with the actor, its successor has the state.
            let mut status = self.views().status.subscribe();
            let restarted = status.wait_for(|status| status.restarts > before.restarts);
            drop(tokio::time::timeout(RESTART_WAIT, restarted).await);
        }
    }

    /// Number of ranks that can serve now: registered, and not draining, cordoned, unavailable (see
    /// [`Router::set_conditions`]), down or ejected. If only ranks ejected for failed requests are left, these count. 0
    /// when the router is down. Load does not count. Visits every rank and does not block.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use pointsman::protocol::{WorkerConfig, WorkerId};
    /// use pointsman::{Router, RouterConfig};
    ///
    /// let router = Router::builder(RouterConfig::default()).start().await?;
    /// assert_eq!(router.eligible_ranks(), 0); // not ready
    /// let two_ranks = WorkerConfig { data_parallel_size: 2, ..WorkerConfig::at("http://a") };
    /// router.upsert_worker(WorkerId(1), two_ranks).await?;
    /// assert_eq!(router.eligible_ranks(), 2);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn eligible_ranks(&self) -> usize {
        self.views().eligible_ranks()
    }

    /// Ranks excluded for their health. Does not block.
    #[must_use]
    pub fn out_of_service(&self) -> BTreeSet<WorkerRank> {
        self.views().exclusions.get().out_of_service()
    }

    /// Whether the rank's engine has reported that it sleeps. Does not block.
    #[must_use]
    pub fn is_asleep(&self, rank: WorkerRank) -> bool {
        self.views().exclusions.get().asleep.contains(&rank)
    }

    /// Ranks that owe first tokens and make no progress, in rank order. Does not block.
    #[must_use]
    pub fn stalled(&self) -> BTreeSet<WorkerRank> {
        let now = self.edge().clock.now();
        self.views().ranks.all().iter().filter(|entry| entry.stalls.is_overdue(now)).map(|entry| entry.rank).collect()
    }

    /// Latest load report of each rank's engine, in rank order; `None` without any report.
    #[must_use]
    pub fn engine_loads(&self) -> Vec<(WorkerRank, Option<EngineLoadFact>)> {
        let (now, stale_after) = (self.edge().clock.now(), Duration::from_millis(self.config().engine_load.stale_ms));
        let fact = |entry: &Arc<RankEntry>| entry.cells.engine_load.read().map(|load| load.fact(now, stale_after));
        let mut entries = self.views().ranks.all();
        entries.sort_by_key(|entry| (entry.rank, std::cmp::Reverse(entry.since)));
        entries.dedup_by_key(|entry| entry.rank); // of two entries, the one that is not draining
        entries.iter().map(|entry| (entry.rank, fact(entry))).collect()
    }

    /// Records a load report of a rank's engine, for embedders that poll engines themselves. An unknown rank and an
    /// empty report are ignored.
    pub fn report_engine_load(&self, rank: WorkerRank, reading: EngineReading) {
        engine_load::report(&self.strands().engine_loads, self.edge().clock, rank, reading);
    }
}
