//! Settings of the gateway: listeners and limits, models and workers, tenants.
//!
//! Plain data with defaults and rules; validated settings can be served. The loader merges file, environment and flags.
//! [`RouterConfig`] has the fields of the router.

mod address;
mod disaggregation;
mod error;
mod fields;
mod kubernetes;
mod load;
mod log;
mod reload;
mod rules;
mod secrets;
mod section;
mod table;
#[cfg(test)]
mod tests;
mod validate;
mod workers;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use pointsman::{NamedWorker, RouterConfig};
use serde::{Deserialize, Serialize};

pub(crate) use address::host_of;
pub use disaggregation::DisaggregationSettings;
pub(crate) use disaggregation::{ModelRole, role_of};
pub use error::{LoadError, LoadErrors};
pub use kubernetes::{KubernetesSettings, PodRoleChoice};
pub use load::{ConfigFile, Flag, Loaded, Sources};
pub use log::{AccessLog, parse_level};
pub use rules::{SettingError, SettingErrors};
pub(crate) use secrets::read_at_most;
pub use secrets::{SECRET_BYTES_MIN, Secret, SecretError, Secrets};
pub use section::Origin;
use table::settings;

/// Maximum of times.
const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// Maximum limit of a tenant.
const LIMIT_MAX: u64 = 1_000_000_000_000;

/// All settings.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `[gateway]`: the clients' listener, limits and timeouts.
    pub gateway: GatewaySettings,
    /// `[admin]`: the administration listener; `None` disables it.
    pub admin: Option<AdminSettings>,
    /// `[picker]`: the endpoint picker for proxies; `None` disables it.
    pub picker: Option<PickerSettings>,
    /// `[replicas]`: the transport between gateways of one fleet; `None` disables it.
    pub replicas: Option<ReplicasSettings>,
    /// `[[models]]`: one pool of workers each.
    pub models: Vec<ModelSettings>,
    /// `[[tenants]]`; the API is open if empty.
    pub tenants: Vec<TenantSettings>,
}

