//! `[events]`: the engines' KV events.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of KV events.
    pub struct EventsConfig {
        /// Workers whose KV events the index follows. Default `on`.
        mode: EventMode;
        /// Blocks in KV events that may wait for one shard; beyond, senders wait. Default 1,048,576, at least 1.
        blocks_max: u32 = 1 << 20;
        /// Interval of the comparisons of the index with the caches of engines that support it, in milliseconds. 0
        /// disables them. Default 60,000.
        audit_interval_ms: u32 = 60_000;
    }
}

/// Workers whose KV events the index follows.
///
/// ```
/// use pointsman::config::EventMode;
///
/// assert_eq!(serde_json::from_str::<EventMode>("\"auto\"")?, EventMode::Auto);
/// assert!(EventMode::Auto.reads_events() && !EventMode::Off.reads_events());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventMode {
    /// No worker: the index holds speculative entries only.
    Off,
    /// All workers. Of a worker without events, only the last context of each session counts as cached.
    #[default]
    On,
    /// Workers that publish events. The other workers have speculative entries.
    Auto,
}

impl EventMode {
    /// Whether events are read from any worker.
    #[must_use]
    pub fn reads_events(self) -> bool {
        self != Self::Off
    }
}

impl fmt::Display for EventMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        })
    }
}

impl EventsConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("events.blocks_max", self.blocks_max);
    }
}
