//! Comparisons of Pointsman with `dynamo-kv-router`: the same closed loop over both in alternating runs, both side by
//! side over one fleet to compare their decisions, their indexes alone (and that of `kv-index`), and a fleet in virtual
//! time driven by either router.

mod compare;
mod dynamo;
mod indexes;
mod metered;
mod parity;
mod simulate;
mod suite;
mod table;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use pointsman_bench::cli::Replay;
use pointsman_bench::embedded::Embedded;

use metered::{Instructions, Metered, RoundRobin};

/// Compare Pointsman with dynamo-kv-router under the same load
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: compare::Compare,
}

#[derive(Subcommand)]
enum Command {
    /// Execute a single run in this process
    Run(Run),
    /// Simulate a fleet in virtual time, driven by either router
    Simulate(Box<simulate::Simulated>),
    /// Compute the figures of dynamo-kv-router for cases of the suite's matrix
    Suite(suite::SuiteOfDynamo),
    /// Replay events and queries on the indexes alone
    Index(indexes::Indexes),
    /// Replay one index in this process and print its figures as JSON
    IndexRun(Replayed),
    /// Drive both routers side by side and count different decisions
    Parity(parity::Parity),
}

#[derive(Args)]
struct Run {
    /// Router to run
    #[arg(long, value_enum)]
    target: RouterChoice,
    #[command(flatten)]
    dynamo: DynamoOptions,
    /// Print the number of user-mode instructions per request instead, including the loop's own
    #[arg(long)]
    count_instructions: bool,
    #[command(flatten)]
    replay: Replay,
}

#[derive(Args)]
struct Replayed {
    #[command(flatten)]
    replay: pointsman_versus::index::Replay,
}

/// Options of dynamo-kv-router only.
#[derive(Args, Clone, Copy, Debug)]
struct DynamoOptions {
    /// Number of dynamo-kv-router's event threads [default: its own default]
    #[arg(long)]
    dynamo_event_threads: Option<usize>,
}

/// A router to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RouterChoice {
    /// Pointsman
    Pointsman,
    /// dynamo-kv-router
    Dynamo,
    /// A router that only selects ranks in rotation, to measure the loop itself
    RoundRobin,
}

impl Run {
    fn run(&self) -> Result<(), Box<dyn Error>> {
        if self.count_instructions {
            return self.count();
        }
        let report = match self.target {
            RouterChoice::Pointsman => self.replay.run(Embedded::start)?,
            RouterChoice::Dynamo => self
                .replay
                .run(async |options| dynamo::DynamoRouter::start(options, self.dynamo.dynamo_event_threads).await)?,
            RouterChoice::RoundRobin => self.replay.run(async |options| Ok(RoundRobin::new(options.fleet())))?,
        };
        Ok(report.write(io::stdout().lock(), self.replay.json)?)
    }

    fn count(&self) -> Result<(), Box<dyn Error>> {
        let instructions = Instructions::open();
        let report = match self.target {
            RouterChoice::Pointsman => {
                self.replay.run(async |options| Ok(Metered::new(Embedded::start(options).await?, &instructions)))?
            }
            RouterChoice::Dynamo => self.replay.run(async |options| {
                let dynamo = dynamo::DynamoRouter::start(options, self.dynamo.dynamo_event_threads).await?;
                Ok(Metered::new(dynamo, &instructions))
            })?,
            RouterChoice::RoundRobin => {
                self.replay.run(async |options| Ok(Metered::new(RoundRobin::new(options.fleet()), &instructions)))?
            }
        };
        // The number of warm-up requests equals that of measured requests, or is one less.
        let requests = 2 * report.requests;
        let counted = instructions.read().ok_or("the system counts no instructions for this process")?;
        Ok(writeln!(io::stdout(), "{:.1}", counted as f64 / requests as f64)?)
    }
}

impl Replayed {
    fn run(&self) -> Result<(), Box<dyn Error>> {
        let timed = self.replay.time().map_err(|error| error.to_string())?;
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &timed)?;
        Ok(writeln!(out)?)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.command {
        Some(Command::Run(run)) => run.run(),
        Some(Command::Simulate(simulated)) => simulated.run(),
        Some(Command::Suite(suite)) => suite.run().map_err(Into::into),
        Some(Command::Index(indexes)) => indexes.run(),
        Some(Command::IndexRun(replayed)) => replayed.run(),
        Some(Command::Parity(parity)) => parity.run(),
        None => arguments.compare.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A write error on standard error is ignored, because there is no other output.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
