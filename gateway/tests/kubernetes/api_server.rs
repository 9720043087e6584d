//! API server of a Kubernetes cluster in memory: lists and watches of namespaced objects, with bookmarks and expired
//! versions, and the discovery documents that `kubectl` reads.
//!
//! The objects survive the listener, which can be stopped and started again at the same port.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::selector::Selector;

/// Served collections: path of the API, plural, kind.
const COLLECTIONS: [(&str, &str, &str); 2] =
    [("api/v1", "pods", "Pod"), ("apis/inference.networking.k8s.io/v1", "inferencepools", "InferencePool")];

/// One change of one object. Its version is its position in the log, from 1.
struct ObjectChange {
    plural: &'static str,
    before: Option<Value>,
    after: Option<Value>,
}

#[derive(Default)]
struct Contents {
    /// By plural, namespace and name.
    objects: BTreeMap<(&'static str, String, String), Value>,
    log: Vec<ObjectChange>,
    /// Watches from lower versions have expired.
    oldest: usize,
    /// Whether watches deliver nothing.
    is_held: bool,
    /// Status of every response instead of the normal ones.
    refusal: Option<StatusCode>,
    /// Required bearer token.
    token: Option<String>,
    /// Started watches.
    watches: usize,
    /// Watches that failed with status 410.
    expired: usize,
}

#[derive(Default)]
struct Store {
    contents: Mutex<Contents>,
    /// Wakes open watches. The value is the number of forced disconnections.
    changed: watch::Sender<u64>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().expect("no panic")
    }
}

/// The server and its objects.
pub(super) struct ApiServer {
    store: Arc<Store>,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    serving: Option<JoinHandle<()>>,
}

impl ApiServer {
    pub(super) async fn start() -> Self {
        Self::start_with(None).await
    }

    pub(super) async fn start_with(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut server = Self { store: Arc::default(), address, tls, serving: None };
        server.serve(listener);
        server
    }

    fn serve(&mut self, listener: TcpListener) {
        let app = Router::new().fallback(respond).with_state(Arc::clone(&self.store));
        self.serving = Some(tokio::spawn(accept(listener, app, self.tls.clone())));
    }

    pub(super) fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Closes all connections. Further ones are refused.
    pub(super) async fn stop(&mut self) {
        let serving = self.serving.take().expect("the server is running");
        serving.abort();
        assert!(serving.await.expect_err("aborted").is_cancelled());
    }

    /// Listens again.
    pub(super) async fn restart(&mut self) {
        let listener = TcpListener::bind(self.address).await.expect("the port is still free");
        self.serve(listener);
    }

    /// Adds or replaces an object.
    pub(super) fn put(&self, object: Value) {
        let plural = COLLECTIONS.iter().find(|(_, _, kind)| object["kind"] == *kind).expect("a served kind").1;
        let text = |field: &str| object["metadata"][field].as_str().expect("a text").to_owned();
        let key = (plural, text("namespace"), text("name"));
        self.change(|contents| {
            let mut object = object;
            object["metadata"]["resourceVersion"] = json!((contents.log.len() + 1).to_string());
            let before = contents.objects.insert(key, object.clone());
            contents.log.push(ObjectChange { plural, before, after: Some(object) });
        });
    }

    pub(super) fn delete(&self, plural: &'static str, namespace: &str, name: &str) {
        self.change(|contents| {
            let before = contents.objects.remove(&(plural, namespace.to_owned(), name.to_owned()));
            assert!(before.is_some(), "{plural} {namespace}/{name} exists");
            contents.log.push(ObjectChange { plural, before, after: None });
        });
    }

    /// Ends all watches. They continue from their last version.
    pub(super) fn disconnect(&self) {
        self.store.changed.send_modify(|disconnections| *disconnections += 1);
    }

    /// Delays all watch events until [`Self::release`] or [`Self::expire`].
    pub(super) fn hold(&self) {
        self.change(|contents| contents.is_held = true);
    }

    pub(super) fn release(&self) {
        self.change(|contents| contents.is_held = false);
    }

