//! Prefill pool and decode pool over one fleet as a target: one router for each, with the bookings of the gateway.

use std::num::NonZeroU32;

use pointsman::Placement;
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerId, WorkerRank};

use super::{Call, Embedded, Routed, Target};
use crate::Failed;
use crate::fleet::Setup;

/// Running routers of both pools.
#[derive(Debug)]
pub struct DisaggregatedPools {
    prefill: Embedded,
    decode: Embedded,
    prefill_workers: u64,
}

/// Bookings of one request.
#[derive(Debug)]
pub struct PoolPlacements {
    /// None after the prefill leg.
    prefill: Option<Placement>,
    decode: Placement,
}

impl DisaggregatedPools {
    /// Starts both routers over the fleet of `setup`, whose first workers prefill.
    ///
    /// Every prefill is remote, as by default in the gateway. A request that one of the pools rejects fails.
    ///
    /// # Errors
    /// The setup has no roles, or a router rejects its configuration.
    pub async fn start(setup: &Setup) -> Result<Self, Failed> {
        let disaggregation = setup.disaggregation.ok_or("the setup has no prefill ranks")?;
        let prefill_workers = u64::from(disaggregation.prefill_ranks / setup.fleet.dp_size.max(1));
        let is_prefill = |worker: WorkerId| worker.0 <= prefill_workers;
        let config = setup.router_config()?;
        let mut decode = config.clone().for_decode();
        decode.index.enabled = config.index.enabled; // the gateway keeps the index of a decode pool
        Ok(Self {
            prefill: Embedded::start_pool(setup, config.for_prefill(), is_prefill).await?,
            decode: Embedded::start_pool(setup, decode, |worker| !is_prefill(worker)).await?,
            prefill_workers,
        })
    }
}

impl Target for DisaggregatedPools {
    type Handle = PoolPlacements;
    type Event = RouterEvent;

    const NAME: &'static str = "pointsman";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        Embedded::hash(tokens, block_size)
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank, tier, data }
    }

    async fn route(&self, call: Call) -> Result<Routed<PoolPlacements>, Failed> {
        let Call { id, tokens } = call;
        let decode = self.decode.route(Call { id: id.clone(), tokens: tokens.clone() }).await?.handle;
        let Routed { rank, handle, cached_tokens, ttft_us: _ } = self.prefill.route(Call { id, tokens }).await?;
        let placements = PoolPlacements { prefill: Some(handle), decode };
        Ok(Routed { cached_tokens, ..Routed::new(rank, placements) })
    }

    fn decode_rank(&self, handle: &PoolPlacements) -> Option<WorkerRank> {
        Some(handle.decode.rank())
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Failed> {
        let is_prefill = events.first().is_some_and(|event| event.rank.worker.0 <= self.prefill_workers);
        let pool = if is_prefill { &self.prefill } else { &self.decode };
        pool.apply_events(events).await
    }

    async fn prefill_completed(&self, handle: &mut PoolPlacements) -> Result<(), Failed> {
        match handle.prefill.take() {
            Some(mut prefill) => {
                self.prefill.prefill_completed(&mut prefill).await?;
                self.prefill.free(prefill).await
            }
            None => self.decode.prefill_completed(&mut handle.decode).await,
        }
    }

    async fn output_block(&self, handle: &mut PoolPlacements) -> Result<(), Failed> {
        self.decode.output_block(&mut handle.decode).await
    }

    fn delivered(&self, handle: &mut PoolPlacements, cached_tokens: u64) {
        if let Some(prefill) = &mut handle.prefill {
            self.prefill.delivered(prefill, cached_tokens);
        }
    }

    fn bookings(&self) -> Option<usize> {
        [&self.prefill, &self.decode].into_iter().map(Embedded::bookings).sum()
    }

    async fn free(&self, handle: PoolPlacements) -> Result<(), Failed> {
        drop(handle);
        Ok(())
    }

    async fn shutdown(self) {
        self.prefill.shutdown().await;
        self.decode.shutdown().await;
    }
}
