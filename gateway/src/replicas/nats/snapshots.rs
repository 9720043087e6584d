//! Snapshots: a request by subject, the snapshot in the object store, and an authenticated reply with its digest.
//!
//! A snapshot of at most 64 KiB is in the reply. A longer one becomes an object, whose predecessor of the same pool and
//! replica is deleted after success; objects of ended replicas expire after an hour.
//!
//! The latest snapshot of each pool is another object, in an envelope, for replicas that start while no other one serves.

use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::object_store::{Config, GetErrorKind, ObjectStore};
use async_nats::jetstream::{self};
use async_nats::{Client, Message, Request, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use pointsman::ReplicaId;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use tokio::io::AsyncReadExt as _;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::envelope::OVERHEAD_BYTES;
use super::{NatsState, subject};
use crate::observe::clock::unix_ms;
use crate::replicas::bus::{FETCH_TIMEOUT, SNAPSHOT_BYTES_MAX};

const BUCKET: &str = "pointsman-snapshots-v1";

/// Time after which the objects of an ended replica are deleted.
const OBJECT_AGE_MAX: Duration = Duration::from_secs(3_600);

/// Maximum length of a snapshot within a reply, in bytes.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// Requests that wait for the preparation of their snapshots.
const REQUESTS_MAX: usize = 16;

// First byte of a reply.
const INLINE: u8 = 0;
const OBJECT: u8 = 1;
const FAILED: u8 = 2;

/// Fetches the snapshot of a pool from another replica.
pub(super) async fn fetch(shared: &NatsState, from: ReplicaId, pool: &str) -> Result<Bytes, String> {
    let client =
        shared.client.get().filter(|_| shared.known.lock().contains_key(&from)).ok_or("it is not connected")?;
    let subject = subject::fetch(from);
    let request = Request::new().payload(shared.seal(&subject, pool.as_bytes())).timeout(Some(FETCH_TIMEOUT));
    let reply = client.send_request(subject, request).await.map_err(|error| error.to_string())?;
    let envelope = shared.sealer.open(&reply.subject, &reply.payload, unix_ms());
    let envelope = envelope.map_err(|(_, detail)| format!("the reply is refused: {detail}"))?;
    if envelope.from.replica != from {
        return Err("the reply is of another replica".to_owned());
    }
    let content = envelope.content.slice(envelope.content.len().min(1)..);
    match envelope.content.first() {
        Some(&INLINE) => Ok(content),
        Some(&OBJECT) if content.len() > SHA256_OUTPUT_LEN => {
            let name = String::from_utf8_lossy(&content[SHA256_OUTPUT_LEN..]).into_owned();
            let snapshot = read(client, &name).await?;
            let snapshot = snapshot.ok_or_else(|| format!("the object {name:?} does not exist"))?;
            let is_same = digest(&SHA256, &snapshot).as_ref() == &content[..SHA256_OUTPUT_LEN];
            if is_same { Ok(snapshot) } else { Err(format!("the object {name:?} differs from its digest")) }
        }
        Some(&FAILED) => Err(String::from_utf8_lossy(&content).into_owned()),
        _ => Err("the reply is malformed".to_owned()),
    }
}

async fn read(client: &Client, name: &str) -> Result<Option<Bytes>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("the object {name:?} cannot be read: {error}");
    let object = match store(client).await?.get(name).await {
        Ok(object) => object,
        Err(error) if error.kind() == GetErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&error)),
    };
    let (mut content, length_max) = (Vec::new(), SNAPSHOT_BYTES_MAX + OVERHEAD_BYTES as u64);
    object.take(length_max + 1).read_to_end(&mut content).await.map_err(|error| failed(&error))?;
    if content.len() as u64 > length_max { Err(failed(&"it is too long")) } else { Ok(Some(content.into())) }
}

/// Name of the object with the latest snapshot of a pool. Its envelope is sealed for this name.
fn latest(pool: &str) -> String {
    format!("{}/latest", subject::encode(pool))
}

