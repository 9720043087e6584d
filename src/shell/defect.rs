//! Deliberate defects in the shells, which the simulation must find. A build without `test-support` has none.

#[cfg(feature = "test-support")]
use std::cell::Cell;

/// One deliberate defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// A sequence actor does not publish its board after a Book.
    BookUnpublished,
    /// A sequence actor keeps the booking of an ended lease.
    BookingKept,
    /// A sequence actor restores no bookings.
    RestoreForgets,
    /// A retired rank keeps its leases.
    RetireKeepsLeases,
    /// A lease stays marked as under reconciliation.
    StaysDirty,
    /// A drain is acknowledged only by the death of its actor.
    DrainForgotten,
    /// A Book of another generation of the slot is booked.
    GenerationIgnored,
    /// A shard ignores removals of blocks.
    RemovalIgnored,
    /// A shard keeps the contents of a removed rank.
    RankKept,
    /// A shard applies events of an earlier generation of the slot.
    EventsOfAnyGeneration,
    /// A shard dumps the contents of a cold rank.
    ColdRankDumped,
}

#[cfg(feature = "test-support")]
thread_local! {
    static PLANTED: Cell<Option<Defect>> = const { Cell::new(None) };
}

impl Defect {
    /// Plants a defect in the shells of this thread, or removes it.
    #[cfg(feature = "test-support")]
    pub fn plant(defect: Option<Self>) {
        PLANTED.set(defect);
    }

    #[cfg(feature = "test-support")]
    pub(super) fn is_planted(self) -> bool {
        PLANTED.get() == Some(self)
    }

    #[cfg(not(feature = "test-support"))]
    #[inline]
    pub(super) const fn is_planted(self) -> bool {
        false
    }
}
