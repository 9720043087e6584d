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
mod model_section;
mod reload;
mod rules;
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

pub(crate) use address::host_of;
pub use disaggregation::DisaggregationSettings;
pub(crate) use disaggregation::{ModelRole, role_of};
pub use error::{LoadError, LoadErrors};
pub use kubernetes::{KubernetesSettings, PodRoleChoice};
pub use load::{ConfigFile, Flag, Loaded, Sources};
pub use log::{AccessLog, LevelError, parse_level};
pub use rules::{SettingError, SettingErrors};
pub use secrets::{SECRET_BYTES_MIN, Secret, SecretError, Secrets};
pub use section::Origin;

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

/// `[gateway]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewaySettings {
    /// Listen address for clients.
    pub listen: SocketAddr,
    /// Whether the listeners share their addresses with another gateway of the same user that sets this, too.
    pub reuse_port: bool,
    /// PEM file of the certificate chain; enables TLS for clients.
    pub tls_certificate_file: Option<PathBuf>,
    /// PEM file of the private key.
    pub tls_key_file: Option<PathBuf>,
    /// PEM file with the CA bundle for worker certificates. Default: the system bundle.
    pub worker_ca_file: Option<PathBuf>,
    /// PEM file of the certificate chain for workers that require a certificate.
    pub worker_certificate_file: Option<PathBuf>,
    /// PEM file of its private key.
    pub worker_key_file: Option<PathBuf>,
    /// File with the API key of the workers, for every request to them (`Authorization: Bearer`). Client keys are then
    /// not forwarded. A model and a worker may have their own.
    pub worker_api_key_file: Option<PathBuf>,
    /// File with the secret for tenant salts, at least 16 bytes. Required with tenants.
    pub salt_secret_file: Option<PathBuf>,
    /// Whether the clients' listener also serves `/metrics`.
    pub metrics_public: bool,
    /// Limit of client connections; further ones are rejected with 503 except for probes. Lowered if the process has
    /// too few descriptors.
    pub connections_max: u32,
    /// Maximum length of a request body, in bytes.
    pub body_bytes_max: u64,
    /// Memory budget of all request bodies in bytes; above it bodies are rejected with 503. Default: an eighth of the
    /// memory of the machine or cgroup, at least four times `body_bytes_max`.
    pub body_budget_bytes: Option<u64>,
    /// Timeout of a request head, and of an idle connection. Must exceed the idle timeout of a load balancer in front,
    /// which otherwise reuses connections that are being closed.
    pub head_timeout_ms: u64,
    /// Idle timeout while receiving a body; the total limit is ten times as long.
    pub body_timeout_ms: u64,
    /// Timeout for connecting to a worker.
    pub connect_timeout_ms: u64,
    /// Timeout for the first token of a streamed response.
    pub first_byte_timeout_ms: u64,
    /// Timeout for a response that is not streamed.
    pub answer_timeout_ms: u64,
    /// Timeout for placement, unless the request has a shorter deadline.
    pub queue_timeout_ms: u64,
    /// Time that requests wait while their model has no workers; 0 rejects them at once.
    pub hold_without_endpoints_ms: u64,
    /// Timeout between parts of a started response, and of a client that does not read.
    pub idle_timeout_ms: u64,
    /// Attempts per request, including the first, until a valid response starts.
    pub attempts_max: u32,
    /// Retries per request, averaged over the last ten seconds; ten retries in that time are always allowed.
    pub retry_share_max: f64,
    /// Resumptions per streamed response on another rank after a failure of its engine; 0 disables them.
    pub stream_migrations_max: u32,
    /// Longest output so far that is resumed, in tokens.
    pub stream_migration_tokens_max: u32,
    /// Time from the termination signal, when `/ready` becomes 503, to the close of the listener.
    pub drain_delay_ms: u64,
    /// Time limit for requests in flight after that.
    pub drain_timeout_ms: u64,
    /// Maximum time after startup that `/ready` waits for known caches.
    pub warm_up_ms: u64,
    /// Directory of index snapshots, one file per model. Default: none are written or read.
    pub snapshot_path: Option<PathBuf>,
    /// Interval between writes of the index snapshots.
    pub snapshot_interval_ms: u64,
    /// Directory of files with the recorded decisions. Default: none are written.
    pub decision_path: Option<PathBuf>,
    /// Length in bytes at which the next file of recorded decisions begins.
    pub decision_file_bytes_max: u64,
    /// Files of recorded decisions per model; the oldest are removed.
    pub decision_files_max: u32,
    /// Log level: `error`, `warn`, `info`, `debug` or `trace`, or targets with levels (`info,pointsman=debug`).
    pub log_level: String,
    /// Log format.
    pub log_format: LogFormat,
    /// Destination of the access log, one JSON object per request: `stdout`, `stderr`, `off`, or the absolute path of a
    /// file.
    pub access_log: String,
    /// Address of an OpenTelemetry collector with OTLP over gRPC, `http://HOST:PORT`. Not set: no spans are exported.
    pub otlp_endpoint: Option<String>,
    /// Share of requests with exported spans, from 0 to 1. The decision of the client in `traceparent` takes precedence.
    pub otlp_sample_share: f64,
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

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            reuse_port: false,
            tls_certificate_file: None,
            tls_key_file: None,
            worker_ca_file: None,
            worker_certificate_file: None,
            worker_key_file: None,
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
            hold_without_endpoints_ms: 0,
            idle_timeout_ms: 120_000,
            attempts_max: 3,
            retry_share_max: 0.2,
            stream_migrations_max: 0,
            stream_migration_tokens_max: 8_192,
            drain_delay_ms: 0,
            drain_timeout_ms: 60_000,
            warm_up_ms: 30_000,
            snapshot_path: None,
            snapshot_interval_ms: 60_000,
            decision_path: None,
            decision_file_bytes_max: 64 << 20,
            decision_files_max: 16,
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            access_log: "stdout".to_owned(),
            otlp_endpoint: None,
            otlp_sample_share: 1.0,
        }
    }
}

