//! Fault injection: every kind of actor dies under load, and the router's guarantees still hold.

use pointsman::internals::config::LoadConfig;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pointsman::error::{FlushError, RouteError};
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{AddRequest, Fault, Placement, Prompt, RouteRequest, Router};

use crate::common::{
    WAIT_MAX, assert_at_rest, cleared, config, config_with, loads, router, stored, suppress_fault_reports, tokens,
    until,
};
use crate::repetitions::repetitions;

const WORKERS: u64 = 6;

/// Consecutive deaths that no call may fail of: one fewer than the attempts of `Router::route`.
const BURST: u64 = 5;

/// Callers that route, report and free.
struct Callers {
    /// Completed calls by caller.
    returned: Vec<AtomicU64>,
    stop: AtomicBool,
}

/// Calls of one caller.
#[derive(Default)]
struct Calls {
    placed: u64,
    failed: Vec<(String, RouteError)>,
    /// The most recent placements, not freed yet.
    held: VecDeque<Placement>,
}

impl Callers {
    /// Waits until every call in progress has returned, while later calls continue.
    async fn returned(&self) {
        let before: Vec<u64> = self.returned.iter().map(|returned| returned.load(Ordering::Relaxed)).collect();
        let more = |(returned, before): (&AtomicU64, &u64)| returned.load(Ordering::Relaxed) > *before;
        until("return of every call", async || self.returned.iter().zip(&before).all(more)).await;
    }

    async fn call(&self, router: &Router, caller: usize) -> Calls {
        let mut calls = Calls::default();
        for n in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let (id, prompt) = (format!("{caller}-{n}"), tokens(n % 19, 4 + n % 9));
            match router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await {
                Ok(placement) => {
                    calls.placed += 1;
                    let _ = router.apply_events(vec![stored(placement.rank(), &prompt)]).await;
                    placement.prefill_completed();
                    placement.output_block(Some(0.7)).expect("a share");
                    calls.held.push_back(placement);
                }
                Err(error) => calls.failed.push((id, error)),
            }
            self.returned[caller].fetch_add(1, Ordering::Relaxed);
            if calls.held.len() > 8 {
                calls.held.pop_front();
            }
            tokio::task::yield_now().await;
        }
        calls
    }
}

/// Runs `disturb` while callers route. No call may fail, and every caller needs at least `rounds` placements. Returns
/// the placements that are not freed yet.
async fn under_load(
    router: &Router,
    callers: usize,
    rounds: u64,
    disturb: impl AsyncFnOnce(&Callers),
) -> Vec<Placement> {
    suppress_fault_reports();
    let returned = (0..callers).map(|_| AtomicU64::new(0)).collect();
    let shared = Arc::new(Callers { returned, stop: AtomicBool::new(false) });
    let tasks: Vec<_> = (0..callers)
        .map(|caller| {
            let (router, shared) = (router.clone(), Arc::clone(&shared));
            tokio::spawn(async move { shared.call(&router, caller).await })
        })
        .collect();
    disturb(&shared).await;
    shared.stop.store(true, Ordering::Relaxed);
    let mut held = Vec::new();
    for (task, returned) in tasks.into_iter().zip(&shared.returned) {
        let calls = tokio::time::timeout(WAIT_MAX, task).await.expect("no panic").expect("no panic");
        assert_eq!(calls.failed, [], "every call is retried until placed");
        assert_eq!(calls.placed, returned.load(Ordering::Relaxed));
        assert!(calls.placed >= rounds, "{} placements in {rounds} rounds", calls.placed);
        held.extend(calls.held);
    }
    held
}

/// Asserts that each placement has exactly one lease and one booking, on its own rank, and that nothing remains after
/// they are freed.
async fn assert_booked_once(router: &Router, held: Vec<Placement>) {
    assert_eq!(router.health().leases, held.len(), "one lease per placement");
    let mut requests = BTreeMap::new();
    for placement in &held {
        *requests.entry(placement.rank().worker.0).or_default() += 1;
    }
    let booked: Vec<u32> = loads(router).await.iter().map(|load| load.0).collect();
    let expected: Vec<u32> = (0..booked.len() as u64).map(|worker| *requests.entry(worker).or_default()).collect();
    assert_eq!(booked, expected);
    drop(held);
    assert_at_rest(router).await;
}

