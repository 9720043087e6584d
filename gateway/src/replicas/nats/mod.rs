//! Transport by a NATS server or cluster.
//!
//! Messages are published on core subjects ([`subject`]), lossy for slow subscribers. A KV bucket whose entries expire
//! has the members ([`members`]), the object store has snapshots ([`snapshots`]). Without a connection nothing is
//! delivered, there are no members, and the client connects again in the background. The server needs JetStream.

mod envelope;
mod members;
mod snapshots;
mod subject;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, ConnectOptions, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use pointsman::{Backoff, BoxFuture, BusError, ReplicaId, ReplicaLife, ReplicaMessage, ReplicaTopic, SnapshotStore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use self::envelope::{OVERHEAD_BYTES, Sealer, Sequences};
use super::bus::{Bus, Carrier, Hub, left};
use super::direct::{MESSAGE_BYTES_MAX, Outbox, is_pool_name};
use super::lives::Lives;
use super::meters::RefusalReason;
use crate::observe::clock::unix_ms;
use crate::settings::Secret;

/// Interval of pings, which detect a broken connection after two of them.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Messages that a subscription may be behind before the client drops the newest.
const SUBSCRIPTION_MESSAGES_MAX: usize = 4_096;

/// A running transport by NATS.
pub(in crate::replicas) type NatsBus = Bus<NatsState>;

/// Another replica.
struct NatsMember {
    life: ReplicaLife,
    lives: Lives,
    is_serving: bool,
    sequence: u64,
    seen: Instant,
}

/// State of all tasks.
pub(in crate::replicas) struct NatsState {
    hub: Hub,
    sealer: Sealer,
    known: Mutex<BTreeMap<ReplicaId, NatsMember>>,
    /// Revision of the last own entry of the members.
    own_revision: AtomicU64,
    sequences: Mutex<Sequences>,
    /// Queued messages, each with its subject.
    outbox: Outbox<(String, Bytes)>,
    /// The latest object of each pool.
    objects: Mutex<BTreeMap<String, String>>,
    client: OnceLock<Client>,
}

impl Deref for NatsState {
    type Target = Hub;

