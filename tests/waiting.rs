//! Queueing in the complete actor system: conditions, order, and the end of a wait.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use pointsman::PrefillFacts;
use pointsman::config::{PrefillModel, QueueClass};
use pointsman::error::RouteError;
use pointsman::internals::config::QueueConfig;
use pointsman::internals::load::PrefillEstimator;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{
    Constraints, LimitKind, Pin as PinTo, PinMode, Placement, Prompt, Rejection, RequestOptions, RouteRequest, Router,
    RouterConfig,
};

use crate::common::{assert_at_rest, config, tokens};

pub(crate) type Route<'a> = Pin<Box<dyn Future<Output = Result<Placement, RouteError>> + 'a>>;

/// A rank is busy from the first prompt of 25 blocks on.
fn waits() -> RouterConfig {
    RouterConfig { queue: QueueConfig { threshold: Some(0.5), ..config().queue }, ..config() }
}

async fn fleet(config: RouterConfig, workers: u64) -> Router {
    let mut builder = Router::builder(config);
    for worker in 0..workers {
        let at = WorkerConfig::at(format!("http://engine-{worker}"));
        builder = builder.worker(WorkerId(worker), WorkerConfig { max_num_batched_tokens: Some(100), ..at });
    }
    builder.start().await.expect("a valid configuration starts")
}

/// A submitted request that cannot be answered yet.
pub(crate) async fn under_way<'a>(router: &'a Router, request: RouteRequest<'a>) -> Route<'a> {
    let mut route: Route<'a> = Box::pin(router.route(request));
    tokio::select! {
        biased;
        placed = &mut route => panic!("placed without a free rank: {placed:?}"),
        () = std::future::ready(()) => {}
    }
    route
}

/// Submits a request and asserts that it is queued.
async fn wait_for<'a>(router: &'a Router, request: RouteRequest<'a>) -> Route<'a> {
    let route = under_way(router, request).await;
    // A busy scheduler may not have received the request yet. This query is processed after it.
    router.pending().await.expect("up");
    route
}

pub(crate) async fn waiting(router: &Router) -> u64 {
    router.pending().await.expect("up").iter().map(|class| class.depth.requests).sum()
}

