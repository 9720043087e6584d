//! Buffers reused between decisions.

use smallvec::SmallVec;

use super::eligible::Eligibility;
use crate::policy::{Bounds, Lanes, LatencyCost, LatencyFacts, WorkGroup};
use crate::protocol::Slot;
use crate::select::TierOverlap;

/// Buffers reused between decisions.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Eligibility of ranks for the current request, by position.
    pub(super) eligibility: Eligibility,
    /// Overlap of the current request per rank, by position.
    pub(super) overlaps: Vec<TierOverlap>,
    /// Cost bounds of the current request per rank, by position.
    pub(super) bounds: Vec<Bounds>,
    /// The ranks that may win the current request, under a policy with columns.
    pub(super) contenders: Contenders,
    /// The single request of a batch to which the bounds or contenders still apply, except for ranks that replied since.
    pub(super) bounds_of: Option<u64>,
    /// Positions of the eligible ranks where some rank is not, for policies that compare no costs.
    pub(super) open: Vec<usize>,
    /// Slots on the shortlist.
    pub(super) listed: Vec<Slot>,
}

impl Scratch {
    /// Invalidates the bounds after a change of ranks and positions.
    pub(super) fn forget(&mut self) {
        self.bounds_of = None;
    }
}

/// The ranks that may win a request.
#[derive(Debug, Default)]
pub(super) struct Contenders {
    /// The request, by its number, and its cost.
    pub(super) cost: Option<(u64, LatencyCost)>,
    /// Work of the request on each rank, at least.
    pub(super) work: Vec<WorkGroup>,
    /// Lower bound of the cost of each rank, and the least of each group.
    pub(super) bounds: Vec<(Lanes, f32)>,
    /// The ranks whose costs were computed.
    pub(super) found: SmallVec<[Contender; 16]>,
}

/// A rank that may win a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contender {
    pub(super) position: usize,
    pub(super) bounds: Bounds,
    /// The facts of the upper bound.
    pub(super) facts: LatencyFacts,
}

impl Contenders {
    /// The cost of a request and the facts of the rank at `position`, if that is one of the request's contenders.
    pub(super) fn evaluated(&self, request: u64, position: usize) -> Option<(LatencyCost, LatencyFacts)> {
        let (_, cost) = self.cost.filter(|(number, _)| *number == request)?;
        self.found.iter().find(|known| known.position == position).map(|known| (cost, known.facts))
    }

    /// Lowest upper bound.
    pub(super) fn least_hi(&self) -> f64 {
        self.found.iter().map(|contender| contender.bounds.hi).fold(f64::INFINITY, f64::min)
    }
}
