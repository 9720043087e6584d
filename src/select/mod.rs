//! Eligibility of ranks, cache overlaps, and the seeded pick.
//!
//! Pure functions: equal seed, request number and facts give equal results. Policies are in
//! [`policy`](crate::policy); `schedule` gathers the facts.

mod filter;
mod overlap;
mod pick;
mod shared;

pub use filter::{
    Constraints, Filter, Pin, PinMode, RankConditions, RankTraits, Removed, TaintWeightError, preference_factor,
    topology_taint,
};
pub use overlap::{RankOverlap, TierOverlap, TierWeights};
pub use pick::{Draw, softmax};
pub use shared::SharedHits;
