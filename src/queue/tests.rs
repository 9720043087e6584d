//! Examples of the limits. `tests/queue_*.rs` have the property tests of the order.

use std::time::Duration;

use super::*;
use crate::config::queue::QueueConfig;

const ANY: LaneKey = LaneKey(0);

fn secs(secs: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(secs)
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
#[should_panic(expected = "request 1 waits already")]
fn duplicate_id_panics() {
    let mut queue = Queue::new(&RouterConfig::default());
    queue.push(1, ClassId(0), ANY, prompt(1), ());
    queue.push(1, ClassId(0), ANY, prompt(1), ());
}
