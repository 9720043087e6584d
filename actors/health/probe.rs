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
use crate::health::HealthInput;
use crate::protocol::{WorkerConfig, WorkerId};

/// Maximum number of response bytes; the status alone determines the result.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Page of every OpenAI-compatible engine, in place of the default health page if the engine has none.
const OTHER_PAGE: &str = "/v1/models";

/// Statuses of an engine without the health page.
const NO_PAGE: &[u16] = &[404, 405, 501];

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

/// Addresses and key file of a probe; a change restarts the task.
#[derive(Clone, PartialEq)]
struct Probed {
    url: String,
    /// Probed if `url` is the default page and the engine has no such page.
    other_url: Option<String>,
    api_key_file: Option<PathBuf>,
}

fn request_of(worker: &WorkerEntry) -> Option<Probed> {
    let WorkerConfig { endpoint, health_path, api_key_file, .. } = &worker.config;
    let endpoint = endpoint.trim_end_matches('/');
    let url = format!("{endpoint}{health_path}");
    let other_url = (*health_path == WorkerConfig::at("").health_path).then(|| format!("{endpoint}{OTHER_PAGE}"));
    let is_plain = !endpoint.contains(['?', '#']);
    let api_key_file = api_key_file.clone();
    HttpUrl::parse(&url).is_ok_and(|_| is_plain).then_some(Probed { url, other_url, api_key_file })
}

async fn get(client: &dyn EngineClient, timeout: Duration, probed: &Probed) -> Result<(), EngineHttpError> {
    let Probed { url, other_url, api_key_file } = probed;
    let request = |url: &String| {
        let (url, api_key_file) = (url.clone(), api_key_file.clone());
        client.get(EngineGet { url, api_key_file, timeout, bytes_max: ANSWER_BYTES_MAX })
    };
    let answer = match (request(url).await, other_url) {
        (Err(EngineHttpError::Status(status)), Some(other)) if NO_PAGE.contains(&status) => request(other).await,
        (answer, _) => answer,
    };
    match answer {
        Ok(_) | Err(EngineHttpError::TooLong(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn probe(dependencies: ProbeDependencies, worker: WorkerId, prober: u64, probed: Probed) {
    let interval = dependencies.interval;
    tokio::time::sleep(first_delay(worker, interval)).await;
    loop {
        let answer = match get(&*dependencies.client, dependencies.timeout, &probed).await {
            Ok(()) => Ok(()),
            // A fault of this process is no evidence about the engine.
            Err(EngineHttpError::NoDescriptor) => {
                tracing::warn!(url = probed.url, "health probe not sent: no file descriptor");
                tokio::time::sleep(interval).await;
                continue;
            }
            Err(EngineHttpError::NoTls) => return,
            Err(error) => Err(error.to_string().chars().take(WHY_CHARS_MAX).collect()),
        };
        dependencies.health.tell(HealthMsg::Input(HealthInput::Probed { worker, prober, answer }));
        tokio::time::sleep(interval).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::io::BoxFuture;

    /// Responds at these paths, and with 404 at others.
    #[derive(Debug)]
    struct Pages(&'static [(&'static str, Result<(), u16>)]);

    impl EngineClient for Pages {
        fn get(&self, request: EngineGet) -> BoxFuture<'_, Result<Vec<u8>, EngineHttpError>> {
            let page =
                self.0.iter().find(|(path, _)| request.url.ends_with(path)).map_or(Err(404), |(_, answer)| *answer);
            Box::pin(async move { page.map(|()| Vec::new()).map_err(EngineHttpError::Status) })
        }
    }

    #[tokio::test]
    async fn an_engine_without_the_default_page_is_probed_at_the_list_of_models() {
        let is_healthy = async |pages: Pages, health_path: &str| {
            let config = WorkerConfig { health_path: health_path.to_owned(), ..WorkerConfig::at("http://e/") };
            let entry =
                WorkerEntry { worker: WorkerId(1), config, ranks: Vec::new(), draining: false, cordoned: false };
            let probed = request_of(&entry).expect("an address");
            get(&pages, Duration::from_secs(1), &probed).await.is_ok()
        };
        assert!(is_healthy(Pages(&[("e/health", Ok(()))]), "/health").await);
        assert!(is_healthy(Pages(&[("e/v1/models", Ok(()))]), "/health").await);
        assert!(!is_healthy(Pages(&[("e/health", Err(503)), ("e/v1/models", Ok(()))]), "/health").await);
        assert!(!is_healthy(Pages(&[]), "/health").await);
        assert!(!is_healthy(Pages(&[("e/v1/models", Ok(()))]), "/ok").await, "a configured page must exist");
    }
}
