//! Runs both routers alternately, each run in its own process, so that the routers do not affect each other's memory,
//! threads or clocks.

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::process::{Command, Stdio};

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use pointsman_bench::Failed;
use pointsman_bench::replay::{Common, Report};
use pointsman_versus::columns::print;

use crate::RouterChoice;
use crate::table::{Cell, Source, markdown};

/// A comparison: every combination of threads, workers and sources of requests, `pairs` times on both routers.
#[derive(Args, Debug)]
pub(crate) struct Compare {
    #[command(flatten)]
    common: Common,
    /// Number of simulated workers, one or several values
    #[arg(long, value_delimiter = ',', default_values_t = [8, 64, 512])]
    workers: Vec<u32>,
    /// Number of concurrent clients of a closed loop, one or several values [default: 1,16 without --rate]
    #[arg(long, value_delimiter = ',', value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    clients: Vec<usize>,
    /// Mean rate of an open loop in requests per second, one or several values
    #[arg(long, value_delimiter = ',')]
    rate: Vec<NonZeroU32>,
    /// Number of runtime threads, one or several values
    #[arg(long, value_delimiter = ',', default_values_t = [2])]
    threads: Vec<usize>,
    /// Number of runs per router and combination
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Print all runs as one JSON array; the table is printed on standard error
    #[arg(long)]
    json: bool,
}

impl Compare {
    /// Executes all runs and prints the table.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        let mut cells = Vec::new();
        for &threads in &self.threads {
            for &workers in &self.workers {
                for source in self.sources() {
                    cells.push(self.cell(threads, workers, source)?);
                }
            }
        }
        Ok(print(&markdown(&cells), &cells, self.json)?)
    }

    /// Closed loops of all numbers of clients, then open loops of all rates.
    fn sources(&self) -> impl Iterator<Item = Source> {
        let default: &[usize] = if self.rate.is_empty() { &[1, 16] } else { &[] };
        let clients = if self.clients.is_empty() { default } else { &self.clients };
        let closed = clients.iter().map(|&clients| Source::Clients { clients, take_turns: self.common.take_turns });
        closed.chain(self.rate.iter().copied().map(Source::Rate))
    }

    /// All runs of one combination. The order of the routers alternates between pairs, so that a temporary slowdown of
    /// the machine affects both.
    fn cell(&self, threads: usize, workers: u32, source: Source) -> Result<Cell, Failed> {
        let mut cell = Cell { threads, workers, source, ours: Vec::new(), theirs: Vec::new() };
        for pair in 0..self.pairs {
            let order = if pair % 2 == 0 {
                [RouterChoice::Pointsman, RouterChoice::Dynamo]
            } else {
                [RouterChoice::Dynamo, RouterChoice::Pointsman]
            };
            for subject in order {
                let report = self.child(subject, threads, workers, source)?;
                writeln!(
                    io::stderr(),
                    "{threads} threads, {workers} workers, {source}, pair {} of {}: \
                     {} {:.1} µs CPU, p50 {:.1} µs, hit rate {:.4}",
                    pair + 1,
                    self.pairs,
                    report.target,
                    report.router_cpu_us_per_request,
                    report.route_us.p50,
                    report.hit_rate,
                )?;
                match subject {
                    RouterChoice::Pointsman => cell.ours.push(report),
                    RouterChoice::Dynamo => cell.theirs.push(report),
                }
            }
        }
        Ok(cell)
    }

    fn child(&self, subject: RouterChoice, threads: usize, workers: u32, source: Source) -> Result<Report, Failed> {
        let mut command = self.command(subject, threads, workers, source)?;
        let output = command.arg("--json").stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("{command:?} failed: {}", output.status).into());
        }
        Ok(serde_json::from_slice(&output.stdout).map_err(|error| format!("{command:?} printed no report: {error}"))?)
    }

    /// Command for a single run in its own process.
    fn command(&self, subject: RouterChoice, threads: usize, workers: u32, source: Source) -> io::Result<Command> {
        let target = subject.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", "--target", &target]);
        for (flag, value) in [("--threads", threads), ("--workers", workers as usize)] {
            command.args([flag, &value.to_string()]);
        }
        let mut common = self.common.clone();
        match source {
            Source::Clients { clients, .. } => command.args(["--clients", &clients.to_string()]),
            Source::Rate(rate) => {
                common.take_turns = false; // a setting of the closed loop
                command.args(["--rate", &rate.to_string()])
            }
        };
        command.args(common.to_arguments());
        Ok(command)
    }
}
