//! The gateway from an operator's view: probes, metrics, signals and shutdown.
//!
//! Every wait has a generous limit. Other tests cover the view of clients.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use pointsman::protocol::{KvEventsConfig, WorkerConfig, WorkerId};
use pointsman_gateway::app::{Ended, Gateway, Signal, run_until};
use pointsman_gateway::net::listener::Drained;
use pointsman_gateway::settings::{GatewaySettings, ModelSettings, Settings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Limit of every wait.
const PATIENCE: Duration = Duration::from_secs(120);

fn settings(listen: SocketAddr) -> Settings {
    Settings {
        gateway: GatewaySettings { listen, head_timeout_ms: 120_000, ..GatewaySettings::default() },
        models: vec![ModelSettings::named("m")],
        ..Settings::default()
    }
}

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Status and body of a response on a new connection.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("connection is open");
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer))
        .await
        .expect("response before the timeout")
        .expect("response received");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head[9..12].parse().expect("a status"), body.to_owned())
}

/// A request that stays in flight: the end of its body is missing.
async fn unfinished(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    let request = "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\n\
                   content-type: application/json\r\ncontent-length: 100\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("connection is open");
    // The `100 Continue` response proves that the request is in flight.
    let mut received = [0; 25];
    timeout(PATIENCE, stream.read_exact(&mut received))
        .await
        .expect("completed before the timeout")
        .expect("connection is open");
    assert_eq!(&received, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream
}

#[tokio::test]
async fn ready_while_a_rank_can_serve_and_no_shutdown_began() {
    let gateway = Gateway::start(settings(any_port())).await.expect("start succeeds");
    let address = gateway.address();
    assert_eq!(get(address, "/live").await, (200, "live\n".to_owned()));
    let (status, body) = get(address, "/ready").await;
    assert_eq!(
        (status, body.as_str()),
        (503, r#"{"ready":false,"reasons":["model \"m\": no rank can serve: no workers are registered"]}"#)
    );
    assert_eq!(get(address, "/ready?model=n").await.0, 404);

    let engine = MockEngine::start(MockConfig::default()).await.expect("the engine starts");
    let router = gateway.router("m").expect("model exists").clone();
    router.upsert_worker(WorkerId(1), WorkerConfig::at(engine.url())).await.expect("worker registered");
    let ready = r#"{"ready":true,"reasons":[],"warnings":["model \"m\": no worker reports a block size: 64 is assumed; router.block_size sets another","model \"m\": 1 of 1 ranks have no KV event endpoint: their caches are not known"]}"#;
    let ready = (200, ready.to_owned());
    assert_eq!(get(address, "/ready").await, ready);
    assert_eq!(get(address, "/ready?model=m").await, ready);

    gateway.begin_drain();
    let (status, body) = get(address, "/ready").await;
    assert_eq!((status, body.as_str()), (503, r#"{"ready":false,"reasons":["the gateway is shutting down"]}"#));
    assert_eq!(get(address, "/v1/models").await.0, 200, "other requests are still served");
    assert_eq!(gateway.shutdown(PATIENCE).await, Drained { broken: 0 });
    assert!(TcpStream::connect(address).await.is_err(), "the listener is closed");
    engine.shutdown().await;
}

#[tokio::test]
async fn silent_engines_do_not_delay_readiness() {
    let mut settings = settings(any_port());
    settings.gateway.warm_up_ms = 86_400_000;
    let gateway = Gateway::start(settings).await.expect("start succeeds");
    let engine = MockEngine::start(MockConfig::default()).await.expect("the engine starts");
    let router = gateway.router("m").expect("model exists").clone();
    let events = KvEventsConfig {
        endpoint: engine.event_endpoint(0),
        replay_endpoint: Some(engine.replay_endpoint(0)),
        topic: String::new(),
    };
    let read = WorkerConfig { kv_events: Some(events), ..WorkerConfig::at(engine.url()) };
    router.upsert_worker(WorkerId(1), read).await.expect("worker registered");
    let ready = async || get(gateway.address(), "/ready").await.0 == 200;
    timeout(PATIENCE, async {
        while !ready().await {
            sleep(Duration::from_millis(10)).await
        }
    })
    .await
    .expect("completed before the timeout");
    assert!(router.kv_sources()[0].caught_up);

    // The gateway has completed its warm-up: an unreachable worker that joins later does not make it unready.
    let events =
        KvEventsConfig { endpoint: "tcp://127.0.0.1:9".to_owned(), replay_endpoint: None, topic: String::new() };
    let gone = WorkerConfig { kv_events: Some(events), ..WorkerConfig::at("http://127.0.0.1:9") };
    router.upsert_worker(WorkerId(2), gone).await.expect("worker registered");
    assert!(ready().await && !router.kv_sources()[1].caught_up);
    gateway.shutdown(PATIENCE).await;
    engine.shutdown().await;
}

#[tokio::test]
async fn the_metrics_page_is_valid_prometheus_text() {
    let gateway = Gateway::start(settings(any_port())).await.expect("start succeeds");
    let (status, page) = get(gateway.address(), "/metrics").await;
    assert_eq!(status, 200);
    for name in
        ["pointsman_ranks{pool=", "pointsman_gateway_connections{listener=\"clients\"}", "pointsman_build_info{"]
    {
        assert!(page.contains(name), "{name} is not on the page:\n{page}");
    }
    let described = |name: &str| page.contains(&format!("# HELP {name} "));
    let types: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    for (name, kind) in types.iter().filter_map(|line| line.split_once(' ')) {
        assert!(described(name), "{name} has no help");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        assert_ne!(kind, "summary", "{name} cannot be aggregated over processes");
    }
    promtool(&page);
    gateway.shutdown(PATIENCE).await;

    let gateway = GatewaySettings { metrics_public: false, listen: any_port(), ..GatewaySettings::default() };
    let gateway = Gateway::start(Settings { gateway, ..Settings::default() }).await.expect("start succeeds");
    assert_eq!(get(gateway.address(), "/metrics").await.0, 404);
    gateway.shutdown(PATIENCE).await;
}

/// Checks the page with promtool, if installed.
fn promtool(page: &str) {
    use std::io::Write as _;
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return eprintln!("skipped: promtool is not installed");
        }
        Err(error) => panic!("promtool does not start: {error}"),
    };
    child.stdin.take().expect("stream is piped").write_all(page.as_bytes()).expect("promtool reads");
    let output = child.wait_with_output().expect("promtool ends");
    let body = [output.stdout, output.stderr].concat();
    assert!(output.status.success() && body.is_empty(), "{}", String::from_utf8_lossy(&body));
}

/// A gateway that runs until a signal ends it, and its address.
async fn running(gateway: GatewaySettings) -> (SocketAddr, mpsc::Sender<Signal>, JoinHandle<Ended>) {
    let settings = Settings { gateway: GatewaySettings { listen: any_port(), ..gateway }, ..Settings::default() };
    let gateway = Gateway::start(settings).await.expect("start succeeds");
    let (address, (signals, received)) = (gateway.address(), mpsc::channel(2));
    (address, signals, tokio::spawn(run_until(gateway, received)))
}

async fn end_of(running: JoinHandle<Ended>) -> Ended {
    timeout(PATIENCE, running).await.expect("end before the timeout").expect("no panic")
}

#[tokio::test]
async fn the_first_signal_finishes_requests() {
    let patient = GatewaySettings { drain_timeout_ms: 120_000, head_timeout_ms: 120_000, ..GatewaySettings::default() };
    let (address, signals, running) = running(patient).await;
    let mut client = unfinished(address).await;
    signals.send(Signal::Terminate).await.expect("signal delivered");
    let closed = async {
        while TcpStream::connect(address).await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("the listener closes before the timeout");
    assert!(!running.is_finished(), "one request in flight");
    client.write_all(&[b' '; 100]).await.expect("connection is open");
    let mut answer = String::new();
    timeout(PATIENCE, client.read_to_string(&mut answer))
        .await
        .expect("completed before the timeout")
        .expect("response received");
    assert!(answer.starts_with("HTTP/1.1 4") && answer.contains("connection: close\r\n"), "{answer}");
    assert_eq!(end_of(running).await, Ended::Drained(Drained { broken: 0 }));
}

#[tokio::test]
async fn unready_before_the_listener_closes() {
    let slow = GatewaySettings { drain_delay_ms: 120_000, ..GatewaySettings::default() };
    let (address, signals, running) = running(slow).await;
    signals.send(Signal::Terminate).await.expect("signal delivered");
    let becomes_unready = async {
        while !get(address, "/ready").await.1.contains("shutting down") {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, becomes_unready).await.expect("unready before the timeout");
    signals.send(Signal::Interrupt).await.expect("signal delivered");
    assert_eq!(end_of(running).await, Ended::AtOnce(Signal::Interrupt));
}

#[tokio::test]
async fn the_second_signal_ends_the_gateway() {
    let patient = GatewaySettings { drain_timeout_ms: 120_000, head_timeout_ms: 120_000, ..GatewaySettings::default() };
    let (address, signals, running) = running(patient).await;
    let mut client = unfinished(address).await;
    signals.send(Signal::Terminate).await.expect("signal delivered");
    signals.send(Signal::Terminate).await.expect("signal delivered");
    assert_eq!(end_of(running).await, Ended::AtOnce(Signal::Terminate));
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, client.read_to_end(&mut rest)).await.expect("connection closed before the timeout");
}

#[tokio::test]
async fn connections_past_the_drain_timeout_are_closed_and_counted() {
    let hasty = GatewaySettings { drain_timeout_ms: 50, ..GatewaySettings::default() };
    let (address, signals, running) = running(hasty).await;
    let _client = unfinished(address).await;
    signals.send(Signal::Terminate).await.expect("signal delivered");
    assert_eq!(end_of(running).await, Ended::Drained(Drained { broken: 1 }));
}

#[test]
fn exit_codes_match_shell_convention() {
    assert_eq!((Signal::Interrupt.exit_code(), Signal::Terminate.exit_code()), (130, 143));
}
