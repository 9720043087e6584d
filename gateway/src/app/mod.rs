//! The gateway server: accepts requests, places them, and forwards them to workers.
//!
//! Builds, starts and stops a running gateway (`App`). Every accepted request gets a response, and no booking remains
//! at shutdown. `listener` handles connections, `proxy` requests, `tenants` authentication, `models` model names, and
//! `admin` operators.

pub(crate) mod current;
pub mod metrics;
pub(crate) mod reload;
pub mod replay;
pub(crate) mod routes;
mod run;
pub mod top;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pointsman::{ReplicaBus, Router};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::admission::body_budget::BodyBudget;
use crate::admission::retry_budget::RetryBudget;
use crate::net::limits::{ADMIN_CONNECTIONS_MAX, OVERFLOW_CONNECTIONS_MAX};
use crate::net::listener::{LINGER, Listener, ListenerOptions, Overflow, PassedSockets, ReservedSockets};
use crate::net::tls;
use crate::net::upstream::{Upstream, WorkerTlsError, WorkerTlsFiles, worker_tls};
use crate::observe::metric::Metric;
use crate::observe::otlp::Tracing;
use crate::observe::page::Metrics;
use crate::observe::requests::Meters;
use crate::observe::throttle::LogThrottle;
use crate::pools::decision_files::DecisionFiles;
use crate::pools::models::Models;
use crate::pools::readiness::Readiness;
use crate::pools::{models, warm, workers};
use crate::proxy::ids::Ids;
use crate::replicas::{Replicas, ReplicasError};
use crate::settings::{GatewaySettings, SecretError, Secrets, Settings};
use crate::{admin, picker};
use current::Current;
use reload::Reloader;

pub use crate::admin::TokenError;
pub use crate::admission::tenants::{Client, Tenant, Tenants};
pub use crate::net::limits::ProcessLimits;
pub use crate::net::listener::{Drained, ListenError};
pub use crate::net::tls::TlsError;
pub use crate::pools::models::ModelError;
pub use reload::{LastReload, LoadSettings, ReloadError, ReloadStatus};
pub use run::{Ended, Signal, refuse, run, run_until};

/// Log interval of cut-off responses.
const BROKEN_STREAM_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Startup error of the gateway.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// Pool of a model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Operator token.
    #[error(transparent)]
    AdminToken(#[from] TokenError),
    /// Secret file.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// TLS of requests to workers.
    #[error(transparent)]
    WorkerTls(#[from] WorkerTlsError),
    /// Certificate chain or key for clients.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Transport between replicas.
    #[error(transparent)]
    Replicas(#[from] ReplicasError),
    /// Listen failure.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Exporter of traces.
    #[error("cannot export traces to {endpoint}: {reason}")]
    Otlp {
        /// `gateway.otlp_endpoint`.
        endpoint: String,
        /// Reason of the client library.
        reason: String,
    },
}

/// Serving state of a request: a snapshot that a reload replaces. State of the process that survives a reload, such as
/// counters and the drain flag, is shared by snapshots through `Arc`.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) settings: Arc<Settings>,
    pub(crate) models: Arc<Models>,
    pub(crate) upstream: Upstream,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) metrics: Option<Metrics>,
    pub(crate) tenants: Arc<Tenants>,
    /// Operator token; `None` without `[admin]`.
    pub(crate) admin_token: Option<Arc<admin::Token>>,
    /// Token of the served index, beside the operator token.
    pub(crate) index_token: Option<Arc<admin::Token>>,
    /// Token for `GET` requests of operators, beside the operator token.
    pub(crate) read_token: Option<Arc<admin::Token>>,
    pub(crate) meters: Arc<Meters>,
    /// Exporter of traces; `None` without `gateway.otlp_endpoint`.
    pub(crate) tracing: Option<Arc<Tracing>>,
    pub(crate) retry_budget: Arc<RetryBudget>,
    pub(crate) bodies: Arc<BodyBudget>,
    pub(crate) broken_streams: Arc<LogThrottle>,
    pub(crate) ids: Arc<Ids>,
    /// Startup time in Unix seconds, used as the creation date of models.
    pub(crate) created: u64,
    /// Whether new requests are rejected.
    closing: Arc<AtomicBool>,
}

