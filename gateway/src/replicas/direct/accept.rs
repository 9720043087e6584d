//! Accepting side: receives messages, reports the own state, and sends snapshots.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pointsman::{ReplicaLife, ReplicaMessage};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::frame::{CHUNK_BYTES, Frame};
use super::link::{
    FrameReader, FrameWriter, HANDSHAKE_TIMEOUT, HEARTBEAT, Link, LinkError, Stream, every, shake_hands,
};
use super::seal::Side;
use super::{FETCHES_MAX, Shared, left};
use crate::replicas::lives::Lives;
use crate::replicas::meters::RefusalReason;

/// Maximum number of accepted connections after their handshakes.
const CONNECTIONS_MAX: usize = 256;

/// Maximum number of handshakes. A further one ends the oldest of the address with the most.
const HANDSHAKES_MAX: usize = 64;

/// Pause after a failure to accept, such as a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Id and pool of a requested snapshot.
type Job = (u32, Arc<str>);

/// Serves other replicas until this one leaves.
pub(super) async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut leaving = shared.is_leaving.subscribe();
    let (mut connections, mut handshakes) = (JoinSet::new(), Handshakes::default());
    let links = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        tokio::select! {
            biased;
            () = left(&mut leaving) => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    if let Some(ended) = handshakes.make_room() {
                        shared.meters.refused(RefusalReason::Connections, &ended, "64 handshakes are open");
                    }
                    let (shared, links) = (Arc::clone(&shared), Arc::clone(&links));
                    let (shaking, is_done) = oneshot::channel();
                    let task = connections.spawn(async move {
                        if let Err(error) = serve(stream, &shared, &links, shaking).await {
                            shared.report(&address, &error);
                        }
                    });
                    handshakes.0.push_back(Handshake { address: address.ip(), task, is_done });
                }
                Err(error) => {
                    tracing::debug!(%error, "no connection of a replica accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
    // The dialling sides see closed connections.
    connections.shutdown().await;
}

/// A connection in its handshake.
struct Handshake {
    address: IpAddr,
    task: AbortHandle,
    /// Closed when the handshake is done.
    is_done: oneshot::Receiver<()>,
}

/// Handshakes, oldest first. Each needs no key, so their number is limited apart from that of connections.
#[derive(Default)]
struct Handshakes(VecDeque<Handshake>);

impl Handshakes {
    /// Makes room for one more. Returns the address whose oldest handshake was ended for it.
    fn make_room(&mut self) -> Option<IpAddr> {
        self.0.retain_mut(|known| known.is_done.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        if self.0.len() < HANDSHAKES_MAX {
            return None;
        }
        let count = |address: IpAddr| self.0.iter().filter(|known| known.address == address).count();
        let (at, _) = self.0.iter().enumerate().rev().max_by_key(|(_, known)| count(known.address))?;
        let ended = self.0.remove(at)?;
        ended.task.abort();
        Some(ended.address)
    }
}

/// Serves a connection to its end. Drops `shaking` after the handshake.
async fn serve(
    stream: TcpStream,
    shared: &Shared,
    links: &Semaphore,
    shaking: oneshot::Sender<()>,
) -> Result<(), LinkError> {
    // Messages are small and urgent; a failure is not fatal.
    let _ = stream.set_nodelay(true);
    let stream: Box<dyn Stream> = match &shared.tls {
        Some(tls) => {
            let acceptor = TlsAcceptor::from(Arc::clone(&tls.server));
            match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => Box::new(stream),
                Ok(Err(_)) => return Err(LinkError::Refused(RefusalReason::Tls, "TLS handshake failed")),
                Err(_) => return Err(LinkError::Refused(RefusalReason::Timeout, "no TLS handshake within 5 s")),
            }
        }
        None => Box::new(stream),
    };
    let Link { life, reader, writer } =
        shake_hands(stream, Side::Accepting, shared.life, shared.key.as_ref(), &shared.meters).await?;
    drop(shaking);
    let Ok(_link) = links.try_acquire() else {
        return Err(LinkError::Refused(RefusalReason::Connections, "256 connections are open"));
    };
    if life.replica == shared.life.replica {
        // The dialling side reports it.
        return Ok(());
    }
    let _admission = admit(shared, life)?;
    let (jobs, requested) = mpsc::channel(FETCHES_MAX);
    tokio::select! {
        biased;
        ended = receive(reader, life, jobs, shared) => ended,
        ended = send(writer, requested, shared) => ended,
    }
}

/// Refuses earlier lives of connected replicas. A life is connected while one of its admissions is held.
fn admit(shared: &Shared, life: ReplicaLife) -> Result<Arc<()>, LinkError> {
    let mut senders = shared.senders.lock();
    senders.retain(|_, (_, connected)| connected.strong_count() > 0);
    let (lives, known) = senders.entry(life.replica).or_insert_with(|| (Lives::new(life.incarnation), Weak::new()));
    match lives.order(life.incarnation) {
        Ordering::Less => return Err(LinkError::STALE),
        Ordering::Equal => {}
        Ordering::Greater => {
            lives.replace(life.incarnation);
            *known = Weak::new();
        }
    }
    let connected = known.upgrade().unwrap_or_default();
    *known = Arc::downgrade(&connected);
    Ok(connected)
}

async fn receive(
    mut reader: FrameReader<'_>,
    from: ReplicaLife,
    jobs: mpsc::Sender<Job>,
    shared: &Shared,
) -> Result<(), LinkError> {
    loop {
        match reader.next().await? {
            Frame::Message { topic: Some(topic), pool, payload } => {
                // Without a subscriber the message is lost, as for a slow one.
                let _ = shared.incoming.send(ReplicaMessage { from, pool, topic, payload });
            }
            Frame::Message { topic: None, .. } | Frame::Alive => {}
            Frame::SnapshotRequest { id, pool } => {
                let is_within_limit = jobs.try_send((id, pool)).is_ok();
                if !is_within_limit {
                    return Err(LinkError::Refused(RefusalReason::Malformed, "too many snapshots requested"));
                }
            }
            Frame::Status { .. } | Frame::Chunk { .. } | Frame::NoSnapshot { .. } => return Err(LinkError::MALFORMED),
        }
    }
}

async fn send(mut writer: FrameWriter<'_>, mut jobs: mpsc::Receiver<Job>, shared: &Shared) -> Result<(), LinkError> {
    let mut serving = shared.is_serving.subscribe();
    let mut heartbeat = every(HEARTBEAT);
    loop {
        let job = tokio::select! {
            biased;
            _ = serving.changed() => None,
            _ = heartbeat.tick() => None,
            Some(job) = jobs.recv() => Some(job),
        };
        let Some((id, pool)) = job else {
            report_status(&mut writer, &mut serving).await?;
            continue;
        };
        let snapshot = async { shared.snapshot(&pool).await.map(|(_, bytes)| bytes) };
        tokio::pin!(snapshot);
        let snapshot = loop {
            tokio::select! {
                biased;
                snapshot = snapshot.as_mut() => break snapshot,
                _ = heartbeat.tick() => report_status(&mut writer, &mut serving).await?,
            }
        };
        match snapshot {
            Ok(mut bytes) => loop {
                let chunk = bytes.split_to(CHUNK_BYTES.min(bytes.len()));
                let remaining = bytes.len() as u64;
                writer.send(&Frame::Chunk { id, remaining, bytes: chunk }.encode()).await?;
                if remaining == 0 {
                    break;
                }
            },
            Err(refusal) => writer.send(&Frame::NoSnapshot { id, refusal }.encode()).await?,
        }
    }
}

async fn report_status(writer: &mut FrameWriter<'_>, serving: &mut watch::Receiver<bool>) -> Result<(), LinkError> {
    let is_serving = *serving.borrow_and_update();
    writer.send(&Frame::Status { is_serving }.encode()).await
}
