//! Policy `random`: any eligible rank with equal probability.

use super::{Needs, RankPolicy, RankTable, RequestFacts};

/// Chooses the rank with the highest random key.
#[derive(Clone, Copy, Debug)]
pub struct Random;

impl Random {
    /// The choice, with static dispatch for the router's own table.
    #[inline]
    pub(super) fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        (0..ranks.len()).max_by_key(|&index| request.random_key(ranks.rank(index)))
    }
}

impl RankPolicy for Random {
    fn needs(&self) -> Needs {
        Needs::Board
    }

    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        Self::choose_from(request, ranks)
    }
}
