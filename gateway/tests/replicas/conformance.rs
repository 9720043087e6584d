//! Conformance of a transport: what [`ReplicaBus`] promises, over any set of connected replicas.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pointsman::{BoxFuture, BusError, ReplicaBus, ReplicaMember, ReplicaMessage, ReplicaTopic, SnapshotSource};
use pointsman_gateway::replicas::Replicas;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

/// Limit of every wait. Nothing depends on its value unless a test fails.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

/// A replica of the suite.
pub(super) trait Replica: Sync {
    fn bus(&self) -> Arc<dyn ReplicaBus>;

    /// Leaves in order. A drop is a crash.
    async fn leave(self);
}

impl Replica for Replicas {
    fn bus(&self) -> Arc<dyn ReplicaBus> {
        self.bus()
    }

    async fn leave(self) {
        self.leave().await;
    }
}

/// Starts of replicas on one transport.
pub(super) trait Transport {
    type Replica: Replica;

    /// Starts replica `n` of `replicas`, which know each other. A second start of the same number is a later life.
    async fn start(&self, n: usize) -> Self::Replica;
}

/// Resolves with the output, or fails the test.
pub(super) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("{what}: not within {DEADLINE:?}"))
}

/// Waits until the members satisfy `holds`.
pub(super) async fn members_until(bus: &dyn ReplicaBus, what: &str, holds: impl FnMut(&Arc<[ReplicaMember]>) -> bool) {
    let mut members = bus.members();
    drop(within(what, members.wait_for(holds)).await.expect("the bus is running"));
}

/// Waits until each of the replicas has all others as members.
pub(super) async fn all_connected(replicas: &[&impl Replica]) {
    for replica in replicas {
        let others = replicas.len() - 1;
        members_until(&*replica.bus(), "all members", |members| members.len() == others).await;
    }
}

/// The next message.
async fn next(messages: &mut broadcast::Receiver<ReplicaMessage>) -> ReplicaMessage {
    within("a message", messages.recv()).await.expect("no message was lost")
}

/// Runs all rules.
pub(super) async fn conforms(transport: &impl Transport) {
    let [a, b, c] = [transport.start(0).await, transport.start(1).await, transport.start(2).await];
    all_connected(&[&a, &b, &c]).await;
    delivers_to_all_others(&a, [&b, &c]).await;
    keeps_pools_and_topics(&a, &b).await;
    delivers_large_messages(&a, &b).await;
    drops_the_oldest_of_a_slow_receiver(&a, &b).await;
    shows_serving(&a, &b).await;
    fetches_snapshots(&a, &b).await;
    stores_snapshots(&a, &b).await;
    replaces_a_restarted_replica(transport, &a, &b, c).await;
    a.leave().await;
    // Replica c left before, so no member is left.
    members_until(&*b.bus(), "all members have left", |members| members.is_empty()).await;
    b.leave().await;
}

/// A replica without others publishes into the void.
pub(super) async fn publishes_alone(transport: &impl Transport) {
    let alone = transport.start(0).await;
    let bus = alone.bus();
    let mut own = bus.subscribe();
    bus.publish(&"pool".into(), ReplicaTopic::Load, Bytes::from_static(b"x"));
    assert!(bus.members().borrow().is_empty());
    let life = bus.life();
    let error = within("an error", bus.fetch(life.replica, "pool".into())).await.expect_err("no such replica");
    assert!(error.to_string().contains(&life.replica.to_string()), "{error}");
    within("the end", alone.leave()).await;
    assert!(own.try_recv().is_err(), "own messages are not received");
}

