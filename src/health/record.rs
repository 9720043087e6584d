//! Health records per rank and per worker: failures, ejection periods, refusals, probes.
//!
//! Counters and their arithmetic; `monitor` derives the ranks out of service.

use std::time::Duration;

use super::{EJECTION_MAX, Outcome, REFUSAL_BACKOFF, REFUSAL_BACKOFF_MAX, RETRY_AFTER_MAX, STALL_BACKOFFS};
use crate::protocol::Timestamp;

/// Facts about a rank that the monitor requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// A changed number means another engine without history.
    pub incarnation: u64,
    /// Whether the rank could serve apart from its health: not drained, and not excluded by other conditions.
    pub available: bool,
    /// Whether its engine sleeps.
    pub asleep: bool,
}

/// Results of the requests on one rank.
#[derive(Debug)]
pub(super) struct RankRecord {
    pub(super) member: Member,
    /// Consecutive failed requests.
    pub(super) failures: u32,
    pub(super) last_failure: Outcome,
    /// End of the ejection period from failed requests. The ejection limits decide whether it takes effect.
    pub(super) sentence: Option<Timestamp>,
    /// Whether failed connections caused it.
    pub(super) is_unreachable: bool,
    /// Number of ejection periods, reduced by one for each period length spent without a new one.
    pub(super) sentences: u32,
    /// End of the last period.
    pub(super) free_since: Timestamp,
    /// Time since which the rank should be ejected on suspicion.
    pub(super) wanted_since: Option<Timestamp>,
    /// Time since which the rank is unreachable.
    pub(super) down_since: Option<Timestamp>,
    pub(super) refusals: Refusals,
}

/// Consecutive refused requests and the resulting back-off.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Refusals {
    /// Consecutive back-offs without an accepted request in between.
    pub(super) in_a_row: u32,
    /// Start of the first of them.
    since: Timestamp,
    /// End of the current back-off.
    pub(super) until: Option<Timestamp>,
    /// Whether the engine requested that end with `Retry-After`.
    is_requested: bool,
    /// Whether a stall was the cause.
    pub(super) is_stall: bool,
}

impl Refusals {
    /// Counts a refusal. Returns whether it starts a new back-off; during a back-off it can only extend the end by
    /// `Retry-After`.
    fn add(&mut self, retry_after: Option<Duration>, now: Timestamp) -> bool {
        let requested = retry_after.map(|after| after.min(RETRY_AFTER_MAX));
        if let Some(until) = self.until.filter(|until| *until > now) {
            if let Some(requested) = requested.map(|after| now + after).filter(|end| *end > until) {
                (self.until, self.is_requested) = (Some(requested), true);
            }
            return false;
        }
        if self.in_a_row == 0 {
            self.since = now;
        }
        self.is_stall = false;
        let doubled = REFUSAL_BACKOFF.saturating_mul(1 << self.in_a_row.min(16)).min(REFUSAL_BACKOFF_MAX);
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.is_requested = requested.is_some_and(|after| after >= doubled);
        self.until = Some(now + requested.unwrap_or_default().max(doubled));
        true
    }

    /// Counts a stall. Returns whether it starts a new back-off. Before the first refusal, stalls have longer ones.
    pub(super) fn stalled(&mut self, now: Timestamp) -> bool {
        let before = *self;
        if self.in_a_row == 0 {
            (self.in_a_row, self.since) = (STALL_BACKOFFS, now);
        }
        if self.add(None, now) {
            self.is_stall = true;
            return true;
        }
        *self = before;
        false
    }

    /// Ends the back-off of a stall: the rank has made progress.
    pub(super) fn progressed(&mut self) -> bool {
        self.is_stall && self.until.is_some() && self.accepted(None)
    }

    /// Counts an answered request sent at `began`. A request sent after the first refusal ends the sequence, and a
    /// back-off that the engine did not request. Returns whether a back-off has ended.
    fn accepted(&mut self, began: Option<Timestamp>) -> bool {
        if self.in_a_row == 0 || began.is_some_and(|began| began < self.since) {
            return false;
        }
        self.in_a_row = 0;
        !self.is_requested && self.until.take().is_some()
    }
}

impl RankRecord {
    /// Whether it could serve apart from failures.
    pub(super) fn could_serve(&self) -> bool {
        self.member.available && !self.member.asleep
    }

    pub(super) fn new(member: Member, now: Timestamp) -> Self {
        Self {
            member,
            failures: 0,
            last_failure: Outcome::Ok,
            sentence: None,
            is_unreachable: false,
            sentences: 0,
            free_since: now,
            wanted_since: None,
            down_since: None,
            refusals: Refusals::default(),
        }
    }

