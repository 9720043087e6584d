//! The end of the real process, with real clients on it.
//!
//! Owns the process: it is gone when the test is. Promises that every wait has a generous end. Leaves the listener's own
//! rules to its tests.
#![cfg(unix)]

use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use pointsman_gateway::mock::{MockConfig, MockEngine};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The end of every wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// Clients in the middle of an answer.
const STREAMS: usize = 500;

/// A process, and what it logs.
struct Process {
    child: Child,
    log: tokio::io::Lines<BufReader<ChildStderr>>,
    address: SocketAddr,
}

impl Process {
    /// A gateway of one model, `mock`, before this engine.
    async fn start(engine: &MockEngine) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json"]);
        command.args(["--model", "mock", "--worker", &engine.url()]);
        // Nobody shall change what is tested.
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the binary is there");
        let mut log = BufReader::new(child.stderr.take().expect("it is piped")).lines();
        let listening = async {
            while let Some(line) = log.next_line().await.expect("text") {
                if line.contains("\"message\":\"listening\"") {
                    let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
                    return line["address"].as_str().expect("an address").parse().expect("an address");
                }
            }
            panic!("it ends without listening");
        };
        let address = timeout(PATIENCE, listening).await.expect("it listens in time");
        let process = Self { child, log, address };
        let ready = async {
            while !ask(address, "GET /ready", "").await.starts_with("HTTP/1.1 200") {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, ready).await.expect("it is ready in time");
        process
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().expect("it runs").to_string();
        let sent = std::process::Command::new("kill").args(["-s", name, &id]).status().expect("kill is there");
        assert!(sent.success());
    }

    /// Waits for a line of the log.
    async fn says(&mut self, message: &str) {
        let said = async {
            while let Some(line) = self.log.next_line().await.expect("text") {
                if line.contains(message) {
                    return;
                }
            }
            panic!("it never says {message:?}");
        };
        timeout(PATIENCE, said).await.expect("it says so in time");
    }

    async fn exit(mut self) -> ExitStatus {
        timeout(PATIENCE, self.child.wait()).await.expect("it ends in time").expect("its end is seen")
    }
}

/// A whole answer, on a connection of its own.
async fn ask(address: SocketAddr, what: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    let length = body.len();
    let head = format!("{what} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).await.expect("the connection stands");
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer in time").expect("an answer");
    answer
}

/// A streamed answer of which the head and the first bytes have come.
async fn begun(address: SocketAddr, n: usize, max_tokens: u32) -> (TcpStream, String) {
    let body = format!(
        r#"{{"model":"mock","stream":true,"max_tokens":{max_tokens},"messages":[{{"role":"user","content":"client {n}"}}]}}"#
    );
    let length = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all((head + &body).as_bytes()).await.expect("the connection stands");
    let mut heard = Vec::new();
    while !String::from_utf8_lossy(&heard).contains("\r\n\r\n") || !String::from_utf8_lossy(&heard).contains("data: ") {
        let read = timeout(PATIENCE, stream.read_buf(&mut heard)).await.expect("a first byte in time");
        assert!(read.expect("the connection stands") > 0, "{}", String::from_utf8_lossy(&heard));
    }
    (stream, String::from_utf8(heard).expect("text"))
}

/// An engine whose answers last as long as they are to, `time_scale` virtual seconds a real one.
async fn engine(time_scale: f64) -> MockEngine {
    let config = MockConfig { time_scale, sequences_max: 2 * STREAMS as u32, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_with_500_open_streams_breaks_none() {
    // 100 steps of 14 ms, 20 times as slow: the signal comes long before the last of them.
    let engine = engine(0.05).await;
    let process = Process::start(&engine).await;
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

#[tokio::test]
async fn a_second_signal_ends_the_process_at_once() {
    let engine = engine(0.01).await;
    let mut process = Process::start(&engine).await;
    let (mut stream, mut heard) = begun(process.address, 0, 1000).await;
    process.signal("TERM");
    process.says("no new connections").await;
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
