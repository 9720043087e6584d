//! Probes of engines for their configuration.
//!
//! Requests the pages of all engines concurrently and keeps their last facts. No page is required, and none delays
//! another. An engine without any usable page keeps its last configuration. An engine that serves another model or pool
//! is excluded. Time, bytes and concurrent probes are bounded.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout_at};

use super::publisher::{Listener, listener_at};
use crate::actors::io::http::{EngineClient, EngineGet, EngineHttpError, PlainEngineClient};
use crate::config::RouterConfig;
use crate::discovery::{
    Described, Engine, EngineError, EngineFacts, EnginePage, Expected, FirstRankEvents, HttpUrl, NamedWorker,
    PageAnswer,
};
use crate::protocol::{WorkerConfig, WorkerId};

/// Maximum number of engines that are probed concurrently. Times the pages and [`EngineFacts::BYTES_MAX`] it bounds the
/// memory of their responses.
const PROBES_MAX: usize = 16;

/// Timeout of a request whose answer may arrive in a later round. vLLM in development mode collects its environment for
/// the first `/server_info`, which takes many seconds.
const LATE_MAX: Duration = Duration::from_secs(30);

/// Statuses of an engine that does not implement the requested path.
const UNKNOWN: &[u16] = &[404, 405, 501];

/// Options of probes, and the expected configuration of an engine.
///
/// ```
/// use pointsman::{ProbeOptions, RouterConfig};
///
/// let options = ProbeOptions::of(&RouterConfig::default()).model("llama");
/// assert_eq!(options.expected.block_size, None);
/// ```
#[derive(Clone, Debug)]
pub struct ProbeOptions {
    /// Expected configuration; engines that differ are excluded.
    pub expected: Expected,
    /// Time between two rounds of probes. Default 5 seconds.
    pub interval: Duration,
    /// Time for which a round waits for a page of an engine. A later answer counts in a later round. Default 2 seconds.
    pub timeout: Duration,
    /// Whether the default port of vLLM's KV event publisher is tried, for engines with an address of their own. Default:
    /// whether the router reads KV events.
    pub finds_publishers: bool,
    /// Client of the probes. Default: plain HTTP.
    pub client: Arc<dyn EngineClient>,
}

impl ProbeOptions {
    /// For engines of this pool: any model, and the configured block size.
    #[must_use]
    pub fn of(pool: &RouterConfig) -> Self {
        let expected = Expected { model: None, block_size: pool.block_size };
        let finds_publishers = cfg!(feature = "zmq") && pool.events.mode.reads_events() && pool.has_index();
        let (interval, timeout) = (Duration::from_secs(5), Duration::from_secs(2));
        Self { expected, interval, timeout, finds_publishers, client: Arc::new(PlainEngineClient) }
    }

    /// Also requires a model served under this name.
    #[must_use]
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.expected.model = Some(name.into());
        self
    }
}

/// Probes engines and keeps their last facts.
///
/// Each page of an engine is requested by a task of its own. A round waits for its new requests for the timeout. A
/// request that takes longer goes on, and its answer counts in a later round: an engine that computes a page for many
/// seconds would begin anew at each attempt.
#[derive(Debug)]
pub(super) struct Prober {
    pub(super) options: ProbeOptions,
    engines: BTreeMap<EngineKey, ProbedEngine>,
    requests: JoinSet<(EngineKey, Request, Response)>,
}

/// Id, if the source has one, and endpoint: a new worker at an old address has no facts yet.
type EngineKey = (Option<WorkerId>, String);

/// Request to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Request {
    Page(EnginePage),
    /// Handshake at the default port of vLLM's publisher.
    Publisher,
}

#[derive(Debug)]
enum Response {
    Page(PageAnswer),
    Publisher(Listener),
}

/// State of one engine.
#[derive(Debug, Default)]
struct ProbedEngine {
    facts: EngineFacts,
    /// Configuration at the last round with a usable page.
    last: Option<Described>,
    /// Whether a publisher is at the default port of vLLM's publisher.
    publishes: bool,
    /// Requests and their starts. Those with an answer stay until the next round: a late answer can be read after the
    /// next request for the same page has started, and that one must not be forgotten.
    running: BTreeMap<Request, (Instant, AbortHandle)>,
    /// Pages without a usable answer, with the reasons.
    failures: BTreeMap<EnginePage, String>,
}

impl Drop for ProbedEngine {
    fn drop(&mut self) {
        self.running.values().for_each(|(_, request)| request.abort());
    }
}

impl ProbedEngine {
    fn record(&mut self, url: &HttpUrl, request: Request, response: Response) {
        match (request, response) {
            (Request::Page(page), Response::Page(answer)) => {
                match self.facts.record(url, page, answer) {
                    Ok(()) => self.failures.remove(&page),
                    Err(reason) => self.failures.insert(page, reason),
                };
            }
            (_, Response::Publisher(Listener::Publisher)) => self.publishes = true,
            (_, Response::Publisher(Listener::Other)) => self.publishes = false,
            (_, Response::Publisher(Listener::Unknown)) | (Request::Publisher, Response::Page(_)) => {}
        }
    }

