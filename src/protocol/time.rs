//! Monotonic time as a plain number, so that code in `src/` reads no clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Nanoseconds since an epoch chosen by the owner of the clock (the router's start). Monotonic.
///
/// ```
/// use std::time::Duration;
/// use pointsman::protocol::Timestamp;
///
/// let start = Timestamp::default();
/// let later = start + Duration::from_millis(3);
/// assert_eq!(later.since(start), Duration::from_millis(3));
/// assert_eq!(start.since(later), Duration::ZERO); // never negative
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Time since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Sub<Duration> for Timestamp {
    type Output = Self;

    /// Saturates at the epoch.
    fn sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl std::ops::Add<Duration> for Timestamp {
    type Output = Self;

    /// Saturates at the maximum, about 584 years after the epoch.
    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)))
    }
}
