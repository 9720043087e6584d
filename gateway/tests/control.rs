//! Control of all engines of a model: actions, their results, and their effect on requests and on the index.

use pointsman::protocol::{LoadSource, WorkerConfig, WorkerId};
use pointsman::{NamedWorker, Prompt, RouteRequest, SessionId, config::EventMode};
use pointsman_gateway::settings::Settings;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value, json};

use crate::common::admin::{self, AdminClient};
use crate::common::proxy::{Act, Answer, Scripted, answer, full_response, published, receive, send, until, worker};

/// An engine with these paths beside those of requests.
async fn engine(paths: &'static [&'static str]) -> Scripted {
    Scripted::with(Vec::new(), move |_, got| {
        let path = got.head.split([' ', '?']).nth(1).expect("a path").to_owned();
        match paths.contains(&path.as_str()) {
            _ if path == "/v1/completions" => answer("200 OK", "{\"choices\":[{\"text\":\"a\"}]}"),
            true if path == "/v1/load_lora_adapter" => {
                vec![full_response("404 Not Found", "{\"error\":{\"code\":404}}")]
            }
            true if got.head.contains("half") => answer("200 OK", "{\"status\":\"sleeping\"}"),
            true if got.head.contains("fail") => vec![full_response("200 OK", "{\"success\":false}")],
            true => answer("200 OK", "{\"success\":true}"),
            false => answer("404 Not Found", "{\"detail\":\"Not Found\"}"),
        }
    })
    .await
}

const VLLM: &[&str] =
    &["/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/update_weights", "/v1/load_lora_adapter"];
const SGLANG: &[&str] =
    &["/release_memory_occupation", "/flush_cache", "/update_weights_from_disk", "/load_lora_adapter"];

async fn client(engines: &[&Scripted]) -> AdminClient {
    let mut settings: Settings = admin::settings();
    settings.models[0].workers = (1..).zip(engines).map(|(n, engine)| worker(n, &engine.url(), 1)).collect();
    settings.models[0].router.block_size = Some(16);
    settings.models[0].router.events.mode = EventMode::Off;
    settings.models[0].router.health.probe_interval_ms = 0;
    let client = AdminClient::with(settings).await;
    let router = client.router();
    until("workers registered", || router.workers().len() == engines.len()).await;
    client
}