    /// The present configuration, or the last one if no page is usable now, and an error.
    fn describe(&mut self, url: &HttpUrl) -> (Option<Described>, Option<String>) {
        let error = match self.facts.describe(url) {
            Ok(described) => {
                self.last = Some(described);
                self.failure()
            }
            Err(_) if self.failures.len() == EnginePage::ALL.len() => self.failure(),
            Err(error) => Some(error.to_string()),
        };
        (self.last.clone(), error)
    }

    /// Failures of an engine without any answer, each reason once, or of pages whose facts may be out of date.
    fn failure(&self) -> Option<String> {
        let reasons: BTreeSet<String> = if self.failures.len() == EnginePage::ALL.len() {
            self.failures.values().cloned().collect()
        } else {
            let stale = self.failures.iter().filter(|(page, _)| self.facts.is_known(**page));
            stale.map(|(page, reason)| format!("{}: {reason}", page.paths()[0])).collect()
        };
        (!reasons.is_empty()).then(|| reasons.into_iter().collect::<Vec<_>>().join("; "))
    }
}

impl Prober {
    pub(super) fn new(options: ProbeOptions) -> Self {
        Self { options, engines: BTreeMap::new(), requests: JoinSet::new() }
    }

    /// Completes the workers by their facts, and returns the errors of the others, in the given order. Workers
    /// without `probe` stay unchanged. Cancel-safe.
    pub(super) async fn ask(
        &mut self,
        workers: &[NamedWorker],
    ) -> (Vec<(Option<WorkerId>, WorkerConfig)>, Vec<EngineError>) {
        self.ask_with(workers, &BTreeMap::new()).await
    }

    /// As [`Self::ask`], with the KV event endpoints of the workers with these ids.
    pub(super) async fn ask_with(
        &mut self,
        workers: &[NamedWorker],
        events: &BTreeMap<WorkerId, FirstRankEvents>,
    ) -> (Vec<(Option<WorkerId>, WorkerConfig)>, Vec<EngineError>) {
        let probed: BTreeMap<EngineKey, &NamedWorker> =
            workers.iter().filter(|worker| worker.probe).map(|worker| (key_of(worker), worker)).collect();
        self.engines.retain(|key, _| probed.contains_key(key));
        let probed: Vec<(EngineKey, &NamedWorker)> = probed.into_iter().collect();
        for part in probed.chunks(PROBES_MAX) {
            self.round(part, events).await;
        }
        let (mut complete, mut errors) = (Vec::with_capacity(workers.len()), Vec::new());
        for worker in workers {
            let NamedWorker { id, config: given, probe } = worker;
            if !*probe {
                complete.push((*id, given.clone()));
                continue;
            }
            let (config, error) = self.complete(worker, id.and_then(|id| events.get(&id)));
            complete.extend(config.map(|config| (*id, config)));
            errors.extend(error.map(|reason| EngineError { url: given.endpoint.clone(), reason }));
        }
        (complete, errors)
    }

    /// Requests the pages of some engines, and waits for the answers until the timeout.
    async fn round(&mut self, workers: &[(EngineKey, &NamedWorker)], events: &BTreeMap<WorkerId, FirstRankEvents>) {
        let now = Instant::now();
        let mut awaited = BTreeSet::new();
        for (key, worker) in workers {
            let events = worker.id.and_then(|id| events.get(&id));
            self.start(key, worker, events, now);
            let running = self.engines.get(key).map(|engine| &engine.running);
            // Requests of earlier rounds have had their time; those of a cancelled round have not.
            let fresh = running.into_iter().flatten().filter(|(_, (started, _))| now - *started < self.options.timeout);
            awaited.extend(fresh.map(|(request, _)| (key.clone(), *request)));
        }
        let deadline = now + self.options.timeout;
        while !awaited.is_empty() {
            match timeout_at(deadline, self.requests.join_next()).await {
                Ok(Some(Ok((key, request, response)))) => {
                    self.record(&key, request, response);
                    awaited.remove(&(key, request));
                }
                Ok(Some(Err(_))) => {} // aborted
                Ok(None) | Err(_) => break,
            }
        }
        while let Some(finished) = self.requests.try_join_next() {
            if let Ok((key, request, response)) = finished {
                awaited.remove(&(key.clone(), request));
                self.record(&key, request, response);
            }
        }
        let late = format!("no response within {} ms", self.options.timeout.as_millis());
        for (key, request) in awaited {
            let (Some(engine), Ok(url), Request::Page(page)) =
                (self.engines.get_mut(&key), HttpUrl::parse(&key.1), request)
            else {
                continue;
            };
            if let Err(reason) = engine.facts.record(&url, page, PageAnswer::Failed(late.clone())) {
                engine.failures.insert(page, reason);
            }
        }
    }

