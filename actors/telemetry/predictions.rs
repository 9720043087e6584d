//! Comparison of predictions with reports of the embedder: cached tokens, time to first token, time between tokens.
//!
//! A pair of prediction and report that are both 0 is ignored. A pair *agrees* if both are above 0, and *contradicts*
//! if exactly one is. A prediction of 0 for a rank with an incomplete index is ignored too: after a restart the
//! engine's cache is warm long before its events are replayed. If [`NEVER_MATCHED_AFTER`] consecutive reports of one
//! kind of request contradict, this kind most likely never matches, because router and engine hash it differently. The
//! alarm then counts one, and again after each further series of that length.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use metrics::{Counter, Histogram};

use super::Pool;
use crate::names::named;

/// Consecutive contradictions that raise the alarm. A power of two, so that the counter may wrap.
pub(super) const NEVER_MATCHED_AFTER: u32 = 64;

named! {
    /// First applicable hash input of a request besides tokens.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum PromptKind {
        Lora = "lora",
        Salt = "salt",
        Images = "images",
        Plain = "plain",
    }
}

/// Prediction of a placement, compared with one report.
pub(crate) struct Prediction {
    /// Absent without an overlap query.
    pub(crate) kind: Option<PromptKind>,
    pub(crate) prompt_tokens: u32,
    /// Whether the index had all blocks of the rank at the placement.
    pub(crate) is_index_complete: bool,
    pub(crate) reported: AtomicBool,
}

impl Prediction {
    pub(crate) fn new(kind: Option<PromptKind>, prompt_tokens: u32, is_index_complete: bool) -> Self {
        Self { kind, prompt_tokens, is_index_complete, reported: AtomicBool::new(false) }
    }
}

/// Instruments of predictions.
pub(crate) struct PredictionMeters {
    predicted: Counter,
    delivered: Counter,
    over: Histogram,
    under: Histogram,
    exact: Histogram,
    /// Error of the expected time to first token, for tokens that arrived earlier or later.
    early: Histogram,
    late: Histogram,
    /// Observed times as multiples of the predicted ones.
    ttft_ratio: Histogram,
    itl_ratio: Histogram,
    /// By kind.
    streaks: [Streak; 4],
}

struct Streak {
    contradictions: AtomicU32,
    alarms: Counter,
}

impl PredictionMeters {
    pub(super) fn new(pool: &Pool) -> Self {
        let tokens = |side| pool.counter("pointsman_prediction_tokens_total", &[("side", side)]);
        let error = |result| pool.histogram("pointsman_prediction_error_tokens", &[("result", result)]);
        let ttft = |result| pool.histogram("pointsman_predicted_ttft_error_seconds", &[("result", result)]);
        let ratio = |target| pool.histogram("pointsman_prediction_ratio", &[("target", target)]);
        let streak = |kind: PromptKind| Streak {
            contradictions: AtomicU32::new(0),
            alarms: pool.counter("pointsman_never_matched_total", &[("kind", kind.name())]),
        };
        Self {
            predicted: tokens("predicted"),
            delivered: tokens("delivered"),
            over: error("over"),
            under: error("under"),
            exact: error("exact"),
            early: ttft("early"),
            late: ttft("late"),
            ttft_ratio: ratio("ttft"),
            itl_ratio: ratio("itl"),
            streaks: PromptKind::ALL.map(streak),
        }
    }

    pub(super) fn count(&self, kind: PromptKind, is_index_complete: bool, predicted: u32, delivered: u32) {
        self.predicted.increment(u64::from(predicted));
        self.delivered.increment(u64::from(delivered));
        let error = match predicted.cmp(&delivered) {
            std::cmp::Ordering::Greater => &self.over,
            std::cmp::Ordering::Less => &self.under,
            std::cmp::Ordering::Equal => &self.exact,
        };
        error.record(f64::from(predicted.abs_diff(delivered)));
        let streak = &self.streaks[kind as usize];
        let says_nothing = predicted == 0 && !is_index_complete;
        if !says_nothing && streak.is_alarming(predicted, delivered) {
            streak.alarms.increment(1);
            tracing::warn!(
                kind = kind.name(),
                reports = NEVER_MATCHED_AFTER,
                "predicted and delivered cached tokens of this kind of request never agree: router and engine may hash them differently"
            );
        }
    }
}

impl PredictionMeters {
    /// Records a first token that arrived after `elapsed`.
    pub(crate) fn first_token(&self, predicted: Duration, elapsed: Duration) {
        let result = if elapsed > predicted { &self.late } else { &self.early };
        result.record(elapsed.abs_diff(predicted).as_secs_f64());
        record_ratio(&self.ttft_ratio, predicted, elapsed);
    }

    /// Records the mean time between the tokens of a response.
    pub(crate) fn itl_ratio(&self, predicted: Duration, observed: Duration) {
        record_ratio(&self.itl_ratio, predicted, observed);
    }

    /// Kinds of requests without a matching report for a long time.
    pub(super) fn never_matching(&self) -> impl Iterator<Item = PromptKind> {
        let alarming = |kind: &PromptKind| {
            self.streaks[*kind as usize].contradictions.load(Ordering::Relaxed) >= NEVER_MATCHED_AFTER
        };
        PromptKind::ALL.into_iter().filter(alarming)
    }
}

fn record_ratio(histogram: &Histogram, predicted: Duration, observed: Duration) {
    if !predicted.is_zero() {
        histogram.record(observed.as_secs_f64() / predicted.as_secs_f64());
    }
}

impl Streak {
    fn is_alarming(&self, predicted: u32, delivered: u32) -> bool {
        match (predicted > 0, delivered > 0) {
            (false, false) => false,
            (true, true) => {
                self.contradictions.store(0, Ordering::Relaxed);
                false
            }
            (true, false) | (false, true) => {
                let so_far = self.contradictions.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
                so_far.is_multiple_of(NEVER_MATCHED_AFTER)
            }
        }
    }
}
