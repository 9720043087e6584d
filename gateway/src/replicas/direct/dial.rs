//! Dialling side: connects to every peer, sends messages, and receives states and snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use pointsman::Backoff;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Interval, sleep, timeout};
use tokio_rustls::TlsConnector;

use super::frame::Frame;
use super::link::{
    FrameReader, FrameWriter, HANDSHAKE_TIMEOUT, HEARTBEAT, Link, LinkError, Stream, WRITE_BYTES, every, shake_hands,
};
use super::outbox::Outbox;
use super::seal::Side;
use super::{Fetching, Peer, Shared, left};
use crate::replicas::bus::SNAPSHOT_BYTES_MAX;
use crate::replicas::meters::{PeerState, RefusalReason};
use crate::settings::host_of;

/// Interval of DNS resolution.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(5);

/// Time limit of one resolution, and of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause before an address of this replica, or another address of a connected one, is dialled again.
const KNOWN_PAUSE: Duration = Duration::from_secs(5);

/// Maximum number of addresses of a DNS name.
const ADDRESSES_MAX: usize = 256;

/// Addresses of the other replicas. The own address may be among them.
pub(crate) enum Peers {
    /// `HOST:PORT` each, resolved at each attempt. Empty once they are dialled.
    List(Vec<String>),
    /// `NAME:PORT`; each address of the name is a replica.
    Dns(String),
}

impl Peers {
    /// Host in the certificate of the peer at `address`.
    fn host<'a>(&'a self, address: &'a str) -> &'a str {
        match self {
            Self::List(_) => host_of(address),
            Self::Dns(name) => host_of(name),
        }
    }

    /// Waits for the next set of addresses; `None` after a failure, which keeps the last set.
    async fn next(&mut self, rounds: &mut Interval) -> Option<BTreeSet<String>> {
        match self {
            Self::List(addresses) if addresses.is_empty() => std::future::pending().await,
            Self::List(addresses) => Some(std::mem::take(addresses).into_iter().collect()),
            Self::Dns(name) => {
                rounds.tick().await;
                match timeout(CONNECT_TIMEOUT, lookup_host(&*name)).await {
                    Ok(Ok(addresses)) => {
                        Some(addresses.take(ADDRESSES_MAX).map(|address| address.to_string()).collect())
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(name, %error, "replicas.dns was not resolved");
                        None
                    }
                    Err(_) => None,
                }
            }
        }
    }
}

/// One address to dial.
struct Target {
    address: String,
    /// Host in the certificate of the peer.
    host: String,
}

/// Connects to all peers until this replica leaves. A failure keeps the last addresses.
pub(super) async fn dial_all(mut peers: Peers, shared: Arc<Shared>) {
    let mut tasks = JoinSet::new();
    let (set_wanted, wanted) = watch::channel(BTreeSet::new());
    let mut dialled: BTreeMap<String, AbortHandle> = BTreeMap::new();
    let mut leaving = shared.is_leaving.subscribe();
    let mut rounds = every(RESOLVE_INTERVAL);
    loop {
        tokio::select! {
            biased;
            () = left(&mut leaving) => break,
            // An address may be wanted again just as its task ends: an interrupted resolution begins again.
            Some(_) = tasks.join_next() => rounds.reset_immediately(),
            found = peers.next(&mut rounds) => if let Some(found) = found {
                set_wanted.send_replace(found);
            },
        }
        dialled.retain(|_, task| !task.is_finished());
        for address in &*wanted.borrow() {
            dialled.entry(address.clone()).or_insert_with(|| {
                let target = Target { address: address.clone(), host: peers.host(address).to_owned() };
                tasks.spawn(dial(target, wanted.clone(), Arc::clone(&shared)))
            });
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// State of one address in metrics.
struct Shown<'a> {
    shared: &'a Shared,
    state: Option<PeerState>,
}

impl Shown<'_> {
    fn set(&mut self, state: Option<PeerState>) {
        self.shared.meters.moved(std::mem::replace(&mut self.state, state), state);
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.set(None);
    }
}

/// Keeps a connection to one address while it is wanted.
async fn dial(target: Target, wanted: watch::Receiver<BTreeSet<String>>, shared: Arc<Shared>) {
    let mut leaving = shared.is_leaving.subscribe();
    let mut state = Shown { shared: &shared, state: None };
    let mut backoff = Backoff::new(shared.life.replica.0 ^ shared.life.incarnation);
    state.set(Some(PeerState::Connecting));
    while wanted.borrow().contains(&target.address) && !*leaving.borrow() {
        let pause = match attempt(&target, &mut state, &mut backoff, &shared).await {
            Ok(()) => {
                state.set(None);
                KNOWN_PAUSE
            }
            Err(error) => {
                state.set(Some(PeerState::Connecting));
                shared.report(&target.address, &error);
                backoff.next_delay()
            }
        };
        tokio::select! {
            biased;
            () = left(&mut leaving) => return,
            () = sleep(pause) => {}
        }
    }
}

/// Connects and serves the connection to its end. No error if this replica leaves, or if the address leads to this
/// replica or to a life with another connection.
async fn attempt(
    target: &Target,
    state: &mut Shown<'_>,
    backoff: &mut Backoff,
    shared: &Shared,
) -> Result<(), LinkError> {
    let mut leaving = shared.is_leaving.subscribe();
    let Link { life, mut reader, mut writer } = tokio::select! {
        biased;
        () = left(&mut leaving) => return Ok(()),
        connected = connect(target, shared) => connected?,
    };
    if life.replica == shared.life.replica {
        if life != shared.life {
            let detail = "another gateway has the same replicas.id, or it is an earlier life of this one";
            shared.meters.refused(RefusalReason::DuplicateId, &target.address, detail);
        }
        return Ok(());
    }
    // The first state shows that the other side has accepted this replica.
    let Frame::Status { is_serving } = reader.next().await? else { return Err(LinkError::MALFORMED) };
    let peer = Arc::new(Peer {
        life,
        address: target.address.clone(),
        is_serving: AtomicBool::new(is_serving),
        outbox: Outbox::default(),
        fetches: Mutex::default(),
        next_fetch: AtomicU32::new(0),
    });
    if !shared.join(&peer)? {
        return Ok(());
    }
    backoff.reset();
    let registered = Registered { peer: &peer, shared };
    tracing::info!(replica = %peer.life.replica, address = peer.address, "replica connected");
    let Err(error) = tokio::select! {
        biased;
        ended = receive(&peer, reader, state, shared) => ended,
        ended = send(&peer, &mut writer) => ended,
        () = left(&mut leaving) => {
            flush_all(&peer, &mut writer).await;
            return Ok(());
        }
    };
    drop(registered);
    tracing::info!(replica = %peer.life.replica, address = peer.address, reason = %error, "replica disconnected");
    Err(error)
}

async fn connect<'a>(target: &Target, shared: &'a Shared) -> Result<Link<'a>, LinkError> {
    let timed_out = || LinkError::Closed(std::io::ErrorKind::TimedOut.into());
    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(&target.address)).await.map_err(|_| timed_out())??;
    // Messages are small and urgent; a failure is not fatal.
    let _ = stream.set_nodelay(true);
    let stream: Box<dyn Stream> = match &shared.tls {
        Some(tls) => {
            let refused = |detail| LinkError::Refused(RefusalReason::Tls, detail);
            let name = ServerName::try_from(target.host.clone()).map_err(|_| refused("no name for a certificate"))?;
            let connector = TlsConnector::from(Arc::clone(&tls.client));
            let stream = timeout(HANDSHAKE_TIMEOUT, connector.connect(name, stream)).await.map_err(|_| timed_out())?;
            Box::new(stream.map_err(|_| refused("TLS handshake failed"))?)
        }
        None => Box::new(stream),
    };
    shake_hands(stream, Side::Dialling, shared.life, shared.key.as_ref(), &shared.meters).await
}

