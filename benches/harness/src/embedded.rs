//! Pointsman's own [`Router`] as a target, through the public API, with optional injection of actor crashes.

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use pointsman::config::{EventMode, SpeculativeModel};
use pointsman::error::RouteError;
use pointsman::hashing::{BlockHasher, HashScheme, MmBlocks};
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerConfig, WorkerId, WorkerRank};
use pointsman::{Fault, Placement, Prompt, RouteRequest, Router, RouterBuilder, RouterConfig};

use crate::cli::{Knowledge, Replay};
use crate::simulate::Setup;
use crate::target::{Call, Refusal, Routed, Target};

/// Timeout of the router's shutdown. All bookings are freed before.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

/// Lifetime of a speculative entry that bridges the delay of events.
const PREDICTED_TTL_MS: u64 = 5_000;

/// A running router.
#[derive(Debug)]
pub struct Embedded {
    router: Router,
    /// Whether its policy uses cache contents, so that it predicts cached tokens.
    has_index: bool,
    injector: Option<FaultInjector>,
}

/// Injects a crash of an actor every `every` requests.
#[derive(Debug)]
struct FaultInjector {
    every: NonZeroU32,
    requests: AtomicU32,
    /// Number of requests that the router returned as lost after repeated crashes and that were routed again.
    lost: AtomicU32,
}

impl Embedded {
    /// Starts a router over the fleet of `options`, with default settings except those in `options`.
    ///
    /// # Errors
    /// The router rejects its configuration.
    pub async fn start(options: &Replay) -> Result<Self, Refusal> {
        let common = &options.common;
        let mut config = knowing_by(common.knowledge, RouterConfig::default());
        config.block_size = Some(common.block_size.get());
        config.policy = common.policy.into();
        config.seed = common.seed;
        if let Some(shards) = common.shards {
            config.index.shards = shards;
        }
        if options.kill_every.is_some() {
            config.supervision.restarts_max = u32::MAX;
        }
        let workers = options
            .fleet()
            .worker_ids()
            .map(|worker| (worker, worker_config(worker, common.dp_size, 8_192, u32::try_from(common.kv_blocks).ok())));
        Self::over(Router::builder(config), workers, options.kill_every.map(FaultInjector::new)).await
    }

    /// Starts a router over a simulated fleet, with default settings except those in `setup`.
    ///
    /// # Errors
    /// The router rejects its configuration.
    pub async fn start_simulated(setup: &Setup) -> Result<Self, Refusal> {
        Self::start_replica(setup, |builder| builder).await
    }

    /// The same, with further settings.
    pub(crate) async fn start_replica(
        setup: &Setup,
        adapt: impl FnOnce(RouterBuilder) -> RouterBuilder,
    ) -> Result<Self, Refusal> {
        Self::over(adapt(builder(setup, setup.router_config()?)), simulated_workers(setup), None).await
    }

    /// Starts a router with `config` over the workers of a simulated fleet for which `is_member` is true.
    ///
    /// # Errors
    /// The router rejects its configuration.
    pub(crate) async fn start_pool(
        setup: &Setup,
        config: RouterConfig,
        is_member: impl Fn(WorkerId) -> bool,
    ) -> Result<Self, Refusal> {
        let workers = simulated_workers(setup).filter(|(worker, _)| is_member(*worker));
        Self::over(builder(setup, config), workers, None).await
    }

    async fn over(
        builder: RouterBuilder,
        workers: impl Iterator<Item = (WorkerId, WorkerConfig)>,
        injector: Option<FaultInjector>,
    ) -> Result<Self, Refusal> {
        let add = |builder: RouterBuilder, (worker, config)| builder.worker(worker, config);
        let router = workers.fold(builder, add).start().await?;
        let has_index = router.config().has_index();
        Ok(Self { router, has_index, injector })
    }

    /// The router, for uses outside the closed loop.
    #[must_use]
    pub fn router(&self) -> &Router {
        &self.router
    }
}