/// `[admin]`: always requires a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminSettings {
    /// Listen address for operators.
    pub listen: SocketAddr,
    /// File with the operator token (`Authorization: Bearer`); at least 16 bytes.
    pub token_file: PathBuf,
    /// File with a token for the served index only. Default: the operator token alone gives access.
    pub index_token_file: Option<PathBuf>,
    /// File with a token for `GET` requests only. Default: the operator token alone gives access.
    pub read_token_file: Option<PathBuf>,
}

impl AdminSettings {
    /// Loopback, port 8081.
    #[must_use]
    pub fn default_listen() -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, 8081))
    }
}

impl Default for AdminSettings {
    /// The default address without a token, which [`Settings::validate`] requires.
    fn default() -> Self {
        Self {
            listen: Self::default_listen(),
            token_file: PathBuf::new(),
            index_token_file: None,
            read_token_file: None,
        }
    }
}

/// `[picker]`: gRPC listener for proxies with Envoy's external processing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PickerSettings {
    /// Listen address for proxies.
    pub listen: SocketAddr,
    /// PEM file of the certificate chain. Default: a self-signed certificate, which proxies of the Gateway API accept.
    pub tls_certificate_file: Option<PathBuf>,
    /// PEM file of the private key.
    pub tls_key_file: Option<PathBuf>,
    /// Whether connections are not encrypted.
    pub plaintext: bool,
    /// Whether a second endpoint is named for retries of the proxy. Proxies with an `ORIGINAL_DST` cluster, such as those
    /// of Envoy AI Gateway, accept one only.
    pub fallback: bool,
    /// Whether the headers of the conformance suite of the Gateway API Inference Extension have an effect.
    pub conformance: bool,
}

impl Default for PickerSettings {
    /// Loopback, port 9002, self-signed, with a fallback.
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9002)),
            tls_certificate_file: None,
            tls_key_file: None,
            plaintext: false,
            fallback: true,
            conformance: false,
        }
    }
}

/// `[replicas]`: other gateways of the same fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReplicasSettings {
    /// Listen address for other replicas.
    pub listen: Option<SocketAddr>,
    /// Addresses of the replicas as `HOST:PORT`. The own address may be among them.
    pub peers: Vec<String>,
    /// DNS name of all replicas as `NAME:PORT`, resolved every 5 s. Each address is a replica.
    pub dns: Option<String>,
    /// Kubernetes Service of all replicas as `NAME:PORT`. Each address of its EndpointSlices is a replica.
    pub kubernetes_service: Option<String>,
    /// Namespace of the Service. Default: that of the kubeconfig context or of the service account.
    pub kubernetes_namespace: Option<String>,
    /// Kubeconfig file of the API server. Default: `KUBECONFIG`, `~/.kube/config`, then the service account of the pod.
    pub kubeconfig_file: Option<PathBuf>,
    /// Address of a NATS server with JetStream, `nats://HOST:PORT` or `tls://HOST:PORT`, instead of `listen` and peers.
    pub nats: Option<String>,
    /// Name of this replica, unique and the same after a restart. Default: random.
    pub id: Option<String>,
    /// File with the key that all replicas share, at least 16 bytes.
    pub key_file: Option<PathBuf>,
    /// PEM file of the certificate chain of this replica; enables mutual TLS.
    pub tls_certificate_file: Option<PathBuf>,
    /// PEM file of the private key.
    pub tls_key_file: Option<PathBuf>,
    /// PEM file of the authority that signs the certificates of all replicas.
    pub tls_ca_file: Option<PathBuf>,
    /// Whether replicas on other machines may connect without a key and TLS.
    pub insecure: bool,
}

