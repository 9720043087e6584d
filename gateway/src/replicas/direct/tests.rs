//! Refusals: connections that violate the protocol are closed, counted by reason, and change nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pointsman::{ReplicaBus as _, ReplicaId, ReplicaLife, ReplicaMessage, ReplicaTopic};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::time::timeout;

use super::frame::{Frame, Hello, NONCE_BYTES, VERSION};
use super::link::{FrameWriter, Link, LinkError, shake_hands};
use super::seal::{DeploymentKey, Side};
use super::{DirectBus, Peers};
use crate::replicas::meters::{RefusalReason, ReplicaMeters};
use crate::settings::Secret;

const DEADLINE: Duration = Duration::from_secs(60);

fn key() -> Secret {
    Secret::new("a key of all replicas")
}

fn life(replica: u64, incarnation: u64) -> ReplicaLife {
    ReplicaLife { replica: ReplicaId(replica), incarnation }
}

/// A listening replica with the key, and the messages that it receives.
struct Scene {
    bus: DirectBus,
    address: std::net::SocketAddr,
    messages: broadcast::Receiver<ReplicaMessage>,
    meters: ReplicaMeters,
}

impl Scene {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let bus = DirectBus::start(listener, life(1, 1), Peers::List(Vec::new()), Some(key()), None);
        let messages = bus.subscribe();
        Self { bus, address, messages, meters: ReplicaMeters::new() }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("a connection")
    }

    /// An authenticated connection of a replica.
    async fn link(&self, own: ReplicaLife) -> Link<'_> {
        let (stream, key) = (Box::new(self.connect().await), DeploymentKey::new(&key()));
        shake_hands(stream, Side::Dialling, own, Some(&key), &self.meters).await.expect("the key is right")
    }

    /// Number of refusals for the reason, when it has become `count`.
    async fn refused(&self, reason: RefusalReason, count: u64) {
        let reached = async {
            while self.bus.shared.meters.count(reason) < count {
                tokio::task::yield_now().await;
            }
        };
        timeout(DEADLINE, reached).await.unwrap_or_else(|_| panic!("no refusal for {}", reason.name()));
        assert_eq!(self.bus.shared.meters.count(reason), count);
    }

    /// The next message, as text.
    async fn next(&mut self) -> String {
        let message = timeout(DEADLINE, self.messages.recv()).await.expect("a message").expect("no loss");
        String::from_utf8(message.payload.to_vec()).expect("text")
    }
}

fn message(payload: &'static str) -> Bytes {
    let payload = Bytes::from_static(payload.as_bytes());
    Frame::Message { topic: Some(ReplicaTopic::Load), pool: Arc::from("pool"), payload }.encode()
}

/// Reads to the end of the connection, which the other side closes.
async fn closed(link: &mut Link<'_>) {
    let end = async {
        loop {
            match link.reader.next().await {
                Ok(_) => {}
                Err(LinkError::Closed(_)) => return,
                Err(error) => panic!("{error}"),
            }
        }
    };
    timeout(DEADLINE, end).await.expect("the connection is closed");
}

#[tokio::test]
async fn a_forged_frame_closes_the_connection() {
    let mut scene = Scene::new().await;
    {
        let mut link = scene.link(life(2, 1)).await;
        link.writer.send(&message("before")).await.expect("sent");
        link.writer.add(&message("forged"));
        *link.writer.buffer.last_mut().expect("a frame") ^= 1;
        link.writer.flush().await.expect("sent");
        closed(&mut link).await;
    }
    scene.refused(RefusalReason::Authentication, 1).await;
    assert_eq!(scene.next().await, "before");
    assert!(scene.messages.try_recv().is_err(), "the forged message was refused");
}

#[tokio::test]
async fn repeated_and_reordered_frames_close_the_connection() {
    let mut scene = Scene::new().await;
    for (n, order) in [&[0, 1, 1][..], &[0, 2, 1]].into_iter().enumerate() {
        {
            let mut link = scene.link(life(2, 1)).await;
            let frames = ["first", "second", "third"].map(|payload| link.writer.sealed(&message(payload)));
            for frame in order {
                link.writer.send_raw(&frames[*frame]).await;
            }
            closed(&mut link).await;
        }
        scene.refused(RefusalReason::Authentication, n as u64 + 1).await;
        assert_eq!(scene.next().await, "first");
        if order[1] == 1 {
            assert_eq!(scene.next().await, "second");
        }
        assert!(scene.messages.try_recv().is_err(), "order {order:?}");
    }
}

