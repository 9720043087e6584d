//! Telemetry of the process: logs and the metrics page.
//!
//! Installs the log subscriber and the metrics recorder, and renders the page. A blocked log reader never delays a
//! request: lines that find a full queue are dropped and counted.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use metrics_util::MetricKindMask;
use tokio::sync::Mutex;

use crate::observe::metric::{Metric, metric_table};
use crate::observe::process;
use crate::observe::series::{Expiring, IDLE_MAX, LastingSeries};

/// Duration buckets in seconds, from gateway overhead to long responses.
pub(crate) const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
];

/// Duration buckets in seconds for times well below a millisecond: router phases and gateway overhead.
const SHORT_SECONDS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 5.0, 30.0,
];

/// Buckets of tokens and blocks.
const COUNTS: &[f64] =
    &[1.0, 4.0, 16.0, 64.0, 256.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0, 16_384.0, 32_768.0, 65_536.0, 131_072.0];

/// Buckets of ratios.
const RATIOS: &[f64] = &[
    0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0,
];

/// Buckets of observed times as multiples of predicted ones, dense around 1.
const MULTIPLES: &[f64] =
    &[0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0];

/// Interval of histogram upkeep without page reads.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Kinds of metrics that expire with their worker.
pub(crate) fn expiring() -> MetricKindMask {
    MetricKindMask::GAUGE | MetricKindMask::COUNTER
}

/// Content type of the page.
const PAGE_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

// Metrics of the process and its listeners. `docs/operations.md` has the same table.
metric_table! {
    BUILD_INFO: gauge "pointsman_build_info" ["version"] = "Always 1; the label is the running version.";
    CONNECTIONS: gauge "pointsman_gateway_connections" ["listener"] = "Open connections.";
    HANDSHAKES_REFUSED: counter "pointsman_gateway_handshakes_refused_total" ["listener"] =
        "TLS handshakes that failed or timed out.";
    CERTIFICATE_EXPIRY: gauge "pointsman_gateway_certificate_expiry_timestamp_seconds" ["setting"] =
        "End of the validity of a presented certificate, in seconds since 1970.";
    ACCEPT_ERRORS: counter "pointsman_gateway_accept_errors_total" ["listener"] =
        "Failed accepts, mostly for lack of descriptors.";
    CONNECTIONS_REFUSED: counter "pointsman_gateway_connections_refused_total" ["listener"] =
        "Connections above the limit of the listener or of descriptors: rejected with 503 except probes.";
    ADMIN_DENIED: counter "pointsman_gateway_admin_denied_total" [] =
        "Requests to the administration listener without a valid token.";
    CONFIG_RELOADS: counter "pointsman_gateway_config_reloads_total" ["result"] =
        "Configuration reloads: `applied`, or `rejected` as a whole.";
    LAST_RELOAD_SUCCESSFUL: gauge "pointsman_gateway_config_last_reload_successful" [] =
        "1 if the last reload was applied or none has happened; 0 if it was rejected.";
    CONFIG_APPLIED_AT: gauge "pointsman_gateway_config_applied_timestamp_seconds" [] =
        "Time at which the running configuration was applied, at startup or by a reload, in seconds since 1970.";
    CONFIG_RESTART_NEEDED: gauge "pointsman_gateway_config_restart_needed" [] =
        "Number of changed settings that need a restart.";
    LOG_LINES_DROPPED: counter "pointsman_gateway_log_lines_dropped_total" [] =
        "Log lines dropped because of a full buffer or a failed write.";
}

/// Series per worker: the part of the page that another module renders, and its limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerSeries {
    /// Workers with series. Of more, those with the most failed attempts, then with the most attempts, have them.
    pub(crate) workers_max: usize,
    /// Renders the series of the workers that the recorder does not hold. Returns their ids if others have none.
    pub(crate) render: fn(usize) -> (String, Option<BTreeSet<String>>),
}

impl WorkerSeries {
    /// The whole page, given the recorder's part.
    fn page(self, recorded: String) -> String {
        match (self.workers_max > 0).then(|| (self.render)(self.workers_max)) {
            None => recorded,
            Some((own, None)) => recorded + &own,
            Some((own, Some(ids))) => series_of(&recorded, &ids) + &own,
        }
    }
}

