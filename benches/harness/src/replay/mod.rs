//! Replay of a workload through a router in real time, over engines that respond immediately: arguments and execution.
//!
//! `state` has the steps of a request and the counts, `closed` and `open` are the two sources of requests.

mod closed;
mod open;
mod report;
mod state;

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum as _};
use pointsman::policy::Policy;
use pointsman_trial::engine::EngineConfig;
use pointsman_trial::workload::Prompt;
use serde::{Deserialize, Serialize};

pub use report::{Figures, Percentiles, Report};

use crate::Failed;
use crate::fleet::{Fleet, Knowledge, RouterSetup, Setup, policy_named};
use crate::measure::rss_bytes;
use crate::progress::Progress;
use crate::source;
use crate::targets::{Target, not_started};
use state::{LoopState, Workload};

fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

/// Arguments common to all runs over one workload and one kind of fleet.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Common {
    /// Trace to replay (Mooncake's or Alibaba's JSON lines); without it conversations are generated
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Data-parallel ranks per worker
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub dp_size: u32,
    /// Tokens per KV block
    #[arg(long, default_value = "64")]
    pub block_size: NonZeroU32,
    /// KV blocks in the simulated cache of one rank
    #[arg(long, default_value_t = 16_384, value_parser = positive())]
    pub kv_blocks: usize,
    /// Requests in flight over all clients; each client holds an equal share of at least one
    #[arg(long, default_value_t = 512, value_parser = positive())]
    pub inflight: usize,
    /// Index shards [default: the router's]
    #[arg(long)]
    pub shards: Option<u32>,
    /// Number of requests from the workload [default: the whole trace, or 4000 generated]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub limit: Option<u32>,
    /// Selection policy: latency, kv, cache_aware, least_loaded, power_of_two, round_robin or random
    #[arg(long, default_value = "latency", value_parser = policy_named)]
    pub policy: Policy,
    /// Source of the router's knowledge of caches
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub knowledge: Knowledge,
    /// Yield to other clients after each request, as callers that wait for an engine would
    ///
    /// Without this flag, clients continue immediately. Clients of a router that suspends them then queue inside its
    /// route function, and route times include that queue; a router that returns without suspension serves few clients
    /// at a time. With this flag, clients queue between requests, where no time is measured, and all of them are
    /// concurrent with either router.
    #[arg(long)]
    pub take_turns: bool,
    /// Seed of the router's random choices and of a generated workload
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Arguments of one replay.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replay {
    /// Arguments shared with other runs.
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Number of simulated workers
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub workers: u32,
    /// Number of concurrent clients
    #[arg(long, default_value_t = 1, value_parser = positive())]
    pub clients: usize,
    /// Send requests in an open loop at this mean rate, in requests per second, instead of a closed loop of clients
    ///
    /// The gaps between arrivals are random, from the seed. Route times count from the scheduled arrival.
    #[arg(long, value_name = "REQUESTS", conflicts_with_all = ["clients", "take_turns"])]
    pub rate: Option<NonZeroU32>,
    /// Number of times that the workload is sent [default: 1]
    #[arg(long)]
    pub repeat: Option<NonZeroU32>,
    /// Threads of the runtime shared by clients and router
    #[arg(long, default_value_t = 2, value_parser = positive())]
    pub threads: usize,
    /// Print the report as one JSON object
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl Replay {
    /// The fleet with its router. Each engine has a block more than its cache, because it never allocates one.
    #[must_use]
    pub fn setup(&self) -> Setup {
        let Common { dp_size, block_size, kv_blocks, shards, policy, knowledge, seed, .. } = self.common;
        let kv_blocks = u32::try_from(kv_blocks).unwrap_or(u32::MAX).saturating_add(1);
        let engine = EngineConfig { block_size: block_size.get(), kv_blocks, ..EngineConfig::default() };
        Setup {
            fleet: Fleet { workers: self.workers, dp_size },
            engines: vec![engine; self.workers as usize],
            router: RouterSetup { policy, knowledge, shards, seed, ..RouterSetup::default() },
            ..Setup::new(self.workers, dp_size)
        }
    }

    /// Runs the closed or the open loop on its own runtime, over the target that `start` creates.
    ///
    /// # Errors
    /// The workload cannot be read, the target fails, or something is left in it after the last request.
    pub fn run<T: Target>(&self, start: impl AsyncFnOnce(&Setup) -> Result<T, Failed>) -> Result<Report, Failed> {
        let runtime = crate::runtime(self.threads)?;
        let repeat = self.repeat.map_or(1, NonZeroU32::get);
        let workload = Workload::prepare::<T>(self.common.prompts()?, self.common.block_size, repeat);
        let setup = self.setup();
        let progress = Progress::new(workload.len(), "requests");
        let rss_before_bytes = rss_bytes();
        let figures = runtime.block_on(async {
            let target = start(&setup).await.map_err(not_started::<T>)?;
            let state = LoopState::new(target, workload, setup.fleet, self.common.kv_blocks, progress);
            match self.rate {
                Some(rate) => open::run(state, self.common.inflight, open::Gaps::new(rate, self.common.seed)).await,
                None => closed::run(state, self.common.inflight, self.clients, self.common.take_turns).await,
            }
        })?;
        let clients = if self.rate.is_some() { 0 } else { self.clients };
        let options = Self { clients, ..self.clone() };
        Ok(Report { target: T::NAME.to_owned(), figures: Figures { rss_before_bytes, ..figures }, options })
    }
}

impl Common {
    /// Command-line form of these arguments, for a run in another process.
    #[must_use]
    pub fn to_arguments(&self) -> Vec<OsString> {
        let Self { trace, dp_size, block_size, kv_blocks, inflight, shards, limit, policy, .. } = self;
        let Self { knowledge, take_turns, seed, .. } = self;
        let given = [
            ("--trace", trace.as_ref().map(OsString::from)),
            ("--dp-size", Some(dp_size.to_string().into())),
            ("--block-size", Some(block_size.to_string().into())),
            ("--kv-blocks", Some(kv_blocks.to_string().into())),
            ("--inflight", Some(inflight.to_string().into())),
            ("--shards", shards.map(|shards| shards.to_string().into())),
            ("--limit", limit.map(|limit| limit.to_string().into())),
            ("--policy", Some(policy.name().into())),
            ("--knowledge", knowledge.to_possible_value().map(|value| value.get_name().into())),
            ("--seed", Some(seed.to_string().into())),
        ];
        let given = given.into_iter().filter_map(|(flag, value)| Some([flag.into(), value?])).flatten();
        given.chain(take_turns.then(|| "--take-turns".into())).collect()
    }

    /// Prompts of the workload.
    ///
    /// # Errors
    /// The trace cannot be read.
    pub fn prompts(&self) -> Result<Vec<Prompt>, Failed> {
        Ok(source::prompts(self.trace.clone(), self.limit, self.seed)?)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::targets::Embedded;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        replay: Replay,
    }

    #[test]
    fn arguments_round_trip_through_a_command_line() {
        let all = "test --trace t.jsonl --dp-size 2 --block-size 16 --kv-blocks 9 --inflight 3 --shards 4 --limit 7 \
                   --policy random --take-turns --seed 5";
        for line in [all, "test"] {
            let common = Arguments::parse_from(line.split_whitespace()).replay.common;
            let written = std::iter::once("test".into()).chain(common.to_arguments());
            assert_eq!(Arguments::parse_from(written).replay.common, common);
        }
    }

    fn replay(arguments: &str) -> Result<Report, Failed> {
        let arguments = Arguments::parse_from(["test"].into_iter().chain(arguments.split_whitespace()));
        arguments.replay.run(Embedded::start)
    }

    #[test]
    fn kv_has_a_higher_hit_rate_than_random() {
        let fleet = "--limit 600 --inflight 32 --workers 4 --dp-size 2";
        let kv = replay(&format!("{fleet} --policy kv --clients 3 --shards 2")).expect("runs");
        let random = replay(&format!("{fleet} --policy random")).expect("runs");
        assert_eq!((kv.requests, kv.options.common.policy), (300, Policy::Kv));
        assert!(kv.hit_rate > random.hit_rate + 0.05, "{} against {}", kv.hit_rate, random.hit_rate);
    }
}
