//! Constraints of requests, traits of ranks, and the filters that compare them.
//!
//! Each rank is excluded by at most one filter, the first that applies. A rejection counts removed ranks per filter.
//! `schedule` provides ranks and loads, and handles requests without an eligible rank.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::names::named;
use crate::protocol::{KvTransferEnforcement, WorkerConfig, WorkerId, WorkerRank};

/// Taint for a worker's topology: `pointsman.topology/zone=a`.
#[must_use]
pub fn topology_taint(domain: &str, value: &str) -> String {
    format!("pointsman.topology/{domain}={value}")
}

/// Strength of a pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PinMode {
    /// No other rank may serve.
    #[default]
    Hard,
    /// Preferred at any cost while eligible; otherwise any rank.
    Soft,
}

/// A target worker, or one rank of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// Worker.
    pub worker: WorkerId,
    /// Rank; any rank of the worker if absent, which is the only one of a single-rank worker.
    pub rank: Option<u32>,
    /// Strength.
    #[serde(default)]
    pub mode: PinMode,
}

impl Pin {
    /// Whether the pin includes this rank.
    #[must_use]
    pub fn names(&self, rank: WorkerRank) -> bool {
        self.worker == rank.worker && self.rank.is_none_or(|wanted| wanted == rank.rank)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => WorkerRank::new(self.worker, rank).fmt(f),
            None => self.worker.fmt(f),
        }
    }
}

/// Constraints of a request on its rank.
///
/// ```
/// use pointsman::protocol::{WorkerConfig, WorkerId, WorkerRank};
/// use pointsman::{Constraints, Filter, RankTraits};
///
/// let constraints = Constraints { required_taints: ["h100".to_owned()].into(), ..Constraints::default() };
/// let (rank, plain) = (WorkerRank::new(WorkerId(1), 0), RankTraits::of(&WorkerConfig::at("http://a")));
/// assert_eq!(constraints.refused_by(rank, &plain), Some(Filter::RequiredTaints));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Constraints {
    /// Allowed workers; all if absent.
    pub allowed_workers: Option<BTreeSet<WorkerId>>,
    /// Excluded ranks, such as those of failed attempts. Unregistered ranks are ignored.
    pub excluded_ranks: BTreeSet<WorkerRank>,
    /// Target worker or rank.
    pub pin: Option<Pin>,
    /// Taints that the worker must carry, all of them.
    pub required_taints: BTreeSet<String>,
    /// Preferred (positive weight) or avoided (negative weight) taints: the cost of a rank is multiplied by
    /// exp(-tanh(sum of the weights of its taints)), a factor of 0.37 to 2.72. Weights are finite. Pinned requests
    /// ignore them.
    pub preferred_taints: BTreeMap<String, f64>,
}

/// A weight that is not finite.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the weight of preferred taint {taint:?} is {weight}, must be finite")]
pub struct TaintWeightError {
    /// Taint.
    pub taint: String,
    /// Weight.
    pub weight: f64,
}

