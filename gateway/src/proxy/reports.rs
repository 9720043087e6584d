//! Reports of failed attempts to the router, once the end of their request is known.

use pointsman::protocol::WorkerRank;
use pointsman::{AnswerKind, Outcome, Placement};

use super::failure::{Ending, FailedAttempt, Failure, Failures, counted_failure};
use crate::pools::model::Model;
use crate::pools::workers::WorkerRequest;

/// All ranks of the worker of a rank.
pub(super) fn siblings(model: &Model, rank: WorkerRank) -> impl Iterator<Item = WorkerRank> + use<> {
    let workers = model.router.workers();
    let entry = workers.iter().find(|entry| entry.worker == rank.worker).cloned();
    entry.into_iter().flat_map(|entry| entry.ranks)
}

/// Outcomes of failed attempts, reported at the end of their request. A drop before means a client disconnect: they
/// count as if no worker had responded.
pub(super) struct Reports<'a> {
    model: &'a Model,
    /// Kind of a valid response.
    kind: AnswerKind,
    failed_attempts: Vec<FailedAttempt>,
    /// Responses so far, for the client.
    pub(super) failures: Failures,
    /// Whether the request already counts against a failed worker.
    pub(super) has_counted: bool,
}

impl<'a> Reports<'a> {
    pub(super) fn new(model: &'a Model, kind: AnswerKind) -> Self {
        Self { model, kind, failed_attempts: Vec::new(), failures: Failures::default(), has_counted: false }
    }

    pub(super) fn add(&mut self, placement: &Placement, failure: Failure, mut sent: WorkerRequest) {
        let (rank, outcome) = (placement.rank(), failure.outcome());
        // A long complete response may be late on a rank that serves other requests.
        let is_long_answer = outcome == Outcome::Timeout && self.kind == AnswerKind::Json && sent.has_rank_sent();
        let sent = if outcome == Outcome::Misconfigured {
            Some(sent)
        } else {
            sent.ended(outcome.label());
            None
        };
        let is_local = failure.is_local();
        self.failures.add(failure);
        if is_local {
            return;
        }
        if outcome == Outcome::ConnectFailed {
            // A fact about the endpoint, and so about all its ranks.
            placement.outcome(outcome);
            self.report_siblings(rank, outcome);
        } else if !is_long_answer {
            let unsettled = Some(self.model.workers.failed(rank));
            self.failed_attempts.push(FailedAttempt { rank, outcome, sent, unsettled });
        }
    }

    /// Reports the outcomes that count. Returns whether any does.
    pub(super) fn settle(&mut self, ending: Ending) -> bool {
        let counted_failure = counted_failure(&self.failed_attempts, ending);
        let outcome = if ending == Ending::Served { Outcome::Misconfigured.label() } else { "client_error" };
        for sent in self.failed_attempts.drain(..).filter_map(|attempt| attempt.sent) {
            { sent }.ended(outcome);
        }
        if self.has_counted {
            return true;
        }
        let Some((rank, outcome)) = counted_failure else { return false };
        self.model.router.report_outcome(rank, outcome);
        if outcome == Outcome::Misconfigured {
            // Key and model belong to the engine, and so to all its ranks.
            self.report_siblings(rank, outcome);
        }
        true
    }

    fn report_siblings(&self, rank: WorkerRank, outcome: Outcome) {
        for sibling in siblings(self.model, rank).filter(|sibling| *sibling != rank) {
            self.model.router.report_outcome(sibling, outcome);
        }
    }
}

impl Drop for Reports<'_> {
    fn drop(&mut self) {
        self.settle(Ending::Failed);
    }
}
