//! The last recorded decisions of one router.
//!
//! A read replays a part of the record, on a thread for blocking work. The interval of reads grows with their duration,
//! so that they take a small share of one core.

use std::collections::VecDeque;
use std::time::Duration;

use pointsman::{RecordedDecision, Router};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use crate::live::{DECISIONS_MAX, DecisionState};

/// Shortest interval of reads.
const INTERVAL_MIN: Duration = Duration::from_secs(1);

/// Interval of reads as a multiple of the duration of the last one.
const INTERVAL_FACTOR: u32 = 400;

/// Decisions with the times at which they were read.
#[derive(Default)]
pub(super) struct LastDecisions {
    /// The newest last.
    known: VecDeque<(Instant, RecordedDecision)>,
    next_read_at: Option<Instant>,
}

impl LastDecisions {
    /// Reads decisions since the last read, if it is time.
    pub(super) async fn refresh(&mut self, router: &Router) {
        let started = Instant::now();
        if self.next_read_at.is_some_and(|at| started < at) {
            return;
        }
        let (router, after) = (router.clone(), self.known.back().map(|(_, known)| known.number));
        let read = spawn_blocking(move || router.recorded_decisions(DECISIONS_MAX, after)).await;
        let now = Instant::now();
        self.next_read_at = Some(now + INTERVAL_MIN.max((now - started) * INTERVAL_FACTOR));
        // A failed read is repeated at the next time.
        self.known.extend(read.unwrap_or_default().into_iter().filter(|known| known.books).map(|known| (now, known)));
        let surplus = self.known.len().saturating_sub(DECISIONS_MAX);
        self.known.drain(..surplus);
    }

    /// The decisions, the newest first.
    pub(super) fn states(&self) -> Vec<DecisionState> {
        self.known.iter().rev().map(|(read_at, known)| state(*read_at, known)).collect()
    }
}

fn state(read_at: Instant, known: &RecordedDecision) -> DecisionState {
    DecisionState {
        number: known.number,
        // The bookings of a request have its id with a suffix.
        request_id: known.request_id.rsplit_once('/').map_or(known.request_id.as_str(), |(id, _)| id).to_owned(),
        age_seconds: known.age_seconds + read_at.elapsed().as_secs_f64(),
        prompt_tokens: known.prompt_tokens.into(),
        cached_tokens: known.cached_tokens.into(),
        chosen: known.chosen.map(|rank| rank.to_string()),
        rejection: known.rejection.clone(),
        runner_up: known.runner_up.map(|rank| rank.to_string()),
        margin: known.margin,
    }
}
