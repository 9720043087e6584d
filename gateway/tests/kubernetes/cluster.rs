//! Pods and pools of a test, the engines behind their addresses, and a gateway process that watches them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::routing::{MethodRouter, get, post};
use pointsman::protocol::WorkerId;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::Semaphore;
use tokio::time::{Duration, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;

use crate::common::directory::Directory;
use crate::common::process::{Process, serve};
use crate::common::proxy::{self, PATIENCE};

pub(super) const NAMESPACE: &str = "llm";
const TOKEN: &str = "admin-token-0123456789";

/// Endpoints by worker id.
pub(super) type Workers = BTreeMap<String, String>;

/// A pod of the namespace. Its address is one of the loopback addresses that engines listen at.
#[derive(Clone, Debug)]
pub(super) struct TestPod {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) ip: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) is_ready: bool,
    pub(super) is_terminating: bool,
}

impl TestPod {
    /// A ready pod with the label `app=engine`.
    pub(super) fn ready(name: &str, uid: &str, ip: &str) -> Self {
        Self {
            namespace: NAMESPACE.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            ip: ip.to_owned(),
            labels: BTreeMap::from([("app".to_owned(), "engine".to_owned())]),
            is_ready: true,
            is_terminating: false,
        }
    }

    pub(super) fn labelled(mut self, label: &str, value: &str) -> Self {
        self.labels.insert(label.to_owned(), value.to_owned());
        self
    }

    pub(super) fn object(&self) -> Value {
        let Self { namespace, name, uid, ip, labels, is_ready, is_terminating } = self;
        let mut metadata = json!({ "namespace": namespace, "name": name, "uid": uid, "labels": labels });
        if *is_terminating {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        let ready = if *is_ready { "True" } else { "False" };
        let conditions = json!([{ "type": "Ready", "status": ready }]);
        let status = json!({ "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }], "conditions": conditions });
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status })
    }

    /// The workers of this pod while it is selected.
    pub(super) fn workers(&self, ports: &[u16]) -> Workers {
        let Self { namespace, name, uid, ip, .. } = self;
        if !self.is_ready || self.is_terminating {
            return Workers::new();
        }
        let ip = ip.parse().expect("an address");
        let worker = |port: &u16| {
            let id = WorkerId::derived(&format!("kubernetes:{namespace}/{name}/{uid}:{port}"));
            (id.to_string(), format!("http://{}", SocketAddr::new(ip, *port)))
        };
        ports.iter().map(worker).collect()
    }
}

/// An `InferencePool` that selects pods by the label `app`.
pub(super) fn pool(app: &str, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({ "number": port })).collect();
    let picker = json!({ "name": "picker", "port": { "number": 9002 } });
    let selector = json!({ "matchLabels": { "app": app } });
    let spec = json!({ "selector": selector, "targetPorts": ports, "endpointPickerRef": picker });
    let metadata = json!({ "namespace": NAMESPACE, "name": "pool", "uid": "pool-1" });
    json!({ "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": metadata, "spec": spec })
}

/// Starts engines that answer at this port of every loopback address, also `[::1]` if the system has IPv6.
pub(super) async fn engines() -> u16 {
    start_engines(post(async || ([(CONTENT_TYPE, "application/json")], proxy::FINE_JSON))).await
}

async fn start_engines(completions: MethodRouter) -> u16 {
    let metrics = "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n";
    let models = json!({ "object": "list", "data": [{ "id": "mock", "parent": null }] });
    let app = Router::new()
        .route("/v1/models", get(async move || axum::Json(models)))
        .route("/metrics", get(async move || metrics))
        .route("/health", get(async || ""))
        .route("/v1/completions", completions);
    let listener = match TcpListener::bind("[::]:0").await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind("0.0.0.0:0").await.expect("a port"),
    };
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move { axum::serve(listener, app).await });
    port
}

/// Starts an engine at this port of every loopback address that streams: an event, and for a permit of `end` the rest.
pub(super) async fn streaming_engine(end: Arc<Semaphore>) -> u16 {
    let complete = async move || {
        let (sender, chunks) = tokio::sync::mpsc::channel::<Result<&str, Infallible>>(2);
        tokio::spawn(async move {
            let _ = sender.send(Ok(proxy::EVENT)).await;
            end.acquire().await.expect("open").forget();
            let _ = sender.send(Ok(proxy::FINE)).await;
        });
        ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(ReceiverStream::new(chunks)))
    };
    start_engines(post(complete)).await
}

/// A loopback address for the ports of this process alone. Tests of other processes on the machine have others.
pub(super) fn own_address(n: u8) -> String {
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{low}.{n}", 64 + high % 128)
}

/// Whether the system has IPv6.
pub(super) async fn has_ipv6() -> bool {
    TcpListener::bind("[::1]:0").await.is_ok()
}

impl Directory {
    /// A kubeconfig with these fields of cluster and user.
    pub(super) fn kubeconfig(&self, url: &str, cluster: &[(&str, &Path)], user: &Value) -> PathBuf {
        let mut of_cluster = json!({ "server": url });
        for (field, path) in cluster {
            of_cluster[*field] = json!(path);
        }
        let context = json!({ "cluster": "c", "user": "u", "namespace": NAMESPACE });
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": of_cluster }],
            "users": [{ "name": "u", "user": user }],
            "contexts": [{ "name": "x", "context": context }],
            "current-context": "x",
        });
        self.write("kubeconfig", config.to_string())
    }
}

