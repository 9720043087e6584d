//! The demo: a comparison of two routing policies on one machine without a GPU, in less than a minute.
//!
//! Implements `pointsman demo`: its settings and the order of its runs. Both runs have the same requests, cold caches,
//! the same engine models and the same gateway, so that only the policy differs. The binary parses the command line.
//!
//! `fleet` starts engines and gateway, `workload` generates the requests, `drive` has the clients that send them, `figures`
//! computes the results, and `report` formats them.

mod drive;
mod figures;
mod fleet;
mod progress;
mod report;
mod workload;

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pointsman::policy::Policy;
use pointsman::{NamedWorker, Router, RouterConfig};

pub use figures::{Figures, Times};
pub use progress::Progress;
pub use report::Report;

use crate::mock::MockError;
use fleet::Fleet;
use workload::{ClientScripts, TURNS};

/// Policy of the second run: the router's default.
const DEMO_POLICY: Policy = Policy::Latency;

/// Maximum numbers of clients and requests, far above the useful range on one machine.
const CLIENTS_MAX: u32 = 1024;
const REQUESTS_MAX: u32 = 100_000;

/// Least requests per client: the shortest conversation. With fewer there is no earlier turn to find in a cache.
const REQUESTS_PER_CLIENT_MIN: u32 = *TURNS.start();

/// Maximum pace of the engines.
const TIME_SCALE_MAX: f64 = 100.0;

/// Settings of the demo, which are also the command line of `pointsman demo`.
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
    /// Seed of the workload. Equal seeds, clients and requests give byte-identical requests.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// Number of requests in each of the two runs.
    #[arg(long, value_name = "REQUESTS", default_value_t = 640)]
    pub requests: u32,
    /// Number of clients, each with one conversation at a time.
    #[arg(long, value_name = "CLIENTS", default_value_t = 64)]
    pub clients: u32,
    /// Virtual seconds per real second. 0.5 runs engines and clients at half the pace, for machines that cannot keep
    /// up; 0 runs at full speed, which shows hit rates but no times.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub time_scale: f64,
    /// Compares aggregated with disaggregated engines instead of two policies: first all engines prefill and
    /// decode, then some compute the prompts for the others (vLLM's NIXL protocol).
    #[arg(long)]
    pub disaggregated: bool,
    /// Number of the engines that compute prompts, with --disaggregated.
    #[arg(long, value_name = "ENGINES", default_value_t = 2)]
    pub prefill_engines: u16,
    /// Keeps engines, gateway and load running after the table, until Ctrl-C, and prints the address of the live page.
    #[arg(long)]
    pub stay: bool,
    /// Prints the figures as one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

impl Default for DemoConfig {
    fn default() -> Self {
        crate::mock::of_flags(&[])
    }
}

impl DemoConfig {
    /// Validates every setting.
    ///
    /// # Errors
    /// A message with the first invalid value and its rule.
    pub fn validate(&self) -> Result<(), String> {
        let within = |name, value, max| {
            if (1..=max).contains(&value) { Ok(()) } else { Err(format!("{name} is {value}, not within 1 to {max}")) }
        };
        within("clients", self.clients, CLIENTS_MAX)?;
        within("requests", self.requests, REQUESTS_MAX)?;
        let (requests, clients) = (self.requests, self.clients);
        let least = clients * REQUESTS_PER_CLIENT_MIN;
        if requests < least {
            return Err(format!(
                "{requests} requests are too few for {clients} clients: at least {least} \
                 ({REQUESTS_PER_CLIENT_MIN} for each, the shortest conversation)"
            ));
        }
        let engines_max = fleet::ENGINES - 1;
        if !(1..=engines_max).contains(&self.prefill_engines) {
            return Err(format!("prefill_engines is {}, not within 1 to {engines_max}", self.prefill_engines));
        }
        if !(0.0..=TIME_SCALE_MAX).contains(&self.time_scale) {
            return Err(format!("time_scale is {}, not within 0 to {TIME_SCALE_MAX}", self.time_scale));
        }
        Ok(())
    }
}

/// Reasons for a demo without a result.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A setting is invalid.
    #[error("{0}")]
    Config(String),
    /// An engine failed to start.
    #[error("cannot start an engine: {0}")]
    Engine(#[from] MockError),
    /// The gateway failed to start.
    #[error("cannot start the gateway: {0}")]
    Gateway(String),
    /// The gateway did not read the KV events of all ranks in time.
    #[error("the gateway is not ready: {0}")]
    NotReady(String),
}