impl App {
    #[expect(clippy::disallowed_methods, reason = "the date is only reported to clients")]
    fn new(
        settings: Settings,
        limits: &ProcessLimits,
        files: &Files,
        models: Models,
        upstream: Upstream,
        metrics: Option<Metrics>,
        tracing: Option<Arc<Tracing>>,
    ) -> Self {
        let now = Instant::now();
        Self {
            tenants: Arc::new(Tenants::new(&settings.tenants, &files.secrets)),
            admin_token: files.admin_token.clone(),
            index_token: files.index_token.clone(),
            read_token: files.read_token.clone(),
            readiness: Arc::new(Readiness::new(Duration::from_millis(settings.gateway.warm_up_ms))),
            metrics,
            retry_budget: Arc::new(RetryBudget::new(settings.gateway.retry_share_max, now)),
            bodies: BodyBudget::new(limits.body_budget_bytes),
            settings: Arc::new(settings),
            models: Arc::new(models),
            upstream,
            meters: Arc::new(Meters::new()),
            tracing,
            broken_streams: Arc::new(LogThrottle::new(BROKEN_STREAM_LOG_INTERVAL)),
            ids: Arc::new(Ids::new()),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            closing: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Whether new requests are rejected.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }
}

/// A running gateway.
pub struct Gateway {
    current: Current,
    clients: Listener,
    reloader: Arc<Reloader>,
    decision_files: Arc<DecisionFiles>,
    /// Background tasks; they end with the gateway.
    upkeep: JoinSet<()>,
    admin: Option<Listener>,
    /// Listener for proxies; `None` without `[picker]`.
    picker: Option<Listener>,
    /// Transport to other gateways; `None` without `[replicas]`.
    replicas: Option<Replicas>,
}

/// Time limit of operator responses after the routers have stopped.
const ADMIN_DRAIN: Duration = Duration::from_secs(1);

impl Gateway {
    /// Starts the routers, then the listeners.
    ///
    /// # Errors
    /// See [`GatewayError`]; nothing runs after an error.
    pub async fn start(settings: Settings) -> Result<Self, GatewayError> {
        Self::start_with(settings, None, PassedSockets::default()).await
    }

    /// Like [`Gateway::start`], with a loader for [reloads](Self::reload).
    ///
    /// # Errors
    /// See [`GatewayError`]; nothing runs after an error.
    pub async fn start_reloadable(settings: Settings, load: LoadSettings) -> Result<Self, GatewayError> {
        Self::start_with(settings, Some(load), PassedSockets::default()).await
    }

    /// Boxed, so that the gateway is compiled in this crate and not once more in every crate that polls the future.
    fn start_with(
        settings: Settings,
        load: Option<LoadSettings>,
        sockets: PassedSockets,
    ) -> Pin<Box<dyn Future<Output = Result<Self, GatewayError>> + Send>> {
        Box::pin(Self::start_parts(settings, load, sockets))
    }

