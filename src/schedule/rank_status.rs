//! Status of a rank that restricts its use.
//!
//! `rank` maintains the fields; `eligible` evaluates them.

/// Restrictions of a rank, independent of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RankStatus {
    /// Unreachable for the embedder, or ejected on suspicion.
    pub(super) unavailable: bool,
    /// Its probes or connections fail: chosen only if no other rank is left.
    pub(super) down: bool,
    /// In a back-off after refused requests: chosen only if all other ranks are, too.
    pub(super) refusing: bool,
    pub(super) draining: bool,
    /// Asleep, as reported by its engine.
    pub(super) asleep: bool,
    /// Timed out on a load query without a reply since, or its board has not been readable yet: chosen only if no other
    /// rank is left.
    pub(super) unresponsive: bool,
    /// Overloaded according to the embedder.
    pub(super) overloaded: bool,
    /// Overloaded according to the last engine report.
    pub(super) engine_overloaded: bool,
    /// Recently ejected, with a higher cost for a while.
    pub(super) returning: bool,
}

impl RankStatus {
    /// The status as one bit per field.
    pub(super) fn to_bits(self) -> u64 {
        let Self { unavailable, down, refusing, draining, asleep, unresponsive, overloaded, .. } = self;
        let (engine_overloaded, returning) = (self.engine_overloaded, self.returning);
        let fields = [unavailable, down, refusing, draining, unresponsive, overloaded, engine_overloaded, returning];
        let fields = fields.into_iter().chain([asleep]);
        fields.zip(0..).fold(0, |bits, (field, bit)| bits | u64::from(field) << bit)
    }

    /// The inverse of [`to_bits`](Self::to_bits).
    pub(super) fn from_bits(bits: u64) -> Self {
        let [unavailable, down, refusing, draining, unresponsive, overloaded, engine_overloaded, returning, asleep] =
            std::array::from_fn(|bit| bits >> bit & 1 == 1);
        Self { unavailable, down, refusing, draining, asleep, unresponsive, overloaded, engine_overloaded, returning }
    }
}
