//! A gateway with the admin API, and a client of it.
//!
//! The module owns the token file. Requests belong to the tests.

use pointsman::internals::config::HealthConfig;
use pointsman::internals::config::IndexConfig;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use pointsman::{Router, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{AdminSettings, GatewaySettings, ModelSettings, Settings};
use tokio::net::TcpStream;

use super::proxy::{Answer, request, send};

pub(crate) const TOKEN: &str = "s3cret-0123456789";

/// A model name that needs escaping in a path, and its alias.
pub(crate) const MODEL: &str = "org/mock";
pub(crate) const ALIAS: &str = "mock";

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
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        request(self.address(), method, path, &headers, body.as_bytes()).await
    }

    /// Sends a request to the client listener.
    pub(crate) async fn send_as_client(&self, path: &str, body: &str) -> Answer {
        request(self.gateway.address(), "POST", path, "content-type: application/json\r\n", body.as_bytes()).await
    }

    /// Sends a request and returns the connection with the response unread.
    pub(crate) async fn begin(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let token = format!("authorization: Bearer {TOKEN}\r\n");
        send(self.address(), method, path, &token, body.as_bytes()).await
    }
}
