//! Reloads of the gateway process by SIGHUP and by the admin API.
//!
//! The process and its files end with the test. Every wait has a generous limit. Unit tests cover the list of
//! reloadable settings.
#![cfg(unix)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pointsman_trial::mock::{MockConfig, MockEngine};
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::common::authority::{certificate, client_trusting, tls};
use crate::common::directory::Directory;
use crate::common::process::{Process, serve};
use crate::common::proxy::{PATIENCE, eventually, kept, request};

const TOKEN: &str = "admin-token-0123456789";
const OTHER_TOKEN: &str = "other-token-0123456789";
const KEY: &str = "client-key-0123456789";
const OTHER_KEY: &str = "other-client-key-0123456789";

/// A gateway process with a directory of files.
struct Reloaded {
    process: Process,
    directory: Directory,
    clients: SocketAddr,
    admin: SocketAddr,
}

impl Reloaded {
    /// Starts with these settings. `files` are written beside them.
    async fn start(config: &str, files: &[(&str, &str)]) -> Self {
        let directory = Directory::new();
        for (file, content) in [("token", TOKEN), ("pointsman.toml", config)].iter().chain(files) {
            directory.write(file, content);
        }
        let mut command = serve();
        command.arg("--config").arg(directory.path().join("pointsman.toml"));
        let process = Process::start(command).await;
        let (clients, admin) = (process.address, process.admin.expect("an address for operators"));
        Self { process, directory, clients, admin }
    }

    fn write(&self, file: &str, content: impl AsRef<[u8]>) {
        self.directory.write(file, content);
    }

    /// Reloads by SIGHUP and waits until the reload is applied.
    async fn reload(&mut self) {
        self.process.signal("HUP");
        self.process.logged("configuration reloaded").await;
    }