async fn delivers_to_all_others(a: &impl Replica, others: [&impl Replica; 2]) {
    let (pool, mut own) = ("pool".into(), a.bus().subscribe());
    let mut receivers = others.map(|replica| replica.bus().subscribe());
    for n in 0..100_u8 {
        a.bus().publish(&pool, ReplicaTopic::Load, Bytes::from(vec![n]));
    }
    for messages in &mut receivers {
        for n in 0..100_u8 {
            let message = next(messages).await;
            let expected = ReplicaMessage {
                from: a.bus().life(),
                pool: Arc::clone(&pool),
                topic: ReplicaTopic::Load,
                payload: Bytes::from(vec![n]),
            };
            assert_eq!(message, expected);
        }
    }
    // The others have received everything, so an echo would have arrived as well, or arrives before this message.
    others[0].bus().publish(&pool, ReplicaTopic::Load, Bytes::from_static(b"end"));
    assert_eq!(next(&mut own).await.from, others[0].bus().life(), "own messages are not received");
}

async fn keeps_pools_and_topics(a: &impl Replica, b: &impl Replica) {
    let mut messages = b.bus().subscribe();
    let pools = ["llama", "a.b *>/ü", "x".repeat(200).leak()];
    for pool in pools {
        for topic in ReplicaTopic::ALL {
            a.bus().publish(&pool.into(), topic, Bytes::from(format!("{pool} {}", topic.name())));
        }
    }
    // Different pools or topics may overtake each other.
    let mut received = Vec::new();
    for _ in 0..pools.len() * ReplicaTopic::ALL.len() {
        let message = next(&mut messages).await;
        assert_eq!(message.payload, format!("{} {}", message.pool, message.topic.name()));
        received.push((message.pool.to_string(), message.topic));
    }
    received.sort();
    received.dedup();
    assert_eq!(received.len(), pools.len() * ReplicaTopic::ALL.len());
}

async fn delivers_large_messages(a: &impl Replica, b: &impl Replica) {
    let (pool, mut messages) = ("pool".into(), b.bus().subscribe());
    let large: Bytes = (0..900_000_u32).map(|n| (n % 251) as u8).collect();
    a.bus().publish(&pool, ReplicaTopic::Speculative, large.clone());
    assert_eq!(next(&mut messages).await.payload, large);
    // Too long for any transport: dropped, and later messages arrive.
    a.bus().publish(&pool, ReplicaTopic::Load, Bytes::from(vec![0; 64 << 20]));
    a.bus().publish(&pool, ReplicaTopic::Load, Bytes::from_static(b"later"));
    assert_eq!(next(&mut messages).await.payload, "later");
}

async fn drops_the_oldest_of_a_slow_receiver(a: &impl Replica, b: &impl Replica) {
    let pool = "pool".into();
    let (mut slow, mut quick) = (b.bus().subscribe(), b.bus().subscribe());
    let sent = 20_000_u32;
    for n in 0..sent {
        a.bus().publish(&pool, ReplicaTopic::Load, Bytes::copy_from_slice(&n.to_le_bytes()));
        if n % 100 == 0 {
            // Connections make progress, so that the receiver overflows as well as the sender's queue.
            tokio::task::yield_now().await;
        }
    }
    // The newest message arrives although the slow receiver reads nothing.
    let last = Bytes::copy_from_slice(&(sent - 1).to_le_bytes());
    loop {
        match within("the newest message", quick.recv()).await {
            Ok(message) if message.payload == last => break,
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => panic!("the bus is running"),
        }
    }
    let (mut previous, mut received) = (None, 0_u32);
    while previous != Some(sent - 1) {
        match within("the newest message", slow.recv()).await {
            Ok(message) => {
                let n = u32::from_le_bytes(message.payload[..].try_into().expect("four bytes"));
                assert!(previous.is_none_or(|previous| previous < n), "{n} after {previous:?}");
                previous = Some(n);
                received += 1;
            }
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => panic!("the bus is running"),
        }
    }
    assert!(received < sent, "the queues are bounded");
}

async fn shows_serving(a: &impl Replica, b: &impl Replica) {
    let id = b.bus().life().replica;
    for is_serving in [true, false, true] {
        b.bus().set_serving(is_serving);
        members_until(&*a.bus(), "the serving flag", |members| {
            members.iter().any(|member| member.life.replica == id && member.is_serving == is_serving)
        })
        .await;
    }
}

