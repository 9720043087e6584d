//! A router that only selects ranks in rotation, to measure the loop itself.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerRank};
use pointsman_bench::Failed;
use pointsman_bench::fleet::Fleet;
use pointsman_bench::targets::{Call, Embedded, Routed, Target};

/// Router without state that selects ranks in rotation.
pub(crate) struct RoundRobin {
    fleet: Fleet,
    requests: AtomicU64,
}

impl RoundRobin {
    pub(crate) fn new(fleet: Fleet) -> Self {
        Self { fleet, requests: AtomicU64::new(0) }
    }
}

impl Target for RoundRobin {
    type Handle = ();
    type Event = RouterEvent;

    const NAME: &'static str = "round-robin";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        Embedded::hash(tokens, block_size)
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank, tier, data }
    }

    async fn route(&self, _call: Call) -> Result<Routed<()>, Failed> {
        let turn = self.requests.fetch_add(1, Relaxed) % self.fleet.ranks() as u64;
        let dp_size = u64::from(self.fleet.dp_size);
        let worker = self.fleet.worker_ids().nth((turn / dp_size) as usize).ok_or("a fleet without workers")?;
        Ok(Routed::new(WorkerRank::new(worker, (turn % dp_size) as u32), ()))
    }

    async fn apply_events(&self, _events: Vec<RouterEvent>) -> Result<(), Failed> {
        Ok(())
    }

    async fn prefill_completed(&self, (): &mut ()) -> Result<(), Failed> {
        Ok(())
    }

    async fn free(&self, (): ()) -> Result<(), Failed> {
        Ok(())
    }

    async fn shutdown(self) {}
}
