//! What is simulated: the fleet's engines, the way of their events, the router's settings.

use std::num::NonZeroU32;
use std::str::FromStr;

use pointsman::RouterConfig;
use pointsman::config::Fanout;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::select::Policy;
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

/// A simulated fleet and the router in front of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// The fleet's shape.
    pub fleet: Fleet,
    /// What each worker's ranks are like, by worker. All of one block size.
    pub engines: Vec<EngineConfig>,
    /// How long what a rank announces is on its way to the router, in µs.
    pub event_delay_us: u64,
    /// The first so many requests only warm caches.
    pub warmup_requests: usize,
    /// The router's settings.
    pub router: RouterSetup,
}

/// Settings of the router, as far as a run names them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSetup {
    /// How ranks are chosen.
    pub policy: Policy,
    /// Where knowledge of caches comes from.
    pub knowledge: Knowledge,
    /// Index shards; the router's default when absent.
    pub shards: Option<u32>,
    /// Which ranks are asked for their load; the router's default when absent.
    pub fanout: Option<Fanout>,
    /// Seed of its draws.
    pub seed: u64,
    /// Any other field of its configuration, by name. These go last.
    pub settings: Map<String, Value>,
}

impl Setup {
    /// `workers` default engines of `dp_size` ranks each behind a router at its defaults; events take 1 ms.
    #[must_use]
    pub fn new(workers: u32, dp_size: u32) -> Self {
        Self {
            fleet: Fleet { workers, dp_size },
            engines: vec![EngineConfig::default(); workers as usize],
            event_delay_us: 1_000,
            warmup_requests: 0,
            router: RouterSetup::default(),
        }
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_size(&self) -> NonZeroU32 {
        self.engines.first().and_then(|engine| NonZeroU32::new(engine.block_size)).unwrap_or(NonZeroU32::MIN)
    }

    /// The router's configuration.
    ///
    /// # Errors
    /// A setting is unknown or of the wrong kind.
    pub fn router_config(&self) -> Result<RouterConfig, Refusal> {
        let RouterSetup { policy, knowledge, shards, fanout, seed, settings } = &self.router;
        let defaults = RouterConfig::default();
        let config = RouterConfig {
            block_size: self.block_size().get(),
            policy: *policy,
            index_shards: shards.unwrap_or(defaults.index_shards),
            fanout: fanout.unwrap_or(defaults.fanout),
            seed: *seed,
            ..knowing_by(*knowledge, defaults)
        };
        let mut value = serde_json::to_value(config)?;
        if let Value::Object(fields) = &mut value {
            fields.extend(settings.clone());
        }
        Ok(serde_json::from_value(value)?)
    }

    /// What a report on serving `workload` is of.
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
        Ok(())
    }

    /// The ranks, idle and empty, in order of their dense numbers.
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

/// How much of a workload only warms caches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// So much of its requests, from 0 to 1.
    Share(f64),
    /// So many.
    Requests(usize),
}

impl Warmup {
    /// How many of so many requests.
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

    /// `10%`, or a count.
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
