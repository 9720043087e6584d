//! The direct transport: conformance without security, with a shared key, and with mutual TLS; and who is refused.

use std::net::SocketAddr;
use std::sync::Mutex;

use bytes::Bytes;
use pointsman::ReplicaTopic;
use pointsman_gateway::replicas::Replicas;
use pointsman_gateway::settings::{ReplicasSettings, Secret};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::conformance::{Transport, all_connected, conforms, members_until, publishes_alone, within};
use crate::common::authority::tls;

const KEY: &str = "a key of all replicas";

/// Replicas with the same settings on loopback.
struct Direct {
    settings: ReplicasSettings,
    key: Option<Secret>,
    /// Sockets of the first lives.
    sockets: Mutex<Vec<Option<TcpListener>>>,
}

impl Direct {
    async fn of(replicas: usize, settings: ReplicasSettings, key: Option<&str>) -> Self {
        let mut sockets = Vec::new();
        for _ in 0..replicas {
            sockets.push(TcpListener::bind("127.0.0.1:0").await.expect("a free port"));
        }
        let peers = sockets.iter().map(|socket| address(socket).to_string()).collect();
        let sockets = Mutex::new(sockets.into_iter().map(Some).collect());
        Self { settings: ReplicasSettings { peers, ..settings }, key: key.map(Secret::new), sockets }
    }
}

fn address(socket: &TcpListener) -> SocketAddr {
    socket.local_addr().expect("a bound socket")
}

impl Transport for Direct {
    type Replica = Replicas;

    async fn start(&self, n: usize) -> Replicas {
        let settings = ReplicasSettings { id: Some(format!("replica {n}")), ..self.settings.clone() };
        let socket = self.sockets.lock().expect("no panic").get_mut(n).and_then(Option::take);
        let socket = match socket {
            Some(socket) => socket,
            // The socket of the former life closes with its task.
            None => {
                within("the port of the former life", async {
                    loop {
                        match TcpListener::bind(&settings.peers[n]).await {
                            Ok(socket) => break socket,
                            Err(_) => tokio::task::yield_now().await,
                        }
                    }
                })
                .await
            }
        };
        Replicas::start_on(socket, &settings, self.key.clone()).expect("valid settings")
    }
}

fn mutual_tls(name: &str) -> ReplicasSettings {
    ReplicasSettings {
        tls_certificate_file: Some(tls(&format!("{name}.crt"))),
        tls_key_file: Some(tls(&format!("{name}.key"))),
        tls_ca_file: Some(tls("test-only.crt")),
        ..ReplicasSettings::default()
    }
}

#[tokio::test]
async fn direct_conforms_without_security() {
    conforms(&Direct::of(3, ReplicasSettings::default(), None).await).await;
}

#[tokio::test]
async fn direct_conforms_with_a_shared_key() {
    conforms(&Direct::of(3, ReplicasSettings::default(), Some(KEY)).await).await;
}

#[tokio::test]
async fn direct_conforms_with_mutual_tls() {
    conforms(&Direct::of(3, mutual_tls("test-only"), None).await).await;
}

#[tokio::test]
async fn a_direct_replica_without_peers_publishes() {
    publishes_alone(&Direct::of(1, ReplicasSettings::default(), None).await).await;
}

#[tokio::test]
async fn all_addresses_of_a_dns_name_are_replicas() {
    let direct = Direct::of(1, ReplicasSettings::default(), None).await;
    let a = direct.start(0).await;
    let port = a.address().expect("a listener").port();
    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let settings = ReplicasSettings { dns: Some(format!("localhost:{port}")), ..ReplicasSettings::default() };
    let b = Replicas::start_on(socket, &settings, None).expect("valid settings");
    members_until(&*b.bus(), "the replica of the name", |members| {
        members.len() == 1 && members[0].life == a.bus().life()
    })
    .await;
}

