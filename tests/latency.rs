//! The policy `latency` with and without measurements.

use std::time::Duration;

use pointsman::RouterConfig;
use pointsman::internals::load::{EngineSpeed, work_tokens};
use pointsman::internals::schedule::LatencyTerms;
use pointsman::internals::schedule::{ExplainedRank, Explanation};
use pointsman::policy::Policy;
use pointsman::protocol::WorkerId;
use pointsman::test_support::rank;
use pointsman::{Constraints, Prompt, RequestOptions, RouteRequest, Router};

use crate::common::{config, router, stored, tokens};

/// Blocks of a prompt long enough to prefer its cached rank.
const BLOCKS: u32 = 2_000;

fn latency() -> RouterConfig {
    RouterConfig { policy: Policy::Latency.into(), ..config() }
}

async fn explained(router: &Router, prompt: &[u32]) -> Explanation {
    router.explain(RouteRequest::query(Prompt::Tokens(prompt))).await.expect("up")
}

fn terms(row: &ExplainedRank) -> LatencyTerms {
    row.latency_terms.expect("the policy is latency")
}

fn close(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 0.02, "{got} is not about {want}");
}

#[tokio::test(start_paused = true)]
async fn defaults_apply_without_observations() {
    let router = router(latency(), 2).await;
    let prompt = tokens(1, BLOCKS);
    let prior = EngineSpeed::prior(router.block_size());
    let prefill = prior.prefill(work_tokens(prompt.len() as u32, 0));
    for row in &explained(&router, &prompt).await.ranks {
        close(terms(row).ttft_seconds, prefill + prior.step_seconds);
        assert_eq!((terms(row).eviction_seconds, terms(row).replication_seconds), (0.0, 0.0), "capacities are unknown");
    }
    let placed = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed");
    close(placed.predicted_ttft().expect("foreseen").as_secs_f64(), prefill + prior.step_seconds);
}

#[tokio::test(start_paused = true)]
async fn siblings_count_blocks_of_earlier_requests_as_cached() {
    let router = router(latency(), 2).await;
    let (first, mut second) = (tokens(1, BLOCKS), tokens(1, BLOCKS));
    second.extend(tokens(2, 10));
    let leader = router.route(RouteRequest::new("leader", Prompt::Tokens(&first))).await.expect("placed");
    let table = explained(&router, &second).await;
    let ttft = |there: bool| {
        let row = table.ranks.iter().find(|row| (row.facts.rank == leader.rank()) == there).expect("two ranks");
        terms(row).ttft_seconds
    };
    assert!(ttft(true) < 1.05 * ttft(false), "the wait without a second prefill: {} {}", ttft(true), ttft(false));
    tokio::time::advance(leader.predicted_ttft().expect("foreseen")).await;
    assert_eq!(explained(&router, &second).await.chosen, Some(leader.rank()), "computed");
}

#[tokio::test(start_paused = true)]
async fn waits_decrease_with_time_without_reports() {
    let router = router(latency(), 1).await;
    let (prompt, other) = (tokens(1, BLOCKS), tokens(2, 10));
    let placed = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed");
    let busy = terms(&explained(&router, &other).await.ranks[0]).ttft_seconds;
    tokio::time::advance(placed.predicted_ttft().expect("foreseen") / 2).await;
    let later = terms(&explained(&router, &other).await.ranks[0]).ttft_seconds;
    assert!((0.4..0.6).contains(&(later / busy)), "{busy} s, and then {later} s");
}

