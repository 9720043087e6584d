//! Examples, including the worked examples of the documentation. `tests/queue_*.rs` contain the property tests.

use std::time::Duration;

use super::*;
use crate::config::{QueueConfig, QueueOrder};

const ANY: LaneKey = LaneKey(0);

fn secs(secs: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(secs)
}

fn class(n: usize, order: QueueOrder, quantum_tokens: u32) -> QueueClass {
    QueueClass { order, quantum_tokens, ..QueueClass::named(format!("class-{n}")) }
}

fn config_of(queue_classes: Vec<QueueClass>) -> RouterConfig {
    let config = RouterConfig {
        queue: QueueConfig { classes: queue_classes, ..QueueConfig::default() },
        ..RouterConfig::default()
    };
    config.validate().expect("valid configuration");
    config
}

fn prompt(prompt_tokens: u32) -> QueueEntry {
    QueueEntry { prompt_tokens, ..QueueEntry::default() }
}

#[test]
fn worked_examples_leave_in_order() {
    let order = |queue_policy, requests: [QueueEntry; 2]| {
        let mut queue = Queue::new(&RouterConfig {
            queue: QueueConfig { order: queue_policy, ..QueueConfig::default() },
            ..RouterConfig::default()
        });
        for (id, entry) in requests.into_iter().enumerate() {
            queue.push(id as u64, ClassId(0), ANY, entry, ());
        }
        [0; 2].map(|_| queue.pop(secs(20), |_, _, ()| true).unwrap().0)
    };
    let arrived = |arrival, priority_jump| QueueEntry { arrival, priority_jump, ..prompt(100) };
    assert_eq!(order(QueueOrder::Fcfs, [arrived(secs(10), 0.0), arrived(secs(12), 5.0)]), [1, 0]);
    assert_eq!(order(QueueOrder::Fcfs, [arrived(secs(10), 0.0), arrived(secs(12), 1.0)]), [0, 1]);
    let cached = |prompt_tokens, cached_tokens| QueueEntry { cached_tokens, ..prompt(prompt_tokens) };
    assert_eq!(order(QueueOrder::Wspt, [cached(1024, 0), cached(4096, 3584)]), [1, 0]);
}

#[test]
fn removals_keep_order_and_depth() {
    let mut queue = Queue::new(&RouterConfig::default());
    let class = queue.class_of(None, 0).unwrap();
    let of =
        |id: u64| QueueEntry { arrival: Timestamp(id * 1_000_000), cached_tokens: 16, ..prompt(32 + id as u32 % 7) };
    // Inserted in a permuted order: 7,919 and 10,000 are coprime.
    for id in (0..10_000u64).map(|n| n * 7_919 % 10_000) {
        queue.push(id, class, LaneKey(id % 3), of(id), id);
    }
    let mut depth = queue.depth(class);
    assert_eq!((depth.requests, depth.cached_tokens, depth.oldest), (10_000, 160_000, Some(Timestamp(0))));
    for id in (0..10_000u64).rev().filter(|id| id % 2 == 0) {
        assert_eq!(queue.remove(id), Some(id));
        assert_eq!(queue.remove(id), None);
        depth.requests -= 1;
        depth.raw_tokens -= u64::from(of(id).prompt_tokens);
        depth.cached_tokens -= 16;
        depth.oldest = Some(of(u64::from(id == 0)).arrival);
        assert_eq!(queue.depth(class), depth);
    }
    queue.check_invariants();
    for id in (1..10_000).step_by(2) {
        assert_eq!(queue.pop(secs(10), |_, _, _| true), Some((id, id)));
    }
    assert_eq!(queue.depth(class), Depth::default());
}

#[test]
fn lanes_do_not_block_each_other() {
    let mut queue = Queue::new(&RouterConfig::default());
    let class = ClassId(0);
    let urgent = QueueEntry { strict_priority: 9, ..prompt(10) };
    queue.push(1, class, LaneKey(5), urgent, "pinned");
    queue.push(2, class, LaneKey(5), urgent, "behind it");
    queue.push(3, class, ANY, prompt(10), "anywhere");
    let lanes: Vec<_> = queue.lanes().map(|(_, lane, head)| (lane, *head)).collect();
    assert_eq!(lanes, [(LaneKey(5), "pinned"), (ANY, "anywhere")]);
    let mut checked = Vec::new();
    let popped = queue.pop(secs(0), |_, lane, head| {
        checked.push(*head);
        lane == ANY
    });
    assert_eq!(popped, Some((3, "anywhere")));
    assert_eq!(checked, ["pinned", "anywhere"], "each lane is checked once");
    assert_eq!(queue.pop(secs(0), |_, lane, _| lane == ANY), None);
    assert!(queue.is_lane_empty(class, ANY) && !queue.is_lane_empty(class, LaneKey(5)));
    assert_eq!(queue.take_lane(class, LaneKey(5)), [(1, "pinned"), (2, "behind it")]);
    assert!(queue.is_empty());
}

