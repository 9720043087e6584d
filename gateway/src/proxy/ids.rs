//! Request ids.
//!
//! Ids are unique within one gateway, and generated public ids are unlikely to collide between gateways.

use std::sync::atomic::{AtomicU64, Ordering};

use ring::rand::{SecureRandom as _, SystemRandom};

/// Generator of ids.
#[derive(Debug)]
pub(crate) struct Ids {
    prefix: u64,
    next: AtomicU64,
}

impl Ids {
    pub(crate) fn new() -> Self {
        let mut prefix = [0; 8];
        // Without randomness ids are still unique in this gateway, which suffices for routing.
        let _ = SystemRandom::new().fill(&mut prefix);
        Self { prefix: u64::from_ne_bytes(prefix), next: AtomicU64::new(0) }
    }

    /// Booking id of a request: its request id for logs, plus a number, because two requests may have the same id.
    pub(crate) fn booking(&self, request_id: &str) -> String {
        format!("{request_id}/{:x}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Number that identifies a KV transfer: evenly spread over 64 bits, and unique within 2^64 calls (Weyl sequence and
    /// the finalizer of `SplitMix64`, Steele, Lea and Flood 2014).
    pub(crate) fn transfer(&self) -> u64 {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let x = self.prefix.wrapping_add(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Public id of a request without one.
    pub(crate) fn public(&self) -> String {
        format!("{:016x}{:016x}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed))
    }
}
