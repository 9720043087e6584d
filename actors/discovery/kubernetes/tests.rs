//! The source against a fake API server on loopback.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use super::*;
use crate::config::RouterConfig;

const PATIENCE: Duration = Duration::from_secs(60);

/// Objects by path of their collection and by name, each with its version, and the connection state.
#[derive(Default)]
struct Cluster {
    pods: BTreeMap<String, Value>,
    pool: Option<Value>,
    /// Watch events with their versions; the version of the server is their number.
    log: Vec<(&'static str, Value)>,
    /// Watches from versions below have expired.
    oldest: usize,
    /// Status of every response instead of the normal ones.
    refusal: Option<u16>,
}

/// API server for the pods of one namespace and one pool, and mock engine on every other path.
#[derive(Clone)]
struct Server {
    cluster: Arc<Mutex<Cluster>>,
    /// Changes wake open watches; the value is the number of forced disconnections.
    changed: Arc<watch::Sender<u64>>,
    port: u16,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let server = Self { cluster: Arc::default(), changed: Arc::new(watch::channel(0).0), port };
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(accepting.clone().serve(stream));
            }
        });
        server
    }

    /// Changes the cluster.
    fn change(&self, change: impl FnOnce(&mut Cluster)) {
        change(&mut self.cluster.lock().expect("no panic"));
        self.changed.send_modify(|_| {});
    }

    /// Ends all open watches.
    fn disconnect(&self) {
        self.changed.send_modify(|disconnections| *disconnections += 1);
    }

    fn put(&self, name: &str, uid: &str, app: &str, ready: bool, terminating: bool) {
        let mut metadata = json!({ "name": name, "namespace": "llm", "uid": uid, "labels": { "app": app } });
        if terminating {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        let ready = if ready { "True" } else { "False" };
        let status = json!({ "podIP": "127.0.0.1", "conditions": [{ "type": "Ready", "status": ready }] });
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status });
        self.change(|cluster| {
            let kind = if cluster.pods.insert(name.to_owned(), pod.clone()).is_some() { "MODIFIED" } else { "ADDED" };
            cluster.log.push((kind, pod));
        });
    }

    fn delete(&self, name: &str) {
        self.change(|cluster| {
            let pod = cluster.pods.remove(name).expect("the pod exists");
            cluster.log.push(("DELETED", pod));
        });
    }

    fn set_pool(&self, app: &str, ports: &[u16]) {
        let ports: Vec<Value> = ports.iter().map(|port| json!({ "number": port })).collect();
        let spec = json!({ "selector": { "matchLabels": { "app": app } }, "targetPorts": ports, "later": 1 });
        let (group, kind) = ("inference.networking.k8s.io/v1", "InferencePool");
        let metadata = json!({ "name": "pool", "namespace": "llm", "uid": "p" });
        let pool = json!({ "apiVersion": group, "kind": kind, "metadata": metadata, "spec": spec });
        self.change(|cluster| {
            let verb = if cluster.pool.replace(pool.clone()).is_some() { "MODIFIED" } else { "ADDED" };
            cluster.log.push((verb, pool));
        });
    }

    async fn serve(self, mut stream: TcpStream) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else { return };
            request.push(byte);
        }
        let request = String::from_utf8_lossy(&request).into_owned();
        let target = request.split(' ').nth(1).unwrap_or_default().to_owned();
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let kind = match path {
            "/api/v1/namespaces/llm/pods" => "Pod",
            "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools" => "InferencePool",
            path => return answer(&mut stream, engine(path)).await,
        };
        let parameter = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}=")));
        let app = parameter("labelSelector").and_then(|selector| selector.strip_prefix("app%3D")).map(str::to_owned);
        let selects = |object: &Value| {
            object["kind"] == kind && app.as_ref().is_none_or(|app| object["metadata"]["labels"]["app"] == **app)
        };
        let versioned = |object: &Value, version: usize| {
            let mut object = object.clone();
            object["metadata"]["resourceVersion"] = json!(version.to_string());
            object
        };
        let refusal = self.cluster.lock().expect("no panic").refusal;
        if let Some(code) = refusal {
            return answer(&mut stream, (code, failure(code))).await;
        }
        if parameter("watch").is_none() {
            let list = {
                let cluster = self.cluster.lock().expect("no panic");
                let version = cluster.log.len();
                let objects = cluster.pods.values().chain(&cluster.pool).filter(|object| selects(object));
                let items: Vec<Value> = objects.map(|object| versioned(object, version)).collect();
                let metadata = json!({ "resourceVersion": version.to_string() });
                json!({ "apiVersion": "v1", "kind": format!("{kind}List"), "metadata": metadata, "items": items })
            };
            return answer(&mut stream, (200, list)).await;
        }
        let mut next: usize = parameter("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
        let mut changed = self.changed.subscribe();
        let disconnections = *changed.borrow_and_update();
        let mut is_alive = stream.write_all(head.as_bytes()).await.is_ok();
        while is_alive {
            let lines = {
                let cluster = self.cluster.lock().expect("no panic");
                let mut lines = String::new();
                if next < cluster.oldest {
                    lines.push_str(&format!("{}\n", json!({ "type": "ERROR", "object": failure(410) })));
                    is_alive = false;
                }
                for (version, (verb, object)) in cluster.log.iter().enumerate().skip(next) {
                    if is_alive && selects(object) {
                        let object = versioned(object, version + 1);
                        lines.push_str(&format!("{}\n", json!({ "type": verb, "object": object })));
                    }
                }
                next = cluster.log.len();
                let version = json!({ "resourceVersion": next.to_string() });
                let bookmark = json!({ "apiVersion": "v1", "kind": kind, "metadata": version });
                lines.push_str(&format!("{}\n", json!({ "type": "BOOKMARK", "object": bookmark })));
                lines
            };
            is_alive &= stream.write_all(lines.as_bytes()).await.is_ok();
            is_alive = is_alive && changed.changed().await.is_ok() && *changed.borrow_and_update() == disconnections;
        }
    }

    fn source(&self, selection: PodSelection) -> KubernetesPods {
        let url = format!("http://127.0.0.1:{}", self.port).parse().expect("an address");
        let client = Client::try_from(kube::Config::new(url)).expect("plain HTTP needs no files");
        let config = RouterConfig { block_size: Some(16), ..RouterConfig::default() };
        let options = ProbeOptions { interval: Duration::from_millis(5), ..ProbeOptions::of(&config).model("mock") };
        KubernetesPods::new(selection, options).namespace("llm").client(client)
    }

    fn labelled(&self) -> KubernetesPods {
        self.source(PodSelection::Labels { selector: "app=a".to_owned(), ports: vec![self.port] })
    }
}

