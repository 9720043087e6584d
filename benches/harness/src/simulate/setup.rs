//! Setup of a simulation: engines, event delay, and router settings.

use std::num::NonZeroU32;
use std::str::FromStr;

use clap::ValueEnum;
use pointsman::RouterConfig;
use pointsman::policy::Policy;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman_trial::engine::EngineConfig;
use pointsman_trial::workload::Workload;
use serde_json::{Map, Value};

use super::SimulateError;
use super::rank::FleetRank;
use crate::cli::{Knowledge, policy_name};
use crate::embedded::knowing_by;
use crate::fleet::Fleet;
use crate::results::{Facts, Machine, Reporting, facts};
use crate::target::Refusal;

/// A simulated fleet with its router.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Shape of the fleet.
    pub fleet: Fleet,
    /// Engine configuration of each worker's ranks. All have the same block size.
    pub engines: Vec<EngineConfig>,
    /// Delay of KV events between rank and router in µs.
    pub event_delay_us: u64,
    /// Whether the router receives first tokens, with the number of cached prompt tokens, and output blocks.
    pub is_streamed: bool,
    /// Number of initial requests that only warm caches.
    pub warmup_requests: usize,
    /// Settings of the router.
    pub router: RouterSetup,
    /// Routers over the fleet.
    pub replicas: ReplicaSetup,
    /// Ranks in two roles; none for aggregated ranks.
    pub disaggregation: Option<DisaggregationSetup>,
}

/// Prefill ranks of a fleet, and the transfer of KV blocks to its other ranks, which decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DisaggregationSetup {
    /// Number of prefill ranks, which are the first ranks of the fleet. Ranks of one worker have one role.
    pub prefill_ranks: u32,
    /// Duration of a transfer in µs per prompt token.
    pub transfer_us_per_token: f64,
}

impl DisaggregationSetup {
    /// Duration of the transfer of a prompt in µs.
    pub(super) fn transfer_us(&self, prompt_tokens: u64) -> u64 {
        (prompt_tokens as f64 * self.transfer_us_per_token).round() as u64
    }
}

/// Several routers over one fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaSetup {
    /// Number of routers, which receive the requests in turn.
    pub count: u32,
    /// What they share.
    pub sharing: ReplicaSharing,
    /// Delay of a message between two routers in µs.
    pub delay_us: u64,
}

impl Default for ReplicaSetup {
    fn default() -> Self {
        Self { count: 1, sharing: ReplicaSharing::Load, delay_us: 1_000 }
    }
}

/// What several routers share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReplicaSharing {
    /// Nothing: each knows its own bookings only
    None,
    /// Loads, as of the last summaries
    #[default]
    Load,
}

/// Settings of the router that a run specifies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSetup {
    /// Selection policy.
    pub policy: Policy,
    /// Source of the router's knowledge of caches.
    pub knowledge: Knowledge,
    /// Number of index shards; the router's default if none.
    pub shards: Option<u32>,
    /// Whether the load of every rank is queried, also where bounds decide.
    pub queries_every_rank: bool,
    /// Seed of the router's random choices.
    pub seed: u64,
    /// Other fields of its configuration by path, such as `queue.threshold`. These are applied last.
    pub settings: Map<String, Value>,
}

