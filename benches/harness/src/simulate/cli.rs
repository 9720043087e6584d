//! Arguments of a simulation and its execution.

use std::io::Write;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use pointsman::policy::Policy;
use pointsman_trial::engine::{BlockShortage, EngineConfig};
use pointsman_trial::workload::Workload;
use serde_json::Value;

use crate::Failed;
use crate::fleet::{
    DisaggregationSetup, Fleet, Knowledge, ReplicaSetup, ReplicaSharing, RouterSetup, Setup, policy_named,
};
use crate::results::{Reporting, Warmup};
use crate::source::Source;
use crate::targets::{DisaggregatedPools, Embedded};

/// Arguments of one simulation.
#[derive(Args, Clone, Debug)]
pub struct Simulate {
    /// Workload arguments.
    #[command(flatten)]
    pub source: Source,
    /// Number or share of initial requests that only warm caches and are excluded from all figures
    #[arg(long, default_value = "10%")]
    pub warmup: Warmup,
    /// Fleet arguments.
    #[command(flatten)]
    pub fleet: FleetArguments,
    /// Router arguments.
    #[command(flatten)]
    pub router: RouterArguments,
    /// Arguments of replicas.
    #[command(flatten)]
    pub replicas: ReplicaArguments,
    /// Arguments of disaggregated serving.
    #[command(flatten)]
    pub disaggregation: DisaggregationArguments,
    /// Output arguments.
    #[command(flatten)]
    pub reporting: Reporting,
    /// File for the records of all requests, one JSON object per line, in the workload's order
    #[arg(long, value_name = "FILE")]
    pub records: Option<PathBuf>,
}

/// Arguments of several routers over one fleet.
#[derive(Args, Clone, Copy, Debug)]
pub struct ReplicaArguments {
    /// Number of routers over the fleet, which receive the requests in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub replicas: u32,
    /// What these routers share
    #[arg(long, value_enum, default_value_t)]
    pub replica_sharing: ReplicaSharing,
    /// Delay of messages between these routers in ms
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=60_000))]
    pub replica_delay_ms: u32,
}

impl From<ReplicaArguments> for ReplicaSetup {
    fn from(arguments: ReplicaArguments) -> Self {
        let ReplicaArguments { replicas, replica_sharing, replica_delay_ms } = arguments;
        Self { count: replicas, sharing: replica_sharing, delay_us: u64::from(replica_delay_ms) * 1_000 }
    }
}

/// Arguments of disaggregated serving.
#[derive(Args, Clone, Copy, Debug)]
pub struct DisaggregationArguments {
    /// Number of ranks that only compute prompts; the others decode. 0: all ranks do both
    #[arg(long, default_value_t = 0, conflicts_with = "replicas")]
    pub prefill_ranks: u32,
    /// Duration of the transfer of KV blocks in µs per prompt token
    #[arg(long, default_value_t = 2.6, value_name = "US")]
    pub transfer_us_per_token: f64,
}

impl DisaggregationArguments {
    /// Setup of the two roles; none without prefill ranks.
    #[must_use]
    pub fn setup(self) -> Option<DisaggregationSetup> {
        let Self { prefill_ranks, transfer_us_per_token } = self;
        (prefill_ranks > 0).then_some(DisaggregationSetup { prefill_ranks, transfer_us_per_token })
    }
}

/// Arguments of the fleet.
#[derive(Args, Clone, Debug)]
pub struct FleetArguments {
    /// Number of simulated workers
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub workers: u32,
    /// Data-parallel ranks per worker, each with its own engine
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub dp_size: u32,
    /// Kind of the engines, the base of all other engine flags
    #[arg(long, value_enum, default_value_t)]
    pub preset: Preset,
    /// Different figures for some workers: WORKERS:FIGURE=VALUE,... such as
    /// 1-4:prefill-tokens-per-second=12500,kv-blocks=3584
    ///
    /// Workers count from 1. Names of figures are those of the flags below. Repeatable; later values override earlier
    /// ones.
    #[arg(long = "engine", value_name = "SPEC")]
    pub engines: Vec<EngineSpec>,
    /// Figures of all engines that differ from the preset.
    #[command(flatten)]
    pub figures: EngineFigures,
    /// Rules of engines without free KV blocks
    #[arg(long, value_enum, default_value_t)]
    pub block_shortage: ShortageRules,
    /// Delay of KV events between engine and router in ms
    #[arg(long, default_value_t = 1.0)]
    pub event_delay_ms: f64,
    /// Report neither first tokens nor output blocks to the router, as for responses that are not streamed
    #[arg(long)]
    pub not_streamed: bool,
}

/// Kind of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// An 8-billion-parameter model on an H100 with 80 GB
    #[default]
    #[value(name = "8b-h100")]
    H100With8b,
}

impl Preset {
    /// Engine configuration of the preset.
    #[must_use]
    pub fn config(self) -> EngineConfig {
        match self {
            Self::H100With8b => EngineConfig::default(),
        }
    }
}

/// Rules of an engine without free KV blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ShortageRules {
    /// A partially computed prompt waits with its blocks; the first chunk must fit for admission
    #[default]
    PromptsWait,
    /// A partially computed prompt is preempted; the whole prompt must fit for admission, as in vLLM V1
    PromptsPreempt,
}