async fn call(client: &AdminClient, action: &str, body: Value) -> Answer {
    client.send("POST", &format!("/admin/models/mock/control/{action}"), &body.to_string()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_action_reaches_every_engine_by_its_own_path() {
    let (vllm, sglang) = (engine(VLLM).await, engine(SGLANG).await);
    let client = client(&[&vllm, &sglang]).await;
    let body = json!({ "body": { "model_path": "/w" }, "query": "a=1" });
    let done = call(&client, "update_weights", body).await;
    assert_eq!((done.status, &done.json()["ok"]), (200, &json!(true)), "{done:?}");
    let done = done.json();
    assert_eq!((&done["workers"][0]["path"], &done["workers"][0]["id"]), (&json!("/update_weights"), &json!("1")));
    assert_eq!(done["workers"][1]["path"], "/update_weights_from_disk");
    for (engine, line) in [(&vllm, "POST /update_weights?a=1 "), (&sglang, "POST /update_weights_from_disk?a=1 ")] {
        let got = engine.requests().pop().expect("a request");
        assert!(got.head.starts_with(line), "{}", got.head);
        assert_eq!((got.text(), got.header("content-type")), (r#"{"model_path":"/w"}"#, Some("application/json")));
    }
    // An error of an engine with the path is its result.
    let failed = call(&client, "load_lora", json!({ "body": {} })).await;
    assert_eq!((failed.status, &failed.json()["ok"]), (502, &json!(false)));
    let failed = failed.json();
    assert_eq!(
        (&failed["workers"][0]["status"], &failed["workers"][0]["body"]),
        (&json!(404), &json!({ "error": { "code": 404 } }))
    );
    assert_eq!(failed["workers"][1]["ok"], true);
    // vLLM reports some failures with status 200.
    let failed = call(&client, "reset_prefix_cache", json!({ "query": "fail=1", "workers": ["1"] })).await;
    assert_eq!((failed.status, failed.json()["workers"].as_array().map(Vec::len)), (502, Some(1)), "{failed:?}");
    // No engine has it.
    assert_eq!(call(&client, "stop_profile", json!({})).await.status, 502);
    for (action, body, status) in [
        ("explode", json!({}), 404),
        ("sleep", json!({ "timeout_ms": 0 }), 400),
        ("sleep", json!({ "x": 1 }), 400),
        ("sleep", json!({ "workers": ["1", "7"] }), 404),
        ("sleep", json!({ "workers": ["1"] }), 200),
    ] {
        assert_eq!(call(&client, action, body).await.status, status, "{action}");
    }
    let completion = json!({ "model": "mock", "prompt": [1] }).to_string();
    let served = client.send_as_client("/v1/completions", &completion).await;
    assert_eq!(served.status, 200, "the other engine is awake");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_engine_has_its_own_timeout() {
    let (vllm, silent) = (engine(VLLM).await, Scripted::start(|_| vec![Act::Hang]).await);
    let client = client(&[&vllm, &silent]).await;
    let done = call(&client, "sleep", json!({ "timeout_ms": 50 })).await;
    assert_eq!(done.status, 502);
    let done = done.json();
    assert_eq!(done["workers"][0]["ok"], true);
    assert!(done["workers"][1]["error"].as_str().is_some_and(|error| error.contains("50 ms")), "{done}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_do_not_follow_a_cache_that_was_reset() {
    let (vllm, sglang) = (engine(VLLM).await, engine(SGLANG).await);
    let client = client(&[&vllm, &sglang]).await;
    let ids: Vec<u32> = (0..640).collect();
    let overlap = async || {
        let query = RouteRequest::query(Prompt::Tokens(&ids));
        client.router().find_best_match(query).await.expect("a match").overlap_blocks()
    };
    for action in ["reset_prefix_cache", "update_weights"] {
        let body = json!({ "model": "mock", "prompt": ids }).to_string();
        assert_eq!(client.send_as_client("/v1/completions", &body).await.status, 200);
        let router = client.router();
        until("the booking has ended", || router.health().leases == 0).await;
        assert!(overlap().await >= 39, "known contents");
        let failed = call(&client, action, json!({ "query": "fail", "workers": ["1", "2"] })).await;
        assert_eq!(failed.status, 502);
        assert!(overlap().await >= 39, "a failed action changes nothing");
        assert_eq!(call(&client, action, json!({})).await.status, 200);
        assert_eq!(overlap().await, 0, "{action}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_paused_engines_wait_or_are_refused() {
    let vllm = engine(VLLM).await;
    let client = client(&[&vllm]).await;
    let completion = json!({ "model": "mock", "prompt": [1, 2] }).to_string();
    let n_completions = || vllm.requests().iter().filter(|got| got.head.contains("/v1/completions")).count();
    assert_eq!(call(&client, "pause", json!({ "requests": "refuse" })).await.status, 200);
    let refused = client.send_as_client("/v1/completions", &completion).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "engines_paused"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(call(&client, "resume", json!({})).await.status, 200);
    assert_eq!(client.send_as_client("/v1/completions", &completion).await.status, 200);
    assert_eq!(call(&client, "pause", json!({})).await.status, 200);
    let waiting = send(client.gateway.address(), "POST", "/v1/completions", "", completion.as_bytes()).await;
    // A worker that joins does not end the pause.
    client.router().cordon_worker(WorkerId(1)).await.expect("a worker");
    client.router().uncordon_worker(WorkerId(1)).await.expect("a worker");
    assert_eq!(n_completions(), 1, "the second one waits");
    assert_eq!(call(&client, "resume", json!({})).await.status, 200);
    assert_eq!(receive(waiting).await.expect("a response").status, 200);
    // Engines whose weights are back, but not their caches, are still asleep.
    assert_eq!(call(&client, "sleep", json!({ "requests": "refuse" })).await.status, 200);
    let tags = |tags: &[&str]| json!({ "body": { "tags": tags } });
    for (body, status) in [(tags(&["weights"]), 503), (json!({ "query": "half" }), 503), (tags(&["kv_cache"]), 200)] {
        assert_eq!(call(&client, "wake", body).await.status, 200);
        assert_eq!(client.send_as_client("/v1/completions", &completion).await.status, status);
    }
    // No request has a session of the gateway itself.
    let own = SessionId::new("\u{1}gate 1").expect("short");
    let state = client.router().session_rank(&own).await;
    let named = json!({ "model": "mock", "prompt": [1, 2], "session_id": &*own }).to_string();
    assert_eq!(client.send_as_client("/v1/completions", &named).await.status, 200);
    assert!(state.is_some() && client.router().session_rank(&own).await == state);
    // A failed update leaves no pause.
    assert_eq!(call(&client, "update_weights", json!({ "query": "fail" })).await.status, 502);
    assert_eq!(client.send_as_client("/v1/completions", &completion).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_until_the_router_knows_that_the_engine_is_awake() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, ..MockConfig::default() }).await.expect("an engine");
    let mut settings: Settings = admin::settings();
    let load = Some(LoadSource::Metrics(format!("{}/metrics", engine.url())));
    let config = WorkerConfig { load, ..published(&engine) };
    settings.models[0].workers = vec![NamedWorker { id: Some(WorkerId(1)), config, probe: false }];
    settings.models[0].router.engine_load.interval_ms = 500;
    let client = AdminClient::with(settings).await;
    let router = client.router();
    until("the worker has joined", || router.eligible_ranks() == 1).await;
    assert_eq!(call(&client, "sleep", json!({ "query": "level=1" })).await.status, 200);
    until("the router knows that it sleeps", || router.eligible_ranks() == 0).await;
    let completion = json!({ "model": "mock", "prompt": [1, 2] }).to_string();
    let waiting = send(client.gateway.address(), "POST", "/v1/completions", "", completion.as_bytes()).await;
    assert_eq!(call(&client, "wake", json!({})).await.status, 200);
    assert_eq!(receive(waiting).await.expect("a response").status, 200);
    engine.shutdown().await;
}
