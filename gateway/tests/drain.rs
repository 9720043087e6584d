//! Shutdown of the gateway process with real clients.
//!
//! The process ends with the test. Every wait has a generous limit. The listener's own rules are tested beside the
//! listener.
#![cfg(unix)]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
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
        while !exchange(process.address, "GET /ready", "").await.starts_with("HTTP/1.1 200") {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, ready).await.expect("ready before the timeout");
    process
}

/// A complete response on a new connection.
async fn exchange(address: SocketAddr, what: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    let length = body.len();
    let head = format!("{what} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).await.expect("connection is open");
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer))
        .await
        .expect("response before the timeout")
        .expect("response received");
    answer
}

/// A streamed response whose head and first bytes have arrived.
async fn begun(address: SocketAddr, n: usize, max_tokens: u32) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    stream.write_all(request(n, max_tokens).as_bytes()).await.expect("connection is open");
    let mut received = Vec::new();
    while !String::from_utf8_lossy(&received).contains("\r\n\r\n")
        || !String::from_utf8_lossy(&received).contains("data: ")
    {
        let read = timeout(PATIENCE, stream.read_buf(&mut received)).await.expect("first byte before the timeout");
        assert!(read.expect("connection is open") > 0, "{}", String::from_utf8_lossy(&received));
    }
    (stream, String::from_utf8(received).expect("text"))
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
    let streams = timeout(PATIENCE, asking.join_all()).await.expect("all streams start before the timeout");
    let ended = streams.iter().filter(|(_, received)| received.contains("[DONE]")).count();
    assert_eq!(ended, 0, "all streams are open");

    process.signal("TERM");
    let closed = async {
        while TcpStream::connect(process.address).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("the listener closes before the timeout");
    let mut ending = JoinSet::new();
    for (mut stream, mut received) in streams {
        ending.spawn(async move {
            timeout(PATIENCE, stream.read_to_string(&mut received))
                .await
                .expect("end before the timeout")
                .expect("clean end of the stream");
            received
        });
    }
    for received in ending.join_all().await {
        assert!(received.starts_with("HTTP/1.1 200 ") && received.contains("data: [DONE]\n\n"), "{received}");
        assert!(received.ends_with("0\r\n\r\n"), "{received}");
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
    let mut received = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&received).into_owned();
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
        match timeout(PATIENCE, stream.read_buf(&mut received)).await.expect("response before the timeout") {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Err(text),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_answers_every_request_on_kept_connections() {
    const CLIENTS: usize = 200;
    let engine = engine(1.0).await;
    let process = start(&engine).await;
    let (address, (first, mut firsts)) = (process.address, tokio::sync::mpsc::channel(CLIENTS));
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        let first = first.clone();
        clients.spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("connection accepted");
            // Sends consecutive requests without a pause until a response ends the connection.
            for count in 1.. {
                stream
                    .write_all(request(n, 20).as_bytes())
                    .await
                    .map_err(|error| format!("request {count}: {error}"))?;
                let answer = whole_answer(&mut stream).await.map_err(|got| format!("request {count}: {got:?}"))?;
                if count == 1 {
                    first.send(()).await.expect("the receiver is open");
                }
                if answer.contains("connection: close\r\n") {
                    let end = timeout(PATIENCE, stream.read(&mut [0])).await.expect("end before the timeout");
                    return if matches!(end, Ok(0)) { Ok(answer) } else { Err(format!("no end: {end:?}")) };
                }
            }
            unreachable!("more requests than the limit")
        });
    }
    let mut idle = TcpStream::connect(address).await.expect("connection accepted");
    idle.write_all(request(CLIENTS, 1).as_bytes()).await.expect("connection is open");
    whole_answer(&mut idle).await.expect("response received");
    for _ in 0..CLIENTS {
        timeout(PATIENCE, firsts.recv()).await.expect("completed before the timeout").expect("a client responds");
    }
    process.signal("TERM");
    let ended = timeout(PATIENCE, clients.join_all()).await.expect("all clients end before the timeout");
    let lost: Vec<&String> = ended.iter().filter_map(|ended| ended.as_ref().err()).collect();
    assert_eq!(lost.len(), 0, "{lost:?}");
    let served = ended.iter().flatten().filter(|answer| answer.starts_with("HTTP/1.1 200 ")).count();
    let refused = ended.iter().flatten().filter(|answer| answer.contains("\"draining\"")).count();
    assert_eq!(served + refused, CLIENTS);
    let end = timeout(PATIENCE, idle.read(&mut [0])).await.expect("end before the timeout");
    assert_eq!(end.expect("a clean end"), 0, "an idle connection is closed");
    assert_eq!(process.exit().await.code(), Some(0));
    engine.shutdown().await;
}

