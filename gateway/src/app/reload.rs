//! Reload of the settings of a running gateway.
//!
//! Invalid settings or files change nothing. A request keeps the settings of its start. Settings that need a restart
//! keep their running values and are reported. Reloads run one at a time. [`settings`] compares,
//! [`ModelSources`](crate::pools::sources::ModelSources) updates workers, and the caller provides the loader.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use metrics::Counter;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::running::{Files, Running};
use crate::admin::ClientAddress;
use crate::admission::retry_budget::RetryBudget;
use crate::formats::openai::ApiError;
use crate::net::certificates::Certificate;
use crate::net::limits::ProcessLimits;
use crate::net::listener::ListenerControl;
use crate::net::upstream::{WorkerTlsFiles, worker_tls};
use crate::observe::clock::unix_time;
use crate::observe::page;
use crate::pools::model::{Model, SHUTDOWN_WAIT};
use crate::pools::models::Models;
use crate::pools::serving::Pools;
use crate::proxy::context::RequestContext;
use crate::settings::Settings;

/// Polling interval for requests that still use a removed model.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Loads the settings again: the current file with the variables and flags of the start.
pub type LoadSettings = Arc<dyn Fn() -> Result<Settings, String> + Send + Sync>;

/// Status of the running settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReloadStatus {
    /// Time of the last application, at startup or by a reload, in seconds since 1970.
    pub applied_at: u64,
    /// The last reload; `None` before the first.
    pub last: Option<LastReload>,
    /// Settings that keep their previous value until a restart.
    pub restart_needed: Vec<String>,
    /// Whether all running settings equal the last loaded ones.
    pub is_current: bool,
}

/// A completed reload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LastReload {
    /// Completion time, in seconds since 1970.
    pub at: u64,
    /// Whether it was applied; otherwise it was rejected as a whole.
    pub applied: bool,
    /// Reason for the rejection.
    pub error: Option<String>,
}

/// Performs reloads and keeps their status.
pub(crate) struct Reloader {
    running: Running,
    load: Option<LoadSettings>,
    limits: ProcessLimits,
    clients: ListenerControl,
    /// Files of the last load, for comparison. Locked during a reload.
    files: tokio::sync::Mutex<WorkerTlsFiles>,
    status: Mutex<ReloadStatus>,
}

impl Reloader {
    pub(crate) fn new(
        running: Running,
        load: Option<LoadSettings>,
        limits: ProcessLimits,
        clients: ListenerControl,
        tls_files: WorkerTlsFiles,
    ) -> Self {
        // Both series exist from the start.
        ["applied", "rejected"].map(reloads).iter().for_each(|counter| counter.increment(0));
        let status = ReloadStatus { applied_at: unix_time().as_secs(), is_current: true, ..ReloadStatus::default() };
        let (files, status) = (tokio::sync::Mutex::new(tls_files), Mutex::new(status));
        let reloader = Self { running, load, limits, clients, files, status };
        reloader.show(&reloader.status());
        reloader
    }

    pub(crate) fn status(&self) -> ReloadStatus {
        // The status is replaced as a whole.
        self.status.lock().clone()
    }

    /// Loads and applies the settings. Runs to completion, even if the caller drops the future.
    pub(crate) async fn reload(self: &Arc<Self>) -> Result<ReloadStatus, ApiError> {
        let this = Arc::clone(self);
        tokio::spawn(async move { this.run().await }).await.unwrap_or_else(|_| Err(interrupted()))
    }

    async fn run(&self) -> Result<ReloadStatus, ApiError> {
        let mut tls_files = self.files.lock().await;
        let result = match self.prepare(&tls_files).await {
            Ok(next) => Ok(self.apply(next, &mut tls_files).await),
            Err(error) => Err(error),
        };
        let mut status = self.status();
        let error = result.as_ref().err().map(|error| in_one_line(&error.to_string()));
        status.last = Some(LastReload { at: unix_time().as_secs(), applied: error.is_none(), error: error.clone() });
        match &result {
            Ok(restart_needed) => {
                (status.applied_at, status.restart_needed) = (unix_time().as_secs(), restart_needed.clone());
                reloads("applied").increment(1);
                for setting in restart_needed {
                    tracing::warn!(setting, "setting changed; the change needs a restart");
                }
                tracing::info!(restart_needed = restart_needed.len(), "configuration reloaded");
            }
            Err(_) => {
                reloads("rejected").increment(1);
                tracing::error!(error, "configuration reload rejected; the previous configuration stays in force");
            }
        }
        status.is_current = result.is_ok() && status.restart_needed.is_empty();
        self.show(&status);
        *self.status.lock() = status.clone();
        result.map(|_| status)
    }

    fn show(&self, status: &ReloadStatus) {
        let is_successful = status.last.as_ref().is_none_or(|last| last.applied);
        metrics::gauge!(page::LAST_RELOAD_SUCCESSFUL.name).set(if is_successful { 1.0 } else { 0.0 });
        metrics::gauge!(page::CONFIG_APPLIED_AT.name).set(status.applied_at as f64);
        metrics::gauge!(page::CONFIG_RESTART_NEEDED.name).set(status.restart_needed.len() as f64);
    }

