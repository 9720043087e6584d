use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::replay::closed::tests::{INFLIGHT, Strict, on_two_threads};

#[test]
fn every_booking_ends_and_events_stay_in_order_at_a_rate() {
    let target = Strict::new(None);
    let (booked, booked_max) = (Arc::clone(&target.booked), Arc::clone(&target.booked_max));
    let gaps = Gaps::new(NonZeroU32::new(20_000).expect("not zero"), 3);
    let outcome = on_two_threads(target, async |state| run(state, INFLIGHT, gaps).await).expect("runs");
    assert!(booked.lock().expect("alive").is_empty());
    assert!(booked_max.load(Relaxed) > INFLIGHT as u64, "the loop frees only above the limit");
    assert_eq!(outcome.requests, 200);
    assert!(outcome.hit_rate > 0.0 && outcome.hit_rate < 1.0 && outcome.event_blocks_per_request > 1.0);
    assert!((1.0..2.0).contains(&outcome.load_max_over_mean), "{}", outcome.load_max_over_mean);
}
