use std::path::Path;

use axum::routing::get;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;

use super::super::telemetry::Metrics;
use super::super::tls;
use super::*;

/// Upper limit of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

fn options(name: &'static str) -> ListenerOptions {
    ListenerOptions {
        name,
        connections_max: 100,
        overflow: None,
        head_timeout: PATIENCE,
        stall_max: PATIENCE,
        tls: None,
    }
}

/// `/` returns the client address; `/hang` responds after a notification of `go`.
async fn start(options: ListenerOptions, go: &Arc<Notify>) -> Listener {
    let go = Arc::clone(go);
    let hang = async move || {
        go.notified().await;
        "went on"
    };
    let peer = async |ConnectInfo(peer): ConnectInfo<SocketAddr>| peer.to_string();
    let routes = Router::new().route("/", get(peer)).route("/hang", get(hang));
    let socket = bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("loopback has a free port");
    Listener::start(socket, options, routes).expect("it has an address")
}

async fn connect(listener: &Listener) -> TcpStream {
    TcpStream::connect(listener.address()).await.expect("the listener listens")
}

fn get_of(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

async fn ask(stream: &mut (impl AsyncWrite + Unpin), path: &str) {
    stream.write_all(get_of(path).as_bytes()).await.expect("the connection stands");
}

/// One response that ends in `end`.
async fn answer(stream: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut heard = Vec::new();
    while !heard.ends_with(end.as_bytes()) {
        let read = timeout(PATIENCE, stream.read_buf(&mut heard)).await;
        let read = read.unwrap_or_else(|_| panic!("an answer in time after {:?}", String::from_utf8_lossy(&heard)));
        assert!(read.expect("the connection stands") > 0, "ended after {:?}", String::from_utf8_lossy(&heard));
    }
    String::from_utf8(heard).expect("text")
}

/// Reads until the other side closes or resets.
async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut heard = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut heard)).await.expect("the end in time");
    String::from_utf8(heard).expect("text")
}

#[tokio::test]
async fn a_client_that_is_slow_to_ask_is_cut_and_others_are_not() {
    let slow = ListenerOptions { head_timeout: Duration::from_secs(2), ..options("slow") };
    let listener = start(slow, &Arc::default()).await;
    let stream = connect(&listener).await;
    let (mut read, mut write) = stream.into_split();
    let trickle = tokio::spawn(async move {
        let head = get_of(&format!("/{}", "a".repeat(60_000)));
        for byte in head.as_bytes().chunks(1) {
            if write.write_all(byte).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(5)).await; // about 5 minutes in total
        }
    });
    let others = tokio::spawn(async move {
        for _ in 0..50 {
            let mut stream = connect(&listener).await;
            ask(&mut stream, "/").await;
            let address = stream.local_addr().expect("it is connected").to_string();
            assert!(answer(&mut stream, &address).await.starts_with("HTTP/1.1 200"));
        }
        listener
    });
    assert_eq!(rest(&mut read).await, "");
    let listener = others.await.expect("others are served");
    trickle.abort();
    assert_eq!(listener.drain(PATIENCE, LINGER, || {}).await, Drained { broken: 0 });
}

#[tokio::test]
async fn more_connections_than_there_may_be_wait_their_turn() {
    let go = Arc::default();
    let listener = start(ListenerOptions { connections_max: 2, ..options("full") }, &go).await;
    let mut held = [connect(&listener).await, connect(&listener).await];
    for stream in &mut held {
        ask(stream, "/hang").await;
    }
    let mut third = connect(&listener).await;
    ask(&mut third, "/").await;
    // It is polled first and completes after a later one has ended.
    let mut peeked = [0];
    assert!(timeout(Duration::from_millis(50), third.peek(&mut peeked)).await.is_err());
    for stream in &mut held {
        go.notify_one();
        answer(stream, "went on").await;
    }
    drop(held);
    let own = third.local_addr().expect("it is connected").to_string();
    assert!(answer(&mut third, &own).await.contains("200 OK"));
}

