//! API keys of engines: on every request of the gateway, from every source of workers, and nowhere else.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use pointsman::internals::config::EngineLoadConfig;
use pointsman::protocol::WorkerConfig;
use pointsman_gateway::app::{Gateway, LoadSettings};
use pointsman_gateway::settings::{ModelSettings, Settings, TokenSourceChoice};
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine};
use serde_json::json;

use crate::common::directory::Directory;
use crate::common::front::Front;
use crate::common::proxy::{self, Answer, at_rest, get, request, until, worker};

const KEY: &str = "engine-key-0123456789";
const OTHER_KEY: &str = "other-engine-key-0123456789";
const CHAT: &str = "/v1/chat/completions";

async fn engine(dialect: Dialect, key: &str) -> MockEngine {
    let config = MockConfig {
        dialect,
        no_server_info: !dialect.is_sglang(),
        api_key: Some(key.to_owned()),
        time_scale: 0.0,
        ..MockConfig::default()
    };
    MockEngine::start(config).await.expect("the engine starts")
}

/// Settings of the model `mock` with health probes, load polls and tokenization by the engines.
fn settings(key_file: Option<&Path>) -> Settings {
    let mut settings = proxy::settings(Vec::new());
    settings.gateway.worker_api_key_file = key_file.map(Path::to_owned);
    let model = &mut settings.models[0];
    model.router.health.probe_interval_ms = 20;
    model.router.engine_load = EngineLoadConfig { interval_ms: 20, ..EngineLoadConfig::default() };
    model.tokens.source = TokenSourceChoice::Engine;
    model.tokens.engine_timeout_ms = 60_000;
    settings
}

async fn registered(gateway: &Gateway, workers: usize) {
    let router = gateway.router("mock").expect("the model is served");
    until("the workers are registered", || router.workers().len() == workers).await;
}

async fn chat(gateway: &Gateway) -> Answer {
    let body = json!({ "model": "mock", "max_tokens": 1, "messages": [{ "role": "user", "content": "Hello there." }] });
    let headers = "authorization: Bearer key-of-the-client\r\n";
    request(gateway.address(), "POST", CHAT, headers, body.to_string().as_bytes()).await
}

