//! A gateway with the admin API, and a client that reads its raw responses.
//!
//! The module owns the token file. Every wait has a generous limit. Requests belong to the tests.

use pointsman::config::{HealthConfig, IndexConfig};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pointsman::{Router, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{AdminSettings, GatewaySettings, ModelSettings, Settings};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const TOKEN: &str = "s3cret-0123456789";

/// A model name that needs escaping in a path, and its alias.
pub(crate) const MODEL: &str = "org/mock";
pub(crate) const ALIAS: &str = "mock";

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        let shown = || format!("{}: {}", self.status, String::from_utf8_lossy(&self.body));
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", shown()))
    }

    /// The error code in the OpenAI error format.
    pub(crate) fn code(&self) -> String {
        let json = self.json();
        assert!(json["error"]["message"].is_string() && json["error"]["type"].is_string(), "{json}");
        json["error"]["code"].as_str().expect("a code").to_owned()
    }
}

/// A file with these bytes and a unique name.
pub(crate) fn file(bytes: &[u8]) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("admin-{}-{n}", std::process::id()));
    std::fs::write(&path, bytes).expect("the file is written");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("permissions set");
    }
    path
}

/// Settings with free loopback ports, the admin API, and one model without workers.
pub(crate) fn settings() -> Settings {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    // Most workers of these tests respond to no probe.
    let router = RouterConfig {
        block_size: Some(4),
        health: HealthConfig { probe_interval_ms: 0, ..HealthConfig::default() },
        index: IndexConfig { shards: 2, ..IndexConfig::default() },
        ..RouterConfig::default()
    };
    let model = ModelSettings {
        aliases: vec![ALIAS.to_owned()],
        upstream_name: Some("mock".to_owned()),
        router,
        ..ModelSettings::named(MODEL)
    };
    Settings {
        gateway: GatewaySettings { listen: free, ..GatewaySettings::default() },
        admin: Some(AdminSettings {
            listen: free,
            token_file: file(format!("{TOKEN}\n").as_bytes()),
            index_token_file: None,
            read_token_file: None,
        }),
        models: vec![model],
        picker: None,
        replicas: None,
        tenants: Vec::new(),
    }
}

/// A gateway with its admin API.
pub(crate) struct AdminClient {
    pub(crate) gateway: Gateway,
}

impl AdminClient {
    pub(crate) async fn start() -> Self {
        Self::with(settings()).await
    }

    pub(crate) async fn with(settings: Settings) -> Self {
        Self { gateway: Gateway::start(settings).await.expect("the gateway starts") }
    }

    pub(crate) fn router(&self) -> Router {
        self.gateway.router(MODEL).expect("model exists")
    }

    fn address(&self) -> SocketAddr {
        self.gateway.admin_address().expect("the admin listener is configured")
    }

    /// Sends a request with the admin token.
    pub(crate) async fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        self.send_with_headers(method, path, body, &[&format!("authorization: Bearer {TOKEN}")]).await
    }

    /// Sends a request with these headers.
    pub(crate) async fn send_with_headers(&self, method: &str, path: &str, body: &str, headers: &[&str]) -> Answer {
        exchange(self.address(), method, path, body, headers).await
    }

    /// Sends a request to the client listener.
    pub(crate) async fn send_as_client(&self, path: &str, body: &str) -> Answer {
        exchange(self.gateway.address(), "POST", path, body, &["content-type: application/json"]).await
    }

    /// Sends a request and returns the connection with the response unread.
    pub(crate) async fn begin(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let token = format!("authorization: Bearer {TOKEN}");
        begin(self.address(), method, path, body, &[&token]).await
    }
}

async fn begin(address: SocketAddr, method: &str, path: &str, body: &str, headers: &[&str]) -> TcpStream {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n");
    for header in headers {
        head += header;
        head += "\r\n";
    }
    head += &format!("content-length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    stream.write_all(head.as_bytes()).await.expect("head written");
    // A rejected body may not be read completely.
    let _ = stream.write_all(body.as_bytes()).await;
    stream
}

async fn exchange(address: SocketAddr, method: &str, path: &str, body: &str, headers: &[&str]) -> Answer {
    let stream = begin(address, method, path, body, headers).await;
    timeout(PATIENCE, read(stream)).await.expect("response before the timeout")
}

/// Reads the response until the connection closes.
pub(crate) async fn read(mut stream: TcpStream) -> Answer {
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    // A connection whose request was rejected early may be reset after the response.
    while let Ok(1..) = stream.read(&mut chunk).await.inspect(|n| bytes.extend_from_slice(&chunk[..*n])) {}
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("a head");
    let head = String::from_utf8(bytes[..end].to_vec()).expect("a head is text").to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let body = bytes.split_off(end + 4);
    let body = if head.contains("transfer-encoding: chunked") { unchunked(&body) } else { body };
    Answer { status, head, body }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n").expect("a chunk's head");
        let length = std::str::from_utf8(&bytes[..end]).expect("digits");
        let length = usize::from_str_radix(length, 16).expect("a chunk's length");
        let begin = end + 2;
        body.extend_from_slice(&bytes[begin..begin + length]);
        if length == 0 {
            return body;
        }
        bytes = &bytes[begin + length + 2..];
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("timed out: {what}"));
}
