//! Queries without bookings: projected decisions, their reasons, and their inputs.

use std::ops::Range;

use serde::Serialize;
use tokio::sync::oneshot;

use super::overlap::{FoundOverlaps, OverlapReceiver};
use super::router::Router;
use crate::actors::delivery::reply::Reply;
use crate::actors::scheduler::PendingClass;
use crate::error::RouteError;
use crate::protocol::WorkerRank;
use crate::request::RouteRequest;
use crate::schedule::{Explanation, PotentialLoad, Purpose};
use crate::select::{SharedHits, TierOverlap};
use crate::session::SessionId;

/// Overlap of one prompt with every rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OverlapScores {
    /// One row per rank, in rank order: every registered rank, and any other rank in the index.
    pub ranks: Vec<RankScores>,
    /// Result of the shared cache, if it was queried.
    pub shared_cache: Option<SharedSummary>,
}

/// Overlap of one prompt with one rank, in blocks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankScores {
    /// The rank.
    pub rank: WorkerRank,
    /// Whether the rank is registered. An unregistered rank may be in removal.
    pub registered: bool,
    /// Leading blocks in accelerator memory.
    pub device_blocks: u32,
    /// Leading blocks down to pinned host memory.
    pub host_pinned_blocks: u32,
    /// Leading blocks down to disk and external stores.
    pub disk_blocks: u32,
    /// Blocks that pinned host memory adds.
    pub host_pinned_extension_blocks: u32,
    /// Blocks that disk and external stores add.
    pub disk_extension_blocks: u32,
    /// Blocks that the shared cache holds beyond the device blocks, if it was queried.
    pub shared_beyond_device_blocks: Option<u32>,
    /// Credit of the `kv` cost for all of these blocks.
    pub credit_blocks: f64,
}

/// Overlap of one prompt with the shared cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SharedSummary {
    /// Whether a shared cache is configured.
    pub enabled: bool,
    /// Blocks held.
    pub total_hit_blocks: u32,
    /// Half-open ranges of the positions of these blocks.
    pub ranges: Vec<Range<u32>>,
    /// Error of the query, if it failed.
    pub error: Option<String>,
}