#[tokio::test]
async fn requests_wait_for_the_end_of_a_prefill() {
    let router = fleet(waits(), 2).await;
    let (long, short) = (tokens(1, 25), tokens(2, 25));
    let first = router.route(RouteRequest::new("a", Prompt::Tokens(&long))).await.expect("idle");
    let second = router.route(RouteRequest::new("b", Prompt::Tokens(&long))).await.expect("idle");
    assert_ne!(first.rank(), second.rank());
    let third = wait_for(&router, RouteRequest::new("c", Prompt::Tokens(&short))).await;
    let pending = router.pending().await.expect("up");
    assert_eq!(
        (pending[0].class.as_str(), pending[0].depth.requests, pending[0].depth.raw_tokens),
        ("default", 1, 100)
    );
    let freed = second.rank();
    second.prefill_completed();
    let third = third.await.expect("a rank is free");
    assert_eq!(third.rank(), freed);
    let fourth = wait_for(&router, RouteRequest::new("d", Prompt::Tokens(&short))).await;
    drop(first);
    drop(fourth.await.expect("a rank is free again"));
    drop((second, third));
    assert_eq!(waiting(&router).await, 0);
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn a_new_rank_serves_waiting_requests() {
    let router = fleet(waits(), 1).await;
    let prompt = tokens(1, 25);
    let _busy = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    let waiting = wait_for(&router, RouteRequest::new("b", Prompt::Tokens(&prompt))).await;
    router.upsert_worker(WorkerId(7), WorkerConfig::at("http://new")).await.expect("up");
    assert_eq!(waiting.await.expect("the new rank is idle").rank(), rank(7));
}

#[tokio::test]
async fn requests_waiting_for_a_removed_rank_receive_a_reply() {
    let router = fleet(waits(), 2).await;
    let prompt = tokens(1, 25);
    let a = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    let _b = router.route(RouteRequest::new("b", Prompt::Tokens(&prompt))).await.expect("idle");
    let pin = PinTo { worker: a.rank().worker, rank: None, mode: PinMode::Hard };
    let pinned = Constraints { pin: Some(pin), ..Constraints::default() };
    let request = RouteRequest {
        options: RequestOptions { constraints: pinned, ..RequestOptions::default() },
        ..RouteRequest::new("c", Prompt::Tokens(&prompt))
    };
    let waiting = wait_for(&router, request).await;
    router.remove_worker(a.rank().worker).await.expect("registered");
    let refused = waiting.await.expect_err("the rank was removed");
    assert_eq!(refused, RouteError::Rejected(Rejection::Pinned { pin, refused_by: None }));
}

#[tokio::test(start_paused = true)]
async fn requests_are_rejected_at_their_deadline() {
    let router = fleet(waits(), 1).await;
    let prompt = tokens(1, 25);
    let busy = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    let deadline = Some(Duration::from_secs(3));
    let before = tokio::time::Instant::now();
    let late = RouteRequest {
        options: RequestOptions { deadline, ..RequestOptions::default() },
        ..RouteRequest::new("b", Prompt::Tokens(&prompt))
    };
    let refused = router.route(late).await.expect_err("no capacity is freed");
    let RouteError::Rejected(Rejection::DeadlineExceeded { waited }) = refused else { panic!("{refused}") };
    assert!(waited >= Duration::from_secs(3) && before.elapsed() < Duration::from_millis(3_010), "{waited:?}");
    assert_eq!(waiting(&router).await, 0);
    drop(busy);
    assert_at_rest(&router).await;
}

#[tokio::test(start_paused = true)]
async fn an_earlier_deadline_is_answered_before_a_later_one() {
    let router = fleet(waits(), 1).await;
    let prompt = tokens(1, 25);
    let busy = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    let within = |id, seconds| RouteRequest {
        options: RequestOptions { deadline: Some(Duration::from_secs(seconds)), ..RequestOptions::default() },
        ..RouteRequest::new(id, Prompt::Tokens(&prompt))
    };
    let before = tokio::time::Instant::now();
    let later = wait_for(&router, within("b", 9)).await;
    let refused = router.route(within("c", 3)).await.expect_err("nothing frees");
    assert!(before.elapsed() < Duration::from_millis(3_010), "{refused} after {:?}", before.elapsed());
    later.await.expect_err("nothing frees");
    assert!(before.elapsed() < Duration::from_millis(9_010), "{:?}", before.elapsed());
    drop(busy);
    assert_at_rest(&router).await;
}

/// Estimates this duration for every prefill.
pub(crate) struct Takes(pub(crate) Duration);

impl PrefillEstimator for Takes {
    fn estimate(&self, _: &PrefillFacts) -> Option<Duration> {
        Some(self.0)
    }
}

#[tokio::test(start_paused = true)]
async fn load_decay_ends_a_wait() {
    assert_eq!(waits().load.prefill_model, PrefillModel::None, "the estimate applies");
    let at = WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at("http://engine") };
    let builder = Router::builder(waits()).prefill_estimator(std::sync::Arc::new(Takes(Duration::from_secs(10))));
    let router = builder.worker(WorkerId(0), at).start().await.expect("valid");
    let prompt = tokens(1, 25);
    let busy = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    assert_eq!(busy.expected_prefill_duration(), Some(Duration::from_secs(10)));
    let before = tokio::time::Instant::now();
    let second = router.route(RouteRequest::new("b", Prompt::Tokens(&prompt))).await.expect("after half of it");
    let waited = before.elapsed();
    assert!((Duration::from_secs(5)..Duration::from_millis(5_100)).contains(&waited), "{waited:?}");
    drop((busy, second));
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn rejections_name_the_exceeded_limit() {
    let class = QueueClass { requests_max_per_rank: Some(1), ..QueueClass::named("batch") };
    let router =
        fleet(RouterConfig { queue: QueueConfig { classes: vec![class], ..waits().queue }, ..waits() }, 1).await;
    let prompt = tokens(1, 25);
    let request = |id| RouteRequest::new(id, Prompt::Tokens(&prompt));
    let busy = router.route(request("a")).await.expect("idle");
    let hasty =
        RouteRequest { options: RequestOptions { do_not_queue: true, ..RequestOptions::default() }, ..request("b") };
    let refused = router.route(hasty).await.expect_err("would have to wait");
    let RouteError::Rejected(Rejection::Backpressure(refused)) = refused else { panic!("{refused}") };
    assert_eq!((&*refused.class, refused.limit), ("batch", LimitKind::DoNotQueue));
    let waiting = wait_for(&router, request("c")).await;
    let refused = router.route(request("d")).await.expect_err("full");
    let message = refused.to_string();
    assert!(message.starts_with("class batch") && message.contains("limit requests is 1, 1 are waiting"), "{message}");
    let unknown = RouteRequest {
        options: RequestOptions { policy_class: Some("gold".into()), ..RequestOptions::default() },
        ..request("e")
    };
    let refused = router.route(unknown).await.expect_err("no such class");
    assert!(matches!(refused, RouteError::Rejected(Rejection::UnknownClass(_))), "{refused}");
    let asked = router.find_best_match(RouteRequest::query(Prompt::Tokens(&prompt))).await;
    assert!(matches!(asked, Err(RouteError::Rejected(Rejection::Backpressure(_)))), "like a booking: {asked:?}");
    drop(waiting);
    let best = router
        .find_best_match(RouteRequest::query(Prompt::Tokens(&prompt)))
        .await
        .expect("the request may be queued now");
    assert_eq!(best.rank(), rank(0));
    drop(busy);
    assert_at_rest(&router).await;
}
