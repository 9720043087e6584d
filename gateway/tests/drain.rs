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

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::common::directory::Directory;
use crate::common::process::{Process, serve};
use crate::common::proxy::{
    self, Act, EVENT, PATIENCE, Scripted, chunk, chunked_head, eventually, full_response, kept, ready, stream_end,
};

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
    ready(process.address).await;
    process
}

async fn get(address: SocketAddr, path: &str) -> u16 {
    proxy::request(address, "GET", path, "", b"").await.status
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
    MockEngine::start(MockConfig { time_scale, ..MockConfig::default() }).await.expect("the engine starts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_with_500_open_streams_breaks_none() {
    let worker = Scripted::with(Vec::new(), |_, got| match got.head.starts_with("GET ") {
        true => vec![full_response("200 OK", "{}")],
        false => vec![chunked_head(), chunk(EVENT), Act::Wait, chunk("data: [DONE]\n\n"), stream_end()],
    })
    .await;
    let config = format!(
        "[[models]]\nname = \"mock\"\nworkers = [{{ url = \"{}\" }}]\n[models.tokens]\nsource = \"none\"\n",
        worker.url()
    );
    let (directory, mut command) = (Directory::new(), serve());
    let config = directory.write("pointsman.toml", config);
    command.args(["--listen", "127.0.0.1:0", "--config"]).arg(config);
    let process = Process::start(command).await;
    ready(process.address).await;
    let mut asking = JoinSet::new();
    for n in 0..STREAMS {
        asking.spawn(begun(process.address, n, 100));
    }
    let streams = timeout(PATIENCE, asking.join_all()).await.expect("all streams start before the timeout");
    let ended = streams.iter().filter(|(_, received)| received.contains("[DONE]")).count();
    assert_eq!(ended, 0, "all streams are open");

    process.signal("TERM");
    eventually("the listener closes", async || TcpStream::connect(process.address).await.is_err()).await;
    worker.release(STREAMS);
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
                let answer =
                    kept(&mut stream, &request(n, 20)).await.map_err(|got| format!("request {count}: {got}"))?;
                if count == 1 {
                    first.send(()).await.expect("the receiver is open");
                }
                if answer.header("connection") == Some("close") {
                    let end = timeout(PATIENCE, stream.read(&mut [0])).await.expect("end before the timeout");
                    return if matches!(end, Ok(0)) { Ok(answer) } else { Err(format!("no end: {end:?}")) };
                }
            }
            unreachable!("more requests than the limit")
        });
    }
    let mut idle = TcpStream::connect(address).await.expect("connection accepted");
    kept(&mut idle, &request(CLIENTS, 1)).await.expect("response received");
    for _ in 0..CLIENTS {
        timeout(PATIENCE, firsts.recv()).await.expect("completed before the timeout").expect("a client responds");
    }
    process.signal("TERM");
    let ended = timeout(PATIENCE, clients.join_all()).await.expect("all clients end before the timeout");
    let lost: Vec<_> = ended.iter().filter_map(|ended| ended.as_ref().err()).collect();
    assert_eq!(lost.len(), 0, "{lost:?}");
    assert!(ended.iter().flatten().all(|answer| answer.status == 200));
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
    let mut stream = TcpStream::connect(process.address).await.expect("connection accepted");
    let before = kept(&mut stream, &request(0, 1)).await.expect("response received");
    assert_eq!((before.status, before.header("connection")), (200, None), "{before:?}");
    process.signal("TERM");
    eventually("it is not ready", async || get(process.address, "/ready").await == 503).await;
    let during = kept(&mut stream, &request(0, 1)).await.expect("response received");
    assert_eq!((during.status, during.header("connection")), (200, Some("close")), "{during:?}");
    let end = timeout(PATIENCE, stream.read(&mut [0])).await.expect("end before the timeout");
    assert_eq!(end.expect("a clean end"), 0);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_connection_whose_stream_outlasts_the_drain_is_still_served() {
    let engine = engine(0.3).await;
    let mut process = start(&engine).await;
    // Keeps the process until the end.
    let (last, _) = begun(process.address, 0, 100_000).await;
    // About 5 s.
    let (mut stream, mut received) = begun(process.address, 1, 100).await;
    process.signal("TERM");
    process.logged("listener closed").await;
    while !received.ends_with("0\r\n\r\n") {
        let mut more = Vec::new();
        let read = timeout(PATIENCE, stream.read_buf(&mut more)).await.expect("bytes before the timeout");
        assert!(read.expect("connection is open") > 0, "{received}");
        received.push_str(&String::from_utf8(more).expect("text"));
    }
    let next = kept(&mut stream, &request(2, 1)).await.expect("response received");
    assert_eq!((next.status, next.header("connection")), (200, Some("close")), "{next:?}");
    drop(last);
    assert_eq!(process.exit().await.code(), Some(0));
    engine.shutdown().await;
}