    /// Status and response of the admin API.
    async fn admin(&self, what: &str, token: &str) -> (u16, Value) {
        let (method, path) = what.split_once(' ').expect("a method");
        let answer = request(self.admin, method, path, &format!("authorization: Bearer {token}\r\n"), b"").await;
        let body = answer.text().to_owned();
        (answer.status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }

    /// The status of a request for one token of this model on a new connection.
    async fn complete(&self, model: &str, key: &str) -> u16 {
        let mut stream = TcpStream::connect(self.clients).await.expect("connection accepted");
        kept(&mut stream, &completion(3, model, key)).await.expect("a response").status
    }

    async fn metric(&self, line: &str) -> Option<f64> {
        let (status, page) = self.admin("GET /metrics", TOKEN).await;
        assert_eq!(status, 200);
        let page = page.as_str().expect("text").to_owned();
        page.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
    }
}

fn completion(tokens: usize, model: &str, key: &str) -> String {
    let prompt: Vec<usize> = (1..=tokens).collect();
    let body = format!(r#"{{"model":"{model}","prompt":{prompt:?},"max_tokens":1}}"#);
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         authorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

async fn engine() -> MockEngine {
    MockEngine::start(MockConfig { time_scale: 20.0, ..MockConfig::default() }).await.expect("the engine starts")
}

fn config(gateway: &str, rest: &str) -> String {
    format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n{gateway}\n\
         [admin]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"token\"\n{rest}"
    )
}

/// The settings of a model with these engines.
fn model(name: &str, engines: &[&MockEngine]) -> String {
    let urls: Vec<String> = engines.iter().map(|engine| format!("{:?}", engine.url())).collect();
    format!("[[models]]\nname = \"{name}\"\nupstream_name = \"mock\"\nworker_urls = [{}]\n", urls.join(", "))
}

const TENANT: &str = "[[tenants]]\nname = \"acme\"\nkeys_file = \"keys\"\n";
const SALT: (&str, &str) = ("salt", "0123456789abcdef");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reloads_under_load_lose_no_request() {
    const CLIENTS: usize = 8;
    let (one, other) = (engine().await, engine().await);
    let settings = |engines: &[&MockEngine], body_bytes_max: usize| {
        let gateway = format!("salt_secret_file = \"salt\"\nbody_bytes_max = {body_bytes_max}");
        config(&gateway, &(model("mock", engines) + TENANT))
    };
    let mut process = Reloaded::start(&settings(&[&one], 1_000_000), &[SALT, ("keys", KEY)]).await;
    eventually("it serves", async || process.complete("mock", KEY).await == 200).await;

    let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (stop, served, address) = (Arc::clone(&stop), Arc::clone(&served), process.clients);
        clients.spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("connection accepted");
            // All requests use one connection: no reload closes it.
            while !stop.load(Ordering::Relaxed) {
                match kept(&mut stream, &completion(3, "mock", KEY)).await {
                    Ok(answer) if answer.status == 200 => drop(served.fetch_add(1, Ordering::Relaxed)),
                    other => return Err(format!("{other:?}")),
                }
            }
            Ok(())
        });
    }
    let more = async |by: usize| {
        let before = served.load(Ordering::Relaxed);
        eventually("requests are served", async || served.load(Ordering::Relaxed) >= before + by).await;
    };
    more(CLIENTS).await;
    let workers = async |process: &Reloaded, engines: &[&MockEngine]| {
        let mut expected: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
        expected.sort();
        eventually("workers equal those of the file", async || {
            let (_, answer) = process.admin("GET /admin/models/mock/workers", TOKEN).await;
            let endpoint = |worker: &Value| {
                worker["endpoint"].as_str().or(worker["config"]["endpoint"].as_str()).map(str::to_owned)
            };
            let mut found: Vec<String> =
                answer["workers"].as_array().expect("a list").iter().filter_map(endpoint).collect();
            found.sort();
            found == expected
        })
        .await;
    };
    for (n, engines) in [&[&one, &other][..], &[&other], &[&other, &one], &[&one]].into_iter().enumerate() {
        process.write("pointsman.toml", settings(engines, 1_000_000 + n));
        process.reload().await;
        workers(&process, engines).await;
        more(CLIENTS).await;
    }
    // A second key is added, then the first one is removed.
    assert_eq!(process.complete("mock", OTHER_KEY).await, 401);
    process.write("keys", format!("{KEY}\n{OTHER_KEY}\n"));
    process.reload().await;
    assert_eq!([process.complete("mock", KEY).await, process.complete("mock", OTHER_KEY).await], [200, 200]);
    more(CLIENTS).await;
    stop.store(true, Ordering::Relaxed);
    for ended in timeout(PATIENCE, clients.join_all()).await.expect("all clients end before the timeout") {
        assert_eq!(ended, Ok(()));
    }
    process.write("keys", OTHER_KEY);
    process.write("pointsman.toml", settings(&[&one], 1024));
    process.reload().await;
    assert_eq!([process.complete("mock", KEY).await, process.complete("mock", OTHER_KEY).await], [401, 200]);
    let mut stream = TcpStream::connect(process.clients).await.expect("connection accepted");
    let long = kept(&mut stream, &completion(1000, "mock", OTHER_KEY)).await.expect("a response");
    assert_eq!(long.status, 413, "the body limit equals that of the file");
    assert_eq!(process.metric("pointsman_gateway_config_reloads_total{result=\"applied\"}").await, Some(6.0));
    one.shutdown().await;
    other.shutdown().await;
}

