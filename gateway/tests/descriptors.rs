//! The gateway process with few descriptors and more clients than it can accept.
//!
//! The process ends with the test. Every wait has a generous limit.
#![cfg(unix)]

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use crate::common::process::{PATIENCE, Process};

/// Descriptors of the process.
const DESCRIPTORS: usize = 256;

/// Clients that connect and send nothing.
const IDLE_CLIENTS: usize = 300;

/// An engine that responds to everything with 200 and counts health probes.
async fn engine() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("free port on loopback");
    let url = format!("http://{}", listener.local_addr().expect("local address"));
    let probes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&probes);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let probes = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut head = Vec::with_capacity(4096);
                if stream.read_buf(&mut head).await.is_ok_and(|read| read > 0) {
                    probes.fetch_add(usize::from(head.starts_with(b"GET /health ")), Ordering::Relaxed);
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
                }
            });
        }
    });
    (url, probes)
}

/// A port that is very likely free: the process does not report its `[admin]` address.
async fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("free port on loopback");
    listener.local_addr().expect("local address")
}

struct Limited {
    process: Process,
    admin: SocketAddr,
}

impl Limited {
    async fn start(engine: &str) -> Self {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (config, token) = (directory.join("descriptors.toml"), directory.join("descriptors.token"));
        fs::write(&token, "0123456789abcdef\n").expect("the target directory can be written");
        let admin = free_address().await;
        let text = format!(
            "[gateway]\nlisten = \"127.0.0.1:0\"\nlog_format = \"json\"\nwarm_up_ms = 0\n\
             [admin]\nlisten = \"{admin}\"\ntoken_file = {token:?}\n\
             [router]\nhealth.probe_interval_ms = 100\nhealth.probe_failures_max = 2\nengine_load.interval_ms = 0\n\
             [[models]]\nname = \"m\"\n[[models.workers]]\nurl = \"{engine}\"\n[models.tokens]\nsource = \"none\"\n"
        );
        fs::write(&config, text).expect("the target directory can be written");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("ulimit -n {DESCRIPTORS}; exec \"$0\" \"$@\""));
        command.arg(env!("CARGO_BIN_EXE_pointsman")).arg("serve").arg("--config").arg(&config);
        Self { process: Process::start(command).await, admin }
    }

    async fn metric(&self, name: &str) -> f64 {
        let page = exchange(self.process.address, "GET /metrics", "").await;
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
        value.unwrap_or_else(|| panic!("no {name} in {page}")).1.parse().expect("a number")
    }
}

/// The response on a new connection, with the admin token.
async fn exchange(address: SocketAddr, what: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    let length = body.len();
    let head = format!(
        "{what} HTTP/1.1\r\nhost: test\r\nauthorization: Bearer 0123456789abcdef\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).await.expect("connection is open");
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer))
        .await
        .expect("response before the timeout")
        .expect("response received");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_operators_and_workers_keep_reserved_descriptors() {
    let (url, probes) = engine().await;
    let started = Limited::start(&url).await;
    let Limited { process, admin } = &started;
    let warned =
        process.startup.iter().any(|line| line.contains("WARN") && line.contains("connections_max is lowered"));
    assert!(warned, "{:?}", process.startup);
    let mut idle = Vec::new();
    for _ in 0..IDLE_CLIENTS {
        idle.push(TcpStream::connect(process.address).await.expect("the system accepts the connection"));
    }
    assert!(exchange(process.address, "GET /live", "").await.starts_with("HTTP/1.1 200"));
    assert!(exchange(process.address, "GET /ready", "").await.starts_with("HTTP/1.1 200"));
    let refused = exchange(process.address, "POST /v1/completions", r#"{"model":"m","prompt":[1]}"#).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("too_many_connections"), "{refused}");
    assert!(refused.to_lowercase().contains("retry-after: 1\r\n"), "{refused}");
    let health = exchange(*admin, "GET /admin/models/m/health", "").await;
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    // The engine is still probed and stays in service.
    let before = probes.load(Ordering::Relaxed);
    let probed = async {
        while probes.load(Ordering::Relaxed) < before + 5 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, probed).await.expect("probed before the timeout");
    assert_eq!(started.metric("pointsman_ejected_ranks").await, 0.0);
    assert!(started.metric("pointsman_gateway_connections_refused_total{listener=\"clients\"}").await > 0.0);
    drop(idle);
    let served = async {
        let request = r#"{"model":"m","prompt":[1]}"#;
        while exchange(process.address, "POST /v1/completions", request).await.contains("too_many_connections") {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, served).await.expect("clients are served before the timeout");
}
