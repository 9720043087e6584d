//! Block size in force, for the handle and the replica task.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::watch;

use crate::protocol::PoolBlockSize;

/// Block size of the pool. Written by the supervisor.
#[derive(Debug)]
pub(crate) struct BlockSizeCell {
    /// Readable without a lock, for each request.
    tokens: AtomicU32,
    size: watch::Sender<PoolBlockSize>,
}

impl BlockSizeCell {
    pub(crate) fn new(size: PoolBlockSize) -> Self {
        Self { tokens: AtomicU32::new(size.tokens), size: watch::Sender::new(size) }
    }

    /// Tokens per block.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens.load(Ordering::Relaxed)
    }

    pub(crate) fn get(&self) -> PoolBlockSize {
        *self.size.borrow()
    }

    #[cfg(feature = "replicas")]
    pub(crate) fn subscribe(&self) -> watch::Receiver<PoolBlockSize> {
        self.size.subscribe()
    }

    pub(crate) fn set(&self, size: PoolBlockSize) {
        self.tokens.store(size.tokens, Ordering::Relaxed);
        self.size.send_replace(size);
    }
}