    /// Forgets all past versions. A watch that has not delivered the latest one fails with status 410.
    pub(super) fn expire(&self) {
        self.change(|contents| {
            contents.is_held = false;
            contents.oldest = contents.log.len();
        });
    }

    /// Answers every request with this status, and ends all watches.
    pub(super) fn refuse(&self, status: Option<StatusCode>) {
        self.change(|contents| contents.refusal = status);
        self.disconnect();
    }

    /// Requires this token of all requests.
    pub(super) fn require_token(&self, token: &str) {
        self.change(|contents| contents.token = Some(token.to_owned()));
    }

    /// Number of watches that failed with status 410.
    pub(super) fn expired(&self) -> usize {
        self.store.lock().expired
    }

    fn change(&self, change: impl FnOnce(&mut Contents)) {
        change(&mut self.store.lock());
        self.store.changed.send_modify(|_| {});
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

/// Owns all connections, so that its end closes them.
async fn accept(listener: TcpListener, app: Router, tls: Option<TlsAcceptor>) {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            biased;
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => continue,
            },
        };
        let (service, tls) = (TowerToHyperService::new(app.clone()), tls.clone());
        connections.spawn(async move {
            // A client may leave at any time.
            match tls {
                Some(tls) => {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                }
                None => drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await),
            }
        });
    }
}

async fn respond(State(store): State<Arc<Store>>, request: Request) -> Response {
    if let Some(status) = store.lock().refusal {
        return failure(status, "refused");
    }
    let path = request.uri().path().trim_matches('/').to_owned();
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let wanted = store.lock().token.as_ref().map(|token| format!("Bearer {token}"));
    if wanted.is_some() && wanted.as_deref() != given {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized");
    }
    if let Some(document) = discovery_document(&path) {
        return axum::Json(document).into_response();
    }
    let Query(parameters) = Query::<BTreeMap<String, String>>::try_from_uri(request.uri()).expect("a query");
    let collection = COLLECTIONS.into_iter().find_map(|(api, plural, kind)| {
        let rest = path.strip_prefix(&format!("{api}/namespaces/"))?;
        let (namespace, rest) = rest.split_once('/')?;
        let name = rest.strip_prefix(plural)?;
        let name = if name.is_empty() { None } else { Some(name.strip_prefix('/')?.to_owned()) };
        Some((api, plural, kind, namespace.to_owned(), name))
    });
    let Some((api, plural, kind, namespace, name)) = collection else {
        return failure(StatusCode::NOT_FOUND, "the server could not find the requested resource");
    };
    let version = api.split_once('/').map_or("", |(_, version)| version);
    let text = |name: &str| parameters.get(name).map_or("", String::as_str);
    let selector = Selector::parse(text("labelSelector"), text("fieldSelector"), name, namespace);
    if matches!(text("watch"), "1" | "true") {
        return watch_objects(store, plural, version, kind, selector, text("resourceVersion"));
    }
    let contents = store.lock();
    let of_kind = contents.objects.iter().filter(|((of, _, _), _)| *of == plural).map(|(_, object)| object);
    let items: Vec<&Value> = of_kind.filter(|object| selector.selects(object)).collect();
    if selector.names_one() {
        return match items.first() {
            Some(object) => axum::Json(object).into_response(),
            None => failure(StatusCode::NOT_FOUND, "not found"),
        };
    }
    let metadata = json!({ "resourceVersion": contents.log.len().to_string() });
    let (kind, items) = (format!("{kind}List"), json!(items));
    axum::Json(json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "items": items })).into_response()
}

