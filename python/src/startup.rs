//! Wait for the first workers of a router, and the reasons why discovered engines are missing.

use std::time::Duration;

use pointsman::Router;
use pointsman::error::StartError;

use crate::discovery::problems;
use crate::errors::Failure;

/// Interval at which registered workers are counted.
const POLL_EVERY: Duration = Duration::from_millis(10);

/// Condition of a complete start.
#[derive(Clone)]
pub(crate) struct Expected {
    /// `min_initial_workers`.
    pub(crate) workers: u32,
    /// Sources of workers, as messages name them.
    pub(crate) sources: Vec<String>,
}

impl Expected {
    /// Waits for the workers. Cancel-safe.
    pub(crate) async fn registered(&self, router: &Router, timeout: Option<Duration>) -> Result<(), Failure> {
        let wait = async {
            loop {
                if let Some(result) = router.initial_workers(self.workers, self.sources.len()) {
                    return result;
                }
                router.health().state?;
                tokio::time::sleep(POLL_EVERY).await;
            }
        };
        let Some(timeout) = timeout else { return wait.await.map_err(Failure::from) };
        match tokio::time::timeout(timeout, wait).await {
            Ok(result) => result.map_err(|error: StartError| error.into()),
            Err(_) => Err(self.missed(router, timeout)),
        }
    }

    fn missed(&self, router: &Router, timeout: Duration) -> Failure {
        let (registered, wanted, mut problems) = (router.workers().len(), self.workers, problems(router));
        let statuses = router.discovery();
        let silent = self.sources.iter().zip(&statuses).filter(|(_, of)| of.workers == 0 && of.last_error.is_none());
        problems.extend(silent.map(|(source, _)| format!("no response yet from {source}")));
        let waited = timeout.as_secs_f64();
        let message = format!("{registered} of {wanted} workers registered within {waited} s: {}", problems.join("; "));
        Failure::new("StartTimeout", "timeout", message)
            .with_number("registered", registered as u64)
            .with_number("wanted", wanted.into())
            .with_problems(problems)
    }
}
