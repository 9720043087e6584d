//! Direct transport: a TCP connection from each replica to each other one.
//!
//! A replica sends its messages over the connections that it dials, and receives those of others over the connections
//! that it accepts. The accepting side of a connection reports its state and sends snapshots on it, so the members are
//! the replicas at the ends of the dialled connections.

mod accept;
mod dial;
mod frame;
mod link;
mod outbox;
mod seal;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{self, AtomicBool, AtomicU32};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;
use pointsman::{ReplicaId, ReplicaLife, ReplicaMember, ReplicaTopic};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::bus::{Bus, Carrier, Hub, left};
use super::lives::Lives;
use super::tls::MutualTls;
use crate::settings::Secret;
pub(crate) use dial::Peers;
use frame::Frame;
pub(crate) use frame::{MESSAGE_BYTES_MAX, is_pool_name};
use link::LinkError;
pub(in crate::replicas) use outbox::Outbox;
use seal::DeploymentKey;

/// Maximum number of snapshots that are fetched from one replica at a time.
const FETCHES_MAX: usize = 8;

/// A running direct transport.
pub(super) type DirectBus = Bus<Shared>;

/// State of all connections.
pub(super) struct Shared {
    hub: Hub,
    key: Option<DeploymentKey>,
    tls: Option<MutualTls>,
    /// Ends of the dialled connections.
    peers: Mutex<BTreeMap<ReplicaId, (Lives, Arc<Peer>)>>,
    /// Lives at the other ends of accepted connections, connected while the count is not zero.
    senders: Mutex<BTreeMap<ReplicaId, (Lives, Weak<()>)>>,
}

impl Deref for Shared {
    type Target = Hub;

    fn deref(&self) -> &Hub {
        &self.hub
    }
}

/// The replica at the end of a dialled connection.
struct Peer {
    life: ReplicaLife,
    address: String,
    is_serving: AtomicBool,
    outbox: Outbox<Bytes>,
    fetches: Mutex<BTreeMap<u32, Fetching>>,
    next_fetch: AtomicU32,
}

/// A snapshot that is being received.
struct Fetching {
    bytes: Vec<u8>,
    /// Length of the snapshot, known since its first part.
    total: Option<u64>,
    done: oneshot::Sender<Result<Bytes, String>>,
}

impl DirectBus {
    /// Starts to accept and to dial.
    pub(super) fn start(
        listener: TcpListener,
        life: ReplicaLife,
        peers: Peers,
        key: Option<Secret>,
        tls: Option<MutualTls>,
    ) -> Self {
        let shared = Arc::new(Shared {
            hub: Hub::new(life),
            key: key.as_ref().map(DeploymentKey::new),
            tls,
            peers: Mutex::default(),
            senders: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept::accept(listener, Arc::clone(&shared)));
        tasks.spawn(dial::dial_all(peers, Arc::clone(&shared)));
        Self::new(shared, tasks)
    }
}

impl Carrier for Shared {
    const UNSENT: &'static str = "connections to other replicas closed with unsent messages";

    fn publish(&self, pool: &Arc<str>, topic: ReplicaTopic, payload: Bytes) {
        let meters = &self.meters;
        if payload.len() > MESSAGE_BYTES_MAX || !is_pool_name(pool) {
            meters.dropped.increment(1);
            tracing::debug!(%pool, topic = topic.name(), bytes = payload.len(), "message for replicas is too long");
            return;
        }
        let peers = self.peers.lock();
        if peers.is_empty() {
            return;
        }
        let message = Frame::Message { topic: Some(topic), pool: Arc::clone(pool), payload }.encode();
        let dropped = peers.values().map(|(_, peer)| peer.outbox.push(message.clone(), message.len())).sum::<u64>();
        meters.dropped.increment(dropped);
    }

    async fn fetch(&self, from: ReplicaId, pool: &Arc<str>) -> Result<Bytes, String> {
        let peer = self.peers.lock().get(&from).map(|(_, peer)| Arc::clone(peer)).ok_or("it is not connected")?;
        if !is_pool_name(pool) {
            return Err("the name of the pool is too long".to_owned());
        }
        let (done, snapshot) = oneshot::channel();
        let id = peer.next_fetch.fetch_add(1, atomic::Ordering::Relaxed);
        {
            let mut fetches = peer.fetches.lock();
            fetches.retain(|_, fetching| !fetching.done.is_closed());
            if fetches.len() >= FETCHES_MAX {
                return Err(format!("{FETCHES_MAX} snapshots are being fetched from it"));
            }
            fetches.insert(id, Fetching { bytes: Vec::new(), total: None, done });
        }
        peer.outbox.push_request(Frame::SnapshotRequest { id, pool: Arc::clone(pool) }.encode());
        // The connection holds the peer while it lives, and this future must not prolong its fetches.
        drop(peer);
        snapshot.await.map_err(|_| "the connection was closed".to_owned())?
    }
}

impl Shared {
    /// Registers the connection to a replica; `false` if its life has another connection.
    fn join(&self, peer: &Arc<Peer>) -> Result<bool, LinkError> {
        let mut peers = self.peers.lock();
        let ReplicaLife { replica, incarnation } = peer.life;
        let mut lives = peers.get(&replica).map_or_else(|| Lives::new(incarnation), |(lives, _)| lives.clone());
        match lives.order(incarnation) {
            Ordering::Less => return Err(LinkError::STALE),
            Ordering::Equal if peers.contains_key(&replica) => return Ok(false),
            Ordering::Equal => {}
            Ordering::Greater => lives.replace(incarnation),
        }
        peers.insert(replica, (lives, Arc::clone(peer)));
        self.publish_members(&peers);
        Ok(true)
    }

    /// Removes an ended connection.
    fn part(&self, peer: &Arc<Peer>) {
        let mut peers = self.peers.lock();
        if peers.get(&peer.life.replica).is_some_and(|(_, known)| Arc::ptr_eq(known, peer)) {
            peers.remove(&peer.life.replica);
            self.publish_members(&peers);
        }
    }

    fn set_peer_serving(&self, peer: &Peer, is_serving: bool) {
        let peers = self.peers.lock();
        if peer.is_serving.swap(is_serving, atomic::Ordering::Relaxed) != is_serving {
            self.publish_members(&peers);
        }
    }

    fn publish_members(&self, peers: &BTreeMap<ReplicaId, (Lives, Arc<Peer>)>) {
        let member = |(_, peer): &(Lives, Arc<Peer>)| ReplicaMember {
            life: peer.life,
            address: peer.address.clone(),
            is_serving: peer.is_serving.load(atomic::Ordering::Relaxed),
        };
        self.members.send_replace(peers.values().map(member).collect());
    }

    /// Logs the end of a connection, and counts it if the other side violated the protocol.
    fn report(&self, peer: &dyn fmt::Display, error: &LinkError) {
        match error {
            LinkError::Refused(reason, detail) => self.meters.refused(*reason, peer, detail),
            error => tracing::debug!(%peer, %error, "connection of replicas ended"),
        }
    }
}
