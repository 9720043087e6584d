//! Time of day, for dates that leave the process.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "dates are exchanged with other processes")]
pub(crate) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Milliseconds since the Unix epoch.
pub(crate) fn unix_ms() -> u64 {
    u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX)
}
