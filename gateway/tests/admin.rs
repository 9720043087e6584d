//! Admin API: authentication, effects of each route, and rejected requests.

use std::time::Duration;

use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::{
    EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerId, WorkerRank,
};
use pointsman::{Prompt, RouteRequest};
use pointsman_gateway::app::Gateway;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value, json};

use crate::common::admin::{ALIAS, AdminClient, MODEL, TOKEN, file, settings};
use crate::common::proxy::{receive, until};

/// Every route with a valid body. Routes that stop workers come last.
const ROUTES: &str = r#"
GET /live
GET /admin/config
GET /admin/decisions
GET /admin/models
GET /admin/models/mock/config
GET /admin/models/mock/dump
GET /admin/models/mock/health
GET /admin/models/mock/loads
GET /admin/models/mock/workers
POST /admin/models/mock/explain {"tokens":[1,2,3,4]}
POST /admin/models/mock/overlap {"tokens":[1,2,3,4]}
POST /admin/models/mock/workers {"endpoint":"http://127.0.0.1:2"}
PUT /admin/models/mock/workers/2 {"endpoint":"http://127.0.0.1:3"}
PATCH /admin/models/mock/workers/1 {"taints":["a"]}
POST /admin/models/mock/workers/1/cordon
POST /admin/models/mock/workers/1/uncordon
POST /admin/models/mock/workers/1/drain {"timeout_ms":0}
DELETE /admin/models/mock/workers/2
"#;

/// Method, path and body of each line.
fn requests(lines: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    lines.trim().lines().map(|line| {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().unwrap_or_default();
        (word(), word(), word())
    })
}

#[tokio::test]
async fn admin_routes_require_the_token() {
    let client = AdminClient::start().await;
    client.router().upsert_worker(WorkerId(1), WorkerConfig::at("http://127.0.0.1:1")).await.expect("a worker");
    let before = client.router().workers();
    let nowhere = "GET /\nGET /nowhere\nDELETE /admin/models";
    let right = format!("authorization: Bearer {TOKEN}");
    let wrong = format!("authorization: Bearer {TOKEN}x");
    let basic = format!("authorization: Basic {TOKEN}");
    for (method, path, body) in requests(ROUTES).chain(requests(nowhere)) {
        let in_query = format!("{path}?token={TOKEN}&access_token={TOKEN}");
        for (path, headers) in [
            (path, &[] as &[&str]),
            (path, &[&wrong]),
            (path, &[&basic]),
            (path, &["authorization:"]),
            (path, &[&right, &right]),
            (path, &[&format!("x-api-key: {TOKEN}"), &format!("cookie: token={TOKEN}")]),
            (&in_query, &[]),
        ] {
            let answer = client.send_with_headers(method, path, body, headers).await;
            assert_eq!((answer.status, answer.code().as_str()), (401, "invalid_token"), "{method} {path} {headers:?}");
            assert!(answer.head.contains("www-authenticate: Bearer"), "{}", answer.head);
            assert!(!String::from_utf8_lossy(&answer.body).contains(TOKEN));
        }
    }
    assert_eq!(client.router().workers(), before, "no change");
    for (method, path, body) in requests(ROUTES) {
        let answer = client.send(method, path, body).await;
        assert!((200..300).contains(&answer.status), "{method} {path}: {}", String::from_utf8_lossy(&answer.body));
        assert!(answer.head.contains("cache-control: no-store"), "{}", answer.head);
    }
    let left: Vec<WorkerId> = client.router().workers().iter().map(|entry| entry.worker).collect();
    assert_eq!(left, [WorkerId::derived("http://127.0.0.1:2")], "accepted with the token");
    let answer = client.send_as_client("/admin/models/mock/workers", r#"{"endpoint":"http://127.0.0.1:3"}"#).await;
    assert_eq!(answer.status, 404, "clients have no admin path");
}

#[tokio::test]
async fn the_admin_listener_requires_a_token_file() {
    let mut without = settings();
    without.admin = None;
    let gateway = Gateway::start(without).await.expect("start succeeds");
    assert_eq!(gateway.admin_address(), None);
    for (bytes, rule) in
        [(&b"hunter2hunter2\n"[..], "holds 14 bytes, must hold 16"), (b"hunter2 hunter2 hunter2", "visible")]
    {
        let mut refused = settings();
        refused.admin.as_mut().expect("admin settings present").token_file = file(bytes);
        let error = Gateway::start(refused).await.err().expect("rejected").to_string();
        assert!(error.contains(rule) && !error.contains("hunter2"), "{error}");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mut writable = settings();
        let file = &writable.admin.as_mut().expect("admin settings present").token_file;
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o666)).expect("permissions set");
        let error = Gateway::start(writable).await.err().expect("rejected").to_string();
        assert!(error.contains("has mode 666, must not be writable"), "{error}");
    }
    let mut missing = settings();
    missing.admin.as_mut().expect("admin settings present").token_file = "/nowhere/token".into();
    let error = Gateway::start(missing).await.err().expect("rejected").to_string();
    assert!(error.contains("/nowhere/token"), "{error}");
}