/// Stores the latest snapshot of a pool.
pub(super) async fn store_latest(shared: &NatsState, pool: &str, snapshot: &[u8]) -> Result<(), String> {
    if snapshot.len() as u64 > SNAPSHOT_BYTES_MAX {
        return Err("it is longer than 1 GiB".to_owned());
    }
    let (client, name) = (connected(shared)?, latest(pool));
    let envelope = shared.seal(&name, snapshot);
    let stored = async {
        let stored = store(client).await?.put(name.as_str(), &mut &envelope[..]).await;
        stored.map(drop).map_err(|error| format!("the object {name:?} cannot be written: {error}"))
    };
    timeout(FETCH_TIMEOUT, stored).await.map_err(late)?
}

/// The latest snapshot of a pool, if one is stored.
pub(super) async fn read_latest(shared: &NatsState, pool: &str) -> Result<Option<Bytes>, String> {
    let (client, name) = (connected(shared)?, latest(pool));
    let Some(envelope) = timeout(FETCH_TIMEOUT, read(client, &name)).await.map_err(late)?? else {
        return Ok(None);
    };
    let opened = shared.sealer.open_stored(&name, &envelope);
    let envelope = opened.map_err(|(reason, detail)| {
        shared.meters.refused(reason, &name, detail);
        format!("the object {name:?} is refused: {detail}")
    })?;
    Ok(Some(envelope.content))
}

fn connected(shared: &NatsState) -> Result<&Client, String> {
    let client = shared.client.get().filter(|client| client.connection_state() == State::Connected);
    client.ok_or_else(|| "the server is not connected".to_owned())
}

fn late(_: Elapsed) -> String {
    format!("no complete snapshot within {} s", FETCH_TIMEOUT.as_secs())
}

async fn store(client: &Client) -> Result<ObjectStore, String> {
    let config = Config {
        bucket: BUCKET.to_owned(),
        description: Some("Index snapshots of Pointsman gateways".to_owned()),
        max_age: OBJECT_AGE_MAX,
        ..Config::default()
    };
    let store = jetstream::new(client.clone()).create_object_store(config).await;
    store.map_err(|error| format!("the object store cannot be used: {error}"))
}

/// Replies to requests of other replicas.
pub(super) async fn serve(shared: &Arc<NatsState>, client: &Client, mut requests: Subscriber) {
    let mut replies = JoinSet::new();
    while let Some(request) = requests.next().await {
        while replies.try_join_next().is_some() {}
        if replies.len() >= REQUESTS_MAX {
            continue;
        }
        let (shared, client) = (Arc::clone(shared), client.clone());
        replies.spawn(async move { reply(&shared, &client, request).await });
    }
}

async fn reply(shared: &NatsState, client: &Client, request: Message) {
    let Some((_, pool)) = shared.accept(&request.subject, &request.payload) else { return };
    let Some(inbox) = request.reply else { return };
    let content = match prepare(shared, client, &String::from_utf8_lossy(&pool)).await {
        Ok(content) => content,
        Err(reason) => [&[FAILED], reason.as_bytes()].concat(),
    };
    let reply = shared.seal(&inbox, &content);
    if let Err(error) = client.publish(inbox, reply).await {
        tracing::debug!(%error, "reply with a snapshot was not sent");
    }
}

/// The content of a reply. Uploads a long snapshot.
async fn prepare(shared: &NatsState, client: &Client, pool: &str) -> Result<Vec<u8>, String> {
    let (_permit, snapshot) = shared.snapshot(pool).await?;
    if snapshot.len() <= INLINE_BYTES_MAX {
        return Ok([&[INLINE], &snapshot[..]].concat());
    }
    let store = store(client).await?;
    let name = format!("{}/{}/{}-{}", subject::encode(pool), shared.life.replica, shared.life.incarnation, unix_ms());
    let failed = |error: &dyn std::fmt::Display| format!("the snapshot cannot be stored: {error}");
    store.put(name.as_str(), &mut &snapshot[..]).await.map_err(|error| failed(&error))?;
    let former = shared.objects.lock().insert(pool.to_owned(), name.clone()).filter(|former| *former != name);
    if let Some(former) = former
        && let Err(error) = store.delete(&former).await
    {
        tracing::debug!(%error, former, "object of a former snapshot was not deleted");
    }
    let mut content = vec![OBJECT];
    content.extend_from_slice(digest(&SHA256, &snapshot).as_ref());
    content.extend_from_slice(name.as_bytes());
    Ok(content)
}
