//! Load of prompts that exceed any engine's capacity, and of requests without streaming.

use std::time::Duration;

use pointsman::internals::load::PromptLimits;
use pointsman::policy::Policy;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{Constraints, Prompt, RequestOptions, RouteRequest, Router};

use crate::common::{BLOCK_SIZE, config_with, loads, tokens};

/// Blocks of a prompt that exceeds any engine's capacity.
const HUGE_BLOCKS: u32 = 1_000_000 / BLOCK_SIZE;

async fn with(policy: Policy, workers: u64, worker: impl Fn(WorkerConfig) -> WorkerConfig) -> Router {
    let mut builder = Router::builder(config_with(|c| c.policy = policy.into()));
    for n in 0..workers {
        builder = builder.worker(WorkerId(n), worker(WorkerConfig::at(format!("http://engine-{n}"))));
    }
    builder.start().await.expect("valid")
}

/// Each rank has one huge prompt. Its load is limited to the rank's capacity, so predicted times stay realistic.
#[tokio::test(start_paused = true)]
async fn the_weight_of_a_huge_prompt_is_capped_at_the_capacity_of_a_rank() {
    for (what, total_kv_blocks, most) in [
        ("no capacity is known", None, PromptLimits::WEIGHT_TOKENS_UNKNOWN),
        ("the cache size is known", Some(2_048), 2_048 * BLOCK_SIZE),
        ("the larger cache size is known", Some(4_096), 4_096 * BLOCK_SIZE),
    ] {
        for policy in [Policy::Latency, Policy::Kv] {
            let router = with(policy, 3, |worker| WorkerConfig { total_kv_blocks, ..worker }).await;
            let mut held = Vec::new();
            for n in 0..3 {
                let (id, prompt) = (format!("huge-{n}"), tokens(700 + n, HUGE_BLOCKS));
                let placed = router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed");
                assert!(
                    placed.predicted_ttft().is_none_or(|ttft| ttft < Duration::from_secs(60)),
                    "{what}: {:?}",
                    placed.predicted_ttft()
                );
                held.push(placed);
            }
            for (_, blocks, prefill_tokens) in loads(&router).await {
                assert!(prefill_tokens <= u64::from(most), "{what}, {policy:?}: {prefill_tokens} tokens");
                assert!(blocks <= u64::from(most / BLOCK_SIZE), "{what}, {policy:?}: {blocks} blocks");
            }
            drop(held);
            crate::common::assert_at_rest(&router).await;
        }
    }
}

/// Requests without streaming have no report of the first token. Their prefill counts for its expected duration under
/// either policy, and not until the end of the answer.
#[tokio::test(start_paused = true)]
async fn prefills_of_unstreamed_responses_end_as_modelled() {
    for policy in [Policy::Latency, Policy::Kv] {
        let router = with(policy, 1, |worker| worker).await;
        let prompt = tokens(1, 2_000);
        let whole = RouteRequest {
            options: RequestOptions { not_streamed: true, ..RequestOptions::default() },
            ..RouteRequest::new("whole", Prompt::Tokens(&prompt))
        };
        let placed = router.route(whole).await.expect("placed");
        assert_eq!(loads(&router).await[0].2, 8_000, "{policy:?}: prefill started");
        tokio::time::advance(Duration::from_secs(2)).await; // the assumed 10,000 tokens a second
        assert_eq!(loads(&router).await[0].2, 0, "{policy:?}: prefill ended");
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(loads(&router).await[0].2, 0, "{policy:?}: the prefill is not overdue");
        drop(placed);
        crate::common::assert_at_rest(&router).await;
    }
}

/// The prompt of a hung request is not treated as cached, and the overdue time counts as waiting time of the rank.
#[tokio::test(start_paused = true)]
async fn overdue_prefills_do_not_count_as_cached() {
    let router = with(Policy::Latency, 2, |worker| worker).await;
    let mut served = Vec::new();
    for n in 0..32_u32 {
        let (id, prompt) = (format!("good-{n}"), tokens(100 + n, 1_000));
        let placed = router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed");
        tokio::time::advance(Duration::from_millis(400)).await;
        placed.prefill_completed();
        served.push(placed.rank());
    }
    assert!(served.contains(&rank(0)) && served.contains(&rank(1)), "both ranks report");
    let (prompt, sibling) = (tokens(1, 2_000), tokens(1, 2_010));
    let hung = router.route(RouteRequest::new("hung", Prompt::Tokens(&prompt))).await.expect("placed");
    tokio::time::advance(Duration::from_secs(30)).await;
    // A booking on the rank triggers its check for overdue prefills.
    let there = Constraints { allowed_workers: Some([hung.rank().worker].into()), ..Constraints::default() };
    let probe = tokens(2, 1);
    let probe = RouteRequest {
        options: RequestOptions { constraints: there, ..RequestOptions::default() },
        ..RouteRequest::new("probe", Prompt::Tokens(&probe))
    };
    let probe = router.route(probe).await.expect("placed");
    let table = router.explain(RouteRequest::query(Prompt::Tokens(&sibling))).await.expect("up");
    let terms = |is_hung: bool| {
        let row = table.ranks.iter().find(|row| (row.facts.rank == hung.rank()) == is_hung).expect("two ranks");
        row.latency_terms.expect("the policy is latency")
    };
    assert!(table.chosen.is_some_and(|chosen| chosen != hung.rank()), "{table:?}");
    let (hangs, serves) = (terms(true).ttft_seconds, terms(false).ttft_seconds);
    assert!((29.0..32.0).contains(&(hangs - serves)), "overdue without cached blocks: {hangs} and {serves} s");
    hung.prefill_completed();
    let table = router.explain(RouteRequest::query(Prompt::Tokens(&sibling))).await.expect("up");
    assert_eq!(table.chosen, Some(hung.rank()), "all blocks are cached after the late end");
    drop((hung, probe));
}
