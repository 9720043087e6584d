//! Drills of replicas: processes of the gateway on loopback under load, and a fault per scenario.
//!
//! A scenario passes by facts: no failed request except at a killed gateway, readiness reached, the load of a lost
//! replica no longer counted. Times are reported and never decide. Mock engines run in this process.

mod fleet;
mod gateway;
mod nats;
mod relay;
mod scenarios;
mod traffic;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::num::{NonZero, NonZeroU32};
use std::path::PathBuf;
use std::thread::available_parallelism;

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};

use crate::Failed;
use fleet::{Fleet, Network};
use nats::NatsServer;

/// A fault and its expected effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// Kill a gateway
    Kill,
    /// Restart a killed gateway
    Restart,
    /// Separate two gateways from each other, with `--nats-server` one of them from the server
    Partition,
    /// Kill and restart a gateway in mid-load, three times
    KillInLoad,
    /// Restart engines under load
    EngineCrash,
    /// Engines close connections, respond with errors and respond late
    EngineErrors,
    /// Engines never respond, or stop in the middle of a response, on open connections
    EngineHangs,
    /// Engines respond with bytes that are not HTTP, wrong content types, and bodies that break off
    EngineGarbage,
    /// Engines close connections in the middle of a response
    HalfStreams,
    /// Lost, repeated, reordered and damaged event messages
    EventFaults,
    /// Many clients that send their requests a byte at a time
    SlowClients,
    /// Stop the NATS server for a while. Needs `--nats-server`
    NatsOutage,
    /// Start gateways before the NATS server. Needs `--nats-server`
    NatsLate,
}

/// Runs gateways on loopback under load and injects faults.
#[derive(Args, Clone, Debug)]
pub struct Drill {
    /// Scenarios [default: all]
    #[arg(value_enum)]
    pub scenarios: Vec<Scenario>,
    /// Program of the gateway [default: `pointsman` beside this program]
    #[arg(long)]
    pub gateway: Option<PathBuf>,
    /// Number of gateways
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub gateways: u32,
    /// Number of mock engines
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub engines: u32,
    /// Requests per second over all gateways, in an open loop
    #[arg(long, default_value = "1000")]
    pub rate: NonZeroU32,
    /// Number of different prompts
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub prompts: u32,
    /// Number of decisions of a restarted gateway that are examined
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub decisions: u32,
    /// Connections of slow clients
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub connections: u32,
    /// Program of a NATS server, which connects the gateways in all scenarios. They must have the feature `nats`
    #[arg(long)]
    pub nats_server: Option<PathBuf>,
    /// Time without the NATS server, in seconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub outage_s: u32,
    /// Print all outcomes as one JSON object, at the end
    #[arg(long)]
    pub json: bool,
}

/// Outcome of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The scenario.
    pub scenario: Scenario,
    /// Why the scenario was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<&'static str>,
    /// Reported figures by name. Times are in seconds, shares in percent.
    pub figures: BTreeMap<&'static str, Value>,
    /// Violated expectations; none if the scenario passed.
    pub violations: Vec<String>,
}

impl Outcome {
    fn new(scenario: Scenario) -> Self {
        Self { scenario, skipped: None, figures: BTreeMap::new(), violations: Vec::new() }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.scenario.to_possible_value().map(|name| name.get_name().to_owned()).unwrap_or_default();
        if let Some(reason) = self.skipped {
            return write!(f, "{name}: SKIPPED: {reason}");
        }
        let result = if self.violations.is_empty() { "passed" } else { "FAILED" };
        write!(f, "{name}: {result}")?;
        self.figures.iter().try_for_each(|(name, value)| write!(f, ", {name} {value}"))?;
        self.violations.iter().try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

impl Drill {
    /// Runs the scenarios and writes a line for each to `out`, or one JSON object for all.
    ///
    /// # Errors
    /// A scenario failed or could not be run.
    pub fn run(&self, mut out: impl Write) -> Result<(), Failed> {
        let runtime = crate::runtime(available_parallelism().map_or(1, NonZero::get))?;
        let mut outcomes = Vec::new();
        let ended = runtime.block_on(self.each_outcome(|outcome| {
            if !self.json {
                writeln!(out, "{outcome}")?;
            }
            outcomes.push(outcome);
            Ok(())
        }));
        if self.json {
            writeln!(out, "{}", json!({ "outcomes": &outcomes }))?;
        }
        ended?;
        let failed = outcomes.iter().filter(|outcome| !outcome.violations.is_empty());
        let failed: Vec<String> = failed.map(|outcome| format!("{:?}", outcome.scenario)).collect();
        if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", ")).into()) }
    }

    /// Runs the scenarios in their order.
    async fn each_outcome(&self, mut report: impl FnMut(Outcome) -> io::Result<()>) -> Result<(), Failed> {
        let program = match &self.gateway {
            Some(program) => program.clone(),
            None => std::env::current_exe()?.with_file_name(format!("pointsman{}", std::env::consts::EXE_SUFFIX)),
        };
        let scenarios = if self.scenarios.is_empty() { Scenario::value_variants() } else { &self.scenarios };
        let (of_server, of_gateways): (Vec<Scenario>, Vec<Scenario>) =
            scenarios.iter().partition(|scenario| matches!(scenario, Scenario::NatsOutage | Scenario::NatsLate));
        if !of_gateways.is_empty() {
            let mut server = self.nats_server.as_deref().map(NatsServer::new).transpose()?;
            let network = match &mut server {
                Some(server) => {
                    server.start().await?;
                    Network::NatsByRelays(server.address())
                }
                None => Network::Direct,
            };
            let mut fleet = Fleet::start(self, &program, network).await?;
            for scenario in of_gateways {
                report(scenarios::run(self, &mut fleet, scenario).await?)?;
            }
        }
        for scenario in of_server {
            let Some(server) = &self.nats_server else {
                report(Outcome { skipped: Some("--nats-server is not given"), ..Outcome::new(scenario) })?;
                continue;
            };
            let mut server = NatsServer::new(server)?;
            report(scenarios::run_with_server(self, &program, &mut server, scenario).await?)?;
        }
        Ok(())
    }
}
