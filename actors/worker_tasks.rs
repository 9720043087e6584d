//! One task per registered worker.
//!
//! A worker's task ends when the worker is removed or the inputs of the task change. A task that ends by itself is
//! restarted at the next pass, and all tasks end with the router. Level-triggered: each pass compares the desired tasks
//! with the running ones.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
#[cfg(feature = "discovery")]
use xxhash_rust::xxh3::xxh3_64;

use crate::actors::views::fleet::Fleet;
use crate::actors::views::status::RouterStatus;
use crate::actors::views::worker::WorkerEntry;
use crate::protocol::WorkerId;

/// Interval of passes without a change of workers.
const PASS: Duration = Duration::from_secs(30);

/// Runs `task` for each worker for which `wanted` returns the inputs of the task. Each task receives a number, higher
/// than those of all earlier tasks.
pub(super) fn watch<D, W, F>(
    fleet: &Fleet,
    status: &RouterStatus,
    dependencies: D,
    wanted: fn(&WorkerEntry) -> Option<W>,
    task: fn(D, WorkerId, u64, W) -> F,
) where
    D: Clone + Send + 'static,
    W: Clone + PartialEq + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (mut workers, mut status) = (fleet.subscribe(), status.subscribe());
    tokio::spawn(async move {
        let mut tasks = JoinSet::new(); // dropping it ends them
        let mut running: BTreeMap<WorkerId, (W, AbortHandle)> = BTreeMap::new();
        let mut started = 0;
        loop {
            let now_wanted: BTreeMap<WorkerId, W> = {
                let workers = workers.borrow_and_update();
                workers.iter().filter_map(|worker| Some((worker.worker, wanted(worker)?))).collect()
            };
            running.retain(|worker, (known, task)| {
                let stays = now_wanted.get(worker) == Some(known) && !task.is_finished();
                if !stays {
                    task.abort();
                }
                stays
            });
            for (worker, wanted) in now_wanted {
                running.entry(worker).or_insert_with(|| {
                    started += 1;
                    (wanted.clone(), tasks.spawn(task(dependencies.clone(), worker, started, wanted)))
                });
            }
            while tasks.try_join_next().is_some() {}
            tokio::select! {
                biased;
                _ = status.wait_for(|state| state.phase.is_down()) => return,
                changed = workers.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(PASS) => {}
            }
        }
    });
}

/// Delay of a worker's first poll: within the second half of the first interval, so that the polls of a fleet are
/// spread over time.
#[cfg(feature = "discovery")]
pub(super) fn first_delay(worker: WorkerId, interval: Duration) -> Duration {
    let lot = xxh3_64(&worker.0.to_le_bytes()) % 1_000;
    interval / 2 + interval.mul_f64(lot as f64 / 2_000.0)
}
