//! Monotonic time as a plain number, so that code in `src/` reads no clock of its own.

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

/// Source of the present time: a clock, or the instant of a whole step.
pub trait TimeSource {
    /// The present time.
    fn now(&self) -> Timestamp;
}

impl TimeSource for Timestamp {
    fn now(&self) -> Timestamp {
        *self
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

/// Serialization of durations as seconds with a fraction, for fields with the suffix `_seconds`.
pub(crate) mod seconds {
    use std::time::Duration;

    use serde::{Serialize as _, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        duration.as_secs_f64().serialize(serializer)
    }
}

/// As [`seconds`], for optional durations.
pub(crate) mod option_seconds {
    use std::time::Duration;

    use serde::de::{Error as _, Unexpected};
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::ref_option, reason = "the signature that serde expects")]
    pub(crate) fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        duration.map(|duration| duration.as_secs_f64()).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        let Some(seconds) = Option::<f64>::deserialize(deserializer)? else { return Ok(None) };
        let invalid = |_| D::Error::invalid_value(Unexpected::Float(seconds), &"a number of seconds, 0 or above");
        Duration::try_from_secs_f64(seconds).map(Some).map_err(invalid)
    }
}

/// Serialization of points in time as seconds since the epoch of the clock.
pub(crate) mod timestamp_seconds {
    use serde::{Serialize as _, Serializer};

    use super::Timestamp;

    pub(crate) fn serialize<S: Serializer>(at: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        at.since(Timestamp::default()).as_secs_f64().serialize(serializer)
    }
}

/// As [`timestamp_seconds`], for optional points in time.
pub(crate) mod option_timestamp_seconds {
    use serde::{Serialize as _, Serializer};

    use super::Timestamp;

    #[expect(clippy::ref_option, reason = "the signature that serde expects")]
    pub(crate) fn serialize<S: Serializer>(at: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
        at.map(|at| at.since(Timestamp::default()).as_secs_f64()).serialize(serializer)
    }
}