/// The recorder's page without the series of other workers than these.
fn series_of(page: &str, ids: &BTreeSet<String>) -> String {
    let id = |line: &str| {
        line.split_once(",worker=\"").and_then(|(_, rest)| rest.split_once('"')).map(|(id, _)| id.to_owned())
    };
    let is_kept = |line: &&str| line.starts_with('#') || id(line).is_none_or(|id| ids.contains(&id));
    page.split_inclusive('\n').filter(is_kept).collect()
}

/// The metrics page.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    recorder: PrometheusHandle,
    lasting: LastingSeries,
    workers: WorkerSeries,
    /// Locked while a page is rendered, to limit concurrency to one.
    render_lock: Arc<Mutex<()>>,
}

impl Metrics {
    /// Installs the recorder of the process on the first call; `None` if the embedding process has its own recorder.
    /// Call before starting routers, because metric handles belong to the recorder at their creation.
    pub(crate) fn install(workers: WorkerSeries) -> Option<Self> {
        static INSTALLED: OnceLock<Option<Metrics>> = OnceLock::new();
        let install = || {
            let recorder = builder().build_recorder();
            let handle = recorder.handle();
            let (recorder, lasting) = Expiring::new(recorder, workers.workers_max > 0);
            metrics::set_global_recorder(recorder).ok()?;
            METRICS.iter().for_each(Metric::describe);
            metrics::gauge!(BUILD_INFO.name, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
            Some(Self { recorder: handle, lasting, workers, render_lock: Arc::default() })
        };
        INSTALLED.get_or_init(install).clone()
    }

    /// The page in Prometheus' format.
    pub(crate) async fn page(&self) -> Response {
        let _guard = self.render_lock.lock().await;
        let recorder = self.recorder.clone();
        self.lasting.touch();
        // Rendering thousands of series takes milliseconds, and /proc reads block.
        let workers = self.workers;
        let page = tokio::task::spawn_blocking(move || workers.page(recorder.render()) + &process::page()).await;
        match page {
            Ok(page) => ([(header::CONTENT_TYPE, PAGE_TYPE)], page).into_response(),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }

    /// Runs upkeep periodically, forever. Without it unread observations, and series of removed workers, would
    /// accumulate, because the exporter drops them only while it renders a page.
    pub(crate) async fn keep_up(self) {
        let (mut ticks, mut since_page) = (tokio::time::interval(UPKEEP_EVERY), Duration::ZERO);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.lasting.touch();
            self.recorder.run_upkeep();
            since_page += UPKEEP_EVERY;
            if since_page >= IDLE_MAX {
                since_page = Duration::ZERO;
                drop(self.page().await);
            }
        }
    }
}

/// `/metrics`. Without metrics the embedding process has its own recorder.
pub(crate) async fn respond(metrics: Option<&Metrics>) -> Response {
    match metrics {
        Some(metrics) => metrics.page().await,
        None => (StatusCode::NOT_FOUND, "the embedding process has its own metrics recorder\n").into_response(),
    }
}

/// Recorder with buckets for every histogram: quantiles of several processes cannot be aggregated.
fn builder() -> PrometheusBuilder {
    let suffix = |suffix: &str| Matcher::Suffix(suffix.to_owned());
    let full = |name: &str| Matcher::Full(name.to_owned());
    [
        (suffix("_seconds"), SECONDS),
        (full("pointsman_phase_duration_seconds"), SHORT_SECONDS),
        (full("pointsman_gateway_overhead_seconds"), SHORT_SECONDS),
        (suffix("_tokens"), COUNTS),
        (suffix("_blocks"), COUNTS),
        (full("pointsman_prediction_ratio"), MULTIPLES),
        (suffix("_ratio"), RATIOS),
        (suffix("_rate"), RATIOS),
    ]
    .into_iter()
    .try_fold(PrometheusBuilder::new(), |builder, (matcher, bounds)| builder.set_buckets_for_metric(matcher, bounds))
    .and_then(|builder| builder.set_buckets(SECONDS))
    .map(|builder| builder.idle_timeout(expiring(), Some(IDLE_MAX)))
    .expect("bucket bounds are not empty")
}

#[cfg(test)]
mod tests;
