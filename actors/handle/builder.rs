//! Builder that starts a router.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ractor::Actor;
use tokio::sync::{Semaphore, watch};
#[cfg(feature = "replicas")]
use xxhash_rust::xxh3::xxh3_64;

use super::edge::{Edge, OUTCOMES_MAX};
use super::intake::Intake;
use super::membership::publish_conditions;
use super::router::{Inner, Router};
use super::shared_cache::SharedCache;
use crate::actors::discovery::{AnySource, DiscoverySource};
use crate::actors::engine_load::EngineLoadSources;
use crate::actors::gauges::GaugeSources;
#[cfg(feature = "discovery")]
use crate::actors::health::probe;
use crate::actors::health::stalls;
use crate::actors::io::clock::Clock;
#[cfg(feature = "discovery")]
use crate::actors::io::http::{EngineClient, PlainEngineClient};
use crate::actors::io::memory::memory_bytes;
use crate::actors::lease_ender::LeaseEnder;
use crate::actors::lease_expiry::LeaseExpiry;
#[cfg(feature = "replicas")]
use crate::actors::replica::{ReplicaBus, meters::ReplicaMeters, sharing::ReplicaSharing};
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::strands::Strands;
use crate::actors::supervisor::dependencies::SupervisorDependencies;
use crate::actors::supervisor::{Supervisor, SupervisorMsg};
use crate::actors::telemetry::{self, Meters};
use crate::actors::views::Views;
use crate::config::RouterConfig;
use crate::directory::Directory;
use crate::error::{Down, StartError};
use crate::load::{OutputLengths, PrefillEstimator};
use crate::membership::initial_workers;
use crate::policy::{RankFilter, RankPolicy, RankScorer};
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};
use crate::schedule::Extensions;
use crate::select::RankConditions;

