//! One served model: its router, the sources of its workers, its tokens and its metrics.
//!
//! The router selects ranks; `sources` provides workers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use pointsman::{ReplicaBus, Router, RouterConfig, WorkerEntry};
use tokio::time::timeout;

use super::disaggregation::PrefillPool;
use super::gate::Gate;
use super::sources::{Definitions, ModelSources, probe_options};
use super::warm::{self, WarmStart};
use super::workers::WorkerTable;
use crate::net::upstream::{Upstream, WorkerAccess};
use crate::observe::requests::ModelMeters;
use crate::settings::{ModelRole, ModelSettings};
use crate::tokens::{AnyWorker, Tokens};

/// Time limit of bookings at shutdown: those of cut-off requests end immediately.
pub(crate) const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);

/// Startup error of a model: of its router, its worker sources, its tokens or its prefill pool.
#[derive(Debug, thiserror::Error)]
#[error("model {model:?}: {cause}")]
pub struct ModelError {
    model: String,
    cause: Box<dyn std::error::Error + Send + Sync>,
}

impl ModelError {
    pub(super) fn new(model: &str, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { model: model.to_owned(), cause: cause.into() }
    }
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
    /// Closed while the engines pause.
    pub(crate) gate: Arc<Gate>,
    /// Whether the caches of all ranks were known at some time.
    pub(crate) was_warm: Arc<AtomicBool>,
    pub(crate) warm_start: Arc<WarmStart>,
    pub(crate) role: ModelRole,
    /// The pool that computes the prompts, for the role `Decode`.
    pub(crate) prefill: Option<PrefillSide>,
}

/// Prefill side of a model of the role `Decode`.
#[derive(Clone)]
pub(crate) struct PrefillSide {
    /// Model of the prefill workers.
    pub(crate) model: Arc<Model>,
    /// Transfers between both pools.
    pub(crate) pool: Arc<PrefillPool>,
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

impl Model {
    /// Starts the router and waits for the given number of workers. `index_bytes_max` limits an index without
    /// `index.bytes_max`. `role` is with the name of the model at its workers.
    pub(super) async fn start(
        settings: &ModelSettings,
        (role, upstream_name): (ModelRole, &str),
        upstream: &Upstream,
        snapshots: Option<&Path>,
        bus: Option<&Arc<dyn ReplicaBus>>,
        min_initial_workers: u32,
        index_bytes_max: u64,
    ) -> Result<Self, ModelError> {
        let definitions = definitions_of(settings)?;
        if let Some(error) = definitions.too_few(min_initial_workers) {
            return Err(ModelError::new(&settings.name, error));
        }
        let sources = Arc::new(ModelSources::default());
        let settings = &ModelSettings { upstream_name: Some(upstream_name.to_owned()), ..settings.clone() };
        let mut router = RouterConfig { min_initial_workers, ..settings.router_in(role) };
        router.index.bytes_max.get_or_insert(index_bytes_max);
        let access = WorkerAccess::new(upstream.clone(), settings.worker_api_key_file.clone());
        let builder = Router::builder(router).engine_client(Arc::new(access.clone()));
        let builder = sources.apply(builder, &definitions, &probe_options(settings, &access));
        let mut builder = builder.map_err(|error| ModelError::new(&settings.name, error))?;
        if let Some(snapshot) = warm::read_file(settings, snapshots).await {
            builder = builder.snapshot(snapshot);
        }
        if let Some(bus) = bus {
            builder = builder.replicas(Arc::clone(bus));
        }
        let router = builder.start().await.map_err(|error| ModelError::new(&settings.name, error))?;
        access.follow(router.watch_workers());
        let tokens = tokens_of(settings, &router, &access).await?;
        let meters = Arc::new(ModelMeters::of(&settings.name));
        let workers = WorkerTable::new(&settings.name, router.clone());
        let gate = Arc::new(Gate::new(router.clone()));
        Ok(Self {
            settings: settings.clone(),
            router,
            access,
            sources,
            tokens: Arc::new(tokens),
            meters,
            workers,
            gate,
            was_warm: Arc::new(AtomicBool::new(false)),
            warm_start: Arc::default(),
            role,
            prefill: None,
        })
    }

    /// The same model with other names and workers. Changed files of its tokenizer are read again.
    pub(super) async fn with(&self, settings: &ModelSettings) -> Result<Self, ModelError> {
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
            let changed = self.sources.apply(&self.router, &definitions, &probe_options(&self.settings, &self.access));
            changed.map_err(|error| ModelError::new(&self.settings.name, error))
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
    tokens.map_err(|error| ModelError::new(&settings.name, error))
}

fn definitions_of(settings: &ModelSettings) -> Result<Definitions, ModelError> {
    Definitions::of(settings).map_err(|error| ModelError::new(&settings.name, error))
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
