//! What the ranks' owners and keepers say against them.
//!
//! Owns the list of it. Leaves to `rank` when each holds, and to `eligible` what follows from it.

/// What stands against a rank, whoever asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    /// The embedder cannot reach it, or it is ejected on suspicion.
    pub(super) unavailable: bool,
    /// Its probes fail, or connections to it: chosen only when no other rank is left.
    pub(super) down: bool,
    /// It is in a back-off after refused requests: chosen only when every other rank is, too.
    pub(super) refusing: bool,
    pub(super) draining: bool,
    /// It let a load query time out and has given no sign since, or its board has not been readable yet: chosen only
    /// when nobody else is left.
    pub(super) suspect: bool,
    /// The embedder finds it overloaded.
    pub(super) overloaded: bool,
    /// Its engine's own account, as of the last look, makes it overloaded.
    pub(super) engine_overloaded: bool,
    /// It was ejected not long ago, and costs more for a while.
    pub(super) returning: bool,
}

impl Standing {
    /// Nothing stands against it.
    pub(super) const GOOD: Self = Self {
        unavailable: false,
        down: false,
        refusing: false,
        draining: false,
        suspect: false,
        overloaded: false,
        engine_overloaded: false,
        returning: false,
    };
}