/// Builder of a router, from [`Router::builder`].
#[must_use = "nothing runs until `start`"]
pub struct RouterBuilder {
    config: RouterConfig,
    workers: WorkerMap,
    /// Each source with its name.
    sources: Vec<(String, Box<dyn AnySource>)>,
    conditions: Option<watch::Receiver<RankConditions>>,
    extensions: Extensions,
    shared_cache: Option<Arc<dyn SharedCache>>,
    #[cfg(feature = "discovery")]
    engine_client: Arc<dyn EngineClient>,
    #[cfg(feature = "replicas")]
    replicas: Option<Arc<dyn ReplicaBus>>,
    #[cfg(feature = "zmq")]
    snapshot: Option<crate::snapshot::Snapshot>,
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
            #[cfg(feature = "discovery")]
            engine_client: Arc::new(PlainEngineClient),
            #[cfg(feature = "replicas")]
            replicas: None,
            #[cfg(feature = "zmq")]
            snapshot: None,
        }
    }

    /// Adds a worker that is registered at the start and stays until it is removed by id.
    pub fn worker(mut self, worker: WorkerId, config: WorkerConfig) -> Self {
        self.workers.insert(worker, config);
        self
    }

    /// Follows a discovery source. Each value of a source is its complete set of desired workers, in addition to those
    /// of other sources and those added by hand. If two sources name the same worker, the source added first takes
    /// precedence.
    ///
    /// Desired and registered workers are reconciled at each value and every `discovery.interval_ms`.
    pub fn discovery(mut self, source: impl DiscoverySource) -> Self {
        self.sources.push((source.name(), Box::new(source)));
        self
    }

    /// Follows a provider of rank conditions that the router cannot observe: overloaded and unavailable ranks. Each
    /// value replaces the previous one. Use [`Router::set_conditions`] for conditions that must apply before a call
    /// continues.
    pub fn conditions(mut self, source: watch::Receiver<RankConditions>) -> Self {
        self.conditions = Some(source);
        self
    }

    /// Replaces the configured policy. Filters, queue and bookings remain with the router.
    pub fn policy(mut self, policy: Arc<dyn RankPolicy>) -> Self {
        self.extensions.policy = Some(policy);
        self
    }

    /// Adds a cost term to the configured policy. Without effect on policies that compare no costs.
    pub fn scorer(mut self, scorer: Arc<dyn RankScorer>) -> Self {
        self.extensions.scorers.push(scorer);
        self
    }

    /// Adds a filter of ranks.
    pub fn filter(mut self, filter: Arc<dyn RankFilter>) -> Self {
        self.extensions.filters.push(filter);
        self
    }

    /// Replaces the model of `load.prefill_model` for expected prefill durations: by the rank, the tokens to compute, and
    /// the cached tokens before them. `None` for no estimate. Must not block.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// use pointsman::{Router, RouterConfig};
    ///
    /// let builder = Router::builder(RouterConfig::default());
    /// builder.prefill_estimator(Arc::new(|_, tokens, _| Some(Duration::from_micros(4_000 + 90 * u64::from(tokens)))));
    /// ```
    pub fn prefill_estimator(mut self, estimator: Arc<PrefillEstimator>) -> Self {
        self.extensions.estimator = Some(estimator);
        self
    }

    /// Queries a cache shared by the pool, in addition to the index, for each request.
    pub fn shared_cache(mut self, cache: Arc<dyn SharedCache>) -> Self {
        self.shared_cache = Some(cache);
        self
    }

    /// Replaces the client of health probes and of polls of engine metrics. Discovery sources have their own:
    /// [`ProbeOptions::client`](crate::ProbeOptions::client).
    #[cfg(feature = "discovery")]
    pub fn engine_client(mut self, client: Arc<dyn EngineClient>) -> Self {
        self.engine_client = client;
        self
    }

    /// Shares load with other replicas of the router over the same fleet. Replicas of one pool have the same
    /// [`RouterConfig::pool`] and name workers equally. The seed of draws is combined with the replica's id, so that
    /// replicas break ties differently.
    #[cfg(feature = "replicas")]
    pub fn replicas(mut self, bus: Arc<dyn ReplicaBus>) -> Self {
        self.config.seed ^= xxh3_64(&bus.life().replica.0.to_le_bytes());
        self.replicas = Some(bus);
        self
    }

    /// Starts with the contents of a snapshot: see [`Router::restore`]. A snapshot of another layout is a start error, except
    /// for a block size that is not known yet.
    #[cfg(feature = "zmq")]
    pub fn snapshot(mut self, snapshot: crate::snapshot::Snapshot) -> Self {
        self.snapshot = Some(snapshot);
        self
    }

    /// Starts the actors, registers the workers of the builder, and waits for `min_initial_workers`.
    ///
    /// Metrics go to the recorder installed before this call.
    ///
    /// # Errors
    /// See [`StartError`]. After an error no actor keeps running.
    pub async fn start(self) -> Result<Router, StartError> {
        self.start_boxed().await
    }

    /// Boxed, so that the actors are compiled once, in this crate, instead of in every crate that polls `start`.
    fn start_boxed(self) -> Pin<Box<dyn Future<Output = Result<Router, StartError>> + Send>> {
        Box::pin(self.start_actors())
    }

    async fn start_actors(self) -> Result<Router, StartError> {
        self.config.validate()?;
        let wanted = self.config.min_initial_workers;
        telemetry::describe();
        let router = start_actors(
            self.config,
            self.extensions,
            self.shared_cache,
            #[cfg(feature = "discovery")]
            self.engine_client,
        )
        .await?;
        #[cfg(feature = "replicas")]
        if let Some(bus) = self.replicas {
            share_load(bus, &router);
        }
        #[cfg(feature = "zmq")]
        if let Some(snapshot) = self.snapshot {
            router.restore(snapshot)?;
        }
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
    /// Creates the builder of a router. No actor runs before [`RouterBuilder::start`].
    pub fn builder(config: RouterConfig) -> RouterBuilder {
        RouterBuilder::new(config)
    }
}

/// The configuration with a memory limit of the index.
fn with_index_limit(mut config: RouterConfig) -> RouterConfig {
    if config.index.enabled && config.index.bytes_max.is_none() {
        let bytes_max = RouterConfig::index_bytes_max(memory_bytes(), 1);
        tracing::info!(pool = &config.pool, bytes_max, "memory limit of the index: a quarter of the memory");
        config.index.bytes_max = Some(bytes_max);
    }
    config
}

