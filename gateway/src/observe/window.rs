//! Counts of recent events by slots of time.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Counts of the last slots. Slots without events have no entry.
#[derive(Debug)]
pub(crate) struct Window<T> {
    pub(crate) begun: Instant,
    slot: Duration,
    slots_max: u64,
    /// By the number of the slot since the beginning, the newest last.
    counts: VecDeque<(u64, T)>,
}

impl<T: Default> Window<T> {
    /// A window of `slots_max` slots of this length.
    pub(crate) fn new(begun: Instant, slot: Duration, slots_max: u64) -> Self {
        Self { begun, slot, slots_max, counts: VecDeque::new() }
    }

    /// Number of the present slot, never an earlier one than that of the last event: clocks of two threads may differ.
    pub(crate) fn slot_at(&self, now: Instant) -> u64 {
        let slot = now.saturating_duration_since(self.begun).as_secs() / self.slot.as_secs();
        self.counts.back().map_or(slot, |(newest, _)| slot.max(*newest))
    }

    /// The counts of the present slot.
    pub(crate) fn at(&mut self, now: Instant) -> &mut T {
        let (slot, slots_max) = (self.slot_at(now), self.slots_max);
        if self.counts.back().is_none_or(|(newest, _)| *newest < slot) {
            self.counts.retain(|(old, _)| old + slots_max > slot);
            self.counts.push_back((slot, T::default()));
        }
        &mut self.counts.back_mut().expect("the slot was added").1
    }

    /// Number of the oldest slot with an entry, which may be outside the window.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.counts.front().map(|(slot, _)| *slot)
    }

    /// Slots of the window with their numbers, the oldest first.
    pub(crate) fn recent(&self, now: Instant) -> impl Iterator<Item = &(u64, T)> {
        let slot = self.slot_at(now);
        self.counts.iter().filter(move |(old, _)| old + self.slots_max > slot)
    }
}
