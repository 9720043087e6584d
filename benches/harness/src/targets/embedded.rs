//! Pointsman's own [`Router`] as a target, through the public API: one router or several over one fleet, or one each for
//! its prefill ranks and its decode ranks, with the bookings of the gateway.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerConfig, WorkerId, WorkerRank};
use pointsman::test_support::MemoryNetwork;
use pointsman::{
    Placement, Prompt, RankReport, ReplicaBus, ReplicaId, ReplicaLife, RouteRequest, Router, RouterConfig,
};

use super::{Call, Routed, Target};
use crate::Failed;
use crate::fleet::{Knowledge, ReplicaSharing, Setup};
use crate::measure::Stopwatch;

/// Timeout of the router's shutdown. All bookings are freed before.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

/// Limit of the wait for the end of all bookings. No figure depends on it.
const SETTLE_MAX: Duration = Duration::from_secs(30);

/// Running routers, which receive the requests in turn, and all events.
#[derive(Debug)]
pub struct Embedded {
    /// Routers of all ranks, or of the prefill ranks.
    routers: Vec<Router>,
    /// Router of the decode ranks, and the number of workers before them.
    decode: Option<(Router, u64)>,
    requests: AtomicUsize,
    /// Whether the policy uses cache contents, so that it predicts cached tokens.
    has_index: bool,
    /// Whether the index has nothing but the contents of KV events.
    has_events_only: bool,
}

impl Embedded {
    /// Starts the routers of `setup` over its fleet, with default settings except those in `setup`. Several routers are
    /// connected in memory.
    ///
    /// With two roles, the first workers prefill. Every prefill is remote, as by default in the gateway. A request that
    /// one of the routers rejects fails.
    ///
    /// # Errors
    /// A router rejects its configuration.
    pub async fn start(setup: &Setup) -> Result<Self, Failed> {
        let config = setup.router_config()?;
        let Some(roles) = setup.disaggregation else { return Self::start_pool(setup, config, |_| true).await };
        let prefill_workers = u64::from(roles.prefill_ranks / setup.fleet.dp_size.max(1));
        let is_prefill = |worker: WorkerId| worker.0 <= prefill_workers;
        let mut of_decode = config.clone().for_decode();
        of_decode.index.enabled = config.index.enabled; // the gateway keeps the index of a decode pool
        let prefill = Self::start_pool(setup, config.for_prefill(), is_prefill).await?;
        let decode = Self::start_pool(setup, of_decode, |worker| !is_prefill(worker)).await?;
        Ok(Self { decode: decode.routers.into_iter().next().map(|router| (router, prefill_workers)), ..prefill })
    }

    /// Starts routers with `config` over the workers of the fleet for which `is_member` is true.
    async fn start_pool(
        setup: &Setup,
        config: RouterConfig,
        is_member: impl Fn(WorkerId) -> bool,
    ) -> Result<Self, Failed> {
        let network = MemoryNetwork::with_delay(Duration::from_millis(setup.replicas.delay_ms.into()));
        let is_sharing = setup.replicas.count > 1 && setup.replicas.sharing == ReplicaSharing::Load;
        let mut routers = Vec::new();
        for id in 1..=u64::from(setup.replicas.count) {
            let mut builder = Router::builder(config.clone());
            if let Some(rule) = setup.router.rule {
                builder = builder.policy(Arc::new(rule));
            }
            if is_sharing {
                let bus: Arc<dyn ReplicaBus> = network.join(ReplicaLife { replica: ReplicaId(id), incarnation: 1 });
                builder = builder.replicas(bus);
            }
            for (worker, engine) in setup.fleet.worker_ids().zip(&setup.engines).filter(|(id, _)| is_member(*id)) {
                let at = WorkerConfig::at(format!("http://worker-{worker}:8000"));
                let config = WorkerConfig {
                    data_parallel_size: setup.fleet.dp_size,
                    max_num_batched_tokens: Some(engine.step_tokens_max),
                    total_kv_blocks: Some(engine.blocks_usable()),
                    ..at
                };
                builder = builder.worker(worker, config);
            }
            routers.push(builder.start().await?);
        }
        let (has_index, has_events_only) = (config.has_index(), setup.router.knowledge == Knowledge::Events);
        Ok(Self { routers, decode: None, requests: AtomicUsize::new(0), has_index, has_events_only })
    }

    fn all(&self) -> impl Iterator<Item = &Router> {
        self.routers.iter().chain(self.decode.iter().map(|(router, _)| router))
    }

    /// What is left in `router`, if anything.
    async fn left(&self, router: &Router) -> Result<Option<String>, Failed> {
        let (health, ranks) = (router.health(), router.rank_reports());
        let waiting: u64 = router.pending().await?.iter().map(|class| class.depth.requests).sum();
        let (bookings, restarts) = (health.leases, health.restarts);
        let booked: u64 = ranks.iter().map(|rank| rank.active_blocks).sum();
        let held: u64 = ranks.iter().filter(|_| self.has_events_only).map(|rank| rank.held_blocks).sum();
        let is_empty = (bookings, booked, waiting, held, restarts) == (0, 0, 0, 0, 0);
        Ok((!is_empty).then(|| {
            format!(
                "{bookings} bookings, {booked} booked blocks, {waiting} waiting requests and {held} index blocks are \
                 left, {restarts} restarts of actors"
            )
        }))
    }

