//! Memory of the gateway process under bodies that never end.
//!
//! The process ends with the test. Every wait has a generous limit.
#![cfg(target_os = "linux")]

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::common::process::{Process, serve};
use crate::common::proxy::{PATIENCE, eventually, ready, request};

const MIB: u64 = 1 << 20;

/// Clients with unfinished bodies, and the bytes that each of them sends.
const CLIENTS: usize = 60;
const SENT_BYTES: u64 = 4 * MIB;

/// The gateway's memory budget for all bodies.
const BUDGET_BYTES: u64 = 32 * MIB;

/// Memory of 60 connections besides their bodies, including freed memory that the allocator keeps: a megabyte each.
/// Up to 37 MiB were measured on a busy machine. Without the budget their bodies would use 240 MiB.
const CONNECTIONS_BYTES: u64 = 60 * MIB;

/// A gateway of one model, `mock`.
struct Measured(Process);

impl Measured {
    async fn start(engine: &MockEngine) -> Self {
        let mut command = serve();
        command.args(["--listen", "127.0.0.1:0", "--model", "mock", "--worker", &engine.url()]);
        command.args(["--set", &format!("gateway.request_budget_bytes={BUDGET_BYTES}")]);
        Self(Process::start(command).await)
    }

    /// Anonymous memory of the process: without the pages of its binary, which are read as its code runs.
    fn anonymous_bytes(&self) -> u64 {
        let id = self.0.child.id().expect("process is running");
        let status = fs::read_to_string(format!("/proc/{id}/status")).expect("the engine runs");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon is present");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    }

    /// The status of the response to a small request.
    async fn small(&self) -> u16 {
        let body = br#"{"model":"mock","max_tokens":1,"messages":[{"role":"user","content":"hello"}]}"#;
        request(self.0.address, "POST", "/v1/chat/completions", "", body).await.status
    }

    async fn metric(&self, name: &str) -> f64 {
        request(self.0.address, "GET", "/metrics", "", b"").await.metric(name, &[])
    }
}

fn head(length: u64) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

/// Sends a body except for its end and returns the connection. Stops early if the body is rejected.
async fn unfinished(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    let part = vec![b' '; MIB as usize / 4];
    let sent = async {
        stream.write_all(head(SENT_BYTES + 1).as_bytes()).await?;
        for _ in 0..SENT_BYTES / part.len() as u64 {
            stream.write_all(&part).await?;
        }
        std::io::Result::Ok(())
    };
    // An error means that the body was rejected.
    let _ = timeout(PATIENCE, sent).await.expect("read or rejected before the timeout");
    stream
}

/// Three rounds of a load that used 6.4 GB on the trial's machine, at a smaller scale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_bodies_stay_within_the_budget_and_are_freed() {
    let engine =
        MockEngine::start(MockConfig { time_scale: 100.0, ..MockConfig::default() }).await.expect("start succeeds");
    let process = Measured::start(&engine).await;
    ready(process.0.address).await;
    let idle = process.anonymous_bytes();
    let mut peak = 0;
    for _ in 0..3 {
        let mut sending = JoinSet::new();
        for _ in 0..CLIENTS {
            sending.spawn(unfinished(process.0.address));
        }
        let mut clients = Vec::new();
        while let Some(client) = sending.join_next().await {
            clients.push(client.expect("no panic"));
            peak = peak.max(process.anonymous_bytes());
        }
        let held = process.metric("pointsman_gateway_body_bytes").await;
        assert!(held <= BUDGET_BYTES as f64, "{held} bytes of bodies");
        peak = peak.max(process.anonymous_bytes());
        drop(clients);
    }
    // Bodies that are not freed exceed the limit in the second or third round.
    assert!(peak <= idle + BUDGET_BYTES + CONNECTIONS_BYTES, "{} MiB, idle {}", peak / MIB, idle / MIB);
    assert!(process.metric("pointsman_gateway_requests_refused_total").await > 0.0);
    eventually("all bodies are freed", async || process.metric("pointsman_gateway_body_bytes").await == 0.0).await;
}

/// Clients that have sent nearly all of their bodies and continue byte by byte exhaust the budget. Other requests are
/// served long before these clients time out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_bodies_do_not_block_other_requests() {
    let engine =
        MockEngine::start(MockConfig { time_scale: 100.0, ..MockConfig::default() }).await.expect("start succeeds");
    let process = Measured::start(&engine).await;
    let mut slow = JoinSet::new();
    for _ in 0..BUDGET_BYTES / SENT_BYTES + 1 {
        slow.spawn(unfinished(process.0.address));
    }
    let slow = timeout(PATIENCE, slow.join_all()).await.expect("sent before the timeout");
    let rejected = async || process.metric("pointsman_gateway_requests_refused_total").await;
    eventually("the budget is exhausted", async || rejected().await > 0.0).await;
    let held = process.metric("pointsman_gateway_body_bytes").await;
    let served = async {
        while process.small().await != 200 {
            sleep(Duration::from_millis(50)).await;
        }
    };
    // A silent client times out after 30 s, a slow one after 300 s.
    timeout(Duration::from_secs(25), served).await.unwrap_or_else(|_| panic!("not served beside {held} bytes"));
    drop(slow);
}
