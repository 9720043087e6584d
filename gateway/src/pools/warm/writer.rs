//! Periodic writes of the snapshot files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, gauge};
use tokio::time::{sleep, timeout};

use super::contents::has_snapshots;
use super::{BYTES, WRITES, WRITTEN, file};
use crate::observe::clock::unix_time;
use crate::pools::latest::Latest;
use crate::pools::model::Model;
use crate::pools::serving::Pools;

/// Longest time of the writes at shutdown.
pub(super) const LAST_WRITE_MAX: Duration = Duration::from_secs(10);

/// Writes the snapshot of every model each `snapshot_interval_ms`.
pub(crate) async fn write_periodically(latest: Latest<Pools>) {
    loop {
        let interval = Duration::from_millis(latest.get().settings.gateway.snapshot_interval_ms);
        sleep(interval).await;
        write_all(&latest.get()).await;
    }
}

/// Writes the snapshots of a gateway that has served its last request.
pub(crate) async fn write_last(pools: &Pools) {
    if timeout(LAST_WRITE_MAX, write_all(pools)).await.is_err() {
        tracing::warn!(after = ?LAST_WRITE_MAX, "index snapshots not written at shutdown: timeout");
    }
}

async fn write_all(pools: &Pools) {
    let Some(directory) = &pools.settings.gateway.snapshot_path else { return };
    for model in pools.models.all() {
        write(model, directory).await;
    }
}

async fn write(model: &Arc<Model>, directory: &Path) {
    if !has_snapshots(model) {
        return;
    }
    let (path, name) = (file::path_of(directory, &model.router.config().pool), model.settings.name.as_str());
    let count = |result| counter!(WRITES.name, "model" => name.to_owned(), "result" => result).increment(1);
    let Ok(snapshot) = model.router.snapshot().await else { return }; // the router is down
    if snapshot.ranks.is_empty() {
        return count("empty"); // engines that are down for a while may return
    }
    let (ranks, blocks, created_ms) = (snapshot.ranks.len(), snapshot.block_count(), snapshot.created_ms);
    let shown = path.display().to_string();
    let write = move || {
        let bytes = snapshot.encode();
        file::write(&path, &bytes).map(|()| bytes.len())
    };
    match tokio::task::spawn_blocking(write).await.unwrap_or_else(|panic| Err(std::io::Error::other(panic))) {
        Ok(bytes) => {
            count("written");
            gauge!(BYTES.name, "model" => name.to_owned()).set(bytes as f64);
            gauge!(WRITTEN.name, "model" => name.to_owned()).set(unix_time().as_secs_f64());
            tracing::debug!(model = name, path = shown, ranks, blocks, bytes, created_ms, "index snapshot written");
        }
        Err(error) => {
            count("failed");
            tracing::warn!(model = name, path = shown, %error, "index snapshot could not be written");
        }
    }
}
