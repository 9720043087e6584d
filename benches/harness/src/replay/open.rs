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
//! **Router CPU** is defined as in the [closed loop](crate::replay::closed). The pacer's thread counts as the simulated
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

use super::Figures;
use super::state::{Counts, HalfClocks, InFlight, LoopState, Tally};
use crate::Failed;
use crate::engine::Change;
use crate::measure::{Stopwatch, thread_cpu};
use crate::targets::{Call, Target};

/// Random gaps between the arrivals of a Poisson process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gaps {
    mean: Duration,
    seed: u64,
}

impl Gaps {
    /// Gaps of a mean rate per second.
    pub(super) fn new(rate: NonZeroU32, seed: u64) -> Self {
        Self { mean: Duration::from_secs(1) / rate.get(), seed }
    }

    /// The gaps of part `part` of a run.
    fn of(self, part: u64) -> impl Iterator<Item = Duration> {
        let mut rng = Rng::stream(self.seed, part);
        std::iter::repeat_with(move || self.mean.mul_f64(rng.exponential()))
    }
}

/// Runs the loop on the current tokio runtime, and shuts the target down.
///
/// # Errors
/// The target rejects a request, or there are fewer than two requests.
pub(super) async fn run<T: Target>(state: LoopState<T>, inflight: usize, gaps: Gaps) -> Result<Figures, Failed> {
    let [warm_up, measured] = state.halves()?;
    let (held, tally) = (Mutex::new(VecDeque::with_capacity(inflight + 1)), Mutex::new(Tally::new()));
    let shared = Arc::new(Shared { state: Arc::new(state), inflight_max: inflight, held, tally });
    run_half(&shared, gaps, 0, warm_up).await?;
    *shared.tally() = Tally::new();

    let (requests, clocks) = (measured.len(), HalfClocks::start());
    run_half(&shared, gaps, 1, measured).await?;
    let figures = clocks.stop(requests, || std::mem::replace(&mut *shared.tally(), Tally::new()));
    let held = std::mem::take(&mut *shared.held());
    let state = Arc::clone(&shared.state);
    drop(shared);
    state.end(held).await?;
    Ok(figures)
}

/// Sends the requests of `half` at their times, and waits for all of them. The pacer blocks a thread of its own, so that
/// arrivals do not depend on the runtime. Its CPU time counts as the simulated side's.
async fn run_half<T: Target>(shared: &Arc<Shared<T>>, gaps: Gaps, part: u64, half: Range<usize>) -> Result<(), Failed> {
    shared.state.rewind(half.start);
    let (sender, runtime) = (Arc::clone(shared), Handle::current());
    let pacer = tokio::task::spawn_blocking(move || {
        let (started, mut tasks) = (thread_cpu(), JoinSet::new());
        let (mut arrival, mut gaps) = (Stopwatch::start(), gaps.of(part));
        while let Some((number, call)) = sender.state.take(half.end) {
            arrival = arrival.later(gaps.next().unwrap_or_default());
            arrival.wait();
            tasks.spawn_on(Arc::clone(&sender).request(number, call, arrival), &runtime);
            // Ended tasks keep their memory until they are joined.
            while let Some(request) = tasks.try_join_next() {
                request.expect("request tasks end without panic")?;
            }
        }
        sender.tally().counts.engine_cpu += thread_cpu() - started;
        Ok::<_, Failed>(tasks)
    });
    let mut tasks = pacer.await.expect("the pacer ends without panic")?;
    while let Some(request) = tasks.join_next().await {
        request.expect("request tasks end without panic")?;
    }
    Ok(())
}

struct Shared<T: Target> {
    state: Arc<LoopState<T>>,
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
    async fn request(self: Arc<Self>, number: usize, call: Call, arrival: Stopwatch) -> Result<(), Failed> {
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