/// Waits until the total number of actor restarts reaches `restarts`.
async fn restarted(router: &Router, restarts: u64) {
    until("restart", async || {
        assert_eq!(router.health().state, Ok(()), "the router is up");
        router.health().restarts >= restarts
    })
    .await;
}

/// Kills actors in bursts. Every call in progress experiences at most one burst, so its attempts suffice.
async fn die_in_bursts(router: &Router, callers: usize, bursts: u64, faults: &[Fault]) {
    let held = under_load(router, callers, bursts, async |callers| {
        for death in 1..=bursts * BURST {
            assert!(router.inject(faults[death as usize % faults.len()]));
            restarted(router, death).await;
            if death.is_multiple_of(BURST) {
                callers.returned().await;
            }
        }
    })
    .await;
    assert_eq!(router.health().restarts, bursts * BURST);
    assert_booked_once(router, held).await;
}

#[tokio::test]
async fn bookings_of_a_killed_sequence_actor_are_restored() {
    let router = router(config(), 3).await;
    let (kept, freed) = (tokens(1, 10), tokens(2, 7));
    for (id, prompt) in [("kept", &kept), ("freed", &freed), ("reported", &kept)] {
        let request = AddRequest { cached_tokens: Some(8), ..AddRequest::new(id, rank(1), Prompt::Tokens(prompt)) };
        router.add_request(request).await.expect("booked");
    }
    router.mark_prefill_completed("reported").expect("known");
    router.add_output_block("reported", None).expect("known");
    router.add_output_block("reported", Some(0.5)).expect("known");
    let before = loads(&router).await;
    assert!(router.inject(Fault::Sequence(rank(1))));
    // The actor that would reconcile the leases is dead. The lost notification must not suppress later ones.
    router.mark_prefill_completed("kept").expect("the worker is registered");
    router.free("freed").expect("the worker is registered");
    restarted(&router, 1).await;
    let after = loads(&router).await;
    assert_eq!(after[1], (before[1].0 - 1, before[1].1 - 7, 0), "{before:?}");
    assert_eq!((after[0], after[2]), (before[0], before[2]), "other ranks are unchanged");
    for id in ["kept", "reported"] {
        router.free(id).expect("restored");
    }
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn a_lost_shard_reports_its_ranks_as_cold() {
    let router = router(config_with(|c| c.index.shards = 2), 4).await;
    let prompt = tokens(1, 10);
    for worker in 0..4 {
        router.apply_events(vec![stored(rank(worker), &prompt)]).await.expect("up");
    }
    let mut resyncs = router.resyncs();
    assert!(resyncs.borrow_and_update().is_empty());
    assert!(router.inject(Fault::Radix(rank(1))));
    let cold = resyncs.wait_for(|cold| !cold.is_empty()).await.expect("the router is running").clone();
    assert_eq!(cold, BTreeSet::from([rank(1), rank(3)]), "the ranks of that shard");
    assert_eq!(router.health().cold, cold);
    let best = router.find_best_match(RouteRequest::query(Prompt::Tokens(&prompt))).await.expect("a match");
    assert_eq!(best.overlap_blocks(), 10, "the other shard keeps its index");

    // Events that continue the old stream do not make a cold rank current.
    router.apply_events(vec![stored(rank(1), &tokens(5, 3))]).await.expect("up");
    assert!(router.health().cold.contains(&rank(1)));
    for worker in [1, 3] {
        router.apply_events(vec![cleared(rank(worker)), stored(rank(worker), &prompt)]).await.expect("up");
    }
    resyncs.wait_for(BTreeSet::is_empty).await.expect("the router is running");
    let held: BTreeSet<_> = router.dump_events().await.expect("up").iter().map(|event| event.rank).collect();
    assert_eq!(held.len(), 4);
}

/// The last load response waits in the scheduler's inbox behind the timer that has fired.
#[tokio::test]
async fn a_timer_before_the_last_load_reply_marks_no_rank_as_timed_out() {
    // Real time: the thread of a hang, which finally processes the inbox, runs outside the runtime and its paused
    // clock.
    let router = router(config(), 4).await; // the idle rank needs no query and would be the only one in service
    let prompt = tokens(1, 50);
    let held = one_on_each(&router, 3, &prompt).await;
    let sequence = router.hang(Fault::Sequence(rank(0))).expect("registered");
    let mut explained = Box::pin(router.explain(RouteRequest::query(Prompt::Tokens(&prompt))));
    tokio::select! {
        biased;
        early = &mut explained => panic!("decided before the reply of rank 0: {early:?}"),
        () = std::future::ready(()) => {}
    }
    let scheduler = router.hang(Fault::Scheduler).expect("not empty");
    let timeout = LoadConfig::QUERY_TIMEOUT;
    tokio::time::sleep(timeout * 2).await; // the timer's message is in the inbox
    drop(sequence); // returns once the response is in the inbox as well
    drop(scheduler);
    let explained = explained.await.expect("answered");
    let refused: Vec<_> = explained.ranks.iter().filter_map(|row| row.excluded_by).collect();
    assert_eq!(refused, [], "every rank replied in time");
    drop(held);
    assert_at_rest(&router).await;
}

/// Places one request with this prompt on each rank, so the next one requires a load query to each rank.
async fn one_on_each(router: &Router, ranks: usize, prompt: &[u32]) -> Vec<Placement> {
    let mut held = Vec::new();
    for n in 0..ranks {
        let id = format!("warm-{n}");
        held.push(router.route(RouteRequest::new(&id, Prompt::Tokens(prompt))).await.expect("placed"));
    }
    held
}

#[tokio::test]
async fn recovered_ranks_are_chosen_while_another_hangs() {
    tokio::time::pause();
    let router = router(config(), 3).await;
    let prompt = tokens(1, 50);
    let mut held = one_on_each(&router, 3, &prompt).await;
    let recovers = router.hang(Fault::Sequence(rank(0))).expect("registered");
    let stays = router.hang(Fault::Sequence(rank(1))).expect("registered");
    held.push(router.route(RouteRequest::new("both", Prompt::Tokens(&prompt))).await.expect("placed"));
    assert_eq!(held[3].rank(), rank(2));
    drop(recovers);
    for n in 0..10 {
        let (id, prompt) = (format!("after-{n}"), tokens(100 + n, 20));
        held.push(router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed"));
    }
    assert!(held[4..].iter().any(|placement| placement.rank() == rank(0)), "{held:?}");
    assert!(held[4..].iter().all(|placement| placement.rank() != rank(1)), "{held:?}");
    drop(stays);
    drop(held);
    assert_at_rest(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deaths_under_flood_fail_no_call() {
    let bursts = repetitions("DEATHS", 400) / BURST;
    let router = router(config(), 4).await;
    let faults = [Fault::Scheduler, Fault::Sequence(rank(0)), Fault::Radix(rank(0)), Fault::Sequence(rank(3))];
    die_in_bursts(&router, 8, bursts, &faults).await;
}

#[tokio::test]
async fn a_hanging_sequence_actor_delays_a_batch_by_at_most_its_timeout() {
    tokio::time::pause();
    let router = router(config(), 3).await;
    let prompt = tokens(1, 50);
    let mut held = one_on_each(&router, 3, &prompt).await;
    let hang = router.hang(Fault::Sequence(rank(1))).expect("registered");
    for n in 0..20 {
        let before = tokio::time::Instant::now();
        let id = format!("hung-{n}");
        let placement = router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed");
        let took = before.elapsed();
        let most = Duration::from_millis(if n == 0 { 5 + 1 } else { 0 });
        assert!(took <= most, "request {n} took {took:?}"); // a tick of the paused clock is a millisecond
        assert_ne!(placement.rank(), rank(1), "the hung rank is avoided");
        held.push(placement);
    }
    drop(hang); // the rank processes its backlog
    drop(held);
    assert_at_rest(&router).await;
    let placement = router.route(RouteRequest::new("after", Prompt::Tokens(&prompt))).await.expect("placed");
    let next = router.route(RouteRequest::new("next", Prompt::Tokens(&tokens(2, 50)))).await.expect("placed");
    let last = router.route(RouteRequest::new("last", Prompt::Tokens(&tokens(3, 50)))).await.expect("placed");
    let chosen = BTreeSet::from([placement.rank(), next.rank(), last.rank()]);
    assert_eq!(chosen.len(), 3, "the recovered rank is chosen: {chosen:?}");
}

/// The timer of the first query fires while a second query is incomplete.
#[tokio::test]
async fn a_query_that_starts_behind_an_armed_timer_times_out_as_well() {
    tokio::time::pause();
    let router = router(config(), 3).await;
    let prompt = tokens(1, 50);
    let held = one_on_each(&router, 3, &prompt).await;
    let hang = router.hang(Fault::Sequence(rank(0))).expect("registered");
    let mut first = Box::pin(router.route(RouteRequest::new("first", Prompt::Tokens(&prompt))));
    tokio::select! {
        biased;
        early = &mut first => panic!("rank 0 has not answered, and yet: {early:?}"),
        () = std::future::ready(()) => {}
    }
    tokio::time::advance(LoadConfig::QUERY_TIMEOUT / 2).await;
    drop(hang); // the first query is complete
    drop(first.await.expect("placed"));
    let hang = router.hang(Fault::Sequence(rank(0))).expect("registered");
    let second = router.route(RouteRequest::new("second", Prompt::Tokens(&prompt)));
    let second = tokio::time::timeout(WAIT_MAX, second).await.expect("the query times out").expect("placed");
    assert_ne!(second.rank(), rank(0), "the hung rank is avoided");
    drop(hang);
    drop((second, held));
    assert_at_rest(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_added_and_removed_under_load() {
    let router = router(config(), WORKERS).await;
    let held = under_load(&router, 8, 200, async |callers| {
        for n in 0..200 {
            let worker = WorkerId(n % WORKERS);
            router.remove_worker(worker).await.expect("registered");
            router.upsert_worker(worker, WorkerConfig::at(format!("http://{n}"))).await.expect("valid");
            callers.returned().await;
        }
    })
    .await;
    drop(held); // bookings on removed workers have already ended
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn events_above_the_limit_of_a_shard_wait_without_blocking_others() {
    let router = router(
        config_with(|c| {
            c.events.blocks_max = 15;
            c.index.shards = 2;
        }),
        2,
    )
    .await;
    let hang = router.hang(Fault::Radix(rank(0))).expect("not empty");
    let prompt = tokens(1, 10);
    router.apply_events(vec![stored(rank(0), &prompt)]).await.expect("room for ten blocks of fifteen");
    let beyond = tokio::spawn({
        let (router, event) = (router.clone(), stored(rank(0), &tokens(2, 10)));
        async move { router.apply_events(vec![event]).await }
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!beyond.is_finished(), "ten more blocks must wait");
    router.apply_events(vec![stored(rank(1), &prompt)]).await.expect("another shard, another gate");
    drop(hang);
    beyond.await.expect("no panic").expect("up");
    router.flush().await.expect("up");
    assert_eq!(router.dump_events().await.expect("up").len(), 3);
    // A batch with more blocks than the gate's limit takes the whole gate and passes alone.
    router.apply_events(vec![stored(rank(0), &tokens(3, 40))]).await.expect("up");
}

/// The dump queries one rank at a time. The second rank has no contents in the successor of the shard.
#[tokio::test]
async fn a_dump_over_a_lost_shard_is_not_taken_for_the_whole_index() {
    suppress_fault_reports();
    let router = router(config(), 2).await;
    let events = [0, 1].map(|worker| stored(rank(worker), &tokens(1, 3)));
    router.apply_events(events.to_vec()).await.expect("up");
    let hang = router.hang(Fault::Radix(rank(0))).expect("a shard");
    let mut dump = std::pin::pin!(router.dump_events());
    assert!(std::future::poll_fn(|context| std::task::Poll::Ready(dump.as_mut().poll(context).is_pending())).await);
    drop(hang);
    router.flush().await.expect("the contents of the first rank are on their way");
    assert!(router.inject(Fault::Radix(rank(0))));
    until("restart", async || router.health().restarts == 1).await;
    assert_eq!(dump.await, Err(FlushError::Lost));
    assert_eq!(router.dump_events().await, Ok(Vec::new()), "the successor is empty");
}
