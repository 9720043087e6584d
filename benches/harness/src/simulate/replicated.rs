//! Several routers over one fleet as a target: requests in turn, events to all, and load over an in-memory bus.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerRank};
use pointsman::replica::{ReplicaId, ReplicaLife};
use pointsman::{MemoryFaults, MemoryNetwork, Placement, ReplicaBus};

use super::{ReplicaSharing, Setup};
use crate::embedded::Embedded;
use crate::target::{Call, Refusal, Routed, Target};

/// Running routers.
#[derive(Debug)]
pub struct Replicated {
    routers: Vec<Embedded>,
    requests: AtomicUsize,
}

impl Replicated {
    /// Starts the routers of `setup` over a simulated fleet.
    ///
    /// # Errors
    /// A router rejects its configuration.
    pub async fn start_simulated(setup: &Setup) -> Result<Self, Refusal> {
        let delay = Duration::from_micros(setup.replicas.delay_us);
        let network = MemoryNetwork::new(MemoryFaults { delay, seed: setup.router.seed, ..MemoryFaults::default() });
        let mut routers = Vec::new();
        for id in 1..=u64::from(setup.replicas.count) {
            let bus: Arc<dyn ReplicaBus> = network.join(ReplicaLife { replica: ReplicaId(id), incarnation: 1 });
            let sharing = setup.replicas.sharing;
            let router = Embedded::start_replica(setup, |builder| match sharing {
                ReplicaSharing::None => builder,
                ReplicaSharing::Load => builder.replicas(bus),
            });
            routers.push(router.await?);
        }
        Ok(Self { routers, requests: AtomicUsize::new(0) })
    }
}

impl Target for Replicated {
    type Handle = Placement;
    type Event = RouterEvent;

    const NAME: &'static str = "pointsman";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        Embedded::hash(tokens, block_size)
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank, tier, data }
    }

    async fn route(&self, call: Call) -> Result<Routed<Placement>, Refusal> {
        let turn = self.requests.fetch_add(1, Relaxed) % self.routers.len();
        self.routers[turn].route(call).await
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Refusal> {
        for router in &self.routers {
            router.apply_events(events.clone()).await?;
        }
        Ok(())
    }

    async fn prefill_completed(&self, handle: &mut Placement) -> Result<(), Refusal> {
        handle.prefill_completed();
        Ok(())
    }

    async fn output_block(&self, handle: &mut Placement) -> Result<(), Refusal> {
        Ok(handle.output_block(None)?)
    }

    fn delivered(&self, handle: &mut Placement, cached_tokens: u64) {
        self.routers[0].delivered(handle, cached_tokens);
    }

    fn bookings(&self) -> Option<usize> {
        self.routers.iter().map(Embedded::bookings).sum()
    }

    async fn free(&self, handle: Placement) -> Result<(), Refusal> {
        drop(handle);
        Ok(())
    }

    async fn shutdown(self) {
        for router in self.routers {
            router.shutdown().await;
        }
    }
}
