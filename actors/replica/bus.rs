//! Bus between the replicas of a router: the interface of transports.
//!
//! A transport delivers small messages to all other replicas, lists them, and fetches snapshots from them. Messages may
//! be lost, repeated, delayed and reordered: every message describes state, and a later one replaces it. One bus serves
//! all pools of a process. A transport authenticates replicas and rejects messages of others.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{broadcast, watch};

use crate::actors::io::BoxFuture;
use crate::replica::{ReplicaId, ReplicaLife, ReplicaTopic};

/// A message from another replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMessage {
    /// The sender, as authenticated by the transport.
    pub from: ReplicaLife,
    /// Pool that it concerns: the name of a model.
    pub pool: Arc<str>,
    /// Content.
    pub topic: ReplicaTopic,
    /// Encoded content.
    pub payload: Bytes,
}

/// Another replica, as known to the transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMember {
    /// Its present life.
    pub life: ReplicaLife,
    /// Address in logs and metrics.
    pub address: String,
    /// Whether it reported that its index is warm, so that snapshots may be fetched from it.
    pub is_serving: bool,
}

/// Failure of a bus or its store to provide or to keep a snapshot. The message names the pool and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// The snapshot could not be fetched from another replica.
    #[error("cannot fetch a snapshot of pool {pool:?} from replica {from}: {reason}")]
    Fetch {
        /// The queried replica.
        from: ReplicaId,
        /// The requested pool.
        pool: String,
        /// Reason.
        reason: String,
    },
    /// The store of snapshots could not be used.
    #[error("cannot use the stored snapshot of pool {pool:?}: {reason}")]
    Store {
        /// The pool.
        pool: String,
        /// Reason.
        reason: String,
    },
}

/// Source of the snapshots that other replicas fetch.
pub trait SnapshotSource: Send + Sync {
    /// The encoded snapshot of a pool; `None` if the pool is unknown or not warm.
    fn snapshot(&self, pool: &str) -> BoxFuture<'_, Option<Bytes>>;
}

/// Store of snapshots that outlasts the replicas: for replicas that start while no other one serves. It keeps the latest
/// snapshot of each pool for a limited time.
pub trait SnapshotStore: Send + Sync {
    /// Replaces the snapshot of a pool.
    fn put(&self, pool: Arc<str>, snapshot: Bytes) -> BoxFuture<'_, Result<(), BusError>>;

    /// The snapshot of a pool, if there is one.
    fn get(&self, pool: Arc<str>) -> BoxFuture<'_, Result<Option<Bytes>, BusError>>;
}

/// Transport between replicas. See the module documentation.
pub trait ReplicaBus: Send + Sync + fmt::Debug {
    /// The own life.
    fn life(&self) -> ReplicaLife;

    /// Sends a message to all other replicas. Returns immediately; without a connection the message is lost.
    fn publish(&self, pool: &Arc<str>, topic: ReplicaTopic, payload: Bytes);

    /// Messages of the other replicas from now on, without own ones. A slow receiver loses the oldest messages.
    fn subscribe(&self) -> broadcast::Receiver<ReplicaMessage>;

    /// The other replicas.
    fn members(&self) -> watch::Receiver<Arc<[ReplicaMember]>>;

    /// Fetches the snapshot of a pool from another replica.
    fn fetch(&self, from: ReplicaId, pool: Arc<str>) -> BoxFuture<'_, Result<Bytes, BusError>>;

    /// Sets the source of snapshots for other replicas.
    fn serve_snapshots(&self, source: Arc<dyn SnapshotSource>);

    /// Reports to the other replicas whether the index of this one is warm.
    fn set_serving(&self, is_serving: bool);

    /// The store of snapshots, if the transport has one.
    fn store(&self) -> Option<&dyn SnapshotStore> {
        None
    }
}