impl Router {
    /// Projected load of every rank with this request on it, in rank order.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn potential_loads(&self, request: RouteRequest<'_>) -> Result<Vec<PotentialLoad>, RouteError> {
        let prepared = self.prepare(&request)?;
        match self.ask(&prepared, Purpose::LoadSnapshot).await? {
            Reply::LoadSnapshot(loads) => Ok(loads),
            Reply::Rejected(reason) => Err(reason.into()),
            Reply::Placed(_) | Reply::Explained(_) => Err(RouteError::Lost { attempts: 0 }),
        }
    }

    /// Explains the decision for a request: every rank with its inputs, its cost and the filter that excludes it, and
    /// the chosen rank. Queries every rank, so all numbers are exact.
    ///
    /// # Errors
    /// See [`RouteError`]. A request without an eligible rank is explained and is no error.
    pub async fn explain(&self, request: RouteRequest<'_>) -> Result<Explanation, RouteError> {
        let prepared = self.prepare(&request)?;
        match self.ask(&prepared, Purpose::Explain).await? {
            Reply::Explained(explanation) => Ok(*explanation),
            Reply::Rejected(reason) => Err(reason.into()),
            Reply::Placed(_) | Reply::LoadSnapshot(_) => Err(RouteError::Lost { attempts: 0 }),
        }
    }

    /// Overlap of the prompt with every rank and, if requested, with the shared cache.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn overlap_scores(
        &self,
        request: RouteRequest<'_>,
        include_shared: bool,
    ) -> Result<OverlapScores, RouteError> {
        let found = self.find_overlaps(&request, include_shared).await?;
        let shared_hits = match &found.shared_cache {
            Some(Ok(hits)) => hits.clone(),
            Some(Err(_)) | None => SharedHits::default(),
        };
        let shared_summary = include_shared.then(|| SharedSummary {
            enabled: self.shared_cache().is_some(),
            total_hit_blocks: shared_hits.total(),
            ranges: shared_hits.ranges().to_vec(),
            error: found.shared_cache.as_ref().and_then(|found| found.as_ref().err()).map(ToString::to_string),
        });
        let ranks = self.every_rank(&found).into_iter().map(|(rank, registered, overlap)| {
            let shared_blocks = shared_hits.beyond(overlap.device_blocks);
            let disk_extension_blocks = overlap.disk_blocks + overlap.external_blocks;
            RankScores {
                rank,
                registered,
                device_blocks: overlap.device_blocks,
                host_pinned_blocks: overlap.device_blocks + overlap.host_pinned_blocks,
                disk_blocks: overlap.total_blocks(),
                host_pinned_extension_blocks: overlap.host_pinned_blocks,
                disk_extension_blocks,
                shared_beyond_device_blocks: include_shared.then_some(shared_blocks),
                credit_blocks: self.config().kv_cost().credit(overlap, shared_blocks),
            }
        });
        Ok(OverlapScores { ranks: ranks.collect(), shared_cache: shared_summary })
    }

    /// Waiting requests by class. Exact for all arrivals, departures and cancellations before this call.
    ///
    /// # Errors
    /// When the router is down, or the scheduler was lost before its reply.
    pub async fn pending(&self) -> Result<Vec<PendingClass>, RouteError> {
        self.views().status.up()?;
        let before = self.views().status.state();
        let answer = self.strands().scheduler.ask(|scheduler| scheduler.pending());
        match self.views().status.reply_of(answer, before).await {
            Some(pending) => Ok(pending),
            None => Err(self.views().status.up().err().map_or(RouteError::Lost { attempts: 1 }, RouteError::from)),
        }
    }

    /// The rank of a session, as a use of it; `None` for an unknown or forgotten one, and if the scheduler was lost.
    ///
    /// ```
    /// use pointsman::protocol::{WorkerConfig, WorkerId, WorkerRank};
    /// use pointsman::{Router, RouterConfig, SessionId};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let router = Router::builder(RouterConfig::default()).worker(WorkerId(3), WorkerConfig::at("http://e")).start().await?;
    /// let (session, rank) = (SessionId::new("chat-7")?, WorkerRank::new(WorkerId(3), 0));
    /// router.bind_session(&session, rank);
    /// assert_eq!(router.session_rank(&session).await, Some(rank));
    /// # router.shutdown(std::time::Duration::ZERO).await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn session_rank(&self, session: &SessionId) -> Option<WorkerRank> {
        let (before, session) = (self.views().status.state(), session.clone());
        let answer = self.strands().scheduler.ask(move |scheduler| scheduler.session_rank(&session));
        self.views().status.reply_of(answer, before).await.flatten()
    }

    /// Binds a session to a rank for the other replicas too, as a placement does: a name for state that only this rank has.
    pub fn bind_session(&self, session: &SessionId, rank: WorkerRank) {
        let session = session.clone();
        self.strands().scheduler.query(move |scheduler| {
            scheduler.bind_session(&session, rank);
            || {}
        });
    }

    async fn find_overlaps(
        &self,
        request: &RouteRequest<'_>,
        with_shared_cache: bool,
    ) -> Result<FoundOverlaps, RouteError> {
        self.views().status.up()?;
        let prepared = self.prepare(request)?;
        let nothing = FoundOverlaps { overlaps: Vec::new(), shared_cache: None };
        let Some(hashes) = prepared.block_hashes() else { return Ok(nothing) };
        let before = self.views().status.state();
        let (sender, answer) = oneshot::channel();
        self.query_overlap(hashes, prepared.prompt_tokens, OverlapReceiver::Caller(sender), with_shared_cache);
        match self.views().status.reply_of(answer, before).await {
            Some(found) => Ok(found),
            None => Err(self.views().status.up().err().map_or(RouteError::Lost { attempts: 1 }, RouteError::from)),
        }
    }

    /// Every registered rank, and any other rank in the index, with its overlap.
    fn every_rank(&self, found: &FoundOverlaps) -> Vec<(WorkerRank, bool, TierOverlap)> {
        let workers = self.workers();
        let registered = workers.iter().flat_map(|worker| &worker.ranks);
        let mut rows: Vec<_> = registered.map(|rank| (*rank, true, TierOverlap::default())).collect();
        for known in &found.overlaps {
            let Some(address) = self.strands().sequences.get(known.slot, known.generation) else { continue };
            let entry = &address.entry;
            match rows.binary_search_by_key(&entry.rank, |(rank, ..)| *rank) {
                Ok(position) => rows[position].2 = known.overlap,
                Err(position) => rows.insert(position, (entry.rank, false, known.overlap)),
            }
        }
        rows
    }
}
