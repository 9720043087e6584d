//! The supervisor panics at every kind of message: the router fails as a whole, and every call ends.

use std::sync::Arc;
use std::time::Duration;

use pointsman::error::{Down, RouteError};
use pointsman::internals::config::SupervisionConfig;
use pointsman::protocol::{WorkerConfig, WorkerId, WorkerMap};
use pointsman::test_support::rank;
use pointsman::{AddRequest, Fault, Prompt, Router, RouterConfig};
use tokio::sync::watch;

use super::{Tally, callers, panics_of, two_shards};
use crate::common::{WAIT_MAX, cleared, config, router, suppress_fault_reports, until};
use crate::zmtp::kv_events;

/// Everything that the supervisor does. The calls end with an error when it fails.
async fn everything(router: &Router, round: u64) {
    let (worker, closed) = (WorkerId(9), "127.0.0.1:9".parse().expect("an address"));
    let engine = || WorkerConfig { kv_events: Some(kv_events(closed, None)), ..WorkerConfig::at("http://engine-9") };
    for deadline in [Duration::from_millis(1), WAIT_MAX] {
        drop(router.upsert_worker(worker, engine()).await);
        let id = format!("{deadline:?}-{round}");
        let booked = router.add_request(AddRequest::new(&id, rank(9), Prompt::Tokens(&[1]))).await.is_ok();
        tokio::join!(async { drop(router.drain_worker(worker, deadline).await) }, async {
            tokio::task::yield_now().await;
            if booked && deadline == WAIT_MAX {
                drop(router.free(&id)); // ended by the failure, if that was faster
            }
        });
    }
    let (source, workers) = watch::channel(WorkerMap::new());
    let _ = router.follow(workers);
    source.send_replace(WorkerMap::from([(WorkerId(20), engine())]));
    let is_over = |restarts| router.health().restarts > restarts || router.health().state.is_err();
    let restarts = router.health().restarts;
    if router.inject(Fault::Radix(rank(0))) {
        until("restart", async || is_over(restarts)).await;
    }
    let _ = router.apply_events(vec![cleared(rank(0))]).await;
    if let Ok(snapshot) = router.snapshot().await {
        drop(router.restore(snapshot));
    }
    // A hang, detected by the watchdog.
    let (hung, restarts) = (router.clone(), router.health().restarts);
    let hang = tokio::task::spawn_blocking(move || hung.hang(Fault::Scheduler)).await.expect("no panic");
    until("replacement", async || is_over(restarts)).await;
    tokio::task::spawn_blocking(move || drop(hang)).await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn supervisor_panics_at_every_kind_of_message() {
    suppress_fault_reports();
    let tally = Arc::<Tally>::default();
    for (kind, moment) in panics_of(Fault::Supervisor) {
        let supervision = SupervisionConfig { hang_timeout_ms: 40, ..config().supervision };
        let router = router(RouterConfig { supervision, ..two_shards() }, 3).await;
        let callers = callers(&router, &tally, 4);
        until("load", async || router.health().leases > 0).await;
        tally.inject(1);
        let injected = router.inject_at(Fault::Supervisor, kind, moment).expect("the supervisor has this kind");
        for round in 0.. {
            tokio::time::timeout(WAIT_MAX, everything(&router, round)).await.expect("every call returns");
            if router.health().state.is_err() {
                break;
            }
            assert!(round < 100, "the load causes no {kind} at the supervisor");
        }
        assert!(injected.has_begun(), "{kind}");
        assert_eq!(router.health().state, Err(Down::Failed), "{kind}");
        for caller in callers {
            let (_, error) =
                tokio::time::timeout(WAIT_MAX, caller).await.expect("every call returns").expect("no panic");
            assert_eq!(error, RouteError::Down(Down::Failed), "{kind}");
        }
        until("end of all bookings", async || router.health().leases == 0).await;
    }
    tally.print("supervisor, each kind of message");
}
