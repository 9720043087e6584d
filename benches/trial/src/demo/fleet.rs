//! Fleet of the demo: mock engines behind a gateway, on loopback.
//!
//! A fleet starts with cold caches. It counts as ready when the router reads the KV events of every rank.
//! [`Fleet::shutdown`] stops all parts. [`super::drive`] sends the requests.

use std::net::SocketAddr;
use std::time::Duration;

use pointsman::protocol::{KvEventsConfig, WorkerConfig, WorkerId};
use pointsman::{NamedWorker, Router, RouterConfig, StreamState};
use tokio::time::{Instant, sleep};

use super::{DemoConfig, DemoError, DemoGateway, GatewaySetup, LivePage, Run};
use crate::mock::{EngineRole, HandoverProtocol, MockConfig, MockEngine, RankCounters};

/// Name of the served model.
pub(super) const MODEL: &str = "mock";

/// Number of engines, and number of ranks per engine.
pub(super) const ENGINES: u16 = 4;
pub(super) const RANKS: u16 = 2;

/// Tokens per block, and blocks per rank. A GPU of the modelled size has seven times as many blocks. The value gives
/// each client of the demo about the cache share that it would have on such a GPU among hundreds of clients.
pub(super) const BLOCK_SIZE: u32 = 64;
pub(super) const KV_BLOCKS: u32 = 1024;

/// Maximum number of tokens per step.
const STEP_TOKENS_MAX: u32 = 8192;

/// Timeout for a fleet to become ready.
const READY_MAX: Duration = Duration::from_secs(20);
const READY_POLL: Duration = Duration::from_millis(10);

/// Timeout of `/tokenize`. On a busy machine a late response is better than none: without tokens the router would place
/// the request by load alone.
const TOKENIZE_MAX_MS: u64 = 10_000;

/// Idle timeout of connections. It is long because think times grow at a slow pace.
const IDLE_MAX_MS: u64 = 3_600_000;

/// Time allowed for requests in flight when the gateway shuts down.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// Mock engines and the gateway in front of them.
pub(super) struct Fleet<G> {
    engines: Vec<MockEngine>,
    gateway: G,
}

impl<G: DemoGateway> Fleet<G> {
    /// Starts engines with cold caches and the gateway of a run. Returns when the routers read the events of all ranks.
    pub(super) async fn start(config: &DemoConfig, run: &Run) -> Result<Self, DemoError> {
        let mut engines = Vec::new();
        for n in 0..ENGINES {
            engines.push(MockEngine::start(engine_config(config, run, n)).await?);
        }
        let gateway = G::start(setup(&engines, run, config)).await.map_err(DemoError::Gateway)?;
        let fleet = Self { engines, gateway };
        match fleet.wait_until_ready().await {
            Ok(()) => Ok(fleet),
            Err(reasons) => {
                fleet.shutdown().await;
                Err(DemoError::NotReady(reasons))
            }
        }
    }

    /// Address of the gateway.
    pub(super) fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    pub(super) fn live_page(&self) -> Option<LivePage> {
        self.gateway.live_page()
    }

    pub(super) fn engines(&self) -> &[MockEngine] {
        &self.engines
    }

    /// Counters of every rank.
    pub(super) fn work(&self) -> Vec<RankCounters> {
        self.engines.iter().flat_map(|engine| (0..RANKS).map(|rank| engine.counters(rank))).collect()
    }

    pub(super) async fn shutdown(self) {
        self.gateway.shutdown(DRAIN_MAX).await;
        for engine in self.engines {
            engine.shutdown().await;
        }
    }

    /// Waits for the KV events of all ranks. The error describes the sources that are not live at the deadline.
    async fn wait_until_ready(&self) -> Result<(), String> {
        let routers = self.gateway.routers();
        let (ranks, deadline) = (usize::from(ENGINES * RANKS), Instant::now() + READY_MAX);
        loop {
            let sources: Vec<_> = routers.iter().flat_map(Router::kv_sources).collect();
            let live = sources.iter().filter(|source| source.state == StreamState::Live).count();
            if live == ranks {
                return Ok(());
            }
            if Instant::now() > deadline {
                let reasons: Vec<String> = sources.into_iter().filter_map(|source| source.reason).collect();
                return Err(format!("the events of {live} of {ranks} ranks are read; {}", reasons.join("; ")));
            }
            sleep(READY_POLL).await;
        }
    }
}

fn engine_config(config: &DemoConfig, run: &Run, n: u16) -> MockConfig {
    let handover = (run.prefill_engines > 0).then_some(HandoverProtocol::VllmNixl);
    let role = match handover {
        None => EngineRole::Both,
        Some(_) if n < run.prefill_engines => EngineRole::Prefill,
        Some(_) => EngineRole::Decode,
    };
    MockConfig {
        handover,
        role,
        model: MODEL.to_owned(),
        data_parallel_size: RANKS,
        block_size: BLOCK_SIZE,
        kv_blocks: KV_BLOCKS,
        step_tokens_max: STEP_TOKENS_MAX,
        time_scale: config.time_scale,
        // All engines serve one model, so equal prompts have equal outputs on each of them.
        seed: config.seed,
        ..MockConfig::default()
    }
}

fn setup(engines: &[MockEngine], run: &Run, config: &DemoConfig) -> GatewaySetup {
    let (prefill, engines) = engines.split_at(run.prefill_engines.into());
    let workers = |engines: &[MockEngine]| engines.iter().zip(1..).map(|(engine, id)| worker(engine, id)).collect();
    GatewaySetup {
        model: MODEL.to_owned(),
        router: RouterConfig {
            block_size: Some(BLOCK_SIZE),
            policy: run.policy.into(),
            seed: config.seed,
            ..RouterConfig::default()
        },
        workers: workers(engines),
        prefill_workers: workers(prefill),
        tokenize_timeout_ms: TOKENIZE_MAX_MS,
        idle_timeout_ms: IDLE_MAX_MS,
        has_live_page: config.stay,
    }
}

fn worker(engine: &MockEngine, id: u64) -> NamedWorker {
    let kv_events = KvEventsConfig {
        endpoint: engine.event_endpoint(0),
        replay_endpoint: Some(engine.replay_endpoint(0)),
        topic: String::new(),
    };
    let config = WorkerConfig {
        data_parallel_size: u32::from(RANKS),
        max_num_batched_tokens: Some(STEP_TOKENS_MAX),
        total_kv_blocks: Some(KV_BLOCKS - 1),
        kv_events: Some(kv_events),
        ..WorkerConfig::at(engine.url())
    };
    NamedWorker { id: Some(WorkerId(id)), config, probe: false }
}
