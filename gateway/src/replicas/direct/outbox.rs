//! Outgoing frames of one peer: a bounded queue that drops the oldest messages.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Maximum number of queued messages.
const MESSAGES_MAX: usize = 1024;

/// Maximum bytes of queued messages; a single message may exceed it.
const BYTES_MAX: usize = 8 << 20;

/// Queue of encoded frames. Requests are never dropped; their number is limited by the caller.
pub(in crate::replicas) struct Outbox<T> {
    queue: Mutex<Queue<T>>,
    ready: Notify,
}

/// Messages have their lengths.
struct Queue<T> {
    requests: VecDeque<T>,
    messages: VecDeque<(T, usize)>,
    message_bytes: usize,
}

impl<T> Default for Outbox<T> {
    fn default() -> Self {
        let queue = Queue { requests: VecDeque::new(), messages: VecDeque::new(), message_bytes: 0 };
        Self { queue: Mutex::new(queue), ready: Notify::new() }
    }
}

impl<T> Outbox<T> {
    /// Adds a message, and returns the number of older ones that were dropped for it.
    pub(in crate::replicas) fn push(&self, message: T, bytes: usize) -> u64 {
        let mut dropped = 0;
        {
            let mut queue = self.queue.lock();
            queue.message_bytes += bytes;
            queue.messages.push_back((message, bytes));
            while queue.messages.len() > MESSAGES_MAX || (queue.message_bytes > BYTES_MAX && queue.messages.len() > 1) {
                let oldest = queue.messages.pop_front().map_or(0, |(_, bytes)| bytes);
                queue.message_bytes -= oldest;
                dropped += 1;
            }
        }
        self.ready.notify_one();
        dropped
    }

    /// Adds a request.
    pub(in crate::replicas) fn push_request(&self, request: T) {
        self.queue.lock().requests.push_back(request);
        self.ready.notify_one();
    }

    /// The next frame, requests first.
    pub(in crate::replicas) fn try_next(&self) -> Option<T> {
        let mut queue = self.queue.lock();
        if let Some(request) = queue.requests.pop_front() {
            return Some(request);
        }
        let (message, bytes) = queue.messages.pop_front()?;
        queue.message_bytes -= bytes;
        Some(message)
    }

    /// Waits for the next frame, for a single receiver. Cancelling the future loses no frame.
    pub(in crate::replicas) async fn next(&self) -> T {
        loop {
            if let Some(frame) = self.try_next() {
                return frame;
            }
            self.ready.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn push(outbox: &Outbox<Bytes>, message: Bytes) -> u64 {
        let bytes = message.len();
        outbox.push(message, bytes)
    }

    fn drained(outbox: &Outbox<Bytes>) -> Vec<Bytes> {
        std::iter::from_fn(|| outbox.try_next()).collect()
    }

    #[test]
    fn the_oldest_messages_are_dropped() {
        let outbox = Outbox::default();
        let dropped: u64 = (0..MESSAGES_MAX + 3).map(|n| push(&outbox, Bytes::from(n.to_string()))).sum();
        assert_eq!(dropped, 3);
        let left = drained(&outbox);
        assert_eq!((left.len(), &left[0][..]), (MESSAGES_MAX, &b"3"[..]));
    }

    #[test]
    fn bytes_are_bounded_and_requests_come_first() {
        let outbox = Outbox::default();
        let half = Bytes::from(vec![0; BYTES_MAX / 2 + 1]);
        assert_eq!([half.clone(), half.clone(), half].map(|message| push(&outbox, message)), [0, 1, 1]);
        assert_eq!(push(&outbox, Bytes::from(vec![1; BYTES_MAX + 1])), 1, "a single message has no limit here");
        outbox.push_request(Bytes::from_static(b"request"));
        let left = drained(&outbox);
        assert_eq!((left.len(), &left[0][..], left[1].len()), (2, &b"request"[..], BYTES_MAX + 1));
    }
}
