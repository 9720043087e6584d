//! Index contents of a model: when they are worth a snapshot, and their restoration from an encoded one.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use pointsman::{BusError, Snapshot};
use tokio::time::timeout;

use super::count_restore;
use crate::pools::model::Model;
use crate::pools::serving::Pools;

/// Longest time of one fetch.
const FETCH_MAX: Duration = Duration::from_secs(10);

/// The result of a fetch within its time. A failure is logged and counted.
pub(super) async fn fetched<T>(
    model: &Model,
    source: &'static str,
    fetch: impl Future<Output = Result<T, BusError>>,
) -> Option<T> {
    let error = match timeout(FETCH_MAX, fetch).await {
        Ok(Ok(fetched)) => return Some(fetched),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("timeout after {FETCH_MAX:?}"),
    };
    tracing::warn!(model = model.settings.name, source, error, "index snapshot could not be fetched");
    count_restore(&model.settings.name, source, "failed");
    None
}

/// Restores the contents of an encoded snapshot. Returns whether it was usable.
pub(super) async fn apply(model: &Model, bytes: Bytes, source: &'static str, from: &str) -> bool {
    let name = model.settings.name.as_str();
    let decoded = tokio::task::spawn_blocking(move || Snapshot::decode(&bytes)).await;
    let Ok(decoded) = decoded else { return false };
    let restored = decoded.and_then(|snapshot| {
        let (ranks, blocks) = (snapshot.ranks.len(), snapshot.block_count());
        model.router.restore(snapshot).map(|()| (ranks, blocks))
    });
    match restored {
        Ok((ranks, blocks)) => {
            tracing::info!(model = name, from, ranks, blocks, "index snapshot restored");
            count_restore(name, source, "restored");
            true
        }
        Err(error) => {
            tracing::warn!(model = name, from, %error, "index snapshot ignored");
            count_restore(name, source, error.name());
            false
        }
    }
}

/// Whether the index of a model follows KV events, and so can continue from a snapshot.
pub(super) fn has_snapshots(model: &Model) -> bool {
    let config = model.router.config();
    config.events.mode.reads_events() && config.has_index()
}

/// Whether the index of a model is as complete as it can be: after the warm-up time, ranks with losses are marked as cold.
pub(super) fn is_warm(pools: &Pools, model: &Model) -> bool {
    model.was_warm.load(Ordering::Relaxed) || pools.readiness.is_warm_up_over()
}
