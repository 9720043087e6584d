//! Recorded decisions, replayed.

use pointsman::{RecordedChoice, Replay, ReplayMode};

use crate::recorded::{Recorded, configs, replayed, settings};
use crate::repetitions::repetitions;

/// Decisions per configuration. A larger number for a longer run.
fn decisions() -> u64 {
    repetitions("RECORDED_DECISIONS", 300)
}

#[test]
fn recorded_decisions_replay_bit_for_bit() {
    for (seed, config) in configs().iter().enumerate() {
        let mut recorded = Recorded::new(config);
        recorded.run(decisions(), seed as u64);
        let name = format!("configuration {seed}, {}", config.policy.name());
        assert!(recorded.booked > decisions() / 3, "{name}: {} bookings", recorded.booked);
        let found = replayed(&recorded.segments, || Replay::new(ReplayMode::Verify, settings));
        let different: Vec<_> = found.iter().filter(|decision| !decision.is_equal).collect();
        assert!(
            different.is_empty(),
            "{name}: {} of {} differ, first {:?}",
            different.len(),
            found.len(),
            different[0]
        );
        let booked =
            found.iter().filter(|decision| decision.books && matches!(decision.recorded, RecordedChoice::Rank { .. }));
        assert_eq!(booked.count() as u64, recorded.booked, "{name}: every booking is recorded");
    }
}
