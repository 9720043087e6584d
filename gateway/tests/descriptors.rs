//! The gateway process with few descriptors and more clients than it can accept.
//!
//! The process ends with the test. Every wait has a generous limit.
#![cfg(unix)]

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use crate::common::process::Process;
use crate::common::proxy::{Answer, Scripted, answer, eventually, request, until};

/// Descriptors of the process.
const DESCRIPTORS: usize = 256;

const BODY: &str = r#"{"model":"m","prompt":[1]}"#;

/// Clients that connect and send nothing.
const IDLE_CLIENTS: usize = 300;

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
}

/// The response on a new connection, with the admin token.
async fn exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    request(address, method, path, "authorization: Bearer 0123456789abcdef\r\n", body.as_bytes()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_operators_and_workers_keep_reserved_descriptors() {
    let engine = Scripted::start(|_| answer("200 OK", "{}")).await;
    let probes = || engine.requests().iter().filter(|got| got.head.starts_with("GET /health ")).count();
    let started = Limited::start(&engine.url()).await;
    let Limited { process, admin } = &started;
    let warned =
        process.startup.iter().any(|line| line.contains("WARN") && line.contains("connections_max is lowered"));
    assert!(warned, "{:?}", process.startup);
    let mut idle = Vec::new();
    for _ in 0..IDLE_CLIENTS {
        idle.push(TcpStream::connect(process.address).await.expect("the system accepts the connection"));
    }
    assert_eq!(exchange(process.address, "GET", "/live", "").await.status, 200);
    assert_eq!(exchange(process.address, "GET", "/ready", "").await.status, 200);
    let refused = exchange(process.address, "POST", "/v1/completions", BODY).await;
    assert!(refused.status == 503 && refused.text().contains("too_many_connections"), "{refused:?}");
    assert_eq!(refused.header("retry-after"), Some("1"), "{refused:?}");
    let health = exchange(*admin, "GET", "/admin/models/m/health", "").await;
    assert_eq!(health.status, 200, "{health:?}");
    // The engine is still probed and stays in service.
    let before = probes();
    until("it is probed", || probes() >= before + 5).await;
    let page = exchange(process.address, "GET", "/metrics", "").await;
    assert_eq!(page.metric("pointsman_ejected_ranks", &[]), 0.0);
    assert!(page.metric("pointsman_gateway_connections_refused_total", &["listener=\"clients\""]) > 0.0);
    drop(idle);
    eventually("clients are served", async || {
        let answer = exchange(process.address, "POST", "/v1/completions", BODY).await;
        !answer.text().contains("too_many_connections")
    })
    .await;
}
