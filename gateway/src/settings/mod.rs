//! What an operator sets: the gateway's listeners and limits, the models and their workers, the tenants.
//!
//! Owns the settings as data, their defaults and their rules. Promises that settings which validate can be served.
//! Leaves where values come from (file, environment, flags) to the loader, and the router's own fields to
//! [`RouterConfig`].

mod error;
mod fields;
mod load;
mod reload;
mod secrets;
mod section;
#[cfg(test)]
mod tests;
mod validate;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use pointsman::RouterConfig;
use pointsman::discovery::NamedWorker;
use serde::{Deserialize, Serialize};

pub use error::{LoadError, LoadErrors};
pub use load::{ConfigFile, Flag, Loaded, Sources};
pub use secrets::{SECRET_BYTES_MIN, Secret, SecretError, Secrets};
pub use section::Origin;
pub use validate::{SettingError, SettingErrors};

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `[gateway]`: the listener for clients, limits and time-outs.
    pub gateway: GatewaySettings,
    /// `[admin]`: the listener for operators; `None` where there is none.
    pub admin: Option<AdminSettings>,
    /// `[[models]]`: one pool of workers each.
    pub models: Vec<ModelSettings>,
    /// `[[tenants]]`: who may ask; empty: anybody.
    pub tenants: Vec<TenantSettings>,
}

/// `[gateway]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewaySettings {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// PEM file of the certificate chain; with it clients speak TLS.
    pub tls_certificate_file: Option<PathBuf>,
    /// PEM file of its key.
    pub tls_key_file: Option<PathBuf>,
    /// PEM file of authorities that workers' certificates must come from. Default: the system's.
    pub worker_ca_file: Option<PathBuf>,
    /// File with the key that workers want (`Authorization: Bearer`). Clients' own keys are then not passed on.
    pub worker_api_key_file: Option<PathBuf>,
    /// File with the secret that tenants' salts are derived from; at least 16 bytes. Needed where there are tenants.
    pub salt_secret_file: Option<PathBuf>,
    /// Whether `/metrics` is served on the clients' listener, too.
    pub metrics_public: bool,
    /// Open connections of clients; those beyond are refused with 503, and probes on them answered. Lowered where the
    /// process has too few descriptors.
    pub connections_max: u32,
    /// Longest request body, in bytes.
    pub body_bytes_max: u64,
    /// Bytes of all request bodies in memory at once: an exhausted budget leads to 503. Default: an eighth of the memory of
    /// the machine or cgroup, at least four times `body_bytes_max`.
    pub body_budget_bytes: Option<u64>,
    /// How long a request's head may take to come, and a connection be idle before it: longer than the idle time-out of a
    /// load balancer in front, which would else use connections that are just being closed.
    pub head_timeout_ms: u64,
    /// How long the body may be silent while it comes; ten times as long it may take in all.
    pub body_timeout_ms: u64,
    /// How long a connection to a worker may take.
    pub connect_timeout_ms: u64,
    /// How long a worker may take until the first token of a streamed answer.
    pub first_byte_timeout_ms: u64,
    /// How long a worker may take for an answer that is not streamed, whose first byte comes when all of it is there.
    pub answer_timeout_ms: u64,
    /// How long a request may wait to be placed, where it says no deadline of its own that is shorter.
    pub queue_timeout_ms: u64,
    /// How long an answer may be silent once it has begun, and how long a client may take nothing of it.
    pub idle_timeout_ms: u64,
    /// Attempts of one request, the first included; only until a valid answer has begun.
    pub attempts_max: u32,
    /// Retries for each request, on average over the last ten seconds; ten retries are always allowed in them.
    pub retry_share_max: f64,
    /// After the signal to end: how long `/ready` says no before the listener closes.
    pub drain_delay_ms: u64,
    /// After that: how long requests in flight may take.
    pub drain_timeout_ms: u64,
    /// From the start on: how long to wait for caches to be known before `/ready` says yes anyway.
    pub warm_up_ms: u64,
    /// How much is logged: `error`, `warn`, `info`, `debug` or `trace`, or targets with levels (`info,pointsman=debug`).
    pub log_level: String,
    /// How.
    pub log_format: LogFormat,
    /// Where the access log goes, one JSON object a line for each request: `stdout`, `stderr`, `off`, or the absolute
    /// path of a file.
    pub access_log: String,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            tls_certificate_file: None,
            tls_key_file: None,
            worker_ca_file: None,
            worker_api_key_file: None,
            salt_secret_file: None,
            metrics_public: true,
            connections_max: 16_384,
            body_bytes_max: 16 << 20,
            body_budget_bytes: None,
            head_timeout_ms: 75_000,
            body_timeout_ms: 30_000,
            connect_timeout_ms: 2_000,
            first_byte_timeout_ms: 300_000,
            answer_timeout_ms: 600_000,
            queue_timeout_ms: 120_000,
            idle_timeout_ms: 120_000,
            attempts_max: 3,
            retry_share_max: 0.2,
            drain_delay_ms: 0,
            drain_timeout_ms: 60_000,
            warm_up_ms: 30_000,
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            access_log: "stdout".to_owned(),
        }
    }
}

