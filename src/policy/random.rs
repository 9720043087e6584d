//! Policy `random`: any eligible rank with equal probability.

use serde::{Deserialize, Serialize};

use super::{BuiltIn, RankTable, RequestFacts};

/// Chooses the rank with the highest random key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {}

impl BuiltIn for Random {
    #[inline]
    fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        (0..ranks.len()).max_by_key(|&index| request.random_key(ranks.rank(index)))
    }
}
