//! Mock engines and a gateway before them, on loopback.
//!
//! Owns them all, from cold caches to the end. Promises that a fleet that is ready has every rank's events read, and that
//! nothing of it is left after [`Fleet::shutdown`]. Leaves requests to [`super::drive`].

use std::net::SocketAddr;
use std::time::Duration;

use pointsman::RouterConfig;
use pointsman::discovery::NamedWorker;
use pointsman::engine_load::series;
use pointsman::ingest::Trust;
use pointsman::protocol::{KvEventsConfig, WorkerConfig, WorkerId};
use pointsman::select::Policy;
use tokio::time::{Instant, sleep};

use super::client::{Client, ClientError};
use super::{DemoConfig, DemoError, DemoGateway, GatewaySetup};
use crate::mock::{MockConfig, MockEngine};

/// What the engines serve.
pub(super) const MODEL: &str = "mock";

/// Engines, and ranks of each.
pub(super) const ENGINES: u16 = 4;
pub(super) const RANKS: u16 = 2;

/// Tokens a block, and blocks a rank. A GPU of the modelled size has seven times as many; these are about as many for
/// each of the demo's clients as such a GPU has for each of the hundreds that it would serve.
pub(super) const BLOCK_SIZE: u32 = 64;
pub(super) const KV_BLOCKS: u32 = 1024;

/// Tokens a step.
const STEP_TOKENS_MAX: u32 = 8192;

/// How long a fleet may take to be ready.
const READY_MAX: Duration = Duration::from_secs(20);
const READY_POLL: Duration = Duration::from_millis(10);

/// How long `/tokenize` may take: on a machine that is busy a late answer is better than none, which would leave a
/// request to load alone.
const TOKENIZE_MAX_MS: u64 = 10_000;

/// How long connections may be idle: at a slow pace clients think for long.
const IDLE_MAX_MS: u64 = 3_600_000;

/// How long requests may take to end with the gateway.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// What one rank has done, in its own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RankWork {
    pub(super) requests: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
}

impl RankWork {
    fn read(page: &str, rank: u16) -> Self {
        Self {
            requests: counter(page, "vllm:request_success_total", rank),
            prompt_tokens: counter(page, "vllm:prompt_tokens_total", rank),
            cached_tokens: counter(page, "vllm:prefix_cache_hits_total", rank),
        }
    }
}

/// A counter of a rank on an engine's Prometheus page; 0 if it is absent.
fn counter(page: &str, name: &str, rank: u16) -> u64 {
    let mut values = series(page).filter(|series| series.name == name).filter_map(|s| s.rank_and_value("engine"));
    values.find(|(of, _)| *of == Some(rank.into())).map_or(0, |(_, value)| value as u64)
}

/// Engines, and the gateway before them.
pub(super) struct Fleet<G> {
    engines: Vec<MockEngine>,
    gateway: G,
}

impl<G: DemoGateway> Fleet<G> {
    /// Starts engines with cold caches, and a gateway that chooses by `policy`; comes back when all events are read.
    pub(super) async fn start(config: &DemoConfig, policy: Policy) -> Result<Self, DemoError> {
        let mut engines = Vec::new();
        for _ in 0..ENGINES {
            engines.push(MockEngine::start(engine_config(config)).await?);
        }
        let gateway = G::start(setup(&engines, policy, config.seed)).await.map_err(DemoError::Gateway)?;
        let fleet = Self { engines, gateway };
        match fleet.wait_until_ready().await {
            Ok(()) => Ok(fleet),
            Err(doubts) => {
                fleet.shutdown().await;
                Err(DemoError::NotReady(doubts))
            }
        }
    }

    /// Where clients ask.
    pub(super) fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    pub(super) fn engines(&self) -> &[MockEngine] {
        &self.engines
    }

    /// What each rank has done, as the engines' pages of metrics say.
    pub(super) async fn work(&self) -> Result<Vec<RankWork>, ClientError> {
        let mut all = Vec::new();
        for engine in &self.engines {
            let page = Client::new(engine.address()).get("/metrics").await?;
            all.extend((0..RANKS).map(|rank| RankWork::read(&page, rank)));
        }
        Ok(all)
    }

    pub(super) async fn shutdown(self) {
        self.gateway.shutdown(DRAIN_MAX).await;
        for engine in self.engines {
            engine.shutdown().await;
        }
    }

    /// What is wrong with the sources of events that are not read by then, in words.
    async fn wait_until_ready(&self) -> Result<(), String> {
        let router = self.gateway.router();
        let (ranks, deadline) = (usize::from(ENGINES * RANKS), Instant::now() + READY_MAX);
        loop {
            let sources = router.kv_sources();
            let live = sources.iter().filter(|source| source.trust == Trust::Live).count();
            if live == ranks {
                return Ok(());
            }
            if Instant::now() > deadline {
                let doubts: Vec<String> = sources.into_iter().filter_map(|source| source.doubt).collect();
                return Err(format!("{live} of {ranks} ranks are read; {}", doubts.join("; ")));
            }
            sleep(READY_POLL).await;
        }
    }
}

fn engine_config(config: &DemoConfig) -> MockConfig {
    MockConfig {
        model: MODEL.to_owned(),
        data_parallel_size: RANKS,
        block_size: BLOCK_SIZE,
        kv_blocks: KV_BLOCKS,
        step_tokens_max: STEP_TOKENS_MAX,
        time_scale: config.time_scale,
        // One model: every engine would give the same answer.
        seed: config.seed,
        ..MockConfig::default()
    }
}

fn setup(engines: &[MockEngine], policy: Policy, seed: u64) -> GatewaySetup {
    GatewaySetup {
        model: MODEL.to_owned(),
        router: RouterConfig { block_size: BLOCK_SIZE, policy, seed, ..RouterConfig::default() },
        workers: engines.iter().zip(1..).map(|(engine, id)| worker(engine, id)).collect(),
        tokenize_timeout_ms: TOKENIZE_MAX_MS,
        idle_timeout_ms: IDLE_MAX_MS,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_s_counters_are_read_from_its_engine_s_page() {
        let page = "# HELP vllm:prompt_tokens_total Prompt tokens.\n# TYPE vllm:prompt_tokens_total counter\n\
            vllm:prompt_tokens_total{model_name=\"mock\",engine=\"0\"} 70\n\
            vllm:prompt_tokens_total{model_name=\"mock\",engine=\"1\"} 71\n\
            vllm:request_success_total{engine=\"1\",model_name=\"mock\"} 3\n";
        assert_eq!(RankWork::read(page, 1), RankWork { requests: 3, prompt_tokens: 71, cached_tokens: 0 });
        assert_eq!(RankWork::read(page, 0).prompt_tokens, 70);
        assert_eq!(RankWork::read(page, 10), RankWork::default());
    }
}
