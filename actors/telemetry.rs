//! The instruments: every metric that the router emits, held as handles so that no message looks one up.

use super::radix::SharedFound;

/// The instruments of the edge, where callers come in.
pub(crate) struct Meters {
    pub(crate) shared_cache: std::sync::Arc<SharedCacheMeters>,
    /// Bookings ended because nothing was heard of them.
    pub(crate) expired: metrics::Counter,
    /// Events that came where none are used.
    pub(crate) unused_events: metrics::Counter,
}

impl Meters {
    pub(crate) fn new() -> Self {
        Self {
            shared_cache: std::sync::Arc::new(SharedCacheMeters::new()),
            expired: metrics::counter!("pointsman_bookings_expired_total"),
            unused_events: metrics::counter!("pointsman_kv_events_refused_total", "reason" => "not_used"),
        }
    }
}

/// What became of questions to the shared cache.
pub(crate) struct SharedCacheMeters {
    errors: metrics::Counter,
}

impl SharedCacheMeters {
    fn new() -> Self {
        Self { errors: metrics::counter!("pointsman_shared_cache_errors_total") }
    }

    pub(crate) fn count(&self, found: &SharedFound) {
        if found.is_err() {
            self.errors.increment(1);
        }
    }
}
