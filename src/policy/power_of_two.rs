//! Policy `power_of_two`: the less loaded of two random ranks.

use serde::{Deserialize, Serialize};

use super::custom::least_loaded;
use super::{BuiltIn, Needs, RankTable, RequestFacts};
use crate::protocol::WorkerRank;

/// Chooses, of the two ranks with the highest random keys, the one with fewer requests, then with fewer blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PowerOfTwo {}

/// The two of the ranks with the highest random keys; fewer if there are fewer ranks.
#[inline]
pub(crate) fn two_random(
    request: &RequestFacts<'_>,
    ranks: impl Iterator<Item = (usize, WorkerRank)>,
) -> [Option<usize>; 2] {
    let mut best: [Option<(u64, usize)>; 2] = [None, None];
    for (index, rank) in ranks {
        let key = Some((request.random_key(rank), index));
        if key > best[0] {
            best = [key, best[0]];
        } else if key > best[1] {
            best[1] = key;
        }
    }
    best.map(|key| key.map(|(_, index)| index))
}

impl BuiltIn for PowerOfTwo {
    fn needs(&self, _: f64) -> Needs {
        Needs::Two
    }

    #[inline]
    fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        let two = ranks.two_random().into_iter().flatten();
        least_loaded(request, ranks, two, |index| ranks.projected_load(index))
    }
}
