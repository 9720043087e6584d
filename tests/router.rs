//! Guarantees of the router handle, each by an example with the complete actor system.

use std::time::Duration;

use pointsman::error::{Down, MembershipError, RequestError, RouteError, StartError};
use pointsman::protocol::{KvEvent, WorkerConfig, WorkerId, WorkerMap};
use pointsman::test_support::rank;
use pointsman::{AddRequest, Prompt, Rejection, RequestOptions, RouteRequest, Router};
use tokio::sync::watch;

use crate::common::{assert_at_rest, config, config_with, loads, router, stored, tokens};

#[tokio::test]
async fn requests_follow_their_prefix() {
    let router = router(config(), 8).await;
    let prompt = tokens(1, 20);
    router.apply_events(vec![stored(rank(5), &prompt[..60])]).await.expect("up");
    let placement = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed");
    assert_eq!(placement.rank(), rank(5));
    assert_eq!(placement.endpoint(), "http://engine-5");
    assert_eq!((placement.overlap_blocks(), placement.cached_tokens()), (15, 60));
    assert_eq!(loads(&router).await[5], (1, 20, 20), "20 blocks, and 80 − 60 tokens to prefill");
    placement.prefill_completed();
    assert_eq!(loads(&router).await[5], (1, 20, 0));
    placement.output_block(None).expect("no decay");
    placement.output_block(Some(0.5)).expect("a share");
    assert_eq!(loads(&router).await[5], (1, 11, 0), "half of 20 + 2 blocks");
    drop(placement);
    assert_at_rest(&router).await;
}

