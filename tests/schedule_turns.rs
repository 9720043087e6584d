//! Turns of the queues of several replicas: their older requests precede.

use std::time::Duration;

use pointsman::config::QueueClass;
use pointsman::internals::config::QueueConfig;
use pointsman::protocol::Timestamp;
use pointsman::test_support::{SampleRequest, SimulatedFleet};
use pointsman::{Rejection, internals::schedule::ResolvedOptions};

use crate::fleet::{config, config_with};

/// Ranks with one running prefill each, with the ids 1,000 and up. A rank is busy with any prefill.
fn busy_fleet(ranks: u64) -> SimulatedFleet {
    let queue = QueueConfig { threshold: Some(0.0), ..config().queue };
    let mut fleet = SimulatedFleet::new(config_with(|c| c.queue = queue), ranks as usize);
    (0..ranks).for_each(|worker| fleet.occupy(1_000 + worker, worker, 1));
    fleet
}

fn before(fleet: &SimulatedFleet, millis: u64) -> Timestamp {
    fleet.now - Duration::from_millis(millis)
}

fn request(fleet: &mut SimulatedFleet, id: u64) {
    fleet.request(id, &SampleRequest { prompt: id, ..SampleRequest::default() });
}

fn open(fleet: &mut SimulatedFleet, worker: u64) {
    fleet.complete_prefill(1_000 + worker);
    fleet.wake();
}

#[test]
fn each_replica_has_a_turn_if_enough_ranks_are_open() {
    let mut fleet = busy_fleet(3);
    request(&mut fleet, 0);
    fleet.queue_heads.publish_peers(&[before(&fleet, 9), before(&fleet, 5)]);
    open(&mut fleet, 0);
    open(&mut fleet, 1);
    assert!(!fleet.is_complete(0), "two ranks for two replicas");
    open(&mut fleet, 2);
    assert!(fleet.is_complete(0));
}

#[test]
fn an_arrival_waits_behind_older_requests_of_other_replicas() {
    let mut fleet = busy_fleet(2);
    fleet.queue_heads.publish_peers(&[before(&fleet, 5)]);
    fleet.complete_prefill(1_000);
    request(&mut fleet, 0);
    assert!(!fleet.is_complete(0));
    // Requests that cannot wait are placed.
    fleet.request(1, &SampleRequest { prompt: 1, waits: false, ..SampleRequest::default() });
    assert_eq!(fleet.worker(1), 0);
    fleet.complete_prefill(1);
    let options = ResolvedOptions { do_not_queue: true, ..ResolvedOptions::default() };
    fleet.request(2, &SampleRequest { prompt: 2, ..SampleRequest::from(options) });
    assert_eq!(fleet.worker(2), 0);
}

/// Its request may be restricted to busy ranks. It is passed once, not once per request.
#[test]
fn a_replica_that_does_not_use_its_turn_is_passed() {
    let mut fleet = busy_fleet(2);
    request(&mut fleet, 0);
    request(&mut fleet, 1);
    fleet.queue_heads.publish_peers(&[before(&fleet, 5)]);
    open(&mut fleet, 0);
    assert!(!fleet.is_complete(0));
    let mut wakes = 0;
    while !fleet.is_complete(0) {
        fleet.now = fleet.schedule.next_wake().expect("the wait for the other replica ends");
        fleet.wake();
        wakes += 1;
        assert!(wakes < 20, "the wait is bounded");
    }
    assert!(fleet.now.since(Timestamp(1_000_000_000)) <= Duration::from_millis(60), "{:?}", fleet.now);
    assert!(!fleet.is_complete(1), "the rank is busy again");
    fleet.complete_prefill(0);
    fleet.wake();
    assert!(fleet.is_complete(1), "the other replica was passed");
    // A later request of that replica has its turn again.
    let late = fleet.now + Duration::from_millis(1);
    fleet.now = fleet.now + Duration::from_millis(2);
    fleet.queue_heads.publish_peers(&[late]);
    fleet.complete_prefill(1);
    request(&mut fleet, 3);
    assert!(!fleet.is_complete(3));
}

#[test]
fn an_arrival_that_finds_the_queue_full_is_not_rejected_because_of_other_replicas() {
    let class = QueueClass { requests_max_per_rank: Some(1), ..QueueClass::named("only") };
    let queue = QueueConfig { threshold: Some(0.0), classes: vec![class], ..config().queue };
    let mut fleet = SimulatedFleet::new(config_with(|c| c.queue = queue), 1);
    fleet.occupy(1_000, 0, 1);
    request(&mut fleet, 0);
    request(&mut fleet, 1);
    assert!(matches!(fleet.rejection(1), Rejection::Backpressure(_)), "the rank is busy");
    fleet.queue_heads.publish_peers(&[before(&fleet, 5)]);
    open(&mut fleet, 0);
    assert!(!fleet.is_complete(0));
    request(&mut fleet, 2);
    assert_eq!(fleet.worker(2), 0);
}
