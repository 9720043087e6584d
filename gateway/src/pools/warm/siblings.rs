//! Snapshots from and for other replicas.
//!
//! A joining replica fetches from one that serves. If none serves within [`SIBLING_WAIT`], all are as new as this one,
//! or there is none, and it starts with the stored snapshot, its file or without contents: waiting longer could block all
//! replicas of a new deployment.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pointsman::{BoxFuture, ReplicaBus, ReplicaMember, SnapshotSource};
use tokio::time::{sleep, timeout};

use super::contents::{apply, fetched, has_snapshots, is_warm};
use super::count_restore;
use super::store::restore_stored;
use crate::pools::latest::Latest;
use crate::pools::model::Model;
use crate::pools::readiness;
use crate::pools::serving::Pools;

/// Longest wait for a serving replica.
const SIBLING_WAIT: Duration = Duration::from_secs(3);

/// Interval of the checks whether this replica is ready, which visit all ranks.
const READY_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The same while it serves.
const SERVING_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Serves snapshots, restores those of a serving replica, and reports readiness, until the gateway drains.
pub(crate) async fn join(latest: Latest<Pools>, bus: Arc<dyn ReplicaBus>) {
    bus.serve_snapshots(Arc::new(ModelSnapshots { latest: latest.clone(), running: tokio::sync::Mutex::new(()) }));
    restore_all(&latest.get(), &*bus).await;
    let mut is_serving = false;
    loop {
        let pools = latest.get();
        let is_draining = pools.readiness.is_draining();
        let is_ready = !is_draining && readiness::is_ready(&pools).await;
        if is_ready != is_serving {
            bus.set_serving(is_ready);
            is_serving = is_ready;
        }
        if is_draining {
            return;
        }
        drop(pools);
        sleep(if is_serving { SERVING_CHECK_INTERVAL } else { READY_CHECK_INTERVAL }).await;
    }
}

async fn restore_all(pools: &Pools, bus: &dyn ReplicaBus) {
    let models: Vec<_> = pools.models.all().iter().filter(|model| has_snapshots(model)).collect();
    let waiting = format!("a serving replica is awaited for up to {} s", SIBLING_WAIT.as_secs());
    models.iter().for_each(|model| model.warm_start.set_fetching(Some(waiting.clone())));
    let mut serving = serving_members(bus).await;
    if serving.is_empty() {
        tracing::info!("no replica serves: no index snapshot is fetched from one");
    }
    // The longest life has the most complete index.
    serving.sort_by_key(|member| member.life.incarnation);
    for model in models {
        let is_restored = restore(model, &serving, bus).await;
        if !is_restored && serving.is_empty() {
            count_restore(&model.settings.name, "replica", "absent");
        }
        if !is_restored && let Some(store) = bus.store() {
            model.warm_start.set_fetching(Some("the stored snapshot is being read".to_owned()));
            restore_stored(model, store).await;
        }
        model.warm_start.set_fetching(None);
    }
}

/// The serving members, once there are any; none after [`SIBLING_WAIT`].
async fn serving_members(bus: &dyn ReplicaBus) -> Vec<ReplicaMember> {
    let mut members = bus.members();
    let wait = members.wait_for(|members| members.iter().any(|member| member.is_serving));
    match timeout(SIBLING_WAIT, wait).await {
        Ok(Ok(members)) => members.iter().filter(|member| member.is_serving).cloned().collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// Restores the snapshot of the first member that provides a usable one.
async fn restore(model: &Model, serving: &[ReplicaMember], bus: &dyn ReplicaBus) -> bool {
    let pool = Arc::<str>::from(&*model.router.config().pool);
    for member in serving {
        let from = member.life.replica;
        model.warm_start.set_fetching(Some(format!("a snapshot is being fetched from replica {from}")));
        if let Some(bytes) = fetched(model, "replica", bus.fetch(from, Arc::clone(&pool))).await
            && apply(model, bytes, "replica", &from.to_string()).await
        {
            return true;
        }
    }
    false
}

/// Snapshots of the models for other replicas, one at a time.
struct ModelSnapshots {
    latest: Latest<Pools>,
    running: tokio::sync::Mutex<()>,
}

impl SnapshotSource for ModelSnapshots {
    fn snapshot(&self, pool: &str) -> BoxFuture<'_, Option<Bytes>> {
        let pools = self.latest.get();
        let model = pools.models.all().iter().find(|model| model.router.config().pool == pool).map(Arc::clone);
        Box::pin(async move {
            let model = model.filter(|model| is_warm(&pools, model))?;
            let _running = self.running.lock().await;
            let snapshot = model.router.snapshot().await.ok()?;
            let encoded = tokio::task::spawn_blocking(move || snapshot.encode()).await;
            encoded.ok().map(Bytes::from)
        })
    }
}
