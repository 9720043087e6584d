//! Names for requests.
//!
//! Owns the count of requests. Promises that no name is given twice by one gateway, and that those told to clients are
//! unlikely to be another gateway's.

use std::sync::atomic::{AtomicU64, Ordering};

use ring::rand::{SecureRandom as _, SystemRandom};

/// Where names come from.
#[derive(Debug)]
pub(crate) struct Ids {
    prefix: u64,
    next: AtomicU64,
}

impl Ids {
    pub(crate) fn new() -> Self {
        let mut prefix = [0; 8];
        // Without randomness names are still unique here, which is all that routing needs.
        let _ = SystemRandom::new().fill(&mut prefix);
        Self { prefix: u64::from_ne_bytes(prefix), next: AtomicU64::new(0) }
    }

    /// For a booking of a request: the request's id, by which the log names it, and a number, because two requests may have
    /// the same id.
    pub(crate) fn booking(&self, request_id: &str) -> String {
        format!("{request_id}/{:x}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// For a request that came without one.
    pub(crate) fn public(&self) -> String {
        format!("{:016x}{:016x}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed))
    }
}
