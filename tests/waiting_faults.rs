//! Queued requests while parts of the router die or hang: each is served, rejected or cancelled.

use pointsman::internals::config::QueueConfig;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pointsman::error::RouteError;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{Fault, Placement, Prompt, RouteRequest, Router, RouterConfig};

use crate::common::{assert_at_rest, config, loads, suppress_fault_reports, tokens};

/// A prompt of 25 blocks keeps a rank busy, and only load changes end a wait.
fn waits() -> RouterConfig {
    RouterConfig {
        queue: QueueConfig { threshold: Some(0.5), overlap_refresh_after_ms: 0, ..config().queue },
        ..config()
    }
}

fn engine() -> WorkerConfig {
    WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at("http://engine") }
}

async fn one_rank(config: RouterConfig) -> Router {
    Router::builder(config).worker(WorkerId(0), engine()).start().await.expect("valid")
}

/// A router with an estimate for every prefill.
async fn estimated(estimate: fn() -> Duration, config: RouterConfig) -> Router {
    let builder = Router::builder(config).prefill_estimator(Arc::new(move |_, _, _| Some(estimate())));
    builder.worker(WorkerId(0), engine()).start().await.expect("valid")
}

type Route<'a> = Pin<Box<dyn Future<Output = Result<Placement, RouteError>> + 'a>>;

/// A submitted request that cannot be answered yet.
async fn under_way<'a>(router: &'a Router, id: &'a str, prompt: &'a [u32]) -> Route<'a> {
    let mut route: Route<'a> = Box::pin(router.route(RouteRequest::new(id, Prompt::Tokens(prompt))));
    tokio::select! {
        biased;
        placed = &mut route => panic!("placed without a free rank: {placed:?}"),
        () = std::future::ready(()) => {}
    }
    route
}

#[tokio::test]
async fn a_prefill_completed_before_booking_frees_its_rank() {
    let router = one_rank(waits()).await;
    let prompt = tokens(1, 25);
    let hang = router.hang(Fault::Sequence(rank(0))).expect("a rank");
    let early = under_way(&router, "a", &prompt).await;
    let waiting = under_way(&router, "b", &prompt).await;
    router.mark_prefill_completed("a").expect("known");
    drop(hang);
    drop((early.await.expect("booked"), waiting.await.expect("nothing is left to prefill")));
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn load_decay_from_the_booking_ends_a_wait() {
    let router = estimated(|| Duration::from_millis(50), waits()).await;
    let prompt = tokens(1, 25);
    let hang = router.hang(Fault::Sequence(rank(0))).expect("a rank");
    let first = under_way(&router, "a", &prompt).await;
    let waiting = under_way(&router, "b", &prompt).await;
    drop(hang);
    let first = first.await.expect("booked");
    drop(waiting.await.expect("the modelled prefill has ended"));
    drop(first);
    assert_at_rest(&router).await;
}

#[tokio::test(start_paused = true)]
async fn restored_prefills_continue_from_their_booking() {
    suppress_fault_reports();
    let router = estimated(
        || Duration::from_secs(2),
        RouterConfig { queue: QueueConfig { threshold: Some(0.0), ..waits().queue }, ..waits() },
    )
    .await;
    let prompt = tokens(1, 25);
    let first = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    let waited = under_way(&router, "b", &prompt).await;
    tokio::time::advance(Duration::from_millis(1_900)).await;
    drop(first);
    let waited = waited.await.expect("placed");
    let before = loads(&router).await[0].2;
    assert!(before > 95, "{before} of 100 tokens are left when it has just been booked");
    assert!(router.inject(Fault::Sequence(rank(0))));
    crate::common::until("restart", async || router.health().restarts == 1).await;
    let after = loads(&router).await[0].2;
    assert!(before.abs_diff(after) <= 5, "{after} tokens are left after the restart, and {before} were before");
    drop(waited);
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn a_panicking_estimator_loses_only_its_estimate() {
    suppress_fault_reports();
    let router = estimated(|| std::panic::panic_any("an injected fault"), config()).await;
    let placement = router.route(RouteRequest::new("a", Prompt::Tokens(&tokens(1, 4)))).await.expect("placed");
    assert_eq!(placement.expected_prefill_duration(), None);
    drop(placement);
    assert_eq!(router.health().restarts, 0);
    assert_at_rest(&router).await;
}

/// A request that ended while its sequence actor was dead still frees the rank.
#[tokio::test]
async fn waiting_requests_see_bookings_that_ended_during_a_restart() {
    suppress_fault_reports();
    let router = one_rank(waits()).await;
    let prompt = tokens(1, 25);
    let busy = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("idle");
    let route = under_way(&router, "b", &prompt).await;
    assert!(router.inject(Fault::Sequence(rank(0))));
    drop(busy); // the actor that would reconcile is dead
    drop(route.await.expect("the restarted rank is idle"));
    assert_at_rest(&router).await;
}