settings! {
    /// `[gateway]`.
    pub struct GatewaySettings {
        /// Listen address for clients.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
        /// Whether the listeners share their addresses with another gateway of the same user that sets this, too.
        reuse_port: bool;
        /// PEM file of the certificate chain; enables TLS for clients.
        tls_certificate_file: Option<PathBuf> => reloaded;
        /// PEM file of the private key.
        tls_key_file: Option<PathBuf> => reloaded;
        /// PEM file with the CA bundle for worker certificates. Default: the system bundle.
        worker_ca_file: Option<PathBuf> => reloaded;
        /// PEM file of the certificate chain for workers that require a certificate.
        worker_certificate_file: Option<PathBuf> => reloaded;
        /// PEM file of its private key.
        worker_key_file: Option<PathBuf> => reloaded;
        /// File with the API key of the workers, for every request to them (`Authorization: Bearer`). Client keys are then
        /// not forwarded. A model and a worker may have their own.
        worker_api_key_file: Option<PathBuf> => reloaded;
        /// File with the secret for tenant salts, at least 16 bytes. Required with tenants.
        salt_secret_file: Option<PathBuf> => reloaded;
        /// Whether the clients' listener also serves `/metrics`. Default: without tenants.
        metrics_public: Option<bool> => reloaded;
        /// Workers with series in `/metrics`, about 60 each. Of more, those with the most failed attempts, then with the
        /// most attempts, have them. Without limit a fleet of 2,000 workers has a page of 17 MB.
        metrics_workers_max: usize = 256;
        /// Origins of web pages that may send requests: `https://HOST`, or `*` for all. Default: all without tenants, none with
        /// tenants.
        allow_origins: Option<Vec<String>> => reloaded;
        /// Limit of client connections; further ones are rejected with 503 except for probes. Lowered if the process has
        /// too few descriptors.
        connections_max: u32 = 16_384, in 1..=1_000_000;
        /// Maximum length of a request body, in bytes.
        body_bytes_max: u64 = 16 << 20, in 1 << 10..=1 << 30 => reloaded;
        /// Limit of concurrent requests of an HTTP/2 connection.
        http2_streams_max: u32 = 100, in 1..=1_000 => reloaded;
        /// Memory budget of all requests in flight in bytes; above it requests are refused with 503. Default: an eighth of
        /// the memory of the machine or cgroup, at least four times `body_bytes_max`.
        request_budget_bytes: Option<u64>;
        /// Timeout of a request head, and of an idle connection. Must exceed the idle timeout of a load balancer in front,
        /// which otherwise reuses connections that are being closed.
        head_timeout_ms: u64 = 75_000, in 1..=DAY_MS => reloaded;
        /// Idle timeout while receiving a body; the total limit is ten times as long.
        body_timeout_ms: u64 = 30_000, in 1..=DAY_MS => reloaded;
        /// Timeout for connecting to a worker.
        connect_timeout_ms: u64 = 2_000, in 1..=DAY_MS => reloaded;
        /// Timeout for the first token of a streamed response.
        first_byte_timeout_ms: u64 = 300_000, in 1..=DAY_MS => reloaded;
        /// Timeout for a response that is not streamed.
        answer_timeout_ms: u64 = 600_000, in 1..=DAY_MS => reloaded;
        /// Timeout for placement, unless the request has a shorter deadline.
        queue_timeout_ms: u64 = 120_000, in 1..=DAY_MS => reloaded;
        /// Time that requests wait while their model has no workers; 0 rejects them at once.
        hold_without_endpoints_ms: u64 = 0, in 0..=DAY_MS => reloaded;
        /// Timeout between parts of a started response, and of a client that does not read.
        idle_timeout_ms: u64 = 120_000, in 1..=DAY_MS => reloaded;
        /// Silence until a client that waits for a stream receives its head and heartbeats, and their interval; 0 disables
        /// them.
        heartbeat_after_ms: u64 = 5_000, in 0..=DAY_MS => reloaded;
        /// Attempts per request, including the first, until a valid response starts.
        attempts_max: u32 = 3, in 1..=10 => reloaded;
        /// Retries per request, averaged over the last ten seconds; ten retries in that time are always allowed.
        retry_share_max: f64 = 0.2 => reloaded;
        /// Resumptions per streamed response on another rank after a failure of its engine; 0 disables them.
        stream_migrations_max: u32 = 1, in 0..=10 => reloaded;
        /// Longest output so far that is resumed, in tokens.
        stream_migration_tokens_max: u32 = 8_192, in 1..=1 << 20 => reloaded;
        /// Headers that name the session of a request, after `X-Session-Id` and before those of known clients.
        session_headers: Vec<String> => reloaded;
        /// Time from the termination signal, when `/ready` becomes 503, to the close of the listener.
        drain_delay_ms: u64 = 0, in 0..=DAY_MS => reloaded;
        /// Time limit for requests in flight after that.
        drain_timeout_ms: u64 = 60_000, in 0..=DAY_MS => reloaded;
        /// Maximum time after startup that `/ready` waits for known caches.
        warm_up_ms: u64 = 30_000, in 0..=DAY_MS;
        /// Further `POST` paths.
        routes: Vec<RouteSettings> => reloaded;
        /// Directory of index snapshots, one file per model. Default: none are written or read.
        snapshot_path: Option<PathBuf>;
        /// Interval between writes of the index snapshots.
        snapshot_interval_ms: u64 = 60_000, in 1_000..=DAY_MS;
        /// Directory of files with the recorded decisions. Default: none are written.
        decision_path: Option<PathBuf>;
        /// Length in bytes at which the next file of recorded decisions begins.
        decision_file_bytes_max: u64 = 64 << 20, in 1 << 20..=1 << 40;
        /// Files of recorded decisions per model; the oldest are removed.
        decision_files_max: u32 = 16, in 1..=10_000;
        /// Log level: `error`, `warn`, `info`, `debug` or `trace`, or targets with levels (`info,pointsman=debug`).
        log_level: String = "info".to_owned();
        /// Log format.
        log_format: LogFormat;
        /// Destination of the access log, one JSON object per request: `stdout`, `stderr`, `off`, or the absolute path of a
        /// file.
        access_log: String = "stdout".to_owned();
        /// Address of an OpenTelemetry collector with OTLP over gRPC, `http://HOST:PORT`. Not set: no spans are exported.
        otlp_endpoint: Option<String>;
        /// Share of requests with exported spans, from 0 to 1. The decision of the client in `traceparent` takes precedence.
        otlp_sample_share: f64 = 1.0;
    }
}

/// One of `[[gateway.routes]]`: a path whose requests are forwarded unread to a worker of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteSettings {
    /// Path, at the gateway and at the workers.
    pub path: String,
    /// Name of the model.
    pub model: String,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Plain text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

