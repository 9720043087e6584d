//! Lives of a replica in the order in which they became known.
//!
//! Incarnations have no reliable order, because clocks may go back between two starts. An unknown incarnation is
//! therefore a later life, and a replaced one an earlier life. The owner drops the lives when the replica is no longer
//! connected, so a life that was replaced wrongly returns.

use std::cmp::Ordering;
use std::collections::VecDeque;

/// Number of replaced incarnations that are kept.
const EARLIER_MAX: usize = 8;

/// The present life of a replica, and those before.
#[derive(Clone, Debug)]
pub(super) struct Lives {
    current: u64,
    earlier: VecDeque<u64>,
}

impl Lives {
    pub(super) fn new(incarnation: u64) -> Self {
        Self { current: incarnation, earlier: VecDeque::new() }
    }

    /// Whether a life is earlier than the present one, equal, or later.
    pub(super) fn order(&self, incarnation: u64) -> Ordering {
        match incarnation {
            _ if incarnation == self.current => Ordering::Equal,
            _ if self.earlier.contains(&incarnation) => Ordering::Less,
            _ => Ordering::Greater,
        }
    }

    /// Begins a later life.
    pub(super) fn replace(&mut self, incarnation: u64) {
        self.earlier.truncate(EARLIER_MAX - 1);
        self.earlier.push_front(std::mem::replace(&mut self.current, incarnation));
    }
}
