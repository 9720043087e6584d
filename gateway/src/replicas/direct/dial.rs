//! Dialling side: connects to every peer, sends messages, and receives states and snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use pointsman::Backoff;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Interval, MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::TlsConnector;

use super::frame::Frame;
use super::link::{
    FrameReader, FrameWriter, HANDSHAKE_TIMEOUT, HEARTBEAT, Link, LinkError, Stream, WRITE_BYTES, shake_hands,
};
use super::outbox::Outbox;
use super::seal::Side;
use super::{Fetching, Joined, Peer, Shared, left, lock};
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
    /// `HOST:PORT` each.
    List(Vec<String>),
    /// `NAME:PORT`; each address of the name is a replica.
    Dns(String),
    /// Each address of a Kubernetes Service is a replica with this port. The host is the name in certificates.
    #[cfg(feature = "kubernetes")]
    Service { addresses: Box<pointsman::ServiceAddresses>, port: u16, host: String },
}

/// A changing set of addresses, and the host in the certificates of all.
enum AddressSet {
    Dns {
        name: String,
        rounds: Interval,
    },
    #[cfg(feature = "kubernetes")]
    Service {
        addresses: Box<pointsman::ServiceAddresses>,
        port: u16,
        host: String,
    },
}

impl AddressSet {
    fn of_name(name: String) -> Self {
        let mut rounds = interval(RESOLVE_INTERVAL);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self::Dns { name, rounds }
    }

    fn host(&self) -> &str {
        match self {
            Self::Dns { name, .. } => host_of(name),
            #[cfg(feature = "kubernetes")]
            Self::Service { host, .. } => host,
        }
    }

    /// Begins an interrupted resolution again.
    fn resolve_again(&mut self) {
        match self {
            Self::Dns { rounds, .. } => rounds.reset_immediately(),
            #[cfg(feature = "kubernetes")]
            Self::Service { .. } => {}
        }
    }

    /// Waits for the next set; `None` after a failure, which keeps the last set.
    async fn next(&mut self) -> Option<BTreeSet<SocketAddr>> {
        match self {
            Self::Dns { name, rounds } => {
                rounds.tick().await;
                match timeout(CONNECT_TIMEOUT, lookup_host(&*name)).await {
                    Ok(Ok(addresses)) => Some(addresses.take(ADDRESSES_MAX).collect()),
                    Ok(Err(error)) => {
                        tracing::debug!(name, %error, "replicas.dns was not resolved");
                        None
                    }
                    Err(_) => None,
                }
            }
            #[cfg(feature = "kubernetes")]
            Self::Service { addresses, port, .. } => match addresses.next().await {
                Ok(found) => Some(found.into_iter().take(ADDRESSES_MAX).map(|ip| SocketAddr::new(ip, *port)).collect()),
                Err(error) => {
                    tracing::warn!(%error, "the addresses of replicas are not updated");
                    None
                }
            },
        }
    }
}

/// One address to dial.
#[derive(Clone)]
struct Target {
    /// `HOST:PORT`, resolved at each attempt.
    address: String,
    /// Host in the certificate of the peer.
    host: String,
}

/// Result of an attempt.
enum Attempt {
    /// Connected for some time.
    Ended(LinkError),
    /// Not connected.
    Failed(LinkError),
    /// The address leads to this replica, or to a life with another connection.
    Known,
}

