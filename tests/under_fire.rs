//! Actors under fire: deaths under load, restart storms, lost queues, floods, dropped calls, shutdowns.
//!
//! Each drill ends with the same checks: every call has returned, every placement has one booking, no booking is left,
//! and the router serves. A drill prints a row of the table in docs/reliability.md. `UNDER_FIRE_ROUNDS` repeats it.

#![allow(clippy::print_stdout, reason = "the counts are the output")]

#[cfg(all(feature = "discovery", feature = "replicas", feature = "zmq"))]
mod everything;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use pointsman::error::{Down, RouteError};
use pointsman::internals::Hang;
use pointsman::internals::config::{QueueConfig, SupervisionConfig};
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{AddRequest, Fault, Placement, Prompt, RouteRequest, Router, RouterConfig};
use tokio::time::Instant;

use crate::common::{
    WAIT_MAX, assert_at_rest, cleared, config, config_with, loads, router, stored, suppress_fault_reports, tokens,
    until,
};
use crate::repetitions::repetitions;

fn two_shards() -> RouterConfig {
    config_with(|c| c.index.shards = 2)
}

/// Repetitions of each drill.
fn rounds() -> u64 {
    repetitions("UNDER_FIRE_ROUNDS", 1)
}

/// Counts of a drill. The checks of a drill fail if a call is lost or doubled, so these two are 0 in a printed row.
#[derive(Default)]
struct Tally {
    injected: AtomicU64,
    /// Calls in progress at a fault.
    affected: AtomicU64,
    /// Longest time of an affected call, in microseconds.
    longest_us: AtomicU64,
}

impl Tally {
    fn inject(&self, faults: u64) {
        self.injected.fetch_add(faults, Ordering::Relaxed);
    }

    /// Awaits a call, which must return.
    async fn returned<T>(&self, router: &Router, call: impl Future<Output = T>) -> T {
        let (began, injected) = (Instant::now(), self.injected.load(Ordering::Relaxed));
        let restarts = router.health().restarts;
        let returned = tokio::time::timeout(WAIT_MAX, call).await.expect("every call returns");
        if self.injected.load(Ordering::Relaxed) > injected || router.health().restarts > restarts {
            self.affected.fetch_add(1, Ordering::Relaxed);
            let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.longest_us.fetch_max(micros, Ordering::Relaxed);
        }
        returned
    }

    fn print(&self, fault: &str) {
        let [injected, affected, longest] =
            [&self.injected, &self.affected, &self.longest_us].map(|count| count.load(Ordering::Relaxed));
        println!("| {fault} | {injected} | {affected} | 0 | 0 | {:.1} ms |", longest as f64 / 1e3);
    }
}

async fn route(router: &Router, id: &str, prompt: &[u32]) -> Result<Placement, RouteError> {
    router.route(RouteRequest::new(id, Prompt::Tokens(prompt))).await
}

/// The check at the end of every drill.
async fn assert_unharmed(router: &Router) {
    assert_at_rest(router).await;
    let placement = route(router, "after", &tokens(77, 3)).await.expect("serves");
    let requests: u32 = loads(router).await.iter().map(|load| load.0).sum();
    assert_eq!((router.health().leases, requests), (1, 1), "the only booking");
    drop(placement);
    assert_at_rest(router).await;
}

async fn released(hang: Option<Hang>) {
    tokio::task::spawn_blocking(move || drop(hang)).await.expect("no panic");
}

/// Checks that every permit is free: those of requests, and those of event blocks at the shard of rank 0.
#[cfg(feature = "zmq")]
async fn assert_permits_are_free(router: &Router) {
    let RouterConfig { queue: QueueConfig { requests_max, .. }, events, .. } = router.config();
    let prompt = tokens(1, 1);
    // Waits for all permits of the shard, which other replicas use, too.
    let events = vec![stored(rank(0), &prompt); events.blocks_max as usize];
    tokio::time::timeout(WAIT_MAX, router.apply_events(events)).await.expect("all permits").expect("up");
    let hung = router.clone();
    let hang = tokio::task::spawn_blocking(move || hung.hang(Fault::Radix(rank(0)))).await.expect("no panic");
    let call = |_| {
        let (router, prompt) = (router.clone(), prompt.clone());
        tokio::spawn(async move { router.find_best_match(RouteRequest::query(Prompt::Tokens(&prompt))).await })
    };
    let calls: Vec<_> = (0..=*requests_max).map(call).collect();
    until("a rejection", async || calls.iter().any(|call| call.is_finished())).await;
    released(hang).await;
    let mut rejected = 0;
    for call in calls {
        match tokio::time::timeout(WAIT_MAX, call).await.expect("every call returns").expect("no panic") {
            Err(RouteError::Overloaded { .. }) => rejected += 1,
            placed => drop(placed.expect("a rank")),
        }
    }
    assert_eq!(rejected, 1, "one more than {requests_max} permits");
    router.apply_events(vec![cleared(rank(0))]).await.expect("up");
}

