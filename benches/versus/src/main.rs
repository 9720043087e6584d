//! The same closed loop over Pointsman and its nearest peer, `dynamo-kv-router`, run by run in alternation; and both
//! side by side over one fleet, to see whether they choose alike.

mod compare;
mod indexes;
mod parity;
mod peer;
mod table;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use pointsman_bench::cli::Replay;
use pointsman_bench::embedded::Embedded;

/// Compares Pointsman with its nearest peer under the same load
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
    /// Makes a single run in this process
    Run(Run),
    /// Replays events and questions over the index alone, beside its peers
    Index(indexes::Indexes),
    /// Replays one index in this process, and prints its figures as JSON
    IndexRun(Replayed),
    /// Drives both routers side by side and counts where they choose differently
    Parity(parity::Parity),
}

#[derive(Args)]
struct Run {
    /// The router to run
    #[arg(long, value_enum)]
    target: Subject,
    #[command(flatten)]
    peer: PeerOptions,
    #[command(flatten)]
    replay: Replay,
}

#[derive(Args)]
struct Replayed {
    #[command(flatten)]
    replay: pointsman_versus::index::Replay,
}

/// What only the peer knows.
#[derive(Args, Clone, Copy, Debug)]
struct PeerOptions {
    /// Threads of the peer's that apply events [default: the peer's]
    #[arg(long)]
    peer_event_threads: Option<usize>,
}

/// A router to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// Ours
    Pointsman,
    /// dynamo-kv-router
    Peer,
}

impl Run {
    fn run(&self) -> Result<(), Box<dyn Error>> {
        let report = match self.target {
            Subject::Pointsman => self.replay.run(Embedded::start)?,
            Subject::Peer => {
                self.replay.run(async |options| peer::Peer::start(options, self.peer.peer_event_threads).await)?
            }
        };
        Ok(report.write(io::stdout().lock(), self.replay.json)?)
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
        Some(Command::Index(indexes)) => indexes.run(),
        Some(Command::IndexRun(replayed)) => replayed.run(),
        Some(Command::Parity(parity)) => parity.run(),
        None => arguments.compare.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell if standard error is gone.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
