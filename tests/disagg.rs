//! A request on two pools: bookings per pool, cleanup after a failure of one side, and conditions for skipping the
//! prefill pool.

use pointsman::error::RouteError;
use pointsman::internals::DisaggPlacement;
use pointsman::internals::disagg::{DisaggError, Side, SkipReason};
use pointsman::protocol::{KvTransferEnforcement, WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{
    AddRequest, DisaggConfig, Disaggregated, Placement, Prompt, Rejection, RequestOptions, RouteRequest, Router,
    RouterConfig, SkipPolicy, WhyLocal,
};

use crate::common::{assert_at_rest, config, loads, router, stored, tokens};

/// Prefill workers 0 to `prefills` − 1, and decode workers likewise. The decode pool has an index.
async fn pools(prefills: u64, decodes: u64, disagg: DisaggConfig) -> Disaggregated {
    let mut decode = config().for_decode();
    decode.index.enabled = true;
    let (prefill, decode) = (router(config().for_prefill(), prefills).await, router(decode, decodes).await);
    Disaggregated::new(prefill, decode, disagg).expect("valid settings")
}

fn enabled(policy: SkipPolicy) -> DisaggConfig {
    let prefill_busy_frac = policy.looks_at_load().then_some(0.5);
    DisaggConfig { enabled: true, policy, prefill_busy_frac, ..DisaggConfig::default() }
}

async fn route(pools: &Disaggregated, id: &str, prompt: &[u32]) -> Result<DisaggPlacement, DisaggError> {
    pools.route(RouteRequest::new(id, Prompt::Tokens(prompt))).await
}

#[tokio::test]
async fn a_request_is_booked_on_both_sides_until_its_prefill_is_done() {
    let pools = pools(3, 1, DisaggConfig::default()).await;
    let prompt = tokens(1, 20);
    pools.prefill().apply_events(vec![stored(rank(2), &prompt[..40])]).await.expect("up");
    let mut placement = route(&pools, "a", &prompt).await.expect("placed");
    let prefill = placement.prefill().expect("remote");
    assert_eq!((prefill.rank(), prefill.overlap_blocks()), (rank(2), 10));
    assert_eq!(placement.decode().rank(), rank(0));
    assert_eq!(loads(pools.prefill()).await[2], (1, 0, 40), "tokens to compute and no blocks");
    assert_eq!(loads(pools.decode()).await[0], (1, 20, 0), "blocks and no tokens to compute");
    placement.prefill_completed();
    placement.prefill_completed();
    assert!(placement.prefill().is_none() && placement.why_local().is_none());
    assert_at_rest(pools.prefill()).await;
    placement.output_block(None).expect("no decay");
    assert_eq!(loads(pools.decode()).await[0], (1, 21, 0));
    drop(placement);
    assert_at_rest(pools.decode()).await;
}

#[tokio::test]
async fn pools_with_different_block_sizes_hash_separately() {
    let prefill = router(RouterConfig { block_size: Some(8), ..config().for_prefill() }, 2).await;
    let decode = router(config().for_decode(), 1).await;
    let pools = Disaggregated::new(prefill, decode, DisaggConfig::default()).expect("valid settings");
    let placement = route(&pools, "a", &tokens(1, 20)).await.expect("placed");
    assert_eq!(placement.prefill().map(|prefill| prefill.overlap_blocks()), Some(0));
    assert_eq!(loads(pools.decode()).await, [(1, 20, 0)]);
    assert_eq!(loads(pools.prefill()).await.iter().map(|load| load.2).sum::<u64>(), 80);
}

#[tokio::test]
async fn mostly_cached_prompts_stay_on_the_decode_rank() {
    let pools = pools(2, 2, enabled(SkipPolicy::IslBounding)).await;
    let prompt = tokens(1, 20);
    pools.decode().apply_events(vec![stored(rank(1), &prompt[..64])]).await.expect("up");
    let placement = route(&pools, "a", &prompt).await.expect("placed");
    assert_eq!(placement.decode().rank(), rank(1));
    let short = SkipReason::ShortPrefill { effective_tokens: 16, prompt_tokens: 80 };
    assert_eq!(placement.why_local(), Some(&WhyLocal::Skipped(short)));
    assert_at_rest(pools.prefill()).await;
    let fresh = route(&pools, "b", &tokens(2, 20)).await.expect("placed");
    assert!(fresh.prefill().is_some(), "no cached block: {:?}", fresh.why_local());
}

#[tokio::test]
async fn an_error_names_its_side_and_frees_all_bookings() {
    let no_prefill = pools(0, 1, DisaggConfig::default()).await;
    let prompt = tokens(1, 10);
    let error = route(&no_prefill, "a", &prompt).await.expect_err("no prefill rank");
    assert_eq!(error, DisaggError { side: Side::Prefill, error: RouteError::Rejected(Rejection::NoRanks) });
    assert_eq!(error.to_string(), "prefill side: no rank is registered");
    assert_at_rest(no_prefill.decode()).await;

    let no_decode = pools(1, 0, DisaggConfig { decode_fallback: true, ..DisaggConfig::default() }).await;
    let error = route(&no_decode, "a", &prompt).await.expect_err("no decode rank");
    assert_eq!(error, DisaggError { side: Side::Decode, error: RouteError::Rejected(Rejection::NoRanks) });
    assert_at_rest(no_decode.prefill()).await;
}

#[tokio::test]
async fn a_saturated_prefill_pool_does_not_fall_back() {
    let mut prefill = config().for_prefill();
    prefill.queue.threshold = Some(0.1);
    prefill.queue.unstated_batched_tokens = Some(100);
    let (prefill, decode) = (router(prefill, 1).await, router(config().for_decode(), 1).await);
    let fallback = DisaggConfig { decode_fallback: true, ..DisaggConfig::default() };
    let pools = Disaggregated::new(prefill, decode, fallback).expect("valid settings");
    let _first = route(&pools, "a", &tokens(1, 20)).await.expect("placed");
    let options = RequestOptions { do_not_queue: true, ..RequestOptions::default() };
    let prompt = tokens(2, 20);
    let request = RouteRequest { options, ..RouteRequest::new("b", Prompt::Tokens(&prompt)) };
    let error = pools.route(request).await.expect_err("80 tokens of 10 wait");
    let is_saturated =
        matches!(error.error, RouteError::Rejected(Rejection::Backpressure(_) | Rejection::AllOverloaded { .. }));
    assert!(error.side == Side::Prefill && is_saturated, "{error}");
    assert_eq!(pools.decode().health().leases, 1);
}

#[tokio::test]
async fn duplicate_ids_do_not_fall_back() {
    let pools = pools(1, 1, DisaggConfig { decode_fallback: true, ..DisaggConfig::default() }).await;
    let prompt = tokens(1, 10);
    pools.prefill().add_request(AddRequest::new("a", rank(0), Prompt::Tokens(&prompt))).await.expect("booked");
    let error = route(&pools, "a", &prompt).await.expect_err("taken");
    assert!(matches!(error, DisaggError { side: Side::Prefill, error: RouteError::DuplicateRequest(_) }), "{error}");
    assert_at_rest(pools.decode()).await;
}

#[tokio::test]
async fn incompatible_pools_are_rejected() {
    let (prefill, decode) = (router(config().for_prefill(), 1).await, router(config().for_decode(), 1).await);
    let swapped = Disaggregated::new(decode.clone(), prefill.clone(), DisaggConfig::default());
    assert_eq!(
        swapped.expect_err("swapped").to_string(),
        "prefill.role is decode, must be prefill; decode.role is prefill, must be decode"
    );
    let blind = Disaggregated::new(prefill.clone(), decode.clone(), enabled(SkipPolicy::IslBounding));
    assert_eq!(
        blind.expect_err("blind").to_string(),
        "decode.index.enabled is false, must be true where policy is isl_bounding or isl_or_load, with an overlap credit above 0"
    );
    Disaggregated::new(prefill, decode, enabled(SkipPolicy::PrefillLoad)).expect("policy load needs no index");
}

#[tokio::test]
async fn the_prefill_stays_in_the_decode_ranks_transfer_domain() {
    let zone = |endpoint: &str, zone: &str, enforcement| WorkerConfig {
        topology_domains: [("zone".to_owned(), zone.to_owned())].into(),
        kv_transfer_domain: Some("zone".to_owned()),
        kv_transfer_enforcement: enforcement,
        ..WorkerConfig::at(endpoint)
    };
    for enforcement in [KvTransferEnforcement::Required, KvTransferEnforcement::Preferred] {
        let prefill = Router::builder(RouterConfig::default().for_prefill())
            .worker(WorkerId(1), zone("http://prefill-a", "a", enforcement))
            .worker(WorkerId(2), zone("http://prefill-b", "b", enforcement));
        let decode = Router::builder(RouterConfig::default().for_decode()).worker(
            WorkerId(3),
            WorkerConfig { kv_transfer_domain: None, ..zone("http://decode-b", "b", enforcement) },
        );
        let (prefill, decode) = (prefill.start().await.expect("valid"), decode.start().await.expect("valid"));
        let pools = Disaggregated::new(prefill.clone(), decode, DisaggConfig::default()).expect("valid");
        for id in ["1", "2", "3"] {
            let placement = pools.route(RouteRequest::new(id, Prompt::Tokens(&[7; 64]))).await.expect("placed");
            assert_eq!(placement.prefill().map(Placement::endpoint), Some("http://prefill-b"), "{enforcement:?}");
        }
        prefill.remove_worker(WorkerId(2)).await.expect("registered");
        let without = pools.route(RouteRequest::new("4", Prompt::Tokens(&[7; 64]))).await;
        match enforcement {
            KvTransferEnforcement::Required => {
                assert_eq!(without.expect_err("no rank in the domain").side, Side::Prefill)
            }
            KvTransferEnforcement::Preferred => assert!(without.expect("placed in another domain").prefill().is_some()),
        }
    }
}