/// Callers that route until an error, and free at once.
fn callers(router: &Router, tally: &Arc<Tally>, count: u32) -> Vec<tokio::task::JoinHandle<(u64, RouteError)>> {
    let caller = |caller| {
        let (router, tally) = (router.clone(), Arc::clone(tally));
        tokio::spawn(async move {
            for n in 0_u32.. {
                let (id, prompt) = (format!("{caller}-{n}"), tokens(n % 7, 4));
                match tally.returned(&router, route(&router, &id, &prompt)).await {
                    Ok(placement) => drop(placement),
                    Err(error) => return (u64::from(n), error),
                }
                tokio::task::yield_now().await;
            }
            unreachable!("the router ends")
        })
    };
    (0..count).map(caller).collect()
}

/// Every kind of actor dies more often than the budget permits, under load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_storm_of_each_actor_beyond_the_budget_ends_every_call() {
    suppress_fault_reports();
    let tally = Arc::<Tally>::default();
    let faults = [Fault::Scheduler, Fault::Radix(rank(0)), Fault::Sequence(rank(1)), Fault::Health, Fault::EngineLoads];
    for fault in faults.into_iter().cycle().take(faults.len() * rounds() as usize) {
        let supervision = SupervisionConfig { restarts_max: 3, ..config().supervision };
        let router = router(RouterConfig { supervision, ..two_shards() }, 3).await;
        let callers = callers(&router, &tally, 8);
        for death in 1..=4 {
            tally.inject(1);
            router.inject(fault);
            until("restart or failure", async || router.health().restarts >= death || router.health().state.is_err())
                .await;
        }
        until("failure of the router", async || router.health().state.is_err()).await;
        assert_eq!((router.health().state, router.health().restarts), (Err(Down::Failed), 3), "{fault:?}");
        for caller in callers {
            let (_, error) =
                tokio::time::timeout(WAIT_MAX, caller).await.expect("every call returns").expect("no panic");
            assert!(matches!(error, RouteError::Down(Down::Failed)), "{fault:?}: {error}");
        }
        assert_eq!(router.health().leases, 0, "{fault:?}");
    }
    tally.print("restart storm beyond the budget");
}

/// The router stops while callers route and hold placements.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_under_load_ends_every_call() {
    let tally = Arc::<Tally>::default();
    for round in 0..5 * rounds() {
        let router = router(two_shards(), 3).await;
        let held = route(&router, "held", &tokens(1, 9)).await.expect("placed");
        let callers = callers(&router, &tally, 8);
        until("load", async || router.health().leases > 1).await;
        tally.inject(1);
        let ended = tokio::spawn(router.clone().shutdown(Duration::from_millis(round % 5)));
        for caller in callers {
            let (_, error) =
                tokio::time::timeout(WAIT_MAX, caller).await.expect("every call returns").expect("no panic");
            assert_eq!(error, RouteError::Down(Down::Stopped));
        }
        tokio::time::timeout(WAIT_MAX, ended).await.expect("the shutdown returns").expect("no panic");
        drop(held);
        assert_eq!(router.health().leases, 0);
    }
    tally.print("shutdown under load");
}