/// Settings of the demo's gateway. All other settings are defaults. The gateway listens on a free loopback port.
#[derive(Clone, Debug)]
pub struct GatewaySetup {
    /// Name of the model.
    pub model: String,
    /// Configuration of the model's router.
    pub router: RouterConfig,
    /// Workers of the model. They also tokenize its prompts.
    pub workers: Vec<NamedWorker>,
    /// Workers that compute the prompts for the others; empty if each worker does so itself.
    pub prefill_workers: Vec<NamedWorker>,
    /// Timeout of a tokenization in milliseconds.
    pub tokenize_timeout_ms: u64,
    /// Idle timeout of a client's connection in milliseconds.
    pub idle_timeout_ms: u64,
    /// Whether to open the administration listener.
    pub has_live_page: bool,
}

/// Access to the live page of the gateway.
#[derive(Clone, Debug)]
pub struct LivePage {
    /// Address of the administration listener.
    pub address: SocketAddr,
    /// Token of operators.
    pub token: String,
    /// File with the token, until the shutdown.
    pub token_file: PathBuf,
}

/// The gateway under measurement. The binary implements this trait, so that neither crate's library depends on the
/// other.
pub trait DemoGateway: Sized {
    /// Starts a gateway that listens when this function returns.
    fn start(setup: GatewaySetup) -> impl Future<Output = Result<Self, String>>;
    /// Address for clients.
    fn address(&self) -> SocketAddr;
    /// Routers of the model: one, or two if other workers compute its prompts.
    fn routers(&self) -> Vec<Router>;
    /// Access to its live page, if it has one.
    fn live_page(&self) -> Option<LivePage>;
    /// Closes the listener, and ends requests in flight after `drain`.
    fn shutdown(self, drain: Duration) -> impl Future<Output = ()>;
}

/// One of the two runs.
#[derive(Clone, Copy, Debug)]
struct Run {
    name: &'static str,
    policy: Policy,
    /// Number of engines that compute prompts only.
    prefill_engines: u16,
}

impl Run {
    fn policy(policy: Policy) -> Self {
        Self { name: policy.name(), policy, prefill_engines: 0 }
    }
}

/// A completed demo whose second fleet is still running.
pub struct Demo<G> {
    config: DemoConfig,
    report: Report,
    fleet: Fleet<G>,
}

impl<G: DemoGateway> Demo<G> {
    /// Runs the workload twice: with round robin, then with the router's own policy. With `disaggregated`: aggregated,
    /// then disaggregated, both with the router's own policy.
    ///
    /// # Errors
    /// See [`DemoError`]; all parts are stopped in that case. Failed requests are no error of the demo, but part of the
    /// figures.
    pub async fn run(config: &DemoConfig, progress: Progress) -> Result<Self, DemoError> {
        config.validate().map_err(DemoError::Config)?;
        let workload = Arc::new(ClientScripts::new(config.seed, config.clients, config.requests));
        let runs = match config.disaggregated {
            false => [Run::policy(Policy::RoundRobin), Run::policy(DEMO_POLICY)],
            true => [
                Run { name: "aggregated", ..Run::policy(DEMO_POLICY) },
                Run { name: "disaggregated", prefill_engines: config.prefill_engines, ..Run::policy(DEMO_POLICY) },
            ],
        };
        let (baseline, fleet) = run_one::<G>(config, &workload, &runs[0], progress).await?;
        fleet.shutdown().await;
        let (routed, fleet) = run_one(config, &workload, &runs[1], progress).await?;
        Ok(Self { config: config.clone(), report: Report::new(config, baseline, routed), fleet })
    }

    /// Report of both runs.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Text with the addresses of gateway and engines and example commands.
    #[must_use]
    pub fn addresses(&self) -> String {
        report::addresses(&self.fleet)
    }

    /// Sends further conversations without an end.
    pub async fn keep_busy(&self) {
        let pace = Some(self.config.time_scale).filter(|pace| *pace > 0.0).unwrap_or(1.0);
        for round in 1.. {
            let seed = self.config.seed.wrapping_add(round);
            let workload = Arc::new(ClientScripts::new(seed, self.config.clients, self.config.requests));
            drive::run(&workload, (self.fleet.address(), pace), Progress::Silent, "").await;
        }
    }

    /// Stops gateway and engines.
    pub async fn shutdown(self) {
        self.fleet.shutdown().await;
    }
}

/// Runs the workload on a new fleet and returns its figures and the running fleet.
async fn run_one<G: DemoGateway>(
    config: &DemoConfig,
    workload: &Arc<ClientScripts>,
    run: &Run,
    progress: Progress,
) -> Result<(Figures, Fleet<G>), DemoError> {
    let name = run.name;
    progress.print(&format!("{name}: starting {} engines and the gateway", fleet::ENGINES));
    let fleet = Fleet::start(config, run).await?;
    let driven = drive::run(workload, (fleet.address(), config.time_scale), progress, name).await;
    Ok((Figures::of(name, &driven, &fleet.work(), workload.requests(), config.time_scale), fleet))
}
