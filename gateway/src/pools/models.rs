//! Served models and their routers.
//!
//! Resolves names: a configured name takes precedence over an adapter name, and of two models with an equal adapter
//! name the first. Routers select ranks; [`sources`](super::sources) provides workers.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ahash::AHashMap;
use pointsman::config::{ConfigErrors, EventMode};
use pointsman::discovery::DiscoveryError;
use pointsman::error::StartError;
use pointsman::{ReplicaBus, Router, RouterConfig, WorkerEntry, memory_bytes};
use tokio::time::{sleep, timeout};

use super::disaggregation::PrefillPool;
use super::sources::{Definitions, ModelSources, probe_options};
use super::warm::{self, WarmStart};
use super::workers::WorkerTable;
use crate::app::current::Current;
use crate::net::limits::index_bytes_max;
use crate::net::upstream::{Upstream, WorkerAccess};
use crate::observe::requests::ModelMeters;
use crate::settings::{ModelRole, ModelSettings, role_of};
use crate::tokens::{AnyWorker, Tokens, TokensError};

/// Time limit of bookings at shutdown: those of cut-off requests end immediately.
pub(crate) const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);

/// Check interval of new workers for unreadable KV events.
const UNREAD_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Startup error of a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Router error.
    #[error("model {model:?}: {error}")]
    Router {
        /// Model name.
        model: String,
        /// Cause.
        error: StartError,
    },
    /// Worker source error.
    #[error("model {model:?}: {error}")]
    Workers {
        /// Model name.
        model: String,
        /// Cause.
        error: DiscoveryError,
    },
    /// Settings of prefill and decode pools that do not fit together.
    #[error("model {model:?}: {errors}")]
    Disaggregation {
        /// Model name.
        model: String,
        /// Causes.
        errors: ConfigErrors,
    },
    /// Tokenizer error.
    #[error("model {model:?}: {error}")]
    Tokens {
        /// Model name.
        model: String,
        /// Cause.
        error: TokensError,
    },
}

/// One model: a pool of ranks. Copies with other settings share everything else.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) settings: ModelSettings,
    pub(crate) router: Router,
    /// Client for its workers, with their keys.
    pub(crate) access: WorkerAccess,
    /// Worker sources.
    sources: Arc<ModelSources>,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) meters: Arc<ModelMeters>,
    pub(crate) workers: Arc<WorkerTable>,
    /// Whether the caches of all ranks were known at some time.
    pub(crate) was_warm: Arc<AtomicBool>,
    pub(crate) warm_start: Arc<WarmStart>,
    pub(crate) role: ModelRole,
    /// The pool that computes the prompts, for the role `Decode`.
    pub(crate) prefill: Option<Arc<PrefillPool>>,
}

impl Model {
    /// Waits until a worker takes requests, at most `within`. Returns whether one does.
    pub(crate) async fn has_worker(&self, within: Duration) -> bool {
        let takes_requests = |workers: &Arc<[WorkerEntry]>| workers.iter().any(WorkerEntry::takes_requests);
        let mut workers = self.router.watch_workers();
        if takes_requests(&workers.borrow()) {
            return true;
        }
        let _held = self.meters.hold();
        timeout(within, workers.wait_for(takes_requests)).await.is_ok_and(|found| found.is_ok())
    }
}

/// All models by name.
pub(crate) struct Models {
    all: Vec<Arc<Model>>,
    by_name: AHashMap<String, usize>,
    adapters: Mutex<Adapters>,
    /// Bus to other gateways, for all routers.
    bus: Option<Arc<dyn ReplicaBus>>,
}

/// Adapters of the workers.
#[derive(Default)]
struct Adapters {
    /// Worker lists of the last scan, by model.
    seen: Vec<Arc<[WorkerEntry]>>,
    by_name: AHashMap<String, usize>,
    /// Adapter names of two models that have been logged.
    shared: BTreeSet<String>,
}