#[tokio::test]
async fn invalid_reloads_are_reported_and_change_nothing() {
    let engine = engine().await;
    let good = config("salt_secret_file = \"salt\"", &(model("mock", &[&engine]) + TENANT));
    let mut process = Reloaded::start(&good, &[SALT, ("keys", KEY)]).await;
    eventually("it serves", async || process.complete("mock", KEY).await == 200).await;
    let (_, status) = process.admin("GET /admin/reload", TOKEN).await;
    assert_eq!((&status["last"], &status["is_current"]), (&Value::Null, &Value::Bool(true)));

    // Each of these reloads would also change the key.
    let cases: [(&str, String, &str, &str); 4] = [
        ("pointsman.toml", "[gateway\n".to_owned(), OTHER_KEY, "cannot be read as TOML"),
        (
            "pointsman.toml",
            good.replace("[gateway]", "[gateway]\nattempts_max = 0"),
            OTHER_KEY,
            "gateway.attempts_max is 0",
        ),
        ("pointsman.toml", good.replace("\"salt\"", "\"absent\""), OTHER_KEY, "absent, which cannot be read"),
        ("token", "short".to_owned(), OTHER_KEY, "must hold 16 to 1024"),
    ];
    let rejections = cases.len();
    for (file, content, key, reason) in cases {
        process.write("keys", key);
        process.write(file, content);
        process.process.signal("HUP");
        let line = process.process.logged("configuration reload rejected").await;
        assert!(line["error"].as_str().expect("a reason").contains(reason), "{line}");
        assert_eq!(
            [process.complete("mock", KEY).await, process.complete("mock", OTHER_KEY).await],
            [200, 401],
            "{reason}"
        );
        let (_, status) = process.admin("GET /admin/reload", TOKEN).await;
        assert_eq!((&status["last"]["applied"], &status["is_current"]), (&Value::Bool(false), &Value::Bool(false)));
        assert!(status["last"]["error"].as_str().expect("a reason").contains(reason), "{status}");
        assert_eq!(process.metric("pointsman_gateway_config_last_reload_successful").await, Some(0.0));
        let (code, answer) = process.admin("POST /admin/reload", TOKEN).await;
        assert_eq!((code, answer["error"]["code"].as_str()), (422, Some("config_rejected")));
        process.process.logged("configuration reload rejected").await;
        process.write("pointsman.toml", &good);
        process.write("token", TOKEN);
    }
    let rejected = process.metric("pointsman_gateway_config_reloads_total{result=\"rejected\"}").await;
    assert_eq!(rejected, Some(2.0 * rejections as f64));

    // A valid configuration is applied again, and the admin token changes with it.
    process.write("token", OTHER_TOKEN);
    let (code, status) = process.admin("POST /admin/reload", TOKEN).await;
    assert_eq!(
        (code, &status["last"]["applied"], &status["is_current"]),
        (200, &Value::Bool(true), &Value::Bool(true))
    );
    assert_eq!([process.complete("mock", KEY).await, process.complete("mock", OTHER_KEY).await], [401, 200]);
    assert_eq!(process.admin("GET /admin/reload", TOKEN).await.0, 401);
    assert_eq!(process.admin("GET /admin/reload", OTHER_TOKEN).await.0, 200);
    engine.shutdown().await;
}

#[tokio::test]
async fn reloads_add_and_remove_models_and_list_restart_settings() {
    let engine = engine().await;
    let (mock, second) = (model("mock", &[&engine]), model("second", &[&engine]));
    let mut process = Reloaded::start(&config("", &mock), &[]).await;
    eventually("it serves", async || process.complete("mock", KEY).await == 200).await;
    assert_eq!(process.complete("second", KEY).await, 404);

    let aliased = mock.replace("worker_urls", "aliases = [\"alias\"]\nworker_urls");
    process.write("pointsman.toml", config("connections_max = 99", &(second + &aliased)));
    process.reload().await;
    eventually("the new model is served", async || process.complete("second", KEY).await == 200).await;
    assert_eq!([process.complete("mock", KEY).await, process.complete("alias", KEY).await], [200, 200]);
    let (_, status) = process.admin("GET /admin/reload", TOKEN).await;
    assert_eq!(status["restart_needed"], serde_json::json!(["gateway.connections_max"]));
    assert_eq!(status["is_current"], Value::Bool(false));
    assert_eq!(process.metric("pointsman_gateway_config_restart_needed").await, Some(1.0));
    let (_, running) = process.admin("GET /admin/config", TOKEN).await;
    assert_eq!(running["gateway"]["connections_max"], 16_384);

    process.write("pointsman.toml", config("", &mock));
    process.reload().await;
    assert_eq!(process.complete("second", KEY).await, 404);
    assert_eq!([process.complete("mock", KEY).await, process.complete("alias", KEY).await], [200, 404]);
    let (_, status) = process.admin("GET /admin/reload", TOKEN).await;
    assert_eq!((&status["restart_needed"], &status["is_current"]), (&serde_json::json!([]), &Value::Bool(true)));
    engine.shutdown().await;
}

