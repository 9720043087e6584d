//! Warnings of workers whose KV events the router cannot read.

use std::collections::BTreeSet;
use std::time::Duration;

use pointsman::WorkerEntry;
use pointsman::config::EventMode;
use tokio::time::sleep;

use super::latest::Latest;
use super::serving::Pools;

/// Check interval of new workers for unreadable KV events.
const UNREAD_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Beginning of the log lines.
const NO_ENDPOINT: &str = "worker has no KV event endpoint (kv_events)";

/// Logs each worker with unreadable KV events once, after a delay for discovery: usually an engine that does not report
/// its event endpoint.
pub(crate) async fn warn_of_unread_events(latest: Latest<Pools>) {
    let warm_up = Duration::from_millis(latest.get().settings.gateway.warm_up_ms);
    sleep(warm_up).await;
    let mut logged = BTreeSet::new();
    loop {
        let pools = latest.get();
        let mut unread = BTreeSet::new();
        for model in pools.models.all() {
            let events = model.router.config().events.mode;
            let workers = model.router.workers();
            let endpoints = workers.iter().filter(|entry| events.reads_events() && !entry.config.has_kv_events());
            let is_predicted = events == EventMode::Auto;
            let named =
                |entry: &WorkerEntry| (model.settings.name.clone(), entry.config.endpoint.clone(), is_predicted);
            unread.extend(endpoints.map(named));
        }
        for (model, endpoint, is_predicted) in unread.difference(&logged) {
            if *is_predicted {
                tracing::info!(model, endpoint, "{NO_ENDPOINT}: its cache is predicted from routing decisions");
            } else {
                let choice = "events.mode = \"auto\" predicts its cache";
                tracing::warn!(model, endpoint, "{NO_ENDPOINT}: it is routed by load and sessions only; {choice}");
            }
        }
        logged = unread;
        sleep(UNREAD_CHECK_INTERVAL).await;
    }
}