impl Models {
    /// `snapshots` is the directory of index snapshots. The routers share their load over `bus`.
    pub(crate) async fn start(
        settings: &[ModelSettings],
        upstream: &Upstream,
        snapshots: Option<&Path>,
        bus: Option<Arc<dyn ReplicaBus>>,
    ) -> Result<Self, ModelError> {
        let mut all = Vec::new();
        let index_bytes_max = index_bytes_max(memory_bytes(), settings.len());
        for model in settings {
            let min_initial_workers = model.router.min_initial_workers;
            let role = role_of(model, settings);
            let bus = bus.as_ref();
            all.push(Model::start(model, role, upstream, snapshots, bus, min_initial_workers, index_bytes_max).await?);
        }
        Self::of(all, bus)
    }

    fn of(all: Vec<Model>, bus: Option<Arc<dyn ReplicaBus>>) -> Result<Self, ModelError> {
        let all = linked(all)?;
        let mut by_name = AHashMap::new();
        // The model of a prefill pool serves no client.
        let of_clients = all.iter().enumerate().filter(|(_, model)| model.role != ModelRole::Prefill);
        for (n, model) in of_clients {
            for name in std::iter::once(&model.settings.name).chain(&model.settings.aliases) {
                by_name.insert(name.clone(), n);
            }
        }
        Ok(Self { all, by_name, adapters: Mutex::default(), bus })
    }

    /// Models for new settings: served models keep their routers, others are started. Served models stay unchanged
    /// until [`Model::follow_settings`].
    ///
    /// # Errors
    /// A model that fails to start; models started before it are stopped.
    pub(crate) async fn reloaded(
        &self,
        settings: &[ModelSettings],
        upstream: &Upstream,
        snapshots: Option<&Path>,
    ) -> Result<Self, ModelError> {
        let (mut all, mut started) = (Vec::new(), Vec::new());
        let mut error = None;
        let index_bytes_max = index_bytes_max(memory_bytes(), settings.len());
        for new in settings {
            let role = role_of(new, settings);
            let known = self.all.iter().find(|model| model.settings.name == new.name && model.role == role.0);
            let model = match known {
                Some(model) => model.with(new).await,
                // Started without waiting for workers, because other models are being served.
                None => {
                    let bus = self.bus.as_ref();
                    let model = Model::start(new, role, upstream, snapshots, bus, 0, index_bytes_max).await;
                    model.inspect(|model| started.push(model.router.clone()))
                }
            };
            match model {
                Ok(model) => all.push(model),
                Err(failed) => {
                    error = Some(failed);
                    break;
                }
            }
        }
        let models = match error {
            Some(error) => Err(error),
            None => Self::of(all, self.bus.clone()),
        };
        if models.is_err() {
            for router in started {
                router.shutdown(SHUTDOWN_WAIT).await;
            }
        }
        models
    }

    pub(crate) fn all(&self) -> &[Arc<Model>] {
        &self.all
    }

