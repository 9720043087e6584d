//! The bus of a transport, without the way of its messages.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use pointsman::{
    BoxFuture, BusError, ReplicaBus, ReplicaId, ReplicaLife, ReplicaMember, ReplicaMessage, ReplicaTopic,
    SnapshotSource, SnapshotStore,
};
use tokio::sync::{Semaphore, SemaphorePermit, broadcast, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::meters::ReplicaMeters;

/// Time limit of a fetched snapshot.
pub(super) const FETCH_TIMEOUT: Duration = Duration::from_secs(120);

/// Time limit for sending queued messages at the end.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum length of a snapshot, in bytes.
pub(super) const SNAPSHOT_BYTES_MAX: u64 = 1 << 30;

/// Messages kept for each subscriber of a bus.
const MESSAGES_KEPT: usize = 4096;

/// Snapshots sent to other replicas at a time.
const SNAPSHOTS_AT_ONCE: usize = 2;

/// Reasons for which a replica sends no snapshot, by their code in frames.
pub(super) const REFUSALS: [&str; 2] = ["it has no warm index of this pool", "the snapshot is longer than 1 GiB"];

/// State of every transport.
pub(super) struct Hub {
    pub(super) life: ReplicaLife,
    pub(super) meters: ReplicaMeters,
    pub(super) incoming: broadcast::Sender<ReplicaMessage>,
    pub(super) members: watch::Sender<Arc<[ReplicaMember]>>,
    pub(super) is_serving: watch::Sender<bool>,
    pub(super) is_leaving: watch::Sender<bool>,
    source: RwLock<Option<Arc<dyn SnapshotSource>>>,
    snapshots: Semaphore,
}

impl Hub {
    pub(super) fn new(life: ReplicaLife) -> Self {
        Self {
            life,
            meters: ReplicaMeters::new(),
            incoming: broadcast::Sender::new(MESSAGES_KEPT),
            members: watch::Sender::new(Arc::from([])),
            is_serving: watch::Sender::new(false),
            is_leaving: watch::Sender::new(false),
            source: RwLock::default(),
            snapshots: Semaphore::new(SNAPSHOTS_AT_ONCE),
        }
    }

    /// The snapshot of a pool for another replica, with the permit to send it.
    pub(super) async fn snapshot(&self, pool: &str) -> Result<(Option<SemaphorePermit<'_>>, Bytes), &'static str> {
        let [absent, too_long] = REFUSALS;
        let permit = self.snapshots.acquire().await.ok();
        let source = self.source.read().clone();
        let snapshot = source.ok_or(absent)?.snapshot(pool).await.ok_or(absent)?;
        if snapshot.len() as u64 > SNAPSHOT_BYTES_MAX { Err(too_long) } else { Ok((permit, snapshot)) }
    }
}

/// The way of messages and snapshots.
pub(super) trait Carrier: Deref<Target = Hub> + Send + Sync + 'static {
    /// Warning about unsent messages at the end.
    const UNSENT: &'static str;

    fn publish(&self, pool: &Arc<str>, topic: ReplicaTopic, payload: Bytes);

    fn fetch(&self, from: ReplicaId, pool: &Arc<str>) -> impl Future<Output = Result<Bytes, String>> + Send;

    fn store(&self) -> Option<&dyn SnapshotStore> {
        None
    }
}

/// A running transport. Dropping it closes its connections.
pub(super) struct Bus<T> {
    pub(super) shared: Arc<T>,
    tasks: Mutex<JoinSet<()>>,
}

impl<T: Carrier> Bus<T> {
    pub(super) fn new(shared: Arc<T>, tasks: JoinSet<()>) -> Self {
        Self { shared, tasks: Mutex::new(tasks) }
    }
}

impl<T: Carrier> fmt::Debug for Bus<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bus").field("life", &self.shared.life).finish_non_exhaustive()
    }
}

/// A bus that can be left.
pub(super) trait Transport: ReplicaBus {
    /// Sends queued messages for at most one second, then leaves the other replicas.
    fn leave(&self) -> BoxFuture<'_, ()>;
}

impl<T: Carrier> Transport for Bus<T> {
    fn leave(&self) -> BoxFuture<'_, ()> {
        self.shared.is_leaving.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        Box::pin(async move {
            let all_ended = async { while tasks.join_next().await.is_some() {} };
            if timeout(LEAVE_TIMEOUT, all_ended).await.is_err() {
                tracing::warn!("{}", T::UNSENT);
            }
            self.shared.members.send_replace(Arc::from([]));
        })
    }
}

impl<T: Carrier> ReplicaBus for Bus<T> {
    fn life(&self) -> ReplicaLife {
        self.shared.life
    }

    fn publish(&self, pool: &Arc<str>, topic: ReplicaTopic, payload: Bytes) {
        self.shared.publish(pool, topic, payload);
    }

    fn subscribe(&self) -> broadcast::Receiver<ReplicaMessage> {
        self.shared.incoming.subscribe()
    }

    fn members(&self) -> watch::Receiver<Arc<[ReplicaMember]>> {
        self.shared.members.subscribe()
    }

    fn fetch(&self, from: ReplicaId, pool: Arc<str>) -> BoxFuture<'_, Result<Bytes, BusError>> {
        Box::pin(async move {
            let fetched = match timeout(FETCH_TIMEOUT, self.shared.fetch(from, &pool)).await {
                Ok(fetched) => fetched,
                Err(_) => Err(format!("no complete snapshot within {} s", FETCH_TIMEOUT.as_secs())),
            };
            fetched.map_err(|reason| BusError::Fetch { from, pool: pool.to_string(), reason })
        })
    }

    fn serve_snapshots(&self, source: Arc<dyn SnapshotSource>) {
        *self.shared.source.write() = Some(source);
    }

    fn set_serving(&self, is_serving: bool) {
        self.shared.is_serving.send_if_modified(|known| std::mem::replace(known, is_serving) != is_serving);
    }

    fn store(&self) -> Option<&dyn SnapshotStore> {
        self.shared.store()
    }
}

/// Resolves when this replica leaves.
pub(super) async fn left(is_leaving: &mut watch::Receiver<bool>) {
    let _ = is_leaving.wait_for(|is_leaving| *is_leaving).await;
}
