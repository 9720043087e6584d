//! Engine-reported load: running and waiting requests and KV cache usage as reported by engines.
//!
//! Parses a Prometheus page ([`read_page`]) or a message of SGLang's load socket ([`read_stat`]), and holds the last
//! report of a rank in a cell ([`EngineLoadCell`]). Input is untrusted: each invalid value is omitted individually.
//! Missing or stale values are treated as unknown, neither as idle nor as busy. The engine-load actor polls the
//! engines; `schedule` uses the values.

mod cell;
mod message;
mod page;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::Serialize;

pub use cell::EngineLoadCell;
pub use message::{MESSAGE_BYTES_MAX, MessageError, read_stat};
pub use page::{PAGE_BYTES_MAX, Page, PageSeries, read_page, series};

use crate::protocol::Timestamp;

/// Reported load of one rank; `None` means unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineReading {
    /// Running requests.
    pub running: Option<u32>,
    /// Requests in the engine's queue.
    pub waiting: Option<u32>,
    /// Used share of the KV cache, in [0, 1].
    pub kv_usage: Option<f64>,
    /// Sleep of the engine.
    pub sleep: Option<EngineSleep>,
}

/// Sleep of an engine, which then computes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EngineSleep {
    /// It computes.
    Awake,
    /// It is paused, and keeps its cache.
    Paused,
    /// It has also discarded its cache.
    Emptied,
}

impl EngineReading {
    /// Whether all values are unknown.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Maximum of two reports of the same rank. Engines that run a rank as several processes report the same requests
    /// for each; a sum would count them repeatedly.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let kv_usage = match (self.kv_usage, other.kv_usage) {
            (Some(one), Some(another)) => Some(one.max(another)),
            (one, another) => one.or(another),
        };
        let (running, waiting) = (self.running.max(other.running), self.waiting.max(other.waiting));
        Self { running, waiting, kv_usage, sleep: self.sleep.max(other.sleep) }
    }
}

/// A reading with its time of arrival.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoad {
    /// The reported values.
    pub reading: EngineReading,
    /// Time of arrival.
    pub at: Timestamp,
}

impl EngineLoad {
    /// The load at `now`; stale from age `stale_after` on.
    #[must_use]
    pub fn fact(&self, now: Timestamp, stale_after: Duration) -> EngineLoadFact {
        let EngineReading { running, waiting, kv_usage, sleep: _ } = self.reading;
        let age = now.since(self.at);
        EngineLoadFact { running, waiting, kv_usage, age, is_stale: age >= stale_after }
    }
}

/// Last reported load of a rank, for policies and explanations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EngineLoadFact {
    /// Running requests; `None` if not reported.
    pub running: Option<u32>,
    /// Requests in the engine's queue.
    pub waiting: Option<u32>,
    /// Used share of the KV cache, in [0, 1].
    pub kv_usage: Option<f64>,
    /// Age of the report.
    #[serde(rename = "age_seconds", with = "crate::protocol::seconds")]
    pub age: Duration,
    /// Whether the report is too old to count (`engine_load.stale_ms`): the current load is then unknown.
    pub is_stale: bool,
}

/// Thresholds above which a rank is overloaded by its engine's report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLimits {
    /// Waiting requests.
    pub waiting: Option<u32>,
    /// Used share of the KV cache.
    pub kv_usage: Option<f64>,
    /// Age from which a report is stale.
    pub stale_after: Duration,
}

impl EngineLimits {
    /// Whether any threshold is set.
    #[must_use]
    pub fn any(&self) -> bool {
        self.waiting.is_some() || self.kv_usage.is_some()
    }

    /// Whether a load exceeds the thresholds. Unknown and stale values do not.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::internals::engine_load::{EngineLimits, EngineLoad};
    /// use pointsman::EngineReading;
    /// use pointsman::protocol::Timestamp;
    ///
    /// let limits = EngineLimits { waiting: Some(4), kv_usage: None, stale_after: Duration::from_nanos(100) };
    /// let reading = EngineReading { waiting: Some(5), ..EngineReading::default() };
    /// let load = EngineLoad { reading, at: Timestamp(0) };
    /// assert!(limits.exceeded_by(&load, Timestamp(99)));
    /// assert!(!limits.exceeded_by(&load, Timestamp(100)), "that was long ago");
    /// ```
    #[must_use]
    pub fn exceeded_by(&self, load: &EngineLoad, now: Timestamp) -> bool {
        let EngineReading { waiting, kv_usage, .. } = load.reading;
        let exceeds = self.waiting.zip(waiting).is_some_and(|(limit, waiting)| waiting > limit)
            || self.kv_usage.zip(kv_usage).is_some_and(|(limit, kv_usage)| kv_usage > limit);
        exceeds && now.since(load.at) < self.stale_after
    }
}

/// The value as a count, if it is in range.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be in range")]
fn count(value: f64) -> Option<u32> {
    (value.is_finite() && (0.0..=f64::from(u32::MAX)).contains(&value)).then_some(value as u32)
}

/// The value as a share. Values slightly above 1 from rounding count as 1.
fn share(value: f64) -> Option<f64> {
    (0.0..=1.001).contains(&value).then_some(value.min(1.0))
}
