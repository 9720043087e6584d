//! Policy `round_robin`: the eligible ranks in turn, in rank order.

use super::{Needs, RankPolicy, RankTable, RequestFacts};

/// Chooses the rank whose index is the number of bookings modulo the number of eligible ranks.
#[derive(Clone, Copy, Debug)]
pub struct RoundRobin;

impl RoundRobin {
    /// The choice, with static dispatch for the router's own table.
    #[inline]
    pub(super) fn choose_from<R: RankTable + ?Sized>(_: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        let eligible = u64::try_from(ranks.len()).ok()?;
        usize::try_from(ranks.bookings().checked_rem(eligible)?).ok()
    }
}

impl RankPolicy for RoundRobin {
    fn needs(&self) -> Needs {
        Needs::Board
    }

    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        Self::choose_from(request, ranks)
    }
}