    /// The first router, for uses outside the loops.
    #[must_use]
    pub fn router(&self) -> &Router {
        &self.routers[0]
    }
}

/// Bookings of one request.
#[derive(Debug)]
pub struct Bookings {
    /// Booking of the current leg.
    current: Placement,
    /// That of the decode leg during the prefill leg.
    decode: Option<Placement>,
}

impl Target for Embedded {
    type Handle = Bookings;
    type Event = RouterEvent;

    const NAME: &'static str = "pointsman";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        BlockHasher::new(HashScheme::new(block_size)).hashes(tokens, &MmBlocks::NONE).collect()
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank, tier, data }
    }

    async fn route(&self, call: Call) -> Result<Routed<Bookings>, Failed> {
        let turn = self.requests.fetch_add(1, Relaxed) % self.routers.len();
        let mut request = RouteRequest::new(&call.id, Prompt::Tokens(&call.tokens));
        request.options.session_id = call.session.map(Into::into);
        let decode = match &self.decode {
            Some((router, _)) => Some(router.route(request.clone()).await?),
            None => None,
        };
        let current = self.routers[turn].route(request).await?;
        let cached_tokens = self.has_index.then(|| current.cached_tokens().into());
        let ttft = current.predicted_ttft().filter(|_| decode.is_none());
        let ttft_us = ttft.and_then(|ttft| u64::try_from(ttft.as_micros()).ok());
        Ok(Routed { rank: current.rank(), handle: Bookings { current, decode }, cached_tokens, ttft_us })
    }

    fn decode_rank(&self, handle: &Bookings) -> Option<WorkerRank> {
        handle.decode.as_ref().map(|decode| decode.rank())
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Failed> {
        let first = events.first().map_or(0, |event| event.rank.worker.0);
        if let Some((decode, _)) = self.decode.as_ref().filter(|(_, prefill_workers)| first > *prefill_workers) {
            return Ok(decode.apply_events(events).await?);
        }
        for router in &self.routers[1..] {
            router.apply_events(events.clone()).await?;
        }
        Ok(self.router().apply_events(events).await?)
    }

    async fn prefill_completed(&self, handle: &mut Bookings) -> Result<(), Failed> {
        handle.current.prefill_completed();
        if let Some(decode) = handle.decode.take() {
            handle.current = decode; // the end of the prefill leg's booking
        }
        Ok(())
    }

    async fn output_block(&self, handle: &mut Bookings) -> Result<(), Failed> {
        Ok(handle.current.output_block(None)?)
    }

    fn delivered(&self, handle: &mut Bookings, cached_tokens: u64) {
        handle.current.delivered_cached_tokens(u32::try_from(cached_tokens).unwrap_or(u32::MAX));
    }

    fn bookings(&self) -> Option<usize> {
        Some(self.all().map(|router| router.health().leases).sum())
    }

    /// Clears the caches of all ranks first.
    async fn check_empty(&self) -> Result<(), Failed> {
        for router in self.all() {
            let (tier, data) = (StorageTier::Device, KvEvent::Cleared);
            let cleared = |rank: RankReport| RouterEvent { rank: rank.rank, tier, data: data.clone() };
            router.apply_events(router.rank_reports().into_iter().map(cleared).collect()).await?;
            router.flush().await?;
            let waited = Stopwatch::start();
            while let Some(left) = self.left(router).await? {
                if waited.elapsed() > SETTLE_MAX {
                    return Err(left.into());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }

    async fn free(&self, handle: Bookings) -> Result<(), Failed> {
        drop(handle);
        Ok(())
    }

    async fn shutdown(self) {
        for router in self.routers.into_iter().chain(self.decode.map(|(router, _)| router)) {
            router.shutdown(SHUTDOWN_MAX).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bookings_and_index_blocks_are_residue() {
        let target = Embedded::start(&Setup::new(1, 1)).await.expect("starts");
        let call = Call { id: "held".to_owned(), tokens: vec![7; 200], session: None };
        let held = target.route(call).await.expect("routed");
        let (parent, hashes) = (None, Embedded::hash(&[7; 200], NonZeroU32::new(64).expect("not zero")));
        let data = KvEvent::Stored { parent, blocks: crate::engine::name_blocks(&hashes).into() };
        target.apply_events(vec![target.event(held.rank, StorageTier::Device, data)]).await.expect("applied");
        target.router().flush().await.expect("alive");
        let left = target.left(target.router()).await.expect("alive").expect("a booking");
        assert!(left.starts_with("1 bookings") && left.contains(" 3 index blocks"), "{left}");
        target.free(held.handle).await.expect("freed");
        target.check_empty().await.expect("nothing is left");
    }
}
