//! Requests through the gateway: to workers and back byte for byte, and to another worker after a failure.

use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{
    Act, FINE_JSON, Scripted, answer, at_rest, gateway, get, post, request, settings, stream, stream_end, worker, write,
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
    settings.models[0].workers[0].config.max_model_len = Some(4_096);
    let gateway = gateway(settings).await;
    let list = get(&gateway, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let models = list["data"].as_array().expect("a list");
    assert_eq!(models.iter().map(|model| &model["id"]).collect::<Vec<_>>(), ["mock", "org/alias", "tuned"]);
    for model in models {
        assert!(model["object"] == "model" && model["owned_by"].is_string() && model["created"].is_u64(), "{model}");
    }
    let one = get(&gateway, "/v1/models/org/alias").await;
    assert_eq!((one.status, &one.json()["parent"]), (200, &json!("mock")));
    let none = get(&gateway, "/v1/models/other").await;
    assert_eq!((none.status, none.code().as_str()), (404, "model_not_found"));
    assert_eq!((&list["data"][0]["max_model_len"], &one.json()["max_model_len"]), (&json!(4_096), &json!(4_096)));
}

/// Engines respond with their own name of the model.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_name_the_model_as_requested() {
    let chunk = |name: &str| {
        format!(
            "data: {{\"id\":\"x\",\"model\":\"{name}\",\"choices\":[{{\"text\":\"m\",\"finish_reason\":\"stop\"}}]}}\n\n"
        )
    };
    let whole =
        |name: &str| format!("{{\"choices\":[{{\"text\":\"\\\"model\\\":\\\"mock\\\"\"}}],\"model\": \"{name}\"}}");
    let (events, json) = (chunk("mock"), whole("mock"));
    let scripted = Scripted::start(move |n| match n % 4 {
        0 => [stream(&[&events[..30], &events[30..], "data: [DONE]\n\n"]), vec![stream_end()]].concat(),
        1 | 2 => answer("200 OK", &json),
        _ => answer("400 Bad Request", &json),
    })
    .await;
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    settings.models[0].aliases = vec!["claude".to_owned()];
    let gateway = gateway(settings).await;
    for name in ["claude", "mock"] {
        let ask = async |path: &str, stream: bool| {
            let body = json!({ "model": name, "prompt": [1], "stream": stream });
            let answer = post(&gateway, path, &body).await;
            (answer.status, answer.text().to_owned(), answer.is_whole)
        };
        assert_eq!(ask("/v1/completions", true).await, (200, chunk(name) + "data: [DONE]\n\n", true));
        for path in ["/v1/completions", "/v2/rerank"] {
            assert_eq!(ask(path, false).await, (200, whole(name), true), "{path}");
        }
        assert_eq!(ask("/v1/completions", false).await, (400, whole("mock"), true), "errors pass");
    }
    assert!(scripted.requests().iter().all(|request| request.text().contains("\"mock\"")));
}

#[tokio::test]
async fn models_have_anthropic_form_for_its_clients() {
    let mut settings = settings(vec![worker(1, "http://127.0.0.1:9", 1)]);
    settings.models[0].aliases = vec!["claude".to_owned()];
    settings.models[0].workers[0].config.max_model_len = Some(4_096);
    let gateway = gateway(settings).await;
    let ask =
        async |path: &str| request(gateway.address(), "GET", path, "anthropic-version: 2023-06-01\r\n", b"").await;
    let list = ask("/v1/models").await.json();
    let ends = ["first_id", "last_id", "has_more"].map(|field| list[field].clone());
    assert_eq!(ends, [json!("mock"), json!("claude"), json!(false)]);
    let card = ask("/v1/models/claude").await.json();
    assert_eq!(card, list["data"][1]);
    let fields = ["type", "id", "display_name", "max_input_tokens"].map(|field| card[field].clone());
    assert_eq!(fields, [json!("model"), json!("claude"), json!("claude"), json!(4_096)]);
    let created = card["created_at"].as_str().expect("a date");
    assert!(created.starts_with("20") && created.ends_with('Z'), "{created}");
    let none = ask("/v1/models/other").await;
    assert_eq!((none.status, &none.json()["error"]["type"]), (404, &json!("not_found_error")));
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
    let version = "anthropic-version: 2023-06-01\r\n";
    for (path, headers, error_at) in [
        ("/v1/files", "", "code"),
        ("/v1/batches", "", "code"),
        ("/v1/files", version, "type"),
        ("/v1/messages/batches", "", "type"),
    ] {
        let answer = request(gateway.address(), "POST", path, headers, b"{}").await;
        let kinds =
            [&answer.json()["type"], &answer.json()["error"]["type"]].map(|kind| kind.as_str().map(str::to_owned));
        let outer = Some("error").filter(|_| error_at == "type").map(str::to_owned);
        assert_eq!((answer.status, kinds), (404, [outer, Some("not_found_error".to_owned())]), "{path}");
        assert_eq!(answer.json()["error"]["code"].is_null(), error_at == "type", "{path}");
    }
    let made = get(&gateway, "/v1/models").await;
    assert_eq!((made.status, made.header("x-request-id").map(str::len)), (200, Some(32)));
    let unknown = post(&gateway, CHAT, &chat("other", false)).await;
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "model_not_found"));
    let unavailable = post(&gateway, CHAT, &chat("mock", false)).await;
    assert_eq!(unavailable.status, 503, "{unavailable:?}");
    assert!(unavailable.header("retry-after").is_some());
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
async fn ranks_are_selected_at_workers_with_several() {
    // Heads may have many headers.
    let many: String = (0..360).map(|n| format!("x-{n}: 1\r\n")).collect();
    let response = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{many}content-length: ");
    let response = write(format!("{response}{}\r\n\r\n{FINE_JSON}", FINE_JSON.len()));
    let scripted = Scripted::responding_with(vec![response]).await;
    let gateway = gateway(settings(vec![worker(1, &scripted.url(), 2)])).await;
    for _ in 0..2 {
        let body = chat("mock", false).to_string();
        let answer = request(gateway.address(), "POST", CHAT, &many, body.as_bytes()).await;
        assert_eq!((answer.status, answer.header("x-359")), (200, Some("1")));
    }
    assert_eq!(scripted.requests()[0].header("x-359"), Some("1"));
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
    settings.models[0].workers[0].config.max_model_len = Some(4_096);
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
