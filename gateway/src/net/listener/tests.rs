use std::error::Error as _;
use std::path::Path;

use axum::body::Body;
use axum::routing::get;
use http_body_util::BodyExt as _;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;

use super::super::tls;
use super::*;
use crate::formats::openai::ApiError;
use crate::observe::page::{Metrics, WorkerSeries};

/// Upper limit of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

fn options(name: &'static str) -> ListenerOptions {
    ListenerOptions {
        name,
        connections_max: 100,
        overflow: None,
        cores: Some(Cores::start().expect("threads")),
        budget: None,
        streams_max: 100,
        head_timeout: PATIENCE,
        stall_max: PATIENCE,
        busy_max: Duration::ZERO,
        tls: None,
    }
}

/// `/` returns the client address; `/hang` responds after a notification of `go`.
async fn start(options: ListenerOptions, go: &Arc<Notify>) -> Listener {
    let go = Arc::clone(go);
    let hang = async move || {
        go.notified().await;
        "done"
    };
    let unknown = async || (StatusCode::UNAUTHORIZED, "unknown");
    let peer = async |ConnectInfo(peer): ConnectInfo<SocketAddr>| peer.to_string();
    let routes = Router::new().route("/", get(peer)).route("/hang", get(hang)).route("/unknown", get(unknown));
    let socket = free_socket();
    Listener::start(socket, options, routes).expect("it has an address")
}

fn free_socket() -> TcpListener {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let reserved = Reserved::of(address, "test", false, &mut PassedSockets::default()).expect("a free port");
    reserved.listen().expect("nobody else has this port")
}

async fn connect(listener: &Listener) -> TcpStream {
    TcpStream::connect(listener.address()).await.expect("the listener listens")
}

fn get_of(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), path: &str) {
    stream.write_all(get_of(path).as_bytes()).await.expect("connection is open");
}

/// One response that ends in `end`.
async fn answer(stream: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut received = Vec::new();
    while !received.ends_with(end.as_bytes()) {
        let read = timeout(PATIENCE, stream.read_buf(&mut received)).await;
        let read = read.unwrap_or_else(|_| panic!("an answer in time after {:?}", String::from_utf8_lossy(&received)));
        assert!(read.expect("connection is open") > 0, "ended after {:?}", String::from_utf8_lossy(&received));
    }
    String::from_utf8(received).expect("text")
}

/// Reads until the other side closes or resets.
async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut received = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut received)).await.expect("end before the timeout");
    String::from_utf8(received).expect("text")
}

#[tokio::test]
async fn overflow_routes_serve_connections_above_the_limit() {
    let go = Arc::default();
    let routes = Router::new().route("/live", get(async || "live")).fallback(async || "too many");
    let overflow = Some(Overflow { connections_max: 1, routes });
    let listener = start(ListenerOptions { connections_max: 1, overflow, ..options("overflow") }, &go).await;
    let mut held = connect(&listener).await;
    send(&mut held, "/hang").await;
    for (path, expected) in [("/live", "live"), ("/", "too many"), ("/hang", "too many")] {
        let mut beyond = connect(&listener).await;
        send(&mut beyond, path).await;
        let answer = rest(&mut beyond).await;
        assert!(answer.contains("connection: close\r\n") && answer.ends_with(expected), "{path}: {answer}");
    }
    // An idle connection is closed, and the next one is accepted.
    let (mut mute, mut next) = (connect(&listener).await, connect(&listener).await);
    send(&mut next, "/live").await;
    assert_eq!(rest(&mut mute).await, "");
    assert!(rest(&mut next).await.ends_with("live"));
    go.notify_one();
    answer(&mut held, "done").await;
    drop(held);
    // The next connection, or one soon after, takes the free place.
    let served = async {
        loop {
            let mut stream = connect(&listener).await;
            send(&mut stream, "/").await;
            let own = stream.local_addr().expect("local address").to_string();
            if read_some(&mut stream).await.ends_with(&own) {
                return;
            }
        }
    };
    timeout(PATIENCE, served).await.expect("completed before the timeout");
}

