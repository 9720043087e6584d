//! Pointsman's own [`Router`] as a target, through the public API: one router or several over one fleet.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerConfig, WorkerId, WorkerRank};
use pointsman::{
    Placement, Prompt, ReplicaBus, RouteRequest, Router, RouterConfig,
    internals::{MemoryFaults, MemoryNetwork},
};
use pointsman::{ReplicaId, ReplicaLife};

use super::{Call, Routed, Target};
use crate::Failed;
use crate::fleet::{ReplicaSharing, Setup};

/// Timeout of the router's shutdown. All bookings are freed before.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

/// Running routers, which receive the requests in turn, and all events.
#[derive(Debug)]
pub struct Embedded {
    routers: Vec<Router>,
    requests: AtomicUsize,
    /// Whether the policy uses cache contents, so that it predicts cached tokens.
    has_index: bool,
}

impl Embedded {
    /// Starts the routers of `setup` over its fleet, with default settings except those in `setup`. Several routers are
    /// connected in memory.
    ///
    /// # Errors
    /// A router rejects its configuration.
    pub async fn start(setup: &Setup) -> Result<Self, Failed> {
        Self::start_pool(setup, setup.router_config()?, |_| true).await
    }

    /// Starts routers with `config` over the workers of the fleet for which `is_member` is true.
    ///
    /// # Errors
    /// As for [`Embedded::start`].
    pub(super) async fn start_pool(
        setup: &Setup,
        config: RouterConfig,
        is_member: impl Fn(WorkerId) -> bool,
    ) -> Result<Self, Failed> {
        let delay = Duration::from_millis(setup.replicas.delay_ms.into());
        let network = MemoryNetwork::new(MemoryFaults { delay, seed: setup.router.seed, ..MemoryFaults::default() });
        let is_sharing = setup.replicas.count > 1 && setup.replicas.sharing == ReplicaSharing::Load;
        let mut routers = Vec::new();
        for id in 1..=u64::from(setup.replicas.count) {
            let mut builder = Router::builder(config.clone());
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
        let has_index = config.has_index();
        Ok(Self { routers, requests: AtomicUsize::new(0), has_index })
    }

    /// The first router, for uses outside the loops.
    #[must_use]
    pub fn router(&self) -> &Router {
        &self.routers[0]
    }
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

    async fn route(&self, call: Call) -> Result<Routed<Placement>, Failed> {
        let turn = self.requests.fetch_add(1, Relaxed) % self.routers.len();
        let request = RouteRequest::new(&call.id, Prompt::Tokens(&call.tokens));
        let handle = self.routers[turn].route(request).await?;
        let cached_tokens = self.has_index.then(|| handle.cached_tokens().into());
        let ttft_us = handle.predicted_ttft().and_then(|ttft| u64::try_from(ttft.as_micros()).ok());
        Ok(Routed { cached_tokens, ttft_us, ..Routed::new(handle.rank(), handle) })
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Failed> {
        for router in &self.routers[1..] {
            router.apply_events(events.clone()).await?;
        }
        Ok(self.router().apply_events(events).await?)
    }

    async fn prefill_completed(&self, handle: &mut Placement) -> Result<(), Failed> {
        handle.prefill_completed();
        Ok(())
    }

    async fn output_block(&self, handle: &mut Placement) -> Result<(), Failed> {
        Ok(handle.output_block(None)?)
    }

    fn delivered(&self, handle: &mut Placement, cached_tokens: u64) {
        handle.delivered_cached_tokens(u32::try_from(cached_tokens).unwrap_or(u32::MAX));
    }

    fn bookings(&self) -> Option<usize> {
        Some(self.routers.iter().map(|router| router.health().leases).sum())
    }

    async fn free(&self, handle: Placement) -> Result<(), Failed> {
        drop(handle);
        Ok(())
    }

    async fn shutdown(self) {
        for router in self.routers {
            router.shutdown(SHUTDOWN_MAX).await;
        }
    }
}
