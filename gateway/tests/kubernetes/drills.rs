//! Changes of pods and pools, and an outage of the API server.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use pointsman::internals::discovery::VLLM_KV_EVENTS_PORT;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use zeromq::Socket as _;

use crate::common::directory::Directory;

use super::api_server::ApiServer;
use super::cluster::{
    NAMESPACE, TestPod, WatchingGateway, Workers, engines, has_ipv6, own_address, pool, settings, streaming_engine,
};
use crate::common::proxy::PATIENCE;

/// A running gateway whose model `m` selects the pods with `app=engine` at this port.
async fn by_labels(server: &ApiServer, port: u16) -> (WatchingGateway, String) {
    let directory = Directory::new();
    directory.kubeconfig(&server.url(), &[], &json!({}));
    let lines = format!("selector = \"app=engine\"\nports = [{port}]\nkubeconfig_file = \"kubeconfig\"");
    let text = settings(&[("m", lines)]);
    (WatchingGateway::start(directory, &text).await, text)
}

async fn by_pool(server: &ApiServer) -> WatchingGateway {
    let directory = Directory::new();
    directory.kubeconfig(&server.url(), &[], &json!({}));
    let lines = format!("namespace = \"{NAMESPACE}\"\ninference_pool = \"pool\"\nkubeconfig_file = \"kubeconfig\"");
    WatchingGateway::start(directory, &settings(&[("m", lines)])).await
}

fn union(sets: impl IntoIterator<Item = Workers>) -> Workers {
    sets.into_iter().flatten().collect()
}

#[tokio::test]
async fn drained_pods_keep_their_streams_and_may_return() {
    let (server, end) = (ApiServer::start().await, Arc::new(Semaphore::new(0)));
    let port = streaming_engine(Arc::clone(&end)).await;
    let ready = TestPod::ready("engine-0", "1", "127.0.1.1");
    server.put(ready.object());
    let (gateway, _) = by_labels(&server, port).await;
    for (what, removed) in [
        ("not ready", TestPod { is_ready: false, ..ready.clone() }),
        ("terminating", TestPod { is_terminating: true, ..ready.clone() }),
    ] {
        server.put(ready.object());
        gateway.until_workers("m", &ready.workers(&[port]), "ready").await;
        let (mut stream, mut received) = gateway.begin_stream().await;
        server.put(removed.object());
        gateway.until_drains("m", true, what).await;
        assert_eq!(gateway.complete().await, 503, "{what}: no new request");
        assert_eq!(gateway.active_requests("m").await, 1, "{what}: the booking stays");
        end.add_permits(1);
        until_end(&mut stream, &mut received, what).await;
        gateway.until_workers("m", &Workers::new(), what).await;
    }
    // A pod that is ready again ends its drain, and a deleted one leaves at once.
    server.put(ready.object());
    gateway.until_workers("m", &ready.workers(&[port]), "ready").await;
    let (mut stream, mut received) = gateway.begin_stream().await;
    server.put(TestPod { is_ready: false, ..ready.clone() }.object());
    gateway.until_drains("m", true, "not ready").await;
    server.put(ready.object());
    gateway.until_drains("m", false, "ready again").await;
    assert_eq!(gateway.active_requests("m").await, 1, "the same booking");
    server.put(TestPod { is_terminating: true, ..ready }.object());
    gateway.until_drains("m", true, "terminating").await;
    server.delete("pods", NAMESPACE, "engine-0");
    gateway.until_workers("m", &Workers::new(), "gone").await;
    end.add_permits(1);
    until_end(&mut stream, &mut received, "gone").await;
}

/// Reads the rest of a stream, which must be complete.
async fn until_end(stream: &mut TcpStream, received: &mut Vec<u8>, what: &str) {
    let rest = timeout(PATIENCE, stream.read_to_end(received)).await;
    rest.expect("the end before the timeout").expect("no reset");
    let text = String::from_utf8_lossy(received);
    assert!(text.contains("[DONE]") && text.ends_with("0\r\n\r\n"), "{what}: {text}");
}