#[tokio::test]
async fn kept_connections_are_served_during_the_drain_delay() {
    let engine = engine(1.0).await;
    let flags = ["--listen", "127.0.0.1:0", "--set", "gateway.drain_delay_ms=600000"];
    let process = start_with(&engine, &flags).await;
    let mut kept = TcpStream::connect(process.address).await.expect("connection accepted");
    kept.write_all(request(0, 1).as_bytes()).await.expect("connection is open");
    let before = whole_answer(&mut kept).await.expect("response received");
    assert!(before.starts_with("HTTP/1.1 200 ") && !before.contains("connection: close"), "{before}");
    process.signal("TERM");
    let becomes_unready = async {
        while !exchange(process.address, "GET /ready", "").await.starts_with("HTTP/1.1 503") {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, becomes_unready).await.expect("completed before the timeout");
    kept.write_all(request(0, 1).as_bytes()).await.expect("connection is open");
    let during = whole_answer(&mut kept).await.expect("response received");
    assert!(during.starts_with("HTTP/1.1 200 ") && during.contains("connection: close\r\n"), "{during}");
    let end = timeout(PATIENCE, kept.read(&mut [0])).await.expect("end before the timeout");
    assert_eq!(end.expect("a clean end"), 0);
    engine.shutdown().await;
}

/// A directory for files of this test.
fn directory(name: &str) -> std::path::PathBuf {
    let directory = std::env::temp_dir().join(format!("pointsman-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("test directory created");
    directory
}

/// A port without a listener.
fn free_address() -> String {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("free port on loopback");
    taken.local_addr().expect("local address").to_string()
}

#[tokio::test]
async fn a_successor_starts_at_the_same_addresses_while_its_predecessor_drains() {
    let engine = engine(0.01).await;
    let token = directory("successor").join("token");
    std::fs::write(&token, "0123456789abcdef").expect("a file");
    let (listen, admin) = (free_address(), free_address());
    let token = token.to_str().expect("text");
    // The administration listener stays open until the exit.
    let flags = ["--listen", &listen, "--admin-listen", &admin, "--admin-token-file", token, "--reuse-port"];
    let mut first = start_with(&engine, &flags).await;
    let (stream, _) = begun(first.address, 0, 1000).await;
    first.signal("TERM");
    first.logged("listener closed").await;
    let closed = async {
        while TcpStream::connect(first.address).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("the listener closes before the timeout");

    let second = start_with(&engine, &flags).await;
    assert!(exchange(second.address, "GET /v1/models", "").await.starts_with("HTTP/1.1 200 "));
    assert!(first.child.try_wait().expect("process state").is_none(), "the first process still drains");
    drop(stream);
    assert_eq!(first.exit().await.code(), Some(0));
    // Only one process listens on the admin address.
    assert!(exchange(admin.parse().expect("an address"), "GET /live", "").await.starts_with("HTTP/1.1 401 "));
    drop(second);
    engine.shutdown().await;
}

#[tokio::test]
async fn unused_signals_are_ignored_and_logged() {
    let engine = engine(1.0).await;
    let mut process = start(&engine).await;
    for signal in ["USR1", "USR2"] {
        process.signal(signal);
        process.logged(&format!("SIG{signal}")).await;
    }
    assert!(exchange(process.address, "GET /live", "").await.starts_with("HTTP/1.1 200 "));
    process.signal("TERM");
    assert_eq!(process.exit().await.code(), Some(0));
    engine.shutdown().await;
}

#[tokio::test]
async fn startup_errors_use_the_log_format() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("free port on loopback");
    let listen = taken.local_addr().expect("local address").to_string();
    let model = ["--model", "m", "--worker", "http://127.0.0.1:9", "--log-format", "json"];
    for (flags, expected) in [
        (vec!["--listen", &listen], "cannot listen at"),
        (vec!["--set", "gateway.attempts_max=0"], "gateway.attempts_max is 0"),
        (vec!["--config", "/nowhere/pointsman.toml"], "/nowhere/pointsman.toml cannot be read"),
        (vec!["--log-level", "off", "--listen", &listen], "cannot listen at"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.arg("serve").args(&flags).args(model).env_clear().kill_on_drop(true);
        let output = timeout(PATIENCE, command.output()).await.expect("end before the timeout").expect("it ran");
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
async fn a_second_signal_ends_the_process() {
    let engine = engine(0.01).await;
    let mut process = start(&engine).await;
    let (mut stream, mut received) = begun(process.address, 0, 1000).await;
    process.signal("TERM");
    process.logged("listener closed").await;
    process.signal("INT");
    assert_eq!(process.exit().await.code(), Some(130));
    let _ =
        timeout(PATIENCE, stream.read_to_string(&mut received)).await.expect("connection closed before the timeout");
    assert!(!received.contains("[DONE]"), "{received}");
    engine.shutdown().await;
}

#[tokio::test]
async fn startup_errors_are_one_line_with_exit_code_2() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("free port on loopback");
    let listen = taken.local_addr().expect("local address").to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["serve", "--listen", &listen, "--model", "m", "--worker", "http://127.0.0.1:9"]).env_clear();
    let output =
        timeout(PATIENCE, command.kill_on_drop(true).output()).await.expect("end before the timeout").expect("it ran");
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.lines().any(|line| line.starts_with(&format!("error: cannot listen at {listen}: "))), "{said}");
}

/// Passes the standard input as the listening socket, as a service manager does.
const PASS_INPUT: &str = r#"exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@""#;

/// A gateway that listens on this socket.
async fn start_on(socket: &TcpListener, engine: &MockEngine) -> Process {
    let address = socket.local_addr().expect("bound").to_string();
    let mut command = Command::new("/bin/sh");
    command.env_clear().args([
        "-c",
        PASS_INPUT,
        "sh",
        env!("CARGO_BIN_EXE_pointsman"),
        "serve",
        "--log-format",
        "json",
    ]);
    command.args(["--listen", &address, "--model", "mock", "--worker", &engine.url()]);
    // Requests that arrive before the first probe of the engine wait for it.
    command.args(["--set", "gateway.hold_without_endpoints_ms=60000"]);
    let input: OwnedFd = socket.try_clone().expect("a descriptor").into();
    let process = Process::start_with(command, Stdio::from(input), Stdio::null()).await;
    assert_eq!(process.address.to_string(), address);
    process
}

/// Sends requests on new connections until the end. Returns their number.
fn requests_until(address: SocketAddr, is_over: &AtomicBool) -> usize {
    let mut n = 0;
    while !is_over.load(Ordering::Relaxed) {
        let mut stream = std::net::TcpStream::connect(address).expect("connection accepted");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let body = r#"{"model":"mock","prompt":[1,2,3],"max_tokens":2}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n";
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).expect("connection is open");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("a complete response");
        assert!(answer.starts_with("HTTP/1.1 200"), "request {n}: {answer}");
        n += 1;
    }
    n
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_on_a_passed_socket_fail_no_connection() {
    let engine = engine(0.0).await;
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = socket.local_addr().expect("bound");
    let mut running = start_on(&socket, &engine).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || requests_until(address, &is_over))
        })
        .collect();
    for _ in 0..3 {
        let successor = start_on(&socket, &engine).await;
        running.signal("TERM");
        assert_eq!(running.exit().await.code(), Some(0));
        running = successor;
    }
    // Without any process, connections wait in the backlog.
    running.signal("TERM");
    assert_eq!(running.exit().await.code(), Some(0));
    let last = start_on(&socket, &engine).await;
    is_over.store(true, Ordering::Relaxed);
    for client in clients {
        let n = client.join().expect("every request succeeded");
        assert!(n > 0, "a client sent nothing");
    }
    last.signal("TERM");
    assert_eq!(last.exit().await.code(), Some(0));
}
