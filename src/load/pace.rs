//! Mean time between the tokens of one response (inter-token latency), from reports of its token count.

use std::time::Duration;

use crate::protocol::Timestamp;

/// Token counts of a response at its first and latest report.
///
/// A report may cover several tokens, for example of one chunk. The time before the first token does not count.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::load::TokenPace;
/// use pointsman::protocol::Timestamp;
///
/// let mut pace = TokenPace::default();
/// pace.reported(9, Timestamp(0)); // ignored: before the first token
/// pace.first_token(2, Timestamp(1_000));
/// assert_eq!(pace.mean(), None);
/// pace.reported(7, Timestamp(6_000));
/// assert_eq!(pace.mean(), Some((Duration::from_micros(1), 5)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenPace {
    /// 0 before the first token.
    first_tokens: u32,
    latest_tokens: u32,
    first_at: Timestamp,
    latest_at: Timestamp,
}

impl TokenPace {
    /// Records the first `tokens`, at least one. Only the first call has an effect.
    pub fn first_token(&mut self, tokens: u64, now: Timestamp) {
        if self.first_tokens == 0 {
            let tokens = count(tokens.max(1));
            *self = Self { first_tokens: tokens, latest_tokens: tokens, first_at: now, latest_at: now };
        }
    }

    /// Records the number of tokens so far. Ignored before the first token, and unless the number has increased.
    pub fn reported(&mut self, tokens: u64, now: Timestamp) {
        if self.first_tokens > 0 && count(tokens) > self.latest_tokens {
            (self.latest_tokens, self.latest_at) = (count(tokens), now);
        }
    }

    /// Mean time between two tokens, and the number of intervals. `None` without any.
    #[must_use]
    pub fn mean(&self) -> Option<(Duration, u32)> {
        let intervals = self.latest_tokens - self.first_tokens;
        (intervals > 0).then(|| (self.latest_at.since(self.first_at) / intervals, intervals))
    }
}

/// A number of tokens; a higher one counts as the highest.
fn count(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
