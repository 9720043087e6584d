//! The simulation: the real router over a fleet of modelled engines, in virtual time.
//!
//! Owns the world around the router: arrivals, engines, the way of their events. Promises that the same setup, workload
//! and seed give the same [`Run`] to the bit, however fast the machine is and however many shards the router has. Leaves
//! figures to those who read the run.
//!
//! Each rank is an [`pointsman_trial::engine::Rank`]; its steps' durations move a heap of events in µs. A request arrives when its
//! workload says, whatever became of those before it, unless the workload is a closed loop. The router is asked at once;
//! when it has placed the request, the rank has it, without a network between. What a rank announces reaches the router
//! [`Setup::event_delay_us`] after the step that made it has ended.
//!
//! **What is not in it.** The router's own time: it decides in no time here, and `replay` measures what it costs. Nor a
//! gateway, tokenizers, the network, clients that go away, or engines that fail.
//!
//! **The oracle.** When a request is placed, the time to its first token is reckoned for every rank, with the engines'
//! true state, which no router has:
//!
//! - the rest of the step under way,
//! - then the prompt tokens still to compute of all requests placed there before, and its own that are neither cached
//!   there nor will be once those have been computed: tokens over the rank's prefill rate, and their attention,
//! - and in each of the steps that this takes (tokens over the step's room beside its decodes, rounded up) the step's
//!   constant and its share of the sequences that decode now, at their context of now,
//!
//! each by the rank's own [`pointsman_trial::engine::StepCost`]. Regret is the estimate for the rank chosen less the least of all:
//! 0 where the router did the best for this request alone. The estimate knows nothing of requests to come, of what this
//! one costs others, of preemption, of blocks in use (a rank whose memory is full admits later), nor of the cost of
//! loading from host memory.

mod cli;
mod driver;
mod heap;
mod rank;
mod setup;
mod time;

use std::io;

use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman_trial::engine::ConfigError;
use pointsman_trial::workload::Workload;

pub(crate) use cli::write_records;
pub use cli::{EngineFigures, EngineSpec, FleetArguments, Preset, RouterArguments, Simulate, SimulateCommandError};
pub use setup::{RouterSetup, Setup, Warmup};

use crate::record::Run;
use crate::target::{Refusal, Target};
use driver::Driver;
use time::VirtualTime;

/// Why a simulation has no result.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The system gave no runtime.
    #[error("cannot start a runtime: {0}")]
    Runtime(#[source] io::Error),
    /// An engine that cannot be.
    #[error("worker {worker}: {reason}")]
    Engine {
        /// Whose.
        worker: WorkerId,
        /// What is wrong with it.
        reason: ConfigError,
    },
    /// Engines and fleet do not fit each other.
    #[error("{0}")]
    Setup(String),
    /// There is nothing to serve.
    #[error("the workload has no requests")]
    Empty,
    /// The router would not start.
    #[error("cannot start {target}: {reason}")]
    Start {
        /// The router.
        target: &'static str,
        /// What it said.
        reason: Refusal,
    },
    /// The router refused what it must not refuse.
    #[error("{target} could not {step} request {request}: {reason}")]
    Refused {
        /// The router.
        target: &'static str,
        /// What was asked of it.
        step: &'static str,
        /// Position in the workload.
        request: usize,
        /// What it said.
        reason: Refusal,
    },
    /// The router did not take events.
    #[error("{target} could not apply events: {reason}")]
    Events {
        /// The router.
        target: &'static str,
        /// What it said.
        reason: Refusal,
    },
    /// The router chose a rank that does not exist.
    #[error("{target} sent request {request} to {rank}, which is no rank of the fleet")]
    UnknownRank {
        /// The router.
        target: &'static str,
        /// Position in the workload.
        request: usize,
        /// What it chose.
        rank: WorkerRank,
    },
    /// Requests wait that nothing will place.
    #[error("{target} leaves {requests} requests unplaced over idle engines, {at_us} µs after the start")]
    Stuck {
        /// The router.
        target: &'static str,
        /// How many.
        requests: usize,
        /// When it was given up.
        at_us: u64,
    },
    /// Bookings are left when every request has ended.
    #[error("{target} holds {bookings} bookings after the last request has ended")]
    NotAtRest {
        /// The router.
        target: &'static str,
        /// How many.
        bookings: usize,
    },
}

/// Serves `workload` on the fleet of `setup`, through the router that `start` makes. Blocks until every request has
/// ended; must not be called from inside a runtime.
///
/// `start` runs on the simulation's runtime, whose clock stands still but for jumps to the next timer.
///
/// ```
/// use pointsman_bench::embedded::Embedded;
/// use pointsman_bench::simulate::{self, Setup};
/// use pointsman_bench::workload::generate::Generator;
///
/// let workload = "siblings:groups=2".parse::<Generator>()?.generate(1);
/// let run = simulate::run(&Setup::new(2, 1), &workload, Embedded::start_simulated)?;
/// assert!(run.requests.iter().all(|request| request.ended_us.is_some()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The setup is impossible, or the router fails. A request that is refused is no error: its record says why.
pub fn run<T: Target>(
    setup: &Setup,
    workload: &Workload,
    start: impl AsyncFnOnce(&Setup) -> Result<T, Refusal>,
) -> Result<Run, SimulateError> {
    setup.validate()?;
    if workload.requests.is_empty() {
        return Err(SimulateError::Empty);
    }
    let (runtime, rest) = time::runtime().map_err(SimulateError::Runtime)?;
    runtime.block_on(async {
        let target = start(setup).await.map_err(|reason| SimulateError::Start { target: T::NAME, reason })?;
        let time = VirtualTime::start(rest);
        time.settle().await;
        Driver::new(target, time, setup, workload)?.run().await
    })
}

#[cfg(test)]
mod tests;
