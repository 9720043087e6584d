//! Manual drains, cordons and additions of workers, and how each is undone.

use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::{Prompt, RouteRequest};
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine};
use serde_json::{Value, json};

use crate::common::admin::{AdminClient, settings};
use crate::common::proxy::{receive, until};

const WORKERS: &str = "/admin/models/mock/workers";

/// A gateway that has discovered an engine of two ranks with KV events.
async fn discovered() -> (MockEngine, AdminClient, String) {
    let config = MockConfig {
        dialect: Dialect::SglangMap,
        data_parallel_size: 2,
        block_size: 4,
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config).await.expect("an engine");
    let mut settings = settings();
    settings.models[0].worker_urls = vec![engine.url()];
    let client = AdminClient::with(settings).await;
    let router = client.router();
    until("worker discovered", || router.workers().len() == 1).await;
    let worker = format!("{WORKERS}/{}", WorkerId::derived(&engine.url()));
    (engine, client, worker)
}

/// The response to `GET .../workers`.
async fn workers(client: &AdminClient) -> Value {
    client.send("GET", WORKERS, "").await.json()
}

#[tokio::test]
async fn manual_drains_and_removals_can_be_undone() {
    let (engine, client, worker) = discovered().await;
    let before = client.router().workers();
    assert_eq!(before[0].ranks.len(), 2);
    let drain = format!("{worker}/drain");
    for (method, path, body) in [("DELETE", &worker, ""), ("POST", &drain, r#"{"timeout_ms":60000}"#)] {
        assert_eq!(client.send(method, path, body).await.status, 200);
        let listed = workers(&client).await;
        let removed = &listed["removed"][0];
        assert_eq!((&listed["workers"], &removed["endpoint"]), (&json!([]), &json!(engine.url())), "{listed}");
        assert!(removed["source"].is_string() && worker.ends_with(removed["id"].as_str().expect("an id")), "{listed}");
        let undone = client.send("POST", &format!("{worker}/undrain"), "").await;
        assert_eq!((undone.status, undone.json()["ranks"].as_array().map(Vec::len)), (200, Some(2)));
        assert_eq!(client.router().workers(), before, "ranks and events are unchanged");
        assert_eq!(workers(&client).await["removed"], json!([]));
    }
    assert_eq!(client.send("POST", &format!("{worker}/undrain"), "").await.code(), "worker_not_draining");
}

#[tokio::test]
async fn a_drain_in_progress_can_be_undone() {
    let (_engine, client, worker) = discovered().await;
    let router = client.router();
    let held = router.route(RouteRequest::new("held", Prompt::Tokens(&[1]))).await.expect("a place");
    let drain = client.begin("POST", &format!("{worker}/drain"), r#"{"timeout_ms":600000}"#).await;
    until("drain started", || router.workers()[0].draining).await;
    assert!(router.route(RouteRequest::new("refused", Prompt::Tokens(&[1]))).await.is_err());
    let undone = client.send("POST", &format!("{worker}/undrain"), "").await;
    assert_eq!((undone.status, &undone.json()["draining"]), (200, &json!(false)));
    let drained = receive(drain).await.expect("a response");
    assert_eq!((drained.status, drained.code().as_str()), (409, "drain_undone"));
    drop(router.route(RouteRequest::new("next", Prompt::Tokens(&[1]))).await.expect("the worker accepts requests"));
    drop(held);
    until("bookings end", || router.health().leases == 0).await;
    assert_eq!(router.workers().len(), 1, "the worker stays after its last booking");

    // A later drain behaves like a first one.
    let drained = client.send("POST", &format!("{worker}/drain"), r#"{"timeout_ms":600000}"#).await;
    assert_eq!((drained.status, &drained.json()["cut_off"]), (200, &json!(0)));
}

#[tokio::test]
async fn a_cordoned_worker_gets_no_requests() {
    let client = AdminClient::start().await;
    let router = client.router();
    for id in [1, 2] {
        let config = WorkerConfig { data_parallel_size: 2, ..WorkerConfig::at(format!("http://127.0.0.1:{id}")) };
        router.upsert_worker(WorkerId(id), config).await.expect("a worker");
    }
    let eligible = async |method: &str, path: &str, body: &str, is_cordoned: bool| {
        let changed = client.send(method, &format!("{WORKERS}/1{path}"), body).await;
        assert_eq!((changed.status, &changed.json()["cordoned"]), (200, &json!(is_cordoned)), "{path}");
        router.eligible_ranks()
    };
    assert_eq!(eligible("POST", "/cordon", "", true).await, 2);
    // Neither a configuration change nor an added rank lifts the cordon.
    assert_eq!(eligible("PATCH", "", r#"{"data_parallel_size":3}"#, true).await, 2);
    assert_eq!(eligible("POST", "/uncordon", "", false).await, 5);
}

#[tokio::test]
async fn adding_a_registered_worker_changes_nothing() {
    let (engine, client, worker) = discovered().await;
    let before = client.router().workers();
    let body = json!({ "endpoint": engine.url() }).to_string();
    let refused = client.send("POST", WORKERS, &body).await;
    assert_eq!((refused.status, refused.code().as_str()), (409, "worker_exists"));
    assert_eq!(client.router().workers(), before);
    // Adding the same configuration changes nothing, and the worker stays owned by discovery.
    let same = serde_json::to_string(&before[0].config).expect("JSON");
    assert_eq!(client.send("POST", WORKERS, &same).await.status, 200);
    assert_eq!(client.send("DELETE", &worker, "").await.status, 200);
    assert_eq!(workers(&client).await["removed"].as_array().map(Vec::len), Some(1));
}