impl From<ShortageRules> for BlockShortage {
    fn from(rules: ShortageRules) -> Self {
        match rules {
            ShortageRules::PromptsWait => Self::PromptsWait,
            ShortageRules::PromptsPreempt => Self::PromptsPreempt,
        }
    }
}

/// Defines the optional figures of engines: a flag for each, and its place in the configuration.
macro_rules! engine_figures {
    ($($(#[$doc:meta])* $unit:literal $figure:ident => $($place:ident).+;)*) => {
        /// Optional figures of engines.
        #[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct EngineFigures {
            $($(#[$doc])* #[arg(long, value_name = $unit)] pub $figure: Option<u32>,)*
        }

        impl EngineFigures {
            /// Figure with the name of its flag.
            fn named(&mut self, name: &str) -> Option<&mut Option<u32>> {
                match name {
                    $(stringify!($figure) => Some(&mut self.$figure),)*
                    _ => None,
                }
            }

            fn apply(&self, config: &mut EngineConfig) {
                $(config.$($place).+ = self.$figure.unwrap_or(config.$($place).+);)*
            }
        }
    };
}

engine_figures! {
    /// Tokens per KV block [8b-h100: 64]
    "TOKENS" block_size => block_size;
    /// KV blocks in the device memory of a rank [8b-h100: 7168]
    "BLOCKS" kv_blocks => kv_blocks;
    /// KV blocks in the host memory of a rank [8b-h100: 0]
    "BLOCKS" host_kv_blocks => host_kv_blocks;
    /// Maximum number of tokens per step [8b-h100: 8192]
    "TOKENS" step_tokens_max => step_tokens_max;
    /// Maximum number of running sequences [8b-h100: 256]
    "SEQUENCES" sequences_max => sequences_max;
    /// Maximum number of tokens of one sequence per step; 0: no limit [8b-h100: 0]
    "TOKENS" prefill_chunk_max => prefill_chunk_max;
    /// Draft tokens per decoding sequence and step; 0: no speculative decoding [8b-h100: 0]
    "TOKENS" draft_tokens => speculation.draft_tokens;
    /// Probability that a draft token is accepted, in percent [8b-h100: 0]
    "PERCENT" draft_acceptance_percent => speculation.acceptance_percent;
    /// Maximum length of prompt and output together [8b-h100: 131072, or the capacity of the device memory if less]
    "TOKENS" max_model_len => max_model_len;
    /// Fixed time per step in µs [8b-h100: 4000]
    "US" step_us => cost.step_us;
    /// Prompt tokens computed per second, without attention [8b-h100: 25000]
    "TOKENS" prefill_tokens_per_second => cost.prefill_tokens_per_second;
    /// Attention of one prompt token to one earlier token, in ps [8b-h100: 1200]
    "PS" attention_ps => cost.attention_ps;
    /// Time per decoding sequence of a step in µs [8b-h100: 20]
    "US" decode_sequence_us => cost.decode_sequence_us;
    /// Time per context token that a decoding sequence reads, in ns [8b-h100: 65]
    "NS" kv_token_ns => cost.kv_token_ns;
    /// Time per token loaded from host memory, in ns [8b-h100: 2600]
    "NS" host_token_ns => cost.host_token_ns;
    /// Time of the drafter per draft token in µs [8b-h100: 125]
    "US" draft_us => cost.draft_us;
}

/// A range of workers with their different figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSpec {
    /// Workers, numbered from 1.
    pub workers: RangeInclusive<u32>,
    /// Figures of these workers.
    pub figures: EngineFigures,
}

impl FromStr for EngineSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (range, given) = text.split_once(':').ok_or("no ':' between workers and figures")?;
        let number = |text: &str| text.parse::<u32>().map_err(|error| format!("worker {text:?}: {error}"));
        let workers = match range.split_once('-') {
            Some((first, last)) => number(first)?..=number(last)?,
            None => number(range)?..=number(range)?,
        };
        if workers.is_empty() || workers.contains(&0) {
            return Err(format!("workers {range:?} are empty or contain 0; they count from 1"));
        }
        let mut figures = EngineFigures::default();
        for pair in given.split(',') {
            let (name, value) = pair.split_once('=').ok_or_else(|| format!("no '=' in {pair:?}"))?;
            // The block size must be equal for all workers.
            let figure = figures.named(&name.replace('-', "_")).filter(|_| name != "block-size" && !name.contains('_'));
            let figure = figure.ok_or_else(|| format!("unknown figure {name:?} of a worker"))?;
            *figure = Some(value.parse().map_err(|error| format!("{name} {value:?}: {error}"))?);
        }
        Ok(Self { workers, figures })
    }
}

impl FleetArguments {
    /// Shape of the fleet.
    #[must_use]
    pub fn fleet(&self) -> Fleet {
        Fleet { workers: self.workers, dp_size: self.dp_size }
    }

