//! Knowledge that a policy needs, and the bounds of its costs.

/// Interval that contains a cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Lower bound.
    pub lo: f64,
    /// Upper bound.
    pub hi: f64,
}

impl Bounds {
    /// Bounds of a cost that is known.
    #[inline]
    pub(crate) fn exactly(cost: f64) -> Self {
        Self { lo: cost, hi: cost }
    }

    /// Bounds of a cost that is multiplied by `factor`, which is not negative.
    #[inline]
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { lo: self.lo * factor, hi: self.hi * factor }
    }
}

/// Knowledge that a policy requires for an exact placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The load board.
    Board,
    /// Exact loads of every rank whose lower bound does not exceed the least upper bound, or ties with it.
    Bounded,
    /// Exact loads of the two drawn ranks.
    Two,
    /// Exact loads of all ranks.
    All,
}
