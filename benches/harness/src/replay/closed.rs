//! Closed loop: clients route as fast as the router allows, over engines that respond immediately.
//!
//! Each client repeats these steps: take the next request of the workload, route it, let the chosen rank's
//! [`Engine`](crate::engine::Engine) serve it, deliver the rank's events, complete the prefill. It frees its own oldest
//! request once it holds more than its share of `inflight`. The first half of the requests warms caches and fills the
//! in-flight set; the second half is measured. All clients stop between the halves, so each clock reading falls on a
//! whole number of requests.
//!
//! **Turns.** A client continues with the next request immediately, unless clients take turns (`--take-turns`).
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

use pointsman_trial::driver::{Client, drive};

use super::Figures;
use super::state::{HalfClocks, InFlight, LoopState, Tally};
use crate::Failed;
use crate::engine::Change;
use crate::measure::Stopwatch;
use crate::targets::{Call, Target};

/// Runs the loop of `count` clients on the current tokio runtime, and shuts the target down.
///
/// # Errors
/// The target rejects a request, or there are fewer than two requests.
pub(super) async fn run<T: Target>(
    state: LoopState<T>,
    inflight: usize,
    count: usize,
    take_turns: bool,
) -> Result<Figures, Failed> {
    let [warm_up, measured] = state.halves()?;
    let state = Arc::new(state);
    let client = |_| LoopClient {
        state: Arc::clone(&state),
        takes_turns: take_turns && count > 1,
        end: 0,
        next: None,
        held: VecDeque::new(),
        share: (inflight / count).max(1),
        change: Change::default(),
        tally: Tally::new(),
    };
    let mut clients = run_half(&state, (0..count).map(client).collect(), warm_up).await?;
    clients.iter_mut().for_each(|client| client.tally = Tally::new());

    let (requests, clocks) = (measured.len(), HalfClocks::start());
    let clients = run_half(&state, clients, measured).await?;
    let figures = clocks.stop(requests, || {
        let mut sum = Tally::new();
        clients.iter().for_each(|client| sum.add(&client.tally));
        sum
    });
    let held: Vec<_> = clients.into_iter().flat_map(|client| client.held).collect();
    state.end(held).await?;
    Ok(figures)
}

/// Runs all clients until the cursor leaves `half`.
async fn run_half<T: Target>(
    state: &LoopState<T>,
    mut clients: Vec<LoopClient<T>>,
    half: Range<usize>,
) -> Result<Vec<LoopClient<T>>, Failed> {
    state.rewind(half.start);
    clients.iter_mut().for_each(|client| client.end = half.end);
    drive(clients).await
}

struct LoopClient<T: Target> {
    state: Arc<LoopState<T>>,
    /// Whether clients yield to each other after each request.
    takes_turns: bool,
    /// End of the present half.
    end: usize,
    /// The next request, taken as a part of the simulated side of the previous one.
    next: Option<(usize, Call)>,
    /// Requests routed and not yet freed, oldest first.
    held: VecDeque<InFlight<T>>,
    share: usize,
    change: Change,
    tally: Tally,
}

impl<T: Target> Client for LoopClient<T> {
    type Error = Failed;

    async fn send_next(&mut self) -> Result<bool, Failed> {
        let Self { state, end, next, change, tally, .. } = self;
        let next = next.take().or_else(|| tally.counts.simulated(|_| state.take(*end)));
        let Some(call) = next else { return Ok(false) };
        let (request, route_time, following) =
            state.perform(call, Stopwatch::start(), &mut tally.counts, change, || state.take(*end)).await?;
        self.next = following;
        self.tally.route(route_time);
        self.held.push_back(request);
        if self.held.len() > self.share
            && let Some(oldest) = self.held.pop_front()
        {
            self.state.free(oldest).await?;
        }
        // A real caller would now wait for its engine while other clients run.
        if self.takes_turns {
            tokio::task::yield_now().await;
        }
        Ok(true)
    }
}

#[cfg(test)]
pub(crate) mod tests;
