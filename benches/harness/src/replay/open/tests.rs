use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::replay::closed::tests::{INFLIGHT, Strict, on_two_threads};

fn gaps(seed: u64) -> Gaps {
    Gaps::poisson(NonZeroU32::new(20_000).expect("not zero"), seed)
}

fn run_strict(target: Strict) -> Result<Figures, Failed> {
    on_two_threads(target, async |state| run(state, INFLIGHT, gaps(3)).await)
}

#[test]
fn every_booking_ends_and_events_stay_in_order_at_a_rate() {
    let target = Strict::new(None);
    let (booked, booked_max) = (Arc::clone(&target.booked), Arc::clone(&target.booked_max));
    let outcome = run_strict(target).expect("runs");
    assert!(booked.lock().expect("alive").is_empty());
    assert!(booked_max.load(Relaxed) > INFLIGHT as u64, "the loop frees only above the limit");
    assert_eq!(outcome.requests, 200);
    assert!(outcome.hit_rate > 0.0 && outcome.hit_rate < 1.0 && outcome.event_blocks_per_request > 1.0);
    assert!((1.0..2.0).contains(&outcome.load_max_over_mean), "{}", outcome.load_max_over_mean);
}

#[test]
fn gaps_have_the_given_mean_and_depend_on_the_seed() {
    let total = |seed, part| gaps(seed).of(part).take(20_000).sum::<Duration>();
    let seconds = total(3, 0).as_secs_f64();
    assert!((0.97..1.03).contains(&seconds), "{seconds}");
    assert_eq!(total(3, 0), total(3, 0));
    assert_ne!(total(3, 0), total(3, 1));
    assert_ne!(total(3, 0), total(4, 0));
    let even = Gaps::even(NonZeroU32::new(500).expect("not zero"));
    assert!(even.of(0).take(3).all(|gap| gap == Duration::from_millis(2)));
}
