//! TLS to workers: forwarded requests, probes, polls and tokenization, with an authority and a client certificate.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use pointsman_gateway::app::{Gateway, LoadSettings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::authority::{Authority, tls};
use crate::common::directory::Directory;
use crate::common::front::Front;
#[cfg(unix)]
use crate::common::process::{Process, serve};
use crate::common::proxy::{
    FINE, Scripted, answer, at_rest, eventually, gateway, get, post, request, settings, until, worker,
};

const CHAT: &str = "/v1/chat/completions";
const ENGINE_KEY: &str = "engine-key-0123456789";
const WRONG_KEY: &str = "wrong-engine-key-0123456789";
const TOKEN: &str = "admin-token-0123456789";

#[tokio::test]
async fn worker_certificates_require_the_configured_authority() {
    let engine = Scripted::start(|_| answer("200 OK", FINE)).await;
    let mut behind = settings(vec![worker(1, &engine.url(), 1)]);
    behind.gateway.tls_certificate_file = Some(tls("test-only.crt"));
    behind.gateway.tls_key_file = Some(tls("test-only.key"));
    let behind = gateway(behind).await;
    let url = format!("https://localhost:{}", behind.address().port());
    let chat = json!({ "model": "mock", "stream": true, "messages": [{ "role": "user", "content": "Hello." }] });

    let mut before = settings(vec![worker(1, &url, 1)]);
    before.gateway.worker_ca_file = Some(tls("test-only.crt"));
    let before = gateway(before).await;
    let told = post(&before, CHAT, &chat).await;
    assert_eq!((told.status, told.text()), (200, FINE), "{told:?}");
    assert_eq!(engine.requests().len(), 1);
    at_rest(&before).await;
    at_rest(&behind).await;

    // The certificate is not signed by any CA that the system trusts.
    let strangers = gateway(settings(vec![worker(1, &url, 1)])).await;
    let told = post(&strangers, CHAT, &chat).await;
    assert_eq!((told.status, told.code().as_str()), (502, "worker_failed"), "{told:?}");
    assert_eq!(engine.requests().len(), 1, "the worker received no request");
    at_rest(&strangers).await;
}

/// An engine with TLS and an API key, the authority of its certificate, and a directory for files.
struct TlsEngine {
    authority: Authority,
    front: Front,
    directory: Directory,
    _engine: MockEngine,
}

impl TlsEngine {
    async fn start() -> Self {
        let config = MockConfig {
            no_server_info: true,
            api_key: Some(ENGINE_KEY.to_owned()),
            time_scale: 0.0,
            ..MockConfig::default()
        };
        let (engine, authority) = (MockEngine::start(config).await.expect("the engine starts"), Authority::new());
        let front = Front::start(engine.address(), Some(authority.acceptor(true))).await;
        let own = Self { authority, front, directory: Directory::new(), _engine: engine };
        own.write("ca.crt", &own.authority.pem());
        let [certificate, key] = own.authority.client_pem();
        own.write("client.crt", &certificate);
        own.write("client.key", &key);
        own.write("api.key", ENGINE_KEY);
        own
    }