    fn deref(&self) -> &Hub {
        &self.hub
    }
}

impl NatsBus {
    /// Starts to connect in the background to `nats://HOST:PORT` or `tls://HOST:PORT`, which must be valid. `tls` has
    /// certificate chain, key and authority for the connection to the server.
    pub(in crate::replicas) fn start(
        life: ReplicaLife,
        url: String,
        key: Option<Secret>,
        tls: Option<[PathBuf; 3]>,
    ) -> Self {
        let shared = Arc::new(NatsState {
            hub: Hub::new(life),
            sealer: Sealer::new(life, key.as_ref()),
            known: Mutex::default(),
            own_revision: AtomicU64::new(u64::MAX),
            sequences: Mutex::default(),
            outbox: Outbox::default(),
            objects: Mutex::default(),
            client: OnceLock::new(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(run(Arc::clone(&shared), url, tls));
        Self::new(shared, tasks)
    }
}

/// Connects, and serves until this replica leaves.
async fn run(shared: Arc<NatsState>, url: String, tls: Option<[PathBuf; 3]>) {
    let mut is_leaving = shared.is_leaving.subscribe();
    tokio::select! {
        biased;
        () = left(&mut is_leaving) => {}
        (client, messages, requests) = connect(&shared, &url, tls) => {
            let _ = shared.client.set(client.clone());
            // Only these two have something to send at the end.
            let sending = async { tokio::join!(publish(&shared, &client), members::keep(&shared, &client)) };
            tokio::select! {
                biased;
                _ = sending => {}
                () = receive(&shared, messages) => {}
                () = snapshots::serve(&shared, &client, requests) => {}
            }
        }
    }
}

/// A client with its subscriptions, which connects in the background.
async fn connect(shared: &NatsState, url: &str, tls: Option<[PathBuf; 3]>) -> (Client, Subscriber, Subscriber) {
    let mut backoff = Backoff::new(shared.life.incarnation);
    let mut is_reported = false;
    loop {
        let mut options = ConnectOptions::new()
            .name("pointsman")
            .no_echo()
            .retry_on_initial_connect()
            .max_reconnects(None)
            .ping_interval(PING_INTERVAL)
            .subscription_capacity(SUBSCRIPTION_MESSAGES_MAX)
            .event_callback(|event| async move { tracing::info!(%event, "connection to NATS") });
        if let Some([certificate_file, key_file, ca_file]) = tls.clone() {
            options = options.require_tls(true).add_root_certificates(ca_file);
            options = options.add_client_certificate(certificate_file, key_file);
        }
        let connected = async {
            let client = options.connect(url).await.map_err(|error| error.to_string())?;
            let subscribe = |subject: String| {
                let client = client.clone();
                async move { client.subscribe(subject).await.map_err(|error| error.to_string()) }
            };
            let messages = subscribe(subject::MESSAGES.to_owned()).await?;
            let requests = subscribe(subject::fetch(shared.life.replica)).await?;
            Ok::<_, String>((client, messages, requests))
        };
        match connected.await {
            Ok(connected) => return connected,
            Err(error) if !std::mem::replace(&mut is_reported, true) => {
                tracing::warn!(url, error, "cannot connect to NATS; further attempts follow");
            }
            Err(_) => {}
        }
        sleep(backoff.next_delay()).await;
    }
}

/// Sends queued messages until this replica leaves. Without a connection they are dropped.
async fn publish(shared: &NatsState, client: &Client) {
    let mut is_leaving = shared.is_leaving.subscribe();
    loop {
        let (subject, payload) = tokio::select! {
            biased;
            message = shared.outbox.next() => message,
            () = left(&mut is_leaving) => break,
        };
        let bytes = payload.len();
        if client.connection_state() != State::Connected || bytes > client.max_payload() {
            shared.meters.dropped.increment(1);
        } else if client.publish(subject, payload).await.is_ok() {
            shared.meters.sent_bytes.increment(bytes as u64);
        }
    }
    let _ = client.flush().await;
}

/// Delivers messages of other replicas.
async fn receive(shared: &NatsState, mut messages: Subscriber) {
    while let Some(message) = messages.next().await {
        let subject = message.subject.as_str();
        shared.meters.received_bytes.increment(message.payload.len() as u64);
        if let Some((from, content)) = shared.accept(subject, &message.payload) {
            match subject::pool_and_topic(subject) {
                Some((pool, topic)) => {
                    let message = ReplicaMessage { from, pool: pool.into(), topic, payload: content };
                    // Without a subscriber the message is lost.
                    let _ = shared.incoming.send(message);
                }
                None => shared.meters.refused(RefusalReason::Malformed, &subject, "unknown subject"),
            }
        }
    }
}

impl NatsState {
    fn seal(&self, subject: &str, content: &[u8]) -> Bytes {
        self.sealer.seal(subject, content, unix_ms())
    }

    /// Sender and content of an authentic message, which is delivered once; `None` for own and refused ones.
    fn accept(&self, subject: &str, message: &Bytes) -> Option<(ReplicaLife, Bytes)> {
        let accepted = self.sealer.open(subject, message, unix_ms()).and_then(|envelope| {
            if envelope.from != self.life {
                if envelope.from.replica == self.life.replica {
                    let detail = "another gateway or life has the same replicas.id";
                    return Err((RefusalReason::DuplicateId, detail));
                }
                self.sequences.lock().accept(subject, &envelope)?;
            }
            Ok(envelope)
        });
        match accepted {
            Ok(envelope) => (envelope.from != self.life).then_some((envelope.from, envelope.content)),
            Err((reason, detail)) => {
                self.meters.refused(reason, &subject, detail);
                None
            }
        }
    }
}

impl Carrier for NatsState {
    const UNSENT: &'static str = "connection to NATS closed with unsent messages";

    fn publish(&self, pool: &Arc<str>, topic: ReplicaTopic, payload: Bytes) {
        let is_short = payload.len() + OVERHEAD_BYTES <= MESSAGE_BYTES_MAX && is_pool_name(pool);
        let is_connected = self.client.get().is_some_and(|client| client.connection_state() == State::Connected);
        if !is_short || !is_connected || *self.is_leaving.borrow() {
            self.meters.dropped.increment(1);
            return;
        }
        let subject = subject::message(pool, topic);
        let message = self.seal(&subject, &payload);
        let bytes = message.len();
        let dropped = self.outbox.push((subject, message), bytes);
        self.meters.dropped.increment(dropped);
    }

    fn fetch(&self, from: ReplicaId, pool: &Arc<str>) -> impl Future<Output = Result<Bytes, String>> + Send {
        snapshots::fetch(self, from, pool)
    }

    fn store(&self) -> Option<&dyn SnapshotStore> {
        Some(self)
    }
}

impl SnapshotStore for NatsState {
    fn put(&self, pool: Arc<str>, snapshot: Bytes) -> BoxFuture<'_, Result<(), BusError>> {
        Box::pin(async move {
            let stored = snapshots::store_latest(self, &pool, &snapshot).await;
            stored.map_err(|reason| BusError::Store { pool: pool.to_string(), reason })
        })
    }

    fn get(&self, pool: Arc<str>) -> BoxFuture<'_, Result<Option<Bytes>, BusError>> {
        Box::pin(async move {
            let read = snapshots::read_latest(self, &pool).await;
            read.map_err(|reason| BusError::Store { pool: pool.to_string(), reason })
        })
    }
}