    async fn start_parts(
        settings: Settings,
        load: Option<LoadSettings>,
        mut sockets: PassedSockets,
    ) -> Result<Self, GatewayError> {
        // Metric handles belong to the recorder that is installed at their creation.
        let metrics = Metrics::install(workers::page);
        metrics::all().for_each(Metric::describe);
        let limits = ProcessLimits::of(&settings);
        // Unreadable files are detected before anything runs.
        let files = Files::read(&settings, &limits).await?;
        let reserved = ReservedSockets::of(&settings, &mut sockets)?;
        limits.log();
        let tls_files = WorkerTlsFiles::read(&settings.gateway);
        let tls = worker_tls(&settings.gateway)?;
        let upstream = Upstream::new(tls, Duration::from_millis(settings.gateway.connect_timeout_ms));
        upstream.set_keys(settings.gateway.worker_api_key_file.clone(), &files.secrets.worker_keys);
        // The bus of the routers of all models.
        let replicas = match &settings.replicas {
            Some(replicas) => {
                let key = files.secrets.replicas_key.clone();
                Some(Replicas::start(replicas, settings.gateway.reuse_port, key)?)
            }
            None => None,
        };
        let (snapshots, bus) = (settings.gateway.snapshot_path.as_deref(), replicas.as_ref().map(Replicas::bus));
        let models = Models::start(&settings.models, &upstream, snapshots, bus).await?;
        let picker = match &settings.picker {
            Some(picker) => Some((picker.clone(), tls::picker(picker)?)),
            None => None,
        };
        let listen = settings.gateway.listen;
        let mut upkeep = JoinSet::new();
        if let Some(metrics) = metrics.clone() {
            upkeep.spawn(metrics.keep_up());
        }
        let tracing = tracing_of(&settings.gateway)?;
        let app = App::new(settings, &limits, &files, models, upstream, metrics, tracing);
        let current = Current::new(app);
        upkeep.spawn(models::warn_of_unread(current.clone()));
        upkeep.spawn(warm::write_periodically(current.clone()));
        let decision_files = Arc::new(DecisionFiles::default());
        upkeep.spawn(Arc::clone(&decision_files).write_continuously(current.clone()));
        // After the first socket listens, nothing else may fail.
        let (socket, admin_socket, picker_socket) = reserved.listen()?;
        let failed = |error| ListenError::of(listen, "gateway.listen", error);
        let overflow =
            Overflow { connections_max: OVERFLOW_CONNECTIONS_MAX, routes: routes::overflow(current.clone()) };
        let client_options = files.listener.clone();
        let for_clients = ListenerOptions { overflow: Some(overflow), ..files.listener.clone() };
        let clients = Listener::start(socket, for_clients, routes::clients(current.clone())).map_err(failed)?;
        let reloader = Arc::new(Reloader::new(current.clone(), load, limits, clients.control(), tls_files));
        let admin = match admin_socket {
            Some(socket) => {
                let connections_max = ADMIN_CONNECTIONS_MAX;
                let options = ListenerOptions { name: "admin", connections_max, tls: None, ..files.listener };
                let routes = admin::routes(current.clone(), Arc::clone(&reloader));
                Some(Listener::start(socket, options, routes).map_err(failed)?)
            }
            None => None,
        };
        let picker = match (picker_socket, picker) {
            (Some(socket), Some((settings, tls))) => {
                let options = ListenerOptions { name: "picker", tls, overflow: None, ..client_options.clone() };
                Some(Listener::start(socket, options, picker::routes(current.clone(), &settings)).map_err(failed)?)
            }
            _ => None,
        };
        if let Some(replicas) = &replicas {
            upkeep.spawn(warm::join(current.clone(), replicas.bus()));
            upkeep.spawn(warm::store_periodically(current.clone(), replicas.bus()));
        }
        Ok(Self { current, clients, reloader, admin, picker, replicas, decision_files, upkeep })
    }

    /// Takes part in a group of replicas by another bus than that of `[replicas]`: serves snapshots of the index,
    /// restores one of a serving replica, and reports to the others when this one is ready. Ends with the gateway.
    pub fn join_replicas(&mut self, bus: Arc<dyn ReplicaBus>) {
        self.upkeep.spawn(warm::store_periodically(self.current.clone(), Arc::clone(&bus)));
        self.upkeep.spawn(warm::join(self.current.clone(), bus));
    }

    /// Listen address for clients.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.clients.address()
    }