/// Connects to all peers until this replica leaves.
pub(super) async fn dial_all(peers: Peers, shared: Arc<Shared>) {
    let mut tasks = JoinSet::new();
    match peers {
        Peers::List(addresses) => {
            let (_everywhere, wanted) = watch::channel(None);
            for address in addresses {
                let target = Target { host: host_of(&address).to_owned(), address };
                tasks.spawn(dial(target, wanted.clone(), Arc::clone(&shared)));
            }
            while tasks.join_next().await.is_some() {}
        }
        Peers::Dns(name) => dial_addresses(AddressSet::of_name(name), &mut tasks, &shared).await,
        #[cfg(feature = "kubernetes")]
        Peers::Service { addresses, port, host } => {
            dial_addresses(AddressSet::Service { addresses, port, host }, &mut tasks, &shared).await;
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// Follows a set of addresses. A failure keeps the last addresses.
async fn dial_addresses(mut set: AddressSet, tasks: &mut JoinSet<()>, shared: &Arc<Shared>) {
    let (set_wanted, wanted) = watch::channel(Some(BTreeSet::new()));
    let mut dialled: BTreeMap<SocketAddr, AbortHandle> = BTreeMap::new();
    let mut leaving = shared.is_leaving.subscribe();
    let mut addresses = BTreeSet::new();
    loop {
        tokio::select! {
            biased;
            () = left(&mut leaving) => return,
            // An address may be wanted again just as its task ends.
            Some(_) = tasks.join_next() => set.resolve_again(),
            found = set.next() => addresses = found.unwrap_or(addresses),
        }
        set_wanted.send_replace(Some(addresses.iter().map(SocketAddr::to_string).collect()));
        dialled.retain(|_, task| !task.is_finished());
        for address in &addresses {
            dialled.entry(*address).or_insert_with(|| {
                let target = Target { address: address.to_string(), host: set.host().to_owned() };
                tasks.spawn(dial(target, wanted.clone(), Arc::clone(shared)))
            });
        }
    }
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

/// Keeps a connection to one address while it is wanted. `None` wants every address.
async fn dial(target: Target, wanted: watch::Receiver<Option<BTreeSet<String>>>, shared: Arc<Shared>) {
    let mut leaving = shared.is_leaving.subscribe();
    let mut state = Shown { shared: &shared, state: None };
    let mut backoff = Backoff::new(shared.life.replica.0 ^ shared.life.incarnation);
    state.set(Some(PeerState::Connecting));
    let is_wanted = || wanted.borrow().as_ref().is_none_or(|addresses| addresses.contains(&target.address));
    while is_wanted() && !*leaving.borrow() {
        let pause = match attempt(&target, &mut state, &shared).await {
            Attempt::Known => {
                state.set(None);
                KNOWN_PAUSE
            }
            Attempt::Failed(error) => {
                state.set(Some(PeerState::Connecting));
                shared.report(&target, &error);
                backoff.next_delay()
            }
            Attempt::Ended(error) => {
                state.set(Some(PeerState::Connecting));
                shared.report(&target, &error);
                backoff.reset();
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

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Connects and serves the connection to its end.
async fn attempt(target: &Target, state: &mut Shown<'_>, shared: &Shared) -> Attempt {
    let mut leaving = shared.is_leaving.subscribe();
    let connected = tokio::select! {
        biased;
        () = left(&mut leaving) => return Attempt::Known,
        connected = connect(target, shared) => connected,
    };
    let Link { life, reader, writer } = match connected {
        Ok(link) => link,
        Err(error) => return Attempt::Failed(error),
    };
    if life == shared.life {
        return Attempt::Known;
    }
    if life.replica == shared.life.replica {
        shared.report_duplicate_id(target);
        return Attempt::Known;
    }
    let peer = Arc::new(Peer {
        life,
        address: target.address.clone(),
        is_serving: AtomicBool::new(false),
        outbox: Outbox::default(),
        fetches: Mutex::default(),
        next_fetch: AtomicU32::new(0),
    });
    serve(peer, reader, writer, state, shared).await
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

/// Registers and serves a connection to its end.
async fn serve(
    peer: Arc<Peer>,
    mut reader: FrameReader<'_>,
    mut writer: FrameWriter<'_>,
    state: &mut Shown<'_>,
    shared: &Shared,
) -> Attempt {
    // The first state shows that the other side has accepted this replica.
    match reader.next().await {
        Ok(Frame::Status { is_serving }) => peer.is_serving.store(is_serving, Ordering::Relaxed),
        Ok(_) => return Attempt::Failed(LinkError::MALFORMED),
        Err(error) => return Attempt::Failed(error),
    }
    match shared.join(&peer) {
        Joined::New => {}
        Joined::Duplicate => return Attempt::Known,
        Joined::Stale => {
            let detail = "a later life of the replica is connected";
            return Attempt::Failed(LinkError::Refused(RefusalReason::Stale, detail));
        }
    }
    let registered = Registered { peer: &peer, shared };
    tracing::info!(replica = %peer.life.replica, address = peer.address, "replica connected");
    let mut leaving = shared.is_leaving.subscribe();
    let error = tokio::select! {
        biased;
        error = receive(&peer, reader, state, shared) => error,
        error = send(&peer, &mut writer) => error,
        () = left(&mut leaving) => {
            flush_all(&peer, &mut writer).await;
            return Attempt::Known;
        }
    };
    drop(registered);
    tracing::info!(replica = %peer.life.replica, address = peer.address, reason = %error, "replica disconnected");
    Attempt::Ended(error)
}

/// The registration of a connection.
struct Registered<'a> {
    peer: &'a Arc<Peer>,
    shared: &'a Shared,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.shared.part(self.peer);
        lock(&self.peer.fetches).clear();
    }
}

async fn send(peer: &Peer, writer: &mut FrameWriter<'_>) -> LinkError {
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
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
        if let Err(error) = writer.flush().await {
            return error;
        }
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

async fn receive(peer: &Peer, mut reader: FrameReader<'_>, state: &mut Shown<'_>, shared: &Shared) -> LinkError {
    let shown = |is_serving| Some(if is_serving { PeerState::Serving } else { PeerState::Connected });
    state.set(shown(peer.is_serving.load(Ordering::Relaxed)));
    loop {
        match reader.next().await {
            Ok(Frame::Status { is_serving }) => {
                shared.set_peer_serving(peer, is_serving);
                state.set(shown(is_serving));
            }
            Ok(Frame::Chunk { id, remaining, bytes }) => {
                if let Err(error) = add_chunk(peer, id, remaining, &bytes) {
                    return error;
                }
            }
            Ok(Frame::NoSnapshot { id, refusal }) => {
                if let Some(fetching) = lock(&peer.fetches).remove(&id) {
                    let _ = fetching.done.send(Err(refusal.reason().to_owned()));
                }
            }
            Ok(Frame::Message { .. } | Frame::Alive | Frame::SnapshotRequest { .. }) => return LinkError::MALFORMED,
            Err(error) => return error,
        }
    }
}

/// Adds a part to its snapshot. Parts of abandoned snapshots are ignored.
fn add_chunk(peer: &Peer, id: u32, remaining: u64, bytes: &Bytes) -> Result<(), LinkError> {
    let mut fetches = lock(&peer.fetches);
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
