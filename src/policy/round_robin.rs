//! Policy `round_robin`: the eligible ranks in turn, in rank order.

use serde::{Deserialize, Serialize};

use super::{BuiltIn, Needs, RankPolicy, RankTable, RequestFacts};

/// Chooses the rank whose index is the number of bookings modulo the number of eligible ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundRobin {}

impl BuiltIn for RoundRobin {
    fn needs(&self, _: f64) -> Needs {
        Needs::Board
    }

    #[inline]
    fn choose_from<R: RankTable + ?Sized>(_: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        let eligible = u64::try_from(ranks.len()).ok()?;
        usize::try_from(ranks.bookings().checked_rem(eligible)?).ok()
    }
}

impl RankPolicy for RoundRobin {
    fn needs(&self) -> Needs {
        BuiltIn::needs(self, 0.0)
    }

    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        Self::choose_from(request, ranks)
    }
}
