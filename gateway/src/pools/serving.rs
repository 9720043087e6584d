//! What serves now: models, settings, and the phase of the gateway.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::latest::Latest;
use super::models::Models;
use crate::settings::Settings;

/// The served models with the settings in force. A reload replaces it.
#[derive(Clone)]
pub(crate) struct Pools {
    pub(crate) settings: Arc<Settings>,
    pub(crate) models: Arc<Models>,
    pub(crate) readiness: Arc<Readiness>,
}

/// Interval of the reads of pauses at other replicas.
const GATES_INTERVAL: Duration = Duration::from_millis(250);

/// Follows the pauses at other replicas.
pub(crate) async fn follow_gates(latest: Latest<Pools>) {
    loop {
        for model in latest.get().models.all() {
            model.gate.follow().await;
        }
        sleep(GATES_INTERVAL).await;
    }
}

/// The gateway's own part of readiness.
pub(crate) struct Readiness {
    draining: AtomicBool,
    started: Instant,
    warm_up: Duration,
}

impl Readiness {
    /// Starts the warm-up time.
    pub(crate) fn new(warm_up: Duration) -> Self {
        Self { draining: AtomicBool::new(false), started: Instant::now(), warm_up }
    }

    /// Ends readiness permanently.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn is_warm_up_over(&self) -> bool {
        self.started.elapsed() >= self.warm_up
    }
}
