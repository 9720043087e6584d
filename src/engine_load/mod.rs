//! Engine-reported load: what engines say of their own queues and caches.
//!
//! Owns reading it, from a Prometheus page ([`read_page`]) or a message of SGLang's load socket ([`read_stat`]), and
//! the cell in which a rank's last word can be read by anybody ([`EngineLoadCell`]). Promises that nothing an engine
//! sends is trusted: what cannot be is left out, each value by itself, and that nothing is ever made up: what an engine
//! does not say, or has not said for long, is unknown, neither idle nor busy. Leaves asking to
//! `actors/engine_load.rs`, and what follows to `schedule`.

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

/// What an engine says of one rank. Absent is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineReading {
    /// Requests that it runs.
    pub running: Option<u32>,
    /// Requests that wait in its queue.
    pub waiting: Option<u32>,
    /// Share of its KV cache in use, in [0, 1].
    pub kv_usage: Option<f64>,
}

impl EngineReading {
    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The higher of two accounts of the same rank. Engines that run a rank as several processes give each one's, of the
    /// same requests: their sum would count requests twice.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let kv_usage = match (self.kv_usage, other.kv_usage) {
            (Some(one), Some(another)) => Some(one.max(another)),
            (one, another) => one.or(another),
        };
        Self { running: self.running.max(other.running), waiting: self.waiting.max(other.waiting), kv_usage }
    }
}

/// A reading and when it came.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoad {
    /// What was said.
    pub reading: EngineReading,
    /// When it came.
    pub at: Timestamp,
}

impl EngineLoad {
    /// What is known of it at `now`, when it is `stale_after` some age.
    #[must_use]
    pub fn fact(&self, now: Timestamp, stale_after: Duration) -> EngineLoadFact {
        let EngineReading { running, waiting, kv_usage } = self.reading;
        let age = now.since(self.at);
        EngineLoadFact { running, waiting, kv_usage, age, is_stale: age >= stale_after }
    }
}

/// What an engine last said of a rank, for those who choose and explain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EngineLoadFact {
    /// Requests that it ran; absent where it did not say.
    pub running: Option<u32>,
    /// Requests that waited in its queue.
    pub waiting: Option<u32>,
    /// Share of its KV cache that was in use, in [0, 1].
    pub kv_usage: Option<f64>,
    /// Since it said so.
    pub age: Duration,
    /// Whether that is too long ago to count (`engine_load_stale_ms`): how busy it is now is unknown.
    pub is_stale: bool,
}

/// Beyond what an engine is overloaded by its own account.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLimits {
    /// Requests waiting.
    pub waiting: Option<u32>,
    /// Share of the KV cache in use.
    pub kv_usage: Option<f64>,
    /// Age from which on a load says nothing.
    pub stale_after: Duration,
}

impl EngineLimits {
    /// Whether there are any.
    #[must_use]
    pub fn any(&self) -> bool {
        self.waiting.is_some() || self.kv_usage.is_some()
    }

    /// Whether a load exceeds them. What is unknown or stale does not.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::engine_load::{EngineLimits, EngineLoad, EngineReading};
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

/// A count, if a number is one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be in range")]
fn count(value: f64) -> Option<u32> {
    (value.is_finite() && (0.0..=f64::from(u32::MAX)).contains(&value)).then_some(value as u32)
}

/// A share of the whole, if a number is one. What is beyond 1 by rounding is 1.
fn share(value: f64) -> Option<f64> {
    (0.0..=1.001).contains(&value).then_some(value.min(1.0))
}
