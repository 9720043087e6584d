//! A running gateway: start, reload, drain and stop.
//!
//! Every accepted request gets a response, and no booking remains at shutdown.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pointsman::{ReplicaBus, Router};
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::reload::{LoadSettings, ReloadStatus, Reloader};
use super::running::{Files, GatewayError, Running};
use super::{metrics, reload, routes};
use crate::formats::openai::ApiError;
use crate::net::budget::RequestBudget;
use crate::net::certificates::Certificate;
use crate::net::cores::Cores;
use crate::net::limits::{ADMIN_CONNECTIONS_MAX, ADMIN_STREAMS_MAX, OVERFLOW_CONNECTIONS_MAX, ProcessLimits};
use crate::net::listener::{Drained, ListenError, Listener, ListenerOptions, Overflow, PassedSockets, ReservedSockets};
use crate::net::tls;
use crate::net::upstream::{Upstream, WorkerTlsFiles, worker_tls};
use crate::observe::metric::Metric;
use crate::observe::page::Metrics;
use crate::pools::decision_files::DecisionFiles;
use crate::pools::models::Models;
use crate::pools::serving::follow_gates;
use crate::pools::unread_events::warn_of_unread_events;
use crate::pools::{warm, workers};
use crate::replicas::Replicas;
use crate::settings::{PickerSettings, Settings};
use crate::{admin, picker};

/// A running gateway.
pub struct Gateway {
    pub(super) running: Running,
    clients: Listener,
    pub(super) reloader: Arc<Reloader>,
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
    pub(super) fn start_with(
        settings: Settings,
        load: Option<LoadSettings>,
        mut sockets: PassedSockets,
    ) -> Pin<Box<dyn Future<Output = Result<Self, GatewayError>> + Send>> {
        Box::pin(async move {
            // Metric handles belong to the recorder that is installed at their creation.
            let metrics = Metrics::install(workers::series(settings.gateway.metrics_workers_max));
            metrics::all().for_each(Metric::describe);
            let limits = ProcessLimits::of(&settings);
            // Unreadable files are detected before anything runs.
            let files = Files::read(&settings, &limits)?;
            let reserved = ReservedSockets::of(&settings, &mut sockets)?;
            limits.log();
            let tls_files = WorkerTlsFiles::read(&settings.gateway);
            let tls = worker_tls(&settings.gateway)?;
            let upstream = Upstream::new(tls, Duration::from_millis(settings.gateway.connect_timeout_ms));
            upstream.set_keys(settings.gateway.worker_api_key_file.clone(), &files.secrets.worker_keys);
            // The bus of the routers of all models.
            let (key, reuse_port) = (files.secrets.replicas_key.clone(), settings.gateway.reuse_port);
            let replicas = settings.replicas.as_ref().map(|replicas| Replicas::start(replicas, reuse_port, key));
            let replicas = replicas.transpose()?;
            let (snapshots, bus) = (settings.gateway.snapshot_path.as_deref(), replicas.as_ref().map(Replicas::bus));
            let models = Models::start(&settings.models, &upstream, snapshots, bus).await?;
            let picker = settings.picker.clone().map(|picker| tls::picker(&picker).map(|tls| (picker, tls)));
            let picker = picker.transpose()?;
            let listen = settings.gateway.listen;
            let running = Running::new(settings, &limits, (&files.secrets, files.admin_tokens), models, upstream)?;
            let cores = Cores::start()?;
            // After the first socket listens, nothing else may fail.
            let (socket, admin_socket, picker_socket) = reserved.listen()?;
            let failed = |error| ListenError::of(listen, "gateway.listen", error);
            let listeners = Listeners { running: &running, options: files.listener, metrics: metrics.clone() };
            let clients = listeners.clients(socket, cores).map_err(failed)?;
            let reloader = Arc::new(Reloader::new(running.clone(), load, limits, clients.control(), tls_files));
            let admin = admin_socket.map(|socket| listeners.admin(socket, Arc::clone(&reloader)));
            let admin = admin.transpose().map_err(failed)?;
            let picker =
                picker_socket.zip(picker).map(|(socket, (settings, tls))| listeners.picker(socket, &settings, tls));
            let picker = picker.transpose().map_err(failed)?;
            let decision_files = Arc::new(DecisionFiles::default());
            let mut upkeep = JoinSet::new();
            if let Some(metrics) = metrics {
                upkeep.spawn(metrics.keep_up());
            }
            let pools = &running.pools;
            upkeep.spawn(warn_of_unread_events(pools.clone()));
            let certificates = running.certificates.clone();
            upkeep.spawn(Certificate::keep_reporting(move || certificates.get()));
            upkeep.spawn(warm::write_periodically(pools.clone()));
            upkeep.spawn(Arc::clone(&decision_files).write_continuously(pools.clone()));
            let mut gateway = Self { running, clients, reloader, admin, picker, replicas, decision_files, upkeep };
            if let Some(bus) = gateway.replicas() {
                gateway.join_replicas(bus);
            }
            Ok(gateway)
        })
    }

    /// Takes part in a group of replicas by another bus than that of `[replicas]`: serves snapshots of the index,
    /// restores one of a serving replica, and reports to the others when this one is ready. Ends with the gateway.
    pub fn join_replicas(&mut self, bus: Arc<dyn ReplicaBus>) {
        self.upkeep.spawn(warm::store_periodically(self.running.pools.clone(), Arc::clone(&bus)));
        self.upkeep.spawn(warm::join(self.running.pools.clone(), bus));
        self.upkeep.spawn(follow_gates(self.running.pools.clone()));
    }