#[test]
fn limits_scale_with_the_number_of_ranks() {
    let class = QueueClass {
        requests_max_per_rank: Some(3),
        raw_tokens_max_per_rank: Some(100),
        cached_tokens_max_per_rank: Some(20),
        ..QueueClass::named("batch")
    };
    let mut queue = Queue::new(&config_of(vec![class]));
    let refused = |queue: &Queue<()>, ranks| queue.check_limits(ClassId(0), ranks, secs(0)).unwrap_err();
    let rejection = |limit, current, max| Backpressure {
        class: "batch".into(),
        limit,
        current,
        max,
        retry_after: RETRY_AFTER_UNKNOWN,
    };
    queue.push(1, ClassId(0), ANY, prompt(150), ());
    assert_eq!(refused(&queue, 1), rejection(LimitKind::RawTokens, 150, 100));
    assert_eq!(queue.check_limits(ClassId(0), 2, secs(0)), Ok(()), "twice the ranks, twice the limit");
    queue.set_cached_tokens(1, 40);
    assert_eq!(refused(&queue, 2), rejection(LimitKind::CachedTokens, 40, 40));
    queue.set_cached_tokens(1, 0);
    (2..=6).for_each(|id| queue.push(id, ClassId(0), ANY, prompt(1), ()));
    assert_eq!(refused(&queue, 2), rejection(LimitKind::Requests, 6, 6));
    assert_eq!(queue.do_not_queue(ClassId(0), secs(0)), rejection(LimitKind::DoNotQueue, 6, 0));
    assert_eq!(queue.remove(6), Some(()));
    assert_eq!(queue.check_limits(ClassId(0), 2, secs(0)), Ok(()), "removed requests do not count");
}

#[test]
fn limit_of_zero_rejects_every_request() {
    for (requests, raw_tokens, cached_tokens) in [(Some(0), None, None), (None, Some(0), None), (None, None, Some(0))] {
        let class = QueueClass {
            requests_max_per_rank: requests,
            raw_tokens_max_per_rank: raw_tokens,
            cached_tokens_max_per_rank: cached_tokens,
            ..QueueClass::named("batch")
        };
        let refused = Queue::<()>::new(&config_of(vec![class])).check_limits(ClassId(0), 8, secs(0)).unwrap_err();
        assert_eq!((refused.current, refused.max, refused.retry_after), (0, 0, RETRY_AFTER_UNKNOWN));
    }
}

#[test]
fn rejection_contains_the_expected_delay() {
    let class = QueueClass { requests_max_per_rank: Some(10), ..QueueClass::named("batch") };
    let mut queue = Queue::new(&config_of(vec![class]));
    (0..40).for_each(|id| queue.push(id, ClassId(0), ANY, prompt(100), ()));
    (1..=20).for_each(|second| assert!(queue.pop(secs(second), |_, _, ()| true).is_some()));
    let refused = queue.check_limits(ClassId(0), 1, secs(20)).unwrap_err();
    assert_eq!((refused.current, refused.max), (20, 10));
    assert_eq!(refused.retry_after.as_millis(), 11_000, "eleven must leave, one each second");
}

#[test]
fn retry_delay_excludes_time_without_waiting_requests() {
    let class = QueueClass { requests_max_per_rank: Some(1), ..QueueClass::named("batch") };
    let mut queue = Queue::new(&config_of(vec![class]));
    let arrived = |arrival| QueueEntry { arrival, ..prompt(100) };
    for start in [1_000, 2_000] {
        (0..2).for_each(|id| queue.push(id, ClassId(0), ANY, arrived(secs(start)), ()));
        (1..=2).for_each(|second| assert!(queue.pop(secs(start + second), |_, _, ()| true).is_some()));
    }
    queue.push(2, ClassId(0), ANY, arrived(secs(3_000)), ());
    let refused = queue.check_limits(ClassId(0), 1, secs(3_000)).unwrap_err();
    assert_eq!(refused.retry_after.as_millis(), 1_000, "one leaves each second");
}

#[test]
fn requests_expire_in_order_of_deadline() {
    let mut queue = Queue::new(&RouterConfig::default());
    let due = |due| QueueEntry { due, ..prompt(10) };
    queue.push(1, ClassId(0), ANY, due(None), ());
    queue.push(2, ClassId(0), ANY, due(Some(secs(7))), ());
    queue.push(3, ClassId(0), ANY, due(Some(secs(5))), ());
    assert_eq!(queue.next_due(), Some(secs(5)));
    assert_eq!(queue.pop_expired(Timestamp(secs(5).0 - 1)), None);
    assert_eq!(queue.pop_expired(secs(5)), Some((3, ())), "a deadline of now is expired");
    assert_eq!(queue.pop_expired(secs(5)), None);
    assert_eq!(queue.remove(2), Some(()));
    assert_eq!((queue.next_due(), queue.len()), (None, 1));
}

#[test]
fn updated_request_moves_and_empty_class_loses_its_deficit() {
    let mut queue = Queue::new(&config_of(vec![class(0, QueueOrder::Wspt, 1000), class(1, QueueOrder::Wspt, 1)]));
    queue.push(1, ClassId(0), ANY, prompt(300), ());
    queue.push(2, ClassId(0), ANY, prompt(200), ());
    queue.set_cached_tokens(1, 250);
    queue.set_cached_tokens(77, 250);
    assert_eq!(queue.pop(secs(0), |_, _, ()| true), Some((1, ())));
    // The class keeps a deficit of 950 tokens while it is not empty.
    queue.push(3, ClassId(1), ANY, prompt(1), ());
    queue.push(4, ClassId(0), ANY, prompt(200), ());
    assert_eq!(queue.pop(secs(0), |_, _, ()| true), Some((2, ())), "continues with its deficit");
    assert_eq!(queue.remove(4), Some(()));
    queue.push(5, ClassId(0), ANY, prompt(200), ());
    assert_eq!(queue.pop(secs(0), |_, _, ()| true), Some((3, ())), "an empty class loses its deficit");
    *queue.get_mut(5).unwrap() = ();
    queue.check_invariants();
}

#[test]
#[should_panic(expected = "request 1 waits already")]
fn duplicate_id_panics() {
    let mut queue = Queue::new(&RouterConfig::default());
    queue.push(1, ClassId(0), ANY, prompt(1), ());
    queue.push(1, ClassId(0), ANY, prompt(1), ());
}
