//! Queue entries, and the key that orders the entries of one class.
//!
//! Owns the comparison and nothing else. Promises a total order, the same for the same requests on every machine: times
//! and priorities are compared as numbers, scores by `f64::total_cmp` and never NaN, and what is still equal by the
//! sequence in which it came. Leaves to the queue when a key has to be made again.

use std::cmp::{Ordering, Reverse};

use crate::config::QueueOrder;
use crate::protocol::Timestamp;

use super::TenantKey;

/// One waiting request: the inputs of its queue order, its share of the queue limits, and its cost.
///
/// ```
/// use pointsman::queue::QueueEntry;
///
/// let entry = QueueEntry { isl_tokens: 4096, cached_tokens: 3584, ..QueueEntry::default() };
/// assert_eq!((entry.uncached_tokens(), entry.cost_tokens()), (512, 512));
/// assert_eq!(QueueEntry::default().cost_tokens(), 1); // nothing is free
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueEntry {
    /// Whose it is: the tenants of a class share it.
    pub tenant: TenantKey,
    /// Higher goes first, before anything else is looked at.
    pub strict_priority: u32,
    /// Seconds by which it moves ahead of its tenant's other requests; a factor of 1 + this under `wspt`. Not a number or
    /// negative is taken for 0.
    pub priority_jump: f64,
    /// When it is too late. Of its tenant's requests with equal strict priority the earlier goes first, none last.
    pub due: Option<Timestamp>,
    /// When it came.
    pub arrival: Timestamp,
    /// Length of its prompt in tokens.
    pub isl_tokens: u32,
    /// Tokens of it that the best eligible rank has cached; at most all.
    pub cached_tokens: u32,
}

impl QueueEntry {
    /// Tokens that have to be computed.
    #[must_use]
    pub fn uncached_tokens(&self) -> u32 {
        self.isl_tokens.saturating_sub(self.cached_tokens)
    }

    /// What sending it costs its class: its uncached tokens, at least 1.
    #[must_use]
    pub fn cost_tokens(&self) -> u32 {
        self.uncached_tokens().max(1)
    }

    /// Higher goes first. Finite, and never -0, which would not be equal to 0.
    fn score(&self, order: QueueOrder) -> f64 {
        let jump = if self.priority_jump > 0.0 { self.priority_jump.min(f64::MAX) } else { 0.0 };
        let arrival_secs = self.arrival.since(Timestamp::default()).as_secs_f64();
        match order {
            QueueOrder::Fcfs => jump - arrival_secs,
            QueueOrder::Lcfs => jump + arrival_secs,
            QueueOrder::Wspt => (1.0 + jump) / f64::from(self.cost_tokens()),
        }
    }
}

/// A request's place among its tenant's in a class: the smaller goes first. Knows which request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) strict_priority: Reverse<u32>,
    /// The end of time stands for none.
    due: Timestamp,
    score: Score,
    /// Which one it was to come into the queue: no two have the same, so what follows decides nothing.
    pub(super) sequence: u64,
    /// The request's id.
    pub(super) id: u64,
    /// What sending it costs its tenant and its class.
    pub(super) cost_tokens: u32,
}

impl Key {
    /// Before all others.
    pub(super) const FIRST: Self = Self {
        strict_priority: Reverse(u32::MAX),
        due: Timestamp(0),
        score: Score(f64::INFINITY),
        sequence: 0,
        id: 0,
        cost_tokens: 0,
    };

    pub(super) fn new(order: QueueOrder, entry: &QueueEntry, sequence: u64, id: u64) -> Self {
        Self {
            strict_priority: Reverse(entry.strict_priority),
            due: entry.due.unwrap_or(Timestamp(u64::MAX)),
            score: Score(entry.score(order)),
            sequence,
            id,
            cost_tokens: entry.cost_tokens(),
        }
    }
}

/// A score, the higher one first.
#[derive(Clone, Copy, Debug)]
struct Score(f64);

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0)
    }
}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Score {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn arrived(secs: u64, priority_jump: f64) -> QueueEntry {
        QueueEntry { arrival: Timestamp::default() + Duration::from_secs(secs), priority_jump, ..QueueEntry::default() }
    }

    /// Whether the first of two goes first, whichever came first.
    fn precedes(order: QueueOrder, first: QueueEntry, second: QueueEntry) -> bool {
        Key::new(order, &first, 2, 2) < Key::new(order, &second, 1, 1)
            && Key::new(order, &first, 1, 1) < Key::new(order, &second, 2, 2)
    }

    #[test]
    fn scores_are_those_of_the_worked_examples() {
        assert_eq!(arrived(10, 0.0).score(QueueOrder::Fcfs), -10.0);
        assert_eq!(arrived(12, 5.0).score(QueueOrder::Fcfs), -7.0);
        assert!(precedes(QueueOrder::Fcfs, arrived(12, 5.0), arrived(10, 0.0)));
        assert!(precedes(QueueOrder::Lcfs, arrived(12, 0.0), arrived(10, 0.0)));
        assert!(precedes(QueueOrder::Lcfs, arrived(10, 3.0), arrived(12, 0.0)));
        let warm = QueueEntry { isl_tokens: 4096, cached_tokens: 3584, ..QueueEntry::default() };
        let cold = QueueEntry { isl_tokens: 1024, ..QueueEntry::default() };
        assert_eq!((warm.score(QueueOrder::Wspt), cold.score(QueueOrder::Wspt)), (1.0 / 512.0, 1.0 / 1024.0));
        assert!(precedes(QueueOrder::Wspt, warm, cold));
        let jumps = QueueEntry { priority_jump: 3.0, ..cold };
        assert_eq!(jumps.score(QueueOrder::Wspt), 4.0 / 1024.0);
        assert_eq!(
            QueueEntry { cached_tokens: 7, isl_tokens: 5, ..QueueEntry::default() }.score(QueueOrder::Wspt),
            1.0
        );
    }

    #[test]
    fn priority_comes_before_deadline_and_deadline_before_score() {
        for order in [QueueOrder::Fcfs, QueueOrder::Lcfs, QueueOrder::Wspt] {
            let (late, early) = (Some(Timestamp(20)), Some(Timestamp(10)));
            let best = QueueEntry { priority_jump: 1e9, ..QueueEntry::default() };
            let strict = QueueEntry { strict_priority: 1, ..QueueEntry::default() };
            assert!(precedes(order, strict, QueueEntry { due: early, ..best }));
            let due = |due| QueueEntry { due, ..QueueEntry::default() };
            assert!(precedes(order, due(early), QueueEntry { due: late, ..best }));
            assert!(precedes(order, due(late), best));
            assert!(Key::new(order, &best, 3, 9) < Key::new(order, &best, 4, 8), "else whoever came first");
        }
    }

    #[test]
    fn no_jump_makes_a_score_that_cannot_be_compared() {
        let orders = [QueueOrder::Fcfs, QueueOrder::Lcfs, QueueOrder::Wspt];
        for jump in [f64::NAN, -f64::NAN, -1.0, -0.0, f64::NEG_INFINITY] {
            for order in orders {
                assert_eq!(arrived(0, jump).score(order).to_bits(), arrived(0, 0.0).score(order).to_bits(), "{jump}");
            }
        }
        for order in orders {
            let score = arrived(u64::MAX / 1_000_000_000, f64::INFINITY).score(order);
            assert!(score.is_finite(), "{score}");
            assert!(
                Key::FIRST
                    < Key::new(order, &QueueEntry { priority_jump: f64::INFINITY, ..QueueEntry::default() }, 0, 0)
            );
        }
    }
}
