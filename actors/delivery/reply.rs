//! The reply to a request, sent by the scheduler or, for a booking, by the rank's sequence actor.

use crate::schedule::{Decision, Explanation, PotentialLoad, Rejection};

/// Reply to one request.
pub(crate) enum Reply {
    Placed(Decision),
    LoadSnapshot(Vec<PotentialLoad>),
    Explained(Box<Explanation>),
    Rejected(Rejection),
}
