//! Drains and removals in progress.

use std::collections::BTreeSet;

use crate::protocol::{Generation, Slot, WorkerId};

/// Drain in progress.
#[derive(Debug)]
pub(super) struct PendingDrain<R> {
    pub(super) drain: u64,
    pub(super) worker: WorkerId,
    /// Ranks that may have bookings.
    pub(super) left: BTreeSet<(Slot, Generation)>,
    pub(super) origin: DrainOrigin<R>,
}

/// Initiator of a drain, which alone can end it.
#[derive(Debug)]
pub(super) enum DrainOrigin<R> {
    /// The embedder, which receives the result.
    Caller(R),
    /// The source of the worker.
    Source,
}

/// Removal that waits for retiring ranks.
#[derive(Debug)]
pub(super) struct PendingRemoval<R> {
    pub(super) left: BTreeSet<(Slot, Generation)>,
    pub(super) completion: Completion<R>,
}

/// Consequence of a completed removal.
#[derive(Debug)]
pub(super) enum Completion<R> {
    Reply {
        to: R,
        /// Bookings that a drain cut off.
        cut_off: usize,
    },
    /// The worker is no longer among those that leave a source.
    Departed { source: usize, worker: WorkerId },
}
