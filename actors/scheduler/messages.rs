//! Messages to the scheduler.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::context::RequestContext;
use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::strand::Strand;
use crate::actors::sequence::Sequence;
use crate::protocol::{BookingId, Generation, Slot, Timestamp};
use crate::queue::Depth;
use crate::schedule::{Admission, LoadAnswer, RankCells, Request};
use crate::select::{RankOverlap, RankTraits};

/// Messages to the scheduler.
pub(crate) enum SchedulerMsg {
    /// A request that needs a decision.
    Decide(Request<RequestContext>),
    /// Responses to a load query.
    Loads { batch: u64, answers: Vec<LoadAnswer> },
    /// The timer of load queries has fired.
    Timeout,
    /// The caller of a waiting request has cancelled it.
    Cancel(BookingId),
    /// Result of a repeated overlap query for a waiting request.
    Refreshed { booking: BookingId, overlaps: Vec<RankOverlap> },
    /// The load of a rank has fallen, or the timer for `at` has fired: re-evaluate waiting requests.
    Wake { at: Option<Timestamp> },
    /// Add a rank.
    Admit(SequenceHandle),
    /// Update the traits of a rank from its worker's configuration.
    Describe { slot: Slot, generation: Generation, traits: Arc<RankTraits> },
    /// Stop new work for a rank, and send `Drain` to its sequence actor after the last Book.
    Drain { slot: Slot, generation: Generation, ack: Acknowledgement },
    /// Stop or resume new work for a rank. Its bookings stay.
    Cordon { slot: Slot, generation: Generation, cordoned: bool },
    /// Remove a rank: book nothing more on it, and send `Retire` to its sequence actor after the last Book.
    Retire { slot: Slot, generation: Generation, ack: Acknowledgement },
    /// The embedder's rank conditions have changed. The reply confirms that they apply from here on.
    Conditions { done: Option<oneshot::Sender<()>> },
    /// The ranks excluded for their health have changed.
    Exclusions,
}

/// Waiting requests of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingClass {
    /// Name of the class.
    pub class: String,
    /// Number of requests and their tokens.
    pub depth: Depth,
    /// Time since the arrival of the oldest request.
    pub oldest_age: Option<Duration>,
}

/// A rank's sequence actor, with the data to register the rank in the schedule.
pub(crate) struct SequenceHandle {
    pub(crate) admission: Admission,
    pub(crate) cells: RankCells,
    pub(crate) strand: Arc<Strand<Sequence>>,
}