impl Constraints {
    /// Whether there are no constraints.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.allowed_workers.is_none()
            && self.excluded_ranks.is_empty()
            && self.pin.is_none()
            && self.required_taints.is_empty()
            && self.preferred_taints.is_empty()
    }

    /// Checks the weights.
    ///
    /// # Errors
    /// The first weight that is not finite.
    pub fn validate(&self) -> Result<(), TaintWeightError> {
        match self.preferred_taints.iter().find(|(_, weight)| !weight.is_finite()) {
            Some((taint, weight)) => Err(TaintWeightError { taint: taint.clone(), weight: *weight }),
            None => Ok(()),
        }
    }

    /// Restricts the decode side of a request to ranks in the transfer domain of this prefill worker.
    pub fn follow_transfer(&mut self, prefill: &WorkerConfig) {
        let Some(domain) = &prefill.kv_transfer_domain else { return };
        let Some(value) = prefill.topology_domains.get(domain) else { return };
        let taint = topology_taint(domain, value);
        match prefill.kv_transfer_enforcement {
            KvTransferEnforcement::Required => {
                self.required_taints.insert(taint);
            }
            KvTransferEnforcement::Preferred => {
                self.preferred_taints.insert(taint, prefill.kv_transfer_preferred_weight.unwrap_or(1.0));
            }
        }
    }

    /// The hard pin, if any.
    #[must_use]
    pub fn hard_pin(&self) -> Option<Pin> {
        self.pin.filter(|pin| pin.mode == PinMode::Hard)
    }

    /// Whether a soft pin includes the rank.
    #[must_use]
    pub fn prefers(&self, rank: WorkerRank) -> bool {
        self.pin.is_some_and(|pin| pin.mode == PinMode::Soft && pin.names(rank))
    }

    /// The first of these constraints that excludes the rank.
    #[must_use]
    pub fn refused_by(&self, rank: WorkerRank, traits: &RankTraits) -> Option<Filter> {
        if self.allowed_workers.as_ref().is_some_and(|allowed| !allowed.contains(&rank.worker)) {
            return Some(Filter::Allowed);
        }
        if self.excluded_ranks.contains(&rank) {
            return Some(Filter::Excluded);
        }
        if self.hard_pin().is_some_and(|pin| !pin.names(rank)) {
            return Some(Filter::Pin);
        }
        (!self.required_taints.is_subset(&traits.taints)).then_some(Filter::RequiredTaints)
    }

    /// Cost factor of the rank.
    #[must_use]
    pub fn cost_factor(&self, traits: &RankTraits) -> f64 {
        if self.preferred_taints.is_empty() || self.hard_pin().is_some() {
            return 1.0;
        }
        let liked = self.preferred_taints.iter().filter(|(taint, _)| traits.taints.contains(*taint));
        preference_factor(liked.map(|(_, weight)| weight).sum())
    }

    /// A number shared by requests with the same set of eligible ranks; 0 without restrictions.
    #[must_use]
    pub fn lane(&self) -> u64 {
        let Self { allowed_workers, excluded_ranks, required_taints, .. } = self;
        let pin = self.hard_pin();
        if allowed_workers.is_none() && excluded_ranks.is_empty() && pin.is_none() && required_taints.is_empty() {
            return 0;
        }
        let mut hasher = Xxh3::new();
        (allowed_workers, excluded_ranks, pin, required_taints).hash(&mut hasher);
        hasher.finish().max(1)
    }
}

/// Cost factor of a preference weight: exp(-tanh(weight)), 1 for none. (reference: NVIDIA Dynamo 1.6.1, preferred
/// taints)
#[must_use]
pub fn preference_factor(weight: f64) -> f64 {
    (-weight.tanh()).exp()
}

/// Traits of a rank, from the configuration of its worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankTraits {
    /// Taints, including topology.
    pub taints: BTreeSet<String>,
    /// Loaded LoRA adapters.
    pub lora_adapters: BTreeSet<String>,
    /// Maximum tokens per engine step, if known.
    pub max_num_batched_tokens: Option<u32>,
    /// Total KV blocks, if known.
    pub total_kv_blocks: Option<u32>,
}

impl RankTraits {
    /// Traits of the ranks of a worker.
    #[must_use]
    pub fn of(config: &WorkerConfig) -> Self {
        let topology = config.topology_domains.iter().map(|(domain, value)| topology_taint(domain, value));
        Self {
            taints: config.taints.iter().cloned().chain(topology).collect(),
            lora_adapters: config.lora_adapters.clone(),
            max_num_batched_tokens: config.max_num_batched_tokens,
            total_kv_blocks: config.total_kv_blocks,
        }
    }
}

/// Conditions of ranks known to the embedder, as a complete set. Unregistered ranks are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RankConditions {
    /// Overloaded ranks.
    pub overloaded: BTreeSet<WorkerRank>,
    /// Unreachable ranks.
    pub unavailable: BTreeSet<WorkerRank>,
}

