//! Queueing in the complete actor system: conditions, order, and the end of a wait.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use pointsman::error::RouteError;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::{Placement, Prompt, Rejection, RequestOptions, RouteRequest, Router, RouterConfig};

use crate::common::{assert_at_rest, config_with, tokens};

pub(crate) type Route<'a> = Pin<Box<dyn Future<Output = Result<Placement, RouteError>> + 'a>>;

/// A rank is busy from the first prompt of 25 blocks on.
fn waits() -> RouterConfig {
    config_with(|c| c.queue.threshold = Some(0.5))
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
