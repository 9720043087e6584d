//! Routing policies, one module each with its settings, and the interfaces for custom policies of embedders.
//!
//! A module holds the settings of its policy, the knowledge that it needs, and its choice or its cost with bounds and
//! terms. The cost of `latency` is in `schedule`. The list of policies is `policies!` in `list`; [`Policy`] and
//! [`PolicyConfig`] follow from it. A policy that compares no costs also implements [`RankPolicy`], the interface of
//! custom ones. `schedule` supplies facts and applies eligibility.

mod built_in;
pub(crate) mod cache_aware;
mod config;
pub(crate) mod custom;
pub(crate) mod kv;
mod latency;
pub(crate) mod least_loaded;
mod list;
pub(crate) mod needs;
pub(crate) mod power_of_two;
pub(crate) mod random;
mod read;
pub(crate) mod round_robin;

pub(crate) use built_in::{BuiltIn, CostUnit};
pub(crate) use cache_aware::CacheAware;
pub use custom::{Candidate, PolicyError, RankFilter, RankPolicy, RankScorer, RankTable, RequestFacts};
pub(crate) use custom::{RankFilters, checked_choice, checked_cost};
pub use kv::KvConfig;
pub(crate) use kv::{CostFacts, CostTerms, KvCost};
pub use latency::LatencyConfig;
pub(crate) use least_loaded::LeastLoaded;
pub use list::{Policy, PolicyConfig};
pub(crate) use needs::Bounds;
pub use needs::Needs;
pub(crate) use power_of_two::{PowerOfTwo, two_random};
pub(crate) use random::Random;
pub(crate) use round_robin::RoundRobin;

/// Implements the interface of custom policies for built-in ones that compare no costs.
macro_rules! rank_policies {
    ($($policy:ty),*) => {$(
        impl RankPolicy for $policy {
            fn needs(&self) -> Needs {
                BuiltIn::needs(self, 0.0)
            }

            fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
                Self::choose_from(request, ranks)
            }
        }
    )*};
}

rank_policies!(CacheAware, RoundRobin, Random, PowerOfTwo, LeastLoaded);

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