/// Settings of a gateway with these models, each a name with the lines of its `[models.kubernetes]`.
pub(super) fn settings(models: &[(&str, String)]) -> String {
    let mut text = "[gateway]\nlisten = \"127.0.0.1:0\"\naccess_log = \"off\"\n[admin]\nlisten = \"127.0.0.1:0\"\n\
                    token_file = \"token\"\n[router]\nblock_size = 16\n"
        .to_owned();
    for (name, kubernetes) in models {
        text +=
            &format!("[[models]]\nname = \"{name}\"\nupstream_name = \"mock\"\n[models.kubernetes]\n{kubernetes}\n");
    }
    text
}

/// A gateway process and its files.
pub(super) struct WatchingGateway {
    pub(super) process: Process,
    pub(super) directory: Directory,
}

impl WatchingGateway {
    pub(super) async fn start(directory: Directory, settings: &str) -> Self {
        Self::start_as(serve(), directory, settings).await
    }

    /// Starts with the given command for `pointsman serve`.
    pub(super) async fn start_as(mut command: Command, directory: Directory, settings: &str) -> Self {
        directory.write("token", TOKEN);
        command.arg("--config").arg(directory.write("pointsman.toml", settings));
        Self { process: Process::start(command).await, directory }
    }

    /// Applies other settings.
    pub(super) async fn reload(&mut self, settings: &str) {
        self.directory.write("pointsman.toml", settings);
        self.process.signal("HUP");
        self.process.logged("configuration reloaded").await;
    }

    /// Response of the admin API.
    pub(super) async fn admin(&self, path: &str) -> String {
        let admin = self.process.admin.expect("an address for operators");
        let answer = proxy::request(admin, "GET", path, &format!("authorization: Bearer {TOKEN}\r\n"), b"").await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.text().to_owned()
    }

    async fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.admin(path).await).expect("JSON")
    }

    pub(super) async fn workers(&self, model: &str) -> Workers {
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let workers = self.worker_reports(model).await;
        workers.iter().map(|worker| (text(&worker["id"]), text(&worker["config"]["endpoint"]))).collect()
    }

    async fn worker_reports(&self, model: &str) -> Vec<Value> {
        let mut report = self.json(&format!("/admin/models/{model}/workers")).await;
        report["workers"].as_array_mut().map(std::mem::take).expect("a list")
    }

    /// Waits until the only worker drains, or until it does not.
    pub(super) async fn until_drains(&self, model: &str, drains: bool, what: &str) {
        proxy::eventually(
            what,
            async || matches!(&self.worker_reports(model).await[..], [worker] if worker["draining"] == drains),
        )
        .await;
    }

    /// Requests that the gateway has booked on the ranks of the model.
    pub(super) async fn active_requests(&self, model: &str) -> u64 {
        let workers = self.worker_reports(model).await;
        let ranks = workers.iter().flat_map(|worker| worker["ranks"].as_array().expect("a list"));
        ranks.map(|rank| rank["active_requests"].as_u64().expect("a number")).sum()
    }

    /// Endpoints of the KV event publishers of the workers.
    pub(super) async fn event_endpoints(&self, model: &str) -> Vec<Value> {
        let workers = self.worker_reports(model).await;
        workers.iter().map(|worker| worker["config"]["kv_events"]["endpoint"].clone()).collect()
    }

    /// The first discovery source of a model in the health report.
    pub(super) async fn source(&self, model: &str) -> Value {
        self.json(&format!("/admin/models/{model}/health")).await["discovery"][0].take()
    }

    /// Waits until these are the workers.
    pub(super) async fn until_workers(&self, model: &str, expected: &Workers, what: &str) {
        let wait = async {
            while self.workers(model).await != *expected {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(PATIENCE, wait).await.is_err() {
            let (found, source) = (self.workers(model).await, self.source(model).await);
            panic!("{what}: model {model} has the workers {found:?} instead of {expected:?}; {source}");
        }
    }

    /// Waits until the source of the model `m` satisfies a condition, and returns its report.
    pub(super) async fn until_source(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let wait = async {
            loop {
                let source = self.source("m").await;
                if holds(&source) {
                    return source;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        match timeout(PATIENCE, wait).await {
            Ok(source) => source,
            Err(_) => panic!("{what}: {}", self.source("m").await),
        }
    }

    /// A metric of the source of the model `m`; `None` before its first sample.
    pub(super) async fn stale_seconds(&self) -> Option<f64> {
        let page = self.admin("/metrics").await;
        let line = page.lines().find(|line| line.starts_with("pointsman_discovery_stale_seconds{"))?;
        line.rsplit(' ').next().map(|value| value.parse().expect("a number"))
    }

    /// A streamed completion whose first event has arrived, and its received bytes.
    pub(super) async fn begin_stream(&self) -> (TcpStream, Vec<u8>) {
        let body = br#"{"model":"m","prompt":[1,2,3],"max_tokens":8,"stream":true}"#;
        let headers = "content-type: application/json\r\n";
        let mut stream = proxy::send(self.process.address, "POST", "/v1/completions", headers, body).await;
        let mut received = Vec::new();
        let first = async {
            while !received.windows(6).any(|window| window == b"data: ") {
                assert_ne!(stream.read_buf(&mut received).await.expect("readable"), 0, "the stream ended");
            }
        };
        timeout(PATIENCE, first).await.expect("an event before the timeout");
        (stream, received)
    }

    /// Status of a completion.
    pub(super) async fn complete(&self) -> u16 {
        let body = br#"{"model":"m","prompt":[1,2,3],"max_tokens":1}"#;
        let headers = "content-type: application/json\r\n";
        proxy::request(self.process.address, "POST", "/v1/completions", headers, body).await.status
    }
}
