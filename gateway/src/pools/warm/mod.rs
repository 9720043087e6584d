//! Warm start: index snapshots in files, from other replicas, and in the store of a bus.
//!
//! A model starts with the snapshot in its file, if any. In a group of replicas it then fetches the snapshot of a
//! serving one, or else the stored one; per rank the newer contents are kept. The readers of KV events apply the messages since then, and
//! `/ready` waits for them up to `warm_up_ms`. Snapshots are written periodically and at shutdown. No failure here ends
//! or delays requests: it is logged and counted, and the model starts with less.

mod contents;
mod file;
mod siblings;
mod store;
mod writer;

use std::collections::BTreeMap;
use std::path::Path;

use metrics::counter;
use parking_lot::Mutex;
use pointsman::{KvSourceStatus, RestoreState, Snapshot};

use crate::observe::metric::metric_table;
use crate::settings::ModelSettings;
pub(crate) use siblings::join;
pub(crate) use store::{store_last, store_periodically};
pub(crate) use writer::{write_last, write_periodically};

metric_table! {
    RESTORES: counter "pointsman_gateway_snapshot_restores_total" ["model", "source", "result"] =
        "Index snapshots by source (`file`, `replica`, `store`) and result: `restored`, `absent`, `failed` (not \
         readable), or the reason of the refusal: `magic`, `version`, `checksum`, `layout`, `malformed`.";
    WRITES: counter "pointsman_gateway_snapshot_writes_total" ["model", "result"] =
        "Writes of the index snapshot file by result: `written`, `empty` (no contents; the file is kept), `failed`.";
    STORES: counter "pointsman_gateway_snapshot_stores_total" ["model", "result"] =
        "Writes of the index snapshot to the object store of NATS by result: `stored`, `failed`.";
    WRITTEN: gauge "pointsman_gateway_snapshot_written_timestamp_seconds" ["model"] =
        "Time of the last write of the index snapshot file, in Unix time.";
    BYTES: gauge "pointsman_gateway_snapshot_bytes" ["model"] = "Length of the last written index snapshot file.";
}

/// Counts a restoration by the source of the snapshot: `file`, `replica` or `store`.
fn count_restore(model: &str, source: &'static str, result: &'static str) {
    counter!(RESTORES.name, "model" => model.to_owned(), "source" => source, "result" => result).increment(1);
}

/// Progress of the warm start of one model.
#[derive(Default)]
pub(crate) struct WarmStart {
    /// The replica that a snapshot is being fetched from, or the wait for one.
    fetching: Mutex<Option<String>>,
}

impl WarmStart {
    fn set_fetching(&self, what: Option<String>) {
        *self.fetching.lock() = what;
    }

    /// The pending part, for `/ready`; `None` if nothing is pending.
    pub(crate) fn pending(&self, sources: &[KvSourceStatus]) -> Option<String> {
        let fetching = self.fetching.lock().clone();
        let mut by_state: BTreeMap<&str, usize> = BTreeMap::new();
        for state in sources.iter().filter_map(|source| source.restore) {
            let state = match state {
                RestoreState::Unverified => "wait for the events since their snapshot",
                RestoreState::Dropped => "could not continue from their snapshot",
                RestoreState::Resumed => continue,
            };
            *by_state.entry(state).or_default() += 1;
        }
        let restores = by_state.into_iter().map(|(state, ranks)| format!("{ranks} {state}"));
        let pending: Vec<String> = fetching.into_iter().chain(restores).collect();
        (!pending.is_empty()).then(|| pending.join("; "))
    }
}

/// The snapshot in the file of a model, if it is usable. A refused file is logged, counted, and left in place until the
/// next write.
pub(crate) async fn read_file(settings: &ModelSettings, directory: Option<&Path>) -> Option<Snapshot> {
    let router = &settings.router;
    let path = file::path_of(directory?, &router.pool);
    if !(router.events.mode.reads_events() && router.has_index()) {
        return None;
    }
    let (model, pool) = (settings.name.as_str(), router.clone());
    let (shown, count) = (path.display().to_string(), |result| count_restore(model, "file", result));
    let read = tokio::task::spawn_blocking(move || file::read(&path, &pool)).await;
    match read.unwrap_or_else(|panic| Err(file::ReadError::Lost(panic.to_string()))) {
        Ok(Some(snapshot)) => {
            let (ranks, blocks, created_ms) = (snapshot.ranks.len(), snapshot.block_count(), snapshot.created_ms);
            tracing::info!(model, path = shown, ranks, blocks, created_ms, "index snapshot loaded");
            count("restored");
            Some(snapshot)
        }
        Ok(None) => {
            tracing::info!(model, path = shown, "no index snapshot: the index starts empty");
            count("absent");
            None
        }
        Err(error) => {
            tracing::warn!(model, path = shown, %error, "index snapshot ignored");
            count(error.name());
            None
        }
    }
}