#[tokio::test(start_paused = true)]
async fn ranks_without_observations_use_typical_values() {
    let router = router(latency(), 2).await;
    let known = Constraints { allowed_workers: Some([WorkerId(0)].into()), ..Constraints::default() };
    for n in 0..400_u32 {
        let (id, prompt) = (n.to_string(), tokens(100 + n, BLOCKS));
        let request = RouteRequest {
            options: RequestOptions { constraints: known.clone(), ..RequestOptions::default() },
            ..RouteRequest::new(&id, Prompt::Tokens(&prompt))
        };
        let placed = router.route(request).await.expect("placed");
        tokio::time::advance(Duration::from_secs(4)).await; // a fifth of the prior's speed
        placed.prefill_completed();
    }
    let prompt = tokens(7, BLOCKS);
    let table = explained(&router, &prompt).await;
    let [shown, unknown] = [0, 1].map(|worker| {
        terms(table.ranks.iter().find(|row| row.facts.rank == rank(worker)).expect("there")).ttft_seconds
    });
    close(shown, 4.0);
    close(unknown, 4.0);
}

#[tokio::test(start_paused = true)]
async fn output_length_comes_from_the_caller_or_the_default() {
    let router = router(latency(), 1).await;
    let prompt = tokens(1, 10);
    let told = RouteRequest {
        options: RequestOptions { expected_output_tokens: Some(512), ..RequestOptions::default() },
        ..RouteRequest::query(Prompt::Tokens(&prompt))
    };
    let told = router.explain(told).await.expect("up");
    let assumed = explained(&router, &prompt).await;
    close(terms(&told.ranks[0]).decode_seconds, 2.0 * terms(&assumed.ranks[0]).decode_seconds);
}

/// Requests for a prefix that is cached somewhere do not wait for its computation on another rank.
#[tokio::test(start_paused = true)]
async fn a_copy_in_progress_does_not_count_as_cached() {
    let router = router(latency(), 2).await;
    let prefix = tokens(1, 100);
    let [first, prompt] = [2, 3].map(|own| [prefix.clone(), tokens(own, 10)].concat());
    let constraints = Constraints { allowed_workers: Some([WorkerId(1)].into()), ..Constraints::default() };
    let options = RequestOptions { constraints, ..RequestOptions::default() };
    let request = RouteRequest { options, ..RouteRequest::new("copy", Prompt::Tokens(&first)) };
    let copying = router.route(request).await.expect("placed");
    let own_prefill = async || {
        let table = explained(&router, &prompt).await;
        let row = table.ranks.iter().find(|row| row.facts.rank == copying.rank()).expect("two ranks");
        terms(row).stall_seconds // of one request
    };
    let sibling = own_prefill().await;
    router.apply_events(vec![stored(rank(0), &prefix)]).await.expect("up");
    router.flush().await.expect("up");
    let apart = own_prefill().await;
    assert!(apart > 5.0 * sibling, "{apart} s beside a cached copy, {sibling} s without one");
}

/// A prefix that only crowded ranks hold is copied like one that many ranks hold.
#[tokio::test(start_paused = true)]
async fn a_prefix_of_crowded_ranks_is_copied() {
    let router = router(latency(), 8).await;
    let prefix = tokens(1, 100);
    let prompt = [prefix.clone(), tokens(2, 10)].concat();
    router.apply_events(vec![stored(rank(0), &prefix)]).await.expect("up");
    router.flush().await.expect("up");
    let copied = async || {
        let table = explained(&router, &prompt).await;
        let row = table.ranks.iter().find(|row| row.facts.rank == rank(7)).expect("eight ranks");
        terms(row).replication_seconds > 0.0
    };
    let mut placements = Vec::new();
    for n in 0..6_u32 {
        // Up to five requests are usual: twice the mean of the pool and four.
        assert!(!copied().await, "{n} requests");
        let (id, other) = (n.to_string(), tokens(100 + n, 10));
        let constraints = Constraints { allowed_workers: Some([WorkerId(0)].into()), ..Constraints::default() };
        let options = RequestOptions { constraints, ..RequestOptions::default() };
        let request = RouteRequest { options, ..RouteRequest::new(&id, Prompt::Tokens(&other)) };
        placements.push(router.route(request).await.expect("placed"));
    }
    assert!(copied().await);
    // Another holder with few requests is preferred to a copy.
    router.apply_events(vec![stored(rank(1), &prefix)]).await.expect("up");
    router.flush().await.expect("up");
    assert!(!copied().await);
}
