//! Discovery of engines at known addresses, completed by probes.

use tokio::time::{Instant, sleep_until};

use super::prober::{ProbeOptions, Prober};
use super::source::DiscoverySource;
use crate::discovery::{Changes, DiscoveryError, NamedWorker, worker_map};
use crate::protocol::{WorkerConfig, WorkerMap};

/// A list of base addresses. Each engine is probed periodically for its configuration.
///
/// ```
/// use pointsman::{ProbeOptions, ProbedUrls, RouterConfig};
///
/// let options = ProbeOptions::of(&RouterConfig::default());
/// let source = ProbedUrls::new(["http://10.0.0.1:8000", "http://10.0.0.2:8000"], options)?;
/// # Ok::<(), pointsman::DiscoveryError>(())
/// ```
#[derive(Debug)]
pub struct ProbedUrls {
    workers: Vec<NamedWorker>,
    prober: Prober,
    next_at: Instant,
    changes: Changes,
}

impl ProbedUrls {
    /// Engines at these addresses; their ids are [derived](crate::protocol::WorkerId::derived).
    ///
    /// # Errors
    /// An invalid or a duplicate address.
    pub fn new(
        urls: impl IntoIterator<Item = impl Into<String>>,
        options: ProbeOptions,
    ) -> Result<Self, DiscoveryError> {
        let (mut workers, given) = (Vec::new(), WorkerConfig::at(""));
        for url in urls {
            workers.push(NamedWorker::at(&url.into(), &given)?.probed());
        }
        Self::named(workers, options)
    }

    /// Workers with the given configuration; those with `probe` are probed for the rest.
    ///
    /// # Errors
    /// Two workers with one id or address.
    pub fn named(
        workers: impl IntoIterator<Item = NamedWorker>,
        options: ProbeOptions,
    ) -> Result<Self, DiscoveryError> {
        let workers: Vec<NamedWorker> = workers.into_iter().collect();
        worker_map(workers.iter().map(|worker| (worker.id, worker.config.clone())))?;
        let (prober, next_at) = (Prober::new(options), Instant::now());
        Ok(Self { workers, prober, next_at, changes: Changes::default() })
    }

    /// Replaces the workers, [named](Self::named) as before. Earlier probe results are kept, and all workers are probed
    /// at the next [`DiscoverySource::next`].
    ///
    /// # Errors
    /// Two workers with one id or address; the previous ones stay.
    pub fn set(&mut self, workers: impl IntoIterator<Item = NamedWorker>) -> Result<(), DiscoveryError> {
        let workers: Vec<NamedWorker> = workers.into_iter().collect();
        worker_map(workers.iter().map(|worker| (worker.id, worker.config.clone())))?;
        (self.workers, self.next_at) = (workers, Instant::now());
        Ok(())
    }

    /// Sets the configuration of all workers that needs no probe, except the endpoint. A `*` as the host of a socket
    /// address is replaced by the worker's host.
    #[must_use]
    pub fn given(mut self, given: &WorkerConfig) -> Self {
        for worker in &mut self.workers {
            if let Ok(named) = NamedWorker::at(&worker.config.endpoint, given) {
                worker.config = named.config;
            }
        }
        self
    }
}

impl DiscoverySource for ProbedUrls {
    fn name(&self) -> String {
        "urls".to_owned()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        loop {
            if let Some(complaint) = self.changes.pending() {
                return Some(Err(complaint));
            }
            sleep_until(self.next_at).await;
            let (workers, errors) = self.prober.ask(&self.workers).await;
            self.next_at = Instant::now() + self.prober.options.interval;
            let complaint = (!errors.is_empty()).then_some(DiscoveryError::Engines(errors));
            let news = match worker_map(workers) {
                Ok(map) => self.changes.look(Some(map), complaint),
                Err(error) => self.changes.look(None, Some(error.into())),
            };
            if news.is_some() {
                return news;
            }
        }
    }

    fn rewind(&mut self) {
        self.changes.forget();
        self.next_at = Instant::now();
    }
}