/// Starts the supervisor, which starts the other actors, and the periodic tasks.
async fn start_actors(
    config: RouterConfig,
    extensions: Extensions,
    shared_cache: Option<Arc<dyn SharedCache>>,
    #[cfg(feature = "discovery")] engine_client: Arc<dyn EngineClient>,
) -> Result<Router, StartError> {
    let (config, clock) = (Arc::new(with_index_limit(config)), Clock::start());
    let views = Views::new(&config);
    let meters = Arc::new(Meters::new(&config, shared_cache.is_some()));
    let (directory, output_lengths) = (Arc::<Directory>::default(), Arc::<OutputLengths>::default());
    let strands = Strands::new(&config);
    let Strands { scheduler, health, engine_loads, shards, .. } = strands.clone();
    let ender = Arc::new(LeaseEnder::new(&config, &views.block_size, &directory, &strands, &output_lengths));
    let dependencies = SupervisorDependencies {
        config: Arc::clone(&config),
        clock,
        directory: Arc::clone(&directory),
        ender: Arc::clone(&ender),
        views: views.clone(),
        strands: strands.clone(),
        meters: Arc::clone(&meters),
        extensions,
    };
    let started = Actor::spawn(None, Supervisor, dependencies).await;
    let (supervisor, _) = started.map_err(|error| StartError::Spawn(error.to_string()))?;
    let intake = Intake::new(&config, Arc::clone(&directory), output_lengths);
    let (status, expired) = (Arc::clone(&views.status), meters.expired.clone());
    LeaseExpiry { clock, directory: Arc::clone(&directory), ender: Arc::clone(&ender), status, expired }
        .watch(Duration::from_millis(config.load.booking_liveness_ms));
    GaugeSources {
        clock,
        pool: meters.pool.clone(),
        views: views.clone(),
        directory,
        waiting_room: Arc::clone(&intake.waiting_room),
        shards,
        scheduler: Arc::clone(&scheduler),
    }
    .watch();
    stalls::watch(&config, clock, &views, &health);
    #[cfg(feature = "discovery")]
    probe::watch(&config, Arc::clone(&engine_client), &views.fleet, &views.status, &health);
    EngineLoadSources {
        config: Arc::clone(&config),
        #[cfg(feature = "discovery")]
        client: engine_client,
        clock,
        fleet: Arc::clone(&views.fleet),
        status: Arc::clone(&views.status),
        meters: Arc::clone(&meters),
        engine_loads,
        scheduler,
    }
    .watch();
    let block_size = Arc::clone(&views.block_size);
    let shards = Arc::clone(&strands.shards);
    let outcomes_gate = Arc::new(Semaphore::new(OUTCOMES_MAX));
    let edge = Arc::new(Edge { config, block_size, clock, meters, ender, shards, health, outcomes_gate });
    Ok(Router { inner: Arc::new(Inner { edge, intake, views, strands, shared_cache, supervisor }) })
}

#[cfg(feature = "replicas")]
fn share_load(bus: Arc<dyn ReplicaBus>, router: &Router) {
    let (views, edge) = (router.views(), router.edge());
    ReplicaSharing {
        bus,
        config: Arc::clone(&edge.config),
        block_size: Arc::clone(&views.block_size),
        clock: edge.clock,
        ranks: Arc::clone(&views.ranks),
        status: Arc::clone(&views.status),
        scheduler: Arc::clone(&router.strands().scheduler),
        shards: Arc::clone(&router.strands().shards),
        wake: Arc::clone(&views.wake),
        replica_peers: Arc::clone(&views.replica_peers),
        meters: ReplicaMeters::new(&edge.meters.pool),
    }
    .watch();
}

/// Forwards each value of the source to the scheduler, until the router is down or the source has closed.
fn follow_conditions(mut source: watch::Receiver<RankConditions>, router: &Router) {
    let (views, strands) = (router.views().clone(), router.strands().clone());
    tokio::spawn(async move {
        loop {
            let conditions = source.borrow_and_update().clone();
            publish_conditions(&views, &strands, conditions);
            strands.scheduler.tell(SchedulerMsg::Conditions);
            tokio::select! {
                biased;
                _ = views.status.down() => break,
                // The last value of a closed source stays in force.
                changed = source.changed() => if changed.is_err() { break },
            }
        }
    });
}

impl Router {
    /// Whether the router has its initial workers: `wanted` ones, from so many followed sources. `None` while it must wait.
    ///
    /// # Errors
    /// See [`StartError`]: too few workers, and no source that could send more.
    #[must_use]
    pub fn initial_workers(&self, wanted: u32, sources: usize) -> Option<Result<(), StartError>> {
        // Reads statuses first: a closed source published its workers before its status.
        let statuses = self.discovery();
        initial_workers(wanted, self.workers().len(), sources, &statuses)
    }
}

async fn wait_for_workers(router: &Router, wanted: u32, sources: usize) -> Result<(), StartError> {
    let views = router.views();
    let (mut statuses, mut workers) = (views.discovery.subscribe(), views.fleet.subscribe());
    loop {
        statuses.mark_unchanged();
        workers.mark_unchanged();
        if let Some(result) = router.initial_workers(wanted, sources) {
            return result;
        }
        tokio::select! {
            biased;
            down = views.status.down() => return Err(down.into()),
            _ = statuses.changed() => {}
            _ = workers.changed() => {}
        }
    }
}
