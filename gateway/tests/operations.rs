//! The gateway from an operator's view: probes and metrics. `drain` has signals and shutdown.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use pointsman::protocol::{KvEventsConfig, WorkerConfig, WorkerId};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::net::listener::Drained;
use pointsman_gateway::settings::{GatewaySettings, ModelSettings, Settings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::net::TcpStream;

use crate::common::proxy::{PATIENCE, published, ready, request};

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

/// Status and body of a response.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let answer = request(address, "GET", path, "", b"").await;
    (answer.status, answer.text().to_owned())
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
    let expected = r#"{"ready":true,"reasons":[],"warnings":["model \"m\": no worker reports a block size: 64 is assumed; router.block_size sets another","model \"m\": 1 of 1 ranks have no KV event endpoint: their caches are not known"]}"#;
    let expected = (200, expected.to_owned());
    assert_eq!(get(address, "/ready").await, expected);
    assert_eq!(get(address, "/ready?model=m").await, expected);

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
    router.upsert_worker(WorkerId(1), published(&engine)).await.expect("worker registered");
    ready(gateway.address()).await;
    assert!(router.kv_sources()[0].caught_up);

    // The gateway has completed its warm-up: an unreachable worker that joins later does not make it unready.
    let events =
        KvEventsConfig { endpoint: "tcp://127.0.0.1:9".to_owned(), replay_endpoint: None, topic: String::new() };
    let gone = WorkerConfig { kv_events: Some(events), ..WorkerConfig::at("http://127.0.0.1:9") };
    router.upsert_worker(WorkerId(2), gone).await.expect("worker registered");
    assert!(get(gateway.address(), "/ready").await.0 == 200 && !router.kv_sources()[1].caught_up);
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

    let gateway = GatewaySettings { metrics_public: Some(false), listen: any_port(), ..GatewaySettings::default() };
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
