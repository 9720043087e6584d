//! `[supervision]`: restarts of failed and hung actors.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Settings of supervision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SupervisionConfig {
    /// Actor restarts within [`Self::RESTART_WINDOW`] after which the router fails. Default 32.
    pub restarts_max: u32,
    /// Time in milliseconds without progress after which an actor with work counts as hung; 0 turns the detection off.
    /// Default 1,000.
    pub hang_timeout_ms: u64,
}

impl SupervisionConfig {
    /// The window of `restarts_max`. Only the rate of restarts matters, which `restarts_max` sets alone.
    pub const RESTART_WINDOW: Duration = Duration::from_secs(10);
}

impl Default for SupervisionConfig {
    fn default() -> Self {
        Self { restarts_max: 32, hang_timeout_ms: 1_000 }
    }
}