#[tokio::test]
async fn a_publisher_at_the_default_port_of_vllm_is_found() {
    let (server, port) = (ApiServer::start().await, engines().await);
    let pods = [1, 2].map(|n| TestPod::ready(&format!("engine-{n}"), "1", &own_address(n)));
    let mut publisher = zeromq::PubSocket::new();
    let endpoint = format!("tcp://{}:{VLLM_KV_EVENTS_PORT}", pods[0].ip);
    publisher.bind(&endpoint).await.expect("an address of this process");
    pods.iter().for_each(|pod| server.put(pod.object()));
    let (gateway, _) = by_labels(&server, port).await;
    gateway.until_workers("m", &union(pods.iter().map(|pod| pod.workers(&[port]))), "ready").await;
    let events = gateway.event_endpoints("m").await;
    assert!(events.len() == 2 && events.contains(&Value::Null) && events.contains(&json!(endpoint)), "{events:?}");
}

#[tokio::test]
async fn a_pool_gives_selector_and_several_ports() {
    let (server, ports) = (ApiServer::start().await, [engines().await, engines().await]);
    let pods = [("a", "engine"), ("b", "other"), ("c", "other")];
    let pods = pods.map(|(name, app)| TestPod::ready(name, name, "127.0.1.1").labelled("app", app));
    pods.iter().for_each(|pod| server.put(pod.object()));
    let gateway = by_pool(&server).await;
    let missing = |source: &Value| source["last_error"] == "inferencepool llm/pool does not exist";
    gateway.until_source("no pool", missing).await;
    server.put(pool("engine", &ports));
    gateway.until_workers("m", &pods[0].workers(&ports), "two ports").await;
    server.put(pool("engine", &ports[1..]));
    gateway.until_workers("m", &pods[0].workers(&ports[1..]), "one port").await;
    server.delete("pods", NAMESPACE, "b");
    server.put(pool("other", &ports));
    gateway.until_workers("m", &pods[2].workers(&ports), "another selector").await;
    server.delete("inferencepools", NAMESPACE, "pool");
    gateway.until_source("deleted", missing).await;
    assert_eq!(gateway.workers("m").await, pods[2].workers(&ports), "the last specification stays in use");
}

#[tokio::test]
async fn a_reload_changes_selector_and_role() {
    let (server, port) = (ApiServer::start().await, engines().await);
    let role = "llm-d.ai/role";
    let pods = [Some("prefill"), Some("decode"), Some("both"), None];
    let pods: Vec<TestPod> = (1..)
        .zip(pods)
        .map(|(n, value)| {
            let pod = TestPod::ready(&format!("engine-{n}"), "1", &format!("127.0.1.{n}"));
            value.map_or(pod.clone(), |value| pod.labelled(role, value))
        })
        .collect();
    let other = TestPod::ready("other", "9", "127.0.1.9").labelled("app", "other");
    pods.iter().chain([&other]).for_each(|pod| server.put(pod.object()));
    let of = |numbers: &[usize]| union(numbers.iter().map(|n| pods[*n].workers(&[port])));
    let (mut gateway, text) = by_labels(&server, port).await;
    gateway.until_workers("m", &of(&[0, 1, 2, 3]), "without a role").await;
    gateway.reload(&format!("{text}role = \"prefill\"\n")).await;
    gateway.until_workers("m", &of(&[0, 2]), "prefill").await;
    gateway.reload(&format!("{text}role = \"decode\"\n")).await;
    gateway.until_workers("m", &of(&[1, 2, 3]), "decode").await;
    gateway.reload(&text.replace("app=engine", "app=other")).await;
    gateway.until_workers("m", &other.workers(&[port]), "another selector").await;
}