/// The sweep for expired bookings stopped with the router, and bookings by id stayed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bookings_by_id_end_with_the_router() {
    suppress_fault_reports();
    let tally = Arc::default();
    for fails in [true, false] {
        let router = router(config(), 2).await;
        router.add_request(AddRequest::new("by id", rank(0), Prompt::Tokens(&[1]))).await.expect("booked");
        let held = route(&router, "held", &tokens(1, 4)).await.expect("placed");
        if fails {
            let callers = callers(&router, &tally, 4);
            until("load", async || router.health().leases > 2).await;
            assert!(router.inject(Fault::Supervisor));
            for caller in callers {
                let (_, error) =
                    tokio::time::timeout(WAIT_MAX, caller).await.expect("every call returns").expect("no panic");
                assert_eq!(error, RouteError::Down(Down::Failed));
            }
        } else {
            assert_eq!(router.clone().shutdown(Duration::ZERO).await, 2);
        }
        until("end of the booking by id", async || router.health().leases == 1).await;
        assert!(router.free("by id").is_err());
        drop(held);
        assert_eq!(router.health().leases, 0);
    }
}

/// More requests than permits reach a scheduler that hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_requests_is_limited_and_served() {
    let tally = Arc::<Tally>::default();
    let queue = QueueConfig { requests_max: 100, ..config().queue };
    let router = router(RouterConfig { queue, ..two_shards() }, 3).await;
    for _ in 0..rounds() {
        tally.inject(1);
        let hang = router.hang(Fault::Scheduler);
        let rejected = Arc::new(AtomicU64::new(0));
        let calls: Vec<_> = (0..400_u32)
            .map(|n| {
                let (router, rejected) = (router.clone(), Arc::clone(&rejected));
                tokio::spawn(async move {
                    match route(&router, &n.to_string(), &tokens(n, 4)).await {
                        Ok(placement) => drop(placement),
                        Err(RouteError::Overloaded { requests_max: 100 }) => {
                            rejected.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(error) => panic!("{error}"),
                    }
                })
            })
            .collect();
        until("rejections", async || rejected.load(Ordering::SeqCst) == 300).await;
        assert_eq!(router.health().leases, 100);
        let began = Instant::now();
        released(hang).await;
        for call in calls {
            tokio::time::timeout(WAIT_MAX, call).await.expect("every call returns").expect("no panic");
        }
        tally.affected.fetch_add(400, Ordering::Relaxed);
        tally.longest_us.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
        assert_unharmed(&router).await;
    }
    tally.print("flood of requests at a hung scheduler");
}

/// A scheduler dies, again and again, with every permit in its queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduler_lost_with_a_full_queue_loses_no_request() {
    suppress_fault_reports();
    let tally = Arc::<Tally>::default();
    let queue = QueueConfig { threshold: Some(0.5), requests_max: 50, overlap_refresh_after_ms: 0, ..config().queue };
    let engine = WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at("http://engine") };
    let builder = Router::builder(RouterConfig { queue, ..two_shards() });
    let router = builder.worker(WorkerId(0), engine).start().await.expect("valid");
    let prompt = tokens(1, 25);
    for _ in 0..rounds() {
        let busy = route(&router, "busy", &prompt).await.expect("idle");
        let waiting: Vec<_> = (0..50)
            .map(|n| {
                let (router, prompt) = (router.clone(), prompt.clone());
                tokio::spawn(
                    async move { drop(route(&router, &format!("waiting-{n}"), &prompt).await.expect("placed")) },
                )
            })
            .collect();
        let is_full = async || {
            assert!(!waiting.iter().any(|call| call.is_finished()), "every request waits");
            router.pending().await.is_ok_and(|pending| pending[0].depth.requests == 50)
        };
        let before = router.health().restarts;
        for death in 1..=5 {
            until("full queue", is_full).await;
            let began = Instant::now();
            tally.inject(1);
            assert!(router.inject(Fault::Scheduler));
            until("restart", async || router.health().restarts >= before + death).await;
            until("full queue at the successor", is_full).await;
            tally.affected.fetch_add(50, Ordering::Relaxed);
            tally.longest_us.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
        drop(busy);
        for call in waiting {
            tokio::time::timeout(WAIT_MAX, call).await.expect("every call returns").expect("no panic");
        }
        assert_unharmed(&router).await;
    }
    tally.print("scheduler lost with a full queue of 50");
}

