//! Command line of the harness.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use metrics_exporter_prometheus::PrometheusBuilder;
use pointsman_bench::cli::Replay;
use pointsman_bench::compare::{Compare, CompareEndpoints};
use pointsman_bench::drift::Drift;
use pointsman_bench::embedded::Embedded;
use pointsman_bench::events::Events;
use pointsman_bench::load::Load;
use pointsman_bench::page::Page;
use pointsman_bench::simulate::Simulate;
use pointsman_bench::suite::RunSuite;

/// Measures Pointsman under load
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replays a trace, or a generated workload, in a closed loop and reports what routing cost
    Replay(Replay),
    /// Measures what engines' events cost: decoding, hashing and indexing them, on one thread
    Events(Events),
    /// Serves a workload on a simulated fleet in virtual time and reports what its users would have seen
    Simulate(Box<Simulate>),
    /// Simulates several policies on one workload, in pairs, with several seeds
    Compare(Box<Compare>),
    /// Simulates several policies on a list of workloads, and says where each wins and loses
    Suite(RunSuite),
    /// Fails where policies no longer do in a small simulation what was recorded of them
    Drift(Drift),
    /// Sends a workload to an endpoint of OpenAI's API over HTTP and reports what came back when
    Load(Box<Load>),
    /// Sends the same workloads to several endpoints, in turns that change sides, and compares what came back
    CompareEndpoints(Box<CompareEndpoints>),
    /// Makes one HTML page of results, with plots; it needs no network
    Report(Page),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Replay(replay) => run(&replay),
        Command::Events(events) => measure(&events),
        Command::Simulate(simulate) => simulate.run(io::stdout().lock(), io::stderr().lock()).map_err(Into::into),
        Command::Compare(compare) => compare.run(io::stdout().lock(), io::stderr().lock()).map_err(Into::into),
        Command::Suite(suite) => suite.run(io::stdout().lock(), io::stderr().lock()).map_err(Into::into),
        Command::Drift(drift) => drift.run(io::stdout().lock()).map_err(Into::into),
        Command::Load(load) => load.run(io::stdout().lock(), io::stderr()).map_err(Into::into),
        Command::CompareEndpoints(compare) => compare.run(io::stdout().lock(), io::stderr()).map_err(Into::into),
        Command::Report(page) => page.write().map_err(Into::into),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell if standard error is gone.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(replay: &Replay) -> Result<(), Box<dyn Error>> {
    // Before the router starts: its actors take their instruments when they do.
    let metrics = replay.metrics.then(|| PrometheusBuilder::new().install_recorder()).transpose()?;
    let report = replay.run(Embedded::start)?;
    if let Some(metrics) = metrics {
        write!(io::stderr(), "{}", metrics.render())?;
    }
    Ok(report.write(io::stdout().lock(), replay.json)?)
}

fn measure(events: &Events) -> Result<(), Box<dyn Error>> {
    Ok(events.run()?.write(io::stdout().lock(), events.json)?)
}
