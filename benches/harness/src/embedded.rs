//! Pointsman's own router as a target, through its public API.

use pointsman::hashing::{BlockHasher, HashScheme, MmBlocks};
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerRank};
use pointsman::{Placement, Prompt, RouteRequest, Router, RouterConfig};

use crate::cli::Replay;
use crate::engine::Change;
use crate::target::{Call, Refusal, Routed, Target};

/// An embedded router.
#[derive(Debug)]
pub struct Embedded(Router);

impl Embedded {
    /// Starts a router with the fleet of `options` registered.
    ///
    /// # Errors
    /// An option that the router's configuration refuses.
    pub async fn start(options: &Replay) -> Result<Self, Refusal> {
        let common = &options.common;
        let policy = serde_json::from_value(serde_json::Value::String(common.policy.clone()))?;
        let index_shards = common.shards.map(u32::try_from).transpose()?;
        let defaults = RouterConfig::default();
        let config = RouterConfig {
            block_size: common.block_size,
            policy,
            seed: common.seed,
            index_shards: index_shards.unwrap_or(defaults.index_shards),
            ..defaults
        };
        let router = Router::builder(config).start().await?;
        for worker in options.fleet().worker_ids() {
            let endpoint = format!("engine-{worker}");
            let config = WorkerConfig { data_parallel_size: common.dp_size, ..WorkerConfig::at(endpoint) };
            router.upsert_worker(worker, config).await?;
        }
        Ok(Self(router))
    }
}

impl Target for Embedded {
    type Handle = Placement;
    type Event = RouterEvent;

    const NAME: &'static str = "pointsman";

    fn hash(tokens: &[u32], block_size: u32) -> Vec<BlockHash> {
        let Ok(block_size) = block_size.try_into() else { return Vec::new() };
        BlockHasher::new(HashScheme::new(block_size)).hashes(tokens, &MmBlocks::NONE).collect()
    }

    fn encode(&self, rank: WorkerRank, blocks: &[StoredBlock], change: &Change, events: &mut Vec<RouterEvent>) {
        let tier = StorageTier::Device;
        if !change.removed.is_empty() {
            events.push(RouterEvent { rank, tier, data: KvEvent::Removed { blocks: change.removed.clone() } });
        }
        let stored = &blocks[change.stored.clone()];
        if !stored.is_empty() {
            let parent = change.stored.start.checked_sub(1).map(|last| blocks[last].engine_hash);
            events.push(RouterEvent { rank, tier, data: KvEvent::Stored { parent, blocks: stored.to_vec() } });
        }
    }

    async fn route(&self, call: Call) -> Result<Routed<Placement>, Refusal> {
        let placement = self.0.route(RouteRequest::new(&call.id, Prompt::Tokens(&call.tokens))).await?;
        Ok(Routed { rank: placement.rank(), handle: placement })
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Refusal> {
        Ok(self.0.apply_events(events).await?)
    }

    async fn prefill_completed(&self, placement: &mut Placement) -> Result<(), Refusal> {
        placement.prefill_completed();
        Ok(())
    }

    async fn free(&self, placement: Placement) -> Result<(), Refusal> {
        drop(placement);
        Ok(())
    }

    async fn shutdown(self) {
        let left = self.0.shutdown(std::time::Duration::from_secs(1)).await;
        debug_assert_eq!(left, 0, "the loop frees what it books");
    }
}