/// A shard dies while calls are served, and its ranks send their blocks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shard_lost_while_serving_is_rebuilt() {
    suppress_fault_reports();
    let tally = Arc::<Tally>::default();
    let router = router(two_shards(), 4).await;
    let (stop, prompt) = (Arc::new(AtomicBool::new(false)), tokens(1, 10));
    let callers: Vec<_> = (0..4)
        .map(|caller| {
            let (router, stop, prompt, tally) = (router.clone(), Arc::clone(&stop), prompt.clone(), Arc::clone(&tally));
            tokio::spawn(async move {
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let id = format!("{caller}-{n}");
                    drop(tally.returned(&router, route(&router, &id, &prompt)).await.expect("placed"));
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for deaths in 1..=20 * rounds() {
        for worker in 0..4 {
            let events = vec![cleared(rank(worker)), stored(rank(worker), &prompt)];
            router.apply_events(events).await.expect("up");
        }
        until("warm ranks", async || router.health().cold.is_empty()).await;
        let query = RouteRequest::query(Prompt::Tokens(&prompt));
        assert_eq!(router.find_best_match(query).await.expect("a rank").overlap_blocks(), 10);
        tally.inject(1);
        assert!(router.inject(Fault::Radix(rank(deaths % 2))));
        until("restart", async || router.health().restarts >= deaths).await;
        until("cold ranks", async || router.health().cold.len() == 2).await;
    }
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        tokio::time::timeout(WAIT_MAX, caller).await.expect("every call returns").expect("no panic");
    }
    assert_unharmed(&router).await;
    tally.print("shard lost while serving, then rebuilt");
}

/// Polls a call a number of times and drops it. Returns whether it had ended.
async fn dropped_after(call: impl Future, polls: usize) -> bool {
    let mut call = pin!(call);
    for _ in 0..polls {
        if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return true;
        }
        tokio::task::yield_now().await;
    }
    false
}

/// Calls are dropped after each number of polls, at every place where a call can wait: for a hung shard, scheduler or
/// sequence actor, for the restart of a dead actor, in the queue, and after the reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_dropped_at_every_await_leave_nothing() {
    suppress_fault_reports();
    let queue = QueueConfig { threshold: Some(0.5), overlap_refresh_after_ms: 0, ..config().queue };
    let engine = |n| WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at(format!("http://{n}")) };
    let builder = Router::builder(RouterConfig { queue, ..two_shards() });
    let router = builder.worker(WorkerId(0), engine(0)).worker(WorkerId(1), engine(1)).start().await.expect("valid");
    let (prompt, mut dropped, mut ended) = (tokens(1, 25), 0, 0);
    let places: [(&str, Option<Fault>, Option<Fault>); 7] = [
        ("no fault", None, None),
        ("hung shard", Some(Fault::Radix(rank(0))), None),
        ("hung scheduler", Some(Fault::Scheduler), None),
        ("hung sequence actor", Some(Fault::Sequence(rank(0))), None),
        ("dead scheduler", None, Some(Fault::Scheduler)),
        ("dead shard", None, Some(Fault::Radix(rank(1)))),
        ("dead sequence actor", None, Some(Fault::Sequence(rank(1)))),
    ];
    for (place, hangs, dies) in places {
        for (polls, is_busy) in (0..8).flat_map(|polls| [(polls, false), (polls, true)]) {
            let mut held = Vec::new();
            if is_busy {
                for n in 0..2 {
                    held.push(route(&router, &format!("busy-{n}"), &prompt).await.expect("idle"));
                }
            }
            let hang = hangs.map(|fault| router.hang(fault).expect("an actor"));
            let restarts = router.health().restarts;
            if let Some(fault) = dies {
                assert!(router.inject(fault));
            }
            let is_over = dropped_after(route(&router, "dropped", &prompt), polls).await;
            (dropped, ended) = (dropped + u32::from(!is_over), ended + u32::from(is_over));
            if dies.is_some() {
                until("restart", async || router.health().restarts > restarts).await;
            }
            released(hang).await;
            drop(held);
            until(&format!("rest after {polls} polls: {place}"), async || router.health().leases == 0).await;
            assert_at_rest(&router).await;
        }
    }
    assert!(ended > 0, "the polls reach the end of a call");
    println!("| call dropped at every await | {dropped} | {dropped} | 0 | 0 | – |");
    assert_unharmed(&router).await;
}
