//! Bookings that nobody holds and that have fallen silent are ended.
//!
//! Owns the sweep. A placement that is held keeps its booking for as long as that takes, so long requests keep their load;
//! a booking by id lasts while something is heard of it. Promises that a booking whose embedder forgot it ends within
//! one and a quarter of `booking_liveness_ms` of its last sign of life.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::actors::shared::Shared;

/// How often the sweep looks, as a share of the time that a booking may be silent.
const LOOKS: u32 = 4;

/// Starts the sweep. It ends with the router.
pub(crate) fn watch(shared: &Arc<Shared>) {
    let liveness = Duration::from_millis(shared.config.booking_liveness_ms);
    tokio::spawn(sweep(Arc::downgrade(shared), liveness));
}

async fn sweep(shared: Weak<Shared>, liveness: Duration) {
    loop {
        tokio::time::sleep(liveness / LOOKS).await;
        let Some(shared) = shared.upgrade() else { return };
        for lease in shared.directory.silent(liveness, shared.clock.now()) {
            if !lease.is_silent(liveness, shared.clock.now()) {
                continue; // heard of since it was found
            }
            tracing::warn!(request_id = lease.request_id(), "booking expired: nothing was reported of it");
            shared.meters.expired.increment(1);
            shared.end(&lease);
        }
    }
}
