//! Requests through the gateway: to workers and back byte for byte, and to another worker after a failure.

use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{
    self, Act, Answer, EVENT, FINE, FINE_JSON, Scripted, answer, at_rest, gateway, get, post, receive, request, send,
    settings, stream, stream_end, until, worker,
};

const CHAT: &str = "/v1/chat/completions";

async fn engine(loras: &[&str]) -> MockEngine {
    let loras = loras.iter().map(|name| (*name).to_owned()).collect();
    let config = MockConfig { time_scale: 0.0, data_parallel_size: 2, loras, ..MockConfig::default() };
    MockEngine::start(config).await.expect("start succeeds")
}

fn chat(model: &str, stream: bool) -> serde_json::Value {
    let messages = json!([{ "role": "user", "content": "What does a pointsman do?" }]);
    json!({ "model": model, "messages": messages, "max_tokens": 8, "stream": stream })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_endpoint_works_through_the_gateway() {
    let engine = engine(&[]).await;
    let gateway = gateway(settings(vec![worker(1, &engine.url(), 2)])).await;
    let whole = post(&gateway, CHAT, &chat("mock", false)).await;
    assert_eq!((whole.status, &whole.json()["object"]), (200, &json!("chat.completion")));
    let streamed = post(&gateway, CHAT, &chat("mock", true)).await;
    assert!(streamed.is_whole && streamed.text().ends_with("data: [DONE]\n\n"), "{streamed:?}");
    assert_eq!(streamed.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let completed =
        post(&gateway, "/v1/completions", &json!({ "model": "mock", "prompt": [1, 2], "max_tokens": 2 })).await;
    assert_eq!((completed.status, &completed.json()["usage"]["completion_tokens"]), (200, &json!(2)));
    // Routes that the engine does not support return the engine's own error.
    let unknown = post(&gateway, "/v1/embeddings", &json!({ "model": "mock", "input": "text" })).await;
    assert_eq!(unknown.status, 404, "{unknown:?}");
    at_rest(&gateway).await;
    let page = get(&gateway, "/metrics").await;
    for series in [
        "requests_total{model=\"mock\",endpoint=\"chat\",status=\"200\"}",
        "requests_total{model=\"mock\",endpoint=\"embeddings\",status=\"404\"}",
        "time_to_first_byte_seconds_count{model=\"mock\"}",
        "request_seconds_count{model=\"mock\"}",
        "overhead_seconds_count",
    ] {
        assert!(page.text().contains(&format!("pointsman_gateway_{series} ")), "{series}: {}", page.text());
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn models_are_listed_under_every_name() {
    let mut settings = settings(vec![worker(1, "http://127.0.0.1:9", 1)]);
    settings.models[0].aliases = vec!["org/alias".to_owned()];
    settings.models[0].workers[0].config.lora_adapters = ["tuned".to_owned()].into();
    let gateway = gateway(settings).await;
    let list = get(&gateway, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let names: Vec<_> = list["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["mock", "org/alias", "tuned"]);
    assert!(
        list["data"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|model| { model["object"] == "model" && model["owned_by"].is_string() && model["created"].is_u64() })
    );
    let one = get(&gateway, "/v1/models/org/alias").await;
    assert_eq!((one.status, &one.json()["parent"]), (200, &json!("mock")));
    let none = get(&gateway, "/v1/models/other").await;
    assert_eq!((none.status, none.code().as_str()), (404, "model_not_found"));
}

#[tokio::test]
async fn other_paths_and_methods_return_openai_errors() {
    let gateway = gateway(settings(Vec::new())).await;
    let cases = [
        ("GET", "/", 404, "path_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/%ff", 404, "path_not_found"),
        ("GET", "/ready?model=a&model=b", 400, "invalid_query"),
    ];
    for (method, path, status, code) in cases {
        let answer = request(gateway.address(), method, path, "x-request-id: mine\r\n", b"").await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{method} {path}");
        assert_eq!(answer.header("x-request-id"), Some("mine"), "{method} {path}");
    }
    let made = get(&gateway, "/v1/models").await;
    assert_eq!((made.status, made.header("x-request-id").map(str::len)), (200, Some(32)));
    let unknown = post(&gateway, CHAT, &chat("other", false)).await;
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "model_not_found"));
    let unavailable = post(&gateway, CHAT, &chat("mock", false)).await;
    assert_eq!(unavailable.status, 503, "{unavailable:?}");
    assert!(unavailable.header("retry-after").is_some());
}

#[tokio::test]
async fn announced_and_received_long_bodies_are_rejected() {
    let mut settings = settings(vec![worker(1, "http://127.0.0.1:9", 1)]);
    settings.gateway.body_bytes_max = 100;
    let gateway = gateway(settings).await;
    let announced = request(gateway.address(), "POST", CHAT, "", &[b' '; 101]).await;
    assert_eq!((announced.status, announced.code().as_str()), (413, "body_too_large"));
    let chunked = format!("65\r\n{}\r\n0\r\n\r\n", " ".repeat(0x65));
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut stream = tokio::net::TcpStream::connect(gateway.address()).await.expect("connection accepted");
    tokio::io::AsyncWriteExt::write_all(&mut stream, (head.to_owned() + &chunked).as_bytes())
        .await
        .expect("request written");
    let response = receive(stream).await.expect("response received");
    assert_eq!((response.status, response.code().as_str()), (413, "body_too_large"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_forwarded_byte_for_byte() {
    let events = ["data: {\"choices\": [ {\"delta\":{}} ]}\n\n", "data: {\"x\":\"\u{e9}\"}\n", "\ndata: [DONE]\n\n"];
    let scripted = Scripted::start(move |_| [stream(&events), vec![stream_end()]].concat()).await;
    let gateway = gateway(settings(vec![worker(1, &scripted.url(), 1)])).await;
    let body =
        "{ \"model\":\"mock\" ,\n\t\"messages\" : [ ], \"stream\": true, \"unknown\": [1.50, 1e3, \"\\u00e9\"] }";
    let headers = "x-request-id: abc-1\r\nauthorization: Bearer key\r\nx-data-parallel-rank: 7\r\n";
    let answer = request(gateway.address(), "POST", CHAT, headers, body.as_bytes()).await;
    assert_eq!((answer.status, answer.text()), (200, events.concat().as_str()));
    assert_eq!(answer.header("x-request-id"), Some("abc-1"));
    let got = &scripted.requests()[0];
    assert_eq!(got.text(), body);
    assert!(got.head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{}", got.head);
    assert_eq!(got.header("x-request-id"), Some("abc-1"));
    assert_eq!(got.header("x-data-parallel-rank"), None, "the worker has one rank");
    let made = request(gateway.address(), "POST", CHAT, "", body.as_bytes()).await;
    assert_eq!(made.header("x-request-id").map(str::len), Some(32));
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_are_forwarded_on_arrival() {
    // The worker sends no further bytes: only a gateway that forwards immediately delivers this event.
    let scripted = Scripted::start(|_| [stream(&[EVENT]), vec![Act::Hang]].concat()).await;
    let gateway = gateway(settings(vec![worker(1, &scripted.url(), 1)])).await;
    let mut client =
        send(gateway.address(), "POST", CHAT, "", br#"{"model":"mock","messages":[],"stream":true}"#).await;
    let mut seen = Vec::new();
    while !seen.windows(EVENT.len()).any(|bytes| bytes == EVENT.as_bytes()) {
        let read = tokio::io::AsyncReadExt::read_buf(&mut client, &mut seen).await.expect("frame received");
        assert!(read > 0, "{}", String::from_utf8_lossy(&seen));
    }
    let router = gateway.router("mock").expect("model is served").clone();
    assert_eq!(router.health().leases, 1);
    // When the client disconnects, the gateway cancels the worker request.
    drop(client);
    until("all connections to the worker are closed", || scripted.seen(|seen| seen.hung_up) == 1).await;
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnect_before_the_first_byte_cancels_the_request() {
    let scripted = Scripted::start(|_| vec![Act::Hang]).await;
    let gateway = gateway(settings(vec![worker(1, &scripted.url(), 1)])).await;
    let client = send(gateway.address(), "POST", CHAT, "", br#"{"model":"mock","messages":[]}"#).await;
    until("the worker has the request", || scripted.seen(|seen| seen.requests.len()) == 1).await;
    drop(client);
    until("all connections to the worker are closed", || scripted.seen(|seen| seen.hung_up) == 1).await;
    at_rest(&gateway).await;
}

/// Sends requests until the first worker, which fails as scripted, has received one. Each response must come from the
/// second worker.
async fn retried(acts: Vec<Act>) {
    let failing = Scripted::start(move |_| acts.clone()).await;
    retried_from(&failing.url(), || failing.seen(|seen| seen.requests.len()) > 0).await;
}

async fn retried_from(url: &str, request_counts: impl Fn() -> bool) {
    let good = Scripted::start(|_| answer("200 OK", FINE)).await;
    let mut settings = settings(vec![worker(1, url, 1), worker(2, &good.url(), 1)]);
    settings.gateway.first_byte_timeout_ms = 300;
    let gateway = gateway(settings).await;
    for _ in 0..8 {
        let answer = post(&gateway, CHAT, &chat("mock", true)).await;
        assert_eq!((answer.status, answer.text()), (200, FINE), "{answer:?}");
        if request_counts() {
            break;
        }
    }
    assert!(request_counts(), "the failing worker received a request");
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_before_the_first_byte_are_retried() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 4\r\n\r\n";
    let head = Act::Send(head.as_bytes().to_vec());
    retried(vec![Act::Reset]).await;
    retried(vec![Act::Close]).await;
    retried(vec![Act::Hang]).await;
    retried(vec![Act::Send(b"garbage\r\n\r\n".to_vec()), Act::Close]).await;
    retried(vec![head.clone(), Act::Hang]).await;
    retried(vec![head, Act::Close]).await;
    retried(answer("500 Oops", "oops")).await;
    retried(answer("503 Busy", "later")).await;
    retried(answer("429 Busy", "later")).await;
    retried(answer("302 Elsewhere", "")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_worker_is_skipped() {
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound");
    let request_counts = std::sync::atomic::AtomicU32::new(0);
    // Round-robin: the second request starts there at the latest.
    let twice = || request_counts.fetch_add(1, std::sync::atomic::Ordering::Relaxed) > 0;
    retried_from(&format!("http://{closed}"), twice).await;
}

/// The response of a gateway whose two workers both follow this script.
async fn failed(acts: Vec<Act>) -> Answer {
    let script = move |_| acts.clone();
    let workers = [Scripted::start(script.clone()).await, Scripted::start(script).await];
    let mut settings = settings(vec![worker(1, &workers[0].url(), 1), worker(2, &workers[1].url(), 1)]);
    settings.gateway.first_byte_timeout_ms = 300;
    let gateway = gateway(settings).await;
    let answer = post(&gateway, CHAT, &chat("mock", true)).await;
    let request_counts: Vec<_> = workers.iter().map(|worker| worker.requests().len()).collect();
    if answer.status >= 429 {
        assert_eq!(request_counts, [1, 1], "each rank is tried once");
    } else {
        assert_eq!(request_counts.iter().sum::<usize>(), 1, "the response is final");
    }
    at_rest(&gateway).await;
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_most_specific_error_is_returned_if_all_workers_fail() {
    let code = async |acts| {
        let answer = failed(acts).await;
        (answer.status, answer.code())
    };
    assert_eq!(code(vec![Act::Reset]).await, (502, "worker_failed".to_owned()));
    assert_eq!(code(vec![Act::Hang]).await, (504, "worker_timeout".to_owned()));
    let own = failed(answer("503 Busy", "full")).await;
    assert_eq!((own.status, own.text()), (503, "full"), "a worker's own words");
    let refused = failed(answer("400 Bad", "no such field")).await;
    assert_eq!((refused.status, refused.text()), (400, "no such field"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_unstreamed_responses_are_not_retried_and_count() {
    let workers = [Scripted::start(|_| vec![Act::Hang]).await, Scripted::start(|_| vec![Act::Hang]).await];
    let mut settings = settings(vec![worker(1, &workers[0].url(), 1), worker(2, &workers[1].url(), 1)]);
    settings.gateway.answer_timeout_ms = 300;
    settings.models[0].router.health.outcome_failures_max = 1;
    let gateway = gateway(settings).await;
    let answer = post(&gateway, CHAT, &chat("mock", false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "worker_timeout"));
    assert_eq!(workers.iter().map(|worker| worker.requests().len()).sum::<usize>(), 1);
    let health = gateway.router("mock").expect("model is served").rank_health().await.expect("router is running");
    let timed_out = health.iter().filter(|rank| rank.reason.contains("timed out")).count();
    assert_eq!(timed_out, 1, "the rank sent nothing to other requests either: {health:?}");
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_worker_is_retried_after_a_close_without_response() {
    let script = |n| if n == 0 { vec![Act::Close] } else { answer("200 OK", FINE) };
    let only = Scripted::start(script).await;
    let gateway = gateway(settings(vec![worker(1, &only.url(), 1)])).await;
    let answer = post(&gateway, CHAT, &chat("mock", true)).await;
    assert_eq!((answer.status, answer.text()), (200, FINE), "{answer:?}");
    assert_eq!(only.requests().len(), 2);
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_worker_with_many_ranks_costs_one_attempt() {
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound");
    let good = Scripted::start(|_| answer("200 OK", FINE)).await;
    let gone = format!("http://{closed}");
    let mut settings = settings(vec![worker(1, &gone, 8), worker(2, &good.url(), 1)]);
    settings.gateway.attempts_max = 2;
    let gateway = gateway(settings).await;
    for _ in 0..9 {
        let answer = post(&gateway, CHAT, &chat("mock", true)).await;
        assert_eq!((answer.status, answer.text()), (200, FINE), "{answer:?}");
    }
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_retry_after_the_first_byte_and_cut_responses_are_detectable() {
    let begun = stream(&[EVENT]);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n";
    let whole_head = Act::Send([head, EVENT].concat().into_bytes());
    for acts in
        [[begun.clone(), vec![Act::Reset]].concat(), [begun, vec![Act::Close]].concat(), vec![whole_head, Act::Close]]
    {
        let script = move |_| acts.clone();
        let workers = [Scripted::start(script.clone()).await, Scripted::start(script).await];
        let workers_given = vec![worker(1, &workers[0].url(), 1), worker(2, &workers[1].url(), 1)];
        let gateway = gateway(settings(workers_given)).await;
        let answer = post(&gateway, CHAT, &chat("mock", true)).await;
        assert!(answer.status == 200 && !answer.is_whole, "{answer:?}");
        assert_eq!(workers.iter().map(|worker| worker.requests().len()).sum::<usize>(), 1);
        at_rest(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_streams_are_cut_off() {
    let scripted = Scripted::start(|_| [stream(&[EVENT]), vec![Act::Hang]].concat()).await;
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    settings.gateway.idle_timeout_ms = 100;
    let gateway = gateway(settings).await;
    let answer = post(&gateway, CHAT, &chat("mock", true)).await;
    assert!(answer.status == 200 && !answer.is_whole && answer.text() == EVENT, "{answer:?}");
    until("all connections to the worker are closed", || scripted.seen(|seen| seen.hung_up) == 1).await;
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_are_selected_at_workers_with_several() {
    let scripted = Scripted::start(|_| answer("200 OK", FINE_JSON)).await;
    let gateway = gateway(settings(vec![worker(1, &scripted.url(), 2)])).await;
    for _ in 0..2 {
        assert_eq!(post(&gateway, CHAT, &chat("mock", false)).await.status, 200);
    }
    let requests = scripted.requests();
    let mut ranks: Vec<_> = requests.iter().map(|got| got.header("x-data-parallel-rank")).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [Some("0"), Some("1")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_receive_their_own_model_names() {
    let scripted = Scripted::start(|_| answer("200 OK", FINE_JSON)).await;
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    settings.models[0].aliases = vec!["alias".to_owned()];
    settings.models[0].upstream_name = Some("org/base".to_owned());
    settings.models[0].workers[0].config.lora_adapters = ["tuned".to_owned()].into();
    let gateway = gateway(settings).await;
    for (request_counts, sent) in [("mock", "org/base"), ("alias", "org/base"), ("tuned", "tuned")] {
        let body = format!("{{\"messages\":[],  \"model\" : \"{request_counts}\"}}");
        let answer = request(gateway.address(), "POST", CHAT, "", body.as_bytes()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let got = scripted.requests().pop().expect("request received");
        assert_eq!(got.text(), body.replace(request_counts, sent));
    }
    // An adapter added later is served as soon as its worker advertises it.
    let router = gateway.router("mock").expect("model is served").clone();
    let entry = router.workers()[0].clone();
    let mut config = entry.config;
    config.lora_adapters.insert("new".to_owned());
    router.upsert_worker(entry.worker, config).await.expect("router is running");
    let answer = post(&gateway, CHAT, &chat("new", false)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    // A request without a model uses the only model, and the body is forwarded unchanged.
    let nameless = request(gateway.address(), "POST", CHAT, "", br#"{"messages":[]}"#).await;
    assert_eq!(nameless.status, 200, "{nameless:?}");
    assert_eq!(scripted.requests().pop().expect("request received").text(), r#"{"messages":[]}"#);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_authenticate_and_have_separate_salts() {
    let scripted = Scripted::start(|_| answer("200 OK", FINE_JSON)).await;
    let directory = std::env::temp_dir().join(format!("pointsman-proxy-tenants-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory for the test's files");
    let file = |name: &str, content: &str| {
        let path = directory.join(name);
        std::fs::write(&path, content).expect("file written");
        path
    };
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    settings.gateway.salt_secret_file = Some(file("salt", "0123456789abcdef"));
    settings.gateway.worker_api_key_file = Some(file("worker", "worker-key-01234"));
    settings.tenants = ["a", "b"]
        .map(|name| pointsman_gateway::settings::TenantSettings {
            name: name.to_owned(),
            keys_file: file(name, &format!("key-of-{name}-0123456789\n")),
            ..pointsman_gateway::settings::TenantSettings::default()
        })
        .into();
    let gateway = gateway(settings).await;
    let send = async |headers: &str, body: &str| {
        let answer = request(gateway.address(), "POST", CHAT, headers, body.as_bytes()).await;
        (answer.status == 200).then(|| scripted.requests().pop().expect("request received")).ok_or(answer)
    };
    let body = r#"{"model":"mock","messages":[],"cache_salt":"own"}"#;
    let refused = send("", body).await.expect_err("rejected without a key");
    assert_eq!((refused.status, refused.code().as_str()), (401, "invalid_api_key"));
    assert_eq!(get(&gateway, "/v1/models").await.status, 401);
    let a = send("authorization: Bearer key-of-a-0123456789\r\n", body).await.expect("the key of a is accepted");
    let b = send("authorization: Bearer key-of-b-0123456789\r\n", body).await.expect("the key of b is accepted");
    let salt = |got: &proxy::Got| {
        let body: serde_json::Value = serde_json::from_str(got.text()).expect("JSON");
        body["cache_salt"].as_str().expect("a salt").to_owned()
    };
    assert!(salt(&a) != salt(&b) && salt(&a) != "own" && salt(&a).len() == 32, "{a:?} {b:?}");
    assert_eq!(a.header("authorization"), Some("Bearer worker-key-01234"));
    std::fs::remove_dir_all(&directory).expect("test directory removed");
}
