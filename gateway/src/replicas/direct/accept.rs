//! Accepting side: receives messages, reports the own state, and sends snapshots.

use std::sync::Arc;
use std::time::Duration;

use pointsman::{ReplicaLife, ReplicaMessage};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::frame::{CHUNK_BYTES, Frame};
use super::link::{
    FrameReader, FrameWriter, HANDSHAKE_TIMEOUT, HEARTBEAT, Link, LinkError, Stream, every, shake_hands,
};
use super::seal::Side;
use super::{FETCHES_MAX, Shared, left};
use crate::replicas::meters::RefusalReason;

/// Maximum number of accepted connections, in the handshake or after it.
const CONNECTIONS_MAX: usize = 256;

/// Pause after a failure to accept, such as a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Id and pool of a requested snapshot.
type Job = (u32, Arc<str>);

/// Serves other replicas until this one leaves.
pub(super) async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut leaving = shared.is_leaving.subscribe();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = left(&mut leaving) => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((_, address)) if connections.len() >= CONNECTIONS_MAX => {
                    shared.meters.refused(RefusalReason::Connections, &address, "256 connections are open");
                }
                Ok((stream, address)) => {
                    let shared = Arc::clone(&shared);
                    connections.spawn(async move {
                        if let Err(error) = serve(stream, &shared).await {
                            shared.report(&address, &error);
                        }
                    });
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

/// Serves a connection to its end.
async fn serve(stream: TcpStream, shared: &Shared) -> Result<(), LinkError> {
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
    let known = senders.get(&life.replica).and_then(|(newest, connected)| Some((*newest, connected.upgrade()?)));
    match known {
        Some((newest, _)) if newest > life.incarnation => Err(LinkError::STALE),
        Some((newest, connected)) if newest == life.incarnation => Ok(connected),
        _ => {
            let connected = Arc::new(());
            senders.insert(life.replica, (life.incarnation, Arc::downgrade(&connected)));
            Ok(connected)
        }
    }
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