impl Setup {
    /// `workers` default engines with `dp_size` ranks each, a router with default settings, and an event delay of 1 ms.
    #[must_use]
    pub fn new(workers: u32, dp_size: u32) -> Self {
        Self {
            fleet: Fleet { workers, dp_size },
            engines: vec![EngineConfig::default(); workers as usize],
            event_delay_us: 1_000,
            is_streamed: true,
            warmup_requests: 0,
            router: RouterSetup::default(),
            replicas: ReplicaSetup::default(),
            disaggregation: None,
        }
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> NonZeroU32 {
        self.engines.first().and_then(|engine| NonZeroU32::new(engine.block_size)).unwrap_or(NonZeroU32::MIN)
    }

    /// Configuration of the router.
    ///
    /// # Errors
    /// A setting is unknown or has the wrong type.
    pub fn router_config(&self) -> Result<RouterConfig, Refusal> {
        let RouterSetup { policy, knowledge, shards, queries_every_rank: _, seed, settings } = &self.router;
        let mut config = knowing_by(*knowledge, RouterConfig::default());
        config.block_size = Some(self.block_size().get());
        config.policy = (*policy).into();
        config.seed = *seed;
        if let Some(shards) = shards {
            config.index.shards = *shards;
        }
        let mut value = serde_json::to_value(config)?;
        for (path, setting) in settings {
            set(&mut value, path, setting)?;
        }
        Ok(serde_json::from_value(value)?)
    }

    /// Facts for a report on serving `workload`.
    #[must_use]
    pub fn facts(&self, workload: &Workload, reporting: &Reporting) -> Facts {
        Facts {
            policy: policy_name(self.router.policy),
            consults_index: self.router_config().is_ok_and(|config| config.has_index()),
            workers: self.fleet.workers,
            dp_size: self.fleet.dp_size,
            seed: self.router.seed,
            workload: workload.name.clone(),
            trace_checksum: workload.trace_checksum.clone(),
            command: facts::command_line(),
            machine: Machine::read(),
            commit: facts::commit(),
            limits: reporting.limits(),
            client: None,
            series: reporting.series,
        }
    }

    pub(super) fn validate(&self) -> Result<(), SimulateError> {
        let (workers, engines) = (self.fleet.workers, self.engines.len());
        if engines != workers as usize || self.fleet.ranks() == 0 {
            return Err(SimulateError::Setup(format!("{engines} engines for {workers} workers")));
        }
        let block_size = self.block_size().get();
        if let Some(other) = self.engines.iter().find(|engine| engine.block_size != block_size) {
            let other = other.block_size;
            return Err(SimulateError::Setup(format!("block sizes {block_size} and {other} in one fleet")));
        }
        self.disaggregation.map_or(Ok(()), |disaggregation| self.validate_roles(disaggregation))
    }

    fn validate_roles(&self, disaggregation: DisaggregationSetup) -> Result<(), SimulateError> {
        let DisaggregationSetup { prefill_ranks, transfer_us_per_token } = disaggregation;
        let (ranks, dp_size) = (self.fleet.ranks(), self.fleet.dp_size);
        let wrong = if prefill_ranks == 0 || prefill_ranks as usize >= ranks {
            format!("{prefill_ranks} prefill ranks of {ranks} ranks leave a role without ranks")
        } else if !prefill_ranks.is_multiple_of(dp_size) {
            format!("{prefill_ranks} prefill ranks are not whole workers of {dp_size} ranks")
        } else if !(0.0..=1e6).contains(&transfer_us_per_token) {
            format!("transfer_us_per_token is {transfer_us_per_token}, must be 0 to 1000000")
        } else if self.replicas.count > 1 {
            "several routers over ranks in two roles are not simulated".to_owned()
        } else {
            return Ok(());
        };
        Err(SimulateError::Setup(wrong))
    }

    /// Idle ranks with empty caches, in order of their dense numbers.
    pub(super) fn ranks(&self) -> Result<Vec<FleetRank>, SimulateError> {
        let by_worker = self.fleet.worker_ids().zip(&self.engines);
        let names = by_worker.flat_map(|(worker, engine)| {
            (0..self.fleet.dp_size).map(move |rank| (worker, WorkerRank::new(worker, rank), *engine))
        });
        let rank = |(worker, name, engine): (WorkerId, WorkerRank, EngineConfig)| {
            FleetRank::new(name, engine).map_err(|reason| SimulateError::Engine { worker, reason })
        };
        names.map(rank).collect()
    }
}

/// Sets the field at a path such as `queue.threshold`.
fn set(config: &mut Value, path: &str, setting: &Value) -> Result<(), Refusal> {
    let (sections, name) = path.rsplit_once('.').map_or((None, path), |(sections, name)| (Some(sections), name));
    let mut at = config;
    for section in sections.into_iter().flat_map(|sections| sections.split('.')) {
        at = at.get_mut(section).ok_or_else(|| format!("{path} is no setting of the router"))?;
    }
    let fields = at.as_object_mut().ok_or_else(|| format!("{path} is no setting of the router"))?;
    fields.insert(name.to_owned(), setting.clone());
    Ok(())
}

/// Extent of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// Share of the requests, from 0 to 1.
    Share(f64),
    /// Number of requests.
    Requests(usize),
}

impl Warmup {
    /// Number of warm-up requests out of `requests`.
    #[must_use]
    pub fn of(self, requests: usize) -> usize {
        match self {
            Self::Share(share) => (requests as f64 * share) as usize,
            Self::Requests(count) => count.min(requests),
        }
    }
}

impl FromStr for Warmup {
    type Err = String;

    /// Parses `10%` or a count.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is neither a count of requests nor a share such as 10%");
        match text.strip_suffix('%') {
            Some(percent) => {
                let percent: f64 = percent.parse().map_err(|_| wrong())?;
                (0.0..=100.0).contains(&percent).then_some(Self::Share(percent / 100.0)).ok_or_else(wrong)
            }
            None => text.parse().map(Self::Requests).map_err(|_| wrong()),
        }
    }
}