    /// Listen address for operators; `None` without `[admin]`.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(Listener::address)
    }

    /// Listen address for proxies that query the endpoint picker; `None` without `[picker]`.
    #[must_use]
    pub fn picker_address(&self) -> Option<SocketAddr> {
        self.picker.as_ref().map(Listener::address)
    }

    /// Listen address for other replicas; `None` without `[replicas]`.
    #[must_use]
    pub fn replicas_address(&self) -> Option<SocketAddr> {
        self.replicas.as_ref().and_then(Replicas::address)
    }

    /// Bus between this gateway and the other replicas; `None` without `[replicas]`.
    #[must_use]
    pub fn replicas(&self) -> Option<Arc<dyn ReplicaBus>> {
        self.replicas.as_ref().map(Replicas::bus)
    }

    /// Router of a model.
    #[must_use]
    pub fn router(&self, model: &str) -> Option<Router> {
        self.current.get().models.named(model).map(|model| model.router.clone())
    }

    /// Reloads the settings and applies all except those that need a restart, which are reported. Requests and
    /// connections continue. Dropping the future does not stop the reload.
    ///
    /// # Errors
    /// See [`ReloadError`]; nothing has changed after an error.
    pub fn reload(&self) -> impl Future<Output = Result<ReloadStatus, ReloadError>> + use<> {
        let reloader = Arc::clone(&self.reloader);
        async move { reloader.reload().await }
    }

    /// Status of reloads.
    #[must_use]
    pub fn reload_status(&self) -> ReloadStatus {
        self.reloader.status()
    }

    /// Sets `/ready` to 503 and closes connections after their response; everything is still served.
    pub fn begin_drain(&self) {
        self.current.get().readiness.drain();
        // Others do not fetch snapshots from a gateway that is about to end.
        self.replicas.iter().for_each(|replicas| replicas.bus().set_serving(false));
        [Some(&self.clients), self.admin.as_ref(), self.picker.as_ref()]
            .into_iter()
            .flatten()
            .for_each(Listener::begin_drain);
    }

    /// Stops accepting, waits up to `deadline` for requests in flight, and ends. Requests on open connections are
    /// served for one second and then rejected; each gets a response.
    pub async fn shutdown(self, deadline: Duration) -> Drained {
        self.begin_drain();
        let app = self.current.get();
        let drain = async {
            let clients = self.clients.drain(deadline, LINGER, || app.meters.deadline_passed());
            let picker = async {
                match self.picker {
                    Some(picker) => picker.drain(deadline, LINGER, || {}).await.broken,
                    None => 0,
                }
            };
            let (clients, picker) = tokio::join!(clients, picker);
            Drained { broken: clients.broken + picker }
        };
        tokio::pin!(drain);
        let drained = tokio::select! {
            biased;
            drained = drain.as_mut() => drained,
            () = sleep(LINGER) => {
                app.closing.store(true, Ordering::Relaxed);
                drain.await
            }
        };
        // Operators have access until the end.
        let app = self.current.get();
        warm::write_last(&app).await;
        if let Some(replicas) = &self.replicas {
            warm::store_last(&app, &*replicas.bus()).await;
        }
        app.models.shutdown().await;
        self.decision_files.write(&app).await;
        // The last messages of the routers are still sent.
        if let Some(replicas) = self.replicas {
            replicas.leave().await;
        }
        if let Some(tracing) = app.tracing.clone() {
            // Waits for a thread of the SDK.
            drop(tokio::task::spawn_blocking(move || tracing.shutdown()).await);
        }
        if let Some(admin) = self.admin {
            admin.drain(ADMIN_DRAIN, Duration::ZERO, || {}).await;
        }
        drained
    }
}

/// Exporter of traces, if an address is set.
fn tracing_of(gateway: &crate::settings::GatewaySettings) -> Result<Option<Arc<Tracing>>, GatewayError> {
    let Some(endpoint) = &gateway.otlp_endpoint else { return Ok(None) };
    let tracing = Tracing::start(endpoint, gateway.otlp_sample_share);
    tracing
        .map(|tracing| Some(Arc::new(tracing)))
        .map_err(|reason| GatewayError::Otlp { endpoint: endpoint.clone(), reason })
}

/// Contents of the files referenced by settings, validated.
struct Files {
    secrets: Secrets,
    admin_token: Option<Arc<admin::Token>>,
    index_token: Option<Arc<admin::Token>>,
    read_token: Option<Arc<admin::Token>>,
    /// The clients' listener with its certificate.
    listener: ListenerOptions,
}

impl Files {
    async fn read(settings: &Settings, limits: &ProcessLimits) -> Result<Self, GatewayError> {
        let listener = client_options(&settings.gateway, limits)?;
        let admin_token = match &settings.admin {
            Some(admin) => Some(Arc::new(admin::Token::read(&admin.token_file).await?)),
            None => None,
        };
        let token = async |file: Option<&PathBuf>| match file {
            Some(file) => admin::Token::read(file).await.map(|token| Some(Arc::new(token))),
            None => Ok(None),
        };
        let admin = settings.admin.as_ref();
        let index_token = token(admin.and_then(|admin| admin.index_token_file.as_ref())).await?;
        let read_token = token(admin.and_then(|admin| admin.read_token_file.as_ref())).await?;
        Ok(Self { secrets: Secrets::read(settings)?, admin_token, index_token, read_token, listener })
    }
}

/// Options of the clients' listener.
fn client_options(settings: &GatewaySettings, limits: &ProcessLimits) -> Result<ListenerOptions, TlsError> {
    let tls = match (&settings.tls_certificate_file, &settings.tls_key_file) {
        (Some(certificate_file), Some(key_file)) => Some(tls::server(certificate_file, key_file)?),
        (None, None) => None,
        (Some(file), None) | (None, Some(file)) => return Err(TlsError::Half { file: file.clone() }),
    };
    Ok(ListenerOptions {
        name: "clients",
        connections_max: limits.connections_max,
        overflow: None,
        head_timeout: Duration::from_millis(settings.head_timeout_ms),
        stall_max: Duration::from_millis(settings.idle_timeout_ms),
        tls,
    })
}
