//! The transport by NATS, over a real server: `nats-server` of `POINTSMAN_NATS_SERVER` or of the search path. Without one
//! the tests are skipped with a line on stderr. `tests/replicas/nats_server` fetches the server and runs them.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use futures_util::StreamExt as _;
use pointsman::ReplicaTopic;
use pointsman_gateway::replicas::Replicas;
use pointsman_gateway::settings::{ReplicasSettings, Secret};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::conformance::{Transport, all_connected, conforms, members_until, publishes_alone, within};

const KEY: &str = "a key of all replicas";

static DIRECTORIES: AtomicU32 = AtomicU32::new(0);

/// A server, killed when dropped.
struct Server {
    child: Child,
    port: u16,
    directory: PathBuf,
}

impl Server {
    /// Starts the server on a port, or any for -1; `None` without a program.
    async fn start(port: i32) -> Option<Self> {
        let program = std::env::var_os("POINTSMAN_NATS_SERVER").unwrap_or_else(|| "nats-server".into());
        let n = DIRECTORIES.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("pointsman-nats-{}-{n}", std::process::id()));
        let mut command = Command::new(&program);
        command.args(["-js", "-a", "127.0.0.1", "-p", &port.to_string(), "-sd"]).arg(&directory);
        let spawned = command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) => {
                eprintln!("SKIPPED: {} cannot be started: {error}", program.to_string_lossy());
                return None;
            }
        };
        let mut lines = BufReader::new(child.stderr.take().expect("stream is piped")).lines();
        let mut port = None;
        let ready = async {
            while let Some(line) = lines.next_line().await.expect("text") {
                if let Some((_, address)) = line.split_once("client connections on ") {
                    port = address.rsplit_once(':').and_then(|(_, port)| port.trim().parse().ok());
                }
                if line.contains("Server is ready") {
                    return;
                }
            }
            panic!("the server ended");
        };
        within("the server", ready).await;
        // Reads on, so that the server never blocks on its log.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Some(Self { child, port: port.expect("a port"), directory })
    }

    fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    async fn stop(mut self) -> u16 {
        self.child.kill().await.expect("the server was running");
        self.port
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

struct Nats {
    url: String,
    key: Option<Secret>,
}

impl Nats {
    fn at(url: String, key: Option<&str>) -> Self {
        Self { url, key: key.map(Secret::new) }
    }
}

impl Transport for Nats {
    type Replica = Replicas;

    async fn start(&self, n: usize) -> Replicas {
        let (nats, id) = (Some(self.url.clone()), Some(format!("replica {n}")));
        let settings = ReplicasSettings { nats, id, ..ReplicasSettings::default() };
        Replicas::start(&settings, false, self.key.clone()).expect("valid settings")
    }
}

/// Waits until a message of `from` arrives at `to`, publishing again until then: NATS may drop the first ones.
async fn delivers(from: &Replicas, to: &Replicas) {
    let mut messages = to.bus().subscribe();
    within("a message", async {
        loop {
            from.bus().publish(&"pool".into(), ReplicaTopic::Load, Bytes::from_static(b"message"));
            tokio::select! {
                biased;
                message = messages.recv() => return drop(message.expect("the bus is running")),
                () = tokio::time::sleep(std::time::Duration::from_millis(50)) => {}
            }
        }
    })
    .await;
}

#[tokio::test]
async fn nats_conforms() {
    let Some(server) = Server::start(-1).await else { return };
    conforms(&Nats::at(server.url(), None)).await;
}

#[tokio::test]
async fn nats_with_a_key_conforms() {
    let Some(server) = Server::start(-1).await else { return };
    conforms(&Nats::at(server.url(), Some(KEY))).await;
}

#[tokio::test]
async fn a_replica_publishes_alone() {
    let Some(server) = Server::start(-1).await else { return };
    publishes_alone(&Nats::at(server.url(), None)).await;
}

#[tokio::test]
async fn replicas_start_without_a_server_and_survive_its_restart() {
    let Some(server) = Server::start(-1).await else { return };
    let transport = Nats::at(server.url(), Some(KEY));
    let port = server.stop().await;
    let (one, two) = (transport.start(1).await, transport.start(2).await);
    one.bus().publish(&"pool".into(), ReplicaTopic::Load, Bytes::from_static(b"lost"));
    assert!(one.bus().members().borrow().is_empty());
    let mut server = Server::start(port.into()).await.expect("it was started before");
    for _ in 0..2 {
        all_connected(&[&one, &two]).await;
        delivers(&one, &two).await;
        delivers(&two, &one).await;
        server.stop().await;
        for replica in [&one, &two] {
            members_until(&*replica.bus(), "no members without a server", |members| members.is_empty()).await;
        }
        server = Server::start(port.into()).await.expect("it was started before");
    }
    all_connected(&[&one, &two]).await;
    delivers(&one, &two).await;
}

#[tokio::test]
async fn forged_and_repeated_messages_change_nothing() {
    let Some(server) = Server::start(-1).await else { return };
    let transport = Nats::at(server.url(), Some(KEY));
    let (one, two) = (transport.start(1).await, transport.start(2).await);
    all_connected(&[&one, &two]).await;
    let attacker = async_nats::connect(server.url()).await.expect("the server runs");
    let mut overheard = attacker.subscribe("pointsman.v1.*.*").await.expect("subscribed");
    attacker.flush().await.expect("flushed");
    let (pool, mut messages) = ("pool".into(), two.bus().subscribe());
    one.bus().publish(&pool, ReplicaTopic::Load, Bytes::from_static(b"first"));
    assert_eq!(within("a message", messages.recv()).await.expect("running").payload, "first");
    let captured = within("the same message", overheard.next()).await.expect("subscribed");
    let mut changed = captured.payload.to_vec();
    *changed.last_mut().expect("a tag") ^= 1;
    let attacks = [
        ("pointsman.v1.pool.load", captured.payload.clone()),
        ("pointsman.v1.other.load", captured.payload.clone()),
        ("pointsman.v1.pool.sessions", captured.payload.clone()),
        ("pointsman.v1.pool.load", changed.into()),
        ("pointsman.v1.pool.load", Bytes::from_static(b"no envelope")),
        ("pointsman.v1.pool.load", Bytes::new()),
    ];
    for (subject, payload) in attacks {
        attacker.publish(subject, payload).await.expect("sent");
    }
    // The server has received all of them before the next message of an honest replica is published.
    within("the server", attacker.request("pointsman.v1.fetch.none.snapshot", Bytes::new())).await.expect_err("nobody");
    one.bus().publish(&pool, ReplicaTopic::Load, Bytes::from_static(b"second"));
    assert_eq!(within("a message", messages.recv()).await.expect("running").payload, "second");
    assert_eq!(two.bus().members().borrow().len(), 1);
}

#[tokio::test]
async fn replicas_with_different_keys_are_no_members() {
    let Some(server) = Server::start(-1).await else { return };
    let (one, two) = (Nats::at(server.url(), Some(KEY)), Nats::at(server.url(), Some(KEY)));
    let other = Nats::at(server.url(), Some("another key of replicas"));
    let stranger = other.start(3).await;
    let (one, two) = (one.start(1).await, two.start(2).await);
    all_connected(&[&one, &two]).await;
    // The stranger has written its entry before these two became members, or writes it without effect.
    assert!(stranger.bus().members().borrow().is_empty());
    assert_eq!(one.bus().members().borrow().len(), 1);
}
