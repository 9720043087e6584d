//! Endpoints besides those of the chat and completion APIs: paths, methods, forms, and paths of the settings.

use pointsman::policy::Policy;
use pointsman::{RouterConfig, config::EventMode};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{RouteSettings, Settings};
use serde_json::json;

use crate::common::proxy::{
    Scripted, answer, at_rest, gateway, get, post, request, settings, stream, stream_end, worker, write,
};

/// Settings of one scripted worker, with a second model without workers, and the alias `alias`.
fn two_models(worker_url: &str) -> Settings {
    let mut settings = settings(vec![worker(1, worker_url, 1)]);
    settings.models[0].aliases = vec!["alias".to_owned()];
    let other = settings.models[0].clone();
    settings.models.push(other);
    settings.models[1].workers.clear();
    settings.models[1].aliases.clear();
    settings.models[1].name = "other".to_owned();
    settings.models[1].router.pool = "other".to_owned();
    settings
}

fn form(boundary: &str, model: &str) -> String {
    let field = |name: &str, value: &str| {
        format!("--{boundary}\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let file =
        format!("--{boundary}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\nRIFF\0\r\n");
    [&*file, &*field("model", model), &format!("--{boundary}--\r\n")].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_of_engines_reach_a_worker_unchanged() {
    let scripted = Scripted::start(|_| answer("200 OK", "{\"a\":1}")).await;
    let gateway = gateway(two_models(&scripted.url())).await;
    for path in [
        "/v1/chat/completions/batch",
        "/v2/embed",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
        "/v1/score",
        "/score",
        "/v1/classify",
        "/classify",
        "/pooling",
        "/tokenize",
        "/v1/tokenize",
        "/detokenize",
        "/v1/detokenize",
        "/v1/images/generations",
    ] {
        let body = r#"{ "model" : "mock", "anything": [1.50] }"#;
        let served = request(gateway.address(), "POST", path, "", body.as_bytes()).await;
        assert_eq!((served.status, served.text()), (200, "{\"a\":1}"), "{path}");
        let got = scripted.requests().pop().expect("a request");
        assert!(got.head.starts_with(&format!("POST {path} HTTP/1.1\r\n")), "{}", got.head);
        assert_eq!(got.text(), body, "{path}");
        let refused = request(gateway.address(), "GET", path, "", b"").await;
        assert_eq!((refused.status, refused.header("allow")), (405, Some("POST")), "{path}");
    }
    let served = get(&gateway, "/tokenizer_info?model=alias&x=%20").await;
    assert_eq!(served.status, 200, "{served:?}");
    let got = scripted.requests().pop().expect("a request");
    assert!(got.head.starts_with("GET /tokenizer_info?model=alias&x=%20 HTTP/1.1\r\n"), "{}", got.head);
    let ambiguous = get(&gateway, "/tokenizer_info").await;
    assert_eq!((ambiguous.status, ambiguous.code().as_str()), (400, "missing_field"));
    let refused = post(&gateway, "/tokenizer_info", &json!({})).await;
    assert_eq!((refused.status, refused.header("allow")), (405, Some("GET")));
    at_rest(&gateway).await;
    let page = get(&gateway, "/metrics").await;
    assert!(page.metric("pointsman_gateway_requests_total", &["endpoint=\"rerank\"", "status=\"200\""]) >= 3.0);
}

/// A stream in OpenAI's form.
const TRANSCRIPT: &str = "data: {\"type\":\"transcript.text.delta\",\"delta\":\"a\"}\n\n\
                          data: {\"type\":\"transcript.text.done\",\"text\":\"a\"}\n\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forms_go_to_a_worker_of_their_model() {
    let scripted = Scripted::start(|number| match number {
        0 => answer("200 OK", "{\"text\":\"hello\"}"),
        1 => vec![write("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello")],
        2 => [stream(&["data: {\"x\":1}\n\n"]), vec![stream_end()]].concat(),
        3 => [stream(&["data: {\"error\":\"dead\"}\n\n"]), vec![stream_end()]].concat(),
        _ => [stream(&[TRANSCRIPT]), vec![stream_end()]].concat(),
    })
    .await;
    let gateway = gateway(two_models(&scripted.url())).await;
    let send = async |path: &str, model: &str| {
        let headers = "content-type: multipart/form-data; boundary=XyZ\r\n";
        request(gateway.address(), "POST", path, headers, form("XyZ", model).as_bytes()).await
    };
    for (path, expected) in [
        ("/v1/audio/transcriptions", "{\"text\":\"hello\"}"),
        ("/v1/audio/translations", "hello"),
        ("/v1/audio/transcriptions", "data: {\"x\":1}\n\n"),
    ] {
        let served = send(path, "alias").await;
        assert_eq!((served.status, served.text(), served.is_whole), (200, expected, true));
        let got = scripted.requests().pop().expect("a request");
        assert!(got.head.starts_with(&format!("POST {path} HTTP/1.1\r\n")), "{}", got.head);
        assert_eq!(got.header("content-type"), Some("multipart/form-data; boundary=XyZ"));
        assert_eq!(got.text(), form("XyZ", "mock"), "the alias is replaced, all else unchanged");
    }
    let streamed =
        "--XyZ\r\ncontent-disposition: form-data; name=stream\r\n\r\ntrue\r\n".to_owned() + &form("XyZ", "mock");
    for (status, expected) in [(500, "\"message\":\"dead\""), (200, TRANSCRIPT)] {
        let headers = "content-type: multipart/form-data; boundary=XyZ\r\n";
        let path = "/v1/audio/transcriptions";
        let served = request(gateway.address(), "POST", path, headers, streamed.as_bytes()).await;
        assert_eq!((served.status, served.is_whole), (status, true));
        assert!(served.text().contains(expected), "{}", served.text());
    }
    let unknown = send("/v1/audio/transcriptions", "none").await;
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "model_not_found"));
    let other = send("/v1/audio/transcriptions", "other").await;
    assert_eq!((other.status, other.code().as_str()), (503, "no_workers"));
    let no_form = post(&gateway, "/v1/audio/transcriptions", &json!({ "model": "mock" })).await;
    assert_eq!((no_form.status, no_form.code().as_str()), (400, "invalid_form"));
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paths_of_the_settings_are_forwarded_unread() {
    let scripted = Scripted::start(|_| answer("200 OK", "[not json")).await;
    let mut settings = two_models(&scripted.url());
    let route = |path: &str, model: &str| RouteSettings { path: path.to_owned(), model: model.to_owned() };
    settings.gateway.routes = vec![route("/v1/audio/speech", "mock"), route("/rpc", "other")];
    let is_refused =
        |settings: &Settings| settings.validate().is_err_and(|errors| errors.to_string().contains("gateway.routes"));
    assert!(!is_refused(&settings));
    let gateway = gateway(settings.clone()).await;
    let served = request(gateway.address(), "POST", "/v1/audio/speech?a=1", "", b"\xff{model").await;
    assert_eq!((served.status, served.text()), (200, "[not json"));
    let got = scripted.requests().pop().expect("a request");
    assert!(got.head.starts_with("POST /v1/audio/speech?a=1 HTTP/1.1\r\n"), "{}", got.head);
    assert_eq!(got.body, b"\xff{model");
    let refused = get(&gateway, "/v1/audio/speech").await;
    assert_eq!((refused.status, refused.header("allow")), (405, Some("POST")));
    assert_eq!(post(&gateway, "/rpc", &json!({})).await.code(), "no_workers");
    assert_eq!(post(&gateway, "/rpc2", &json!({})).await.code(), "path_not_found");
    for (path, model) in [("/v1/rerank", "mock"), ("rpc", "mock"), ("/a b", "mock"), ("/a?b", "mock"), ("/a", "none")] {
        settings.gateway.routes = vec![route(path, model)];
        assert!(is_refused(&settings), "{path} {model}");
    }
}

/// A gateway of scripted workers that publish no events, routed by speculative cache contents.
async fn by_prefix(workers: &[Scripted]) -> Gateway {
    let mut settings = settings((1..).zip(workers).map(|(n, scripted)| worker(n, &scripted.url(), 1)).collect());
    let router = RouterConfig { block_size: Some(16), ..RouterConfig::default() };
    settings.models[0].router = RouterConfig { health: settings.models[0].router.health.clone(), ..router };
    settings.models[0].router.policy = Policy::default().into();
    settings.models[0].router.events.mode = EventMode::Off;
    gateway(settings).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_ids_are_routed_by_prefix() {
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(Scripted::start(|_| answer("200 OK", "{\"text\":\"a\",\"meta_info\":{}}")).await);
    }
    let gateway = by_prefix(&workers).await;
    let counts = || workers.iter().map(|worker| worker.requests().len()).collect::<Vec<_>>();
    for (path, field) in [("/generate", "input_ids"), ("/inference/v1/generate", "token_ids")] {
        let before = counts();
        for turn in 0..8 {
            let ids: Vec<u32> =
                (0..640 + turn * 16).map(|n| n + 7 * u32::try_from(path.len()).expect("short")).collect();
            let body = json!({ field: ids, "sampling_params": { "max_new_tokens": 1 } });
            let served = post(&gateway, path, &body).await;
            assert_eq!(served.status, 200, "{served:?}");
            at_rest(&gateway).await;
        }
        let grown: Vec<usize> =
            counts().iter().zip(before).map(|(now, before)| now - before).filter(|n| *n > 0).collect();
        assert_eq!(grown, [8], "{path}: every turn goes to the worker of the turn before");
    }
}
