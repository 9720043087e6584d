//! Guarantees of the scheduler for queued requests, under random histories and by examples.
//!
//! `PROPTEST_CASES` sets the number of histories; a failure prints its seed.

use std::time::Duration;

use pointsman::config::{QueueClass, QueueOrder};
use pointsman::internals::protocol::BookingId;
use pointsman::internals::schedule::Input;
use pointsman::test_support::{SampleRequest, SimulatedFleet};
use proptest::prelude::*;

use crate::effort::effort;
use crate::fleet::config_with;
use crate::world::World;

proptest! {
    #![proptest_config(effort(24, "tests/schedule_waiting.proptest-regressions"))]

    #[test]
    fn every_request_leaves_once_with_a_valid_result(
        seed: u64, steps in prop::collection::vec(any::<u64>(), 1..2_000),
    ) {
        let mut world = World::new(seed);
        steps.into_iter().for_each(|noise| world.step(noise));
        world.finish();
    }
}

#[test]
fn histories_contain_waits_and_refreshes() {
    let (mut waited, mut refreshed) = (0, 0);
    for history in 0..10 {
        let mut world = World::new(history);
        (0..5_000).for_each(|n| world.step(history << 32 | n));
        world.finish();
        waited += world.waited;
        refreshed += world.refreshed;
    }
    assert!(waited > 500 && refreshed > 20, "{waited} waited, {refreshed} were refreshed");
}

fn complete(fleet: &mut SimulatedFleet, id: u64) {
    fleet.complete_prefill(id);
    fleet.wake();
}

#[test]
fn aged_overlaps_are_refreshed_once_per_age_and_reorder_the_queue() {
    let wspt = QueueClass { busy_prefill_tokens: Some(0), order: QueueOrder::Wspt, ..QueueClass::named("only") };
    let config = config_with(|c| {
        c.queue.classes = vec![wspt];
        c.queue.overlap_refresh_after_ms = 100;
    });
    let mut fleet = SimulatedFleet::new(config, 1);
    fleet.occupy(90, 0, 1);
    let after = |fleet: &mut SimulatedFleet, millis: u64| {
        fleet.now = fleet.now + Duration::from_millis(millis);
        fleet.wake();
        std::mem::take(&mut fleet.refreshes)
    };
    fleet.request(0, &SampleRequest { blocks: 8, refreshes: true, ..SampleRequest::default() });
    fleet.request(1, &SampleRequest { blocks: 4, refreshes: false, ..SampleRequest::default() });
    let asked_at = fleet.now;
    assert_eq!(fleet.schedule.next_wake(), Some(asked_at + Duration::from_millis(100)));
    assert_eq!(after(&mut fleet, 99), []);
    assert_eq!(after(&mut fleet, 1), [(BookingId(0), 8)]);
    assert_eq!(after(&mut fleet, 50), []);
    let overlaps = fleet.overlaps(&[(0, 6)]);
    fleet.step(Input::Overlaps { booking: BookingId(0), overlaps });
    assert_eq!(fleet.schedule.depths().map(|(_, depth)| depth.cached_tokens).sum::<u64>(), 6 * 16);
    assert_eq!(after(&mut fleet, 99), [], "one age since the last refresh");
    assert_eq!(after(&mut fleet, 1), [(BookingId(0), 8)]);
    assert_eq!(after(&mut fleet, 99), []);
    assert_eq!(after(&mut fleet, 1), [(BookingId(0), 8)], "repeated after a lost reply");
    complete(&mut fleet, 90);
    assert_eq!(fleet.booked(), [90, 0], "2 blocks are fewer than 4");
    assert_eq!(fleet.decision(0).overlap().device_blocks, 6);
    complete(&mut fleet, 0);
    assert_eq!(fleet.booked(), [90, 0, 1]);
    assert_eq!((after(&mut fleet, 1_000), fleet.schedule.next_wake()), (vec![], None));
}
