//! Policy `round_robin`: the eligible ranks in turn, in rank order.

use serde::{Deserialize, Serialize};

use super::{BuiltIn, RankTable, RequestFacts};

/// Chooses the rank whose index is the number of bookings modulo the number of eligible ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundRobin {}

impl BuiltIn for RoundRobin {
    #[inline]
    fn choose_from<R: RankTable + ?Sized>(_: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        let eligible = u64::try_from(ranks.len()).ok()?;
        usize::try_from(ranks.bookings().checked_rem(eligible)?).ok()
    }
}
