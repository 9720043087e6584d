//! Router functions for gateways other than placement: rank conditions, drains, shared caches, selectors, explanations,
//! and bookings that outlive their callers.

use std::sync::Arc;
use std::time::Duration;

use pointsman::config::PrefillModel;
use pointsman::error::{RequestError, RouteError};
use pointsman::policy::{RankPolicy, RankTable, RequestFacts};
use pointsman::protocol::{BlockHash, WorkerConfig, WorkerId, WorkerRank};
use pointsman::test_support::rank;
use pointsman::{
    AddRequest, BoxFuture, Constraints, Outcome, Pin, PinMode, Prompt, RankConditions, Rejection, RequestOptions,
    RouteRequest, Router, SharedCache,
};
use tokio::sync::watch;

use crate::common::{assert_at_rest, config, config_with, loads, router, stored, tokens};

#[tokio::test]
async fn the_rank_of_a_single_rank_worker_is_implied() {
    let two = WorkerConfig { data_parallel_size: 2, ..WorkerConfig::at("http://b") };
    let one = WorkerConfig { data_parallel_start_rank: 3, ..WorkerConfig::at("http://a") };
    let router = Router::builder(config()).worker(WorkerId(1), one).worker(WorkerId(2), two);
    let router = router.start().await.expect("valid");
    let pin = Pin { worker: WorkerId(1), rank: None, mode: PinMode::Hard };
    let pinned = Constraints { pin: Some(pin), ..Constraints::default() };
    let request = RouteRequest {
        options: RequestOptions { constraints: pinned, ..RequestOptions::default() },
        ..RouteRequest::query(Prompt::Tokens(&[1]))
    };
    assert_eq!(router.find_best_match(request).await.expect("there").rank(), WorkerRank::new(WorkerId(1), 3));
}

#[tokio::test]
async fn ranks_that_can_serve_are_counted_without_waiting() {
    let router = router(config(), 3).await;
    assert_eq!(router.eligible_ranks(), 3);
    let conditions = RankConditions { unavailable: [rank(0), rank(9)].into(), ..RankConditions::default() };
    router.set_conditions(conditions).await.expect("up");
    assert_eq!(router.eligible_ranks(), 2);
    (0..5).for_each(|_| router.report_outcome(rank(1), Outcome::Timeout));
    router.rank_health().await.expect("up"); // processed after the reports
    assert_eq!(router.eligible_ranks(), 1, "one is ejected");
    router.drain_worker(WorkerId(2), Duration::ZERO).await.expect("there");
    router.rank_health().await.expect("up"); // processed after the drain: ejected ranks are readmitted if needed
    assert_eq!(router.eligible_ranks(), 1, "the ejected rank is the only one");
    router.clone().shutdown(Duration::ZERO).await;
    assert_eq!(router.eligible_ranks(), 0);
}

#[tokio::test(start_paused = true)]
async fn slow_prefills_increase_the_expected_duration() {
    let router = router(config_with(|c| c.load.prefill_model = PrefillModel::Learned), 1).await;
    let mut expected = Vec::new();
    for n in 0..128 {
        let (id, prompt) = (n.to_string(), tokens(n, 250));
        let placement = router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed");
        expected.push(placement.expected_prefill_duration());
        tokio::time::advance(Duration::from_secs(2)).await; // 500 tokens a second
        placement.prefill_completed();
    }
    assert_eq!(expected[0], None, "no prediction yet");
    let last = expected.last().copied().flatten().expect("learned");
    assert!((last.as_secs_f64() - 2.0).abs() < 0.1, "{last:?}");
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn a_provider_of_conditions_is_followed() {
    let (provider, conditions) = watch::channel(RankConditions::default());
    let builder = Router::builder(config()).conditions(conditions);
    let router = builder.worker(WorkerId(0), WorkerConfig::at("http://a")).start().await.expect("valid");
    let request = RouteRequest::query(Prompt::Tokens(&[1]));
    router.find_best_match(request.clone()).await.expect("good");
    provider.send_modify(|conditions| conditions.overloaded = [rank(0)].into());
    crate::common::until("overload", async || router.find_best_match(request.clone()).await.is_err()).await;
    let refused = router.find_best_match(request).await.expect_err("overloaded");
    assert!(matches!(refused, RouteError::Rejected(Rejection::AllOverloaded { .. })), "{refused}");
}

/// A mock shared cache.
enum Shared {
    Holds(u32),
    Fails,
    Hangs,
}

impl SharedCache for Shared {
    fn query(&self, _: Arc<[BlockHash]>) -> BoxFuture<'_, Result<Vec<std::ops::Range<u32>>, String>> {
        Box::pin(async move {
            match self {
                Self::Holds(blocks) => Ok(std::iter::once(0..*blocks).collect()),
                Self::Fails => Err("no route to host".into()),
                Self::Hangs => std::future::pending().await,
            }
        })
    }
}

