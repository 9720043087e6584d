//! Routers with speculative entries from their own decisions: without events, and before events arrive.

use std::time::Duration;

use pointsman::config::{EventMode, SpeculativeModel};
use pointsman::error::RouteError;
use pointsman::internals::config::{IndexConfig, SpeculativeConfig};
use pointsman::protocol::{RouterEvent, StorageTier, WorkerId, WorkerRank};
use pointsman::test_support::rank;
use pointsman::{Placement, Prompt, Rejection, RequestOptions, RouteRequest, Router, RouterConfig};

use crate::common::counters::Counters;
use crate::common::{BLOCK_SIZE, assert_at_rest, cleared, config, config_with, router, stored, tokens};

fn without_events() -> RouterConfig {
    config_with(|c| c.events.mode = EventMode::Off)
}

fn beside_events() -> RouterConfig {
    config_with(|c| c.index.speculative.with_events_ttl_ms = Some(1_000))
}

fn modelled() -> RouterConfig {
    RouterConfig {
        index: IndexConfig {
            speculative: SpeculativeConfig { model: SpeculativeModel::Lru, ..without_events().index.speculative },
            ..without_events().index
        },
        ..without_events()
    }
}

async fn route(router: &Router, id: &str, prompt: &[u32]) -> Placement {
    router.route(RouteRequest::new(id, Prompt::Tokens(prompt))).await.expect("placed")
}

/// The rank that a prompt would be placed on, and its overlap in blocks.
async fn best(router: &Router, prompt: &[u32]) -> (WorkerRank, u32) {
    let best = router.find_best_match(RouteRequest::query(Prompt::Tokens(prompt))).await.expect("a match");
    (best.rank(), best.overlap_blocks())
}

/// Speculative blocks with this result.
fn predicted(counters: &Counters, result: &str) -> u64 {
    counters.get("pointsman_speculative_blocks_total", &[result])
}

