//! `[supervision]`: restarts of failed and hung actors.

use std::time::Duration;

use super::table::settings;

settings! {
    /// Settings of supervision.
    pub struct SupervisionConfig {
        /// Actor restarts within [`Self::RESTART_WINDOW`] after which the router fails. Default 32.
        restarts_max: u32 = 32;
        /// Time in milliseconds without progress after which an actor with work counts as hung; 0 turns the detection
        /// off. Default 1,000.
        hang_timeout_ms: u64 = 1_000;
    }
}

impl SupervisionConfig {
    /// The window of `restarts_max`. Only the rate of restarts matters, which `restarts_max` sets alone.
    pub const RESTART_WINDOW: Duration = Duration::from_secs(10);
}
