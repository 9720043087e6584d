use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::closed_loop::tests::{SHAPE, Strict, on_two_threads};

const ARRIVALS: Arrivals = Arrivals { per_second: NonZeroU32::new(20_000).expect("not zero"), seed: 3 };

fn run_strict(target: Strict) -> Result<Outcome, LoopError> {
    on_two_threads(async |workload| run(target, workload, SHAPE, ARRIVALS, None, Progress::new(0, "requests")).await)
}

#[test]
fn every_booking_ends_and_events_stay_in_order_at_a_rate() {
    let target = Strict::new(None);
    let (booked, booked_max) = (Arc::clone(&target.booked), Arc::clone(&target.booked_max));
    let outcome = run_strict(target).expect("runs");
    assert!(booked.lock().expect("alive").is_empty());
    assert!(booked_max.load(Relaxed) > SHAPE.inflight as u64, "the loop frees only above the limit");
    assert_eq!((outcome.requests, outcome.route_ns.len()), (200, 200));
    assert!((1..outcome.prompt_blocks).contains(&outcome.cached_blocks));
    assert!(outcome.event_blocks >= outcome.prompt_blocks - outcome.cached_blocks);
    assert!((1.0..2.0).contains(&outcome.load_max_over_mean), "{}", outcome.load_max_over_mean);
}

#[test]
fn the_half_lasts_at_least_until_its_last_scheduled_arrival() {
    let outcome = run_strict(Strict::new(None)).expect("runs");
    let mut gaps = Gaps::new(ARRIVALS, 1);
    let last_arrival: Duration = (0..outcome.requests).map(|_| gaps.next()).sum();
    assert!(outcome.wall >= last_arrival, "{:?} before {last_arrival:?}", outcome.wall);
}

#[test]
fn gaps_have_the_given_mean_and_depend_on_the_seed() {
    let total = |arrivals, half| {
        let mut gaps = Gaps::new(arrivals, half);
        (0..20_000).map(|_| gaps.next()).sum::<Duration>()
    };
    let seconds = total(ARRIVALS, 0).as_secs_f64();
    assert!((0.97..1.03).contains(&seconds), "{seconds}");
    assert_eq!(total(ARRIVALS, 0), total(ARRIVALS, 0));
    assert_ne!(total(ARRIVALS, 0), total(ARRIVALS, 1));
    assert_ne!(total(ARRIVALS, 0), total(Arrivals { seed: 4, ..ARRIVALS }, 0));
}

#[test]
fn a_rejection_names_target_operation_and_request() {
    let error = run_strict(Strict::new(Some("request-250"))).expect_err("refused");
    assert_eq!(error.to_string(), "strict could not route request 250: queue full");
}