/// Cause: the last block of the first prompt counted as cached, because the limit was that of the sum of all prompts.
#[tokio::test]
async fn the_last_block_of_the_first_of_several_prompts_is_computed() {
    let router = router(without_events(), 1).await;
    for (prompt, cached_blocks) in [(tokens(1, 20), 19), (tokens(2, 20)[..20 * BLOCK_SIZE as usize - 1].to_vec(), 19)] {
        drop(route(&router, "a", &prompt).await);
        let options = RequestOptions { further_prompt_tokens: 20 * BLOCK_SIZE, ..RequestOptions::default() };
        let list = RouteRequest { options, ..RouteRequest::new("b", Prompt::Tokens(&prompt)) };
        assert_eq!(router.route(list).await.expect("placed").cached_tokens(), cached_blocks * BLOCK_SIZE);
    }
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn without_events_repeated_prompts_return_to_their_rank() {
    for index_shards in [1, 3] {
        let router = router(
            RouterConfig { index: IndexConfig { shards: index_shards, ..without_events().index }, ..without_events() },
            8,
        )
        .await;
        let prompt = tokens(1, 20);
        let first = route(&router, "a", &prompt).await;
        assert_eq!(first.cached_tokens(), 0);
        let chosen = first.rank();
        drop(first);
        let second = route(&router, "b", &prompt).await;
        assert_eq!((second.rank(), second.cached_tokens()), (chosen, 19 * BLOCK_SIZE), "the last block is computed");
        drop(second);
        assert_eq!(router.dump_events().await.expect("up"), [], "dumps contain no speculative entries");
        assert_at_rest(&router).await;
    }
}

#[tokio::test]
async fn a_cleared_cache_has_no_speculative_entries() {
    for config in [without_events(), modelled()] {
        let router = router(config, 4).await;
        let prompt = tokens(1, 20);
        let chosen = route(&router, "a", &prompt).await.rank();
        assert_eq!(best(&router, &prompt).await, (chosen, 20));
        router.apply_events(vec![cleared(chosen)]).await.expect("up");
        assert_eq!(best(&router, &prompt).await.1, 0);
    }
}

#[tokio::test]
async fn without_event_mode_received_events_are_only_counted() {
    let counters = Counters::default();
    let _guard = counters.record();
    let router = router(without_events(), 4).await;
    let prompt = tokens(1, 20);
    router.apply_events(vec![stored(rank(3), &prompt), cleared(rank(3))]).await.expect("up");
    assert_eq!(best(&router, &prompt).await.1, 0);
    assert_eq!(counters.get("pointsman_kv_events_refused_total", &["not_used"]), 1, "the cache was cleared, too");
}

#[tokio::test]
async fn external_decisions_can_be_recorded() {
    let router = router(without_events(), 4).await;
    let prompt = tokens(1, 20);
    let query = RouteRequest {
        options: RequestOptions { lora_name: Some("bot".into()), ..RequestOptions::default() },
        ..RouteRequest::query(Prompt::Tokens(&prompt))
    };
    for _again in 0..2 {
        router.record_routing_decision(query.clone(), rank(2)).await.expect("known");
    }
    let found = router.find_best_match(query.clone()).await.expect("a match");
    assert_eq!((found.rank(), found.overlap_blocks()), (rank(2), 20));
    assert_eq!(best(&router, &prompt).await.1, 0, "under another adapter");
    let unknown = router.record_routing_decision(query.clone(), rank(9)).await;
    assert_eq!(unknown, Err(RouteError::Rejected(Rejection::UnknownRank(rank(9)))));
    router.remove_worker(WorkerId(2)).await.expect("known");
    let found = router.find_best_match(query.clone()).await.expect("a match");
    assert_eq!(found.overlap_blocks(), 0, "its cache is removed");
    let aware = crate::common::router(config(), 4).await;
    aware.record_routing_decision(query.clone(), rank(2)).await.expect("nothing to do");
    assert_eq!(aware.find_best_match(query).await.expect("a match").overlap_blocks(), 0, "events decide");
}

/// Workers of which some publish events and others cannot.
#[tokio::test]
async fn auto_mode_speculates_for_workers_without_events() {
    let counters = Counters::default();
    let _guard = counters.record();
    let router = router(config_with(|c| c.events.mode = EventMode::Auto), 4).await;
    let (published, routed) = (tokens(1, 20), tokens(2, 10));
    router.apply_events(vec![stored(rank(1), &published)]).await.expect("up");
    assert_eq!(best(&router, &published).await, (rank(1), 20));
    // Decisions create speculative entries for ranks without events only.
    let query = RouteRequest::query(Prompt::Tokens(&routed));
    router.record_routing_decision(query.clone(), rank(1)).await.expect("known");
    assert_eq!(best(&router, &routed).await.1, 0);
    router.record_routing_decision(query.clone(), rank(2)).await.expect("known");
    assert_eq!(best(&router, &routed).await, (rank(2), 10));
    // Once a rank publishes, only its events count.
    router.apply_events(vec![stored(rank(2), &tokens(3, 5))]).await.expect("up");
    assert_eq!(best(&router, &routed).await.1, 0);
    assert_eq!((best(&router, &tokens(3, 5)).await, predicted(&counters, "retracted")), ((rank(2), 5), 10));
    // After a final clear, because its source has ended, speculative entries resume.
    router.apply_events(vec![cleared(rank(2))]).await.expect("up");
    router.record_routing_decision(query, rank(2)).await.expect("known");
    assert_eq!(best(&router, &routed).await, (rank(2), 10));
    assert_at_rest(&router).await;
}

/// A worker that serves requests without publishing events is reported, unless events are off.
#[tokio::test]
async fn workers_that_serve_without_events_are_reported() {
    for (events, is_doubted) in [(EventMode::On, true), (EventMode::Auto, true), (EventMode::Off, false)] {
        let router = router(config_with(|c| c.events.mode = events), 1).await;
        assert_eq!(router.health().problems, [""; 0], "{events}: no request was served");
        let placement = route(&router, "a", &tokens(1, 4)).await;
        placement.prefill_completed();
        drop(placement);
        let problems = router.health().problems;
        assert_eq!(
            problems.iter().any(|doubt| doubt.contains("http://engine-0")),
            is_doubted,
            "{events}: {problems:?}"
        );
        router.apply_events(vec![stored(rank(0), &tokens(1, 4))]).await.expect("up");
        best(&router, &tokens(1, 4)).await;
        assert_eq!(router.health().problems, [""; 0], "{events}");
    }
}

#[tokio::test(start_paused = true)]
async fn events_confirm_speculative_entries_and_expiry_counts_wrong_ones() {
    let counters = Counters::default();
    let _guard = counters.record();
    let router = router(beside_events(), 4).await;
    let (right, wrong, partly) = (tokens(1, 20), tokens(2, 8), tokens(3, 10));
    let placed = route(&router, "right", &right).await.rank();
    assert_eq!(best(&router, &right).await, (placed, 20), "guessed");
    router.apply_events(vec![stored(placed, &right)]).await.expect("up");
    assert_eq!(predicted(&counters, "confirmed"), 20);
    drop(route(&router, "wrong", &wrong).await);
    let there = route(&router, "partly", &partly).await.rank();
    router.apply_events(vec![stored(there, &partly[..16])]).await.expect("up");
    assert_eq!(best(&router, &partly).await, (there, 10), "the greater of both");
    tokio::time::advance(Duration::from_millis(1_000)).await;
    assert_eq!(best(&router, &wrong).await.1, 0);
    assert_eq!(best(&router, &partly).await, (there, 4), "blocks from events stay");
    assert_eq!((predicted(&counters, "confirmed"), predicted(&counters, "wrong")), (24, 8 + 6));
    let again = route(&router, "again", &wrong).await.rank();
    router.apply_events(vec![cleared(again)]).await.expect("up");
    assert_eq!((best(&router, &wrong).await.1, predicted(&counters, "retracted")), (0, 8));
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn lower_tiers_extend_speculative_hits() {
    let router = router(beside_events(), 1).await;
    let prompt = tokens(1, 20);
    let lower = RouterEvent { tier: StorageTier::HostPinned, ..stored(rank(0), &prompt) };
    router.apply_events(vec![lower]).await.expect("up");
    let placed = route(&router, "a", &prompt[..40]).await;
    let found = router.find_best_match(RouteRequest::query(Prompt::Tokens(&prompt))).await.expect("a match").overlap();
    assert_eq!((found.device_blocks, found.host_pinned_blocks), (10, 10));
    drop(placed);
}