/// A stream of JSON lines that ends at a disconnection.
fn watch_objects(
    store: Arc<Store>,
    plural: &'static str,
    version: &str,
    kind: &'static str,
    selector: Selector,
    from: &str,
) -> Response {
    let from = {
        let mut contents = store.lock();
        contents.watches += 1;
        let from = from.parse().unwrap_or(contents.log.len());
        // Real servers report expiry in either form.
        if from < contents.oldest && contents.watches.is_multiple_of(2) {
            contents.expired += 1;
            return failure(StatusCode::GONE, "too old resource version");
        }
        from
    };
    let (sender, lines) = mpsc::channel(1);
    tokio::spawn(send_lines(store, plural, (version.to_owned(), kind), selector, from, sender));
    let lines = ReceiverStream::new(lines).map(|lines: String| Ok::<_, Infallible>(Bytes::from(lines)));
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

/// Sends the events after version `next` until the client leaves, the version expires, or a disconnection.
async fn send_lines(
    store: Arc<Store>,
    plural: &'static str,
    (version, kind): (String, &'static str),
    selector: Selector,
    mut next: usize,
    sender: mpsc::Sender<String>,
) {
    let mut changed = store.changed.subscribe();
    let disconnections = *changed.borrow_and_update();
    while *changed.borrow_and_update() == disconnections {
        let (lines, is_expired) = store.lock().lines_since(&mut next, plural, (&version, kind), &selector);
        let is_sent = lines.is_empty() || sender.send(lines).await.is_ok();
        if is_expired || !is_sent {
            return;
        }
        tokio::select! {
            biased;
            () = sender.closed() => return,
            _ = changed.changed() => {}
        }
    }
}

impl Contents {
    /// The watch events after version `next`, which advances to the latest version, and whether the watch has expired.
    fn lines_since(
        &mut self,
        next: &mut usize,
        plural: &str,
        (version, kind): (&str, &str),
        selector: &Selector,
    ) -> (String, bool) {
        if self.is_held || *next == self.log.len() {
            return (String::new(), false);
        }
        let line = |verb: &str, object: &Value| format!("{}\n", json!({ "type": verb, "object": object }));
        if *next < self.oldest {
            self.expired += 1;
            return (line("ERROR", &status(StatusCode::GONE, "too old resource version")), true);
        }
        let mut lines = String::new();
        for (n, change) in self.log.iter().enumerate().skip(*next).filter(|(_, change)| change.plural == plural) {
            let selects = |object: &Option<Value>| object.as_ref().is_some_and(|object| selector.selects(object));
            let (verb, object) = match (selects(&change.before), selects(&change.after)) {
                (false, false) => continue,
                (false, true) => ("ADDED", &change.after),
                (true, true) => ("MODIFIED", &change.after),
                (true, false) => ("DELETED", &change.before),
            };
            let mut object = object.clone().expect("it is selected");
            object["metadata"]["resourceVersion"] = json!((n + 1).to_string());
            lines += &line(verb, &object);
        }
        *next = self.log.len();
        let metadata = json!({ "resourceVersion": next.to_string() });
        lines += &line("BOOKMARK", &json!({ "apiVersion": version, "kind": kind, "metadata": metadata }));
        (lines, false)
    }
}

fn status(code: StatusCode, message: &str) -> Value {
    let reason = match code {
        StatusCode::GONE => "Expired",
        StatusCode::UNAUTHORIZED => "Unauthorized",
        _ => "NotFound",
    };
    let code = code.as_u16();
    json!({ "apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "reason": reason, "code": code })
}

fn failure(code: StatusCode, message: &str) -> Response {
    (code, axum::Json(status(code, message))).into_response()
}

/// Versions, groups and resources.
fn discovery_document(path: &str) -> Option<Value> {
    let version_of = |api: &str| api.strip_prefix("apis/").unwrap_or("v1").to_owned();
    if path == "api" {
        return Some(json!({ "kind": "APIVersions", "versions": ["v1"] }));
    }
    if path == "apis" {
        let groups = COLLECTIONS.iter().filter_map(|(api, _, _)| {
            let (group, version) = api.strip_prefix("apis/")?.split_once('/')?;
            let version = json!({ "groupVersion": format!("{group}/{version}"), "version": version });
            Some(json!({ "name": group, "versions": [version], "preferredVersion": version }))
        });
        return Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups.collect::<Vec<_>>() }));
    }
    let (api, plural, kind) = COLLECTIONS.iter().find(|(api, _, _)| path == *api)?;
    let singular = plural.trim_end_matches('s');
    let verbs = ["get", "list", "watch"];
    let resource =
        json!({ "name": plural, "singularName": singular, "namespaced": true, "kind": kind, "verbs": verbs });
    let version = version_of(api);
    Some(json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [resource] }))
}
