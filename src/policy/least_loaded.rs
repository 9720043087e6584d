//! Policy `least_loaded`: the eligible rank with the fewest requests.

use super::custom::least_loaded;
use super::{Needs, RankPolicy, RankTable, RequestFacts};

/// Chooses the rank with the fewest requests; equal counts are decided at random.
#[derive(Clone, Copy, Debug)]
pub struct LeastLoaded;

impl LeastLoaded {
    /// The choice, with static dispatch for the router's own table.
    #[inline]
    pub(super) fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        least_loaded(request, ranks, 0..ranks.len(), |index| ranks.requests(index))
    }
}

impl RankPolicy for LeastLoaded {
    fn needs(&self) -> Needs {
        Needs::Board
    }

    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        Self::choose_from(request, ranks)
    }
}
