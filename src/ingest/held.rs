//! Buffer of messages that arrived before their predecessors.
//!
//! Ordered by sequence number and bounded in messages and bytes. A message that does not fit is rejected; held messages
//! are not evicted. The source decides which messages to hold, and for how long.

use std::collections::BTreeMap;

/// Bounded buffer with one payload per sequence number, in order.
#[derive(Clone, Debug)]
pub(super) struct Held<P> {
    messages: BTreeMap<u64, P>,
    bytes: usize,
    messages_max: usize,
    bytes_max: usize,
    /// Size in bytes of the largest offered message: the estimate for the next one.
    largest_bytes: usize,
}

/// Result of offering a message.
#[derive(Debug)]
pub(super) enum Offered<P> {
    Held,
    /// A message with the same bytes is already held.
    Same,
    /// A message with other bytes is held under this number; returns the offered payload.
    Other(P),
    Full,
}

impl<P: AsRef<[u8]>> Held<P> {
    pub(super) fn new(messages_max: usize, bytes_max: usize) -> Self {
        Self { messages: BTreeMap::new(), bytes: 0, messages_max, bytes_max, largest_bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether one more message of the largest size so far fits.
    pub(super) fn has_room(&self) -> bool {
        self.messages.len() < self.messages_max && self.bytes.saturating_add(self.largest_bytes) <= self.bytes_max
    }

    pub(super) fn offer(&mut self, sequence: u64, payload: P) -> Offered<P> {
        let bytes = payload.as_ref().len();
        self.largest_bytes = self.largest_bytes.max(bytes);
        if let Some(held) = self.messages.get(&sequence) {
            return if held.as_ref() == payload.as_ref() { Offered::Same } else { Offered::Other(payload) };
        }
        if self.messages.len() >= self.messages_max || self.bytes.saturating_add(bytes) > self.bytes_max {
            return Offered::Full;
        }
        self.bytes += bytes;
        self.messages.insert(sequence, payload);
        Offered::Held
    }

    pub(super) fn first(&self) -> Option<u64> {
        self.messages.first_key_value().map(|(sequence, _)| *sequence)
    }

    pub(super) fn last(&self) -> Option<u64> {
        self.messages.last_key_value().map(|(sequence, _)| *sequence)
    }

    pub(super) fn pop_first(&mut self) -> Option<(u64, P)> {
        let (sequence, payload) = self.messages.pop_first()?;
        self.bytes -= payload.as_ref().len();
        if self.messages.is_empty() {
            self.largest_bytes = 0; // restarts the size estimate
        }
        Some((sequence, payload))
    }

    /// Drops all messages and returns their number.
    pub(super) fn clear(&mut self) -> u64 {
        let messages = self.messages.len() as u64;
        self.messages.clear();
        (self.bytes, self.largest_bytes) = (0, 0);
        messages
    }

    /// First number of the gapless run that ends with the last message.
    pub(super) fn last_run_start(&self) -> Option<u64> {
        let mut start = self.last()?;
        for sequence in self.messages.keys().rev().skip(1) {
            if *sequence + 1 != start {
                break;
            }
            start = *sequence;
        }
        Some(start)
    }

    pub(super) fn check_invariants(&self) {
        assert_eq!(self.bytes, self.messages.values().map(|payload| payload.as_ref().len()).sum::<usize>());
        assert!(
            self.messages.len() <= self.messages_max && self.bytes <= self.bytes_max,
            "the buffer respects its bounds"
        );
    }
}
