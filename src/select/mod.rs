//! Selection: which rank a request should go to, given what is known of each.
//!
//! Owns the filters, the costs and the pick, as pure functions of their arguments. Promises the same choice
//! for the same seed, request number and facts, and that a policy's bounds hold: lo ≤ exact ≤ hi. Leaves to
//! `schedule` where the facts come from, and when they are gathered.

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
