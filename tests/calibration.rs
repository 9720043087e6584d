//! Calibration of latency predictions, and counts of met targets, in a simulated fleet in paused time.

use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use pointsman::policy::Policy;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::test_support::rank;
use pointsman::{Constraints, Placement, Prompt, RequestOptions, RouteRequest, Router, RouterConfig};

use crate::common::counters::Counters;
use crate::common::{config, router};

const BLOCK_SIZE: u32 = 64;

fn latency() -> RouterConfig {
    RouterConfig { block_size: Some(BLOCK_SIZE), policy: Policy::Latency.into(), ..config() }
}

/// A prompt of 200 tokens, too short to teach a prefill rate.
fn prompt(seed: u32) -> Vec<u32> {
    (0..200).map(|n| seed.wrapping_mul(0x9e37_79b9) ^ n).collect()
}

async fn place(router: &Router, n: u32, options: RequestOptions) -> Placement {
    let (id, prompt) = (n.to_string(), prompt(n));
    let request = RouteRequest { options, ..RouteRequest::new(&id, Prompt::Tokens(&prompt)) };
    router.route(request).await.expect("placed")
}

fn only(worker: u64) -> RequestOptions {
    let constraints = Constraints { allowed_workers: Some([WorkerId(worker)].into()), ..Constraints::default() };
    RequestOptions { constraints, ..RequestOptions::default() }
}

/// Serves a request: first token after `ttft`, two blocks at `itl` a token. Returns the observed time to first token as
/// a multiple of the predicted one.
async fn serve(placed: Placement, ttft: Duration, itl: Duration) -> f64 {
    let predicted = placed.predicted_ttft().expect("the policy is latency");
    tokio::time::advance(ttft).await;
    placed.prefill_completed();
    for _ in 0..2 {
        tokio::time::advance(itl * BLOCK_SIZE).await;
        placed.output_block(None).expect("valid");
    }
    drop(placed);
    ttft.as_secs_f64() / predicted.as_secs_f64()
}

/// The prior predicts 24 ms; rank 0 takes as long, rank 1 twice as long.
fn ttft_of(rank: WorkerRank) -> Duration {
    Duration::from_micros(24_061) * if rank.worker == WorkerId(1) { 2 } else { 1 }
}

const ITL: Duration = Duration::from_micros(4_040);

/// A metric with these label values.
fn value<'a>(metrics: &'a [(String, DebugValue)], wanted: &[&str]) -> Option<&'a DebugValue> {
    let found = metrics.iter().find(|(key, _)| wanted.iter().all(|part| key.contains(part)));
    found.map(|(_, value)| value)
}

/// All metrics, by name and label values. Resets counters and histograms of the recorder.
fn snapshot(recorder: &DebuggingRecorder) -> Vec<(String, DebugValue)> {
    let key = |key: &metrics::Key| {
        let labels = key.labels().map(|label| format!(" {}={}", label.key(), label.value()));
        std::iter::once(key.name().to_owned()).chain(labels).collect::<String>()
    };
    let all = recorder.snapshotter().snapshot().into_vec();
    all.into_iter().map(|(name, _, _, value)| (key(name.key()), value)).collect()
}

/// Share by which 90 of 100 predictions are off at most, as a logarithm.
fn error_p90(ratios: &[f64]) -> f64 {
    let mut errors: Vec<f64> = ratios.iter().map(|ratio| ratio.ln().abs()).collect();
    errors.sort_unstable_by(f64::total_cmp);
    errors[errors.len() * 9 / 10]
}

