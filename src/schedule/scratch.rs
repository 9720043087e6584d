//! Buffers reused between decisions.

use super::contenders::Contenders;
use super::eligible::Eligibility;
use crate::policy::Bounds;
use crate::protocol::Slot;
use crate::select::TierOverlap;

/// Buffers reused between decisions.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Eligibility of ranks for the current request, by position.
    pub(super) eligibility: Eligibility,
    /// Overlap of the current request per rank, by position.
    pub(super) overlaps: Vec<TierOverlap>,
    /// Positions with an overlap.
    pub(super) overlapped: Vec<usize>,
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
