//! Pointsman's own [`Router`] as a target, through the public API that any gateway uses.

use std::num::NonZeroU32;
use std::time::Duration;

use pointsman::hashing::{BlockHasher, HashScheme, MmBlocks};
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerRank};
use pointsman::{Placement, Prompt, RouteRequest, Router, RouterConfig};

use crate::cli::Replay;
use crate::engine::Change;
use crate::target::{Call, Refusal, Routed, Target};

/// How long a router may take to come to rest; every booking has been freed by then.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

/// The running router.
#[derive(Debug)]
pub struct Embedded(Router);

impl Embedded {
    /// Starts a router over the fleet of `options`, at its defaults but for what they name.
    ///
    /// # Errors
    /// The router refuses its configuration.
    pub async fn start(options: &Replay) -> Result<Self, Refusal> {
        let common = &options.common;
        let defaults = RouterConfig::default();
        let config = RouterConfig {
            block_size: common.block_size.get(),
            policy: common.policy,
            index_shards: common.shards.unwrap_or(defaults.index_shards),
            seed: common.seed,
            ..defaults
        };
        let workers = options.fleet().worker_ids().map(|worker| {
            let at = WorkerConfig::at(format!("http://worker-{worker}:8000"));
            (worker, WorkerConfig { data_parallel_size: common.dp_size, max_num_batched_tokens: Some(8_192), ..at })
        });
        let builder = workers.fold(Router::builder(config), |builder, (worker, config)| builder.worker(worker, config));
        Ok(Self(builder.start().await?))
    }
}

impl Target for Embedded {
    type Handle = Placement;
    type Event = RouterEvent;

    const NAME: &'static str = "pointsman";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        BlockHasher::new(HashScheme::new(block_size)).hashes(tokens, &MmBlocks::NONE).collect()
    }

    fn encode(&self, rank: WorkerRank, blocks: &[StoredBlock], change: &Change, events: &mut Vec<RouterEvent>) {
        let mut push = |data| events.push(RouterEvent { rank, tier: StorageTier::Device, data });
        if !change.removed.is_empty() {
            push(KvEvent::Removed { blocks: change.removed.clone() });
        }
        if !change.stored.is_empty() {
            push(KvEvent::Stored { parent: change.parent(blocks), blocks: blocks[change.stored.clone()].to_vec() });
        }
    }

    async fn route(&self, call: Call) -> Result<Routed<Placement>, Refusal> {
        let handle = self.0.route(RouteRequest::new(&call.id, Prompt::Tokens(&call.tokens))).await?;
        Ok(Routed { rank: handle.rank(), handle })
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Refusal> {
        Ok(self.0.apply_events(events).await?)
    }

    async fn prefill_completed(&self, handle: &mut Placement) -> Result<(), Refusal> {
        handle.prefill_completed();
        Ok(())
    }

    async fn free(&self, handle: Placement) -> Result<(), Refusal> {
        drop(handle);
        Ok(())
    }

    async fn shutdown(self) {
        self.0.shutdown(SHUTDOWN_MAX).await;
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
    fn kv_finds_what_random_misses() {
        let fleet = "--limit 600 --inflight 32 --workers 4 --dp-size 2";
        let kv = replay(&format!("{fleet} --clients 3 --shards 2"));
        let random = replay(&format!("{fleet} --policy random"));
        assert_eq!((kv.requests, kv.policy), (300, pointsman::select::Policy::Kv));
        assert!(kv.hit_rate > random.hit_rate + 0.05, "{} against {}", kv.hit_rate, random.hit_rate);
    }

    #[test]
    fn a_refused_configuration_names_the_field() {
        let arguments = Arguments::parse_from(["test", "--shards", "65"]);
        let error = arguments.replay.run(Embedded::start).expect_err("refused").to_string();
        assert_eq!(error, "cannot start pointsman: index_shards is 65, must be 1 to 64");
    }
}
