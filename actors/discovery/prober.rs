//! Probes of engines for their configuration.
//!
//! Keeps the last response of each engine. An engine without a valid response keeps its last configuration. An engine
//! that serves another model or pool is excluded. Time, bytes and concurrent probes are bounded.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::publisher::{Listener, listener_at};
use crate::actors::io::http::{EngineClient, EngineGet, EngineHttpError, PlainEngineClient};
use crate::config::RouterConfig;
use crate::discovery::{Described, Engine, EngineError, Expected, FirstRankEvents, HttpUrl, NamedWorker, ProbeError};
use crate::protocol::{KvEventsConfig, WorkerConfig, WorkerId};

/// Maximum number of concurrent probes; times [`Described::BYTES_MAX`] it bounds the memory of their responses.
const PROBES_MAX: usize = 16;

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
    /// Timeout of one request; an engine receives up to four. Default 2 seconds.
    pub timeout: Duration,
    /// Whether the default port of vLLM's KV event publisher is tried, for engines with an address of their own. Default:
    /// whether the router reads KV events.
    pub finds_publishers: bool,
    /// Client of the probes. Default: [`PlainEngineClient`].
    pub client: Arc<dyn EngineClient>,
}

impl ProbeOptions {
    /// For engines of this pool: any model, and the configured block size if events are used.
    #[must_use]
    pub fn of(pool: &RouterConfig) -> Self {
        let expected = Expected {
            model: None,
            block_size: pool.block_size,
            block_size_must_match: pool.events.mode.reads_events(),
        };
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

/// Probes engines and keeps their last responses.
#[derive(Debug)]
pub(super) struct Prober {
    pub(super) options: ProbeOptions,
    /// By id, if the source has one, and endpoint: a new worker at an old address has no facts yet.
    last: BTreeMap<(Option<WorkerId>, String), Described>,
}

impl Prober {
    pub(super) fn new(options: ProbeOptions) -> Self {
        Self { options, last: BTreeMap::new() }
    }

    /// Completes the workers by their responses, and returns the errors of the others, in the given order. Workers
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
        let mut answers = self.answers(workers, events).await;
        let (mut complete, mut errors) = (Vec::with_capacity(workers.len()), Vec::new());
        let mut last = BTreeMap::new();
        for (position, NamedWorker { id, config: given, probe }) in workers.iter().enumerate() {
            let url = &given.endpoint;
            let key = (*id, url.clone());
            let events = id.and_then(|id| events.get(&id));
            let mut add_error = |reason: String| errors.push(EngineError { url: url.clone(), reason });
            let described = match answers.remove(&position) {
                None if !*probe => {
                    complete.push((*id, given.clone()));
                    continue;
                }
                None => {
                    add_error("the probe task failed".to_owned());
                    self.last.get(&key).cloned()
                }
                Some(Ok((described, listener))) => {
                    let last = self.last.get(&key).and_then(|last| last.kv_events.clone());
                    Some(with_events(described, listener, events, last))
                }
                Some(Err(reason)) => {
                    add_error(reason);
                    self.last.get(&key).cloned()
                }
            };
            // Checked at every round, because the sources of the pool may have changed the given configuration.
            let Some((described, at)) = described.zip(HttpUrl::parse(url).ok()) else { continue };
            let given = match events {
                Some(FirstRankEvents::Given(events)) => events
                    .from_rank(described.data_parallel_start_rank)
                    .map(|events| WorkerConfig { kv_events: Some(events), ..given.clone() }),
                Some(FirstRankEvents::IfPublished(_)) | None => Ok(given.clone()),
            };
            let config = given.map_err(ProbeError::from);
            match config.and_then(|given| described.clone().complete(&given, &at, &self.options.expected)) {
                Ok(config) => complete.push((*id, config)),
                Err(error) => add_error(error.to_string()),
            }
            last.insert(key, described);
        }
        self.last = last;
        (complete, errors)
    }

    /// Response of each probed worker, by position.
    async fn answers(
        &self,
        workers: &[NamedWorker],
        events: &BTreeMap<WorkerId, FirstRankEvents>,
    ) -> BTreeMap<usize, Result<Answer, String>> {
        let mut answers = BTreeMap::new();
        let mut probes = JoinSet::new();
        for (position, worker) in workers.iter().enumerate().filter(|(_, worker)| worker.probe) {
            if probes.len() >= PROBES_MAX {
                answers.extend(probes.join_next().await.and_then(Result::ok));
            }
            let engine = ProbedEngine {
                client: Arc::clone(&self.options.client),
                url: worker.config.endpoint.clone(),
                api_key_file: worker.config.api_key_file.clone(),
                timeout: self.options.timeout,
            };
            let publisher = match worker.id.and_then(|id| events.get(&id)) {
                Some(FirstRankEvents::IfPublished(events)) if self.options.finds_publishers => {
                    Some(events.endpoint.clone())
                }
                Some(FirstRankEvents::IfPublished(_) | FirstRankEvents::Given(_)) | None => None,
            };
            probes.spawn(async move { (position, engine.answer(publisher).await) });
        }
        while let Some(answer) = probes.join_next().await {
            answers.extend(answer.ok());
        }
        answers
    }
}

/// Response of an engine, and what listens at the default port of vLLM's publisher, if that was checked.
type Answer = (Described, Option<Listener>);

/// One probed engine and the client for it.
struct ProbedEngine {
    client: Arc<dyn EngineClient>,
    url: String,
    api_key_file: Option<PathBuf>,
    timeout: Duration,
}

impl ProbedEngine {
    async fn answer(self, publisher: Option<String>) -> Result<Answer, String> {
        let described = self.describe().await?;
        let publisher = publisher.filter(|_| described.engine == Engine::Vllm && described.kv_events.is_none());
        let listener = match publisher {
            Some(endpoint) => Some(listener_at(&endpoint, self.timeout).await),
            None => None,
        };
        Ok((described, listener))
    }

