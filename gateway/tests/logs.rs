//! Logs of the gateway process: one access line per request, and lines about workers.
//!
//! The process and its files end with the test. Every wait has a generous limit.
#![cfg(unix)]

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use pointsman::policy::Policy;
use pointsman::protocol::KvEventsConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::common::directory::Directory;
use crate::common::proxy::{
    Act, Answer, PATIENCE, Scripted, answer, at_rest, gateway, post, ready, request, send, settings, stream,
    stream_end, until, worker,
};

const KEY: &str = "acme-key-0123456789";

/// A gateway process with a settings file.
struct Process {
    child: Child,
    address: SocketAddr,
    log: Lines,
    access: Lines,
    directory: Directory,
}

/// The lines of one output so far.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<Value>>>);

impl Lines {
    fn of(output: impl AsyncRead + Unpin + Send + 'static) -> Self {
        let lines = Self::default();
        let (read, mut output) = (lines.clone(), BufReader::new(output).lines());
        tokio::spawn(async move {
            while let Ok(Some(line)) = output.next_line().await {
                let line = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                read.0.lock().expect("lock not poisoned").push(line);
            }
        });
        lines
    }

    fn all(&self) -> Vec<Value> {
        self.0.lock().expect("lock not poisoned").clone()
    }

    /// The first line that satisfies the condition.
    async fn wait_for(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        until(what, || self.all().iter().any(&holds)).await;
        self.all().into_iter().find(holds).expect("it exists")
    }

    async fn message(&self, message: &str) -> Value {
        self.wait_for(message, |line| line["message"].as_str().is_some_and(|text| text.contains(message))).await
    }
}