/// A router that starts late has missed the first blocks of a prompt, whose end an engine has stored.
#[tokio::test]
async fn answers_show_a_prompt_whose_first_events_were_missed() {
    let router = router(config(), 1).await;
    let prompts = [1, 2, 3].map(|seed| tokens(seed, 20));
    for prompt in &prompts[..2] {
        let mut event = stored(rank(0), prompt);
        let KvEvent::Stored { parent, blocks } = &mut event.data else { panic!("{event:?}") };
        *parent = Some(blocks[15].engine_hash);
        blocks.drain(..16);
        router.apply_events(vec![event]).await.expect("up");
    }
    let several = RequestOptions { further_prompt_tokens: 80, ..RequestOptions::default() };
    for (prompt, options, overlap_blocks) in [
        (&prompts[0], RequestOptions::default(), 20),
        (&prompts[1], several, 0), // the engine reports the sum of all prompts
        (&prompts[2], RequestOptions::default(), 0), // events may follow
    ] {
        let request = RouteRequest { options, ..RouteRequest::new("a", Prompt::Tokens(prompt)) };
        let placement = router.route(request).await.expect("placed");
        assert_eq!(placement.cached_tokens(), 0);
        placement.delivered_cached_tokens(64);
        drop(placement);
        router.flush().await.expect("up");
        let best = router.find_best_match(RouteRequest::query(Prompt::Tokens(prompt))).await.expect("a match");
        assert_eq!(best.overlap_blocks(), overlap_blocks);
    }
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn a_query_books_nothing_and_agrees_with_the_booking() {
    let router = router(config(), 4).await;
    let prompt = tokens(9, 12);
    router.apply_events(vec![stored(rank(2), &prompt)]).await.expect("up");
    let query = RouteRequest {
        options: RequestOptions { routing_hashes: true, ..RequestOptions::default() },
        ..RouteRequest::query(Prompt::Tokens(&prompt))
    };
    let best = router.find_best_match(query).await.expect("a match");
    assert_eq!((best.rank(), best.overlap_blocks()), (rank(2), 12));
    let hashes = best.routing_hashes().expect("asked for").clone();
    assert_at_rest(&router).await;
    let request = RouteRequest::new("a", Prompt::Hashed(hashes));
    let placement = router.route(request).await.expect("placed");
    assert_eq!((placement.rank(), placement.overlap_blocks()), (rank(2), 12));
    assert!(placement.routing_hashes().is_none(), "not asked for");
}

#[tokio::test]
async fn bookings_by_id_for_embedders_that_dispatch_themselves() {
    let router = router(config(), 2).await;
    let prompt = tokens(3, 10);
    let request = AddRequest { cached_tokens: Some(16), ..AddRequest::new("a", rank(1), Prompt::Tokens(&prompt)) };
    router.add_request(request.clone()).await.expect("booked");
    assert_eq!(loads(&router).await, [(0, 0, 0), (1, 10, 24)]);
    let again = router.add_request(request).await.expect_err("taken");
    assert!(matches!(again, RouteError::DuplicateRequest(_)), "{again}");
    router.mark_prefill_completed("a").expect("known");
    router.mark_prefill_completed("a").expect("harmless");
    router.add_output_block("a", None).expect("known");
    assert_eq!(loads(&router).await, [(0, 0, 0), (1, 11, 0)]);
    let decay = router.add_output_block("a", Some(1.5)).expect_err("no share");
    assert!(matches!(decay, RequestError::Decay(_)) && decay.to_string().contains("1.5"), "{decay}");
    router.free("a").expect("known");
    assert_eq!(router.free("a"), Err(RequestError::NotFound("a".into())));
    assert_at_rest(&router).await;
    let unknown = router.add_request(AddRequest::new("b", rank(7), Prompt::Tokens(&prompt))).await;
    assert_eq!(unknown, Err(RouteError::Rejected(Rejection::UnknownRank(rank(7)))));
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn removing_a_worker_ends_its_bookings_and_a_return_has_a_new_generation() {
    let router = router(config(), 2).await;
    let prompt = tokens(1, 10);
    router.apply_events(vec![stored(rank(1), &prompt)]).await.expect("up");
    let stale = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed");
    assert_eq!(stale.rank(), rank(1));
    router.remove_worker(WorkerId(1)).await.expect("known");
    assert_eq!(router.remove_worker(WorkerId(1)).await, Err(MembershipError::UnknownWorker(WorkerId(1))));
    assert_at_rest(&router).await;
    router.upsert_worker(WorkerId(1), WorkerConfig::at("http://new")).await.expect("valid");
    stale.prefill_completed();
    stale.output_block(None).expect("harmless");
    let fresh = router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("the id is free");
    assert_eq!(fresh.overlap_blocks(), 0, "the new generation is empty");
    drop(stale);
    assert_eq!(router.health().leases, 1, "the old placement cannot end the new booking");
    drop(fresh);
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn start_fails_if_too_few_workers_are_possible() {
    let wanted = |n| config_with(|c| c.min_initial_workers = n);
    let one = WorkerMap::from([(WorkerId(1), WorkerConfig::at("http://1"))]);
    let (source, seen) = watch::channel(one);
    drop(source);
    let closed = Router::builder(wanted(2)).discovery(seen).start().await.expect_err("one of two");
    assert_eq!(closed, StartError::SourceClosed { registered: 1, wanted: 2 });
    let none = Router::builder(wanted(1)).start().await.expect_err("no source");
    assert_eq!(none, StartError::NoSource { registered: 0, wanted: 1 });
    let invalid = Router::builder(config_with(|c| c.block_size = Some(0))).start().await.expect_err("no block size");
    assert_eq!(invalid.to_string(), "block_size is 0, must be at least 1");
}

#[tokio::test]
async fn shutdown_waits_for_bookings_up_to_its_deadline() {
    tokio::time::pause();
    let first = router(config(), 1).await;
    let placement = first.route(RouteRequest::new("a", Prompt::Tokens(&[1]))).await.expect("placed");
    let other = first.clone();
    assert_eq!(first.shutdown(Duration::from_secs(1)).await, 1, "one booking was cut off");
    assert_eq!(other.health().state, Err(Down::Stopped));
    let refused = other.route(RouteRequest::new("b", Prompt::Tokens(&[1]))).await.expect_err("stopped");
    assert_eq!(refused, RouteError::Down(Down::Stopped));
    drop(placement);

    let second = router(config(), 1).await;
    let placement = second.route(RouteRequest::new("a", Prompt::Tokens(&[1]))).await.expect("placed");
    let stopping = tokio::spawn(second.shutdown(Duration::from_secs(3600)));
    tokio::time::advance(Duration::from_secs(1)).await;
    drop(placement);
    assert_eq!(stopping.await.expect("no panic"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_concurrent_bookings_equal_a_serial_replay_of_their_order() {
    let config = config();
    let concurrent = router(config.clone(), 9).await;
    let prompt = |n: u32| tokens(n % 31, 3 + n % 13);
    let start = std::sync::Arc::new(tokio::sync::Barrier::new(20));
    let callers = (0..20u32).map(|caller| {
        let (router, start) = (concurrent.clone(), std::sync::Arc::clone(&start));
        tokio::spawn(async move {
            start.wait().await;
            let mut placed = Vec::new();
            for n in (0..50).map(|n| caller * 50 + n) {
                let (id, prompt) = (n.to_string(), prompt(n));
                let placement = router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed");
                placed.push((placement.number(), n, placement));
            }
            placed
        })
    });
    let mut placed = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        placed.extend(caller.await.expect("no panic"));
    }
    placed.sort_by_key(|(decision, ..)| *decision);
    assert!(placed.iter().map(|(decision, ..)| *decision).eq(0..1000), "one decision each");

    let serial = router(config, 9).await;
    let mut held = Vec::new();
    for (decision, n, placement) in &placed {
        let (id, prompt) = (n.to_string(), prompt(*n));
        let again = serial.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed");
        assert_eq!(again.rank(), placement.rank(), "decision {decision}");
        held.push(again);
    }
    assert_eq!(loads(&concurrent).await, loads(&serial).await);
    drop(placed);
    assert_at_rest(&concurrent).await;
}
