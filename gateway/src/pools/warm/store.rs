//! Snapshots in the store of a bus, for replicas that start while no other one serves.
//!
//! The serving replica with the longest life stores the snapshot of each model every `snapshot_interval_ms`, and the last
//! one of all at its shutdown.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use pointsman::{ReplicaBus, SnapshotStore};
use tokio::time::{sleep, timeout};

use super::contents::{apply, fetched, has_snapshots, is_warm};
use super::writer::LAST_WRITE_MAX;
use super::{STORES, count_restore};
use crate::pools::latest::Latest;
use crate::pools::model::Model;
use crate::pools::readiness;
use crate::pools::serving::Pools;

/// Stores the snapshots while this replica is the first of those that serve. Ends at once without a store.
pub(crate) async fn store_periodically(latest: Latest<Pools>, bus: Arc<dyn ReplicaBus>) {
    let Some(store) = bus.store() else { return };
    loop {
        let interval = Duration::from_millis(latest.get().settings.gateway.snapshot_interval_ms);
        sleep(interval).await;
        let pools = latest.get();
        if is_first(&*bus) && readiness::is_ready(&pools).await {
            store_all(&pools, store).await;
        }
    }
}

/// Stores the snapshots of a gateway that has served its last request, if no other replica serves.
pub(crate) async fn store_last(pools: &Pools, bus: &dyn ReplicaBus) {
    let Some(store) = bus.store() else { return };
    if bus.members().borrow().iter().any(|member| member.is_serving) {
        return;
    }
    if timeout(LAST_WRITE_MAX, store_all(pools, store)).await.is_err() {
        tracing::warn!(after = ?LAST_WRITE_MAX, "index snapshots not stored at shutdown: timeout");
    }
}

/// Whether all other serving replicas have started later.
fn is_first(bus: &dyn ReplicaBus) -> bool {
    let own = bus.life();
    let own = (own.incarnation, own.replica);
    let members = bus.members();
    let members = members.borrow();
    members.iter().filter(|member| member.is_serving).all(|member| own < (member.life.incarnation, member.life.replica))
}

async fn store_all(pools: &Pools, store: &dyn SnapshotStore) {
    for model in pools.models.all().iter().filter(|model| has_snapshots(model) && is_warm(pools, model)) {
        let Ok(snapshot) = model.router.snapshot().await else { continue }; // the router is down
        if snapshot.ranks.is_empty() {
            continue; // engines that are down for a while may return
        }
        let name = model.settings.name.as_str();
        let Ok(bytes) = tokio::task::spawn_blocking(move || snapshot.encode()).await else { continue };
        let length = bytes.len();
        let result = match store.put(Arc::from(&*model.router.config().pool), bytes.into()).await {
            Ok(()) => {
                tracing::debug!(model = name, bytes = length, "index snapshot stored");
                "stored"
            }
            Err(error) => {
                tracing::warn!(model = name, %error, "index snapshot could not be stored");
                "failed"
            }
        };
        counter!(STORES.name, "model" => name.to_owned(), "result" => result).increment(1);
    }
}

/// Restores the stored snapshot of a model, if there is a usable one.
pub(super) async fn restore_stored(model: &Model, store: &dyn SnapshotStore) {
    match fetched(model, "store", store.get(Arc::from(&*model.router.config().pool))).await {
        Some(Some(bytes)) => drop(apply(model, bytes, "store", "store").await),
        Some(None) => {
            tracing::info!(model = model.settings.name, "no index snapshot is stored");
            count_restore(&model.settings.name, "store", "absent");
        }
        None => {}
    }
}