    /// Resolves `name` to a model, and its adapter if the name is an adapter's.
    pub(crate) fn find<'a>(&self, name: &'a str) -> Option<(&Arc<Model>, Option<&'a str>)> {
        if let Some(n) = self.by_name.get(name) {
            return Some((&self.all[*n], None));
        }
        let n = *self.adapters().by_name.get(name)?;
        Some((&self.all[n], Some(name)))
    }

    /// The model with this name or alias, whether clients can request it or not.
    pub(crate) fn named(&self, name: &str) -> Option<&Arc<Model>> {
        let is_named = |model: &&Arc<Model>| {
            model.settings.name == name || model.settings.aliases.iter().any(|alias| alias == name)
        };
        self.all.iter().find(is_named)
    }

    /// Models that clients can request.
    pub(crate) fn of_clients(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.all.iter().filter(|model| model.role != ModelRole::Prefill)
    }

    /// The only model for clients, if there is exactly one.
    pub(crate) fn only(&self) -> Option<&Arc<Model>> {
        let mut models = self.of_clients();
        models.next().filter(|_| models.next().is_none())
    }

    /// Adapter names with their models, sorted by name.
    pub(crate) fn adapter_names(&self) -> Vec<(String, &Arc<Model>)> {
        let adapters = self.adapters();
        let mut names: Vec<_> = adapters.by_name.keys().cloned().collect();
        names.sort_unstable();
        names.into_iter().map(|name| (adapters.by_name[&name], name)).map(|(n, name)| (name, &self.all[n])).collect()
    }

    /// Current adapters of the workers.
    fn adapters(&self) -> MutexGuard<'_, Adapters> {
        // The table is replaced as a whole.
        let mut adapters = self.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        let workers = || self.all.iter().map(|model| model.router.workers());
        let is_current = adapters.seen.len() == self.all.len()
            && adapters.seen.iter().zip(workers()).all(|(seen, now)| Arc::ptr_eq(seen, &now));
        if !is_current {
            let seen: Vec<_> = workers().collect();
            adapters.read(seen, &self.by_name, &self.all);
        }
        adapters
    }

    pub(crate) async fn shutdown(&self) {
        for model in &self.all {
            model.router.clone().shutdown(SHUTDOWN_WAIT).await;
        }
    }
}

impl Adapters {
    fn read(&mut self, seen: Vec<Arc<[WorkerEntry]>>, names: &AHashMap<String, usize>, models: &[Arc<Model>]) {
        let mut by_name: AHashMap<String, usize> = AHashMap::new();
        let serves_clients = |(n, _): &(usize, _)| models[*n].role != ModelRole::Prefill;
        for (n, workers) in seen.iter().enumerate().filter(serves_clients) {
            for adapter in workers.iter().flat_map(|worker| &worker.config.lora_adapters) {
                let first = names.get(adapter).or_else(|| by_name.get(adapter)).copied();
                match first {
                    None => drop(by_name.insert(adapter.clone(), n)),
                    Some(first) if first == n && !names.contains_key(adapter) => {}
                    Some(first) => {
                        if self.shared.insert(adapter.clone()) {
                            let (model, first) = (&models[n].settings.name, &models[first].settings.name);
                            tracing::warn!(adapter, model, "requests for this adapter go to model {first:?}");
                        }
                    }
                }
            }
        }
        (self.seen, self.by_name) = (seen, by_name);
    }
}

impl Model {
    /// Starts the router and waits for the given number of workers. `index_bytes_max` limits an index without
    /// `index.bytes_max`. `role` is with the name of the model at its workers.
    async fn start(
        settings: &ModelSettings,
        (role, upstream_name): (ModelRole, &str),
        upstream: &Upstream,
        snapshots: Option<&Path>,
        bus: Option<&Arc<dyn ReplicaBus>>,
        min_initial_workers: u32,
        index_bytes_max: u64,
    ) -> Result<Self, ModelError> {
        let model = || settings.name.clone();
        let definitions = definitions_of(settings)?;
        if let Some(error) = definitions.too_few(min_initial_workers) {
            return Err(ModelError::Router { model: model(), error });
        }
        let sources = Arc::new(ModelSources::default());
        let settings = &ModelSettings { upstream_name: Some(upstream_name.to_owned()), ..settings.clone() };
        let mut router = RouterConfig { min_initial_workers, ..settings.router_in(role) };
        router.index.bytes_max.get_or_insert(index_bytes_max);
        let access = WorkerAccess::new(upstream.clone(), settings.worker_api_key_file.clone());
        let builder = Router::builder(router).engine_client(Arc::new(access.clone()));
        let builder = sources.follow(builder, &definitions, &probe_options(settings, &access));
        let mut builder = builder.map_err(|error| ModelError::Workers { model: model(), error })?;
        if let Some(snapshot) = warm::read_file(settings, snapshots).await {
            builder = builder.snapshot(snapshot);
        }
        if let Some(bus) = bus {
            builder = builder.replicas(Arc::clone(bus));
        }
        let router = builder.start().await.map_err(|error| ModelError::Router { model: model(), error })?;
        access.follow(router.watch_workers());
        let tokens = tokens_of(settings, &router, &access).await?;
        let meters = Arc::new(ModelMeters::of(&settings.name));
        let workers = WorkerTable::new(&settings.name, router.clone());
        Ok(Self {
            settings: settings.clone(),
            router,
            access,
            sources,
            tokens: Arc::new(tokens),
            meters,
            workers,
            was_warm: Arc::new(AtomicBool::new(false)),
            warm_start: Arc::default(),
            role,
            prefill: None,
        })
    }