#[tokio::test]
async fn a_worker_is_added_drained_and_removed() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, block_size: 4, ..MockConfig::default() });
    let engine = engine.await.expect("an engine");
    let client = AdminClient::start().await;
    let worker = format!("/admin/models/mock/workers/{}", u64::MAX);
    let put = client.send("PUT", &worker, &json!({ "endpoint": engine.url() }).to_string()).await;
    assert_eq!((put.status, &put.json()["id"]), (201, &json!("18446744073709551615")));
    let chat = r#"{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":1}"#;
    let chatted = client.send_as_client("/v1/chat/completions", chat).await;
    assert_eq!(chatted.status, 200, "{}", String::from_utf8_lossy(&chatted.body));

    let patched = client.send("PATCH", &worker, r#"{"taints":["h100"],"total_kv_blocks":100}"#).await;
    let config = &patched.json()["config"];
    assert_eq!((patched.status, &config["taints"], &config["total_kv_blocks"]), (200, &json!(["h100"]), &json!(100)));
    assert_eq!(config["endpoint"], engine.url());

    let router = client.router().clone();
    let placed = router.route(RouteRequest::new("held", Prompt::Tokens(&[1; 8]))).await.expect("a place");
    let listed = client.send("GET", "/admin/models/mock/workers", "").await.json();
    let rank = &listed["workers"][0]["ranks"][0];
    assert_eq!(rank["active_requests"], 1, "{rank}");
    assert_eq!(rank["health"]["state"], "healthy", "{rank}");
    assert_eq!(rank["active_blocks"], 2, "{rank}");
    // The prefill backlog of its 8 tokens decays with time.
    assert!(rank["active_prefill_tokens"].as_u64().is_some_and(|tokens| tokens <= 8), "{rank}");

    let drain = client.begin("POST", &format!("{worker}/drain"), r#"{"timeout_ms":60000}"#).await;
    until("drain started", || router.workers().iter().all(|entry| entry.draining)).await;
    assert!(router.route(RouteRequest::new("late", Prompt::Tokens(&[1]))).await.is_err(), "no new requests");
    for (method, path, body) in [
        ("POST", format!("{worker}/drain"), r#"{"timeout_ms":0}"#),
        ("PATCH", worker.clone(), "{}"),
        ("PUT", worker.clone(), r#"{"endpoint":"http://127.0.0.1:1"}"#),
    ] {
        let answer = client.send(method, &path, body).await;
        assert_eq!((answer.status, answer.code().as_str()), (409, "worker_draining"), "{method} {path}");
    }
    drop(placed);
    let drained = receive(drain).await.expect("a response");
    assert_eq!((drained.status, &drained.json()["cut_off"]), (200, &json!(0)));
    assert_eq!(
        client.send("GET", "/admin/models/mock/workers", "").await.json(),
        json!({ "workers": [], "removed": [] })
    );
    assert_eq!(client.send("DELETE", &worker, "").await.status, 404);
    engine.shutdown().await;
}

#[tokio::test]
async fn an_abandoned_drain_continues_and_reports_cut_off_bookings() {
    let client = AdminClient::start().await;
    let router = client.router().clone();
    let added = client.send("POST", "/admin/models/mock/workers", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    assert_eq!(
        (added.status, added.json()["id"].as_str()),
        (201, Some(&*WorkerId::derived("http://127.0.0.1:1").to_string()))
    );
    let again = client.send("POST", "/admin/models/mock/workers", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    assert_eq!(again.status, 200, "the same endpoint is the same worker");
    let drain = format!("/admin/models/mock/workers/{}/drain", WorkerId::derived("http://127.0.0.1:1"));

    let held = router.route(RouteRequest::new("a", Prompt::Tokens(&[1]))).await.expect("a place");
    let cut_off = client.send("POST", &drain, r#"{"timeout_ms":0}"#).await;
    assert_eq!(cut_off.json()["cut_off"], 1);
    drop(held);

    client.send("POST", "/admin/models/mock/workers", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    let held = router.route(RouteRequest::new("b", Prompt::Tokens(&[1]))).await.expect("a place");
    let abandoned = client.begin("POST", &drain, r#"{"timeout_ms":600000}"#).await;
    until("drain started", || router.workers().iter().all(|entry| entry.draining)).await;
    drop(abandoned);
    drop(held);
    until("worker removed", || router.workers().is_empty()).await;
}

/// Status, code, method, path and body. `W` is the path of the workers, `M` that of the model, `E` a valid endpoint.
const REJECTED: &str = r#"
404 model_not_found GET /admin/models/other/workers
404 model_not_found PUT /admin/models/other/workers/1 {E}
404 model_not_found POST /admin/models/other/explain {"tokens":[1]}
404 worker_not_found PATCH W/9 {}
404 worker_not_found DELETE W/9
404 worker_not_found POST W/9/drain {"timeout_ms":1}
404 worker_not_found POST W/9/undrain
404 worker_not_found POST W/9/cordon
404 worker_not_found POST W/9/uncordon
409 worker_not_draining POST W/1/undrain
400 invalid_worker_id PUT W/one {E}
400 invalid_worker_id PUT W/-1 {E}
400 invalid_worker_id PUT W/+1 {E}
400 invalid_worker_id PUT W/01 {E}
400 invalid_worker_id PUT W/1.0 {E}
400 invalid_worker_id PUT W/18446744073709551616 {E}
400 invalid_worker_id DELETE W/1%2F
400 invalid_json PUT W/2
400 invalid_json PUT W/2 {
400 invalid_json PUT W/2 []
400 invalid_json PUT W/2 {}
400 invalid_json PUT W/2 {E,"endpiont":"x"}
400 invalid_json PUT W/2 {E,"data_parallel_size":"2"}
400 invalid_json PATCH W/1 {"endpiont":"x"}
422 rule_broken PUT W/2 {E,"data_parallel_size":0}
422 rule_broken PUT W/2 {E,"health_path":"x"}
422 rule_broken PUT W/2 {E,"health_path":"/x\r\nhost: y"}
422 rule_broken PUT W/2 {E,"is_eagle":true}
422 rule_broken PUT W/2 {E,"kv_events":{"endpoint":"x"}}
422 rule_broken PUT W/2 {E,"load":{"metrics":"file:///x"}}
422 rule_broken PUT W/2 {"endpoint":"ftp://127.0.0.1"}
422 rule_broken PUT W/2 {"endpoint":"http://me:pw@127.0.0.1"}
422 rule_broken PUT W/2 {"endpoint":"http://e/?a=b"}
422 rule_broken PUT W/2 {"endpoint":"http://e\r\nx: y"}
422 rule_broken POST W {"endpoint":"127.0.0.1:8000"}
422 rule_broken PATCH W/1 {"endpoint":"unix:///x"}
400 invalid_json POST W/1/drain {}
400 invalid_json POST W/1/drain {"timeout_ms":-1}
422 rule_broken POST W/1/drain {"timeout_ms":86400001}
400 invalid_prompt POST M/explain {}
400 invalid_prompt POST M/explain {"tokens":[],"prompt":""}
400 invalid_prompt POST M/explain {"tokens":[],"messages":[]}
400 invalid_prompt POST M/explain {"prompt":"","messages":[]}
400 invalid_prompt POST M/explain {"prompt":"","tools":[]}
400 invalid_json POST M/explain {"tokens":[-1]}
400 invalid_json POST M/explain {"tokens":[1],"tokens":[2]}
400 invalid_json POST M/explain {"tokens":[1],"model":"m"}
400 invalid_json POST M/explain {"tokens":[1],"pin":{"worker":"x"}}
400 invalid_json PATCH W/1 {"taints":[],"taints":["a"]}
400 invalid_json POST M/explain {"tokens":[4294967296]}
400 invalid_json POST M/explain {"tokens":[1],"ttft_ms":0}
400 unknown_class POST M/explain {"tokens":[1],"policy_class":"none"}
400 invalid_request POST M/overlap {"tokens":[1],"overrides":{"temperature":-1}}
405 method_not_allowed POST /admin/models {}
405 method_not_allowed DELETE W
405 method_not_allowed GET W/1/drain
400 unknown_query GET /admin/models?all=true
"#;

#[tokio::test]
async fn rejected_changes_have_a_reason_and_no_effect() {
    let client = AdminClient::start().await;
    let model = "/admin/models/mock";
    client.send("PUT", &format!("{model}/workers/1"), r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    let before = client.router().workers();
    let rejected = async |expected: &str, method: &str, path: &str, body: &str| {
        let path = path.replace('W', "M/workers").replace('M', model);
        let body = body.replace("{E", r#"{"endpoint":"http://127.0.0.1:2""#);
        let answer = client.send(method, &path, &body).await;
        let shown: String = body.chars().take(80).collect();
        assert_eq!(format!("{} {}", answer.status, answer.code()), expected, "{method} {path} {shown}");
        assert!(!String::from_utf8_lossy(&answer.body).contains("pw"), "{method} {path} {shown}");
    };
    for line in REJECTED.trim().lines() {
        let (expected, request) = line.split_at(line.match_indices(' ').nth(1).expect("a request").0);
        let (method, path, body) = requests(request).next().expect("a request");
        rejected(expected, method, path, body).await;
    }
    let deep = format!(r#"{{"messages":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    rejected("400 invalid_json", "POST", "M/explain", &deep).await;
    rejected("400 invalid_json", "POST", "M/explain", "{\"prompt\":\"\u{0}\"}").await;
    rejected("413 body_too_large", "PUT", "W/2", &" ".repeat((8 << 20) + 1)).await;
    assert_eq!(client.router().workers(), before);
}

const AMBIGUOUS: &str = r"
//admin/models
/admin//models
/admin/models/
/admin/models//workers
/./admin/models
/x/../admin/models
/x/%2e%2e/admin/models
/admin/models/%2e%2e/config
/admin/models/../config
/admin/models/mock/../../config
/admin/models/mock/workers/../config
/admin/models/mock%2Fworkers
/admin/models/mock%2Fworkers/config
/admin/models/%6dock%00/config
/admin/models/%ff/config
/admin/models/org/mock/config
/admin/models/%256dock/config
/%61dmin/models
/admin/Models
/admin/models;x=y
/admin\models
http://127.0.0.1/admin/models
http://127.0.0.1:1/admin/models
";

#[tokio::test]
async fn ambiguous_admin_paths_are_rejected() {
    let client = AdminClient::start().await;
    client.send("PUT", "/admin/models/mock/workers/1", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    let long = format!("/admin/models/{}/config", "x".repeat(3000));
    for path in AMBIGUOUS.trim().lines().chain([&*long]) {
        let answer = client.send("GET", path, "").await;
        assert!(answer.status == 404 || (answer.status == 400 && answer.body.is_empty()), "{path}: {}", answer.status);
    }
    assert_eq!(client.send("DELETE", "/admin/models/mock/workers/2/../1", "").await.status, 404);
    assert_eq!(client.router().workers().len(), 1);
    for path in ["/admin/models/mock/config", "/admin/models/%6dock/config", "/admin/models/org%2Fmock/config"] {
        assert_eq!(client.send("GET", path, "").await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn recorded_decisions_are_listed_and_explained_as_they_were() {
    let client = AdminClient::start().await;
    let router = client.router().clone();
    for worker in [1, 2] {
        let config = WorkerConfig::at(format!("http://127.0.0.1:{worker}"));
        router.upsert_worker(WorkerId(worker), config).await.expect("a worker");
    }
    let tokens: Vec<u32> = (1..=400).collect();
    router.apply_events(vec![stored(WorkerRank::new(WorkerId(2), 0), &tokens[..320])]).await.expect("applied");
    router.flush().await.expect("in the index");
    assert_eq!(client.send("GET", "/admin/decisions/chat-1", "").await.code(), "decision_not_recorded");
    for id in ["chat-1/0", "chat-10/1", "chat-1/2"] {
        drop(router.route(RouteRequest::new(id, Prompt::Tokens(&tokens))).await.expect("a rank"));
    }
    // A later state does not change the record.
    router.remove_worker(WorkerId(2)).await.expect("removed");
    drop(router.route(RouteRequest::new("chat-2/3", Prompt::Tokens(&tokens))).await.expect("a rank"));

    let listed = client.send("GET", "/admin/decisions", "").await.json();
    let listed = listed["decisions"].as_array().expect("decisions");
    let ids: Vec<&str> = listed.iter().map(|known| known["request_id"].as_str().expect("an id")).collect();
    assert_eq!(ids, ["chat-1", "chat-10", "chat-1", "chat-2"], "{listed:?}");
    assert_eq!(listed[0]["chosen"], json!({ "worker": "2", "rank": 0, "name": "2/0" }), "no request has kept its name");
    assert_eq!((&listed[0]["model"], &listed[0]["cached_tokens"]), (&json!(MODEL), &json!(320)));
    assert_eq!(listed[0]["runner_up"], json!({ "worker": "1", "rank": 0, "name": "127.0.0.1:1/0" }));
    assert!(listed[0]["margin"].as_f64().expect("a margin") > 0.0, "{listed:?}");

    let explained = client.send("GET", "/admin/decisions/chat-1", "").await.json();
    let explained = explained["decisions"].as_array().expect("decisions");
    let bookings: Vec<&str> = explained.iter().map(|known| known["booking_id"].as_str().expect("an id")).collect();
    assert_eq!(bookings, ["chat-1/0", "chat-1/2"]);
    let table = &explained[1]["explanation"];
    let removed = json!({ "worker": "2", "rank": 0, "name": "2/0" });
    assert_eq!(table["chosen"], removed, "the removed worker is in the table: {table}");
    assert_eq!(table["ranks"].as_array().map(Vec::len), Some(2));
    assert_eq!(table["ranks"][1]["cached_tokens"], 320);
}

#[tokio::test]
async fn explain_and_overlap_book_nothing() {
    let client = AdminClient::start().await;
    let router = client.router().clone();
    for (id, endpoint) in [("1", "http://127.0.0.1:1"), ("18446744073709551615", "http://127.0.0.1:2")] {
        let path = format!("/admin/models/org%2Fmock/workers/{id}");
        client.send("PUT", &path, &json!({ "endpoint": endpoint, "data_parallel_size": 2 }).to_string()).await;
    }
    let tokens: Vec<u32> = (1..=12).collect();
    let holder = WorkerRank::new(WorkerId(u64::MAX), 1);
    router.apply_events(vec![stored(holder, &tokens[..8])]).await.expect("applied");
    router.flush().await.expect("in the index");
    let load = async |when: &str| {
        assert_eq!(router.health().leases, 0, "{when}");
        client.send("GET", "/admin/models/mock/loads", "").await.json()
    };
    let before = load("before").await;

    let explained = client.send("POST", "/admin/models/mock/explain", &json!({ "tokens": tokens }).to_string()).await;
    let explained = explained.json();
    assert_eq!((&explained["tokens_source"], &explained["tokens"]), (&json!("request"), &json!(12)));
    let table = &explained["explanation"];
    let last = json!({ "worker": "18446744073709551615", "rank": 1, "name": "127.0.0.1:2/1" });
    assert_eq!((&table["chosen"], &table["prompt_tokens"]), (&last, &json!(12)), "{table}");
    let rows = table["ranks"].as_array().expect("rows");
    assert_eq!((rows.len(), &rows[3]["rank"], &rows[3]["cached_tokens"]), (4, &last, &json!(8)));

    let pinned = json!({ "tokens": tokens, "pin": { "worker": "1", "rank": 0 }, "allowed_workers": [1, "1"] });
    let pinned = client.send("POST", "/admin/models/mock/explain", &pinned.to_string()).await.json();
    let chosen = json!({ "worker": "1", "rank": 0, "name": "127.0.0.1:1/0" });
    assert_eq!(pinned["explanation"]["chosen"], chosen, "{pinned}");
    let unplaceable =
        json!({ "tokens": tokens, "required_taints": ["none"], "strict_priority": 1, "priority_jump": 0.5 });
    let unplaceable = client.send("POST", "/admin/models/mock/explain", &unplaceable.to_string()).await.json();
    assert_eq!(unplaceable["explanation"]["chosen"], json!(null));
    assert!(unplaceable["explanation"]["rejection"].is_string(), "{unplaceable}");
    let late = json!({ "tokens": tokens, "ttft_ms": 1000, "itl_ms": 0.001, "on_target_miss": "reject" });
    let late = client.send("POST", "/admin/models/mock/explain", &late.to_string()).await.json();
    let refused = late["explanation"]["rejection"].as_str().expect("a reason");
    assert!(refused.starts_with("no rank is predicted to meet the targets, inter-token latency 4.0 ms"), "{late}");
    assert!(late["explanation"]["ranks"][0]["prediction"]["ttft_seconds"].is_f64(), "{late}");
    let text = client.send("POST", "/admin/models/mock/explain", r#"{"prompt":"hello"}"#).await.json();
    assert!(text["tokens_source"].is_string() && text["explanation"]["chosen"].is_object(), "{text}");
    let chat = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
    assert_eq!(client.send("POST", "/admin/models/mock/explain", chat).await.status, 200);

    let held = client.send("POST", "/admin/models/mock/overlap", &json!({ "tokens": tokens }).to_string()).await.json();
    let rows = held["overlap"]["ranks"].as_array().expect("rows");
    assert_eq!((rows.len(), &rows[3]["rank"], &rows[3]["device_blocks"]), (4, &last, &json!(2)), "{held}");
    assert_eq!(held["overlap"]["shared_cache"]["enabled"], false);
    let salted = json!({ "tokens": tokens, "cache_salt": "another" }).to_string();
    let salted = client.send("POST", "/admin/models/mock/overlap", &salted).await.json();
    assert_eq!(salted["overlap"]["ranks"][3]["device_blocks"], 0);

    let after = load("after").await;
    let loads = |load: &Value| {
        let rows = load["ranks"].as_array().expect("rows").clone();
        rows.iter().map(|row| row["active_requests"].as_u64().expect("a count")).collect::<Vec<_>>()
    };
    assert_eq!((loads(&before), loads(&after)), (vec![0; 4], vec![0; 4]));
    assert_eq!((&after["pending"]["requests"], &after["pending"]["tokens"]), (&json!(0), &json!(0)));
}

fn stored(rank: WorkerRank, tokens: &[u32]) -> RouterEvent {
    let block_size = 4.try_into().expect("not zero");
    let hasher = BlockHasher::new(HashScheme { block_size, lora_name: None, cache_salt: None, is_eagle: false });
    let hashed = HashedPrompt::from_tokens(&hasher, tokens, &MmBlocks::NONE);
    let blocks = hashed.block_hashes().iter().zip(1..);
    let blocks = blocks.map(|(hash, n)| StoredBlock { engine_hash: EngineHash(n), block_hash: *hash });
    let data = KvEvent::Stored { parent: None, blocks: blocks.collect() };
    RouterEvent { rank, tier: StorageTier::Device, data }
}

#[tokio::test]
async fn a_dump_rebuilds_the_index() {
    let client = AdminClient::start().await;
    let router = client.router().clone();
    let ranks = WorkerConfig { data_parallel_size: 2, ..WorkerConfig::at("http://127.0.0.1:1") };
    router.upsert_worker(WorkerId(1), ranks).await.expect("a worker");
    let empty = client.send("GET", "/admin/models/mock/dump", "").await;
    assert_eq!((empty.status, empty.body.len()), (200, 0));
    // Longer than one frame of the response body.
    let tokens: Vec<u32> = (0..40_000).collect();
    let events = [0, 1].map(|rank| stored(WorkerRank::new(WorkerId(1), rank), &tokens));
    router.apply_events(events.to_vec()).await.expect("applied");
    let dump = client.send("GET", "/admin/models/mock/dump", "").await;
    assert!(dump.head.contains("content-type: application/x-ndjson"), "{}", dump.head);
    assert!(dump.head.contains("x-dump-lines: 2") && dump.head.contains("x-dump-blocks: 20000"), "{}", dump.head);
    let text = String::from_utf8(dump.body).expect("JSON lines are text");
    let mut read: Vec<RouterEvent> = text.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
    read.sort_by_key(|event| event.rank);
    assert_eq!(read, events);
}

#[tokio::test]
async fn reports_are_complete_and_hide_secrets() {
    let client = AdminClient::start().await;
    client.send("PUT", "/admin/models/mock/workers/1", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    let models = client.send("GET", "/admin/models", "").await.json();
    let model = &models["models"][0];
    assert_eq!((&model["name"], &model["aliases"]), (&json!(MODEL), &json!([ALIAS])));
    assert_eq!((&model["workers"], &model["ranks"], &model["leases"]), (&json!(1), &json!(1), &json!(0)));
    assert_eq!((&model["tokens_source"], &model["block_size"]), (&json!("none"), &json!(4)));

    let health = client.send("GET", "/admin/models/mock/health", "").await.json();
    assert_eq!((&health["up"], &health["cold"], &health["problems"]), (&json!(true), &json!([]), &json!([])));
    let rank = json!({ "worker": "1", "rank": 0, "state": "healthy", "reason": "", "remaining_seconds": null });
    assert_eq!((&health["ranks"], &health["discovery"]), (&json!([rank]), &json!([])));

    let config = client.send("GET", "/admin/models/mock/config", "").await.json();
    assert_eq!((&config["block_size"], &config["index"]["shards"]), (&json!(4), &json!(2)));
    let settings = client.send("GET", "/admin/config", "").await;
    assert!(!String::from_utf8_lossy(&settings.body).contains(TOKEN));
    let settings = settings.json();
    assert!(settings["admin"]["token_file"].is_string() && settings["gateway"]["listen"].is_string(), "{settings}");
    assert_eq!((&settings["models"][0]["name"], &settings["tenants"]), (&json!(MODEL), &json!([])));
}

#[tokio::test]
async fn the_read_token_permits_get_only() {
    let mut settings = settings();
    let read = "read-0123456789abcdef";
    settings.admin.as_mut().expect("enabled").read_token_file = Some(file(read.as_bytes()));
    let client = AdminClient::with(settings).await;
    let header = format!("authorization: Bearer {read}");
    for path in ["/admin/models", "/admin/models/mock/workers", "/admin/config", "/live", "/health", "/metrics"] {
        assert_eq!(client.send_with_headers("GET", path, "", &[&header]).await.status, 200, "{path}");
    }
    let worker = r#"{"endpoint":"http://127.0.0.1:1"}"#;
    for (method, path, body) in [
        ("PUT", "/admin/models/mock/workers/1", worker),
        ("POST", "/admin/models/mock/workers", worker),
        ("DELETE", "/admin/models/mock/workers/1", ""),
        ("POST", "/admin/models/mock/explain", r#"{"tokens":[1]}"#),
        ("POST", "/admin/reload", ""),
        ("POST", "/admin/nothing", ""),
    ] {
        let answer = client.send_with_headers(method, path, body, &[&header]).await;
        assert_eq!((answer.status, answer.code().as_str()), (403, "read_only_token"), "{method} {path}");
    }
    assert!(client.router().workers().is_empty());
    let other = client.send_with_headers("GET", "/admin/models", "", &["authorization: Bearer read-0123456789abcdee"]);
    assert_eq!(other.await.status, 401);
}

#[tokio::test]
async fn durations_in_responses_are_seconds() {
    let client = AdminClient::start().await;
    client.send("PUT", "/admin/models/mock/workers/1", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    let explained = client.send("POST", "/admin/models/mock/explain", r#"{"tokens":[1,2,3,4,5]}"#).await.json();
    let row = &explained["explanation"]["ranks"][0];
    assert!(row["load_age_seconds"].is_f64() && row["index_age_seconds"].is_null(), "{row}");
    let mut responses = vec![explained];
    for report in ["", "/mock/health", "/mock/loads", "/mock/workers"] {
        responses.push(client.send("GET", &format!("/admin/models{report}"), "").await.json());
    }
    responses.push(client.send("GET", "/admin/reload", "").await.json());
    for response in responses {
        let names = field_names(&response);
        let other: Vec<_> = names.iter().filter(|name| is_other_duration(name)).collect();
        assert!(other.is_empty(), "{other:?} in {response}");
    }
}

/// Whether a name has a unit of time other than `_seconds`, or is a field of serde's durations.
fn is_other_duration(name: &str) -> bool {
    let units = ["_ms", "_s", "_secs", "_us", "_ns", "_nanos"];
    ["secs", "nanos"].contains(&name) || units.iter().any(|unit| name.ends_with(unit))
}

/// Names of all fields, without those of configurations, which have the units of the settings.
fn field_names(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(name, _)| *name != "config");
            fields.flat_map(|(name, value)| [vec![name.clone()], field_names(value)].concat()).collect()
        }
        Value::Array(values) => values.iter().flat_map(field_names).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    }
}

#[tokio::test]
async fn every_command_of_the_documentation_works() {
    let page = include_str!("../../docs/admin.md");
    let commands: Vec<&str> = page.lines().filter(|line| line.starts_with("curl ")).collect();
    assert!(commands.len() > 15, "{commands:?}");
    let client = AdminClient::start().await;
    for command in commands {
        let rest = command.strip_prefix(r#"curl -sH "$AUTH" "#).expect("the command uses the token");
        let rest = rest.split(" | ").next().unwrap_or_default();
        let (rest, body) = rest.split_once(" -d ").unwrap_or((rest, ""));
        let given = if body.is_empty() { "GET" } else { "POST" };
        let (method, url) = match rest.strip_prefix("-X ") {
            Some(rest) => rest.split_once(' ').expect("a method"),
            None => (given, rest),
        };
        let path = url.replace("$ADMIN", "/admin").replace("http://127.0.0.1:8081", "");
        let answer = client.send(method, &path, body.trim_matches('\'')).await;
        assert!((200..300).contains(&answer.status), "{command}: {}", String::from_utf8_lossy(&answer.body));
    }
    assert!(client.router().workers().is_empty(), "all added workers are removed");
}

#[tokio::test]
async fn shutdown_ends_waiting_admin_requests() {
    let client = AdminClient::start().await;
    let router = client.router().clone();
    client.send("PUT", "/admin/models/mock/workers/1", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    let held = router.route(RouteRequest::new("held", Prompt::Tokens(&[1]))).await.expect("a place");
    let drain = client.begin("POST", "/admin/models/mock/workers/1/drain", r#"{"timeout_ms":600000}"#).await;
    until("drain started", || router.workers().iter().all(|entry| entry.draining)).await;
    client.gateway.shutdown(Duration::ZERO).await;
    assert_eq!(receive(drain).await.expect("a response").status, 503);
    drop(held);
}
