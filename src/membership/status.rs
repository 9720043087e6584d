//! State of one discovery source.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::{Timestamp, WorkerId};

/// State of one discovery source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryStatus {
    /// Name of the source.
    pub source: String,
    /// Workers in its last valid set, usable or not, without those that it drains.
    pub workers: usize,
    /// Last error; absent after a valid set.
    pub last_error: Option<String>,
    /// Time of the first error after the last valid set, by the clock of the router; absent without `last_error`.
    pub failing_since: Option<Timestamp>,
    /// Whether the source has closed.
    pub closed: bool,
    /// Named workers that break a rule, with the endpoint and the reason.
    pub refused: BTreeMap<WorkerId, String>,
    /// Workers that the source no longer names and whose last bookings have not ended. A worker that is neither here nor
    /// registered is never chosen again.
    pub leaving: BTreeSet<WorkerId>,
    /// Named workers that stay away because they were drained or removed by the embedder, with their endpoints. An
    /// undrain lets them join again.
    pub removed: BTreeMap<WorkerId, String>,
}

impl DiscoveryStatus {
    /// Age of the last valid set: the time since the first error after it, zero without an error. `now` is
    /// `Router::now`.
    #[must_use]
    pub fn stale_for(&self, now: Timestamp) -> Duration {
        self.failing_since.map_or(Duration::ZERO, |since| now.since(since))
    }
}
