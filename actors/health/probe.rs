//! Probing: one task a worker asks its engine, again and again, whether it is well.
//!
//! Owns the tasks. Promises that a probe ends within its time-out, that one engine's silence delays no other's probe, and
//! that workers whose endpoint is no plain `http://` address are left alone. What an answer means is the health actor's.

use std::sync::Arc;
use std::time::Duration;

use super::{HealthActor, HealthMsg};
use crate::actors::delivery::strand::Strand;
use crate::actors::io::http::{self, HttpError};
use crate::actors::views::fleet::Fleet;
use crate::actors::views::status::RouterStatus;
use crate::actors::views::worker::WorkerEntry;
use crate::actors::worker_tasks::{self, first_delay};
use crate::config::RouterConfig;
use crate::discovery::HttpUrl;
use crate::protocol::WorkerId;

/// Longest answer that is read; that it is well is said by the status.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Longest account of what went wrong.
const WHY_CHARS_MAX: usize = 200;

/// Starts to probe the workers, unless that is off. It ends with the router.
pub(crate) fn watch(config: &RouterConfig, fleet: &Fleet, status: &RouterStatus, health: &Arc<Strand<HealthActor>>) {
    if config.health.probe_interval_ms > 0 {
        let [interval, timeout] = [config.health.probe_interval_ms, config.health.probe_timeout_ms];
        let prober = ProbeDependencies {
            health: Arc::clone(health),
            interval: Duration::from_millis(interval),
            timeout: Duration::from_millis(timeout),
        };
        worker_tasks::watch(fleet, status, prober, url_of, probe);
    }
}

/// Dependencies of a probing task.
#[derive(Clone)]
struct ProbeDependencies {
    health: Arc<Strand<HealthActor>>,
    interval: Duration,
    timeout: Duration,
}

fn url_of(worker: &WorkerEntry) -> Option<String> {
    let endpoint = worker.config.endpoint.trim_end_matches('/');
    let url = format!("{endpoint}{}", worker.config.health_path);
    let is_plain = !endpoint.contains(['?', '#']);
    HttpUrl::parse(&url).is_ok_and(|_| is_plain).then_some(url)
}

async fn probe(dependencies: ProbeDependencies, worker: WorkerId, prober: u64, url: String) {
    let ProbeDependencies { health, interval, timeout } = dependencies;
    tokio::time::sleep(first_delay(worker, interval)).await;
    loop {
        let answer = match http::get(&url, timeout, ANSWER_BYTES_MAX).await {
            Ok(_) | Err(HttpError::TooLong(_)) => Ok(()),
            // A fault of this process says nothing about the engine.
            Err(HttpError::NoDescriptor) => {
                tracing::warn!(url, "health probe not sent: no file descriptor");
                tokio::time::sleep(interval).await;
                continue;
            }
            Err(error) => Err(error.to_string().chars().take(WHY_CHARS_MAX).collect()),
        };
        health.tell(HealthMsg::Probed { worker, prober, answer });
        tokio::time::sleep(interval).await;
    }
}