    /// SGLang implements `/server_info` under an older or a newer name; vLLM does not, or responds with another format.
    async fn describe(&self) -> Result<Described, String> {
        let url = HttpUrl::parse(&self.url).map_err(|error| error.to_string())?;
        let ask = async |path: &str| {
            let request = EngineGet {
                url: url.below(path).to_string(),
                api_key_file: self.api_key_file.clone(),
                timeout: self.timeout,
                bytes_max: Described::BYTES_MAX,
            };
            self.client.get(request).await.map_err(|error| (format!("{path}: {error}"), error))
        };
        for path in ["/server_info", "/get_server_info"] {
            match ask(path).await {
                Ok(answer) => match Described::of_sglang(&url, &answer) {
                    Ok(Some(described)) => return Ok(described),
                    Ok(None) => break,
                    Err(error) => return Err(error.to_string()),
                },
                Err((_, EngineHttpError::Status(status))) if UNKNOWN.contains(&status) => {}
                Err((reason, _)) => return Err(reason),
            }
        }
        let models = ask("/v1/models").await.map_err(|(reason, _)| reason)?;
        let metrics = ask("/metrics").await.map_err(|(reason, _)| reason)?;
        Described::of_vllm(&url, &models, &metrics).map_err(|error| error.to_string())
    }
}

/// The response with the endpoints of a publisher that was found. Without a result, `last` stays.
fn with_events(
    described: Described,
    listener: Option<Listener>,
    events: Option<&FirstRankEvents>,
    last: Option<KvEventsConfig>,
) -> Described {
    let kv_events = match (listener, events) {
        (Some(Listener::Publisher), Some(FirstRankEvents::IfPublished(events))) => {
            events.from_rank(described.data_parallel_start_rank).ok()
        }
        (Some(Listener::Unknown), _) => last,
        _ => described.kv_events.clone(),
    };
    Described { kv_events, ..described }
}
