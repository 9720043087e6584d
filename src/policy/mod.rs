//! Routing policies, one module each with its settings, and the interfaces for custom policies of embedders.
//!
//! A policy that compares costs (`latency`, `kv`) has a cost with bounds; any other implements [`RankPolicy`]. The list
//! of built-in policies is [`Policy`]. `schedule` supplies facts and applies eligibility.

mod cache_aware;
mod config;
mod custom;
mod kv;
mod latency;
mod least_loaded;
mod power_of_two;
mod random;
mod read;
mod round_robin;

use serde::{Deserialize, Serialize};

pub use cache_aware::CacheAware;
pub use config::PolicyConfig;
pub use custom::{Candidate, PolicyError, RankFilter, RankFilters, RankPolicy, RankScorer, RankTable, RequestFacts};
pub(crate) use custom::{checked_choice, checked_cost};
pub use kv::{CostFacts, CostTerms, KvConfig, KvCost};
pub use latency::{LatencyConfig, LatencyCost, LatencyFacts, LatencyTerms};
pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub(crate) use power_of_two::two_random;
pub use random::Random;
pub use round_robin::RoundRobin;

/// Interval that contains a cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Lower bound.
    pub lo: f64,
    /// Upper bound.
    pub hi: f64,
}

impl Bounds {
    /// Bounds of a cost that is known.
    #[inline]
    pub(crate) fn exactly(cost: f64) -> Self {
        Self { lo: cost, hi: cost }
    }

    /// Bounds of a cost that is multiplied by `factor`, which is not negative.
    #[inline]
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { lo: self.lo * factor, hi: self.hi * factor }
    }
}

/// Selection policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Lowest [`KvCost`]: remaining prefill plus held blocks, minus cached blocks.
    Kv,
    /// Lowest [`LatencyCost`]: service time plus delay of others, in seconds.
    #[default]
    Latency,
    /// Longest match if it is worth following and load is even, else the fewest requests: the two tiers of SGLang's
    /// router ([`CacheAware`]).
    CacheAware,
    /// Eligible ranks in rotation.
    RoundRobin,
    /// Any eligible rank, uniformly.
    Random,
    /// Of two random ranks the one with fewer requests, then fewer blocks.
    PowerOfTwo,
    /// The rank with the fewest requests.
    LeastLoaded,
}

/// Knowledge that a policy requires for an exact placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The load board.
    Board,
    /// Exact loads of every rank whose lower bound does not exceed the least upper bound, or ties with it.
    Bounded,
    /// Exact loads of the two drawn ranks.
    Two,
    /// Exact loads of all ranks.
    All,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 7] = [
        Self::Kv,
        Self::Latency,
        Self::CacheAware,
        Self::RoundRobin,
        Self::Random,
        Self::PowerOfTwo,
        Self::LeastLoaded,
    ];

    /// Name in configurations.
    ///
    /// ```
    /// use pointsman::policy::Policy;
    ///
    /// assert_eq!(Policy::CacheAware.name(), "cache_aware");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Latency => "latency",
            Self::CacheAware => "cache_aware",
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power_of_two",
            Self::LeastLoaded => "least_loaded",
        }
    }

    /// Calls a policy that compares no costs; `None` for one that does.
    #[inline]
    pub(crate) fn choose(self, request: &RequestFacts<'_>, ranks: &impl RankTable) -> Option<usize> {
        match self {
            Self::Kv | Self::Latency => None,
            Self::CacheAware => CacheAware::choose_from(request, ranks),
            Self::RoundRobin => RoundRobin::choose_from(request, ranks),
            Self::Random => Random::choose_from(request, ranks),
            Self::PowerOfTwo => PowerOfTwo::choose_from(request, ranks),
            Self::LeastLoaded => LeastLoaded::choose_from(request, ranks),
        }
    }

    /// Knowledge that this policy requires under a configuration.
    ///
    /// With assumed reuse, the blocks of `kv` lie between active and active + request, and the cached part under
    /// `latency` lies between the index overlap and that plus blocks shared with active prompts. Without reuse the
    /// bounds are exact and no rank is queried. A temperature depends on every cost, and a decaying credit on every
    /// rank's prefill, so both query all ranks.
    #[must_use]
    pub fn needs(self, temperature: f64, credit_decay: f64) -> Needs {
        match self {
            Self::RoundRobin => RoundRobin.needs(),
            Self::Random => Random.needs(),
            Self::LeastLoaded => LeastLoaded.needs(),
            Self::CacheAware => CacheAware.needs(),
            Self::PowerOfTwo => PowerOfTwo.needs(),
            Self::Kv if temperature > 0.0 || credit_decay > 0.0 => Needs::All,
            Self::Latency if temperature > 0.0 => Needs::All,
            Self::Kv | Self::Latency => Needs::Bounded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_equal_those_of_configurations() {
        for policy in Policy::ALL {
            assert_eq!(serde_json::to_value(policy).expect("a name"), policy.name());
        }
    }
}
