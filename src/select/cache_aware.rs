//! The two tiers of SGLang's router, the other well-known way to choose by cache and load.
//!
//! Owns its thresholds. Promises to follow a match only while load is even. Leaves facts and ties to `schedule`.

/// When a match is followed.
///
/// Load is uneven when the busiest rank has more than [`Self::BALANCE_REQUESTS`] requests more than the least busy one
/// and more than [`Self::BALANCE_RATIO`] times as many. Then, and where no rank holds more than
/// [`Self::MATCH_SHARE`] of the prompt, the rank with the fewest requests is chosen, otherwise the one that holds most.
/// (source: the defaults of `sglang_router`'s command line, `--cache-threshold 0.3 --balance-abs-threshold 64
/// --balance-rel-threshold 1.5`, and its choice by load where nothing matches, sgl-project/sglang#14650)
///
/// ```
/// use pointsman::select::CacheAware;
///
/// assert!(CacheAware::is_even(3, 67) && !CacheAware::is_even(3, 68));
/// assert!(CacheAware::is_even(200, 300) && !CacheAware::is_even(200, 301));
/// assert!(!CacheAware::is_match(30, 100) && CacheAware::is_match(31, 100));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CacheAware;

impl CacheAware {
    /// Share of a prompt that a match must exceed.
    pub const MATCH_SHARE: f64 = 0.3;
    /// Difference in requests up to which load is even.
    pub const BALANCE_REQUESTS: u32 = 64;
    /// Ratio of requests up to which load is even.
    pub const BALANCE_RATIO: f64 = 1.5;

    /// Whether load is even between ranks of which none has fewer requests than `least` and none more than `most`.
    #[must_use]
    pub fn is_even(least: u32, most: u32) -> bool {
        most.saturating_sub(least) <= Self::BALANCE_REQUESTS
            || f64::from(most) <= Self::BALANCE_RATIO * f64::from(least)
    }

    /// Whether `cached_tokens` of `isl_tokens` are worth following.
    #[must_use]
    pub fn is_match(cached_tokens: u32, isl_tokens: u32) -> bool {
        f64::from(cached_tokens) > Self::MATCH_SHARE * f64::from(isl_tokens)
    }
}
