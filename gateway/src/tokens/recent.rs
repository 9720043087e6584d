//! Share of the prompts without tokens in the last minute.
//!
//! Such prompts are routed by load alone, which costs cache hits without any error. The share is shown to operators, and
//! logged at most every five minutes.

use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::reason::NoTokens;
use crate::observe::throttle::LogThrottle;
use crate::observe::window::Window;

/// Length of a slot.
const SLOT: Duration = Duration::from_secs(10);

/// Slots of the window.
const SLOTS: u64 = 6;

/// Prompts without tokens per hundred that are a problem.
const PERCENT_MIN: u64 = 1;

/// Prompts that make such a share meaningful. Of fewer, half must be without tokens.
const PROMPTS_MIN: u64 = 100;

/// Interval of log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(300);

/// Prompts of the last minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentPrompts {
    /// Number of prompts.
    pub prompts: u64,
    /// Prompts without tokens among them.
    pub missing: u64,
    /// Reason of the last one: a label of `pointsman_gateway_tokens_total`.
    pub reason: Option<&'static str>,
    remedy: Option<&'static str>,
}

impl RecentPrompts {
    /// Whether so many prompts have no tokens that an operator should act.
    pub fn is_problem(&self) -> bool {
        let is_enough = self.prompts >= PROMPTS_MIN || self.missing * 2 >= self.prompts;
        self.missing > 0 && is_enough && self.missing * 100 >= self.prompts * PERCENT_MIN
    }
}

/// The problem in one sentence.
impl fmt::Display for RecentPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prompts, missing, reason, remedy } = self;
        write!(f, "{missing} of the last {prompts} prompts were routed by load only, without tokens")?;
        if let Some(reason) = reason {
            write!(f, " ({reason})")?;
        }
        remedy.map_or(Ok(()), |remedy| write!(f, ": {remedy}"))
    }
}

/// Counts the prompts of the last minute.
pub(super) struct RecentCounts {
    model: String,
    counts: Mutex<Counts>,
    logged: LogThrottle,
}

struct Counts {
    /// Prompts, and those without tokens.
    window: Window<(u64, u64)>,
    last: Option<NoTokens>,
}

impl RecentCounts {
    pub(super) fn new(model: &str) -> Self {
        let counts = Counts { window: Window::new(Instant::now(), SLOT, SLOTS), last: None };
        Self { model: model.to_owned(), counts: Mutex::new(counts), logged: LogThrottle::new(LOG_INTERVAL) }
    }

    /// Counts a prompt with tokens.
    pub(super) fn with_tokens(&self) {
        self.add(None, Instant::now());
    }

    /// Counts a prompt without tokens. Logs if these are many.
    pub(super) fn without_tokens(&self, reason: NoTokens) {
        let now = Instant::now();
        self.add(Some(reason), now);
        let recent = self.recent(now);
        if recent.is_problem() && self.logged.next_line(now).is_some() {
            tracing::warn!(model = self.model, reason = reason.name, "{recent}");
        }
    }

    pub(super) fn recent(&self, now: Instant) -> RecentPrompts {
        let counts = self.counts.lock();
        let recent = counts.window.recent(now);
        let (prompts, missing) = recent.fold((0, 0), |sum, (_, slot)| (sum.0 + slot.0, sum.1 + slot.1));
        let last = counts.last.filter(|_| missing > 0);
        RecentPrompts {
            prompts,
            missing,
            reason: last.map(|reason| reason.name),
            remedy: last.and_then(|reason| reason.remedy),
        }
    }

    fn add(&self, reason: Option<NoTokens>, now: Instant) {
        let mut counts = self.counts.lock();
        let (prompts, missing) = counts.window.at(now);
        *prompts += 1;
        *missing += u64::from(reason.is_some());
        counts.last = reason.or(counts.last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recent(counts: &RecentCounts, prompts: u64, missing: u64) -> RecentPrompts {
        let now = Instant::now();
        for n in 0..prompts {
            counts.add((n < missing).then_some(NoTokens::ENGINE_FAILED), now);
        }
        counts.recent(now)
    }

    #[tokio::test(start_paused = true)]
    async fn one_percent_of_many_prompts_is_a_problem_for_a_minute() {
        let cases = [(1, 0, false), (1, 1, true), (3, 1, false), (3, 2, true), (99, 1, false), (100, 1, true)];
        for (prompts, missing, is_problem) in cases.into_iter().chain([(1_000, 9, false), (1_000, 10, true)]) {
            let recent = recent(&RecentCounts::new("m"), prompts, missing);
            assert_eq!(recent.is_problem(), is_problem, "{recent}");
        }
        let counts = RecentCounts::new("m");
        let first = recent(&counts, 50, 5);
        assert_eq!((first.prompts, first.missing, first.reason), (50, 5, Some("engine_failed")));
        tokio::time::advance(Duration::from_secs(45)).await;
        assert_eq!(recent(&counts, 50, 1).missing, 6);
        tokio::time::advance(Duration::from_secs(30)).await;
        let last = counts.recent(Instant::now());
        assert_eq!((last.prompts, last.missing), (50, 1));
        let text = "1 of the last 50 prompts were routed by load only, without tokens (engine_failed): set \
                    tokens.tokenizer_file (--tokenizer), or raise tokens.engine_timeout_ms";
        assert_eq!(last.to_string(), text);
        tokio::time::advance(Duration::from_secs(60)).await;
        let none = counts.recent(Instant::now());
        assert_eq!((none.prompts, none.missing, none.reason), (0, 0, None));
    }
}