/// The registration of a connection.
struct Registered<'a> {
    peer: &'a Arc<Peer>,
    shared: &'a Shared,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.shared.part(self.peer);
        self.peer.fetches.lock().clear();
    }
}

async fn send(peer: &Peer, writer: &mut FrameWriter<'_>) -> Result<Infallible, LinkError> {
    let mut heartbeat = every(HEARTBEAT);
    loop {
        let body = tokio::select! {
            biased;
            _ = heartbeat.tick() => Frame::Alive.encode(),
            body = peer.outbox.next() => body,
        };
        let mut length = writer.add(&body);
        while length < WRITE_BYTES
            && let Some(body) = peer.outbox.try_next()
        {
            length = writer.add(&body);
        }
        writer.flush().await?;
    }
}

/// Sends everything in the queue, then closes the connection. Behind a partly written frame nothing can be sent.
async fn flush_all(peer: &Peer, writer: &mut FrameWriter<'_>) {
    if !writer.is_usable() {
        return;
    }
    while let Some(body) = peer.outbox.try_next() {
        writer.add(&body);
    }
    if writer.flush().await.is_ok() {
        writer.shut_down().await;
    }
}

async fn receive(
    peer: &Peer,
    mut reader: FrameReader<'_>,
    state: &mut Shown<'_>,
    shared: &Shared,
) -> Result<Infallible, LinkError> {
    let shown = |is_serving| Some(if is_serving { PeerState::Serving } else { PeerState::Connected });
    state.set(shown(peer.is_serving.load(Ordering::Relaxed)));
    loop {
        match reader.next().await? {
            Frame::Status { is_serving } => {
                shared.set_peer_serving(peer, is_serving);
                state.set(shown(is_serving));
            }
            Frame::Chunk { id, remaining, bytes } => add_chunk(peer, id, remaining, &bytes)?,
            Frame::NoSnapshot { id, refusal } => {
                if let Some(fetching) = peer.fetches.lock().remove(&id) {
                    let _ = fetching.done.send(Err(refusal.to_owned()));
                }
            }
            Frame::Message { .. } | Frame::Alive | Frame::SnapshotRequest { .. } => return Err(LinkError::MALFORMED),
        }
    }
}

/// Adds a part to its snapshot. Parts of abandoned snapshots are ignored.
fn add_chunk(peer: &Peer, id: u32, remaining: u64, bytes: &Bytes) -> Result<(), LinkError> {
    let mut fetches = peer.fetches.lock();
    let Some(fetching) = fetches.get_mut(&id) else { return Ok(()) };
    let received = (fetching.bytes.len() + bytes.len()) as u64;
    let total = received.saturating_add(remaining);
    if total > SNAPSHOT_BYTES_MAX {
        return Err(LinkError::Refused(RefusalReason::Oversized, "snapshot above the maximum length"));
    }
    if fetching.total.is_some_and(|expected| expected != total) || (bytes.is_empty() && remaining > 0) {
        return Err(LinkError::Refused(RefusalReason::Malformed, "parts of a snapshot do not fit together"));
    }
    fetching.total = Some(total);
    fetching.bytes.extend_from_slice(bytes);
    if remaining == 0
        && let Some(Fetching { bytes, done, .. }) = fetches.remove(&id)
    {
        let _ = done.send(Ok(Bytes::from(bytes)));
    }
    Ok(())
}