/// `[admin]`: needs a token, always.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminSettings {
    /// Where operators connect.
    pub listen: SocketAddr,
    /// File with the token that they show (`Authorization: Bearer`); at least 16 bytes.
    pub token_file: PathBuf,
}

impl AdminSettings {
    /// Loopback, port 8081.
    #[must_use]
    pub fn default_listen() -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, 8081))
    }
}

impl Default for AdminSettings {
    /// The default address, and no token: [`Settings::validate`] wants one.
    fn default() -> Self {
        Self { listen: Self::default_listen(), token_file: PathBuf::new() }
    }
}

/// One of `[[models]]`: a pool of interchangeable ranks.
#[derive(Clone, Debug)]
pub struct ModelSettings {
    /// What clients call it.
    pub name: String,
    /// What they may call it, too.
    pub aliases: Vec<String>,
    /// What workers call it. Default: `name`.
    pub upstream_name: Option<String>,
    /// The pool's router: `[router]`, and `[models.router]` over it.
    pub router: RouterConfig,
    /// Workers given here.
    pub workers: Vec<NamedWorker>,
    /// A file that names workers, read again when it changes.
    pub workers_file: Option<PathBuf>,
    /// Addresses of workers that are asked what they are.
    pub worker_urls: Vec<String>,
    /// `HOST:PORT` of names with an address for each worker, which is asked what it is.
    pub worker_names: Vec<String>,
    /// Where the tokens come from that prompts are compared by.
    pub tokens: TokensSettings,
}

impl ModelSettings {
    /// A model without workers, all else default.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            upstream_name: None,
            router: RouterConfig::default(),
            workers: Vec::new(),
            workers_file: None,
            worker_urls: Vec::new(),
            worker_names: Vec::new(),
            tokens: TokensSettings::default(),
        }
    }

    /// What workers call it.
    #[must_use]
    pub fn upstream_name(&self) -> &str {
        self.upstream_name.as_deref().unwrap_or(&self.name)
    }
}

/// `[models.tokens]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokensSettings {
    /// Which source, for requests that do not bring token ids.
    pub source: TokenSourceChoice,
    /// The model's `tokenizer.json`.
    pub tokenizer_file: Option<PathBuf>,
    /// Its chat template: a Jinja file, or the `tokenizer_config.json` that holds one. Default: the
    /// `tokenizer_config.json` or `chat_template.jinja` beside `tokenizer_file`.
    pub chat_template_file: Option<PathBuf>,
    /// Threads that tokenise.
    pub threads: u32,
    /// Bytes that tokens of earlier conversations may take.
    pub cache_bytes_max: u64,
    /// How long a worker may take for `/tokenize`.
    pub engine_timeout_ms: u64,
    /// Whether the tokenizer is compared with the engine's at the start.
    pub parity_check: bool,
}

/// Where tokens come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSourceChoice {
    /// `local` where there is a `tokenizer_file`, else `engine` where a worker answers, else `none`.
    #[default]
    Auto,
    /// The tokenizer file.
    Local,
    /// The engines' own `/tokenize`.
    Engine,
    /// Nowhere: requests without token ids go by load alone.
    None,
}

impl Default for TokensSettings {
    fn default() -> Self {
        Self {
            source: TokenSourceChoice::Auto,
            tokenizer_file: None,
            chat_template_file: None,
            threads: 2,
            cache_bytes_max: 256 << 20,
            engine_timeout_ms: 500,
            parity_check: true,
        }
    }
}

/// One of `[[tenants]]`. By default it has neither name nor keys: [`Settings::validate`] wants both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantSettings {
    /// Its name, for logs and for its salt.
    pub name: String,
    /// File with its keys, one a line.
    pub keys_file: PathBuf,
    /// The policy class of its requests; they may not choose another. Default: as the request's header says.
    pub policy_class: Option<String>,
    /// The highest strict priority that its requests get; those that ask for more get this much. Where it is 0 they may not
    /// jump the queue either.
    pub strict_priority_max: u32,
}
