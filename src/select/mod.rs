//! Selection: which rank a request should go to, given what is known of each.
//!
//! Owns the filters, the costs and the pick, as pure functions of their arguments. Promises the same choice
//! for the same seed, request number and facts, and that a policy's bounds hold: lo ≤ exact ≤ hi. Leaves to
//! `schedule` where the facts come from, and when they are gathered.

mod cost;
mod overlap;
mod pick;
mod policy;

pub use cost::{Bounds, CostFacts, KvCost};
pub use overlap::{RankOverlap, TierOverlap, TierWeights};
pub use pick::{Draw, softmax};
pub use policy::{Needs, Policy};