named! {
    /// Filters in order of evaluation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Filter {
        /// Worker not among the allowed ones.
        Allowed = "not allowed",
        /// Rank excluded by the request after a failed attempt.
        Excluded = "excluded",
        /// Request pinned to another rank.
        Pin = "pinned elsewhere",
        /// Missing required taint.
        RequiredTaints = "without a required taint",
        /// Excluded by a custom filter.
        Custom = "refused by a custom filter",
        /// Unreachable according to the embedder, or ejected for health. Down ranks are excluded only while other ranks
        /// remain.
        Unavailable = "unavailable",
        /// Draining.
        Draining = "draining",
        /// Its engine sleeps.
        Asleep = "asleep",
        /// Its sequence actor timed out on a load query while others responded.
        Unresponsive = "unresponsive",
        /// It has just refused requests while others have not.
        Refusing = "refusing requests",
        /// It lacks the LoRA adapter that other ranks have loaded.
        Lora = "without the LoRA adapter",
        /// Overloaded according to the embedder or its load.
        Overloaded = "overloaded",
        /// Busy for the class of the request.
        Busy = "busy",
        /// Without room for the context of the program beside those of others.
        Full = "full of the contexts of other programs",
        /// Predicted to miss more latency targets of the request than another rank.
        Targets = "predicted to miss a target",
    }
}

impl Filter {
    /// Whether waiting can end the exclusion, because the rank itself is suitable.
    #[must_use]
    pub fn passes(self) -> bool {
        let is_constraint =
            matches!(self, Self::Allowed | Self::Excluded | Self::Pin | Self::RequiredTaints | Self::Custom);
        !is_constraint && !matches!(self, Self::Unavailable | Self::Draining)
    }
}

/// Number of ranks removed per filter.
///
/// ```
/// use pointsman::internals::select::Removed;
/// use pointsman::Filter;
///
/// let removed = Removed::count([Some(Filter::Draining), None, Some(Filter::Allowed), Some(Filter::Draining)]);
/// assert_eq!(removed.to_string(), "1 not allowed, 2 draining");
/// assert_eq!(removed.by(Filter::Draining), 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed([u32; Filter::ALL.len()]);

impl Removed {
    /// Counts exclusions; `None` is eligible.
    pub fn count(verdicts: impl IntoIterator<Item = Option<Filter>>) -> Self {
        let mut removed = Self::default();
        for filter in verdicts.into_iter().flatten() {
            removed.0[filter as usize] += 1;
        }
        removed
    }

    /// Ranks removed by a filter.
    #[must_use]
    pub fn by(&self, filter: Filter) -> u32 {
        self.0[filter as usize]
    }
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for filter in Filter::ALL.into_iter().filter(|filter| self.by(*filter) > 0) {
            write!(f, "{separator}{} {}", self.by(filter), filter.name())?;
            separator = ", ";
        }
        if separator.is_empty() { f.write_str("none removed") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(worker: u64, rank: u32) -> WorkerRank {
        WorkerRank::new(WorkerId(worker), rank)
    }

    /// Requests that wait for different ranks must not share a lane or an eligibility result.
    #[test]
    fn excluded_ranks_make_a_lane_and_are_plain_data() {
        let excluding = |ranks: &[WorkerRank]| Constraints {
            excluded_ranks: ranks.iter().copied().collect(),
            ..Constraints::default()
        };
        let (none, one, other) = (excluding(&[]), excluding(&[rank(1, 0)]), excluding(&[rank(1, 1)]));
        assert!(none.is_empty() && !one.is_empty());
        assert_eq!(none.lane(), 0);
        assert!(one.lane() != 0 && one.lane() != other.lane() && one.lane() == one.clone().lane());
        let written = r#"{ "excluded_ranks": [{ "worker": 1, "rank": 0 }] }"#;
        assert_eq!(serde_json::from_str::<Constraints>(written).expect("valid"), one);
        assert_eq!(serde_json::to_value(Filter::Excluded).expect("valid JSON"), "excluded");
        assert!(!Filter::Excluded.passes(), "waiting does not help");
    }
}
