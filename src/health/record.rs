//! Per-rank and per-worker records: failures, sentences, refusals, probes.
//!
//! Owns the counters and their arithmetic. Leaves to `monitor` which ranks are out of service because of them.

use std::time::Duration;

use super::{EJECTION_MAX, Member, Outcome, REFUSAL_BACKOFF, REFUSAL_BACKOFF_MAX, RETRY_AFTER_MAX};
use crate::protocol::Timestamp;

/// What requests on one rank have shown.
#[derive(Debug)]
pub(super) struct RankRecord {
    pub(super) member: Member,
    /// Failed requests in a row.
    pub(super) failures: u32,
    pub(super) last_failure: Outcome,
    /// Its failed requests want it out until then. Whether it is, is for the floor to say.
    pub(super) sentence: Option<Timestamp>,
    /// Whether that is because connections could not be made.
    pub(super) is_unreachable: bool,
    /// Sentences so far; one fewer for each time that it could have served one more and was not sentenced.
    pub(super) sentences: u32,
    /// When the last one was over.
    pub(super) free_since: Timestamp,
    /// Since when it should be ejected on suspicion.
    pub(super) wanted_since: Option<Timestamp>,
    /// Since when it cannot be reached.
    pub(super) down_since: Option<Timestamp>,
    pub(super) refusals: Refusals,
}

/// Refused requests in a row, and the back-off that follows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Refusals {
    /// Back-offs in a row without an accepted request between.
    pub(super) in_a_row: u32,
    /// When the first of them began.
    since: Timestamp,
    /// The end of the running back-off.
    pub(super) until: Option<Timestamp>,
    /// Whether the engine requested that end with `Retry-After`.
    is_requested: bool,
}

impl Refusals {
    /// Counts a refusal. Returns whether it begins a new back-off; within a running one it only extends a `Retry-After`.
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
        let doubled = REFUSAL_BACKOFF.saturating_mul(1 << self.in_a_row.min(16)).min(REFUSAL_BACKOFF_MAX);
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.is_requested = requested.is_some_and(|after| after >= doubled);
        self.until = Some(now + requested.unwrap_or_default().max(doubled));
        true
    }

    /// Counts an answered request that was sent at `began`. One that was sent after the first refusal ends the row, and
    /// with it a back-off that the engine did not request. Returns whether a back-off has ended.
    fn accepted(&mut self, began: Option<Timestamp>) -> bool {
        if self.in_a_row == 0 || began.is_some_and(|began| began < self.since) {
            return false;
        }
        self.in_a_row = 0;
        !self.is_requested && self.until.take().is_some()
    }
}

impl RankRecord {
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

    /// Whether its sentence is for connections that could not be made.
    pub(super) fn is_unreachable(&self) -> bool {
        self.sentence.is_some() && self.is_unreachable
    }

    /// Whether anything is counted against it.
    pub(super) fn has_failures(&self) -> bool {
        let Refusals { in_a_row, until, .. } = self.refusals;
        self.failures > 0 || in_a_row > 0 || until.is_some() || self.down_since.is_some()
    }

    /// Counts a request that was answered. Returns whether its sentence or its back-off has ended.
    pub(super) fn succeeded(&mut self, began: Option<Timestamp>, now: Timestamp) -> bool {
        let accepts = self.refusals.accepted(began);
        self.failures = 0;
        self.lift_sentence(now) || accepts
    }

    /// Ends a sentence before its time.
    pub(super) fn lift_sentence(&mut self, now: Timestamp) -> bool {
        let had_one = self.sentence.take().is_some();
        if had_one {
            (self.failures, self.is_unreachable) = (0, false);
            self.sentences = self.sentences.saturating_sub(1);
            self.free_since = now;
        }
        had_one
    }

    /// Counts a request that failed. A refusal counts as a failure if it begins a back-off and `others_accept`: a fleet
    /// that is full as a whole is not broken. Returns whether a back-off has begun or been extended.
    pub(super) fn failed(
        &mut self,
        outcome: Outcome,
        began: Option<Timestamp>,
        others_accept: bool,
        now: Timestamp,
    ) -> bool {
        // A rank that should be ejected and may not is held back in the same way, unless it was only slow.
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
            self.is_unreachable = false; // it failed in another way, so a connection was made
        }
        self.refusals.until != before
    }

    /// Ends what is over.
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

/// What probes of one worker's engine have shown.
#[derive(Debug)]
pub(super) struct ProbeRecord {
    pub(super) prober: u64,
    pub(super) heard_at: Timestamp,
    pub(super) failures: u32,
    pub(super) successes: u32,
    /// Enough probes in a row have failed, and not enough have succeeded since.
    pub(super) down: bool,
    /// Requests were answered though probes failed: failed probes count for nothing until one succeeds or a request fails.
    pub(super) contradicted: bool,
    pub(super) why: String,
}

impl ProbeRecord {
    pub(super) fn new(prober: u64, now: Timestamp) -> Self {
        let (failures, successes, down, contradicted) = (0, 0, false, false);
        Self { prober, heard_at: now, failures, successes, down, contradicted, why: String::new() }
    }

    /// A request was answered by an engine whose probes fail.
    pub(super) fn contradict(&mut self) {
        (self.down, self.failures, self.contradicted) = (false, 0, true);
    }
}