#[tokio::test]
async fn connections_beyond_the_limit_are_answered_and_closed_where_there_are_routes_for_them() {
    let go = Arc::default();
    let routes = Router::new().route("/live", get(async || "live")).fallback(async || "too many");
    let overflow = Some(Overflow { connections_max: 1, routes });
    let listener = start(ListenerOptions { connections_max: 1, overflow, ..options("overflow") }, &go).await;
    let mut held = connect(&listener).await;
    ask(&mut held, "/hang").await;
    for (path, told) in [("/live", "live"), ("/", "too many"), ("/hang", "too many")] {
        let mut beyond = connect(&listener).await;
        ask(&mut beyond, path).await;
        let answer = rest(&mut beyond).await;
        assert!(answer.contains("connection: close\r\n") && answer.ends_with(told), "{path}: {answer}");
    }
    // An idle connection is closed, and the next one is accepted.
    let (mut mute, mut next) = (connect(&listener).await, connect(&listener).await);
    ask(&mut next, "/live").await;
    assert_eq!(rest(&mut mute).await, "");
    assert!(rest(&mut next).await.ends_with("live"));
    go.notify_one();
    answer(&mut held, "went on").await;
    drop(held);
    // The next connection, or one soon after, takes the free place.
    let served = async {
        loop {
            let mut stream = connect(&listener).await;
            ask(&mut stream, "/").await;
            let own = stream.local_addr().expect("it is connected").to_string();
            if read_some(&mut stream).await.ends_with(&own) {
                return;
            }
        }
    };
    timeout(PATIENCE, served).await.expect("in time");
}

/// Available bytes.
async fn read_some(stream: &mut TcpStream) -> String {
    let mut heard = Vec::with_capacity(1024);
    timeout(PATIENCE, stream.read_buf(&mut heard)).await.expect("an answer in time").expect("the connection stands");
    String::from_utf8(heard).expect("text")
}

#[tokio::test]
async fn a_drain_closes_what_is_idle_and_lets_the_rest_end() {
    let go = Arc::default();
    let listener = start(options("drained"), &go).await;
    let address = listener.address();
    let (mut fresh, mut used, mut busy) =
        (connect(&listener).await, connect(&listener).await, connect(&listener).await);
    ask(&mut used, "/").await;
    let own = used.local_addr().expect("it is connected").to_string();
    answer(&mut used, &own).await;
    ask(&mut busy, "/hang").await;
    ask(&mut used, "/").await; // ensures that `busy` is accepted: connections are accepted in order
    answer(&mut used, &own).await;

    let draining = tokio::spawn(listener.drain(PATIENCE, LINGER, || {}));
    assert_eq!(rest(&mut used).await, "");
    assert_eq!(rest(&mut fresh).await, "");
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
    assert!(!draining.is_finished());
    go.notify_one();
    let last = rest(&mut busy).await;
    assert!(last.contains("connection: close\r\n") && last.ends_with("went on"), "{last}");
    assert_eq!(draining.await.expect("it ends"), Drained { broken: 0 });
}

#[tokio::test]
async fn what_is_busy_at_the_deadline_is_broken_and_counted() {
    let listener = start(options("broken"), &Arc::default()).await;
    let mut busy = [connect(&listener).await, connect(&listener).await, connect(&listener).await];
    for stream in &mut busy {
        ask(stream, "/hang").await;
    }
    let mut probe = connect(&listener).await;
    ask(&mut probe, "/").await;
    let own = probe.local_addr().expect("it is connected").to_string();
    answer(&mut probe, &own).await; // earlier connections have been accepted
    assert_eq!(listener.drain(Duration::from_millis(50), Duration::ZERO, || {}).await, Drained { broken: 3 });
    for stream in &mut busy {
        assert_eq!(rest(stream).await, "");
    }
}

#[tokio::test]
async fn heads_are_bounded() {
    let listener = start(options("heads"), &Arc::default()).await;
    let long = format!("GET / HTTP/1.1\r\nhost: test\r\nlong: {}\r\n\r\n", "a".repeat(HEAD_BYTES_MAX));
    let many = format!("GET / HTTP/1.1\r\nhost: test\r\n{}\r\n", "a: b\r\n".repeat(101));
    for head in [long, many] {
        let mut stream = connect(&listener).await;
        let (mut read, mut write) = stream.split();
        // The listener may have responded and closed before the whole request is sent.
        let _ = write.write_all(head.as_bytes()).await;
        assert!(answer(&mut read, "\r\n\r\n").await.starts_with("HTTP/1.1 431 "));
    }
}