fn failure(code: u16) -> Value {
    json!({ "apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "refused", "reason": "x", "code": code })
}

/// Responses of a vLLM engine.
fn engine(path: &str) -> (u16, Value) {
    match path {
        "/v1/models" => (200, json!({ "object": "list", "data": [{ "id": "mock", "parent": null }] })),
        "/metrics" => {
            let labels = "block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"";
            (200, Value::from(format!("vllm:cache_config_info{{{labels}}} 1.0\n")))
        }
        _ => (404, Value::Null),
    }
}

async fn answer(stream: &mut TcpStream, (status, body): (u16, Value)) {
    let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
    let length = body.len();
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    // A client may have left.
    let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
}

/// The next set that satisfies the condition; errors are skipped.
async fn set_with(source: &mut KubernetesPods, holds: impl Fn(&WorkerMap) -> bool) -> WorkerMap {
    let wait = async {
        loop {
            if let Some(Ok(set)) = source.next().await
                && holds(&set)
            {
                return set;
            }
        }
    };
    timeout(PATIENCE, wait).await.expect("the set is published")
}

/// The next error; no set may be published before it.
async fn next_error(source: &mut KubernetesPods) -> String {
    match timeout(PATIENCE, source.next()).await.expect("an error is reported") {
        Some(Err(error)) => error.to_string(),
        other => panic!("{other:?} instead of an error"),
    }
}

#[tokio::test]
async fn a_pod_is_a_worker_from_ready_to_terminating() {
    let server = Server::start().await;
    server.put("e", "1", "a", false, false);
    let mut source = server.labelled();
    assert_eq!(set_with(&mut source, |_| true).await.len(), 0, "not ready");
    server.put("e", "1", "a", true, false);
    let set = set_with(&mut source, |set| set.len() == 1).await;
    let (first, config) = set.into_iter().next().expect("one worker");
    assert_eq!(config.endpoint, format!("http://127.0.0.1:{}", server.port));
    assert_eq!(config.total_kv_blocks, Some(100), "facts come from the probe");
    let drains = |set: &WorkerMap| set.get(&first).map(|config| config.drain);
    server.put("e", "1", "a", false, false);
    assert_eq!(drains(&set_with(&mut source, |_| true).await), Some(true), "not ready again");
    server.put("e", "1", "a", true, false);
    assert_eq!(drains(&set_with(&mut source, |_| true).await), Some(false), "ready again");
    server.put("e", "1", "a", true, true);
    assert_eq!(drains(&set_with(&mut source, |_| true).await), Some(true), "terminating");
    server.delete("e");
    assert_eq!(set_with(&mut source, |_| true).await.len(), 0, "gone");
    server.put("e", "2", "a", true, false);
    let set = set_with(&mut source, |set| set.len() == 1).await;
    assert!(!set.contains_key(&first), "a new pod at the same address is a new worker");
}

#[tokio::test]
async fn failed_watches_keep_the_workers_and_name_the_reason() {
    let server = Server::start().await;
    server.put("e", "1", "a", true, false);
    let mut source = server.labelled();
    set_with(&mut source, |set| set.len() == 1).await;
    server.change(|cluster| cluster.refusal = Some(403));
    server.disconnect();
    let error = next_error(&mut source).await;
    assert!(error.starts_with("pods of namespace llm cannot be watched since 20"), "{error}");
    assert!(error.contains("forbidden (status 403), the role needs the verbs get, list and watch"), "{error}");
    server.change(|cluster| cluster.refusal = None);
    assert_eq!(set_with(&mut source, |_| true).await.len(), 1, "the set after the error resolves it");
    server.change(|cluster| cluster.refusal = Some(500));
    server.disconnect();
    assert!(next_error(&mut source).await.contains("status 500"));
    server.put("f", "2", "a", true, false);
    server.change(|cluster| cluster.refusal = None);
    assert_eq!(set_with(&mut source, |set| set.len() == 2).await.len(), 2, "missed changes are listed");
}

#[tokio::test]
async fn an_expired_watch_lists_again() {
    let server = Server::start().await;
    server.put("e", "1", "a", true, false);
    let mut source = server.labelled();
    let before = set_with(&mut source, |set| set.len() == 1).await;
    // Both changes are unknown to the watch, which expires.
    server.change(|cluster| {
        let mut pod = cluster.pods.remove("e").expect("the pod exists");
        (pod["metadata"]["name"], pod["metadata"]["uid"]) = (json!("f"), json!("2"));
        cluster.pods.insert("f".to_owned(), pod);
        cluster.log.extend([("BOOKMARK", json!({})), ("BOOKMARK", json!({}))]);
        cluster.oldest = cluster.log.len();
    });
    let after = set_with(&mut source, |set| set.len() == 1 && *set != before).await;
    assert!(before.keys().all(|id| !after.contains_key(id)));
}

#[tokio::test]
async fn a_pool_selects_pods_and_ports() {
    let server = Server::start().await;
    let other = Server::start().await;
    let mut source = server.source(PodSelection::InferencePool("pool".to_owned()));
    let error = next_error(&mut source).await;
    assert_eq!(error, "inferencepool llm/pool does not exist");
    server.put("one", "1", "a", true, false);
    server.put("two", "2", "b", true, false);
    server.set_pool("a", &[server.port, other.port]);
    let set = set_with(&mut source, |set| !set.is_empty()).await;
    let endpoints: Vec<u16> =
        set.values().filter_map(|config| config.endpoint.rsplit(':').next()?.parse().ok()).collect();
    assert_eq!(endpoints.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([server.port, other.port]));
    server.set_pool("b", &[server.port]);
    let second = loop {
        let next = set_with(&mut source, |_| true).await;
        if next.keys().all(|id| !set.contains_key(id)) && !next.is_empty() {
            break next;
        }
    };
    assert_eq!(second.len(), 1);
    server.change(|cluster| {
        let pool = cluster.pool.take().expect("the pool exists");
        cluster.log.push(("DELETED", pool));
    });
    assert_eq!(next_error(&mut source).await, "inferencepool llm/pool does not exist");
}

#[tokio::test]
async fn a_missing_resource_is_named() {
    let server = Server::start().await;
    server.change(|cluster| cluster.refusal = Some(404));
    let error = next_error(&mut server.source(PodSelection::InferencePool("pool".to_owned()))).await;
    assert!(error.starts_with("inferencepool llm/pool cannot be watched since "), "{error}");
    assert!(error.contains("is its CRD installed?"), "{error}");
}