/// A selector with a fixed choice that checks the shared hits of the candidates.
struct Chooses(Option<usize>, u32);

impl RankPolicy for Chooses {
    fn choose(&self, _: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        assert!((0..ranks.len()).all(|index| ranks.candidate(index).shared_cache_blocks == self.1));
        self.0
    }
}

async fn with_shared(shared: Shared, policy: Option<Chooses>) -> Router {
    let mut builder = Router::builder(config()).shared_cache(Arc::new(shared));
    if let Some(policy) = policy {
        builder = builder.policy(Arc::new(policy));
    }
    for worker in 0..3 {
        builder = builder.worker(WorkerId(worker), WorkerConfig::at("http://engine"));
    }
    builder.start().await.expect("valid")
}

#[tokio::test]
async fn shared_hits_reach_the_custom_policy_and_the_scores() {
    let router = with_shared(Shared::Holds(6), Some(Chooses(Some(2), 6))).await;
    let prompt = tokens(1, 8);
    let placement = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed");
    assert_eq!((placement.rank(), placement.shared_cache_blocks()), (rank(2), 6));
    drop(placement);
    router.apply_events(vec![stored(rank(1), &prompt[..16])]).await.expect("up");
    let scores = router.overlap_scores(RouteRequest::query(Prompt::Tokens(&prompt)), true).await.expect("up");
    // Four blocks on the device, two more in the shared cache at a multiplier of 0.5.
    let row = &scores.ranks[1];
    assert_eq!((row.device_blocks, row.shared_beyond_device_blocks, row.credit_blocks), (4, Some(2), 5.0));
    assert_eq!(scores.ranks[0].credit_blocks, 3.0);
    let shared = scores.shared_cache.expect("asked");
    assert_eq!((shared.enabled, shared.total_hit_blocks, shared.error), (true, 6, None));
    assert!(
        router
            .overlap_scores(RouteRequest::query(Prompt::Tokens(&prompt)), false)
            .await
            .expect("up")
            .shared_cache
            .is_none()
    );
}

#[tokio::test(start_paused = true)]
async fn a_failing_shared_cache_loses_only_its_hits() {
    for (shared, says) in
        [(Shared::Fails, "no route to host"), (Shared::Hangs, "no response from the shared cache within 5 ms")]
    {
        let router = with_shared(shared, None).await;
        let prompt = tokens(1, 8);
        let before = tokio::time::Instant::now();
        let placement =
            router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed without shared hits");
        assert_eq!(placement.shared_cache_blocks(), 0);
        assert!(before.elapsed() < Duration::from_millis(10), "{:?}", before.elapsed());
        drop(placement);
        let scores = router.overlap_scores(RouteRequest::query(Prompt::Tokens(&prompt)), true).await.expect("up");
        let error = scores.shared_cache.and_then(|shared| shared.error).expect("told");
        assert!(error.contains(says), "{error}");
        assert_at_rest(&router).await;
    }
}

#[tokio::test(start_paused = true)]
async fn bookings_expire_without_reports_and_not_before() {
    let router = router(config_with(|c| c.load.booking_liveness_ms = 60_000), 1).await;
    let prompt = tokens(1, 4);
    let held = router.route(RouteRequest::new("held", Prompt::Tokens(&prompt))).await.expect("placed");
    for id in ["silent", "alive"] {
        router.add_request(AddRequest::new(id, rank(0), Prompt::Tokens(&prompt))).await.expect("booked");
    }
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(40)).await;
        router.touch("alive").expect("keep-alive succeeds");
    }
    assert_eq!(router.touch("silent"), Err(RequestError::NotFound("silent".to_owned())));
    assert_eq!(loads(&router).await[0].0, 2, "the held placement and the reported booking");
    held.prefill_completed();
    drop(held);
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_at_rest(&router).await;
}
