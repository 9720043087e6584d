//! Starting a router.

use std::pin::Pin;
use std::sync::Arc;

use ractor::Actor;
use tokio::sync::watch;

use super::router::{Inner, Router};
use super::shared_cache::SharedCache;
use crate::actors::discovery::{AnySource, DiscoverySource};
use crate::actors::io::clock::Clock;
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::shared::Shared;
use crate::actors::supervisor::{Supervisor, SupervisorMsg};
use crate::actors::telemetry;
use crate::actors::{engine_load, gauges, health, lease_expiry};
use crate::config::RouterConfig;
use crate::error::{Down, StartError};
use crate::load::PrefillEstimator;
use crate::membership::initial_workers;
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};
use crate::schedule::Extensions;
use crate::select::{RankConditions, WorkerSelector};

/// A router to be started.
#[must_use = "nothing runs until `start`"]
pub struct RouterBuilder {
    config: RouterConfig,
    workers: WorkerMap,
    /// With their names.
    sources: Vec<(String, Box<dyn AnySource>)>,
    conditions: Option<watch::Receiver<RankConditions>>,
    extensions: Extensions,
    shared_cache: Option<Arc<dyn SharedCache>>,
}

impl std::fmt::Debug for RouterBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (config, workers) = (&self.config, &self.workers);
        f.debug_struct("RouterBuilder").field("config", config).field("workers", workers).finish_non_exhaustive()
    }
}

impl RouterBuilder {
    pub(super) fn new(config: RouterConfig) -> Self {
        Self {
            config,
            workers: WorkerMap::new(),
            sources: Vec::new(),
            conditions: None,
            extensions: Extensions::default(),
            shared_cache: None,
        }
    }

    /// Adds a worker that is there from the start and stays until it is removed by name.
    pub fn worker(mut self, worker: WorkerId, config: WorkerConfig) -> Self {
        self.workers.insert(worker, config);
        self
    }

    /// Follows a discovery source: each value it gives is the whole set of workers that it wants, beside those of other
    /// sources and those added by hand. Of two sources that name one worker the first given is heard.
    ///
    /// What is wanted is compared with what runs at each value, and every `discovery_interval_ms`.
    pub fn discovery(mut self, source: impl DiscoverySource) -> Self {
        self.sources.push((source.name(), Box::new(source)));
        self
    }

    /// Follows what a provider knows of ranks that the router cannot: which are overloaded, which cannot be reached. Each
    /// value is the whole truth. See [`Router::set_conditions`] for one that must hold before a call goes on.
    pub fn conditions(mut self, source: watch::Receiver<RankConditions>) -> Self {
        self.conditions = Some(source);
        self
    }

    /// Chooses in place of the configured policy. Filters, queue and booking stay the router's.
    pub fn selector(mut self, selector: Arc<dyn WorkerSelector>) -> Self {
        self.extensions.selector = Some(selector);
        self
    }

    /// Says how long prefills take, in place of what `prefill_load_model` would.
    pub fn prefill_estimator(mut self, estimator: Arc<dyn PrefillEstimator>) -> Self {
        self.extensions.estimator = Some(estimator);
        self
    }

    /// Asks a cache that the pool shares, beside the index, for each request.
    pub fn shared_cache(mut self, cache: Arc<dyn SharedCache>) -> Self {
        self.shared_cache = Some(cache);
        self
    }

    /// Starts the actors, registers the workers given, and waits for `min_initial_workers`.
    ///
    /// Metrics go to the recorder that is installed by now.
    ///
    /// # Errors
    /// See [`StartError`]. Nothing runs on after an error.
    pub async fn start(self) -> Result<Router, StartError> {
        self.start_boxed().await
    }

    /// Boxed, so that the actors are compiled in this crate and not once more in every crate that polls `start`.
    fn start_boxed(self) -> Pin<Box<dyn Future<Output = Result<Router, StartError>> + Send>> {
        Box::pin(self.start_actors())
    }

    async fn start_actors(self) -> Result<Router, StartError> {
        self.config.validate()?;
        let wanted = self.config.min_initial_workers;
        telemetry::describe();
        let shared = Arc::new(Shared::new(self.config, self.extensions, self.shared_cache, Clock::start()));
        let (supervisor, _) = Actor::spawn(None, Supervisor, Arc::clone(&shared))
            .await
            .map_err(|error| StartError::Spawn(error.to_string()))?;
        lease_expiry::watch(&shared);
        gauges::watch(&shared);
        health::watch(&shared);
        engine_load::watch(&shared);
        let router = Router { inner: Arc::new(Inner { shared, supervisor }) };
        for (worker, config) in self.workers {
            router.upsert_worker(worker, config).await?;
        }
        if let Some(source) = self.conditions {
            follow_conditions(source, &router);
        }
        let sources = self.sources.len();
        for (name, source) in self.sources {
            router.supervisor().send_message(SupervisorMsg::Follow { name, source }).map_err(|_| Down::Failed)?;
        }
        wait_for_workers(&router, wanted, sources).await?;
        Ok(router)
    }
}

impl Router {
    /// Prepares a router. Nothing runs until [`RouterBuilder::start`].
    pub fn builder(config: RouterConfig) -> RouterBuilder {
        RouterBuilder::new(config)
    }
}

/// Passes each value of the source on to the scheduler, until the router is down or the source has closed.
fn follow_conditions(mut source: watch::Receiver<RankConditions>, router: &Router) {
    let shared = Arc::downgrade(router.shared());
    tokio::spawn(async move {
        loop {
            let conditions = source.borrow_and_update().clone();
            let Some(shared) = shared.upgrade() else { break };
            shared.set_conditions(conditions);
            shared.scheduler.tell(SchedulerMsg::Conditions { done: None });
            drop(shared);
            if source.changed().await.is_err() {
                break; // what was said last stays true
            }
        }
    });
}

async fn wait_for_workers(router: &Router, wanted: u32, sources: usize) -> Result<(), StartError> {
    let shared = router.shared();
    let (mut statuses, mut workers) = (shared.discovery.subscribe(), shared.workers.subscribe());
    loop {
        // Statuses first: the workers of a source that has closed were published before.
        let known_sources = statuses.borrow_and_update().clone();
        let registered = workers.borrow_and_update().len();
        if let Some(result) = initial_workers(wanted, registered, sources, &known_sources) {
            return result;
        }
        tokio::select! {
            biased;
            down = shared.down() => return Err(down.into()),
            _ = statuses.changed() => {}
            _ = workers.changed() => {}
        }
    }
}