impl Process {
    /// Starts `serve` with these settings in the directory of `files`.
    async fn start(settings: &str, files: &[(&str, &str)]) -> Self {
        let directory = Directory::new();
        for (file, content) in files.iter().chain(&[("gateway.toml", settings)]) {
            directory.write(file, content);
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json", "--config", "gateway.toml"]);
        command.current_dir(directory.path()).env_clear().kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary is there");
        let log = Lines::of(child.stderr.take().expect("stream is piped"));
        let access = Lines::of(child.stdout.take().expect("stream is piped"));
        let listening = log.wait_for("listening", |line| line["message"] == "listening").await;
        let address = listening["address"].as_str().expect("an address").parse().expect("an address");
        Self { child, address, log, access, directory }
    }

    async fn post(&self, id: &str, key: &str, body: &Value) -> Answer {
        let headers = format!(
            "x-request-id: {id}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\nsession-id: the-secret-session\r\n"
        );
        request(self.address, "POST", "/v1/chat/completions", &headers, body.to_string().as_bytes()).await
    }

    /// The access line of this request.
    async fn line(&self, id: &str) -> Value {
        self.access.wait_for(&format!("an access line of {id}"), |line| line["request_id"] == id).await
    }
}

/// The fields of a line that are equal in every run.
fn steady(line: &Value) -> Value {
    let mut steady = line.as_object().expect("an object").clone();
    for (field, is_required) in [("timestamp", true), ("duration_ms", true), ("ttft_ms", false)] {
        assert!(steady.remove(field).is_some() || !is_required, "{field} is missing: {line}");
    }
    steady.remove("request_id");
    steady.into()
}

const USAGE: &str = r#"{"prompt_tokens":40,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}"#;

const CHUNK: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";

fn script(n: usize) -> Vec<Act> {
    let whole = format!(
        r#"{{"choices":[{{"message":{{"role":"assistant","content":"hi"}},"finish_reason":"stop"}}],"usage":{USAGE}}}"#
    );
    let end = format!(
        "data: {{\"choices\":[{{\"delta\":{{\"content\":\"b\"}},\"finish_reason\":\"stop\"}}],\"usage\":{USAGE}}}\n\ndata: [DONE]\n\n"
    );
    match n {
        0 => stream(&[CHUNK, &end]).into_iter().chain([stream_end()]).collect(),
        1 => answer("200 OK", &whole),
        2 => stream(&[CHUNK]).into_iter().chain([Act::Close]).collect(),
        3 => answer("400 Bad Request", r#"{"error":{"message":"no"}}"#),
        4 => answer("500 Internal Server Error", ""),
        5 => answer("200 OK", &whole),
        6 => stream(&[CHUNK, &end]).into_iter().chain([Act::Hang]).collect(),
        _ => vec![Act::Hang],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_writes_one_access_line() {
    let worker = Scripted::start(script).await;
    let settings = format!(
        r#"
        gateway.salt_secret_file = "salt"
        [router]
        policy = "round_robin"
        health.probe_interval_ms = 0
        [[models]]
        name = "mock"
        [[models.workers]]
        url = "{}"
        data_parallel_size = 2
        [models.tokens]
        source = "none"
        [[tenants]]
        name = "acme"
        keys_file = "keys"
        "#,
        worker.url()
    );
    let files = [("salt", "0123456789abcdef0123456789abcdef"), ("keys", KEY)];
    let process = Process::start(&settings, &files).await;
    ready(process.address).await;
    process.log.message("worker joined").await;
    let chat = |stream: bool| json!({ "model": "mock", "stream": stream, "messages": [{ "role": "user", "content": "the secret prompt" }] });

    assert_eq!(process.post("streamed", KEY, &chat(true)).await.status, 200);
    assert_eq!(process.post("whole", KEY, &chat(false)).await.status, 200);
    process.post("broken", KEY, &chat(true)).await;
    assert_eq!(process.post("bad", KEY, &chat(false)).await.status, 400);
    assert_eq!(process.post("retried", KEY, &chat(false)).await.status, 200);
    assert_eq!(process.post("stranger", "not-a-key-0123456789", &chat(false)).await.status, 401);
    let unknown = json!({ "model": "the secret prompt", "messages": [] });
    assert_eq!(process.post("unknown", KEY, &unknown).await.status, 404);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let context = format!("traceparent: 00-{trace}-b7ad6b7169203331-01\r\n");
    let headers = format!("x-request-id: lost\r\nauthorization: Bearer {KEY}\r\n{context}");
    assert_eq!(request(process.address, "GET", "/v1/nothing?key=the-secret", &headers, b"").await.status, 404);
    assert_eq!(request(process.address, "GET", "/ready", "x-request-id: probe\r\n", b"").await.status, 200);
    let headers = format!("x-request-id: left\r\nsession-id: the-secret-session\r\nauthorization: Bearer {KEY}\r\n");
    let mut client =
        send(process.address, "POST", "/v1/chat/completions", &headers, chat(true).to_string().as_bytes()).await;
    let mut received = Vec::new();
    while !received.ends_with(b"data: [DONE]\n\n\r\n") {
        assert_ne!(client.read_buf(&mut received).await.expect("a stream"), 0, "{received:?}");
    }
    drop(client);
    let headers = format!("x-request-id: gone\r\nauthorization: Bearer {KEY}\r\n{context}");
    let body = chat(false).to_string();
    let client = send(process.address, "POST", "/v1/chat/completions", &headers, body.as_bytes()).await;
    until("the worker has it", || worker.requests().len() == 8).await;
    drop(client);

    let url = worker.url();
    let session = process.line("streamed").await["session"].clone();
    assert!(session.as_str().is_some_and(|digest| digest.len() == 32), "{session}");
    let placed = |line: &Value| {
        assert!(line["rank"].as_u64().is_some_and(|rank| rank < 2), "{line}");
        let mut line = steady(line);
        assert!(line["worker_id"].is_string() && line["decision"].is_u64() && line["route_ms"].is_f64(), "{line}");
        for field in ["rank", "worker_id", "decision", "route_ms"] {
            line.as_object_mut().expect("an object").remove(field);
        }
        line
    };
    let expected = |fields: Value| {
        let mut line = json!({ "tenant": "acme", "endpoint": "chat", "model": "mock", "worker": url, "attempts": 1, "tokens": "off", "predicted_cached_tokens": 0, "session": session, "program": session });
        for (name, value) in fields.as_object().expect("fields") {
            line[name] = value.clone();
        }
        line
    };
    let streamed = process.line("streamed").await;
    assert!(
        streamed["ttft_ms"].as_f64() <= streamed["duration_ms"].as_f64() && streamed["ttft_ms"].is_f64(),
        "{streamed}"
    );
    let used = json!({ "status": 200, "outcome": "ok", "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 2 });
    assert_eq!(placed(&streamed), expected(used.clone()));
    let whole = process.line("whole").await;
    assert_eq!((placed(&whole), &whole["ttft_ms"]), (expected(used.clone()), &Value::Null));
    assert_eq!(placed(&process.line("left").await), expected(used.clone()), "a client that leaves at the end mark");
    let broken = placed(&process.line("broken").await);
    assert_eq!(broken, expected(json!({ "status": 200, "outcome": "broken", "output_tokens": 1 })));
    let bad = placed(&process.line("bad").await);
    assert_eq!((&bad["status"], &bad["outcome"], &bad["worker"]), (&json!(400), &json!("worker_error"), &json!(url)));
    let retried = placed(&process.line("retried").await);
    assert_eq!((&retried["status"], &retried["attempts"], &retried["outcome"]), (&json!(200), &json!(2), &json!("ok")));
    assert_eq!(retried["retry_reasons"], "server_error");
    let stranger = steady(&process.line("stranger").await);
    let refused =
        json!({ "endpoint": "chat", "status": 401, "outcome": "refused", "error": "invalid_api_key", "attempts": 0 });
    assert_eq!(stranger, refused);
    let unknown = steady(&process.line("unknown").await);
    let refused = json!({ "tenant": "acme", "endpoint": "chat", "status": 404, "outcome": "refused", "error": "model_not_found", "attempts": 0 });
    assert_eq!(unknown, refused);
    let lost = steady(&process.line("lost").await);
    let refused = json!({ "endpoint": "other", "path": "/v1/nothing", "status": 404, "outcome": "refused", "error": "path_not_found", "attempts": 0, "trace_id": trace });
    assert_eq!(lost, refused);
    let gone = process.line("gone").await;
    assert_eq!(gone["trace_id"], trace);
    assert_eq!((&gone["status"], &gone["outcome"], &gone["worker"]), (&json!(499), &json!("client_gone"), &json!(url)));

    let lines = process.access.all();
    assert_eq!(lines.len(), 10, "one line for each request, none for a probe: {lines:?}");
    // A warning about a request contains its id and its worker, each quoted once.
    let cut_off = process.log.message("response cut off").await;
    assert_eq!((&cut_off["request_id"], &cut_off["worker"]), (&json!("broken"), &json!(url)));
    let text = serde_json::to_string(&[lines, process.log.all()]).expect("text");
    for secret in ["the secret prompt", "the-secret", KEY, "not-a-key", "\"spans\"", "pointsman_gateway::access"] {
        assert!(!text.contains(secret), "{secret}: {text}");
    }
}

/// Cause: the access log recorded such responses as successes, although the client received an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_message_is_incomplete_in_the_access_log() {
    let worker = Scripted::start(|n| match n {
        0 => stream(&[CHUNK, "data: [DONE]\n\n"]).into_iter().chain([stream_end()]).collect(),
        _ => answer("200 OK", r#"{"choices":[{"message":{"content":"a"}}]}"#),
    })
    .await;
    let settings = format!(
        "[[models]]\nname = \"mock\"\n[[models.workers]]\nurl = \"{}\"\n[models.tokens]\nsource = \"none\"\n",
        worker.url()
    );
    let process = Process::start(&settings, &[]).await;
    ready(process.address).await;
    for n in 0..2 {
        let messages = [json!({ "role": "user", "content": "hi" })];
        let body = json!({ "model": "mock", "max_tokens": 9, "stream": n == 0, "messages": messages }).to_string();
        let headers = format!("x-request-id: r{n}\r\ncontent-type: application/json\r\n");
        let got = request(process.address, "POST", "/v1/messages", &headers, body.as_bytes()).await;
        assert_eq!(got.status, if n == 0 { 200 } else { 502 });
        assert_eq!(process.line(&format!("r{n}")).await["outcome"], "incomplete", "{n}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_access_log_supports_files_and_off() {
    let worker = Scripted::start(|_| script(1)).await;
    let settings = |access_log: &str| {
        format!(
            "gateway.access_log = \"{access_log}\"\n[[models]]\nname = \"mock\"\n[[models.workers]]\nurl = \"{}\"\n\
             [models.tokens]\nsource = \"none\"\n",
            worker.url()
        )
    };
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    let directory = Directory::new();
    let file = directory.path().join("access.jsonl");
    let mut process = Process::start(&settings(file.to_str().expect("text")), &[]).await;
    ready(process.address).await;
    assert_eq!(process.post("one", KEY, &chat).await.status, 200);
    end(&mut process.child).await;
    let written = std::fs::read_to_string(&file).expect("file is readable");
    let mode = std::fs::metadata(&file).expect("the file exists").permissions().mode();
    assert_eq!(mode & 0o007, 0, "other users cannot read {mode:o}");
    let line: Value = serde_json::from_str(&written).expect("one JSON line");
    assert_eq!((&line["request_id"], &line["status"]), (&json!("one"), &json!(200)));
    assert_eq!(process.access.all(), Vec::<Value>::new());

    let mut process = Process::start(&settings("off"), &[]).await;
    ready(process.address).await;
    assert_eq!(process.post("one", KEY, &chat).await.status, 200);
    end(&mut process.child).await;
    assert_eq!(process.access.all(), Vec::<Value>::new());
}

/// Stops the process in order, which flushes its logs.
async fn end(child: &mut Child) {
    let id = child.id().expect("process is running").to_string();
    assert!(std::process::Command::new("kill").args(["-s", "TERM", &id]).status().expect("kill is there").success());
    let ended = timeout(PATIENCE, child.wait()).await.expect("end before the timeout").expect("exit status");
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_follows_workers_by_their_endpoints() {
    let worker = Scripted::start(|_| answer("200 OK", "{}")).await;
    // The port of a stopped listener refuses connections.
    let gone = Scripted::start(|_| Vec::new()).await.url();
    let settings = r#"
        [admin]
        listen = "127.0.0.1:0"
        token_file = "token"
        [router]
        health.probe_interval_ms = 20
        [[models]]
        name = "mock"
        workers_file = "workers.json"
        [models.tokens]
        source = "none"
    "#;
    let process = Process::start(settings, &[("workers.json", "garbage"), ("token", "0123456789abcdef")]).await;
    let listening = process.log.message("listening").await;
    assert!(listening["admin_address"].as_str().is_some_and(|it| it.parse::<SocketAddr>().is_ok()), "{listening}");
    let failed = process.log.message("discovery source failed").await;
    assert!(
        failed["message"].as_str().is_some_and(|it| it.ends_with("it has not returned any workers yet")),
        "{failed}"
    );
    assert_eq!((&failed["pool"], &failed["level"]), (&json!("mock"), &json!("WARN")));

    let write = |workers: &[&str]| {
        let workers: Vec<Value> = workers.iter().map(|url| json!({ "url": url })).collect();
        let next = process.directory.write("next.json", json!({ "workers": workers }).to_string());
        std::fs::rename(&next, next.with_file_name("workers.json")).expect("file renamed");
    };
    let url = worker.url();
    let of =
        |message: &'static str, url: String| move |line: &Value| line["message"] == message && line["worker"] == url;
    write(&[&url, &gone]);
    let recovered = process.log.message("discovery source recovered").await;
    assert_eq!(recovered["workers"], json!(2));
    let joined = process.log.wait_for("worker joined", of("worker joined", url.clone())).await;
    assert_eq!((&joined["ranks"], &joined["source"]), (&json!(1), &recovered["source"]), "{joined}");
    let ejected = process.log.wait_for("the rank is ejected", of("rank ejected", gone)).await;
    assert_eq!((&ejected["rank"], &ejected["level"]), (&json!(0), &json!("WARN")));
    write(&[]);
    process.log.wait_for("worker left", of("worker left", url)).await;
    process.directory.write("workers.json", "garbage");
    let in_force = "its last valid set of workers stays in force";
    process
        .log
        .wait_for("source failed again", |line| line["message"].as_str().is_some_and(|it| it.ends_with(in_force)))
        .await;
}

/// After a restart of the gateway, engines hold cached blocks whose events the gateway has not read.
#[tokio::test]
async fn hits_without_events_raise_no_alarm() {
    let engine = Scripted::start(|_| script(1)).await;
    let unread =
        KvEventsConfig { endpoint: "tcp://127.0.0.1:9".to_owned(), replay_endpoint: None, topic: String::new() };
    let mut worker = worker(1, &engine.url(), 1);
    worker.config.kv_events = Some(unread);
    let mut settings = settings(vec![worker]);
    settings.models[0].router.policy = Policy::Latency.into(); // looks prompts up in the index
    let gateway = gateway(settings).await;
    // As many requests as raise the alarm if the hashes of index and engine differ. Each prompt is new to the gateway,
    // so it predicts no hits.
    for n in 0..65 {
        let prompt: Vec<u32> = (n * 1000..).take(200).collect();
        let answer = post(&gateway, "/v1/completions", &json!({ "model": "mock", "prompt": prompt })).await;
        assert_eq!(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], json!(16));
    }
    at_rest(&gateway).await;
    let problems = gateway.router("mock").expect("model is served").health().problems;
    assert!(!problems.iter().any(|doubt| doubt.contains("hash")), "{problems:?}");
}
