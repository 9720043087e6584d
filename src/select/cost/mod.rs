//! What it costs to send a request to a rank.
//!
//! Owns the formulas of the policies that compare costs, and their bounds. Promises that a cost is finite and not
//! negative, and that it lies within its bounds. Leaves the facts to `schedule`, and the pick to [`Draw`](super::Draw).

mod kv;
mod latency;

pub use kv::{CostFacts, CostTerms, KvCost};
pub use latency::{LatencyCost, LatencyFacts, LatencyTerms};

/// A cost that is only known to lie in an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// No cost is lower.
    pub lo: f64,
    /// No cost is higher.
    pub hi: f64,
}
