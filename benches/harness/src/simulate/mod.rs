//! Simulation of the real router over a fleet of modelled engines, in virtual time.
//!
//! Models the environment of the router: arrivals, engines, and the delay of their events. Equal setups, workloads and
//! seeds give a bit-identical [`Run`], for any speed of the machine and any number of index shards. The readers of a
//! run compute the figures.
//!
//! Each rank is a [`pointsman_trial::engine::Rank`]; the durations of its steps drive an event queue in µs. A request
//! arrives at its time in the workload, independently of earlier requests, unless the workload is a closed loop or
//! consists of programs, whose sessions the router receives. It is routed immediately, and submitted to the chosen rank
//! without a network delay. KV events of a rank reach the router [`Setup::event_delay_us`] after the end of their step.
//!
//! **Disaggregated serving.** With [`Setup::disaggregation`] a request is booked on a decode rank, then on a prefill
//! rank. The prefill leg generates one token, which is dropped. Its end ends the prefill booking and starts the transfer
//! of the whole prompt, during which the blocks stay in use on the prefill rank. Transfers do not share bandwidth. The
//! decode leg starts after the transfer and generates all output tokens. Cached tokens, rank, reachable tokens and
//! regret of a record are those of the prefill leg, among the prefill ranks.
//!
//! **Not modelled:** the router's own time (its decisions take no virtual time; `replay` measures their cost),
//! gateways, tokenizers, the network, clients that disconnect, and engine failures.
//!
//! **Oracle.** At the placement of a request, the oracle estimates the time to its first token for every rank, from the
//! true state of the engines, which no router has. The estimate is the sum of:
//!
//! - the rest of the current step,
//! - the prompt tokens of all requests placed there before that are still to compute, and the request's own tokens that
//!   are neither cached nor will be after that computation: tokens divided by the rank's prefill rate, and their
//!   attention,
//! - for each of the steps required (tokens divided by the step's capacity beside its decodes, rounded up) the fixed
//!   time of a step and the time of the currently decoding sequences and draft tokens, at their current context,
//!
//! each by the rank's own [`pointsman_trial::engine::StepCost`]. Regret is the estimate for the chosen rank minus the
//! minimum over all ranks: 0 if the decision was optimal for this request alone. The estimate ignores future requests,
//! the cost for other requests, preemption, blocks in use (a rank with full memory admits later), and the cost of
//! loading from host memory.

mod cli;
mod driver;
mod feed;
mod heap;
mod rank;
mod time;

use pointsman_trial::workload::Workload;

pub use cli::{EngineFigures, EngineSpec, FleetArguments, Simulate};

use crate::Failed;
use crate::fleet::Setup;
use crate::results::{Facts, Reporting, Run};
use crate::targets::{Target, not_started};
use driver::Driver;
use time::VirtualTime;

/// Largest jump of the clock with several replicas, whose timers have a resolution of milliseconds.
const REPLICA_SLICE_US: u64 = 1_000;

impl Setup {
    /// Facts for a report on serving `workload`.
    #[must_use]
    pub fn facts(&self, workload: &Workload, reporting: &Reporting) -> Facts {
        Facts {
            consults_index: self.router_config().is_ok_and(|config| config.has_index()),
            workers: self.fleet.workers,
            dp_size: self.fleet.dp_size,
            ..reporting.facts(self.router.policy.name().to_owned(), self.router.seed, workload)
        }
    }
}

/// Serves `workload` on the fleet of `setup`, through the router that `start` creates. Blocks until every request has
/// ended; must not be called inside a runtime.
///
/// `start` runs on the simulation's runtime, whose paused clock only jumps to the next timer.
///
/// ```
/// use pointsman_bench::fleet::Setup;
/// use pointsman_bench::simulate;
/// use pointsman_bench::targets::Embedded;
/// use pointsman_bench::workload::generate::Generator;
///
/// let workload = "siblings:groups=2".parse::<Generator>()?.generate(1);
/// let run = simulate::run(&Setup::new(2, 1), &workload, Embedded::start)?;
/// assert!(run.requests.iter().all(|request| request.ended_us.is_some()));
/// # Ok::<(), pointsman_bench::Failed>(())
/// ```
///
/// # Errors
/// The setup is invalid, or the router fails. A rejected request is no error: its record contains the reason.
pub fn run<T: Target>(
    setup: &Setup,
    workload: &Workload,
    start: impl AsyncFnOnce(&Setup) -> Result<T, Failed>,
) -> Result<Run, Failed> {
    setup.validate()?;
    if workload.requests.is_empty() {
        return Err("the workload has no requests".into());
    }
    let (runtime, rest) = time::runtime().map_err(|error| format!("cannot start a runtime: {error}"))?;
    runtime.block_on(async {
        let target = start(setup).await.map_err(not_started::<T>)?;
        let slice_us = if setup.replicas.count > 1 { REPLICA_SLICE_US } else { u64::MAX };
        let time = VirtualTime::start(rest, slice_us);
        time.settle().await;
        Driver::new(target, time, setup, workload)?.run().await
    })
}

#[cfg(test)]
mod tests;
