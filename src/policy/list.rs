//! The list of the built-in policies.

use serde::{Deserialize, Serialize};

use super::built_in::{BuiltIn, CostUnit, policies};
use super::cache_aware::CacheAware;
use super::custom::{RankTable, RequestFacts};
use super::kv::KvConfig;
use super::latency::LatencyConfig;
use super::least_loaded::LeastLoaded;
use super::needs::Needs;
use super::power_of_two::PowerOfTwo;
use super::random::Random;
use super::round_robin::RoundRobin;
use crate::validation::Problems;

policies! {
    /// Lowest cost in blocks: remaining prefill plus held blocks, minus cached blocks.
    Kv(KvConfig) = "kv",
    /// Lowest service time plus delay of others, in seconds.
    #[default]
    Latency(LatencyConfig) = "latency",
    /// Longest match if it is worth following and load is even, else the fewest requests: the two tiers of SGLang's
    /// router.
    CacheAware(CacheAware) = "cache_aware",
    /// Eligible ranks in rotation.
    RoundRobin(RoundRobin) = "round_robin",
    /// Any eligible rank, uniformly.
    Random(Random) = "random",
    /// Of two random ranks the one with fewer requests, then fewer blocks.
    PowerOfTwo(PowerOfTwo) = "power_of_two",
    /// The rank with the fewest requests.
    LeastLoaded(LeastLoaded) = "least_loaded",
}