/// Available bytes.
async fn read_some(stream: &mut TcpStream) -> String {
    let mut received = Vec::with_capacity(1024);
    timeout(PATIENCE, stream.read_buf(&mut received))
        .await
        .expect("response before the timeout")
        .expect("connection is open");
    String::from_utf8(received).expect("text")
}

#[tokio::test]
async fn a_drain_serves_open_connections_until_its_last_request() {
    let go = Arc::default();
    let listener = start(options("drained"), &go).await;
    let address = listener.address();
    let (mut fresh, mut used, mut busy) =
        (connect(&listener).await, connect(&listener).await, connect(&listener).await);
    send(&mut used, "/").await;
    let own = used.local_addr().expect("local address").to_string();
    answer(&mut used, &own).await;
    send(&mut busy, "/hang").await;
    send(&mut used, "/").await; // ensures that `busy` is accepted: connections are accepted in order
    answer(&mut used, &own).await;

    let draining = tokio::spawn(listener.drain(PATIENCE, || {}));
    let closed = async { while TcpStream::connect(address).await.is_ok() {} };
    timeout(PATIENCE, closed).await.expect("the listener is closed");
    // Every connection stays open as long as a request is in flight.
    send(&mut used, "/").await;
    let closing = rest(&mut used).await;
    assert!(closing.contains("connection: close\r\n") && closing.ends_with(&own), "{closing}");
    assert!(!draining.is_finished());
    go.notify_one();
    let last = rest(&mut busy).await;
    assert!(last.contains("connection: close\r\n") && last.ends_with("done"), "{last}");
    assert_eq!(rest(&mut fresh).await, "");
    assert_eq!(draining.await.expect("task ends without panic"), Drained { broken: 0 });
}

fn tls_data(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(file)
}

