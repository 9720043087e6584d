//! Outgoing frames of one peer: a bounded queue that drops the oldest messages.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

/// Maximum number of queued messages.
const MESSAGES_MAX: usize = 1024;

/// Maximum bytes of queued messages; a single message may exceed it.
const BYTES_MAX: usize = 8 << 20;

/// Queue of encoded frames. Requests are never dropped; their number is limited by the caller.
#[derive(Default)]
pub(in crate::replicas) struct Outbox {
    queue: Mutex<Queue>,
    ready: Notify,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<Bytes>,
    messages: VecDeque<Bytes>,
    message_bytes: usize,
}

impl Outbox {
    /// Adds a message, and returns the number of older ones that were dropped for it.
    pub(in crate::replicas) fn push(&self, message: Bytes) -> u64 {
        let mut dropped = 0;
        {
            let mut queue = self.lock();
            queue.message_bytes += message.len();
            queue.messages.push_back(message);
            while queue.messages.len() > MESSAGES_MAX || (queue.message_bytes > BYTES_MAX && queue.messages.len() > 1) {
                let oldest = queue.messages.pop_front().map_or(0, |oldest| oldest.len());
                queue.message_bytes -= oldest;
                dropped += 1;
            }
        }
        self.ready.notify_one();
        dropped
    }

    /// Adds a request.
    pub(in crate::replicas) fn push_request(&self, request: Bytes) {
        self.lock().requests.push_back(request);
        self.ready.notify_one();
    }

    /// The next frame, requests first.
    pub(in crate::replicas) fn try_next(&self) -> Option<Bytes> {
        let mut queue = self.lock();
        if let Some(request) = queue.requests.pop_front() {
            return Some(request);
        }
        let message = queue.messages.pop_front()?;
        queue.message_bytes -= message.len();
        Some(message)
    }

    /// Waits for the next frame, for a single receiver. Cancelling the future loses no frame.
    pub(in crate::replicas) async fn next(&self) -> Bytes {
        loop {
            if let Some(frame) = self.try_next() {
                return frame;
            }
            self.ready.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Panics cannot occur between related changes.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(outbox: &Outbox) -> Vec<Bytes> {
        std::iter::from_fn(|| outbox.try_next()).collect()
    }

    #[test]
    fn the_oldest_messages_are_dropped() {
        let outbox = Outbox::default();
        let dropped: u64 = (0..MESSAGES_MAX + 3).map(|n| outbox.push(Bytes::from(n.to_string()))).sum();
        assert_eq!(dropped, 3);
        let left = drained(&outbox);
        assert_eq!((left.len(), &left[0][..]), (MESSAGES_MAX, &b"3"[..]));
    }

    #[test]
    fn bytes_are_bounded_and_requests_come_first() {
        let outbox = Outbox::default();
        let half = Bytes::from(vec![0; BYTES_MAX / 2 + 1]);
        assert_eq!([half.clone(), half.clone(), half].map(|message| outbox.push(message)), [0, 1, 1]);
        assert_eq!(outbox.push(Bytes::from(vec![1; BYTES_MAX + 1])), 1, "a single message has no limit here");
        outbox.push_request(Bytes::from_static(b"request"));
        let left = drained(&outbox);
        assert_eq!((left.len(), &left[0][..], left[1].len()), (2, &b"request"[..], BYTES_MAX + 1));
    }

    #[tokio::test]
    async fn a_receiver_waits_for_the_next_frame() {
        let outbox = Outbox::default();
        let (frame, dropped) = tokio::join!(outbox.next(), async { outbox.push(Bytes::from_static(b"x")) });
        assert_eq!((&frame[..], dropped), (&b"x"[..], 0));
    }
}
