//! Helpers of the tests of a whole router.

pub(crate) mod counters;
#[cfg(feature = "discovery")]
pub(crate) mod pages;

use std::time::Duration;

use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::config::{HealthConfig, SupervisionConfig};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::policy::Policy;
use pointsman::protocol::{
    EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerId, WorkerRank,
};
use pointsman::{Prompt, RouteRequest, Router, RouterBuilder, RouterConfig};

pub(crate) const BLOCK_SIZE: u32 = 4;

pub(crate) fn config() -> RouterConfig {
    let defaults = RouterConfig::default();
    // The engines are names only and respond to no probe. Costs in blocks are independent of time and machine.
    let policy = Policy::Kv;
    RouterConfig {
        block_size: Some(BLOCK_SIZE),
        // A hang of a test lasts as long as the test needs.
        supervision: SupervisionConfig { restarts_max: 1_000_000, hang_timeout_ms: 0 },
        health: HealthConfig { probe_interval_ms: 0, ..defaults.health },
        policy: policy.into(),
        ..defaults
    }
}

/// [`config`] with a change.
pub(crate) fn config_with(change: impl FnOnce(&mut RouterConfig)) -> RouterConfig {
    let mut config = config();
    change(&mut config);
    config
}

/// A router with single-rank workers 0 to `workers` − 1.
pub(crate) async fn router(config: RouterConfig, workers: u64) -> Router {
    started(Router::builder(config), workers).await
}

/// The same from a builder.
pub(crate) async fn started(mut builder: RouterBuilder, workers: u64) -> Router {
    for worker in 0..workers {
        builder = builder.worker(WorkerId(worker), WorkerConfig::at(format!("http://engine-{worker}")));
    }
    builder.start().await.expect("a valid configuration starts")
}

/// A prompt of `blocks` blocks whose content is a function of `seed`. Prompts with equal seeds share a prefix.
pub(crate) fn tokens(seed: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK_SIZE).map(|n| seed.wrapping_mul(0x9e37_79b9) ^ n).collect()
}

/// The event of a rank that has stored a whole prompt, in blocks of [`BLOCK_SIZE`].
pub(crate) fn stored(rank: WorkerRank, tokens: &[u32]) -> RouterEvent {
    stored_in_blocks(rank, tokens, BLOCK_SIZE)
}

/// The event of a rank that has stored a whole prompt.
pub(crate) fn stored_in_blocks(rank: WorkerRank, tokens: &[u32], block_size: u32) -> RouterEvent {
    let scheme = HashScheme::new(block_size.try_into().expect("not zero"));
    let hashed = HashedPrompt::from_tokens(&BlockHasher::new(scheme), tokens, &MmBlocks::NONE);
    let names = hashed.sequence_hashes().iter().map(|hash| EngineHash(!hash.0));
    let blocks = names.zip(hashed.block_hashes().iter());
    let blocks = blocks.map(|(engine_hash, &block_hash)| StoredBlock { engine_hash, block_hash }).collect();
    RouterEvent { rank, tier: StorageTier::Device, data: KvEvent::Stored { parent: None, blocks } }
}

pub(crate) fn cleared(rank: WorkerRank) -> RouterEvent {
    RouterEvent { rank, tier: StorageTier::Device, data: KvEvent::Cleared }
}

/// (requests, blocks, prefill tokens) of each rank, without an additional request.
pub(crate) async fn loads(router: &Router) -> Vec<(u32, u64, u64)> {
    let loads = router.potential_loads(RouteRequest::query(Prompt::Tokens(&[]))).await.expect("a load snapshot");
    loads.iter().map(|l| (l.active_requests, l.potential_decode_blocks, l.potential_prefill_tokens)).collect()
}

pub(crate) async fn assert_at_rest(router: &Router) {
    assert_eq!(router.health().leases, 0, "leases at rest");
    // A thread that delivers messages of others may end after them.
    until("no residue of load", async || loads(router).await.iter().all(|load| *load == (0, 0, 0))).await;
}

/// Suppresses panic reports of injected faults, which would print thousands of backtraces.
pub(crate) fn suppress_fault_reports() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.payload().downcast_ref::<&str>() != Some(&"an injected fault") {
                report(panic);
            }
        }));
    });
}

/// Limit of every wait. It only ends a hang: a successful wait stays far below it, even on a loaded machine.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(120);

/// Yields until `condition` holds. Wall time bounds the wait, also while the tokio clock is paused.
///
/// # Panics
/// After [`WAIT_MAX`], with `awaited` in the message.
#[expect(clippy::disallowed_types, reason = "hangs must end even with tokio's clock paused")]
pub(crate) async fn until(awaited: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = std::time::Instant::now();
    while !condition().await {
        assert!(started.elapsed() < WAIT_MAX, "hung: no {awaited} within {WAIT_MAX:?}");
        tokio::task::yield_now().await;
    }
}
