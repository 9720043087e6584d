//! Policy `least_loaded`: the eligible rank with the fewest requests.

use serde::{Deserialize, Serialize};

use super::custom::least_loaded;
use super::{BuiltIn, RankTable, RequestFacts};

/// Chooses the rank with the fewest requests; equal counts are decided at random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeastLoaded {}

impl BuiltIn for LeastLoaded {
    #[inline]
    fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        least_loaded(request, ranks, 0..ranks.len(), |index| ranks.requests(index))
    }
}