    /// The same model with other names and workers. Changed files of its tokenizer are read again.
    async fn with(&self, settings: &ModelSettings) -> Result<Self, ModelError> {
        definitions_of(settings)?;
        // The name at the workers does not change while the router runs.
        let settings = ModelSettings { upstream_name: self.settings.upstream_name.clone(), ..settings.clone() };
        let tokens = match self.tokens.is_outdated(&settings.tokens) {
            true => Arc::new(tokens_of(&settings, &self.router, &self.access).await?),
            false => Arc::clone(&self.tokens),
        };
        Ok(Self { settings, tokens, prefill: None, ..self.clone() })
    }

    /// Applies the workers of the settings to the router. Existing ones stay unchanged.
    pub(crate) fn follow_settings(&self) {
        self.access.set_key_file(self.settings.worker_api_key_file.clone());
        let changed = definitions_of(&self.settings).and_then(|definitions| {
            let changed = self.sources.change(&self.router, &definitions, &probe_options(&self.settings, &self.access));
            changed.map_err(|error| ModelError::Workers { model: self.settings.name.clone(), error })
        });
        if let Err(error) = changed {
            tracing::error!(%error, "workers could not be reloaded");
        }
    }
}

/// The token source of a model, with the workers of its router in rotation.
async fn tokens_of(settings: &ModelSettings, router: &Router, access: &WorkerAccess) -> Result<Tokens, ModelError> {
    let (workers, next_index) = (router.clone(), AtomicUsize::new(0));
    let any_worker: AnyWorker = Arc::new(move |but, is_available| {
        let ejected = workers.out_of_service();
        let in_service =
            |worker: &WorkerEntry| worker.ranks.is_empty() || worker.ranks.iter().any(|rank| !ejected.contains(rank));
        next_worker(&workers.workers(), &next_index, but, |worker| {
            in_service(worker) && is_available(worker.config.endpoint.as_str())
        })
    });
    let tokens = Tokens::start(&settings.tokens, settings.upstream_name(), access.clone(), any_worker).await;
    tokens.map_err(|error| ModelError::Tokens { model: settings.name.clone(), error })
}

/// The models, those of the role `Decode` with their prefill pools.
fn linked(all: Vec<Model>) -> Result<Vec<Arc<Model>>, ModelError> {
    let prefill: Vec<Arc<Model>> =
        all.iter().filter(|model| model.role == ModelRole::Prefill).cloned().map(Arc::new).collect();
    let link = |mut model: Model| {
        let name = &model.settings.name;
        if let Some(shared) = prefill.iter().find(|prefill| prefill.settings.name == *name) {
            return Ok(Arc::clone(shared));
        }
        let Some(settings) = model.settings.disaggregation.clone() else { return Ok(Arc::new(model)) };
        if let Some(pool) = prefill.iter().find(|pool| pool.settings.name == settings.prefill) {
            let pool = PrefillPool::new(Arc::clone(pool), model.router.clone(), settings);
            let pool = pool.map_err(|errors| ModelError::Disaggregation { model: name.clone(), errors })?;
            model.prefill = Some(Arc::new(pool));
        }
        Ok(Arc::new(model))
    };
    all.into_iter().map(link).collect()
}

