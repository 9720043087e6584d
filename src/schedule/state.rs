//! State of the pool that every policy reads: its ranks, typical values, and arrival rate.

use super::eligible::Eligibility;
use super::latency::typical::Typical;
use super::pending::PendingRequest;
use super::pool::Arrivals;
use super::ranks::Ranks;
use super::types::Rejection;
use crate::load::PlacementRate;
use crate::protocol::Timestamp;
use crate::select::Filter;

/// State of the pool on which requests are decided, the same for every policy.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) ranks: Ranks,
    /// Typical values of the pool, learned from its placements.
    pub(super) typical: Typical,
    /// Arrival rate of its placements.
    pub(super) arrival_rate: Arrivals,
    /// Arrivals at other replicas, at the start of the batch.
    pub(super) peers: PlacementRate,
    /// Number of decided bookings, for the rotation of round robin.
    pub(super) turns: u64,
    /// Time of the current step.
    pub(super) now: Timestamp,
}

impl Pool {
    /// Reason for an empty choice.
    pub(super) fn rejection<T>(&self, pending: &PendingRequest<T>, eligibility: &Eligibility) -> Rejection {
        let ranks = self.ranks.as_slice();
        if let Some(pin) = pending.request.options.as_ref().and_then(|options| options.constraints.hard_pin()) {
            let named = ranks.iter().position(|rank| pin.names(rank.rank));
            return Rejection::Pinned { pin, refused_by: named.and_then(|position| eligibility.of(position)) };
        }
        if ranks.is_empty() {
            return Rejection::NoRanks;
        }
        let removed = eligibility.removed();
        if eligibility.has(Filter::Overloaded) {
            return Rejection::AllOverloaded { removed };
        }
        Rejection::NoneEligible { removed }
    }
}
