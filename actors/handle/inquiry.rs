//! Questions: what a decision would be, and what it would be based on. Nothing here books anything.

use std::ops::Range;

use serde::Serialize;
use tokio::sync::oneshot;

use super::overlap::{FoundOverlaps, OverlapReceiver};
use super::request::RouteRequest;
use super::router::Router;
use crate::actors::delivery::reply::Reply;
use crate::actors::scheduler::{PendingClass, SchedulerMsg};
use crate::error::{Down, RouteError};
use crate::protocol::WorkerRank;
use crate::schedule::{Explanation, PotentialLoad, Purpose};
use crate::select::{SharedHits, TierOverlap};

/// What every rank holds of one prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OverlapScores {
    /// One row a rank, in rank order: every registered one, and any other that the index still credits.
    pub ranks: Vec<RankScores>,
    /// What the shared cache holds, where it was asked.
    pub shared_cache: Option<SharedSummary>,
}

/// What one rank holds of one prompt, in blocks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankScores {
    /// The rank.
    pub rank: WorkerRank,
    /// Whether discovery knows it. One that it does not know may be on its way out.
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
    /// Blocks that the shared cache has beyond the device's, where it was asked.
    pub shared_beyond_device_blocks: Option<u32>,
    /// The credit that the `kv` cost gives for all of it.
    pub credit_blocks: f64,
}

/// What the shared cache holds of one prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SharedSummary {
    /// Whether there is one to ask.
    pub enabled: bool,
    /// Blocks held.
    pub total_hit_blocks: u32,
    /// Where they lie: half-open ranges of block positions.
    pub ranges: Vec<Range<u32>>,
    /// Why it did not answer.
    pub error: Option<String>,
}

/// What one rank could spare a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheHit {
    /// The rank.
    pub rank: WorkerRank,
    /// Effective overlap in blocks: lower tiers count for less.
    pub effective_overlap_blocks: f64,
    /// Effective overlap in tokens, rounded.
    pub cached_tokens: u32,
}

impl Router {
    /// What every rank's load would be with this request on it, in rank order.
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

    /// Why the request would go where it would go: every rank with what is known of it, its cost and the filter that
    /// refused it, and the choice. Asks every rank, so that all numbers are exact.
    ///
    /// # Errors
    /// See [`RouteError`]; a request that nobody may serve is not one, but is explained.
    pub async fn explain(&self, request: RouteRequest<'_>) -> Result<Explanation, RouteError> {
        let prepared = self.prepare(&request)?;
        match self.ask(&prepared, Purpose::Explain).await? {
            Reply::Explained(explanation) => Ok(*explanation),
            Reply::Rejected(reason) => Err(reason.into()),
            Reply::Placed(_) | Reply::LoadSnapshot(_) => Err(RouteError::Lost { attempts: 0 }),
        }
    }

    /// What every rank holds of the prompt, and, if wanted, what the shared cache has of it.
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
        let asked = include_shared.then(|| SharedSummary {
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
        Ok(OverlapScores { ranks: ranks.collect(), shared_cache: asked })
    }

    /// What each rank could spare the request, in rank order; from tokens or hashes. Ranks that hold nothing are there.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn cache_hit_estimate(&self, request: RouteRequest<'_>) -> Result<Vec<CacheHit>, RouteError> {
        let found = self.find_overlaps(&request, false).await?;
        let (weights, block_size) = (self.config().index.tier_weights(), self.config().block_size);
        let hits = self.every_rank(&found).into_iter().map(|(rank, _, overlap)| CacheHit {
            rank,
            effective_overlap_blocks: overlap.effective_blocks(weights),
            cached_tokens: overlap.cached_tokens(weights, block_size),
        });
        Ok(hits.collect())
    }

    /// What waits, class by class: exact for everything that arrived, left or was cancelled before this call.
    ///
    /// # Errors
    /// When the router is down, or the scheduler was lost before it answered.
    pub async fn pending(&self) -> Result<Vec<PendingClass>, RouteError> {
        self.views().status.up()?;
        let (sender, answer) = oneshot::channel();
        self.strands().scheduler.tell(SchedulerMsg::Pending(sender));
        match self.views().status.reply_of(answer).await {
            Some(pending) => Ok(pending),
            None => Err(self.views().status.up().err().map_or(RouteError::Lost { attempts: 1 }, RouteError::from)),
        }
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
        let (sender, answer) = oneshot::channel();
        self.query_overlap(hashes, OverlapReceiver::Caller(sender), with_shared_cache);
        match self.views().status.reply_of(answer).await {
            Some(found) => Ok(found),
            None => Err(self.views().status.up().err().unwrap_or(Down::Failed).into()),
        }
    }

    /// Every registered rank and any other that the index credits, with what it holds.
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