    /// Listen address for clients.
    pub fn address(&self) -> SocketAddr {
        self.clients.address()
    }

    /// Listen address for operators; `None` without `[admin]`.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(Listener::address)
    }

    /// Listen address for proxies that query the endpoint picker; `None` without `[picker]`.
    pub fn picker_address(&self) -> Option<SocketAddr> {
        self.picker.as_ref().map(Listener::address)
    }

    /// Listen address for other replicas; `None` without `[replicas]`.
    pub fn replicas_address(&self) -> Option<SocketAddr> {
        self.replicas.as_ref().and_then(Replicas::address)
    }

    /// Bus between this gateway and the other replicas; `None` without `[replicas]`.
    pub fn replicas(&self) -> Option<Arc<dyn ReplicaBus>> {
        self.replicas.as_ref().map(Replicas::bus)
    }

    /// Router of a model.
    pub fn router(&self, model: &str) -> Option<Router> {
        self.running.context.get().models.named(model).map(|model| model.router.clone())
    }

    /// Reloads the settings and applies all except those that need a restart, which are reported. Requests and
    /// connections continue. Dropping the future does not stop the reload.
    ///
    /// # Errors
    /// Fixed or unusable settings, or a drain; nothing has changed after an error.
    pub fn reload(&self) -> impl Future<Output = Result<ReloadStatus, ApiError>> + use<> {
        let reloader = Arc::clone(&self.reloader);
        async move { reloader.reload().await }
    }

    /// Sets `/ready` to 503 and closes connections after their response; everything is still served.
    pub fn begin_drain(&self) {
        self.running.pools.get().readiness.drain();
        // Others do not fetch snapshots from a gateway that is about to end.
        self.replicas.iter().for_each(|replicas| replicas.bus().set_serving(false));
        [Some(&self.clients), self.admin.as_ref(), self.picker.as_ref()]
            .into_iter()
            .flatten()
            .for_each(Listener::begin_drain);
    }

    /// Stops accepting, serves requests on open connections until none is in flight or up to `deadline`, and ends.
    pub async fn shutdown(self, deadline: Duration) -> Drained {
        self.begin_drain();
        let context = self.running.context.get();
        let picker = async {
            match self.picker {
                Some(picker) => picker.drain(deadline, || {}).await.broken,
                None => 0,
            }
        };
        let clients = self.clients.drain(deadline, || context.meters.deadline_passed());
        let (clients, picker) = tokio::join!(clients, picker);
        // Operators have access until the end.
        let pools = self.running.pools.get();
        warm::write_last(&pools).await;
        if let Some(replicas) = &self.replicas {
            warm::store_last(&pools, &*replicas.bus()).await;
        }
        pools.models.shutdown().await;
        self.decision_files.write(&pools).await;
        // The last messages of the routers are still sent.
        if let Some(replicas) = self.replicas {
            replicas.leave().await;
        }
        if let Some(tracing) = context.tracing.clone() {
            // Waits for a thread of the SDK.
            drop(tokio::task::spawn_blocking(move || tracing.shutdown()).await);
        }
        if let Some(admin) = self.admin {
            admin.drain(ADMIN_DRAIN, || {}).await;
        }
        Drained { broken: clients.broken + picker }
    }
}

/// Common parts of the listeners.
struct Listeners<'a> {
    running: &'a Running,
    /// Options of the clients' listener.
    options: ListenerOptions,
    metrics: Option<Metrics>,
}

impl Listeners<'_> {
    /// For clients. Connections above its limit receive probes only.
    fn clients(&self, socket: TcpListener, cores: Cores) -> io::Result<Listener> {
        let probes = routes::probes(self.running.pools.clone(), self.metrics.clone());
        let routes = routes::overflow(probes.clone());
        let overflow = Some(Overflow { connections_max: OVERFLOW_CONNECTIONS_MAX, routes });
        let (cores, budget) = (Some(cores), Some(self.budget()));
        let options = ListenerOptions { overflow, cores, budget, ..self.options.clone() };
        Listener::start(socket, options, routes::clients(self.running.context.clone(), probes))
    }

    fn budget(&self) -> Arc<RequestBudget> {
        Arc::clone(&self.running.context.get().admission.budget)
    }

    /// For operators: few requests, which are served while the budget is exhausted.
    fn admin(&self, socket: TcpListener, reloader: Arc<Reloader>) -> io::Result<Listener> {
        let connections_max = ADMIN_CONNECTIONS_MAX;
        let streams_max = ADMIN_STREAMS_MAX;
        let options =
            ListenerOptions { name: "admin", connections_max, streams_max, tls: None, ..self.options.clone() };
        let (pools, tokens) = (self.running.pools.clone(), self.running.admin_tokens.clone());
        let routes = admin::routes(pools, tokens, self.metrics.clone(), reload::routes(reloader));
        Listener::start(socket, options, routes)
    }

    /// For proxies.
    fn picker(
        &self,
        socket: TcpListener,
        settings: &PickerSettings,
        tls: Option<Arc<ServerConfig>>,
    ) -> io::Result<Listener> {
        let options = ListenerOptions { name: "picker", tls, budget: Some(self.budget()), ..self.options.clone() };
        let (context, pools) = (self.running.context.clone(), self.running.pools.clone());
        Listener::start(socket, options, picker::routes(context, pools, settings))
    }
}