/// One of `[[models]]`: a pool of interchangeable ranks.
#[derive(Clone, Debug)]
pub struct ModelSettings {
    /// Name for clients.
    pub name: String,
    /// Further names for clients.
    pub aliases: Vec<String>,
    /// Name at the workers. Default: `name`.
    pub upstream_name: Option<String>,
    /// Router configuration: `[router]` with overrides from `[models.router]`.
    pub router: RouterConfig,
    /// Workers in the configuration.
    pub workers: Vec<NamedWorker>,
    /// File with workers, read again after each change.
    pub workers_file: Option<PathBuf>,
    /// Addresses of probed workers.
    pub worker_urls: Vec<String>,
    /// DNS names as `HOST:PORT` or `https://HOST:PORT`; each address is a probed worker.
    pub worker_names: Vec<String>,
    /// File with the API key of the workers of this model. Default: `gateway.worker_api_key_file`.
    pub worker_api_key_file: Option<PathBuf>,
    /// `[models.kubernetes]`: pods as workers.
    pub kubernetes: Option<KubernetesSettings>,
    /// `[models.disaggregation]`: a prefill pool beside the workers, which decode.
    pub disaggregation: Option<DisaggregationSettings>,
    /// Tokenization for routing.
    pub tokens: TokensSettings,
    /// Handling of Anthropic Messages.
    pub messages: MessagesMode,
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
            worker_api_key_file: None,
            kubernetes: None,
            disaggregation: None,
            tokens: TokensSettings::default(),
            messages: MessagesMode::default(),
        }
    }

    /// Name at the workers.
    #[must_use]
    pub fn upstream_name(&self) -> &str {
        self.upstream_name.as_deref().unwrap_or(&self.name)
    }
}

/// `[models.tokens]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokensSettings {
    /// Token source for requests without token ids.
    pub source: TokenSourceChoice,
    /// The model's `tokenizer.json`.
    pub tokenizer_file: Option<PathBuf>,
    /// Chat template: a Jinja file or a `tokenizer_config.json`. Default: `tokenizer_config.json` or
    /// `chat_template.jinja` beside `tokenizer_file`.
    pub chat_template_file: Option<PathBuf>,
    /// Tokenizer threads.
    pub threads: u32,
    /// Byte limit of the tokenizer cache.
    pub cache_bytes_max: u64,
    /// Timeout of `/tokenize`.
    pub engine_timeout_ms: u64,
    /// Whether the tokenizer is compared with the engine's at startup.
    pub parity_check: bool,
    /// The token that a template emits for an image. Default: a known one of the tokenizer.
    pub media_placeholder: Option<String>,
    /// Whether images in data URLs without `uuid` receive one.
    pub media_uuids: bool,
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
            media_placeholder: None,
            media_uuids: false,
        }
    }
}

/// One of `[[tenants]]`. The default lacks name and keys, which [`Settings::validate`] requires.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantSettings {
    /// Name in logs, and input of the salt.
    pub name: String,
    /// File with the keys of the tenant, one per line.
    pub keys_file: PathBuf,
    /// Fixed queue class of its requests. Default: the request header selects it.
    pub policy_class: Option<String>,
    /// Maximum strict priority; higher values are lowered to it. 0 also disables priority jumps.
    pub strict_priority_max: u32,
    /// Maximum requests per minute.
    pub requests_per_minute: Option<u64>,
    /// Maximum prompt and completion tokens per minute.
    pub tokens_per_minute: Option<u64>,
    /// Maximum prompt and completion tokens per day.
    pub tokens_per_day: Option<u64>,
    /// Maximum requests in flight.
    pub requests_in_flight_max: Option<u32>,
    /// As `requests_per_minute`, for each key.
    pub key_requests_per_minute: Option<u64>,
    /// As `tokens_per_minute`, for each key.
    pub key_tokens_per_minute: Option<u64>,
    /// As `tokens_per_day`, for each key.
    pub key_tokens_per_day: Option<u64>,
    /// As `requests_in_flight_max`, for each key.
    pub key_requests_in_flight_max: Option<u32>,
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
    #[must_use]
    pub fn limits(&self) -> QuotaLimits {
        QuotaLimits {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            tokens_per_day: self.tokens_per_day,
            requests_in_flight_max: self.requests_in_flight_max,
        }
    }

    /// Limits of each of its keys.
    #[must_use]
    pub fn key_limits(&self) -> QuotaLimits {
        QuotaLimits {
            requests_per_minute: self.key_requests_per_minute,
            tokens_per_minute: self.key_tokens_per_minute,
            tokens_per_day: self.key_tokens_per_day,
            requests_in_flight_max: self.key_requests_in_flight_max,
        }
    }
}