#[tokio::test]
async fn a_pod_may_have_an_ipv6_address() {
    if !has_ipv6().await {
        eprintln!("SKIPPED: this system has no IPv6; pods with IPv6 addresses were NOT tested");
        return;
    }
    let (server, port) = (ApiServer::start().await, engines().await);
    let pod = TestPod::ready("engine-0", "1", "::1");
    server.put(pod.object());
    let (gateway, _) = by_labels(&server, port).await;
    gateway.until_workers("m", &pod.workers(&[port]), "an IPv6 address").await;
    assert_eq!(gateway.complete().await, 200);
}

#[tokio::test]
async fn refused_watches_keep_the_workers_and_name_the_remedy() {
    let (server, port) = (ApiServer::start().await, engines().await);
    let pod = TestPod::ready("engine-0", "1", "127.0.1.1");
    server.put(pod.object());
    let (gateway, _) = by_labels(&server, port).await;
    let workers = pod.workers(&[port]);
    gateway.until_workers("m", &workers, "at first").await;
    for (status, reason) in [
        (StatusCode::FORBIDDEN, "forbidden (status 403), the role needs the verbs get, list and watch"),
        (StatusCode::INTERNAL_SERVER_ERROR, "status 500"),
    ] {
        server.refuse(Some(status));
        let names = |source: &Value| source["last_error"].as_str().is_some_and(|error| error.contains(reason));
        gateway.until_source(reason, names).await;
        assert_eq!(gateway.workers("m").await, workers, "{reason}");
    }
    server.refuse(None);
    gateway.until_source("resolved", |source| source["last_error"].is_null()).await;
    server.refuse(Some(StatusCode::NOT_FOUND));
    let of_pool = by_pool(&server).await;
    let reason =
        |source: &Value| source["last_error"].as_str().is_some_and(|error| error.contains("is its CRD installed?"));
    of_pool.until_source("no resource", reason).await;
}

/// The outage has at least this length in seconds, by `POINTSMAN_API_OUTAGE_SECONDS`.
fn outage() -> Duration {
    #[expect(clippy::disallowed_methods, reason = "a parameter of the check script")]
    let seconds = std::env::var("POINTSMAN_API_OUTAGE_SECONDS");
    Duration::from_secs(seconds.map_or(0, |seconds| seconds.parse().expect("seconds")))
}

#[tokio::test]
async fn workers_stay_while_the_api_server_is_down() {
    let (mut server, port) = (ApiServer::start().await, engines().await);
    let pods = [1, 2, 3].map(|n| TestPod::ready(&format!("engine-{n}"), "1", &format!("127.0.1.{n}")));
    pods[..2].iter().for_each(|pod| server.put(pod.object()));
    let (gateway, _) = by_labels(&server, port).await;
    let before = union(pods[..2].iter().map(|pod| pod.workers(&[port])));
    gateway.until_workers("m", &before, "at first").await;
    assert_eq!(gateway.source("m").await["stale_seconds"], 0.0);

    let since = Instant::now();
    server.stop().await;
    let is_stale = |source: &Value| source["stale_seconds"].as_f64().is_some_and(|age| age > 0.0);
    let source = gateway.until_source("the age of the set", is_stale).await;
    let reason = source["last_error"].as_str().expect("a reason");
    assert!(reason.starts_with("pods of namespace llm cannot be watched since 20"), "{reason}");
    loop {
        assert_eq!(gateway.workers("m").await, before, "no worker is removed");
        assert_eq!(gateway.complete().await, 200);
        assert!(since.elapsed() < outage() + PATIENCE, "the metric is published");
        if since.elapsed() >= outage() && gateway.stale_seconds().await.is_some_and(|seconds| seconds > 0.0) {
            break;
        }
        sleep(Duration::from_millis(20)).await;
    }
    server.delete("pods", NAMESPACE, "engine-1");
    server.put(pods[2].object());
    server.restart().await;
    let after = union(pods[1..].iter().map(|pod| pod.workers(&[port])));
    gateway.until_workers("m", &after, "after the outage").await;
    let source = gateway.until_source("resolved", |source| source["last_error"].is_null()).await;
    assert_eq!(source["stale_seconds"], 0.0);
}
