//! Event publisher of one rank.
//!
//! Assigns sequence numbers, keeps the replay ring and applies faults to outgoing messages. The ring is always complete
//! and in order: faults affect live messages only, never replayed ones. [`super::sockets`] sends the messages and
//! [`crate::kv_events`] encodes the batches.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::faults::{Fault, FaultBoard};

/// The byte that MessagePack never uses.
const NEVER_USED: u8 = 0xc1;

/// A numbered batch as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventMessage {
    pub(crate) sequence: u64,
    pub(crate) payload: Bytes,
}

/// Publisher of one incarnation of one rank.
#[derive(Debug)]
pub(crate) struct Publisher {
    rank: u32,
    sequence_next: u64,
    /// The latest messages, in order and without a gap.
    ring: VecDeque<EventMessage>,
    ring_messages_max: usize,
    /// Delayed message, which is sent after the next one.
    overtaken: Option<EventMessage>,
}

impl Publisher {
    /// Creates a publisher whose first message has number 0.
    pub(crate) fn new(rank: u32, ring_messages_max: usize) -> Self {
        Self { rank, sequence_next: 0, ring: VecDeque::new(), ring_messages_max, overtaken: None }
    }

    /// Number of the next message.
    pub(crate) fn sequence_next(&self) -> u64 {
        self.sequence_next
    }

    /// Numbers and stores a batch, and appends the messages to send now to `out`.
    pub(crate) fn publish(&mut self, payload: Bytes, faults: &FaultBoard, out: &mut Vec<EventMessage>) {
        let message = EventMessage { sequence: self.sequence_next, payload };
        self.sequence_next += 1;
        if self.ring.len() == self.ring_messages_max {
            self.ring.pop_front();
        }
        if self.ring_messages_max > 0 {
            self.ring.push_back(message.clone());
        }
        self.send(message, faults, out);
        debug_assert!(self.ring.len() <= self.ring_messages_max);
    }

    /// The delayed message, if one is waiting.
    pub(crate) fn take_late(&mut self) -> Option<EventMessage> {
        self.overtaken.take()
    }

    /// Returns whether a delayed message is waiting.
    pub(crate) fn holds_late(&self) -> bool {
        self.overtaken.is_some()
    }

    /// Messages in the ring from `sequence` on, oldest first.
    pub(crate) fn replay(&self, sequence: u64) -> Vec<EventMessage> {
        let first = self.ring.front().map_or(0, |message| message.sequence);
        let skipped = usize::try_from(sequence.saturating_sub(first)).unwrap_or(usize::MAX);
        self.ring.iter().skip(skipped).cloned().collect()
    }

    fn send(&mut self, mut message: EventMessage, faults: &FaultBoard, out: &mut Vec<EventMessage>) {
        let set = faults.get();
        let strikes = |fault, share| faults.strikes(fault, share, self.rank, message.sequence);
        if strikes(Fault::Drop, set.drop_share) {
            return;
        }
        let is_twice = strikes(Fault::Duplicate, set.duplicate_share);
        let is_late = self.overtaken.is_none() && strikes(Fault::Reorder, set.reorder_share);
        if strikes(Fault::Mangle, set.mangle_share) {
            message.payload = mangled(&message.payload, faults.draw(Fault::Mangle, self.rank, !message.sequence));
        }
        if is_late {
            out.extend(is_twice.then(|| message.clone()));
            self.overtaken = Some(message);
        } else {
            out.extend(is_twice.then(|| message.clone()));
            out.push(message);
            out.extend(self.overtaken.take());
        }
    }
}

