//! Selection of a rank for a request from given facts.
//!
//! Filters, costs and the pick as pure functions. Equal seed, request number and facts give equal choices, and the
//! bounds of a policy hold: lo ≤ exact ≤ hi. `schedule` gathers the facts.

mod cache_aware;
mod cost;
mod filter;
mod overlap;
mod pick;
mod policy;
mod selector;
mod shared;

pub use cache_aware::CacheAware;
pub use cost::{Bounds, CostFacts, CostTerms, KvCost, LatencyCost, LatencyFacts, LatencyTerms};
pub use filter::{
    Constraints, Filter, Pin, PinMode, RankConditions, RankTraits, Removed, TaintWeightError, preference_factor,
    topology_taint,
};
pub use overlap::{RankOverlap, TierOverlap, TierWeights};
pub use pick::{Draw, softmax};
pub use policy::{Needs, Policy};
pub(crate) use selector::chosen;
pub use selector::{Candidate, Selection, SelectorError, WorkerSelector};
pub use shared::SharedHits;
