//! The demo: what the router is worth, on one machine without a GPU, in less than a minute.
//!
//! Owns `pointsman demo`: its settings, and the order of things. Promises both runs the same requests and cold caches,
//! the same engines' models and the same gateway, so that the policy is all that differs; and that times are not shown
//! where the machine could not keep up. Leaves the command line to `main`.
//!
//! `fleet` starts engines and gateway, `workload` says what is asked, `drive` and `client` ask, `figures` sums
//! up, `report` tells.

mod client;
mod drive;
mod figures;
mod fleet;
mod lag;
mod progress;
mod report;
mod workload;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pointsman::discovery::NamedWorker;
use pointsman::select::Policy;
use pointsman::{Router, RouterConfig};

pub use figures::{Figures, Times};
pub use progress::Progress;
pub use report::Report;

use crate::mock::MockError;
use client::ClientError;
use drive::{Target, drive};
use fleet::Fleet;
use workload::Workload;

/// The policy of the second run: the default one.
const DEMO_POLICY: Policy = Policy::Latency;

/// Most clients and requests: far beyond what tells anything on one machine.
const CLIENTS_MAX: u32 = 1024;
const REQUESTS_MAX: u32 = 100_000;

/// Fastest pace of the engines.
const TIME_SCALE_MAX: f64 = 100.0;

/// What the demo is told, which is also the command line of `pointsman demo`.
///
/// ```
/// use pointsman_trial::demo::DemoConfig;
///
/// assert!(DemoConfig::default().validate().is_ok());
/// assert!(DemoConfig { clients: 0, ..DemoConfig::default() }.validate().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Args)]
#[command(next_line_help = true)]
pub struct DemoConfig {
    /// Makes up the workload. Same seed, clients and requests, same bytes.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// Requests in each of the two runs.
    #[arg(long, value_name = "REQUESTS", default_value_t = 640)]
    pub requests: u32,
    /// Clients, each with a conversation at a time.
    #[arg(long, value_name = "CLIENTS", default_value_t = 64)]
    pub clients: u32,
    /// Virtual seconds a real one: 0.5 runs engines and clients at half the pace, for machines that cannot keep up;
    /// 0 as fast as the machine can, which shows hit rates but no times.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub time_scale: f64,
    /// Keeps engines and gateway up after the table, until Ctrl-C.
    #[arg(long)]
    pub stay: bool,
    /// Prints the figures as one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

impl Default for DemoConfig {
    fn default() -> Self {
        Self { seed: 1, requests: 640, clients: 64, time_scale: 1.0, stay: false, json: false }
    }
}

impl DemoConfig {
    /// Checks every rule.
    ///
    /// # Errors
    /// The first value that breaks its rule, in words.
    pub fn validate(&self) -> Result<(), String> {
        let within = |name, value, max| {
            if (1..=max).contains(&value) { Ok(()) } else { Err(format!("{name} is {value}, not within 1 to {max}")) }
        };
        within("clients", self.clients, CLIENTS_MAX)?;
        within("requests", self.requests, REQUESTS_MAX)?;
        if !(0.0..=TIME_SCALE_MAX).contains(&self.time_scale) {
            return Err(format!("time_scale is {}, not within 0 to {TIME_SCALE_MAX}", self.time_scale));
        }
        Ok(())
    }
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A value breaks its rule.
    #[error("{0}")]
    Config(String),
    /// An engine does not start.
    #[error("an engine does not start: {0}")]
    Engine(#[from] MockError),
    /// The gateway does not start.
    #[error("the gateway does not start: {0}")]
    Gateway(String),
    /// The gateway does not come to read the engines' events.
    #[error("the gateway is not ready: {0}")]
    NotReady(String),
    /// An engine does not say what it has done.
    #[error("an engine's metrics cannot be read: {0}")]
    Metrics(String),
}

/// Settings of the demo's gateway; all others are the defaults. It listens on a free port of loopback.
#[derive(Clone, Debug)]
pub struct GatewaySetup {
    /// The one model.
    pub model: String,
    /// Configuration of the model's router.
    pub router: RouterConfig,
    /// Workers of the model, which tokenize its prompts.
    pub workers: Vec<NamedWorker>,
    /// Longest wait for a tokenization.
    pub tokenize_timeout_ms: u64,
    /// Longest idle time of a client's connection.
    pub idle_timeout_ms: u64,
}

/// The gateway that the demo measures. The binary implements it, so that neither crate's library depends on the other.
pub trait DemoGateway: Sized {
    /// Starts a gateway, which listens when this returns.
    fn start(setup: GatewaySetup) -> impl Future<Output = Result<Self, String>>;
    /// The address for clients.
    fn address(&self) -> SocketAddr;
    /// The router of the model.
    fn router(&self) -> Router;
    /// Closes the listener, and ends requests in flight after `drain`.
    fn shutdown(self, drain: Duration) -> impl Future<Output = ()>;
}

/// A completed demo; its second fleet is still up.
pub struct Demo<G> {
    report: Report,
    fleet: Fleet<G>,
}

impl<G: DemoGateway> Demo<G> {
    /// Runs it: the workload round robin, then with the router's own policy.
    ///
    /// # Errors
    /// See [`DemoError`]; nothing runs then. Requests that fail are no error, but figures.
    pub async fn run(config: &DemoConfig, progress: &Progress) -> Result<Self, DemoError> {
        config.validate().map_err(DemoError::Config)?;
        let workload = Arc::new(Workload::new(config.seed, config.clients, config.requests));
        let (round_robin, fleet) = run_one::<G>(config, &workload, Policy::RoundRobin, progress).await?;
        fleet.shutdown().await;
        let (routed, fleet) = run_one(config, &workload, DEMO_POLICY, progress).await?;
        progress.end();
        Ok(Self { report: Report::new(config, round_robin, routed), fleet })
    }

    /// What came of it.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Where the gateway and the engines are, and how to ask them, in words.
    #[must_use]
    pub fn addresses(&self) -> String {
        report::addresses(&self.fleet)
    }

    /// Ends gateway and engines.
    pub async fn shutdown(self) {
        self.fleet.shutdown().await;
    }
}

/// One run on a fresh fleet, which it leaves up.
async fn run_one<G: DemoGateway>(
    config: &DemoConfig,
    workload: &Arc<Workload>,
    policy: Policy,
    progress: &Progress,
) -> Result<(Figures, Fleet<G>), DemoError> {
    let name = policy.name();
    progress.say(&format!("{name}: starting {} engines and the gateway", fleet::ENGINES));
    let fleet = Fleet::start(config, policy).await?;
    let target = Target { address: fleet.address(), model: fleet::MODEL.to_owned(), time_scale: config.time_scale };
    let driven = drive(workload, &target, progress, name).await;
    let ranks = fleet.work().await.map_err(|error: ClientError| DemoError::Metrics(error.to_string()))?;
    Ok((Figures::of(name, &driven, &ranks, workload.requests(), config.time_scale), fleet))
}