#[tokio::test]
async fn an_oversized_frame_closes_the_connection_unread() {
    let scene = Scene::new().await;
    {
        let mut link = scene.link(life(2, 1)).await;
        // Only the length arrives, and suffices.
        link.writer.send_raw(&u32::MAX.to_le_bytes()).await;
        closed(&mut link).await;
    }
    scene.refused(RefusalReason::Oversized, 1).await;
    // Before authentication the limit is that of a hello.
    let mut stranger = scene.connect().await;
    stranger.write_all(&1000_u32.to_le_bytes()).await.expect("sent");
    assert_eq!(timeout(DEADLINE, stranger.read_u8()).await.expect("closed").map_err(|_| ()), Err(()));
    scene.refused(RefusalReason::Oversized, 2).await;
}

#[tokio::test]
async fn another_version_is_refused_and_sees_this_version() {
    let scene = Scene::new().await;
    let mut later = scene.connect().await;
    let hello = Hello { version: VERSION + 1, is_keyed: true, nonce: [0; NONCE_BYTES], life: life(2, 1) }.encode();
    later.write_all(&[&(hello.len() as u32).to_le_bytes()[..], &hello].concat()).await.expect("sent");
    let mut answer = Vec::new();
    timeout(DEADLINE, later.read_to_end(&mut answer)).await.expect("closed").expect("no reset");
    assert_eq!(Hello::decode(&answer[4..]).map(|hello| hello.version), Some(VERSION));
    scene.refused(RefusalReason::Version, 1).await;
}

#[tokio::test]
async fn unexpected_frames_and_other_protocols_are_malformed() {
    let scene = Scene::new().await;
    {
        let mut link = scene.link(life(2, 1)).await;
        link.writer.send(&Frame::Status { is_serving: true }.encode()).await.expect("sent");
        closed(&mut link).await;
    }
    scene.refused(RefusalReason::Malformed, 1).await;
    let mut stranger = scene.connect().await;
    stranger.write_all(b"\x10\0\0\0GET / HTTP/1.1\r\n").await.expect("sent");
    assert!(timeout(DEADLINE, stranger.read_u8()).await.expect("closed").is_err());
    scene.refused(RefusalReason::Malformed, 2).await;
}

#[tokio::test]
async fn an_earlier_life_is_refused_while_a_later_one_is_connected() {
    let scene = Scene::new().await;
    let mut first = scene.link(life(2, 6)).await;
    assert!(first.reader.next().await.is_ok());
    // Its clock has gone back.
    let mut later = scene.link(life(2, 5)).await;
    assert!(later.reader.next().await.is_ok(), "the later life is admitted");
    let mut earlier = scene.link(life(2, 6)).await;
    closed(&mut earlier).await;
    scene.refused(RefusalReason::Stale, 1).await;
    drop((first, later, earlier));
    // Nothing remains of the later life.
    let admitted = async {
        loop {
            let mut link = scene.link(life(2, 6)).await;
            if link.reader.next().await.is_ok() {
                break;
            }
        }
    };
    timeout(DEADLINE, admitted).await.expect("the earlier life is admitted");
}

#[tokio::test]
async fn silent_connections_keep_no_replica_out() {
    let scene = Scene::new().await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(scene.connect().await);
    }
    let mut link = scene.link(life(2, 1)).await;
    assert!(link.reader.next().await.is_ok(), "admitted beside 300 silent connections");
    let ended =
        [RefusalReason::Connections, RefusalReason::Timeout].map(|reason| scene.bus.shared.meters.count(reason));
    assert!(ended.iter().sum::<u64>() >= 300 + 1 - 64, "{ended:?}");
    drop(silent);
    assert!(link.reader.next().await.is_ok(), "an authenticated connection is none of them");
}

impl FrameWriter<'_> {
    /// The bytes of the next frame.
    fn sealed(&mut self, body: &[u8]) -> Vec<u8> {
        self.add(body);
        std::mem::take(&mut self.buffer)
    }

    async fn send_raw(&mut self, bytes: &[u8]) {
        // The other side may have closed the connection already.
        let _ = self.stream.write_all(bytes).await;
    }
}
