//! Mean time between the tokens of one response (inter-token latency), from reports of its token count.

use std::time::Duration;

use crate::protocol::Timestamp;

/// Token counts of a response at its first and latest report.
///
/// A report may cover several tokens, for example of one chunk. The time before the first token does not count.
///
/// ```
/// use std::time::Duration;
/// use pointsman::load::TokenPace;
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
    first: Option<TokenCount>,
    latest: TokenCount,
}

/// A number of tokens and the time of its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TokenCount {
    tokens: u64,
    at: Timestamp,
}

impl TokenPace {
    /// Records the first `tokens`, at least one. Only the first call has an effect.
    pub fn first_token(&mut self, tokens: u64, now: Timestamp) {
        if self.first.is_none() {
            self.latest = TokenCount { tokens: tokens.max(1), at: now };
            self.first = Some(self.latest);
        }
    }

    /// Records the number of tokens so far. Ignored before the first token, and unless the number has increased.
    pub fn reported(&mut self, tokens: u64, now: Timestamp) {
        if self.first.is_some() && tokens > self.latest.tokens {
            self.latest = TokenCount { tokens, at: now };
        }
    }

    /// Mean time between two tokens, and the number of intervals. `None` without any.
    #[must_use]
    pub fn mean(&self) -> Option<(Duration, u64)> {
        let first = self.first.filter(|first| self.latest.tokens > first.tokens)?;
        let intervals = self.latest.tokens - first.tokens;
        let seconds = self.latest.at.since(first.at).as_secs_f64() / intervals as f64;
        Some((Duration::from_secs_f64(seconds), intervals))
    }
}
