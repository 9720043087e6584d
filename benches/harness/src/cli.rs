//! Arguments of a replay and its execution.

use std::ffi::OsString;
use std::io;
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use pointsman::policy::Policy;
use pointsman_trial::workload::Prompt;
use pointsman_trial::workload::trace::TraceError;
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};

use crate::closed_loop::{self, Clients};
use crate::fleet::Fleet;
use crate::loop_state::{LoopError, Shape, Workload};
use crate::measure::rss_bytes;
use crate::open_loop::{self, Arrivals};
use crate::progress::Progress;
use crate::report::Report;
use crate::source;
use crate::target::{Refusal, Target};

fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

pub(crate) fn policy_named(name: &str) -> Result<Policy, serde::de::value::Error> {
    Policy::deserialize(name.into_deserializer())
}

/// Name of a policy in the router's configuration.
pub(crate) fn policy_name(policy: Policy) -> String {
    serde_json::to_value(policy).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Source of the router's knowledge of the ranks' caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knowledge {
    /// KV events of the engines
    #[default]
    Events,
    /// KV events, and speculative entries from the router's decisions until the events arrive
    Predicted,
    /// Decisions only; each entry expires after a time to live
    Ttl,
    /// Decisions only, on modelled LRU caches of the engines' size
    Lru,
}

/// Arguments common to all runs over one workload and one kind of fleet.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// Trace to replay (Mooncake's or Alibaba's JSON lines, Azure's table); without it conversations are generated
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
#[derive(Args, Clone, Debug)]
pub struct Replay {
    /// Arguments shared with other runs.
    #[command(flatten)]
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
    /// Threads of the runtime shared by clients and router
    #[arg(long, default_value_t = 2, value_parser = positive())]
    pub threads: usize,
    /// Crash an actor every REQUESTS requests, each kind in turn [default: none]
    ///
    /// The kinds are the scheduler, the index shard of the latest chosen rank, and the sequence actor of that rank. The
    /// number of restarts is printed on standard error at the end. Events that a crashed shard has lost are not sent
    /// again, and the CPU time of crashes counts as the router's. Therefore the figures are not comparable with those
    /// of other runs.
    #[arg(long, value_name = "REQUESTS")]
    pub kill_every: Option<NonZeroU32>,
    /// Print the report as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print the router's metrics on standard error at the end, in Prometheus format
    #[arg(long)]
    pub metrics: bool,
}

/// Errors of a replay.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace is invalid.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The runtime could not be started.
    #[error("cannot start a runtime of {threads} threads: {source}")]
    Runtime {
        /// Requested number of threads.
        threads: usize,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The router could not be started.
    #[error("cannot start {target}: {reason}")]
    Start {
        /// Name of the router.
        target: &'static str,
        /// Reason from the router.
        reason: Refusal,
    },
    /// The router failed during the run.
    #[error(transparent)]
    Loop(#[from] LoopError),
}

impl Replay {
    /// Shape of the simulated fleet.
    #[must_use]
    pub fn fleet(&self) -> Fleet {
        Fleet { workers: self.workers, dp_size: self.common.dp_size }
    }

    /// Runs the closed or the open loop on its own runtime, over the target that `start` creates.
    ///
    /// # Errors
    /// The workload cannot be read, or the target fails.
    pub fn run<T: Target>(&self, start: impl AsyncFnOnce(&Self) -> Result<T, Refusal>) -> Result<Report, ReplayError> {
        let threads = self.threads;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .enable_all()
            .build()
            .map_err(|source| ReplayError::Runtime { threads, source })?;
        let workload = Workload::prepare::<T>(self.common.prompts()?, self.common.block_size);
        let shape = Shape { fleet: self.fleet(), kv_blocks: self.common.kv_blocks, inflight: self.common.inflight };
        let progress = Progress::new(workload.len(), "requests");
        let rss_before_bytes = rss_bytes();
        let outcome = runtime.block_on(async {
            let target = start(self).await.map_err(|reason| ReplayError::Start { target: T::NAME, reason })?;
            let outcome = match self.rate {
                Some(per_second) => {
                    let arrivals = Arrivals { per_second, seed: self.common.seed };
                    open_loop::run(target, workload, shape, arrivals, rss_before_bytes, progress).await
                }
                None => {
                    let clients = Clients { count: self.clients, take_turns: self.common.take_turns };
                    closed_loop::run(target, workload, shape, clients, rss_before_bytes, progress).await
                }
            };
            Ok::<_, ReplayError>(outcome?)
        })?;
        Ok(Report::new(T::NAME, self, &outcome))
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
            ("--policy", Some(policy_name(*policy).into())),
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
    pub fn prompts(&self) -> Result<Vec<Prompt>, TraceError> {
        source::prompts(self.trace.as_deref(), self.limit, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

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

    #[test]
    fn invalid_values_are_rejected_with_flag_and_value() {
        for (flag, value) in [
            ("--workers", "0"),
            ("--clients", "0"),
            ("--limit", "1"),
            ("--block-size", "0"),
            ("--dp-size", "4097"),
            ("--kill-every", "0"),
            ("--rate", "0"),
            ("--policy", "best"),
        ] {
            let error = Arguments::try_parse_from(["test", flag, value]).err().expect("refused").to_string();
            assert!(error.contains(flag) && error.contains(value), "{error}");
        }
    }
}
