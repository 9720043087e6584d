//! Closed loop: clients route as fast as the router allows, over engines that respond immediately.
//!
//! Each client repeats these steps: take the next request of the workload, route it, let the chosen rank's
//! [`Engine`](crate::engine::Engine) serve it, deliver the rank's events, complete the prefill. It frees its own oldest
//! request once it holds more than its share of `inflight`. The first half of the requests warms caches and fills the
//! in-flight set; the second half is measured. All clients stop between the halves, so each clock reading falls on a
//! whole number of requests.
//!
//! **Turns.** A client continues with the next request immediately, unless clients take turns ([`Clients::take_turns`]).
//! In that mode it yields to the others after each request, like a caller that waits for its engine. The two modes show
//! different properties:
//!
//! - Without turns, a client that its router suspends queues behind the others inside `route`, and that queue dominates
//!   p99. A router with an immediate response rarely suspends a client. Then only as many clients as the runtime has
//!   threads run most of a half, while the requests of the others stay in flight. 16 clients over 8 ranks had a hit
//!   rate of 0.150 without turns and 0.179 with turns.
//! - With turns, clients queue between requests, outside the measured time of `route`. All clients are concurrent with
//!   any router, and `route` is the duration of a call that does not wait for a thread first.
//!
//! **Router CPU** is the process' CPU time over the measured half, all threads, minus the simulated side: engines,
//! building events, copying the next call's tokens and keeping counts, measured by the thread's CPU clock. Hashing of
//! requests, index and booking are included. The loop's own overhead is included too and is the same for every target:
//! two readings of a CPU clock, two of a wall clock, bookkeeping, and yields if clients take turns. With a target that
//! does nothing, this overhead was 0.9 to 1.0 µs per request with one client, and 1.4 to 2.0 µs with 16 clients that
//! take turns, at 8 and at 512 ranks.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use tokio::task::JoinSet;

use crate::engine::Change;
use crate::loop_state::{HalfClocks, InFlight, LoopError, LoopState, Outcome, Shape, Tally, Workload};
use crate::measure::Stopwatch;
use crate::progress::Progress;
use crate::target::Target;

/// The clients of a closed loop.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// Number of concurrent clients.
    pub count: usize,
    /// Whether clients yield to each other after each request. Without effect for a single client.
    pub take_turns: bool,
}

/// Runs the loop over `target` on the current tokio runtime, and shuts the target down.
///
/// # Errors
/// The target rejects a request, or there are fewer than two requests.
pub(crate) async fn run<T: Target>(
    target: T,
    workload: Workload,
    shape: Shape,
    clients: Clients,
    rss_before_bytes: Option<u64>,
    progress: Progress,
) -> Result<Outcome, LoopError> {
    let [warm_up, measured] = workload.halves()?;
    let state = LoopState::new(target, workload, &shape, progress);
    let shared = Arc::new(Shared { state, takes_turns: clients.take_turns && clients.count > 1 });

    let share = (shape.inflight / clients.count).max(1);
    let clients = (0..clients.count).map(|_| LoopClient::new(share)).collect();
    let mut clients = run_half(&shared, clients, warm_up).await?;
    for client in &mut clients {
        client.tally = Tally::new();
    }

    let (requests, clocks) = (measured.len(), HalfClocks::start());
    let clients = run_half(&shared, clients, measured).await?;
    let outcome = clocks.stop(requests, rss_before_bytes, || {
        let mut sum = Tally::new();
        clients.iter().for_each(|client| sum.add(&client.tally));
        sum
    });
    shared.state.finish_progress();

    for request in clients.into_iter().flat_map(|client| client.held) {
        shared.state.free(request).await?;
    }
    if let Some(shared) = Arc::into_inner(shared) {
        shared.state.target.shutdown().await;
    }
    Ok(outcome)
}

/// Runs all clients until the cursor leaves `half`.
async fn run_half<T: Target>(
    shared: &Arc<Shared<T>>,
    clients: Vec<LoopClient<T>>,
    half: Range<usize>,
) -> Result<Vec<LoopClient<T>>, LoopError> {
    shared.state.rewind(half.start);
    let mut tasks = JoinSet::new();
    for client in clients {
        tasks.spawn(client.work(Arc::clone(shared), half.end));
    }
    let mut done = Vec::with_capacity(tasks.len());
    while let Some(client) = tasks.join_next().await {
        done.push(client.expect("client tasks end without panic")?);
    }
    Ok(done)
}

struct Shared<T: Target> {
    state: LoopState<T>,
    /// Whether clients yield to each other after each request.
    takes_turns: bool,
}

struct LoopClient<T: Target> {
    /// Requests routed and not yet freed, oldest first.
    held: VecDeque<InFlight<T>>,
    share: usize,
    change: Change,
    tally: Tally,
}

impl<T: Target> LoopClient<T> {
    fn new(share: usize) -> Self {
        Self { held: VecDeque::with_capacity(share + 1), share, change: Change::default(), tally: Tally::new() }
    }

    async fn work(mut self, shared: Arc<Shared<T>>, end: usize) -> Result<Self, LoopError> {
        let state = &shared.state;
        let counts = &mut self.tally.counts;
        let mut next = counts.simulated(|_| state.take(end));
        while let Some(call) = next {
            let (counts, change) = (&mut self.tally.counts, &mut self.change);
            let (request, route_time, following) =
                state.perform(call, Stopwatch::start(), counts, change, || state.take(end)).await?;
            next = following;
            self.tally.route(route_time);
            self.held.push_back(request);
            if self.held.len() > self.share
                && let Some(oldest) = self.held.pop_front()
            {
                state.free(oldest).await?;
            }
            // A real caller would now wait for its engine while other clients run.
            if shared.takes_turns {
                tokio::task::yield_now().await;
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
pub(crate) mod tests;