#[tokio::test]
async fn a_tls_listener_rejects_plain_http() {
    let tls = tls::server(&tls_data("test-only.crt"), &tls_data("test-only.key")).expect("valid certificate and key");
    let metrics = Metrics::install(WorkerSeries { workers_max: 1, render: |_| (String::new(), None) })
        .expect("no other recorder is installed");
    let listener = start(ListenerOptions { tls: Some(tls), ..options("tls-test") }, &Arc::default()).await;

    let mut roots = RootCertStore::empty();
    let own = CertificateDer::from_pem_file(tls_data("test-only.crt")).expect("valid PEM");
    roots.add(own).expect("valid certificate");
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring supports TLS 1.2 and 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from("localhost").expect("valid server name");
    let stream = connect(&listener).await;
    let address = stream.local_addr().expect("local address").to_string();
    let connector = TlsConnector::from(Arc::new(config));
    let stream = timeout(PATIENCE, connector.connect(name, stream))
        .await
        .expect("completed before the timeout")
        .expect("TLS handshake succeeds");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
    let (mut client, _) = http2(stream).await;
    assert_eq!(get_text(&mut client, "/").await, address);

    let mut plain = connect(&listener).await;
    send(&mut plain, "/").await;
    let mut received = Vec::new();
    let _ = timeout(PATIENCE, plain.read_to_end(&mut received)).await.expect("closed before the timeout");
    assert!(!received.starts_with(b"HTTP"), "{received:?}");
    let counted = async {
        // The core counts after the connection is closed.
        loop {
            let page = http_body_util::BodyExt::collect(metrics.page().await.into_body()).await.expect("a page");
            let page = String::from_utf8(page.to_bytes().to_vec()).expect("text");
            if page.contains("pointsman_gateway_handshakes_refused_total{listener=\"tls-test\"} 1") {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, counted).await.expect("the handshake is counted as refused");
}

#[tokio::test]
async fn missing_handshakes_time_out() {
    let tls = tls::server(&tls_data("test-only.crt"), &tls_data("test-only.key")).expect("valid certificate and key");
    let quick = ListenerOptions { head_timeout: Duration::from_millis(20), tls: Some(tls), ..options("quick-tls") };
    let listener = start(quick, &Arc::default()).await;
    assert_eq!(rest(&mut connect(&listener).await).await, "");
}

type Http2 = hyper::client::conn::http2::SendRequest<Body>;

/// A client of HTTP/2, and the end of its connection.
async fn http2(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> (Http2, JoinHandle<bool>) {
    let client = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (client, connection) = client.expect("a handshake");
    (client, tokio::spawn(async move { connection.await.is_ok() }))
}

async fn get_text(client: &mut Http2, path: &str) -> String {
    let request = Request::get(format!("http://test{path}")).body(Body::empty()).expect("a valid request");
    let response = timeout(PATIENCE, client.send_request(request)).await.expect("in time").expect("a response");
    assert_eq!((response.status().as_u16(), response.headers().get(CONNECTION)), (200, None));
    let body = response.into_body().collect().await.expect("a complete body");
    String::from_utf8(body.to_bytes().to_vec()).expect("text")
}

#[tokio::test]
async fn http2_requests_share_a_connection_and_end_before_a_drain() {
    let go: Arc<Notify> = Arc::default();
    let listener = start(options("http2"), &go).await;
    let stream = connect(&listener).await;
    let address = stream.local_addr().expect("local address").to_string();
    let (mut client, connection) = http2(stream).await;
    let mut other = client.clone();
    let hanging = tokio::spawn(async move { get_text(&mut other, "/hang").await });
    for _ in 0..10 {
        assert_eq!(get_text(&mut client, "/").await, address, "beside the other request");
    }
    listener.begin_drain();
    // The client must open another connection, where it is still served.
    let refused = async {
        let request = || Request::get("http://test/").body(Body::empty()).expect("a valid request");
        while client.send_request(request()).await.is_ok() {}
    };
    timeout(PATIENCE, refused).await.expect("told to go away");
    let (mut next, _) = http2(connect(&listener).await).await;
    assert!(get_text(&mut next, "/").await.starts_with("127.0.0.1:"));
    go.notify_one();
    assert_eq!(hanging.await.expect("no panic"), "done");
    assert!(connection.await.expect("no panic"), "closed in order");
    assert_eq!(listener.drain(PATIENCE, || {}).await, Drained { broken: 0 });
}

/// The next frame: type, flags, stream and payload.
async fn next_frame(stream: &mut TcpStream) -> (u8, u8, u32, Vec<u8>) {
    let mut head = [0; 9];
    let read = timeout(PATIENCE, stream.read_exact(&mut head)).await.expect("a frame in time");
    read.expect("connection is open");
    let [high, middle, low, kind, flags, id @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
    timeout(PATIENCE, stream.read_exact(&mut payload)).await.expect("in time").expect("connection is open");
    (kind, flags, u32::from_be_bytes(id), payload)
}

/// A request in one frame: method GET, scheme http, authority `a`.
fn request_frame(stream: u8, path: &str) -> Vec<u8> {
    let length = u8::try_from(path.len()).expect("short");
    [&[0, 0, 7 + length, 1, 5, 0, 0, 0, stream, 0x82, 0x86, 0x01, 1, b'a', 0x04, length], path.as_bytes()].concat()
}

#[tokio::test]
async fn goaway_is_the_last_frame_of_a_drained_connection() {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const GOAWAY: u8 = 7;
    let go: Arc<Notify> = Arc::default();
    let listener = start(ListenerOptions { busy_max: PATIENCE, ..options("goaway") }, &go).await;
    let mut client = connect(&listener).await;
    let requests = [request_frame(1, "/hang"), request_frame(3, "/")].concat();
    client.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &SETTINGS, &requests].concat()).await.expect("open");
    let ended = async |client: &mut TcpStream| loop {
        let (kind, flags, stream, _) = next_frame(client).await;
        assert_ne!(kind, GOAWAY);
        if kind == 0 && flags & 1 == 1 {
            return stream;
        }
    };
    assert_eq!(ended(&mut client).await, 3);
    listener.begin_drain();
    client.write_all(&request_frame(5, "/")).await.expect("connection is open");
    assert_eq!(ended(&mut client).await, 5, "served beside another request");
    go.notify_one();
    assert_eq!(ended(&mut client).await, 1);
    let (kind, _, _, payload) = next_frame(&mut client).await;
    assert_eq!((kind, payload), (GOAWAY, vec![0, 0, 0, 5, 0, 0, 0, 0]), "the last stream, no error");
    // A request that crosses the frame causes no reset.
    client.write_all(&request_frame(7, "/")).await.expect("connection is open");
    client.shutdown().await.expect("connection is open");
    let mut rest = Vec::new();
    timeout(PATIENCE, client.read_to_end(&mut rest)).await.expect("in time").expect("a clean end");
    assert!(rest.is_empty(), "{rest:?}");
    assert_eq!(listener.drain(PATIENCE, || {}).await, Drained { broken: 0 });
}

#[tokio::test]
async fn idle_connections_close_whatever_they_have_sent() {
    let brief = ListenerOptions { head_timeout: Duration::from_millis(100), ..options("idle") };
    let listener = start(brief, &Arc::default()).await;
    let (mut client, connection) = http2(connect(&listener).await).await;
    get_text(&mut client, "/").await;
    assert!(timeout(PATIENCE, connection).await.expect("closed").expect("no panic"));
    for sent in ["", "PRI * HT", "GET / HT"] {
        let mut stream = connect(&listener).await;
        stream.write_all(sent.as_bytes()).await.expect("connected");
        assert_eq!(rest(&mut stream).await, "", "after {sent:?}");
    }
}

#[tokio::test]
async fn responses_to_unknown_clients_have_a_small_share() {
    // A sixteenth holds two of them.
    let budget = RequestBudget::new(16 * 2 * (16 << 10), 100);
    let options = ListenerOptions { budget: Some(budget), ..options("unknown") };
    let listener = start(options, &Arc::default()).await;
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    // The client takes no bodies.
    let handshake = builder.initial_stream_window_size(0).handshake(TokioIo::new(connect(&listener).await));
    let (mut client, connection) = handshake.await.expect("a handshake");
    tokio::spawn(connection);
    let mut send = async || {
        let request = Request::get("http://test/unknown").body(Body::empty()).expect("a valid request");
        timeout(PATIENCE, client.send_request(request)).await.expect("in time")
    };
    let held = [send().await.expect("a response"), send().await.expect("a response")];
    assert!(held.iter().all(|response| response.status() == StatusCode::UNAUTHORIZED));
    let reset = send().await.expect_err("no place");
    let reason = reset.source().and_then(|error| error.downcast_ref::<h2::Error>()).and_then(h2::Error::reason);
    assert_eq!(reason, Some(h2::Reason::REFUSED_STREAM));
    // Others are served.
    let mut other = connect(&listener).await;
    let own = other.local_addr().expect("local address").to_string();
    self::send(&mut other, "/").await;
    answer(&mut other, &own).await;
    drop(held);
    let served = async { while send().await.is_err() {} };
    timeout(PATIENCE, served).await.expect("its place is free");
}

#[tokio::test]
async fn requests_above_the_budget_are_answered_by_the_overflow_routes() {
    let go: Arc<Notify> = Arc::default();
    let routes =
        Router::new().route("/live", get(async || "live")).fallback(async |request: axum::extract::Request| {
            match request.extensions().get::<ApiError>() {
                Some(error) => error.code,
                None => "no error",
            }
        });
    let overflow = Some(Overflow { connections_max: 1, routes });
    let budget = Some(RequestBudget::new(1 << 20, 1));
    // On the thread of the test, which sees a request with its permit.
    let listener = start(ListenerOptions { overflow, cores: None, budget, ..options("budget") }, &go).await;
    let mut held = connect(&listener).await;
    send(&mut held, "/hang").await;
    let begun = async {
        while listener.activity.in_flight() == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, begun).await.expect("the first request is in flight");
    let mut other = connect(&listener).await;
    send(&mut other, "/").await;
    answer(&mut other, "request_budget_exhausted").await;
    send(&mut other, "/live").await;
    answer(&mut other, "live").await;
    go.notify_one();
    answer(&mut held, "done").await;
    let own = other.local_addr().expect("local address").to_string();
    let served = async {
        loop {
            send(&mut other, "/").await;
            if read_some(&mut other).await.ends_with(&own) {
                return;
            }
        }
    };
    timeout(PATIENCE, served).await.expect("its permit is free");
}
