//! Buffers reused between decisions.

use smallvec::SmallVec;

use crate::policy::Bounds;
use crate::protocol::Slot;
use crate::schedule::eligible::Eligibility;
use crate::schedule::latency::formula::{LatencyCost, LatencyFacts};
use crate::schedule::latency::lanes::{Lanes, WorkGroup};
use crate::select::TierOverlap;

/// Buffers reused between decisions.
#[derive(Debug, Default)]
pub(in crate::schedule) struct Scratch {
    /// Eligibility of ranks for the current request, by position.
    pub(in crate::schedule) eligibility: Eligibility,
    /// Overlap of the current request per rank, by position.
    pub(in crate::schedule) overlaps: Vec<TierOverlap>,
    /// Cost bounds of the current request per rank, by position.
    pub(in crate::schedule) bounds: Vec<Bounds>,
    /// The ranks that may win the current request, under a policy with columns.
    pub(in crate::schedule) contenders: Contenders,
    /// The single request of a batch to which the bounds or contenders still apply, except for ranks that replied since.
    pub(in crate::schedule) bounds_of: Option<u64>,
    /// Positions of the eligible ranks where some rank is not, for policies that compare no costs.
    pub(in crate::schedule) open: Vec<usize>,
    /// Slots on the shortlist.
    pub(in crate::schedule) listed: Vec<Slot>,
}

impl Scratch {
    /// Invalidates the bounds after a change of ranks and positions.
    pub(in crate::schedule) fn forget(&mut self) {
        self.bounds_of = None;
    }
}

/// The ranks that may win a request.
#[derive(Debug, Default)]
pub(in crate::schedule) struct Contenders {
    /// The request, by its number, and its cost.
    pub(in crate::schedule) cost: Option<(u64, LatencyCost)>,
    /// Work of the request on each rank, at least.
    pub(in crate::schedule) work: Vec<WorkGroup>,
    /// Lower bound of the cost of each rank, and the least of each group.
    pub(in crate::schedule) bounds: Vec<(Lanes, f32)>,
    /// The ranks whose costs were computed.
    pub(in crate::schedule) found: SmallVec<[Contender; 16]>,
}

/// A rank that may win a request.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct Contender {
    pub(in crate::schedule) position: usize,
    pub(in crate::schedule) bounds: Bounds,
    /// The facts of the upper bound.
    pub(in crate::schedule) facts: LatencyFacts,
}

impl Contenders {
    /// The cost of a request and the facts of the rank at `position`, if that is one of the request's contenders.
    pub(in crate::schedule) fn evaluated(&self, request: u64, position: usize) -> Option<(LatencyCost, LatencyFacts)> {
        let (_, cost) = self.cost.filter(|(number, _)| *number == request)?;
        self.found.iter().find(|known| known.position == position).map(|known| (cost, known.facts))
    }

    /// Lowest upper bound.
    pub(in crate::schedule) fn least_hi(&self) -> f64 {
        self.found.iter().map(|contender| contender.bounds.hi).fold(f64::INFINITY, f64::min)
    }
}