/// Starts `stranger` with an address of a replica with `settings` and `key`, and waits until it was refused once.
async fn is_refused(settings: ReplicasSettings, key: Option<&str>, stranger: ReplicasSettings, other: Option<&str>) {
    let direct = Direct::of(2, settings, key).await;
    let [a, b] = [direct.start(0).await, direct.start(1).await];
    let relay = Relay::to(a.address().expect("a listener")).await;
    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let stranger = ReplicasSettings { peers: vec![relay.address.to_string()], ..stranger };
    let stranger = Replicas::start_on(socket, &stranger, other.map(Secret::new)).expect("valid settings");
    within("three refused connections", relay.closed(3)).await;
    assert!(stranger.bus().members().borrow().is_empty());
    all_connected(&[&a, &b]).await;
}

#[tokio::test]
async fn strangers_are_refused() {
    let plain = ReplicasSettings::default;
    is_refused(plain(), Some(KEY), plain(), Some("another key of replicas")).await;
    is_refused(plain(), Some(KEY), plain(), None).await;
    is_refused(plain(), None, plain(), Some(KEY)).await;
    is_refused(mutual_tls("test-only"), None, mutual_tls("other-test-only"), None).await;
    is_refused(mutual_tls("test-only"), None, plain(), None).await;
}

/// Passes connections on and records what the dialling side sends.
struct Relay {
    address: SocketAddr,
    closed: tokio::sync::watch::Receiver<usize>,
    recorded: std::sync::Arc<Mutex<Vec<u8>>>,
}

impl Relay {
    async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (count, closed) = tokio::sync::watch::channel(0);
        let recorded = std::sync::Arc::new(Mutex::new(Vec::new()));
        let relay = Self { address: address(&listener), closed, recorded: recorded.clone() };
        tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                let Ok(to) = TcpStream::connect(target).await else { return };
                let ((mut from_read, mut from_write), (mut to_read, mut to_write)) =
                    (from.into_split(), to.into_split());
                let forward = async {
                    let mut buffer = [0; 4096];
                    while let Ok(n @ 1..) = from_read.read(&mut buffer).await {
                        recorded.lock().expect("no panic").extend_from_slice(&buffer[..n]);
                        if to_write.write_all(&buffer[..n]).await.is_err() {
                            break;
                        }
                    }
                };
                tokio::select! {
                    biased;
                    () = forward => {}
                    _ = tokio::io::copy(&mut to_read, &mut from_write) => {}
                }
                count.send_modify(|count| *count += 1);
            }
        });
        relay
    }

    /// Resolves after `count` ended connections.
    async fn closed(&self, count: usize) {
        self.closed.clone().wait_for(|closed| *closed >= count).await.expect("the relay is running");
    }
}

#[tokio::test]
async fn a_recorded_connection_cannot_be_replayed() {
    let direct = Direct::of(2, ReplicasSettings::default(), Some(KEY)).await;
    let a = direct.start(0).await;
    let mut messages = a.bus().subscribe();
    let relay = Relay::to(a.address().expect("a listener")).await;
    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let settings = ReplicasSettings { peers: vec![relay.address.to_string()], ..ReplicasSettings::default() };
    let b = Replicas::start_on(socket, &settings, Some(Secret::new(KEY))).expect("valid settings");
    members_until(&*b.bus(), "a member", |members| members.len() == 1).await;
    b.bus().publish(&"pool".into(), ReplicaTopic::Load, Bytes::from_static(b"recorded"));
    assert_eq!(within("a message", messages.recv()).await.expect("no loss").payload, "recorded");
    b.leave().await;
    within("the end of the connection", relay.closed(1)).await;

    let recorded = relay.recorded.lock().expect("no panic").clone();
    assert!(recorded.windows(8).any(|bytes| bytes == b"recorded"), "the message was recorded");
    let mut replay = TcpStream::connect(a.address().expect("a listener")).await.expect("a connection");
    replay.write_all(&recorded).await.expect("sent");
    let mut answer = Vec::new();
    // A reset is an end as well.
    let _ = within("the end of the connection", replay.read_to_end(&mut answer)).await;
    assert!(messages.try_recv().is_err(), "the replayed message was refused");
}
