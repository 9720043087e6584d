//! The registered workers, and the prompt limits that follow from their configurations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use super::worker::WorkerEntry;
use crate::load::PromptLimits;

/// Registered workers, by id. Written by the supervisor.
#[derive(Debug)]
pub(crate) struct Fleet {
    workers: watch::Sender<Arc<[WorkerEntry]>>,
    /// [`PromptLimits`] of the registered workers, as one word.
    prompt_limits: AtomicU64,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            workers: watch::Sender::new(Arc::new([])),
            prompt_limits: AtomicU64::new(PromptLimits::default().to_word()),
        }
    }
}

impl Fleet {
    pub(crate) fn workers(&self) -> Arc<[WorkerEntry]> {
        Arc::clone(&self.workers.borrow())
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<[WorkerEntry]>> {
        self.workers.subscribe()
    }

    /// Longest prompt that a worker accepts, and the most that one can weigh.
    pub(crate) fn prompt_limits(&self) -> PromptLimits {
        PromptLimits::from_word(self.prompt_limits.load(Ordering::Relaxed))
    }

    pub(crate) fn publish(&self, workers: Arc<[WorkerEntry]>, limits: PromptLimits) {
        self.prompt_limits.store(limits.to_word(), Ordering::Relaxed);
        self.workers.send_replace(workers);
    }
}
