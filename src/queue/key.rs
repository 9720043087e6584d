//! Queue entries and their order within one class.
//!
//! The order is total and identical on every machine: times and priorities are compared as numbers, scores by
//! `f64::total_cmp` without NaN, and ties by the order of insertion. The queue decides when a key must be recomputed.

use std::cmp::{Ordering, Reverse};

use crate::config::QueueOrder;
use crate::protocol::Timestamp;

use super::ids::TenantKey;

/// One waiting request: the inputs of its queue order, its share of the queue limits, and its cost.
///
/// ```
/// use pointsman::internals::queue::QueueEntry;
///
/// let entry = QueueEntry { prompt_tokens: 4096, cached_tokens: 3584, ..QueueEntry::default() };
/// assert_eq!((entry.uncached_tokens(), entry.cost_tokens()), (512, 512));
/// assert_eq!(QueueEntry::default().cost_tokens(), 1); // nothing is free
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueEntry {
    /// The tenant of the request; the tenants of a class share it.
    pub tenant: TenantKey,
    /// Strict priority; higher values go first, before all other criteria.
    pub strict_priority: u32,
    /// Head start in seconds among its tenant's requests; with `wspt`, the score is multiplied by 1 plus this value.
    /// NaN and negative values count as 0.
    pub priority_jump: f64,
    /// Deadline. Among the requests of a tenant with equal strict priority, earlier deadlines go first and missing ones
    /// last.
    pub due: Option<Timestamp>,
    /// Arrival time.
    pub arrival: Timestamp,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens cached on the best eligible rank; at most `prompt_tokens`.
    pub cached_tokens: u32,
}

impl QueueEntry {
    /// Number of tokens to compute.
    #[must_use]
    pub fn uncached_tokens(&self) -> u32 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }

    /// Cost of a dispatch for the class: the uncached tokens, at least 1.
    #[must_use]
    pub fn cost_tokens(&self) -> u32 {
        self.uncached_tokens().max(1)
    }

    /// Score; higher values go first. Finite, and never -0, which would not compare equal to 0.
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

/// Position of a request among its tenant's requests in a class; smaller keys go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OrderKey {
    pub(super) strict_priority: Reverse<u32>,
    /// The maximum timestamp represents a missing deadline.
    due: Timestamp,
    score: Score,
    /// Number of the insertion into the queue. Unique, so the following fields never affect the order.
    pub(super) sequence: u64,
    /// Request id.
    pub(super) id: u64,
    /// Cost of the dispatch for the tenant and the class.
    pub(super) cost_tokens: u32,
}

impl OrderKey {
    /// Smaller than every other key.
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

/// A score with inverted order: higher values go first.
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

    /// Whether `first` goes before `second`, independent of the order of insertion.
    fn precedes(order: QueueOrder, first: QueueEntry, second: QueueEntry) -> bool {
        OrderKey::new(order, &first, 2, 2) < OrderKey::new(order, &second, 1, 1)
            && OrderKey::new(order, &first, 1, 1) < OrderKey::new(order, &second, 2, 2)
    }

    #[test]
    fn scores_match_the_worked_examples() {
        assert_eq!(arrived(10, 0.0).score(QueueOrder::Fcfs), -10.0);
        assert_eq!(arrived(12, 5.0).score(QueueOrder::Fcfs), -7.0);
        assert!(precedes(QueueOrder::Fcfs, arrived(12, 5.0), arrived(10, 0.0)));
        assert!(precedes(QueueOrder::Lcfs, arrived(12, 0.0), arrived(10, 0.0)));
        assert!(precedes(QueueOrder::Lcfs, arrived(10, 3.0), arrived(12, 0.0)));
        let warm = QueueEntry { prompt_tokens: 4096, cached_tokens: 3584, ..QueueEntry::default() };
        let cold = QueueEntry { prompt_tokens: 1024, ..QueueEntry::default() };
        assert_eq!((warm.score(QueueOrder::Wspt), cold.score(QueueOrder::Wspt)), (1.0 / 512.0, 1.0 / 1024.0));
        assert!(precedes(QueueOrder::Wspt, warm, cold));
        let jumps = QueueEntry { priority_jump: 3.0, ..cold };
        assert_eq!(jumps.score(QueueOrder::Wspt), 4.0 / 1024.0);
        assert_eq!(
            QueueEntry { cached_tokens: 7, prompt_tokens: 5, ..QueueEntry::default() }.score(QueueOrder::Wspt),
            1.0
        );
    }

    #[test]
    fn scores_are_comparable_for_every_jump() {
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
                OrderKey::FIRST
                    < OrderKey::new(order, &QueueEntry { priority_jump: f64::INFINITY, ..QueueEntry::default() }, 0, 0)
            );
        }
    }
}
