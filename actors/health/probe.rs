//! Probing: one task a worker asks its engine, again and again, whether it is well.
//!
//! Owns the tasks. Promises that a probe ends within its time-out, that one engine's silence delays no other's probe, and
//! that workers whose endpoint is no plain `http://` address are left alone. What an answer means is the health actor's.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::HealthMsg;
use crate::actors::io::http::{self, HttpError};
use crate::actors::shared::Shared;
use crate::actors::views::worker::WorkerEntry;
use crate::actors::worker_tasks::{self, first_delay};
use crate::discovery::HttpUrl;
use crate::protocol::WorkerId;

/// Longest answer that is read; that it is well is said by the status.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Longest account of what went wrong.
const WHY_CHARS_MAX: usize = 200;

/// Starts to probe the workers, unless that is off. It ends with the router.
pub(super) fn watch(shared: &Arc<Shared>) {
    if shared.config.health_probe_interval_ms > 0 {
        worker_tasks::watch(shared, url_of, probe);
    }
}

fn url_of(worker: &WorkerEntry) -> Option<String> {
    let endpoint = worker.config.endpoint.trim_end_matches('/');
    let url = format!("{endpoint}{}", worker.config.health_path);
    let is_plain = !endpoint.contains(['?', '#']);
    HttpUrl::parse(&url).is_ok_and(|_| is_plain).then_some(url)
}

async fn probe(shared: Weak<Shared>, worker: WorkerId, prober: u64, url: String) {
    let Some((interval, timeout)) = shared.upgrade().map(|shared| {
        let config = &shared.config;
        let [interval, timeout] = [config.health_probe_interval_ms, config.health_probe_timeout_ms];
        (Duration::from_millis(interval), Duration::from_millis(timeout))
    }) else {
        return;
    };
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
        let Some(shared) = shared.upgrade() else { return };
        shared.health.tell(HealthMsg::Probed { worker, prober, answer });
        drop(shared);
        tokio::time::sleep(interval).await;
    }
}
