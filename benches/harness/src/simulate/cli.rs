//! Arguments of a simulation and its execution.

use std::io::Write;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::Args;
use pointsman_trial::engine::{BlockShortage, EngineConfig};
use pointsman_trial::workload::Workload;

use crate::Failed;
use crate::fleet::{DisaggregationSetup, Fleet, ReplicaSetup, RouterSetup, Setup};
use crate::results::{Reporting, Warmup};
use crate::source::Source;
use crate::targets::Embedded;

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
    pub router: RouterSetup,
    /// Arguments of replicas.
    #[command(flatten)]
    pub replicas: ReplicaSetup,
    /// Arguments of disaggregated serving.
    #[command(flatten)]
    pub disaggregation: DisaggregationSetup,
    /// Output arguments.
    #[command(flatten)]
    pub reporting: Reporting,
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
    /// Different figures for some workers: WORKERS:FIGURE=VALUE,... such as
    /// 1-4:prefill-tokens-per-second=12500,kv-blocks=3584
    ///
    /// Workers count from 1. Names of figures are those of the flags below. Repeatable; later values override earlier
    /// ones.
    #[arg(long = "engine", value_name = "SPEC")]
    pub engines: Vec<EngineSpec>,
    /// Figures of all engines that differ from the default, a model of 8 billion parameters on an H100 with 80 GB.
    #[command(flatten)]
    pub figures: EngineFigures,
    /// Rules of engines without free KV blocks
    #[arg(long, value_enum, default_value_t)]
    pub block_shortage: BlockShortage,
    /// Delay of KV events between engine and router in ms
    #[arg(long, default_value_t = 1.0)]
    pub event_delay_ms: f64,
    /// Report neither first tokens nor output blocks to the router, as for responses that are not streamed
    #[arg(long)]
    pub not_streamed: bool,
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
    /// Tokens per KV block [default: 64]
    "TOKENS" block_size => block_size;
    /// KV blocks in the device memory of a rank [default: 7168]
    "BLOCKS" kv_blocks => kv_blocks;
    /// KV blocks in the host memory of a rank [default: 0]
    "BLOCKS" host_kv_blocks => host_kv_blocks;
    /// Maximum number of tokens per step [default: 8192]
    "TOKENS" step_tokens_max => step_tokens_max;
    /// Maximum number of running sequences [default: 256]
    "SEQUENCES" sequences_max => sequences_max;
    /// Maximum number of tokens of one sequence per step; 0: no limit [default: 0]
    "TOKENS" prefill_chunk_max => prefill_chunk_max;
    /// Draft tokens per decoding sequence and step; 0: no speculative decoding [default: 0]
    "TOKENS" draft_tokens => speculation.draft_tokens;
    /// Probability that a draft token is accepted, in percent [default: 0]
    "PERCENT" draft_acceptance_percent => speculation.acceptance_percent;
    /// Maximum length of prompt and output together [default: 131072, or the capacity of the device memory if less]
    "TOKENS" max_model_len => max_model_len;
    /// Fixed time per step in µs [default: 4000]
    "US" step_us => cost.step_us;
    /// Prompt tokens computed per second, without attention [default: 25000]
    "TOKENS" prefill_tokens_per_second => cost.prefill_tokens_per_second;
    /// Attention of one prompt token to one earlier token, in ps [default: 1200]
    "PS" attention_ps => cost.attention_ps;
    /// Time per decoding sequence of a step in µs [default: 20]
    "US" decode_sequence_us => cost.decode_sequence_us;
    /// Time per context token that a decoding sequence reads, in ns [default: 65]
    "NS" kv_token_ns => cost.kv_token_ns;
    /// Time per token loaded from host memory, in ns [default: 2600]
    "NS" host_token_ns => cost.host_token_ns;
    /// Time of the drafter per draft token in µs [default: 125]
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
    /// Engine configuration of each worker.
    ///
    /// # Errors
    /// A spec names workers that the fleet does not have.
    fn engines(&self) -> Result<Vec<EngineConfig>, Failed> {
        if let Some(spec) = self.engines.iter().find(|spec| *spec.workers.end() > self.workers) {
            let (last, workers) = (spec.workers.end(), self.workers);
            return Err(format!("no worker {last} among {workers}").into());
        }
        Ok((1..=self.workers).map(|worker| self.engine(worker)).collect())
    }

    fn engine(&self, worker: u32) -> EngineConfig {
        let mut config = EngineConfig { block_shortage: self.block_shortage, ..EngineConfig::default() };
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
    /// A spec names unknown workers, or the event delay is invalid.
    pub fn setup(&self, requests: usize) -> Result<Setup, Failed> {
        let fleet = &self.fleet;
        let event_delay_us = fleet.event_delay_ms * 1e3;
        if !(0.0..=1e12).contains(&event_delay_us) {
            return Err(format!("event_delay_ms is {}, must be 0 to 1000000000", fleet.event_delay_ms).into());
        }
        Ok(Setup {
            fleet: Fleet { workers: fleet.workers, dp_size: fleet.dp_size },
            engines: fleet.engines()?,
            event_delay_us: event_delay_us.round() as u64,
            is_streamed: !fleet.not_streamed,
            warmup_requests: self.warmup.of(requests),
            router: self.router.clone(),
            replicas: self.replicas,
            disaggregation: (self.disaggregation.prefill_ranks > 0).then_some(self.disaggregation),
        })
    }

    /// Simulates with Pointsman's own router and writes figures to `out` and warnings to `warnings_out`.
    ///
    /// # Errors
    /// The trace cannot be read, the simulation fails, or the figures are rejected or cannot be written.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), Failed> {
        let workload = self.workload()?;
        let setup = self.setup(workload.requests.len())?;
        let run = super::run(&setup, &workload, Embedded::start)?;
        let facts = setup.facts(&workload, &self.reporting);
        self.reporting.finish(&run, &facts, out, warnings_out)
    }
}
