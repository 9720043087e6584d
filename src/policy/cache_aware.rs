//! Thresholds of SGLang's two-tier router: longest match while load is even, else fewest requests.
//!
//! A match is followed only while load is even. `schedule` provides facts and ties.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::custom::least_loaded;
use super::{BuiltIn, RankTable, RequestFacts};

/// Conditions for following a match.
///
/// Load is uneven if the busiest rank has more than [`Self::BALANCE_REQUESTS`] requests more than the least busy one
/// and more than [`Self::BALANCE_RATIO`] times as many. With uneven load, or if no rank holds more than
/// [`Self::MATCH_SHARE`] of the prompt, the rank with the fewest requests is chosen, otherwise the one with the longest
/// match. (source: the defaults of `sglang_router`'s command line, `--cache-threshold 0.3 --balance-abs-threshold 64
/// --balance-rel-threshold 1.5`, and its choice by load without a match, sgl-project/sglang#14650)
///
/// ```
/// use pointsman::internals::policy::CacheAware;
///
/// assert!(CacheAware::is_even(3, 67) && !CacheAware::is_even(3, 68));
/// assert!(CacheAware::is_even(200, 300) && !CacheAware::is_even(200, 301));
/// assert!(!CacheAware::is_match(30, 100) && CacheAware::is_match(31, 100));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheAware {}

impl CacheAware {
    /// Minimum share of a prompt for a match.
    pub const MATCH_SHARE: f64 = 0.3;
    /// Maximum difference of requests under even load.
    pub const BALANCE_REQUESTS: u32 = 64;
    /// Maximum ratio of requests under even load.
    pub const BALANCE_RATIO: f64 = 1.5;

    /// Whether load is even between ranks with at least `least` and at most `most` requests.
    #[must_use]
    pub fn is_even(least: u32, most: u32) -> bool {
        most.saturating_sub(least) <= Self::BALANCE_REQUESTS
            || f64::from(most) <= Self::BALANCE_RATIO * f64::from(least)
    }

    /// Whether a match of `cached_tokens` of `prompt_tokens` is followed.
    #[must_use]
    pub fn is_match(cached_tokens: u32, prompt_tokens: u32) -> bool {
        f64::from(cached_tokens) > Self::MATCH_SHARE * f64::from(prompt_tokens)
    }
}

impl BuiltIn for CacheAware {
    /// The rank with the longest match if load is even and the match is long enough, else the one with the fewest
    /// requests.
    #[inline]
    fn choose_from<R: RankTable + ?Sized>(request: &RequestFacts<'_>, ranks: &R) -> Option<usize> {
        let requests = || (0..ranks.len()).map(|index| ranks.requests(index));
        let (least, most) = (requests().min()?, requests().max()?);
        let mut best: Option<(u32, Reverse<u32>, u64, usize)> = None;
        ranks.visit_cached(&mut |index, cached_tokens| {
            // Most ranks hold less than the best one: no further fact about them is needed.
            if best.is_none_or(|(most_tokens, ..)| cached_tokens >= most_tokens) {
                let random_key = request.random_key(ranks.rank(index));
                best = best.max(Some((cached_tokens, Reverse(ranks.requests(index)), random_key, index)));
            }
        });
        let followed = best.filter(|&(cached_tokens, ..)| {
            Self::is_even(least, most) && Self::is_match(cached_tokens, request.prompt_tokens)
        });
        let followed = followed.map(|(.., index)| index);
        followed.or_else(|| least_loaded(request, ranks, 0..ranks.len(), |index| ranks.requests(index)))
    }
}