settings! {
    /// `[admin]`: always requires a token.
    #[derive(Eq)]
    pub struct AdminSettings {
        /// Listen address for operators.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8081));
        /// File with the operator token (`Authorization: Bearer`); at least 16 bytes.
        token_file: PathBuf => reloaded;
        /// File with a token for the served index only. Default: the operator token alone gives access.
        index_token_file: Option<PathBuf> => reloaded;
        /// File with a token for `GET` requests only. Default: the operator token alone gives access.
        read_token_file: Option<PathBuf> => reloaded;
    }
}

settings! {
    /// `[picker]`: gRPC listener for proxies with Envoy's external processing.
    #[derive(Eq)]
    pub struct PickerSettings {
        /// Listen address for proxies.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 9002));
        /// PEM file of the certificate chain. Default: a self-signed certificate, which proxies of the Gateway API accept.
        tls_certificate_file: Option<PathBuf>;
        /// PEM file of the private key.
        tls_key_file: Option<PathBuf>;
        /// Whether connections are not encrypted.
        plaintext: bool;
        /// Whether a second endpoint is named for retries of the proxy. Proxies with an `ORIGINAL_DST` cluster, such as those
        /// of Envoy AI Gateway, accept one only.
        fallback: bool = true;
        /// Whether the headers of the conformance suite of the Gateway API Inference Extension have an effect.
        conformance: bool;
    }
}

settings! {
    /// `[replicas]`: other gateways of the same fleet.
    #[derive(Eq)]
    pub struct ReplicasSettings {
        /// Listen address for other replicas.
        listen: Option<SocketAddr>;
        /// Addresses of the replicas as `HOST:PORT`. The own address may be among them.
        peers: Vec<String>;
        /// DNS name of all replicas as `NAME:PORT`, resolved every 5 s. Each address is a replica.
        dns: Option<String>;
        /// Address of a NATS server with JetStream, `nats://HOST:PORT` or `tls://HOST:PORT`, instead of `listen` and peers.
        nats: Option<String>;
        /// Name of this replica, unique and the same after a restart. Default: random.
        id: Option<String>;
        /// File with the key that all replicas share, at least 16 bytes.
        key_file: Option<PathBuf>;
        /// PEM file of the certificate chain of this replica; enables mutual TLS.
        tls_certificate_file: Option<PathBuf>;
        /// PEM file of the private key.
        tls_key_file: Option<PathBuf>;
        /// PEM file of the authority that signs the certificates of all replicas.
        tls_ca_file: Option<PathBuf>;
        /// Whether replicas on other machines may connect without a key and TLS.
        insecure: bool;
    }
}

settings! {
    /// One of `[[models]]`: a pool of interchangeable ranks.
    pub struct ModelSettings {
        /// Name for clients.
        name: String;
        /// Further names for clients.
        aliases: Vec<String>;
        /// Name at the workers. Default: `name`.
        upstream_name: Option<String>;
        /// Router configuration: `[router]` with overrides from `[models.router]`.
        router: RouterConfig;
        /// Workers in the configuration.
        #[serde(serialize_with = "workers::write", deserialize_with = "workers::read")]
        workers: Vec<NamedWorker>;
        /// File with workers, read again after each change.
        workers_file: Option<PathBuf>;
        /// Addresses of probed workers.
        worker_urls: Vec<String>;
        /// DNS names as `HOST:PORT` or `https://HOST:PORT`; each address is a probed worker.
        worker_names: Vec<String>;
        /// File with the API key of the workers of this model. Default: `gateway.worker_api_key_file`.
        worker_api_key_file: Option<PathBuf>;
        /// `[models.kubernetes]`: pods as workers.
        kubernetes: Option<KubernetesSettings>;
        /// `[models.disaggregation]`: a prefill pool beside the workers, which decode.
        disaggregation: Option<DisaggregationSettings>;
        /// Tokenization for routing.
        tokens: TokensSettings;
        /// Handling of Anthropic Messages.
        messages: MessagesMode;
    }
}

/// Handling of `/v1/messages`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MessagesMode {
    /// Converted to chats, for all engines.
    #[default]
    Translate,
    /// Forwarded unchanged, for engines with this endpoint.
    Pass,
}

