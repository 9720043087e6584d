//! Members in a KV bucket: each replica writes its entry every second, and entries expire after five seconds.
//!
//! The key is the replica's id, the value an envelope with one byte: 0 joined, 1 serving, 2 left. The bucket is in memory
//! and is created again after a loss. Expiry counts from the receipt, so that a lost connection ends membership as well.

use std::cmp::Ordering;
use std::sync::{Arc, atomic};
use std::time::Duration;

use async_nats::Client;
use async_nats::jetstream::kv::{self, Entry, Operation, Store};
use async_nats::jetstream::{self, stream::StorageType};
use futures_util::StreamExt as _;
use pointsman::{Backoff, ReplicaId, ReplicaMember};
use tokio::time::{Instant, interval, sleep, timeout};

use super::{NatsMember, NatsState, left};
use crate::observe::clock::unix_ms;
use crate::replicas::lives::Lives;
use crate::replicas::meters::{PeerState, RefusalReason};

const BUCKET: &str = "pointsman-replicas-v1";

/// Interval of own entries.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time after which an entry expires.
const EXPIRY: Duration = Duration::from_secs(5);

/// Time limit of a request to the server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

const JOINED: u8 = 0;
const SERVING: u8 = 1;
const LEFT: u8 = 2;

impl NatsMember {
    fn state(&self) -> PeerState {
        if self.is_serving { PeerState::Serving } else { PeerState::Connected }
    }
}

/// Keeps the own entry and follows those of others until this replica leaves.
pub(super) async fn keep(shared: &NatsState, client: &Client) {
    let mut is_leaving = shared.is_leaving.subscribe();
    let mut backoff = Backoff::new(shared.life.incarnation ^ 1);
    let mut is_reported = false;
    while !*is_leaving.borrow() {
        let started = Instant::now();
        let Err(error) = follow(shared, client).await else { return };
        if started.elapsed() > EXPIRY {
            (is_reported, backoff) = (false, Backoff::new(shared.life.incarnation ^ 1));
        }
        if !std::mem::replace(&mut is_reported, true) {
            tracing::warn!(error, "members of the replicas cannot be read from NATS; further attempts follow");
        }
        let expire = async {
            let mut due = interval(INTERVAL);
            loop {
                due.tick().await;
                shared.expire();
            }
        };
        tokio::select! {
            biased;
            () = left(&mut is_leaving) => return,
            () = sleep(backoff.next_delay()) => {}
            () = expire => {}
        }
    }
}

/// Follows the bucket until this replica leaves.
async fn follow(shared: &NatsState, client: &Client) -> Result<(), String> {
    let mut is_leaving = shared.is_leaving.subscribe();
    let mut is_serving = shared.is_serving.subscribe();
    let jetstream = jetstream::new(client.clone());
    let config = kv::Config {
        bucket: BUCKET.to_owned(),
        description: "Replicas of Pointsman gateways".to_owned(),
        history: 1,
        max_age: EXPIRY,
        storage: StorageType::Memory,
        ..kv::Config::default()
    };
    shared.expire();
    let bucket = limited(jetstream.create_key_value(config)).await?;
    shared.expire();
    let mut entries = limited(bucket.watch_with_history(">")).await?;
    let mut due = interval(INTERVAL);
    loop {
        let state = || if *shared.is_serving.borrow() { SERVING } else { JOINED };
        tokio::select! {
            biased;
            () = left(&mut is_leaving) => return shared.put(&bucket, LEFT).await,
            _ = due.tick() => {
                shared.expire();
                shared.put(&bucket, state()).await?;
            }
            Ok(()) = is_serving.changed() => shared.put(&bucket, state()).await?,
            entry = entries.next() => match entry {
                Some(Ok(entry)) => shared.follow_entry(&entry),
                Some(Err(error)) => return Err(error.to_string()),
                None => return Err("the subscription ended".to_owned()),
            },
        }
    }
}

async fn limited<T, E: std::fmt::Display>(request: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no response within {} s", REQUEST_TIMEOUT.as_secs())),
    }
}

impl NatsState {
    /// Writes the own entry.
    async fn put(&self, bucket: &Store, state: u8) -> Result<(), String> {
        let key = self.life.replica.to_string();
        let entry = self.seal(&key, &[state]);
        let revision = limited(bucket.put(&key, entry)).await?;
        self.own_revision.store(revision, atomic::Ordering::Relaxed);
        Ok(())
    }

    /// Applies the entry of another replica. Deletions by the server or by operators have no authentic author: entries
    /// expire instead.
    fn follow_entry(&self, entry: &Entry) {
        if entry.operation != Operation::Put {
            return;
        }
        let refused = |reason, detail| self.meters.refused(reason, &entry.key, detail);
        let envelope = match self.sealer.open(&entry.key, &entry.value, unix_ms()) {
            Ok(envelope) => envelope,
            Err((reason, detail)) => return refused(reason, detail),
        };
        let life = envelope.from;
        if life.replica == self.life.replica {
            // The entry of a former life of this replica stays until the first own one.
            if life != self.life && entry.revision > self.own_revision.load(atomic::Ordering::Relaxed) {
                refused(RefusalReason::DuplicateId, "another gateway has the same replicas.id");
            }
            return;
        }
        let state = match envelope.content[..] {
            [state @ (JOINED | SERVING | LEFT)] if entry.key == life.replica.to_string() => state,
            _ => return refused(RefusalReason::Malformed, "unknown state of a replica"),
        };
        let mut known = self.known.lock();
        let before = known.get(&life.replica);
        let age =
            before.map(|before| before.lives.order(life.incarnation).then(envelope.sequence.cmp(&before.sequence)));
        match age {
            Some(Ordering::Less) => return refused(RefusalReason::Stale, "an earlier entry"),
            // The server sends entries again after a new subscription.
            Some(Ordering::Equal) => return,
            Some(Ordering::Greater) | None => {}
        }
        let mut lives = before.map_or_else(|| Lives::new(life.incarnation), |before| before.lives.clone());
        if before.is_some_and(|before| before.life != life) {
            lives.replace(life.incarnation);
        }
        let from = before.map(NatsMember::state);
        if state == LEFT {
            known.remove(&life.replica);
            self.meters.moved(from, None);
        } else {
            let member = NatsMember {
                life,
                lives,
                is_serving: state == SERVING,
                sequence: envelope.sequence,
                seen: Instant::now(),
            };
            self.meters.moved(from, Some(member.state()));
            if from.is_none() {
                tracing::info!(replica = %life.replica, incarnation = life.incarnation, "replica connected");
            }
            known.insert(life.replica, member);
        }
        self.publish_members(&known);
    }

    /// Removes members without a recent entry.
    fn expire(&self) {
        let mut known = self.known.lock();
        known.retain(|replica, member| {
            let is_kept = member.seen.elapsed() < EXPIRY;
            if !is_kept {
                self.meters.moved(Some(member.state()), None);
                tracing::info!(%replica, "replica disconnected");
            }
            is_kept
        });
        self.publish_members(&known);
    }

    fn publish_members(&self, known: &std::collections::BTreeMap<ReplicaId, NatsMember>) {
        let member = |member: &NatsMember| ReplicaMember {
            life: member.life,
            address: format!("nats/{}", member.life.replica),
            is_serving: member.is_serving,
        };
        let members: Arc<[ReplicaMember]> = known.values().map(member).collect();
        self.members.send_if_modified(|published| {
            let is_changed = *published != members;
            *published = members;
            is_changed
        });
    }
}
