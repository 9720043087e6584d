//! Selection of the workers that receive prompts to tokenize.

use std::time::Duration;

use pointsman::{HealthState, Outcome};

use pointsman_gateway::settings::{Settings, TokenSourceChoice};

use crate::alone;
use crate::common::proxy::{Act, FINE_JSON, Scripted, eventually, full_response, gateway, request};
use crate::faults::{PATH, expect_idle, router, settings};

/// Number of consecutive requests.
const REQUESTS: usize = 24;

/// A worker that serves requests, and serves `/tokenize` or hangs on it.
async fn worker(tokenizes: bool) -> Scripted {
    Scripted::with(Vec::new(), move |_, got| match got.head.starts_with("POST /tokenize ") {
        true if tokenizes => vec![full_response("200 OK", r#"{"tokens":[1,2,3]}"#)],
        true => vec![Act::Hang],
        false => vec![full_response("200 OK", FINE_JSON)],
    })
    .await
}

fn tokenized(worker: &Scripted) -> usize {
    worker.seen(|seen| seen.requests.iter().filter(|got| got.head.starts_with("POST /tokenize ")).count())
}

fn with_engine_tokens(workers: &[&Scripted]) -> Settings {
    let urls: Vec<String> = workers.iter().map(|worker| worker.url()).collect();
    let mut settings = settings(&urls);
    settings.models[0].tokens.source = TokenSourceChoice::Engine;
    settings.models[0].tokens.engine_timeout_ms = 400;
    settings
}

/// Sends requests that need tokenization.
async fn send_all(address: std::net::SocketAddr) {
    for _ in 0..REQUESTS {
        let answer = request(address, "POST", PATH, "", br#"{"model":"mock","prompt":"some text"}"#).await;
        assert_eq!(answer.status, 200);
    }
}

/// Regression: with one of four engines stopped, a quarter of all requests waited half of `engine_timeout_ms` for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_tokenizer_receives_one_prompt_per_pause() {
    let _alone = alone().await;
    let (hung, well) = (worker(false).await, worker(true).await);
    let gateway = gateway(with_engine_tokens(&[&hung, &well])).await;
    let begun = tokio::time::Instant::now();
    send_all(gateway.address()).await;
    // Pauses last 10, 20, 40 and then 80 seconds.
    let pauses = 1 + begun.elapsed().as_secs() as usize / 10;
    assert!((1..=pauses).contains(&tokenized(&hung)), "{} times", tokenized(&hung));
    assert_eq!(tokenized(&well), REQUESTS);
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ejected_workers_receive_no_tokenize_queries() {
    let _alone = alone().await;
    let (ejected, well) = (worker(true).await, worker(true).await);
    let mut settings = with_engine_tokens(&[&ejected, &well]);
    settings.models[0].router.health.outcome_failures_max = 2;
    settings.models[0].router.health.ejection_ms = 300_000;
    let gateway = gateway(settings).await;
    let router = router(&gateway);
    let workers = router.workers();
    let entry = workers.iter().find(|entry| entry.config.endpoint == ejected.url()).expect("it exists");
    (0..2).for_each(|_| router.report_outcome(entry.ranks[0], Outcome::Timeout));
    eventually("the rank is ejected", async || {
        let health = router.rank_health().await.expect("the router is up");
        health.iter().any(|health| matches!(health.state, HealthState::Ejected { .. }))
    })
    .await;
    send_all(gateway.address()).await;
    assert_eq!((tokenized(&ejected), tokenized(&well)), (0, REQUESTS));
    tokio::time::timeout(Duration::from_secs(60), expect_idle(&gateway)).await.expect("completed before the timeout");
}
