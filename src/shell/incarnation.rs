//! Incarnation of an actor that may be replaced while one of its steps hangs.

use std::sync::atomic::{AtomicU32, Ordering};

/// Incarnation of the present actor in a role. Late effects of an earlier one are dropped. Written by the supervisor
/// before it opens the strand of a successor.
#[derive(Debug, Default)]
pub struct CurrentIncarnation(AtomicU32);

impl CurrentIncarnation {
    /// Sets the present incarnation.
    pub fn set(&self, incarnation: u32) {
        self.0.store(incarnation, Ordering::Release);
    }

    /// The present incarnation.
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Whether `incarnation` is the present one.
    pub fn is(&self, incarnation: u32) -> bool {
        self.get() == incarnation
    }
}