/// Truncates the payload, or replaces its first byte by one that every decoder rejects.
fn mangled(payload: &Bytes, draw: u64) -> Bytes {
    let (is_cut, at) = (draw & 1 == 0, usize::try_from(draw >> 33).expect("31 bits fit"));
    if is_cut {
        return payload.slice(..at % payload.len().max(1));
    }
    let mut broken = BytesMut::from(payload.as_ref());
    if let Some(first) = broken.first_mut() {
        *first = NEVER_USED;
    }
    broken.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::Faults;

    fn board(faults: Faults) -> FaultBoard {
        FaultBoard::new(3, faults)
    }

    fn batch(n: u64) -> Bytes {
        Bytes::from(vec![0x93, u8::try_from(n % 256).unwrap(), 0xc0])
    }

    fn published(publisher: &mut Publisher, count: u64, faults: &FaultBoard) -> Vec<EventMessage> {
        let mut out = Vec::new();
        (0..count).for_each(|n| publisher.publish(batch(n), faults, &mut out));
        out
    }

    fn sequences(messages: &[EventMessage]) -> Vec<u64> {
        messages.iter().map(|message| message.sequence).collect()
    }

    #[test]
    fn the_ring_replays_the_latest_messages_from_any_number() {
        let mut publisher = Publisher::new(0, 4);
        let sent = published(&mut publisher, 10, &board(Faults::default()));
        assert_eq!(sequences(&sent), (0..10).collect::<Vec<_>>());
        assert_eq!(publisher.replay(0), sent[6..], "replay starts at the oldest message in the ring");
        assert_eq!(publisher.replay(8), sent[8..]);
        assert_eq!(publisher.replay(10), []);
        assert_eq!(publisher.replay(u64::MAX), []);
        let mut without = Publisher::new(0, 0);
        published(&mut without, 3, &board(Faults::default()));
        assert_eq!(without.replay(0), []);
    }

    #[test]
    fn faults_affect_sent_but_not_replayed_messages() {
        let cases = [
            (Faults { drop_share: 0.3, ..Faults::default() }, Fault::Drop),
            (Faults { duplicate_share: 0.3, ..Faults::default() }, Fault::Duplicate),
            (Faults { reorder_share: 0.3, ..Faults::default() }, Fault::Reorder),
            (Faults { mangle_share: 0.3, ..Faults::default() }, Fault::Mangle),
        ];
        for (faults, kind) in cases {
            let board = board(faults);
            let mut publisher = Publisher::new(1, 1_000);
            let mut sent = published(&mut publisher, 100, &board);
            sent.extend(publisher.take_late());
            let struck = board.done()[&kind];
            assert!((15..45).contains(&struck), "{kind:?} {struck}");
            let replayed = publisher.replay(0);
            assert_eq!(sequences(&replayed), (0..100).collect::<Vec<_>>());
            assert!((0..100).all(|n| replayed[usize::try_from(n).unwrap()].payload == batch(n)));
            let mut ordered = sent.clone();
            ordered.sort_by_key(|message| message.sequence);
            let is_as_kept = |message: &&EventMessage| message.payload == batch(message.sequence);
            let (count, kept) = (sent.len() as u64, sent.iter().filter(is_as_kept).count() as u64);
            match kind {
                Fault::Drop => assert_eq!((count, kept), (100 - struck, 100 - struck)),
                Fault::Duplicate => assert_eq!((count, kept), (100 + struck, 100 + struck)),
                Fault::Reorder => assert!(ordered == replayed && ordered != sent),
                Fault::Mangle => assert_eq!((count, kept), (100, 100 - struck)),
                other => panic!("{other:?} is not the publisher's"),
            }
            assert!(!publisher.holds_late());
        }
    }

    #[test]
    fn a_delayed_message_is_sent_after_the_next_or_when_due() {
        let board = board(Faults { reorder_share: 1.0, ..Faults::default() });
        let mut publisher = Publisher::new(0, 10);
        let sent = published(&mut publisher, 1, &board);
        assert!(sent.is_empty() && publisher.holds_late());
        assert_eq!(publisher.take_late().map(|message| message.sequence), Some(0));
        assert_eq!(sequences(&published(&mut publisher, 4, &board)), [2, 1, 4, 3]);
    }
}