/// Adapts `config` to a simulated fleet with the given source of cache knowledge.
pub(crate) fn knowing_by(knowledge: Knowledge, mut config: RouterConfig) -> RouterConfig {
    let has_events = !matches!(knowledge, Knowledge::Ttl | Knowledge::Lru);
    config.events.mode = if has_events { EventMode::On } else { EventMode::Off };
    config.index.speculative.model = match knowledge {
        Knowledge::Lru => SpeculativeModel::Lru,
        Knowledge::Events | Knowledge::Predicted | Knowledge::Ttl => SpeculativeModel::Ttl,
    };
    config.index.speculative.with_events_ttl_ms = (knowledge == Knowledge::Predicted).then_some(PREDICTED_TTL_MS);
    config.health.probe_interval_ms = 0; // simulated workers have no endpoint to probe
    config
}

fn builder(setup: &Setup, config: RouterConfig) -> RouterBuilder {
    Router::builder(config).queries_every_rank(setup.router.queries_every_rank)
}

/// Workers of a simulated fleet.
fn simulated_workers(setup: &Setup) -> impl Iterator<Item = (WorkerId, WorkerConfig)> {
    setup.fleet.worker_ids().zip(&setup.engines).map(|(worker, engine)| {
        let blocks = Some(engine.blocks_usable());
        (worker, worker_config(worker, setup.fleet.dp_size, engine.step_tokens_max, blocks))
    })
}

pub(crate) fn worker_config(
    worker: WorkerId,
    dp_size: u32,
    step_tokens_max: u32,
    kv_blocks: Option<u32>,
) -> WorkerConfig {
    let at = WorkerConfig::at(format!("http://worker-{worker}:8000"));
    WorkerConfig {
        data_parallel_size: dp_size,
        max_num_batched_tokens: Some(step_tokens_max),
        total_kv_blocks: kv_blocks,
        ..at
    }
}

impl FaultInjector {
    fn new(every: NonZeroU32) -> Self {
        suppress_fault_reports();
        Self { every, requests: AtomicU32::new(0), lost: AtomicU32::new(0) }
    }

    /// Counts a placed request and injects the next fault if it is due.
    fn count(&self, router: &Router, rank: WorkerRank) {
        let requests = self.requests.fetch_add(1, Relaxed) + 1;
        if requests.is_multiple_of(self.every.get()) {
            let faults = [Fault::Scheduler, Fault::Radix(rank), Fault::Sequence(rank)];
            let kind = (requests / self.every - 1) as usize % faults.len();
            router.inject(faults[kind]); // no effect under a policy without an index
        }
    }

    /// Writes a summary. A crash of an actor that is already down causes no second restart.
    fn write(&self, router: &Router, mut out: impl Write) -> io::Result<()> {
        let (health, injected) = (router.health(), self.requests.load(Relaxed) / self.every);
        let (restarts, cold) = (health.restarts, health.cold.len());
        let lost = self.lost.load(Relaxed);
        writeln!(
            out,
            "{injected} faults injected, {restarts} actors restarted, {lost} requests lost and retried, \
             {cold} of {} ranks cold at the end",
            health.ranks
        )
    }
}

/// Suppresses the panic message, and a backtrace enabled by the environment, of injected crashes.
fn suppress_fault_reports() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&"an injected fault") {
                others(info);
            }
        }));
    });
}

impl Target for Embedded {
    type Handle = Placement;
    type Event = RouterEvent;