/// A connection and the certificate that the server presented.
async fn shake_hands(address: SocketAddr) -> (TlsStream<TcpStream>, CertificateDer<'static>) {
    let config = client_trusting(&["test-only.crt", "other-test-only.crt"]);
    let name = ServerName::try_from("localhost").expect("valid server name");
    let stream = TcpStream::connect(address).await.expect("connection accepted");
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
    let stream =
        timeout(PATIENCE, connecting).await.expect("completed before the timeout").expect("TLS handshake succeeds");
    let shown = stream.get_ref().1.peer_certificates().expect("a chain")[0].clone().into_owned();
    (stream, shown)
}

#[tokio::test]
async fn new_connections_use_a_renewed_certificate() {
    let read = |file: &str| std::fs::read_to_string(tls(file)).expect("file is readable");
    let (chain, key) = (read("test-only.crt"), read("test-only.key"));
    let gateway = "tls_certificate_file = \"tls.crt\"\ntls_key_file = \"tls.key\"";
    let settings = config(gateway, "[[models]]\nname = \"mock\"\n");
    let mut process = Reloaded::start(&settings, &[("tls.crt", &chain), ("tls.key", &key)]).await;
    let status = async |stream: &mut TlsStream<TcpStream>| {
        kept(stream, "GET /live HTTP/1.1\r\nhost: test\r\n\r\n").await.expect("a response").status
    };
    let (mut before, shown) = shake_hands(process.clients).await;
    assert_eq!(shown, certificate("test-only.crt"));
    assert_eq!(status(&mut before).await, 200);

    // A certificate without its key is rejected.
    process.write("tls.crt", read("other-test-only.crt"));
    process.process.signal("HUP");
    let line = process.process.logged("configuration reload rejected").await;
    assert!(line["error"].as_str().expect("a reason").contains("cannot be used"), "{line}");
    assert_eq!(shake_hands(process.clients).await.1, certificate("test-only.crt"));

    process.write("tls.key", read("other-test-only.key"));
    process.reload().await;
    let (mut after, shown) = shake_hands(process.clients).await;
    assert_eq!(shown, certificate("other-test-only.crt"));
    assert_eq!(status(&mut after).await, 200);
    assert_eq!(status(&mut before).await, 200);
}

#[tokio::test]
async fn changed_files_of_a_tokenizer_are_read_again() {
    let config = r#"
        [gateway]
        listen = "127.0.0.1:0"
        [admin]
        listen = "127.0.0.1:0"
        token_file = "token"
        [[models]]
        name = "m"
        worker_urls = ["http://127.0.0.1:9"]
        tokens = { tokenizer_file = "tokenizer.json" }
    "#;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/tokenizer.json");
    let tokenizer = std::fs::read_to_string(data).expect("a tokenizer");
    let reloaded = Reloaded::start(config, &[("tokenizer.json", &tokenizer)]).await;
    assert_eq!(reloaded.admin("POST /admin/reload", TOKEN).await.0, 200);
    reloaded.write("tokenizer.json", "{}");
    let (status, refused) = reloaded.admin("POST /admin/reload", TOKEN).await;
    assert!(status == 422 && refused.to_string().contains("tokenizer.json is no tokenizer"), "{status} {refused}");
    reloaded.write("tokenizer.json", format!("{tokenizer}\n"));
    assert_eq!(reloaded.admin("POST /admin/reload", TOKEN).await.0, 200);
}