    /// Whether failed connections caused the current ejection period.
    pub(super) fn is_unreachable(&self) -> bool {
        self.sentence.is_some() && self.is_unreachable
    }

    /// Whether any failure is counted.
    pub(super) fn has_failures(&self) -> bool {
        let Refusals { in_a_row, until, .. } = self.refusals;
        self.failures > 0 || in_a_row > 0 || until.is_some() || self.down_since.is_some()
    }

    /// Counts an answered request. Returns whether an ejection period or a back-off has ended.
    pub(super) fn succeeded(&mut self, began: Option<Timestamp>, now: Timestamp) -> bool {
        let accepts = self.refusals.accepted(began);
        self.failures = 0;
        self.lift_sentence(now) || accepts
    }

    /// Ends an ejection period early.
    pub(super) fn lift_sentence(&mut self, now: Timestamp) -> bool {
        let had_one = self.sentence.take().is_some();
        if had_one {
            (self.failures, self.is_unreachable) = (0, false);
            self.sentences = self.sentences.saturating_sub(1);
            self.free_since = now;
        }
        had_one
    }

    /// Counts a failed request. A refusal counts as a failure only if it starts a back-off and `others_accept`: an
    /// entirely full fleet is not broken. Returns whether a back-off was started or extended.
    pub(super) fn failed(
        &mut self,
        outcome: Outcome,
        began: Option<Timestamp>,
        others_accept: bool,
        now: Timestamp,
    ) -> bool {
        // A suspected rank that the limits keep in service also backs off, except after timeouts.
        let is_suspected = self.sentence.is_some() && outcome != Outcome::Timeout;
        let (before, mut counts) = (self.refusals.until, true);
        match outcome {
            Outcome::Refused { retry_after } => counts = self.refusals.add(retry_after, now) && others_accept,
            Outcome::Misconfigured | Outcome::InvalidAnswer => {
                self.refusals.add(None, now);
            }
            Outcome::ConnectFailed | Outcome::ServerError | Outcome::Reset if is_suspected => {
                self.refusals.add(None, now);
            }
            Outcome::Ok | Outcome::ConnectFailed | Outcome::Timeout | Outcome::ServerError | Outcome::Reset => {}
        }
        if counts {
            self.failures = self.failures.saturating_add(1);
            self.last_failure = outcome;
        }
        if outcome == Outcome::ConnectFailed {
            self.is_unreachable |= self.sentence.is_some();
        } else if began.zip(self.down_since).is_some_and(|(began, down_since)| began >= down_since) {
            self.is_unreachable = false; // another type of failure implies a successful connection
        }
        self.refusals.until != before
    }

    /// Ends expired states.
    pub(super) fn expire(&mut self, now: Timestamp) {
        if self.sentence.is_some_and(|until| until <= now) {
            (self.sentence, self.is_unreachable, self.failures, self.free_since) = (None, false, 0, now);
        }
        self.refusals.until = self.refusals.until.filter(|until| *until > now);
    }

    pub(super) fn pass_sentence(&mut self, ejection: Duration, now: Timestamp) {
        let forgiven = now.since(self.free_since).as_nanos() / ejection.as_nanos().max(1);
        self.sentences = self.sentences.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX)).saturating_add(1);
        self.sentence = Some(now + ejection.saturating_mul(self.sentences).min(EJECTION_MAX));
        self.is_unreachable = self.last_failure == Outcome::ConnectFailed;
    }
}

/// Results of the probes of one worker's engine.
#[derive(Debug)]
pub(super) struct ProbeRecord {
    pub(super) prober: u64,
    pub(super) heard_at: Timestamp,
    pub(super) failures: u32,
    pub(super) successes: u32,
    /// Whether enough consecutive probes failed without enough successes since.
    pub(super) down: bool,
    /// Requests were answered while probes failed: failed probes are ignored until one succeeds or a request fails.
    pub(super) contradicted: bool,
    pub(super) why: String,
}

impl ProbeRecord {
    pub(super) fn new(prober: u64, now: Timestamp) -> Self {
        let (failures, successes, down, contradicted) = (0, 0, false, false);
        Self { prober, heard_at: now, failures, successes, down, contradicted, why: String::new() }
    }

    /// Records a request answered by an engine whose probes fail.
    pub(super) fn contradict(&mut self) {
        (self.down, self.failures, self.contradicted) = (false, 0, true);
    }
}
