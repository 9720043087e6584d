//! Prefill load hint: the prefill work of one request.
//!
//! The only place that derives the tokens to compute from prompt length and cache hits, so that all parts of the router
//! use the same number.

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::work_tokens;

/// Remaining prefill work of one request, computed once when its rank is selected.
///
/// A request without prefill work has no hint, so a hint has at least one token.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::load::PrefillLoadHint;
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
    /// Prompt tokens before those to compute.
    #[serde(default)]
    cached_tokens: u32,
    #[serde(default, rename = "expected_duration_seconds", with = "crate::protocol::option_seconds")]
    expected_duration: Option<Duration>,
    #[serde(default = "reported")]
    is_reported: bool,
}

/// Default: the end of a prefill is reported.
fn reported() -> bool {
    true
}

impl PrefillLoadHint {
    /// The work of a prompt of `prompt_tokens` tokens with `cached_tokens` cached tokens; `None` if the whole prompt is
    /// cached, or if prefill is not tracked.
    ///
    /// `cached_tokens` above `prompt_tokens` counts as equal to it: caches hold whole blocks, and an estimate of their
    /// content may be stale.
    #[must_use]
    pub fn new(
        prompt_tokens: u32,
        cached_tokens: u32,
        track: bool,
        expected_duration: Option<Duration>,
    ) -> Option<Self> {
        let effective_tokens = NonZeroU32::new(prompt_tokens.saturating_sub(cached_tokens)).filter(|_| track)?;
        let cached_tokens = prompt_tokens - effective_tokens.get();
        Some(Self { effective_tokens, cached_tokens, expected_duration, is_reported: true })
    }

    /// The same work without a report of its end, for responses that are not streamed.
    #[must_use]
    pub fn unreported(self) -> Self {
        Self { is_reported: false, ..self }
    }

    /// The same prompt with `cached_tokens` cached tokens, at least those of this hint; `None` if they are the prompt.
    pub fn with_cached(self, cached_tokens: u32) -> Option<Self> {
        let prompt_tokens = self.cached_tokens + self.effective_tokens();
        Self::new(prompt_tokens, cached_tokens.max(self.cached_tokens), true, None)
    }

    /// Whether the end of the prefill will be reported.
    #[must_use]
    pub fn is_reported(self) -> bool {
        self.is_reported
    }

    /// Tokens to compute. At least 1.
    #[must_use]
    pub fn effective_tokens(self) -> u32 {
        self.effective_tokens.get()
    }

    /// Tokens to compute as [work](work_tokens), including attention to earlier tokens. Saturates.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and a cast saturates")]
    pub fn work_tokens(self) -> u32 {
        work_tokens(self.effective_tokens.get(), self.cached_tokens) as u32
    }

    /// Duration on an otherwise idle rank, if estimated.
    #[must_use]
    pub fn expected_duration(self) -> Option<Duration> {
        self.expected_duration
    }
}
