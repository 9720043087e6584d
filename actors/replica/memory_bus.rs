//! Bus between replicas within one process, for tests and simulations.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{broadcast, watch};

use super::bus::{BusError, ReplicaBus, ReplicaMember, ReplicaMessage, SnapshotSource, SnapshotStore};
use crate::actors::io::BoxFuture;
use crate::replica::{ReplicaId, ReplicaLife, ReplicaTopic};

/// Messages that a subscriber may be behind.
const CAPACITY: usize = 1_024;

/// Maximum length of a message, as in other transports. Longer ones are lost.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Network of replicas within one process.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use pointsman::{ReplicaId, ReplicaLife, ReplicaTopic};
/// use pointsman::{ReplicaBus, test_support::MemoryNetwork};
///
/// let network = MemoryNetwork::default();
/// let join = |id| network.join(ReplicaLife { replica: ReplicaId(id), incarnation: 1 });
/// let (one, two) = (join(1), join(2));
/// let mut messages = two.subscribe();
/// one.publish(&"pool".into(), ReplicaTopic::Load, "summary".into());
/// assert_eq!(messages.recv().await.map(|message| message.payload), Ok("summary".into()));
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct MemoryNetwork {
    delay: Duration,
    state: Arc<Mutex<Network>>,
}

#[derive(Debug, Default)]
struct Network {
    nodes: BTreeMap<ReplicaId, Node>,
    /// By pool.
    stored: BTreeMap<Arc<str>, Bytes>,
}

struct Node {
    life: ReplicaLife,
    messages: broadcast::Sender<ReplicaMessage>,
    members: watch::Sender<Arc<[ReplicaMember]>>,
    snapshots: Option<Arc<dyn SnapshotSource>>,
    is_serving: bool,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("life", &self.life).field("is_serving", &self.is_serving).finish_non_exhaustive()
    }
}

/// Membership of one replica in a [`MemoryNetwork`], which ends with its drop.
#[derive(Debug)]
pub struct MemoryBus {
    life: ReplicaLife,
    network: MemoryNetwork,
}

impl MemoryNetwork {
    /// A network without replicas whose messages take this time.
    #[must_use]
    pub fn with_delay(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }

    /// Adds a replica. A replica of the same id leaves.
    #[must_use]
    pub fn join(&self, life: ReplicaLife) -> Arc<MemoryBus> {
        let (messages, members) = (broadcast::Sender::new(CAPACITY), watch::Sender::new(Arc::from([])));
        let node = Node { life, messages, members, snapshots: None, is_serving: false };
        let mut network = self.lock();
        network.nodes.insert(life.replica, node);
        network.publish_members();
        Arc::new(MemoryBus { life, network: self.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Network> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Network {
    fn publish_members(&self) {
        for node in self.nodes.values() {
            let others = self.nodes.values().filter(|other| other.life.replica != node.life.replica);
            let members = others.map(|other| ReplicaMember {
                life: other.life,
                address: format!("memory:{}", other.life.replica),
                is_serving: other.is_serving,
            });
            node.members.send_replace(members.collect());
        }
    }
}

impl MemoryBus {
    fn with_node<T>(&self, read: impl FnOnce(&mut Node) -> T) -> Option<T> {
        self.network.lock().nodes.get_mut(&self.life.replica).filter(|node| node.life == self.life).map(read)
    }
}

impl Drop for MemoryBus {
    fn drop(&mut self) {
        let mut network = self.network.lock();
        if network.nodes.get(&self.life.replica).is_some_and(|node| node.life == self.life) {
            network.nodes.remove(&self.life.replica);
            network.publish_members();
        }
    }
}

impl ReplicaBus for MemoryBus {
    fn life(&self) -> ReplicaLife {
        self.life
    }

    fn publish(&self, pool: &Arc<str>, topic: ReplicaTopic, payload: Bytes) {
        if payload.len() > MESSAGE_BYTES_MAX {
            return;
        }
        let message = ReplicaMessage { from: self.life, pool: Arc::clone(pool), topic, payload };
        let (network, delay) = (self.network.lock(), self.network.delay);
        let others = network.nodes.values().filter(|node| node.life.replica != self.life.replica);
        for messages in others.map(|node| node.messages.clone()) {
            let message = message.clone();
            if delay.is_zero() {
                let _ = messages.send(message); // without a subscriber it is lost
            } else {
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    let _ = messages.send(message);
                });
            }
        }
    }

    fn subscribe(&self) -> broadcast::Receiver<ReplicaMessage> {
        let subscribed = self.with_node(|node| node.messages.subscribe());
        subscribed.unwrap_or_else(|| broadcast::Sender::new(1).subscribe())
    }

    fn members(&self) -> watch::Receiver<Arc<[ReplicaMember]>> {
        let subscribed = self.with_node(|node| node.members.subscribe());
        subscribed.unwrap_or_else(|| watch::Sender::new(Arc::from([])).subscribe())
    }

    fn fetch(&self, from: ReplicaId, pool: Arc<str>) -> BoxFuture<'_, Result<Bytes, BusError>> {
        Box::pin(async move {
            let failed = |reason: &str| BusError::Fetch { from, pool: pool.to_string(), reason: reason.to_owned() };
            let source = {
                let network = self.network.lock();
                let node = network.nodes.get(&from).ok_or_else(|| failed("the replica is not reachable"))?;
                node.snapshots.clone()
            };
            let source = source.ok_or_else(|| failed("the replica serves no snapshots"))?;
            source.snapshot(&pool).await.ok_or_else(|| failed("the replica has no snapshot of the pool"))
        })
    }

    fn serve_snapshots(&self, source: Arc<dyn SnapshotSource>) {
        self.with_node(|node| node.snapshots = Some(source));
    }

    fn set_serving(&self, is_serving: bool) {
        let mut network = self.network.lock();
        if let Some(node) = network.nodes.get_mut(&self.life.replica).filter(|node| node.life == self.life) {
            node.is_serving = is_serving;
            network.publish_members();
        }
    }

    fn store(&self) -> Option<&dyn SnapshotStore> {
        Some(self)
    }
}

impl SnapshotStore for MemoryBus {
    fn put(&self, pool: Arc<str>, snapshot: Bytes) -> BoxFuture<'_, Result<(), BusError>> {
        self.network.lock().stored.insert(pool, snapshot);
        Box::pin(async { Ok(()) })
    }

    fn get(&self, pool: Arc<str>) -> BoxFuture<'_, Result<Option<Bytes>, BusError>> {
        let stored = self.network.lock().stored.get(&pool).cloned();
        Box::pin(async { Ok(stored) })
    }
}