fn definitions_of(settings: &ModelSettings) -> Result<Definitions, ModelError> {
    Definitions::of(settings).map_err(|error| ModelError::Workers { model: settings.name.clone(), error })
}

/// Logs each worker with unreadable KV events once, after a delay for discovery: usually an engine that does not report
/// its event endpoint.
pub(crate) async fn warn_of_unread(current: Current) {
    let warm_up = Duration::from_millis(current.get().settings.gateway.warm_up_ms);
    sleep(warm_up).await;
    let mut logged = BTreeSet::new();
    loop {
        let app = current.get();
        let mut unread = BTreeSet::new();
        for model in app.models.all() {
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
                tracing::info!(
                    model,
                    endpoint,
                    "worker has no KV event endpoint: its cache is predicted from routing decisions (events.mode = \
                     \"auto\")"
                );
            } else {
                tracing::warn!(
                    model,
                    endpoint,
                    "worker has no KV event endpoint: it is routed by load only; set kv_events of the worker to the \
                     endpoint of its engine, or events.mode = \"auto\""
                );
            }
        }
        logged = unread;
        sleep(UNREAD_CHECK_INTERVAL).await;
    }
}

/// The next eligible worker in rotation that accepts new work and satisfies `is_eligible`. A replacement for `but` does
/// not advance the rotation; otherwise of two workers the same one would always be first.
fn next_worker(
    workers: &[WorkerEntry],
    next_index: &AtomicUsize,
    but: Option<&str>,
    is_eligible: impl Fn(&WorkerEntry) -> bool,
) -> Option<String> {
    let taking = workers.iter().filter(|entry| entry.takes_requests() && is_eligible(entry));
    let endpoints = taking.map(|entry| entry.config.endpoint.as_str()).filter(|endpoint| Some(*endpoint) != but);
    let endpoints: Vec<&str> = endpoints.collect();
    let n = if but.is_some() { next_index.load(Ordering::Relaxed) } else { next_index.fetch_add(1, Ordering::Relaxed) };
    let n = n.checked_rem(endpoints.len())?;
    Some(endpoints[n].to_owned())
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::{WorkerConfig, WorkerId};

    use super::*;

    fn workers(given: &[(&str, bool)]) -> Vec<WorkerEntry> {
        let entry = |(id, (name, draining)): (u64, &(&str, bool))| {
            let config = WorkerConfig::at(*name);
            WorkerEntry { worker: WorkerId(id), config, ranks: Vec::new(), draining: *draining, cordoned: false }
        };
        (0..).zip(given).map(entry).collect()
    }

    #[test]
    fn queries_rotate_over_workers_that_do_not_drain() {
        let next_index = AtomicUsize::new(0);
        let next = |some: &[WorkerEntry], but| next_worker(some, &next_index, but, |_| true);
        let some = workers(&[("a", true), ("b", false), ("c", false), ("d", true)]);
        let selected: Vec<_> = (0..4).map(|_| next(&some, None).unwrap()).collect();
        assert_eq!(selected, ["b", "c", "b", "c"]);
        // A replacement is always the other worker and does not advance the rotation.
        for _ in 0..3 {
            assert_eq!(next(&some, Some("b")).as_deref(), Some("c"));
            assert_eq!(next(&some, Some("c")).as_deref(), Some("b"));
        }
        assert_eq!(next(&some, None).as_deref(), Some("b"));
        assert_eq!(next(&workers(&[("a", true)]), None), None);
        assert_eq!(next(&workers(&[("a", false)]), Some("a")), None);
        assert_eq!(next(&[], None), None);
        let not_b = |entry: &WorkerEntry| entry.config.endpoint.as_str() != "b";
        for _ in 0..3 {
            assert_eq!(next_worker(&some, &next_index, None, not_b).as_deref(), Some("c"));
        }
    }
}
