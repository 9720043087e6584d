//! Priority queue of future events by time; simultaneous events keep the order of insertion.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An event of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// This request of the workload is sent.
    Arrival(usize),
    /// The step of this rank ends.
    StepEnd(usize),
    /// The next KV events of this rank arrive at the router.
    Announcement(usize),
    /// The KV blocks of this request arrive at its decode rank.
    Transfer(usize),
    /// The ranks are sampled.
    Sample,
}

/// The queue of events.
#[derive(Debug, Default)]
pub(super) struct Heap {
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pushed: u64,
}

impl Heap {
    pub(super) fn push(&mut self, at_us: u64, event: Event) {
        self.events.push(Reverse((at_us, self.pushed, event)));
        self.pushed += 1;
    }

    pub(super) fn next_us(&self) -> Option<u64> {
        self.events.peek().map(|Reverse((at_us, _, _))| *at_us)
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        self.events.pop().map(|Reverse((_, _, event))| event)
    }
}