    const NAME: &'static str = "pointsman";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        BlockHasher::new(HashScheme::new(block_size)).hashes(tokens, &MmBlocks::NONE).collect()
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank, tier, data }
    }

    async fn route(&self, call: Call) -> Result<Routed<Placement>, Refusal> {
        loop {
            let request = RouteRequest::new(&call.id, Prompt::Tokens(&call.tokens));
            match (self.router.route(request).await, &self.injector) {
                (Ok(handle), _) => {
                    let cached_tokens = self.has_index.then(|| handle.cached_tokens().into());
                    let ttft = handle.predicted_ttft().and_then(|ttft| u64::try_from(ttft.as_micros()).ok());
                    return Ok(Routed { cached_tokens, ttft_us: ttft, ..Routed::new(handle.rank(), handle) });
                }
                (Err(RouteError::Lost { .. }), Some(injector)) => injector.lost.fetch_add(1, Relaxed),
                (Err(error), _) => return Err(error.into()),
            };
        }
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Refusal> {
        Ok(self.router.apply_events(events).await?)
    }

    async fn prefill_completed(&self, handle: &mut Placement) -> Result<(), Refusal> {
        handle.prefill_completed();
        if let Some(injector) = &self.injector {
            injector.count(&self.router, handle.rank());
        }
        Ok(())
    }

    async fn output_block(&self, handle: &mut Placement) -> Result<(), Refusal> {
        Ok(handle.output_block(None)?)
    }

    fn delivered(&self, handle: &mut Placement, cached_tokens: u64) {
        handle.delivered_cached_tokens(u32::try_from(cached_tokens).unwrap_or(u32::MAX));
    }

    fn bookings(&self) -> Option<usize> {
        Some(self.router.health().leases)
    }

    async fn free(&self, handle: Placement) -> Result<(), Refusal> {
        drop(handle);
        Ok(())
    }

    async fn shutdown(self) {
        if let Some(injector) = &self.injector {
            // A write error on standard error is ignored, because there is no other output.
            let _ = injector.write(&self.router, io::stderr());
        }
        self.router.shutdown(SHUTDOWN_MAX).await;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::report::Report;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        replay: Replay,
    }

    fn replay(arguments: &str) -> Report {
        let arguments = Arguments::parse_from(["test"].into_iter().chain(arguments.split_whitespace()));
        arguments.replay.run(Embedded::start).expect("runs")
    }

    #[test]
    fn kv_has_a_higher_hit_rate_than_random() {
        let fleet = "--limit 600 --inflight 32 --workers 4 --dp-size 2";
        let kv = replay(&format!("{fleet} --policy kv --clients 3 --shards 2"));
        let random = replay(&format!("{fleet} --policy random"));
        assert_eq!((kv.requests, kv.policy), (300, pointsman::policy::Policy::Kv));
        assert!(kv.hit_rate > random.hit_rate + 0.05, "{} against {}", kv.hit_rate, random.hit_rate);
    }

    #[test]
    fn routing_survives_a_crash_of_every_kind_of_actor() {
        let fleet = "--limit 600 --inflight 32 --workers 4 --dp-size 2 --clients 5 --shards 2";
        let drilled = replay(&format!("{fleet} --kill-every 7"));
        assert_eq!((drilled.requests, drilled.kill_every), (300, NonZeroU32::new(7)));
    }

    #[tokio::test]
    async fn faults_are_injected_at_the_configured_interval() {
        let options = Arguments::parse_from(["test", "--workers", "2", "--kill-every", "2"]).replay;
        let target = Embedded::start(&options).await.expect("starts");
        for request in 1..=12_u32 {
            let call = Call { id: request.to_string(), tokens: vec![request; 200] };
            let mut handle = target.route(call).await.expect("placed").handle;
            target.prefill_completed(&mut handle).await.expect("counted");
            while target.router.health().restarts < u64::from(request / 2) {
                tokio::task::yield_now().await;
            }
        }
        let mut text = Vec::new();
        target.injector.as_ref().expect("an injected fault").write(&target.router, &mut text).expect("written");
        let text = String::from_utf8(text).expect("text");
        assert!(text.starts_with("6 faults injected, 6 actors restarted, 0 requests lost"), "{text}");
        assert!(text.ends_with("2 of 2 ranks cold at the end\n"), "{text}");
        target.shutdown().await;
    }

    #[test]
    fn a_rejected_configuration_names_the_field() {
        let arguments = Arguments::parse_from(["test", "--shards", "65"]);
        let error = arguments.replay.run(Embedded::start).expect_err("refused").to_string();
        assert_eq!(error, "cannot start pointsman: index.shards is 65, must be 1 to 64");
    }
}
