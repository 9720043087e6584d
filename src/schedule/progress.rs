//! Progress of a step.

use crate::protocol::WorkerRank;

/// What a step has done last.
#[derive(Clone, Copy, Debug)]
pub(super) enum Progress {
    /// The loads are those of the next batch.
    Prepared,
    /// The requests of a batch are known, and the ranks to query for it.
    Listed,
    /// One request of the batch has been decided.
    Decided {
        verdict: Verdict,
        /// Its session, if that has changed since the batch was listed.
        session: Option<Option<WorkerRank>>,
        /// Whether the batch has ended.
        is_last: bool,
    },
}

/// How a request has left its batch, with its number in records.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Verdict {
    /// It left without an evaluation.
    Passed = 1,
    /// A query without a choice, which updates the loads of all ranks to the time of the batch.
    Aged = 2,
    Placed = 3,
    Rejected = 4,
    /// It returns to the head of the queue.
    Again = 5,
    /// It returns to the queue, because all ranks are busy.
    Waits = 6,
}