    /// Engine configuration of each worker.
    ///
    /// # Errors
    /// A spec names workers that the fleet does not have.
    pub fn engines(&self) -> Result<Vec<EngineConfig>, Failed> {
        if let Some(spec) = self.engines.iter().find(|spec| *spec.workers.end() > self.workers) {
            let (last, workers) = (spec.workers.end(), self.workers);
            return Err(format!("no worker {last} among {workers}").into());
        }
        Ok((1..=self.workers).map(|worker| self.engine(worker)).collect())
    }

    /// Setup of the fleet with this router.
    ///
    /// # Errors
    /// A spec names unknown workers, or the event delay is invalid.
    pub fn setup(&self, router: RouterSetup, warmup_requests: usize) -> Result<Setup, Failed> {
        let event_delay_us = self.event_delay_ms * 1e3;
        if !(0.0..=1e12).contains(&event_delay_us) {
            return Err(format!("event_delay_ms is {}, must be 0 to 1000000000", self.event_delay_ms).into());
        }
        Ok(Setup {
            fleet: self.fleet(),
            engines: self.engines()?,
            event_delay_us: event_delay_us.round() as u64,
            is_streamed: !self.not_streamed,
            warmup_requests,
            router,
            replicas: ReplicaSetup::default(),
            disaggregation: None,
        })
    }

    fn engine(&self, worker: u32) -> EngineConfig {
        let mut config = EngineConfig { block_shortage: self.block_shortage.into(), ..self.preset.config() };
        let specs = self.engines.iter().filter(|spec| spec.workers.contains(&worker)).map(|spec| &spec.figures);
        let mut is_len_given = false;
        for figures in std::iter::once(&self.figures).chain(specs) {
            figures.apply(&mut config);
            is_len_given |= figures.max_model_len.is_some();
        }
        if !is_len_given {
            let fits = config.blocks_usable().saturating_mul(config.block_size);
            config.max_model_len = config.max_model_len.min(fits);
        }
        config
    }
}

/// Arguments of the router.
#[derive(Args, Clone, Debug)]
pub struct RouterArguments {
    /// Selection policy: latency, kv, cache_aware, least_loaded, power_of_two, round_robin or random
    #[arg(long, default_value = "kv", value_parser = policy_named)]
    pub policy: Policy,
    /// Source of the router's knowledge of caches
    #[arg(long, value_enum, default_value_t)]
    pub knowledge: Knowledge,
    /// Index shards [default: the router's]
    #[arg(long)]
    pub shards: Option<u32>,
    /// Query the exact load of every rank, also where bounds decide
    #[arg(long)]
    pub query_every_rank: bool,
    /// Seed of the router's random choices and of a generated workload
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Any other setting of the router by its path, such as queue.threshold=2: NAME=VALUE, the value in JSON
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = unflagged_setting)]
    pub settings: Vec<(String, Value)>,
}

/// Parses NAME=VALUE. Strings may be given without quotes.
fn setting(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("no '=' in {text:?}"))?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

/// Settings that have their own flag, because reports identify a run by them.
const FLAGGED: [(&str, &str); 4] =
    [("policy", "--policy"), ("seed", "--seed"), ("block_size", "--block-size"), ("index.shards", "--shards")];

fn unflagged_setting(text: &str) -> Result<(String, Value), String> {
    let (name, value) = setting(text)?;
    match FLAGGED.iter().find(|(setting, _)| *setting == name) {
        Some((_, flag)) => Err(format!("{name} is set by {flag}")),
        None => Ok((name, value)),
    }
}

impl RouterArguments {
    /// Settings of the router.
    #[must_use]
    pub fn setup(&self) -> RouterSetup {
        RouterSetup {
            policy: self.policy,
            knowledge: self.knowledge,
            shards: self.shards,
            queries_every_rank: self.query_every_rank,
            seed: self.seed,
            settings: self.settings.iter().cloned().collect(),
        }
    }
}

impl Simulate {
    /// Loads the workload.
    ///
    /// # Errors
    /// The trace cannot be read.
    pub fn workload(&self) -> Result<Workload, Failed> {
        Ok(self.source.load(self.router.seed)?)
    }

    /// Setup of the simulation for a workload of this many requests.
    ///
    /// # Errors
    /// A spec names unknown workers.
    pub fn setup(&self, requests: usize) -> Result<Setup, Failed> {
        let setup = self.fleet.setup(self.router.setup(), self.warmup.of(requests))?;
        Ok(Setup { replicas: self.replicas.into(), disaggregation: self.disaggregation.setup(), ..setup })
    }

    /// Simulates with Pointsman's own router and writes figures to `out` and warnings to `warnings_out`.
    ///
    /// # Errors
    /// The trace cannot be read, the simulation fails, or the figures are rejected or cannot be written.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), Failed> {
        let workload = self.workload()?;
        let setup = self.setup(workload.requests.len())?;
        let run = match setup.disaggregation {
            Some(_) => super::run(&setup, &workload, DisaggregatedPools::start)?,
            None => super::run(&setup, &workload, Embedded::start)?,
        };
        if let Some(path) = &self.records {
            run.write_records(path)?;
        }
        let facts = setup.facts(&workload, &self.reporting);
        self.reporting.finish(&run, &facts, out, warnings_out)
    }
}
