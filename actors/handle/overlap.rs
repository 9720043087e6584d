//! Overlap query: reads every shard and the shared cache, if present, then continues at the scheduler or the caller.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::oneshot;

use super::shared_cache::{SharedCache, SharedCacheFailure, SharedCacheResult};
use crate::actors::delivery::join::{Continuation, ReplyToken};
use crate::actors::delivery::strand::Strand;
use crate::actors::radix::OverlapQuery;
use crate::actors::scheduler::{RequestContext, Scheduler, SchedulerMsg};
use crate::actors::telemetry::SharedCacheMeters;
use crate::protocol::BlockHash;
use crate::schedule::Request;
use crate::select::{RankOverlap, SharedHits};

/// Receiver of the collected overlaps.
pub(super) enum OverlapReceiver {
    /// Forwards the request to the scheduler.
    Scheduler(Request<RequestContext>, Weak<Strand<Scheduler>>),
    /// A caller that queries overlaps only.
    Caller(oneshot::Sender<FoundOverlaps>),
}

/// Overlaps of one prompt.
pub(super) struct FoundOverlaps {
    pub(super) overlaps: Vec<RankOverlap>,
    /// Present if the shared cache was queried.
    pub(super) shared_cache: Option<SharedCacheResult>,
}

/// Continuation of an overlap query.
pub(super) struct OverlapContinuation {
    hashes: Arc<[BlockHash]>,
    reusable_blocks: u32,
    receiver: Mutex<Option<OverlapReceiver>>,
    /// Set by the token that queries the shared cache.
    shared_cache: OnceLock<SharedCacheResult>,
}

impl OverlapContinuation {
    pub(super) fn new(hashes: Arc<[BlockHash]>, reusable_blocks: u32, receiver: OverlapReceiver) -> Self {
        Self { hashes, reusable_blocks, receiver: Mutex::new(Some(receiver)), shared_cache: OnceLock::new() }
    }

    pub(super) fn set_shared_cache(&self, result: SharedCacheResult) {
        let _ = self.shared_cache.set(result); // queried once
    }
}

impl OverlapQuery for OverlapContinuation {
    fn hashes(&self) -> &Arc<[BlockHash]> {
        &self.hashes
    }

    fn reusable_blocks(&self) -> u32 {
        self.reusable_blocks
    }
}

impl Continuation<RankOverlap> for OverlapContinuation {
    fn run(&self, overlaps: Vec<RankOverlap>) {
        let receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        match receiver {
            Some(OverlapReceiver::Scheduler(request, scheduler)) => {
                let Some(scheduler) = scheduler.upgrade() else { return };
                if let Some(timestamps) = &request.context.timestamps {
                    timestamps.set_found();
                }
                let shared_cache = self.shared_cache.get().and_then(|found| found.as_ref().ok()).cloned();
                let shared_cache = shared_cache.unwrap_or_default();
                scheduler.tell(SchedulerMsg::Decide(Request { overlaps, shared_cache, ..request }));
            }
            Some(OverlapReceiver::Caller(reply)) => {
                let shared_cache = self.shared_cache.get().cloned();
                drop(reply.send(FoundOverlaps { overlaps, shared_cache })); // the receiver may be dropped
            }
            None => {}
        }
    }
}

/// Queries the shared cache; dropping the token completes its share.
pub(super) async fn query_shared_cache(
    cache: Arc<dyn SharedCache>,
    timeout_ms: u64,
    meters: Option<Arc<SharedCacheMeters>>,
    token: ReplyToken<RankOverlap, OverlapContinuation>,
) {
    let query = cache.query(Arc::clone(token.continuation().hashes()));
    let result: SharedCacheResult = match tokio::time::timeout(Duration::from_millis(timeout_ms), query).await {
        Ok(Ok(ranges)) => Ok(SharedHits::new(ranges)),
        Ok(Err(error)) => Err(SharedCacheFailure::Error(error.to_string())),
        Err(_) => Err(SharedCacheFailure::Late(timeout_ms)),
    };
    if let Some(meters) = meters {
        match &result {
            Ok(hits) => meters.count_hits(hits.total(), token.continuation().hashes().len()),
            Err(SharedCacheFailure::Late(_)) => meters.late.increment(1),
            Err(SharedCacheFailure::Error(_)) => meters.count_error(),
        }
    }
    token.continuation().set_shared_cache(result);
}
