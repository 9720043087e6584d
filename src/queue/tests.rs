//! An example of a rule for callers. `tests/queue_*.rs` have the property tests of the order.

use super::*;

#[test]
#[should_panic(expected = "request 1 waits already")]
fn duplicate_id_panics() {
    let mut queue = Queue::new(&RouterConfig::default());
    (0..2).for_each(|_| queue.push(1, ClassId(0), LaneKey(0), QueueEntry::default(), ()));
}
