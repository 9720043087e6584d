//! The gateway: it takes clients' requests, places them, and carries them to workers and their answers back.
//!
//! Owns what a running gateway is made of (`App`) and its start and end. Promises that what was accepted is answered,
//! and that at its end no booking is left. Leaves listening to `listener`, requests to `proxy`, who may ask to
//! `tenants`, which model is meant to `models`, and operators to `admin`.

mod admin;
mod body_budget;
mod catalog;
mod current;
mod ids;
mod limits;
mod listener;
mod machine;
pub mod metrics;
mod models;
mod proxy;
mod rarely;
mod ready;
mod retry_budget;
mod routes;
mod run;
mod sources;
pub mod telemetry;
mod tenants;
mod tls;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderValue;
use pointsman::Router;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use self::metrics::Meters;
use crate::settings::{GatewaySettings, Secret, SecretError, Secrets, Settings};
use crate::upstream::{Upstream, WorkerTlsError, worker_tls};
use body_budget::BodyBudget;
use current::Current;
use ids::Ids;
use limits::{ADMIN_CONNECTIONS_MAX, OVERFLOW_CONNECTIONS_MAX};
use listener::{LINGER, Listener, ListenerOptions, Overflow};
use models::Models;
use rarely::Rarely;
use ready::Readiness;
use retry_budget::RetryBudget;
use telemetry::Metrics;

pub use admin::TokenError;
pub use limits::ProcessLimits;
pub use listener::Drained;
pub use models::ModelError;
pub use run::{Ended, Signal, refuse, run, run_until};
pub use tenants::{Tenant, Tenants};
pub use tls::TlsError;

/// How often it may be said that an answer was cut off.
const BROKEN_STREAMS_SAID_EVERY: Duration = Duration::from_secs(10);

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A model's pool.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The operators' token.
    #[error(transparent)]
    AdminToken(#[from] TokenError),
    /// A secret.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// Whom to believe that they are workers.
    #[error(transparent)]
    WorkerTls(#[from] WorkerTlsError),
    /// The clients' certificate chain or its key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An address that cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        error: std::io::Error,
    },
}

/// What every request is served with: a snapshot that a reload replaces. What belongs to the process and outlives a reload,
/// such as counts and the state of draining, is behind an `Arc` that snapshots share.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) settings: Arc<Settings>,
    pub(crate) models: Arc<Models>,
    pub(crate) upstream: Upstream,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) metrics: Option<Metrics>,
    pub(crate) tenants: Arc<Tenants>,
    /// `Authorization` for workers, in place of the clients' own.
    pub(crate) worker_key: Option<HeaderValue>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) retry_budget: Arc<RetryBudget>,
    pub(crate) bodies: Arc<BodyBudget>,
    pub(crate) broken_streams: Arc<Rarely>,
    pub(crate) ids: Arc<Ids>,
    /// When the gateway started, in seconds of Unix: the date of its models.
    pub(crate) created: u64,
    /// It takes no more requests.
    closing: Arc<AtomicBool>,
}

