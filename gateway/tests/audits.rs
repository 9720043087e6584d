//! Audits of the index against mock engines, over their replay sockets.

use pointsman::internals::KvAuditStatus;
use pointsman::internals::config::EventsConfig;
use pointsman::protocol::WorkerId;
use pointsman::{Router, RouterConfig, StreamState};
use pointsman_trial::mock::{Dialect, Fault, Faults, MockConfig, MockEngine};
use serde_json::json;
use tokio::time::Instant;

use crate::common::proxy::{published, request, until};

const BLOCK_SIZE: u32 = 4;

async fn engine(dialect: Dialect, faults: Faults) -> MockEngine {
    // Few blocks, so that most requests evict some; the host tier holds a part of them.
    let config = MockConfig {
        dialect,
        faults,
        block_size: BLOCK_SIZE,
        kv_blocks: 48,
        host_kv_blocks: 16,
        max_model_len: Some(120),
        time_scale: 0.0,
        ..MockConfig::default()
    };
    MockEngine::start(config).await.expect("the engine starts")
}

async fn router(engine: &MockEngine) -> Router {
    let events = EventsConfig { audit_interval_ms: 100, ..EventsConfig::default() };
    let config = RouterConfig { block_size: Some(BLOCK_SIZE), events, ..RouterConfig::default() };
    Router::builder(config).worker(WorkerId(1), published(engine)).start().await.expect("starts")
}

/// Sends prompts, each of up to 20 blocks, some behind the start of an earlier one.
async fn serve(engine: &MockEngine, prompts: std::ops::Range<u32>) {
    for n in prompts {
        let length = 8 + n * 7 % 72;
        let tokens: Vec<u32> = (0..length).map(|at| if at < 16 { n % 5 * 100 + at } else { n * 1_000 + at }).collect();
        let body = json!({ "prompt": tokens, "max_tokens": 2 }).to_string();
        let answer = request(engine.address(), "POST", "/v1/completions", "", body.as_bytes()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

fn audit(router: &Router) -> Option<KvAuditStatus> {
    router.kv_sources().into_iter().next().and_then(|source| source.audit)
}

/// Waits for an audit that ends after this call with the result.
async fn until_result(router: &Router, result: &str) {
    let called = Instant::now();
    let is_new = |audit: KvAuditStatus| audit.result == result && router.now().since(audit.at) < called.elapsed();
    until(result, || audit(router).is_some_and(is_new)).await;
}

#[tokio::test]
async fn an_omitted_removal_is_found_named_and_healed() {
    for dialect in [Dialect::VllmMap, Dialect::SglangMap] {
        let engine = engine(dialect, Faults::default()).await;
        let router = router(&engine).await;
        serve(&engine, 0..40).await;
        until_result(&router, "equal").await;
        assert_eq!(audit(&router).expect("audited").difference, None, "{dialect:?}");

        engine.set_faults(Faults { omit_removal_share: 0.05, ..Faults::default() }).expect("valid");
        let omitted = || engine.faults().done().get(&Fault::OmitRemoval).copied().unwrap_or_default();
        let mut next = 40;
        while omitted() == 0 {
            serve(&engine, next..next + 1).await;
            next += 1;
        }
        engine.set_faults(Faults::default()).expect("valid");
        until("difference", || audit(&router).is_some_and(|audit| audit.difference.is_some())).await;
        let found = audit(&router).and_then(|audit| audit.difference).expect("found");
        assert_eq!((found.missing_blocks, found.heal), (0, "forget"), "{dialect:?}");
        // The fault can strike the same request twice.
        assert!((1..=omitted() as usize).contains(&found.stale_blocks), "{dialect:?}: {found:?}");
        assert_eq!(found.examples.len(), found.stale_blocks.min(8), "{dialect:?}");
        until_result(&router, "equal").await;
        serve(&engine, next..next + 20).await;
        until_result(&router, "equal").await;
        let status = router.kv_sources().remove(0);
        assert_eq!(status.state, StreamState::Live, "healing loses no block");
        engine.shutdown().await;
    }
}