impl ModelSettings {
    /// A model with defaults and without workers.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Name at the workers.
    pub fn upstream_name(&self) -> &str {
        self.upstream_name.as_deref().unwrap_or(&self.name)
    }
}

settings! {
    /// `[models.tokens]`.
    pub struct TokensSettings {
        /// Token source for requests without token ids.
        source: TokenSourceChoice;
        /// The model's `tokenizer.json`.
        tokenizer_file: Option<PathBuf>;
        /// Chat template: a Jinja file or a `tokenizer_config.json`. Default: `tokenizer_config.json` or
        /// `chat_template.jinja` beside `tokenizer_file`.
        chat_template_file: Option<PathBuf>;
        /// Tokenizer threads.
        threads: u32 = 2, in 1..=256;
        /// Longest wait for the local tokenizer; then the request is routed without tokens.
        wait_ms: u64 = 200, in 1..=DAY_MS;
        /// Byte limit of the tokenizer cache.
        cache_bytes_max: u64 = 256 << 20, in 0..=1 << 40;
        /// Timeout of `/tokenize`.
        engine_timeout_ms: u64 = 500, in 1..=DAY_MS;
        /// Whether the tokenizer is compared with the engine's at startup.
        parity_check: bool = true;
        /// The token that a template emits for an image. Default: a known one of the tokenizer.
        media_placeholder: Option<String>;
        /// Whether images in data URLs without `uuid` receive one.
        media_uuids: bool;
    }
}

/// Token source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSourceChoice {
    /// `local` with a `tokenizer_file`, else `engine` if a worker responds, else `none`.
    #[default]
    Auto,
    /// The tokenizer file.
    Local,
    /// `/tokenize` of the engines.
    Engine,
    /// No tokens: routing by load alone.
    None,
}

settings! {
    /// One of `[[tenants]]`. The default lacks name and keys, which [`Settings::validate`] requires.
    #[derive(Eq)]
    pub struct TenantSettings {
        /// Name in logs, and input of the salt.
        name: String;
        /// File with the keys of the tenant, one per line.
        keys_file: PathBuf;
        /// Fixed queue class of its requests. Default: the request header selects it.
        policy_class: Option<String>;
        /// Maximum strict priority; higher values are lowered to it. 0 also disables priority jumps.
        strict_priority_max: u32;
        /// Maximum requests per minute.
        requests_per_minute: Option<u64>, in 1..=LIMIT_MAX;
        /// Maximum prompt and completion tokens per minute.
        tokens_per_minute: Option<u64>, in 1..=LIMIT_MAX;
        /// Maximum prompt and completion tokens per day.
        tokens_per_day: Option<u64>, in 1..=LIMIT_MAX;
        /// Maximum requests in flight.
        requests_in_flight_max: Option<u32>, in 1..=LIMIT_MAX;
        /// As `requests_per_minute`, for each key.
        key_requests_per_minute: Option<u64>, in 1..=LIMIT_MAX;
        /// As `tokens_per_minute`, for each key.
        key_tokens_per_minute: Option<u64>, in 1..=LIMIT_MAX;
        /// As `tokens_per_day`, for each key.
        key_tokens_per_day: Option<u64>, in 1..=LIMIT_MAX;
        /// As `requests_in_flight_max`, for each key.
        key_requests_in_flight_max: Option<u32>, in 1..=LIMIT_MAX;
    }
}

/// Limits of a tenant, or of each of its keys. An absent limit does not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Requests per minute.
    pub requests_per_minute: Option<u64>,
    /// Prompt and completion tokens per minute.
    pub tokens_per_minute: Option<u64>,
    /// Prompt and completion tokens per day.
    pub tokens_per_day: Option<u64>,
    /// Requests in flight.
    pub requests_in_flight_max: Option<u32>,
}

impl TenantSettings {
    /// Limits of the tenant.
    pub fn limits(&self) -> QuotaLimits {
        QuotaLimits {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            tokens_per_day: self.tokens_per_day,
            requests_in_flight_max: self.requests_in_flight_max,
        }
    }

    /// Limits of each of its keys.
    pub fn key_limits(&self) -> QuotaLimits {
        QuotaLimits {
            requests_per_minute: self.key_requests_per_minute,
            tokens_per_minute: self.key_tokens_per_minute,
            tokens_per_day: self.key_tokens_per_day,
            requests_in_flight_max: self.key_requests_in_flight_max,
        }
    }
}
