//! Shutdown of the gateway process with real clients.
//!
//! The process ends with the test. Every wait has a generous limit. The listener's own rules are tested beside the
//! listener.
#![cfg(unix)]

use std::net::SocketAddr;
use std::time::Duration;

use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::common::process::{PATIENCE, Process, serve};

/// Clients in the middle of a response.
const STREAMS: usize = 500;

/// A gateway of one model, `mock`, with this engine.
async fn start(engine: &MockEngine) -> Process {
    start_with(engine, &["--listen", "127.0.0.1:0"]).await
}

async fn start_with(engine: &MockEngine, flags: &[&str]) -> Process {
    let mut command = serve();
    command.args(flags).args(["--model", "mock", "--worker", &engine.url()]);
    let process = Process::start(command).await;
    let ready = async {
        while !ask(process.address, "GET /ready", "").await.starts_with("HTTP/1.1 200") {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, ready).await.expect("it is ready in time");
    process
}

/// A complete response on a new connection.
async fn ask(address: SocketAddr, what: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    let length = body.len();
    let head = format!("{what} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).await.expect("the connection stands");
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer in time").expect("an answer");
    answer
}

/// A streamed response whose head and first bytes have arrived.
async fn begun(address: SocketAddr, n: usize, max_tokens: u32) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(request(n, max_tokens).as_bytes()).await.expect("the connection stands");
    let mut heard = Vec::new();
    while !String::from_utf8_lossy(&heard).contains("\r\n\r\n") || !String::from_utf8_lossy(&heard).contains("data: ") {
        let read = timeout(PATIENCE, stream.read_buf(&mut heard)).await.expect("a first byte in time");
        assert!(read.expect("the connection stands") > 0, "{}", String::from_utf8_lossy(&heard));
    }
    (stream, String::from_utf8(heard).expect("text"))
}

/// An engine with simulated latency that runs `time_scale` virtual seconds per real second.
async fn engine(time_scale: f64) -> MockEngine {
    let config = MockConfig { time_scale, sequences_max: 2 * STREAMS as u32, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_with_500_open_streams_breaks_none() {
    // 100 steps of 14 ms at a twentieth of the speed: the signal arrives long before the last step.
    let engine = engine(0.05).await;
    let process = start(&engine).await;
    let mut asking = JoinSet::new();
    for n in 0..STREAMS {
        asking.spawn(begun(process.address, n, 100));
    }
    let streams = timeout(PATIENCE, asking.join_all()).await.expect("all streams have begun in time");
    let ended = streams.iter().filter(|(_, heard)| heard.contains("[DONE]")).count();
    assert_eq!(ended, 0, "all of them are open");

    process.signal("TERM");
    let closed = async {
        while TcpStream::connect(process.address).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("nobody listens any more, in time");
    let mut ending = JoinSet::new();
    for (mut stream, mut heard) in streams {
        ending.spawn(async move {
            timeout(PATIENCE, stream.read_to_string(&mut heard))
                .await
                .expect("the end in time")
                .expect("an orderly end");
            heard
        });
    }
    for heard in ending.join_all().await {
        assert!(heard.starts_with("HTTP/1.1 200 ") && heard.contains("data: [DONE]\n\n"), "{heard}");
        assert!(heard.ends_with("0\r\n\r\n"), "{heard}");
    }
    assert_eq!(process.exit().await.code(), Some(0));
    engine.shutdown().await;
}

/// A streamed request for this many tokens on a kept connection.
fn request(n: usize, max_tokens: u32) -> String {
    let body = format!(
        r#"{{"model":"mock","stream":true,"max_tokens":{max_tokens},"messages":[{{"role":"user","content":"client {n}"}}]}}"#
    );
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// One complete response on a kept connection. `Err`: the bytes before the connection ended.
async fn whole_answer(stream: &mut TcpStream) -> Result<String, String> {
    let mut heard = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&heard).into_owned();
        let head_end = text.find("\r\n\r\n").map(|end| end + 4);
        let length = text.to_lowercase().split_once("content-length: ").map(|(_, rest)| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<usize>().expect("a length")
        });
        match (head_end, length) {
            (Some(end), Some(length)) if text.len() >= end + length => return Ok(text),
            (Some(_), None) if text.ends_with("\r\n0\r\n\r\n") => return Ok(text),
            _ => {}
        }
        match timeout(PATIENCE, stream.read_buf(&mut heard)).await.expect("an answer in time") {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Err(text),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_leaves_no_request_on_a_kept_connection_without_an_answer() {
    const CLIENTS: usize = 200;
    let engine = engine(1.0).await;
    let process = start(&engine).await;
    let (address, (first, mut firsts)) = (process.address, tokio::sync::mpsc::channel(CLIENTS));
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        let first = first.clone();
        clients.spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            // Sends consecutive requests without a pause until a response ends the connection.
            for count in 1.. {
                stream
                    .write_all(request(n, 20).as_bytes())
                    .await
                    .map_err(|error| format!("request {count}: {error}"))?;
                let answer = whole_answer(&mut stream).await.map_err(|got| format!("request {count}: {got:?}"))?;
                if count == 1 {
                    first.send(()).await.expect("the test counts");
                }
                if answer.contains("connection: close\r\n") {
                    let end = timeout(PATIENCE, stream.read(&mut [0])).await.expect("an end in time");
                    return if matches!(end, Ok(0)) { Ok(answer) } else { Err(format!("no end: {end:?}")) };
                }
            }
            unreachable!("requests do not run out")
        });
    }
    let mut idle = TcpStream::connect(address).await.expect("it listens");
    idle.write_all(request(CLIENTS, 1).as_bytes()).await.expect("the connection stands");
    whole_answer(&mut idle).await.expect("an answer");
    for _ in 0..CLIENTS {
        timeout(PATIENCE, firsts.recv()).await.expect("in time").expect("clients run");
    }
    process.signal("TERM");
    let ended = timeout(PATIENCE, clients.join_all()).await.expect("all end in time");
    let lost: Vec<&String> = ended.iter().filter_map(|ended| ended.as_ref().err()).collect();
    assert_eq!(lost.len(), 0, "{lost:?}");
    let served = ended.iter().flatten().filter(|answer| answer.starts_with("HTTP/1.1 200 ")).count();
    let refused = ended.iter().flatten().filter(|answer| answer.contains("\"draining\"")).count();
    assert_eq!(served + refused, CLIENTS);
    let end = timeout(PATIENCE, idle.read(&mut [0])).await.expect("an end in time");
    assert_eq!(end.expect("a clean end"), 0, "an idle connection is closed");
    assert_eq!(process.exit().await.code(), Some(0));
    engine.shutdown().await;
}

#[tokio::test]
async fn during_the_drain_delay_kept_connections_are_served_and_then_closed() {
    let engine = engine(1.0).await;
    let flags = ["--listen", "127.0.0.1:0", "--set", "gateway.drain_delay_ms=600000"];
    let process = start_with(&engine, &flags).await;
    let mut kept = TcpStream::connect(process.address).await.expect("it listens");
    kept.write_all(request(0, 1).as_bytes()).await.expect("the connection stands");
    let before = whole_answer(&mut kept).await.expect("an answer");
    assert!(before.starts_with("HTTP/1.1 200 ") && !before.contains("connection: close"), "{before}");
    process.signal("TERM");
    let says_no = async {
        while !ask(process.address, "GET /ready", "").await.starts_with("HTTP/1.1 503") {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, says_no).await.expect("in time");
    kept.write_all(request(0, 1).as_bytes()).await.expect("the connection stands");
    let during = whole_answer(&mut kept).await.expect("an answer");
    assert!(during.starts_with("HTTP/1.1 200 ") && during.contains("connection: close\r\n"), "{during}");
    let end = timeout(PATIENCE, kept.read(&mut [0])).await.expect("an end in time");
    assert_eq!(end.expect("a clean end"), 0);
    engine.shutdown().await;
}

/// A directory for files of this test.
fn directory(name: &str) -> std::path::PathBuf {
    let directory = std::env::temp_dir().join(format!("pointsman-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory of the test's own");
    directory
}

/// A port without a listener.
fn free_address() -> String {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    taken.local_addr().expect("it is bound").to_string()
}

#[tokio::test]
async fn a_successor_starts_at_the_same_addresses_while_its_predecessor_drains() {
    let engine = engine(0.01).await;
    let token = directory("successor").join("token");
    std::fs::write(&token, "0123456789abcdef").expect("a file");
    let (listen, admin) = (free_address(), free_address());
    let flags = ["--listen", &listen, "--admin-listen", &admin, "--admin-token-file", token.to_str().expect("text")];
    let mut first = start_with(&engine, &flags).await;
    let (stream, _) = begun(first.address, 0, 1000).await;
    first.signal("TERM");
    first.logged("no new connections").await;
    let closed = async {
        while TcpStream::connect(first.address).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("nobody listens any more, in time");

    let second = start_with(&engine, &flags).await;
    assert!(ask(second.address, "GET /v1/models", "").await.starts_with("HTTP/1.1 200 "));
    assert!(first.child.try_wait().expect("it is a child").is_none(), "the first one still drains");
    drop(stream);
    assert_eq!(first.exit().await.code(), Some(0));
    // Only one process listens on the admin address.
    assert!(ask(admin.parse().expect("an address"), "GET /live", "").await.starts_with("HTTP/1.1 401 "));
    drop(second);
    engine.shutdown().await;
}

#[tokio::test]
async fn signals_of_no_meaning_are_ignored_with_a_line_of_the_log() {
    let engine = engine(1.0).await;
    let mut process = start(&engine).await;
    for signal in ["USR1", "USR2"] {
        process.signal(signal);
        process.logged(&format!("SIG{signal}")).await;
    }
    assert!(ask(process.address, "GET /live", "").await.starts_with("HTTP/1.1 200 "));
    process.signal("TERM");
    assert_eq!(process.exit().await.code(), Some(0));
    engine.shutdown().await;
}

#[tokio::test]
async fn refusals_are_in_the_format_of_the_log() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
    let listen = taken.local_addr().expect("it is bound").to_string();
    let model = ["--model", "m", "--worker", "http://127.0.0.1:9", "--log-format", "json"];
    for (flags, expected) in [
        (vec!["--listen", &listen], "cannot listen at"),
        (vec!["--set", "gateway.attempts_max=0"], "gateway.attempts_max is 0"),
        (vec!["--config", "/nowhere/pointsman.toml"], "/nowhere/pointsman.toml cannot be read"),
        (vec!["--log-level", "off", "--listen", &listen], "cannot listen at"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.arg("serve").args(&flags).args(model).env_clear().kill_on_drop(true);
        let output = timeout(PATIENCE, command.output()).await.expect("it ends in time").expect("it ran");
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let said = String::from_utf8(output.stderr).expect("text");
        let lines: Vec<serde_json::Value> =
            said.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}"))).collect();
        let last = lines.last().expect("a line");
        assert_eq!(last["level"], "ERROR", "{said}");
        assert!(last["message"].as_str().expect("text").contains(expected), "{said}");
    }
}

#[tokio::test]
async fn a_second_signal_ends_the_process_at_once() {
    let engine = engine(0.01).await;
    let mut process = start(&engine).await;
    let (mut stream, mut heard) = begun(process.address, 0, 1000).await;
    process.signal("TERM");
    process.logged("no new connections").await;
    process.signal("INT");
    assert_eq!(process.exit().await.code(), Some(130));
    let _ = timeout(PATIENCE, stream.read_to_string(&mut heard)).await.expect("its connection is gone in time");
    assert!(!heard.contains("[DONE]"), "{heard}");
    engine.shutdown().await;
}

#[tokio::test]
async fn what_cannot_start_says_why_in_a_line_and_exits_with_2() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
    let listen = taken.local_addr().expect("it is bound").to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["serve", "--listen", &listen, "--model", "m", "--worker", "http://127.0.0.1:9"]).env_clear();
    let output =
        timeout(PATIENCE, command.kill_on_drop(true).output()).await.expect("it ends in time").expect("it ran");
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.lines().any(|line| line.starts_with(&format!("error: cannot listen at {listen}: "))), "{said}");
}