fn tls_data(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(file)
}

#[tokio::test]
async fn tls_is_spoken_and_nothing_else() {
    let tls = tls::server(&tls_data("test-only.crt"), &tls_data("test-only.key")).expect("the pair is good");
    let metrics = Metrics::install().expect("nobody else has a recorder");
    let listener = start(ListenerOptions { tls: Some(tls), ..options("tls-test") }, &Arc::default()).await;

    let mut roots = RootCertStore::empty();
    let own = CertificateDer::from_pem_file(tls_data("test-only.crt")).expect("it is PEM");
    roots.add(own).expect("it is a certificate");
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring speaks both")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from("localhost").expect("it is a name");
    let stream = connect(&listener).await;
    let address = stream.local_addr().expect("it is connected").to_string();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = timeout(PATIENCE, connector.connect(name, stream)).await.expect("in time").expect("hands shaken");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
    ask(&mut stream, "/").await;
    assert!(answer(&mut stream, &address).await.starts_with("HTTP/1.1 200"));

    let mut plain = connect(&listener).await;
    ask(&mut plain, "/").await;
    let mut heard = Vec::new();
    let _ = timeout(PATIENCE, plain.read_to_end(&mut heard)).await.expect("cut in time");
    assert!(!heard.starts_with(b"HTTP"), "{heard:?}");
    let page = http_body_util::BodyExt::collect(metrics.page().await.into_body()).await.expect("a page");
    let page = String::from_utf8(page.to_bytes().to_vec()).expect("text");
    assert!(page.contains("pointsman_gateway_handshakes_refused_total{listener=\"tls-test\"} 1"), "{page}");
}

#[tokio::test]
async fn a_handshake_that_does_not_come_is_cut() {
    let tls = tls::server(&tls_data("test-only.crt"), &tls_data("test-only.key")).expect("the pair is good");
    let quick = ListenerOptions { head_timeout: Duration::from_millis(20), tls: Some(tls), ..options("quick-tls") };
    let listener = start(quick, &Arc::default()).await;
    assert_eq!(rest(&mut connect(&listener).await).await, "");
}

/// A body that sends `begun` and ends after a notification of `go`.
struct Open {
    has_begun: bool,
    end: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl http_body::Body for Open {
    type Data = axum::body::Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, Infallible>>> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return std::task::Poll::Ready(Some(Ok(http_body::Frame::data("begun".into()))));
        }
        self.end.as_mut().poll(cx).map(|()| None)
    }
}

#[tokio::test]
async fn a_drain_lets_five_hundred_open_streams_end() {
    let (go, gone) = watch::channel(false);
    let stream = async move || {
        let mut gone = gone.clone();
        let end = Box::pin(async move { drop(gone.wait_for(|gone| *gone).await) });
        axum::response::Response::new(axum::body::Body::new(Open { has_begun: false, end }))
    };
    let routes = Router::new().route("/", get(stream));
    let options = ListenerOptions { connections_max: 500, ..options("streams") };
    let socket = bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
    let listener = Listener::start(socket, options, routes).expect("it has an address");
    let mut streams = Vec::new();
    for _ in 0..500 {
        let mut stream = connect(&listener).await;
        ask(&mut stream, "/").await;
        answer(&mut stream, "5\r\nbegun\r\n").await;
        streams.push(stream);
    }
    let mut draining = tokio::spawn(listener.drain(PATIENCE, LINGER, || {}));
    // A drain ends no request.
    assert!(timeout(Duration::from_millis(50), &mut draining).await.is_err());
    go.send_replace(true);
    for stream in &mut streams {
        assert_eq!(rest(stream).await, "0\r\n\r\n", "the stream ends as it should");
    }
    assert_eq!(draining.await.expect("it ends"), Drained { broken: 0 });
}
