//! The policies, and what each needs to know before it can choose.

use serde::{Deserialize, Serialize};

/// How a rank is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Least [`super::KvCost`]: prefill still to do plus blocks held, less what is cached.
    Kv,
    /// Least [`super::LatencyCost`]: the seconds it takes and costs others.
    #[default]
    Latency,
    /// The longest match where that is worth following and load is even, else the fewest requests: the two tiers of
    /// SGLang's router ([`CacheAware`](super::CacheAware)).
    CacheAware,
    /// Each eligible rank in its turn.
    RoundRobin,
    /// Any eligible rank, evenly.
    Random,
    /// Of two drawn at random the one with fewer requests, then fewer blocks.
    PowerOfTwo,
    /// The rank with the fewest requests.
    LeastLoaded,
}

/// What a policy must know of the ranks to place a request as if it knew everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The board is enough.
    Board,
    /// Exact answers of every rank whose lower bound does not exceed the least upper bound, or ties with it.
    Bounded,
    /// Exact answers of the two ranks drawn.
    Two,
    /// Exact answers of every rank.
    All,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Kv,
        Self::Latency,
        Self::CacheAware,
        Self::RoundRobin,
        Self::Random,
        Self::PowerOfTwo,
        Self::LeastLoaded,
    ];

    /// Its name, as configurations spell it.
    ///
    /// ```
    /// use pointsman::select::Policy;
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

    /// What this policy needs under a configuration.
    ///
    /// With reuse assumed, the blocks of `kv` lie between active and active + request, and what `latency` need not compute
    /// between what is cached and that with what active prompts share; without it the bounds meet, and nobody is asked. A temperature looks at every cost, and a decaying credit at every rank's prefill, so both
    /// ask everyone.
    #[must_use]
    pub fn needs(self, temperature: f64, credit_decay: f64) -> Needs {
        match self {
            Self::RoundRobin | Self::Random | Self::LeastLoaded | Self::CacheAware => Needs::Board,
            Self::PowerOfTwo => Needs::Two,
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
    fn names_are_those_of_configurations() {
        for policy in Policy::ALL {
            assert_eq!(serde_json::to_value(policy).expect("a name"), policy.name());
        }
    }
}