/// The reason for which the gateway is not ready, once it contains this text.
async fn not_ready_because(gateway: &Gateway, text: &str) -> String {
    let router = gateway.router("mock").expect("the model is served");
    until(text, || router.discovery()[0].last_error.as_ref().is_some_and(|error| error.contains(text))).await;
    let ready = get(gateway, "/ready").await;
    assert_eq!(ready.status, 503);
    ready.text().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_with_a_key_joins_is_polled_tokenizes_and_serves() {
    // SGLang has a metrics page only if it is enabled.
    let pages = [(Dialect::VllmMap, ["GET /v1/models", "GET /metrics"]), (Dialect::SglangMap, ["GET /server_info"; 2])];
    for (dialect, pages) in pages {
        let (directory, engine) = (Directory::new(), engine(dialect, KEY).await);
        let front = Front::start(engine.address(), None).await;
        let mut settings = settings(Some(&directory.write("key", format!("{KEY}\n"))));
        settings.models[0].worker_urls = vec![front.url()];
        let gateway = Gateway::start(settings).await.expect("start succeeds");
        registered(&gateway, 1).await;
        let answer = chat(&gateway).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        for query in pages.into_iter().chain(["GET /health", "POST /tokenize", "POST /v1/chat/completions"]) {
            until(query, || front.has(query)).await;
        }
        assert!(front.has_only(KEY), "{}", front.requests());
        let router = gateway.router("mock").expect("the model is served");
        let has_load = || router.engine_loads().iter().any(|(_, load)| load.is_some());
        until("load is reported", || dialect.is_sglang() || has_load()).await;
        assert!(router.out_of_service().is_empty());
        at_rest(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_or_wrong_key_is_named_by_its_setting_and_can_be_replaced() {
    for dialect in [Dialect::VllmMap, Dialect::SglangMap] {
        let (directory, engine) = (Directory::new(), engine(dialect, KEY).await);
        let key = directory.write("key", OTHER_KEY);
        let start = async |key_file: Option<&Path>| {
            let mut settings = settings(key_file);
            settings.models[0].worker_urls = vec![engine.url()];
            Gateway::start(settings).await.expect("start succeeds")
        };
        let without = start(None).await;
        let reason = not_ready_because(&without, "response status is 401: the engine requires an API key").await;
        assert!(reason.contains("set gateway.worker_api_key_file"), "{reason}");
        let wrong = start(Some(&key)).await;
        let reason = not_ready_because(&wrong, "rejects the API key of gateway.worker_api_key_file").await;
        assert!(reason.contains("status is 401") && !reason.contains(OTHER_KEY), "{reason}");
        // The next probe reads the new key.
        directory.write("key", KEY);
        registered(&wrong, 1).await;
        assert_eq!(chat(&wrong).await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_worker_precedes_that_of_the_model_and_of_the_gateway() {
    let (directory, keys) = (Directory::new(), ["key-of-list-01234", "key-of-file-01234", "key-of-model-0123"]);
    let mut fronts = Vec::new();
    let mut engines = Vec::new();
    for key in keys {
        engines.push(engine(Dialect::VllmMap, key).await);
        fronts.push(Front::start(engines.last().expect("just added").address(), None).await);
    }
    let mut settings = settings(Some(&directory.write("gateway", "key-of-gateway-0")));
    let model = &mut settings.models[0];
    let mut listed = worker(1, &fronts[0].url(), 1);
    listed.probe = true;
    listed.config.api_key_file = Some(directory.write("list", keys[0]));
    model.workers = vec![listed];
    directory.write("file", keys[1]);
    let url = fronts[1].url();
    let workers = format!("[[workers]]\nurl = \"{url}\"\nprobe = true\napi_key_file = \"file\"\n");
    model.workers_file = Some(directory.write("workers.toml", &workers));
    model.worker_urls = vec![fronts[2].url()];
    model.worker_api_key_file = Some(directory.write("model", keys[2]));
    let gateway = Gateway::start(settings).await.expect("start succeeds");
    registered(&gateway, 3).await;
    for _ in 0..9 {
        let answer = chat(&gateway).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    for (front, key) in fronts.iter().zip(keys) {
        assert!(front.has("POST /v1/chat/completions") && front.has("GET /health"), "{}", front.requests());
        assert!(front.has_only(key), "{}", front.requests());
    }
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_applies_the_keys_of_gateway_and_model() {
    let (directory, engine) = (Directory::new(), engine(Dialect::VllmMap, KEY).await);
    let front = Front::start(engine.address(), None).await;
    let fixed = WorkerConfig::at(front.url());
    let mut first = settings(Some(&directory.write("first", OTHER_KEY)));
    first.models[0].workers = vec![worker(1, &fixed.endpoint, 1)];
    first.models[0].tokens.source = TokenSourceChoice::None;
    let next = Arc::new(Mutex::new(first.clone()));
    let loaded = Arc::clone(&next);
    let load: LoadSettings = Arc::new(move || Ok(loaded.lock().expect("no panic").clone()));
    let gateway = Gateway::start_reloadable(first.clone(), load).await.expect("start succeeds");
    registered(&gateway, 1).await;
    assert_eq!(chat(&gateway).await.status, 401);
    let reload = async |change: &dyn Fn(&mut Settings)| {
        change(&mut next.lock().expect("no panic"));
        gateway.reload().await.map(|_| ()).map_err(|error| error.to_string())
    };
    let of_gateway = directory.write("second", KEY);
    reload(&|settings| settings.gateway.worker_api_key_file = Some(of_gateway.clone())).await.expect("reloaded");
    assert_eq!(chat(&gateway).await.status, 200);
    let of_model = directory.write("first", OTHER_KEY);
    reload(&|settings| settings.models[0].worker_api_key_file = Some(of_model.clone())).await.expect("reloaded");
    assert_eq!(chat(&gateway).await.status, 401);
    let gone = directory.path().join("gone");
    let error =
        reload(&|settings| settings.models[0].worker_api_key_file = Some(gone.clone())).await.expect_err("unread");
    assert!(error.starts_with("models[0].worker_api_key_file is /") && error.contains("gone"), "{error}");
    reload(&|settings| settings.models[0].worker_api_key_file = None).await.expect("reloaded");
    assert_eq!(chat(&gateway).await.status, 200);
    // Without a key of ours the engine checks that of the client.
    reload(&|settings| settings.gateway.worker_api_key_file = None).await.expect("reloaded");
    assert_eq!(chat(&gateway).await.status, 401);
    assert!(front.requests().contains("authorization: Bearer key-of-the-client\r\n"));
    at_rest(&gateway).await;
}

#[tokio::test]
async fn key_files_of_workers_in_the_settings_are_read_at_the_start() {
    let missing = PathBuf::from("/nowhere/key");
    let mut of_worker = settings(None);
    let mut listed = worker(1, "http://127.0.0.1:9", 1);
    listed.config.api_key_file = Some(missing.clone());
    of_worker.models[0].workers = vec![listed];
    let mut of_model = settings(None);
    of_model.models[0] = ModelSettings {
        workers: vec![worker(1, "http://127.0.0.1:9", 1)],
        worker_api_key_file: Some(missing),
        ..ModelSettings::named("mock")
    };
    for (settings, setting) in
        [(of_worker, "models[0].workers[0].api_key_file"), (of_model, "models[0].worker_api_key_file")]
    {
        let error = Gateway::start(settings).await.err().expect("must not start").to_string();
        assert!(error.starts_with(&format!("{setting} is /nowhere/key, which cannot be read: ")), "{error}");
    }
}