impl App {
    #[expect(clippy::disallowed_methods, reason = "clients are told a date, and nothing is decided by it")]
    fn new(
        settings: Settings,
        limits: &ProcessLimits,
        secrets: &Secrets,
        models: Models,
        upstream: Upstream,
        metrics: Option<Metrics>,
    ) -> Self {
        let now = Instant::now();
        Self {
            tenants: Arc::new(Tenants::new(&settings.tenants, secrets)),
            worker_key: secrets.worker_api_key.as_ref().and_then(Secret::bearer),
            readiness: Arc::new(Readiness::new(Duration::from_millis(settings.gateway.warm_up_ms))),
            metrics,
            retry_budget: Arc::new(RetryBudget::new(settings.gateway.retry_share_max, now)),
            bodies: BodyBudget::new(limits.body_budget_bytes),
            settings: Arc::new(settings),
            models: Arc::new(models),
            upstream,
            meters: Arc::new(Meters::new()),
            broken_streams: Arc::new(Rarely::new(BROKEN_STREAMS_SAID_EVERY)),
            ids: Arc::new(Ids::new()),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            closing: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Whether it takes no more requests.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }
}

/// A running gateway.
pub struct Gateway {
    current: Current,
    clients: Listener,
    /// Ends with the gateway.
    _upkeep: JoinSet<()>,
    admin: Option<Listener>,
}

/// How long answers to operators may take once the routers have stopped: there is nothing left to wait for.
const ADMIN_DRAIN: Duration = Duration::from_secs(1);

impl Gateway {
    /// Starts the routers, then listens.
    ///
    /// # Errors
    /// See [`GatewayError`]; nothing runs then.
    pub async fn start(settings: Settings) -> Result<Self, GatewayError> {
        // Handles belong to the recorder that is there when they are made.
        let metrics = Metrics::install();
        metrics::describe();
        let limits = ProcessLimits::of(&settings);
        limits.log();
        let options = client_options(&settings.gateway, &limits)?;
        // What cannot be read is found before anything runs.
        let token = match &settings.admin {
            Some(admin) => Some(admin::Token::read(&admin.token_file).await?),
            None => None,
        };
        let secrets = Secrets::read(&settings)?;
        let tls = worker_tls(settings.gateway.worker_ca_file.as_deref())?;
        let upstream = Upstream::new(tls, Duration::from_millis(settings.gateway.connect_timeout_ms))
            .showing(secrets.worker_api_key.as_ref().and_then(Secret::bearer));
        let models = Models::start(&settings.models, &upstream).await?;
        let (listen, admin_listen) = (settings.gateway.listen, settings.admin.as_ref().map(|admin| admin.listen));
        let mut upkeep = JoinSet::new();
        if let Some(metrics) = metrics.clone() {
            upkeep.spawn(metrics.keep_up());
        }
        let current = Current::new(App::new(settings, &limits, &secrets, models, upstream, metrics));
        upkeep.spawn(models::warn_of_unread(current.clone()));
        // Nothing can fail any more once the first of them accepts.
        let bind = |address| listener::bind(address).map_err(|error| GatewayError::Listen { address, error });
        let (socket, admin_socket) = (bind(listen)?, admin_listen.map(bind).transpose()?);
        let failed = |error| GatewayError::Listen { address: listen, error };
        let overflow =
            Overflow { connections_max: OVERFLOW_CONNECTIONS_MAX, routes: routes::overflow(current.clone()) };
        let for_clients = ListenerOptions { overflow: Some(overflow), ..options.clone() };
        let clients = Listener::start(socket, for_clients, routes::clients(current.clone())).map_err(failed)?;
        let admin = match token.zip(admin_socket) {
            Some((token, socket)) => {
                let connections_max = ADMIN_CONNECTIONS_MAX;
                let options = ListenerOptions { name: "admin", connections_max, tls: None, ..options };
                Some(Listener::start(socket, options, admin::routes(current.clone(), token)).map_err(failed)?)
            }
            None => None,
        };
        Ok(Self { current, clients, admin, _upkeep: upkeep })
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.clients.address()
    }

    /// Where operators connect; `None` without `[admin]`.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(Listener::address)
    }

    /// The router of a model.
    #[must_use]
    pub fn router(&self, model: &str) -> Option<Router> {
        self.current.get().models.find(model).map(|(model, _)| model.router.clone())
    }

    /// Makes `/ready` say no from now on, and each answer end its connection; everything is still answered.
    pub fn begin_drain(&self) {
        self.current.get().readiness.drain();
        [Some(&self.clients), self.admin.as_ref()].into_iter().flatten().for_each(Listener::begin_drain);
    }

    /// Takes no more connections, waits up to `deadline` for requests in flight, and ends. Requests that come on open
    /// connections are served for a second, and then refused: each is answered.
    pub async fn shutdown(self, deadline: Duration) -> Drained {
        self.begin_drain();
        let app = self.current.get();
        let drain = self.clients.drain(deadline, LINGER, || app.meters.deadline_passed());
        tokio::pin!(drain);
        let drained = tokio::select! {
            biased;
            drained = drain.as_mut() => drained,
            () = sleep(LINGER) => {
                app.closing.store(true, Ordering::Relaxed);
                drain.await
            }
        };
        // Operators may look until the end.
        app.models.shutdown().await;
        if let Some(admin) = self.admin {
            admin.drain(ADMIN_DRAIN, Duration::ZERO, || {}).await;
        }
        drained
    }
}

/// What the clients' listener takes.
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