    fn write(&self, file: &str, content: &str) {
        self.directory.write(file, content);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_repairs_authority_and_certificate_of_probed_workers() {
    let engine = TlsEngine::start().await;
    let mut settings = settings(Vec::new());
    settings.models[0].worker_urls = vec![engine.front.url()];
    settings.gateway.worker_api_key_file = Some(engine.file("api.key"));
    engine.write("ca.crt", &Authority::new().pem());
    settings.gateway.worker_ca_file = Some(engine.file("ca.crt"));
    let next = Arc::new(Mutex::new(settings.clone()));
    let loaded = Arc::clone(&next);
    let load: LoadSettings = Arc::new(move || Ok(loaded.lock().expect("no panic").clone()));
    let gateway = Gateway::start_reloadable(settings, load).await.expect("start succeeds");
    let router = gateway.router("mock").expect("the model is served");
    let reports = async |text: &str| {
        let holds = || router.discovery()[0].last_error.as_ref().is_some_and(|error| error.contains(text));
        until(text, holds).await;
        assert_eq!(get(&gateway, "/ready").await.status, 503);
    };
    reports("cannot connect: invalid peer certificate: ").await;
    // The same file with another content.
    engine.write("ca.crt", &engine.authority.pem());
    gateway.reload().await.expect("reloaded");
    // The engine closes the connection; its alert may be lost.
    let is_accepted = |error: &String| !error.contains("invalid peer certificate");
    until("the authority is accepted", || router.discovery()[0].last_error.as_ref().is_some_and(is_accepted)).await;
    assert!(router.workers().is_empty());
    {
        let gateway = &mut next.lock().expect("no panic").gateway;
        gateway.worker_certificate_file = Some(engine.file("client.crt"));
        gateway.worker_key_file = Some(engine.file("client.key"));
    }
    gateway.reload().await.expect("reloaded");
    until("the worker is registered", || router.workers().len() == 1).await;
    let chat = json!({ "model": "mock", "max_tokens": 1, "messages": [{ "role": "user", "content": "Hello." }] });
    let told = post(&gateway, CHAT, &chat).await;
    assert_eq!(told.status, 200, "{told:?}");
    engine.write("client.key", "no key");
    let error = gateway.reload().await.expect_err("rejected").to_string();
    assert!(error.starts_with("gateway.worker_key_file is unusable: /") && error.contains("client.key"), "{error}");
    at_rest(&gateway).await;
}

/// Starts `serve` with the flags for keys and TLS, writes its output to files, and reads them back.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_has_flags_and_no_output_contains_the_key() {
    let engine = TlsEngine::start().await;
    engine.write("wrong.key", WRONG_KEY);
    engine.write("token", TOKEN);
    for (key_file, status) in [("api.key", 200), ("wrong.key", 503)] {
        let mut command = serve();
        let flags = [
            ("--worker-api-key-file", key_file),
            ("--worker-ca-file", "ca.crt"),
            ("--worker-certificate-file", "client.crt"),
            ("--worker-key-file", "client.key"),
            ("--admin-token-file", "token"),
            ("--set", "gateway.decision_path=decisions"),
            ("--set", "gateway.warm_up_ms=0"),
            ("--log-level", "trace"),
        ];
        command.current_dir(engine.directory.path()).args(["--model", "mock", "--worker", &engine.front.url()]);
        command.args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
        command.args(flags.iter().flat_map(|(flag, value)| [flag, value]));
        let process = Process::start(command).await;
        let ask = async |address, method: &str, path: &str, body: &str| {
            let headers = format!("authorization: Bearer {TOKEN}\r\n");
            request(address, method, path, &headers, body.as_bytes()).await
        };
        let admin = process.admin.expect("an address for operators");
        let asked = async || {
            let chat = r#"{"model":"mock","max_tokens":1,"messages":[{"role":"user","content":"Hello."}]}"#;
            ask(process.address, "POST", CHAT, chat).await.status
        };
        let is_expected = async || match status {
            200 => asked().await == 200,
            _ => ask(process.address, "GET", "/ready", "").await.text().contains("rejects the API key"),
        };
        eventually(&format!("status {status}"), is_expected).await;
        let mut shown = String::new();
        for path in [
            "/admin/models",
            "/admin/models/mock",
            "/admin/models/mock/workers",
            "/admin/models/mock/health",
            "/admin/config",
            "/admin/decisions",
            "/ready",
            "/metrics",
        ] {
            shown += &String::from_utf8_lossy(&ask(admin, "GET", path, "").await.body);
        }
        process.signal("HUP");
        let lines = process.until_line("configuration reloaded").await;
        assert!(lines.iter().any(|line| line.contains("\"level\":\"TRACE\"")), "the log has every level");
        shown += &lines.concat();
        for file in std::fs::read_dir(engine.file("decisions")).into_iter().flatten() {
            let file = std::fs::read(file.expect("an entry").path()).expect("a file");
            shown += &String::from_utf8_lossy(&file);
        }
        for secret in [ENGINE_KEY, WRONG_KEY, TOKEN] {
            let at = shown.find(secret);
            assert!(at.is_none(), "{}", &shown[at.unwrap_or_default().saturating_sub(300)..]);
        }
        assert!(shown.contains("mock") && shown.contains(&engine.front.url()));
    }
    let requests = engine.front.requests();
    assert!(!requests.contains(TOKEN), "the key of the client is not forwarded");
}