#[tokio::test]
async fn an_http2_client_moves_to_the_successor_and_keeps_its_streams() {
    let (engine, directory) = (engine(0.3).await, Directory::new());
    let (listen, admin, token) = (free_address(), free_address(), directory.write("token", "0123456789abcdef"));
    let token = token.to_str().expect("text");
    // The administration listener of the first stays open until its exit.
    let flags = ["--listen", &listen, "--admin-listen", &admin, "--admin-token-file", token, "--reuse-port"];
    let mut first = start_with(&engine, &flags).await;
    let mut client = http2(first.address).await;
    let stream = client.send_request(post(0, 100)).await.expect("a response");
    let second = start_with(&engine, &flags).await;
    first.signal("TERM");
    first.logged("listener closed").await;
    // GOAWAY ends the use of the connection, without an error for what was sent before.
    let told = async {
        while client.ready().await.is_ok() {
            if let Ok(answer) = client.send_request(post(1, 1)).await {
                assert_eq!(answer.status(), 200);
            }
        }
    };
    timeout(PATIENCE, told).await.expect("told to go away");
    let moved = http2(first.address).await.send_request(post(2, 1)).await.expect("a response");
    assert_eq!(moved.status(), 200);
    let body = timeout(PATIENCE, stream.into_body().collect()).await.expect("end before the timeout");
    let body = body.expect("a whole stream").to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"), "{body:?}");
    assert_eq!(first.exit().await.code(), Some(0));
    assert_eq!(get(second.address, "/v1/models").await, 200);
    assert_eq!(get(admin.parse().expect("an address"), "/live").await, 401);
    drop(second);
    engine.shutdown().await;
}

type Http2 = hyper::client::conn::http2::SendRequest<Full<Bytes>>;

async fn http2(address: SocketAddr) -> Http2 {
    let stream = TokioIo::new(TcpStream::connect(address).await.expect("connection accepted"));
    let (client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.expect("a handshake");
    tokio::spawn(connection);
    client
}

/// The request of [`request`] for HTTP/2.
fn post(n: usize, max_tokens: u32) -> Request<Full<Bytes>> {
    let text = request(n, max_tokens);
    let body = text.split_once("\r\n\r\n").expect("a head").1.to_owned();
    let request = Request::post("http://test/v1/chat/completions").header("content-type", "application/json");
    request.body(Full::from(body)).expect("a valid request")
}

/// A port without a listener.
fn free_address() -> String {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("free port on loopback");
    taken.local_addr().expect("local address").to_string()
}

#[tokio::test]
async fn startup_errors_use_the_log_format() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("free port on loopback");
    let listen = taken.local_addr().expect("local address").to_string();
    let run = async |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(["serve", "--model", "m", "--worker", "http://127.0.0.1:9"]).args(flags);
        let output = timeout(PATIENCE, command.env_clear().kill_on_drop(true).output());
        let output = output.await.expect("end before the timeout").expect("it ran");
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    let said = run(&["--listen", &listen]).await;
    assert!(said.lines().any(|line| line.starts_with(&format!("error: cannot listen at {listen}: "))), "{said}");
    for (flags, expected) in [
        (["--listen", &listen, "--log-level", "info"], "cannot listen at"),
        (["--listen", &listen, "--set", "gateway.attempts_max=0"], "gateway.attempts_max is 0"),
        (["--listen", &listen, "--config", "/nowhere/pointsman.toml"], "/nowhere/pointsman.toml cannot be read"),
        (["--listen", &listen, "--log-level", "off"], "cannot listen at"),
    ] {
        let said = run(&[&flags[..], &["--log-format", "json"]].concat()).await;
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
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let mut process = start(&engine).await;
        let (mut stream, mut received) = begun(process.address, 0, 1000).await;
        process.signal("TERM");
        process.logged("listener closed").await;
        process.signal(signal);
        assert_eq!(process.exit().await.code(), Some(code));
        let rest = timeout(PATIENCE, stream.read_to_string(&mut received)).await;
        let _ = rest.expect("connection closed before the timeout");
        assert!(!received.contains("[DONE]"), "{received}");
    }
    engine.shutdown().await;
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
