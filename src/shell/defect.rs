//! Deliberate defects in the shells, which the simulation must find. A build without `test-support` has none.

#[cfg(feature = "test-support")]
use std::cell::Cell;

macro_rules! defects {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One deliberate defect.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Defect {
            $($(#[$doc])* $name,)*
        }

        #[cfg(feature = "test-support")]
        impl Defect {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

defects! {
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
    /// A shard ignores removals of blocks.
    RemovalIgnored,
    /// A shard keeps the contents of a removed rank.
    RankKept,
    /// A shard ignores registrations.
    RegistrationIgnored,
    /// A cold rank stays cold.
    ColdForever,
    /// A shard dumps the contents of a cold rank.
    ColdRankDumped,
    /// The scheduler queues a request whose caller has left.
    EndedIsQueued,
    /// The scheduler keeps a retired rank.
    RetiredRankServes,
    /// The scheduler ignores drains.
    DrainServes,
    /// The scheduler arms no timer for waiting requests after the first.
    WakeTimerForgotten,
    /// The scheduler requests no wake-up at falling load.
    FlagNotRaised,
    /// The scheduler ignores the embedder's rank conditions.
    ConditionsIgnored,
    /// The scheduler ignores ejections.
    ExclusionsIgnored,
    /// Load sharing does not publish the sums of other replicas.
    SumsUnpublished,
    /// Load sharing reads no boards.
    BoardsUnread,
    /// The supervisor reports no ranks of a dead index shard.
    LossUnnoticed,
    /// The supervisor leaves the bookings of a retired rank whose sequence actor died first.
    LeftBookingsStay,
    /// The supervisor ignores the acknowledgement of a removal.
    RetirementIgnored,
    /// A reader requests replays without their first message.
    ReplayBeginsLate,
    /// A reader ignores the loss of its shard.
    ResyncIgnored,
    /// A reader does not apply some messages.
    MessageSkipped,
    /// A reader records a position after that of its contents.
    PositionAhead,
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