    fn record(&mut self, key: &EngineKey, request: Request, response: Response) {
        if let (Some(engine), Ok(url)) = (self.engines.get_mut(key), HttpUrl::parse(&key.1)) {
            engine.record(&url, request, response);
        }
    }

    /// Starts the requests to one engine that are not running yet.
    fn start(&mut self, key: &EngineKey, worker: &NamedWorker, events: Option<&FirstRankEvents>, now: Instant) {
        let Ok(url) = HttpUrl::parse(&worker.config.endpoint) else { return };
        let engine = self.engines.entry(key.clone()).or_default();
        engine.running.retain(|_, (_, request)| !request.is_finished());
        for page in EnginePage::ALL {
            let request = Request::Page(page);
            if engine.running.contains_key(&request) {
                continue;
            }
            let (key, client) = (key.clone(), Arc::clone(&self.options.client));
            let requests = page.paths().iter().map(|path| EngineGet {
                url: url.below(path).to_string(),
                api_key_file: worker.config.api_key_file.clone(),
                timeout: self.options.timeout.max(LATE_MAX),
                bytes_max: EngineFacts::BYTES_MAX,
            });
            let requests: Vec<EngineGet> = requests.collect();
            let task = async move { (key, request, Response::Page(answer(&*client, requests).await)) };
            engine.running.insert(request, (now, self.requests.spawn(task)));
        }
        let reports_events = [EnginePage::EventSources, EnginePage::ServerInfo].map(|page| engine.facts.is_known(page));
        let publisher = match events {
            Some(FirstRankEvents::IfPublished(events))
                if self.options.finds_publishers && reports_events == [false, false] =>
            {
                Some(&events.endpoint)
            }
            Some(FirstRankEvents::IfPublished(_) | FirstRankEvents::Given(_)) | None => None,
        };
        if let Some(endpoint) = publisher.filter(|_| !engine.running.contains_key(&Request::Publisher)) {
            let (key, endpoint, timeout) = (key.clone(), endpoint.clone(), self.options.timeout);
            let task =
                async move { (key, Request::Publisher, Response::Publisher(listener_at(&endpoint, timeout).await)) };
            engine.running.insert(Request::Publisher, (now, self.requests.spawn(task)));
        }
    }

    /// The worker's configuration, unless its engine is unknown or of another pool, and an error.
    fn complete(
        &mut self,
        worker: &NamedWorker,
        events: Option<&FirstRankEvents>,
    ) -> (Option<WorkerConfig>, Option<String>) {
        let url = match HttpUrl::parse(&worker.config.endpoint) {
            Ok(url) => url,
            Err(error) => return (None, Some(error.to_string())),
        };
        let Some(engine) = self.engines.get_mut(&key_of(worker)) else { return (None, None) };
        let (described, error) = engine.describe(&url);
        let Some(mut described) = described else { return (None, error) };
        let first = described.data_parallel_start_rank;
        let mut given = worker.config.clone();
        match events {
            Some(FirstRankEvents::Given(events)) => match events.from_rank(first) {
                Ok(events) => given.kv_events = Some(events),
                Err(error) => return (None, Some(error.to_string())),
            },
            Some(FirstRankEvents::IfPublished(events)) => {
                let is_used = engine.publishes && described.engine == Engine::Vllm;
                if is_used && self.options.finds_publishers && engine.facts.may_publish_unreported() {
                    described.kv_events = events.from_rank(first).ok();
                }
            }
            None => {}
        }
        // Checked at every round, because the sources of the pool may have changed the given configuration.
        match described.complete(&given, &url, &self.options.expected) {
            Ok(config) => (Some(config), error),
            Err(error) => (None, Some(error.to_string())),
        }
    }
}

fn key_of(worker: &NamedWorker) -> EngineKey {
    (worker.id, worker.config.endpoint.clone())
}

/// The answer to the first of these requests whose page exists.
async fn answer(client: &dyn EngineClient, requests: Vec<EngineGet>) -> PageAnswer {
    let mut answer = PageAnswer::Missing(String::new());
    for request in requests {
        answer = match client.get(request).await {
            Ok(body) => PageAnswer::Body(body),
            Err(error @ EngineHttpError::Status(status)) if UNKNOWN.contains(&status) => {
                PageAnswer::Missing(error.to_string())
            }
            Err(error @ EngineHttpError::Unauthorized { .. }) => PageAnswer::Denied(error.to_string()),
            Err(error) => PageAnswer::Failed(error.to_string()),
        };
        if !matches!(answer, PageAnswer::Missing(_)) {
            break;
        }
    }
    answer
}