#[tokio::test(start_paused = true)]
async fn the_bias_of_a_slow_rank_is_corrected_and_errors_shrink() {
    let recorder = DebuggingRecorder::new();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let router = router(latency(), 2).await;
    let mut ratios = Vec::new();
    for n in 0..60 {
        let placed = place(&router, n, only(u64::from(n % 2))).await;
        let ttft = ttft_of(placed.rank());
        ratios.push(serve(placed, ttft, ITL).await);
    }
    let (early, late) = (error_p90(&ratios[..20]), error_p90(&ratios[40..]));
    assert!(early > 0.4, "a factor of 1.5 at first: {early}");
    assert!(late < 0.05, "within 5 %: {late}");
    let fast = place(&router, 100, only(0)).await.prediction_bias().ttft;
    let slow = place(&router, 101, only(1)).await.prediction_bias().ttft;
    assert!((fast - 1.0).abs() < 0.02 && (slow - 2.0).abs() < 0.04, "{fast} and {slow}");

    tokio::time::advance(Duration::from_secs(1)).await;
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    let metrics = snapshot(&recorder);
    match value(&metrics, &["pointsman_rank_prediction_bias", "worker=1", "target=ttft"]) {
        Some(DebugValue::Gauge(bias)) => assert!((bias.into_inner() - 2.0).abs() < 0.04, "{bias}"),
        other => panic!("a gauge, not {other:?}"),
    }
    match value(&metrics, &["pointsman_prediction_ratio", "target=ttft"]) {
        Some(DebugValue::Histogram(ratios)) => assert_eq!(ratios.len(), 60),
        other => panic!("a histogram, not {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn corrections_scale_predictions_and_targets_but_no_cost() {
    let router = router(latency(), 2).await;
    for n in 0..60 {
        let placed = place(&router, n, only(u64::from(n % 2))).await;
        let ttft = ttft_of(placed.rank());
        serve(placed, ttft, ITL).await;
    }
    let tokens = prompt(1_000);
    let table = router.explain(RouteRequest::query(Prompt::Tokens(&tokens))).await.expect("up");
    let [fast, slow] = [0, 1].map(|worker| {
        let row = table.ranks.iter().find(|row| row.facts.rank == rank(worker)).expect("a row");
        (
            row.latency_terms.expect("terms").ttft_seconds,
            row.prediction.and_then(|known| known.ttft_seconds),
            row.cost_max,
        )
    });
    assert!((fast.2 / slow.2 - 1.0).abs() < 0.01 && (fast.0 / slow.0 - 1.0).abs() < 0.01, "{fast:?} and {slow:?}");
    let ratio = slow.1.zip(fast.1).map(|(slow, fast)| slow / fast).expect("predicted");
    assert!((ratio - 2.0).abs() < 0.05, "{ratio}");
    for n in 0..20 {
        let target = RequestOptions { ttft_target: Some(Duration::from_millis(30)), ..RequestOptions::default() };
        let placed = place(&router, 2_000 + n, target).await;
        assert_eq!(placed.rank(), rank(0), "the only rank with a first token within 30 ms");
        serve(placed, ttft_of(rank(0)), ITL).await;
    }
    // An outdated correction fades, so that the rank is tried again.
    tokio::time::advance(Duration::from_secs(200)).await;
    let again = place(&router, 3_000, only(1)).await.prediction_bias().ttft;
    assert!((again - 1.0).abs() < 0.01, "{again}");
}

#[tokio::test(start_paused = true)]
async fn responses_count_their_targets() {
    let counters = Counters::default();
    let _recording = counters.record();
    let router = router(latency(), 1).await;
    let targets = |ttft_ms, itl_ms| RequestOptions {
        ttft_target: Some(Duration::from_millis(ttft_ms)),
        itl_target: Some(Duration::from_millis(itl_ms)),
        ..RequestOptions::default()
    };
    let (ttft, itl) = (Duration::from_millis(100), Duration::from_millis(10));
    for (n, options) in [targets(100, 11), targets(99, 20), targets(101, 9), targets(500, 100)].into_iter().enumerate()
    {
        serve(place(&router, n as u32, options).await, ttft, itl).await;
    }
    drop(place(&router, 8, targets(1, 1)).await); // no first token, nothing to compare
    serve(place(&router, 9, RequestOptions::default()).await, ttft, itl).await;
    for target in ["ttft", "itl"] {
        let counts = ["met", "missed"].map(|outcome| counters.get("pointsman_targets_total", &[target, outcome]));
        assert_eq!(counts, [3, 1], "{target}");
    }
}