/// Snapshots of two pools.
struct Two {
    large: Bytes,
}

impl SnapshotSource for Two {
    fn snapshot(&self, pool: &str) -> BoxFuture<'_, Option<Bytes>> {
        let snapshot = match pool {
            "small" => Some(Bytes::from_static(b"small snapshot")),
            "empty" => Some(Bytes::new()),
            "large" => Some(self.large.clone()),
            _ => None,
        };
        Box::pin(async { snapshot })
    }
}

async fn fetches_snapshots(a: &impl Replica, b: &impl Replica) {
    let (bus, id) = (a.bus(), b.bus().life().replica);
    let fetch = |pool: &str| within("a snapshot", bus.fetch(id, pool.into()));
    let error = fetch("small").await.expect_err("there is no source");
    assert!(matches!(&error, BusError::Fetch { from, pool, .. } if *from == id && pool == "small"), "{error}");
    let large: Bytes = (0..20_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    b.bus().serve_snapshots(Arc::new(Two { large: large.clone() }));
    assert_eq!(fetch("small").await.expect("a snapshot"), "small snapshot");
    assert_eq!(fetch("empty").await.expect("a snapshot"), "");
    assert!(fetch("large").await.expect("a snapshot") == large, "the same bytes");
    let error = fetch("unknown").await.expect_err("an unknown pool");
    assert!(error.to_string().contains("\"unknown\""), "{error}");
    // Messages pass a snapshot in transfer.
    let mut messages = b.bus().subscribe();
    let (snapshot, message) = tokio::join!(fetch("large"), async {
        bus.publish(&"pool".into(), ReplicaTopic::Load, Bytes::from_static(b"meanwhile"));
        next(&mut messages).await
    });
    assert!(snapshot.is_ok_and(|snapshot| snapshot == large) && message.payload == "meanwhile");
}

/// A transport without a store has nothing to show.
async fn stores_snapshots(a: &impl Replica, b: &impl Replica) {
    let (one, two) = (a.bus(), b.bus());
    let (Some(of_a), Some(of_b)) = (one.store(), two.store()) else {
        return assert!(one.store().is_none() && two.store().is_none(), "all replicas have one, or none");
    };
    let get = |pool: &str| within("the stored snapshot", of_b.get(pool.into()));
    assert_eq!(get("pool").await, Ok(None));
    let large: Bytes = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (pool, snapshot) in [("pool", &large), ("a.b *>/ü", &Bytes::from_static(b"other")), ("pool", &Bytes::new())] {
        within("a store", of_a.put(pool.into(), snapshot.clone())).await.expect("stored");
        assert!(get(pool).await.expect("readable").as_ref() == Some(snapshot), "the latest snapshot of {pool:?}");
    }
    assert_eq!(get("a.b *>/ü").await, Ok(Some(Bytes::from_static(b"other"))), "pools are separate");
    assert_eq!(get("unknown").await, Ok(None));
}

async fn replaces_a_restarted_replica<T: Transport>(transport: &T, a: &T::Replica, b: &T::Replica, c: T::Replica) {
    let former = c.bus().life();
    // Without a farewell, as in a crash.
    drop(c);
    for bus in [a.bus(), b.bus()] {
        members_until(&*bus, "the end of a member", |members| members.iter().all(|member| member.life != former)).await;
    }
    let c = transport.start(2).await;
    let life = c.bus().life();
    assert_eq!(life.replica, former.replica);
    assert!(life.incarnation != former.incarnation);
    all_connected(&[a, b, &c]).await;
    members_until(&*a.bus(), "the later life", |members| members.iter().any(|member| member.life == life)).await;
    let mut messages = a.bus().subscribe();
    c.bus().publish(&"pool".into(), ReplicaTopic::Load, Bytes::from_static(b"again"));
    assert_eq!(next(&mut messages).await.from, life);
    c.leave().await;
    members_until(&*a.bus(), "a member has left", |members| members.len() == 1).await;
}
