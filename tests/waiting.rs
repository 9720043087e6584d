//! The end of a wait at its deadline, in the complete actor system. `waiting_faults` has the other ends.

use std::time::Duration;

use pointsman::error::RouteError;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::{Prompt, Rejection, RequestOptions, RouteRequest, Router};

use crate::common::{assert_at_rest, config_with, tokens};

/// The rank is busy from the first prompt of 25 blocks on.
#[tokio::test(start_paused = true)]
async fn requests_are_rejected_at_their_deadline() {
    let engine = WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at("http://engine") };
    let builder = Router::builder(config_with(|c| c.queue.threshold = Some(0.5)));
    let router = builder.worker(WorkerId(0), engine).start().await.expect("valid");
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
    assert_eq!(router.pending().await.expect("up")[0].depth.requests, 0);
    drop(busy);
    assert_at_rest(&router).await;
}
