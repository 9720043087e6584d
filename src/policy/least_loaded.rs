//! Policy `least_loaded`: the eligible rank with the fewest requests.

use serde::{Deserialize, Serialize};

use super::custom::least_loaded;
use super::{BuiltIn, Needs, RankPolicy, RankTable, RequestFacts};

/// Chooses the rank with the fewest requests; equal counts are decided at random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeastLoaded {}

impl BuiltIn for LeastLoaded {
    fn needs(&self, _: f64) -> Needs {
        Needs::Board
    }

    #[inline]
    fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        least_loaded(request, ranks, 0..ranks.len(), |index| ranks.requests(index))
    }
}

impl RankPolicy for LeastLoaded {
    fn needs(&self) -> Needs {
        BuiltIn::needs(self, 0.0)
    }

    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        Self::choose_from(request, ranks)
    }
}
