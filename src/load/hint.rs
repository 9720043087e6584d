//! The prefill work that one request brings to a rank.
//!
//! Owns the one place where tokens to compute are derived from prompt length and cache hits, so that no two
//! parts of the router can disagree about it. Leaves to others the estimate of how long the work takes.

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::work_tokens;

/// Prefill work still to be done for one request, computed once, when its rank is chosen.
///
/// A request without such work has no hint, so a hint always stands for at least one token.
///
/// ```
/// use std::time::Duration;
/// use pointsman::load::PrefillLoadHint;
///
/// let hint = PrefillLoadHint::new(1200, 200, true, Some(Duration::from_millis(50))).expect("work is left");
/// assert_eq!(hint.effective_tokens(), 1000);
/// assert_eq!(PrefillLoadHint::new(1200, 1200, true, None), None); // all of it is cached
/// assert_eq!(PrefillLoadHint::new(1200, 200, false, None), None); // prefill is not tracked
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillLoadHint {
    effective_tokens: NonZeroU32,
    /// Tokens of the prompt that stand before those.
    #[serde(default)]
    cached_tokens: u32,
    expected_duration: Option<Duration>,
    #[serde(default = "reported")]
    is_reported: bool,
}

/// Most prefills are reported when they are done.
fn reported() -> bool {
    true
}

impl PrefillLoadHint {
    /// The work of a prompt of `isl_tokens` tokens of which `cached_tokens` are cached; nothing when the cache
    /// holds them all, or when prefill is not to be tracked.
    ///
    /// More cached than prompt tokens count as all of them: a cache works in whole blocks, and an estimate of
    /// its contents may be stale.
    #[must_use]
    pub fn new(isl_tokens: u32, cached_tokens: u32, track: bool, expected_duration: Option<Duration>) -> Option<Self> {
        let effective_tokens = NonZeroU32::new(isl_tokens.saturating_sub(cached_tokens)).filter(|_| track)?;
        let cached_tokens = isl_tokens - effective_tokens.get();
        Some(Self { effective_tokens, cached_tokens, expected_duration, is_reported: true })
    }

    /// The same work, of which nobody will report that it is done: the answer comes whole.
    #[must_use]
    pub fn unreported(self) -> Self {
        Self { is_reported: false, ..self }
    }

    /// Whether its end will be reported.
    #[must_use]
    pub fn is_reported(self) -> bool {
        self.is_reported
    }

    /// Tokens to compute. At least 1.
    #[must_use]
    pub fn effective_tokens(self) -> u32 {
        self.effective_tokens.get()
    }

    /// The same as [work](work_tokens): with what attention to earlier tokens adds. Saturates.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and a cast saturates")]
    pub fn work_tokens(self) -> u32 {
        work_tokens(self.effective_tokens.get(), self.cached_tokens) as u32
    }

    /// How long computing them takes on an otherwise idle rank, where it was estimated.
    #[must_use]
    pub fn expected_duration(self) -> Option<Duration> {
        self.expected_duration
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_cached_than_prompt_tokens_leave_no_work() {
        assert_eq!(PrefillLoadHint::new(100, 128, true, None), None);
        assert_eq!(PrefillLoadHint::new(0, 0, true, None), None);
        assert_eq!(
            PrefillLoadHint::new(u32::MAX, 0, true, None).map(PrefillLoadHint::effective_tokens),
            Some(u32::MAX)
        );
    }

    #[test]
    fn a_hint_survives_the_wire_and_a_hint_of_nothing_does_not() {
        let hint = PrefillLoadHint::new(7, 2, true, Some(Duration::from_millis(3)));
        let text = serde_json::to_string(&hint).expect("plain data");
        assert_eq!(serde_json::from_str::<Option<PrefillLoadHint>>(&text).expect("own output"), hint);
        let nothing = r#"{"effective_tokens":0,"expected_duration":null}"#;
        assert!(serde_json::from_str::<PrefillLoadHint>(nothing).is_err());
    }
}
