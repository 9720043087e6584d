//! The policy `latency` with and without measurements.

use pointsman::internals::schedule::{ExplainedRank, Explanation, LatencyTerms};
use pointsman::policy::Policy;
use pointsman::protocol::WorkerId;
use pointsman::test_support::rank;
use pointsman::{Constraints, Prompt, RequestOptions, RouteRequest, Router, RouterConfig};

use crate::common::{config_with, router, stored, tokens};

fn latency() -> RouterConfig {
    config_with(|c| c.policy = Policy::Latency.into())
}

async fn explained(router: &Router, prompt: &[u32]) -> Explanation {
    router.explain(RouteRequest::query(Prompt::Tokens(prompt))).await.expect("up")
}

fn terms(row: &ExplainedRank) -> LatencyTerms {
    row.latency_terms.expect("the policy is latency")
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