    /// All fallible steps. Does not change running state.
    async fn prepare(&self, known: &WorkerTlsFiles) -> Result<Next, ApiError> {
        let pools = self.running.pools.get();
        if pools.readiness.is_draining() {
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "draining", "the gateway is draining"));
        }
        let load = self.load.clone().ok_or_else(|| {
            let message = "the embedding process provided the settings and must change them itself";
            ApiError::new(StatusCode::CONFLICT, "config_fixed", message)
        })?;
        let loaded = tokio::task::spawn_blocking(move || {
            let loaded = load().map_err(rejected)?;
            Ok((WorkerTlsFiles::read(&loaded.gateway), loaded))
        });
        let (tls_files, loaded) = loaded.await.unwrap_or_else(|_| Err(interrupted()))?;
        let (mut settings, mut restart_needed) = loaded.reloaded_over(&pools.settings);
        if settings.gateway.body_bytes_max > self.limits.request_budget_bytes / 2 {
            // The budget of the start could not hold a single body of that size.
            restart_needed.push("gateway.body_bytes_max".to_owned());
            settings.gateway.body_bytes_max = pools.settings.gateway.body_bytes_max;
        }
        settings
            .validate()
            .map_err(|errors| rejected(format!("with the running values of settings that need a restart: {errors}")))?;
        let files = Files::read(&settings, &self.limits).map_err(rejected)?;
        let timeouts = (settings.gateway.connect_timeout_ms, pools.settings.gateway.connect_timeout_ms);
        let is_new = tls_files != *known || timeouts.0 != timeouts.1;
        let worker_tls = is_new.then(|| worker_tls(&settings.gateway)).transpose();
        let worker_tls = worker_tls.map_err(rejected)?;
        // Last, because models started here must be stopped after any failure.
        let snapshots = settings.gateway.snapshot_path.as_deref();
        let upstream = &self.running.context.get().upstream;
        let models = pools.models.reloaded(&settings.models, upstream, snapshots).await;
        let models = models.map_err(rejected)?;
        Ok(Next { settings, restart_needed, files, worker_tls, tls_files, models })
    }

    /// Replaces the running state. Returns the settings that need a restart.
    async fn apply(&self, next: Next, known: &mut WorkerTlsFiles) -> Vec<String> {
        let Next { settings, restart_needed, files, worker_tls, tls_files, models } = next;
        settings.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
        let certificates = Certificate::all(&settings);
        Certificate::report(&certificates);
        self.running.certificates.replace(certificates);
        *known = tls_files;
        let (pools, context) = (self.running.pools.get(), self.running.context.get());
        let (gateway, old) = (&settings.gateway, &context.settings.gateway);
        if let Some(tls) = worker_tls {
            context.upstream.set_tls(tls, Duration::from_millis(gateway.connect_timeout_ms));
        }
        context.upstream.set_keys(gateway.worker_api_key_file.clone(), &files.secrets.worker_keys);
        self.clients.set(files.listener);
        self.running.admin_tokens.replace(files.admin_tokens);
        let mut admission = context.admission.clone();
        admission.tenants = Arc::new(admission.tenants.reloaded(&settings.tenants, &files.secrets));
        if gateway.retry_share_max.to_bits() != old.retry_share_max.to_bits() {
            admission.retry_budget = Arc::new(RetryBudget::new(gateway.retry_share_max, Instant::now()));
        }
        let (settings, models) = (Arc::new(settings), Arc::new(models));
        self.running.pools.replace(Pools {
            settings: Arc::clone(&settings),
            models: Arc::clone(&models),
            ..Pools::clone(&pools)
        });
        self.running.context.replace(RequestContext {
            settings,
            models: Arc::clone(&models),
            admission,
            ..RequestContext::clone(&context)
        });
        for model in models.all() {
            model.follow_settings();
        }
        end_removed(context, &models);
        restart_needed
    }
}

/// State prepared by a reload.
struct Next {
    settings: Settings,
    restart_needed: Vec<String>,
    files: Files,
    /// Set if the worker client must be rebuilt.
    worker_tls: Option<rustls::ClientConfig>,
    tls_files: WorkerTlsFiles,
    models: Models,
}

/// Stops the routers of removed models once the requests of the old state have ended, or after `drain_timeout_ms`.
fn end_removed(old: Arc<RequestContext>, models: &Models) {
    let is_removed = |model: &&Arc<Model>| !models.all().iter().any(|kept| kept.settings.name == model.settings.name);
    let removed: Vec<_> = old.models.all().iter().filter(is_removed).map(|model| model.router.clone()).collect();
    if removed.is_empty() {
        return;
    }
    let wait_max = Duration::from_millis(old.settings.gateway.drain_timeout_ms);
    // Every request holds the state until the end of its response.
    let old = Arc::downgrade(&old);
    tokio::spawn(async move {
        let begun = Instant::now();
        while old.strong_count() > 0 && begun.elapsed() < wait_max {
            sleep(CHECK_INTERVAL).await;
        }
        for router in removed {
            router.shutdown(SHUTDOWN_WAIT).await;
        }
    });
}

fn reloads(result: &'static str) -> Counter {
    metrics::counter!(page::CONFIG_RELOADS.name, "result" => result)
}

/// Joins a list of problems into one log line.
fn in_one_line(problems: &str) -> String {
    problems.trim_end().split('\n').collect::<Vec<_>>().join("; ")
}

/// Routes for the administration listener.
pub(super) fn routes(reloader: Arc<Reloader>) -> Router {
    Router::new().route("/admin/reload", get(status).post(reload)).with_state(reloader)
}

async fn status(State(reloader): State<Arc<Reloader>>) -> Json<ReloadStatus> {
    Json(reloader.status())
}

/// Same as SIGHUP, with a response.
async fn reload(
    State(reloader): State<Arc<Reloader>>,
    ClientAddress(peer): ClientAddress,
) -> Result<Json<ReloadStatus>, ApiError> {
    let peer = peer.map(tracing::field::display);
    tracing::info!(target: "pointsman_gateway::audit", what = "reload", peer, "configuration reload requested by hand");
    reloader.reload().await.map(Json)
}

/// Unusable settings, a file that they name, or a model that cannot start.
fn rejected(reason: impl ToString) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "config_rejected", reason.to_string().trim_end())
}

fn interrupted() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the reload was interrupted")
}
