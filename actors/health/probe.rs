//! Health probes: one task per worker polls its engine periodically.
//!
//! A probe ends within its timeout, and an unresponsive engine delays no other probe. Workers whose endpoint is no address
//! of the engine client are not probed. The health actor evaluates the results.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{HealthActor, HealthMsg};
use crate::actors::delivery::strand::Strand;
use crate::actors::io::http::{EngineClient, EngineGet, EngineHttpError};
use crate::actors::views::fleet::Fleet;
use crate::actors::views::status::RouterStatus;
use crate::actors::views::worker::WorkerEntry;
use crate::actors::worker_tasks::{self, first_delay};
use crate::config::RouterConfig;
use crate::discovery::HttpUrl;
use crate::protocol::WorkerId;

/// Maximum number of response bytes; the status alone determines the result.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Maximum length of an error description in characters.
const WHY_CHARS_MAX: usize = 200;

/// Starts the probes of the workers, if enabled. They end with the router.
pub(crate) fn watch(
    config: &RouterConfig,
    client: Arc<dyn EngineClient>,
    fleet: &Fleet,
    status: &RouterStatus,
    health: &Arc<Strand<HealthActor>>,
) {
    if config.health.probe_interval_ms > 0 {
        let [interval, timeout] = [config.health.probe_interval_ms, config.health.probe_timeout_ms];
        let prober = ProbeDependencies {
            health: Arc::clone(health),
            client,
            interval: Duration::from_millis(interval),
            timeout: Duration::from_millis(timeout),
        };
        worker_tasks::watch(fleet, status, prober, request_of, probe);
    }
}

/// Dependencies of a probing task.
#[derive(Clone)]
struct ProbeDependencies {
    health: Arc<Strand<HealthActor>>,
    client: Arc<dyn EngineClient>,
    interval: Duration,
    timeout: Duration,
}

/// Address and key file of a probe; a change restarts the task.
type Probed = (String, Option<PathBuf>);

fn request_of(worker: &WorkerEntry) -> Option<Probed> {
    let endpoint = worker.config.endpoint.trim_end_matches('/');
    let url = format!("{endpoint}{}", worker.config.health_path);
    let is_plain = !endpoint.contains(['?', '#']);
    HttpUrl::parse(&url).is_ok_and(|_| is_plain).then(|| (url, worker.config.api_key_file.clone()))
}

async fn probe(dependencies: ProbeDependencies, worker: WorkerId, prober: u64, (url, api_key_file): Probed) {
    let ProbeDependencies { health, client, interval, timeout } = dependencies;
    let request = EngineGet { url, api_key_file, timeout, bytes_max: ANSWER_BYTES_MAX };
    tokio::time::sleep(first_delay(worker, interval)).await;
    loop {
        let answer = match client.get(request.clone()).await {
            Ok(_) | Err(EngineHttpError::TooLong(_)) => Ok(()),
            // A fault of this process is no evidence about the engine.
            Err(EngineHttpError::NoDescriptor) => {
                tracing::warn!(url = request.url, "health probe not sent: no file descriptor");
                tokio::time::sleep(interval).await;
                continue;
            }
            Err(EngineHttpError::NoTls) => return,
            Err(error) => Err(error.to_string().chars().take(WHY_CHARS_MAX).collect()),
        };
        health.tell(HealthMsg::Probed { worker, prober, answer });
        tokio::time::sleep(interval).await;
    }
}
