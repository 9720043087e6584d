//! Open loop: requests arrive at a fixed mean rate, each in a task of its own, whatever the speed of the router.
//!
//! The gaps between arrivals are independent and exponentially distributed (a Poisson process), drawn from a seed; both
//! halves of the workload arrive at the rate. A thread outside the runtime, the *pacer*, creates each call before its
//! arrival, waits for the scheduled time and spawns the task. The task routes the request, lets the chosen rank's
//! [`Engine`](crate::engine::Engine) serve it, delivers the rank's events, completes the prefill, and frees the oldest
//! request once more than `inflight` are out.
//!
//! **Route time** runs from the *scheduled* arrival, so a request also counts the time that it waits because the router
//! is behind (no coordinated omission). It contains the wake-up of a runtime thread for the new task, as for a request
//! from a socket. The outcome's number of requests over its wall time is the achieved rate; it is below the given one if
//! the router cannot keep up.
//!
//! **Router CPU** is defined as in the [closed loop](crate::closed_loop). The pacer's thread counts as the simulated
//! side. The loop's own overhead is larger than in the closed loop: a task and, if the runtime was idle, the wake-up of
//! its thread.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pointsman_trial::workload::Rng;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::engine::Change;
use crate::loop_state::{Counts, HalfClocks, InFlight, LoopError, LoopState, Outcome, Shape, Tally, Workload};
use crate::measure::{Stopwatch, thread_cpu};
use crate::progress::Progress;
use crate::target::{Call, Target};

/// Arrivals of an open loop.
#[derive(Clone, Copy, Debug)]
pub struct Arrivals {
    /// Mean number of requests per second.
    pub per_second: NonZeroU32,
    /// Seed of the gaps.
    pub seed: u64,
}

/// Runs the loop over `target` on the current tokio runtime, and shuts the target down.
///
/// # Errors
/// The target rejects a request, or there are fewer than two requests.
pub(crate) async fn run<T: Target>(
    target: T,
    workload: Workload,
    shape: Shape,
    arrivals: Arrivals,
    rss_before_bytes: Option<u64>,
    progress: Progress,
) -> Result<Outcome, LoopError> {
    let [warm_up, measured] = workload.halves()?;
    let state = LoopState::new(target, workload, &shape, progress);
    let (held, tally) = (Mutex::new(VecDeque::with_capacity(shape.inflight + 1)), Mutex::new(Tally::new()));
    let shared = Arc::new(Shared { state, inflight_max: shape.inflight, held, tally });

    let [first, second] = [0, 1].map(|half| Gaps::new(arrivals, half));
    run_half(&shared, first, warm_up).await?;
    *shared.tally() = Tally::new();

    let (requests, clocks) = (measured.len(), HalfClocks::start());
    run_half(&shared, second, measured).await?;
    let outcome = clocks.stop(requests, rss_before_bytes, || std::mem::replace(&mut *shared.tally(), Tally::new()));
    shared.state.finish_progress();

    let held = std::mem::take(&mut *shared.held());
    for request in held {
        shared.state.free(request).await?;
    }
    if let Some(shared) = Arc::into_inner(shared) {
        shared.state.target.shutdown().await;
    }
    Ok(outcome)
}

/// Gaps between arrivals.
struct Gaps {
    rng: Rng,
    mean: Duration,
}

impl Gaps {
    fn new(arrivals: Arrivals, half: u64) -> Self {
        let mean = Duration::from_secs(1) / arrivals.per_second.get();
        Self { rng: Rng::stream(arrivals.seed, half), mean }
    }

    fn next(&mut self) -> Duration {
        self.mean.mul_f64(self.rng.exponential())
    }
}

/// Sends the requests of `half` at their times, and waits for all of them.
async fn run_half<T: Target>(shared: &Arc<Shared<T>>, gaps: Gaps, half: Range<usize>) -> Result<(), LoopError> {
    shared.state.rewind(half.start);
    let (sender, runtime) = (Arc::clone(shared), Handle::current());
    let pacer = tokio::task::spawn_blocking(move || send_all(&sender, gaps, half.end, &runtime));
    let mut tasks = pacer.await.expect("the pacer ends without panic");
    while let Some(request) = tasks.join_next().await {
        request.expect("request tasks end without panic")?;
    }
    Ok(())
}

/// The pacer: spawns a task per request at its scheduled time. The CPU time of its thread counts as the simulated side's.
fn send_all<T: Target>(
    shared: &Arc<Shared<T>>,
    mut gaps: Gaps,
    end: usize,
    runtime: &Handle,
) -> JoinSet<Result<(), LoopError>> {
    let started = thread_cpu();
    let mut tasks = JoinSet::new();
    let mut arrival = Stopwatch::start();
    while let Some((number, call)) = shared.state.take(end) {
        arrival = arrival.later(gaps.next());
        arrival.wait();
        tasks.spawn_on(Arc::clone(shared).request(number, call, arrival), runtime);
    }
    shared.tally().counts.engine_cpu += thread_cpu() - started;
    tasks
}

struct Shared<T: Target> {
    state: LoopState<T>,
    inflight_max: usize,
    /// Requests routed and not yet freed, in the order of the ends of their prefills.
    held: Mutex<VecDeque<InFlight<T>>>,
    tally: Mutex<Tally>,
}

impl<T: Target> Shared<T> {
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().expect("counting does not panic")
    }

    fn held(&self) -> MutexGuard<'_, VecDeque<InFlight<T>>> {
        self.held.lock().expect("queueing does not panic")
    }

    /// One request, from its arrival on.
    async fn request(self: Arc<Self>, number: usize, call: Call, arrival: Stopwatch) -> Result<(), LoopError> {
        let (mut counts, mut change) = (Counts::default(), Change::default());
        let (request, route_time, ()) =
            self.state.perform((number, call), arrival, &mut counts, &mut change, || ()).await?;
        self.tally().request(route_time, &counts);
        let oldest = self.exchange(request);
        match oldest {
            Some(oldest) => self.state.free(oldest).await,
            None => Ok(()),
        }
    }

    /// Adds a request to those in flight. Returns the oldest if there are too many.
    fn exchange(&self, request: InFlight<T>) -> Option<InFlight<T>> {
        let mut held = self.held();
        held.push_back(request);
        if held.len() > self.inflight_max { held.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests;
