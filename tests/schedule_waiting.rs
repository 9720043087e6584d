//! Guarantees of the scheduler for queued requests, under random histories and by examples.
//!
//! `PROPTEST_CASES` sets the number of histories; a failure prints its seed.

use std::time::Duration;

use pointsman::config::{QueueClass, QueueOrder};
use pointsman::internals::config::QueueConfig;
use pointsman::internals::protocol::BookingId;
use pointsman::internals::schedule::{Input, Purpose, ResolvedOptions, Target};
use pointsman::protocol::WorkerId;
use pointsman::test_support::{RequestOutcome, SampleRequest, SimulatedFleet, mix, rank};
use pointsman::{Pin, PinMode, RouterConfig};
use proptest::prelude::*;

use crate::effort::effort;
use crate::fleet::config;
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
fn a_hundred_thousand_steps_end_with_empty_state() {
    let (mut waited, mut refreshed) = (0, 0);
    for history in 0..20 {
        let mut world = World::new(history);
        (0..5_000).for_each(|n| world.step(history << 32 | n));
        world.finish();
        waited += world.waited;
        refreshed += world.refreshed;
    }
    assert!(waited > 1_000 && refreshed > 100, "{waited} waited, {refreshed} were refreshed");
}

/// A rank is busy with any prefill, so requests are served one at a time after the previous prefill completes.
fn one_at_a_time(classes: &[(&str, u32)]) -> RouterConfig {
    let class = |(name, quantum_tokens): &(&str, u32)| QueueClass {
        busy_prefill_tokens: Some(0),
        quantum_tokens: *quantum_tokens,
        ..QueueClass::named(*name)
    };
    RouterConfig {
        block_size: Some(1),
        queue: QueueConfig { classes: classes.iter().map(class).collect(), ..config().queue },
        ..config()
    }
}

fn of_class(class: &str, blocks: u32) -> SampleRequest {
    let options = ResolvedOptions { policy_class: Some(class.into()), ..ResolvedOptions::default() };
    SampleRequest { blocks, ..SampleRequest::from(options) }
}

fn complete(fleet: &mut SimulatedFleet, id: u64) {
    fleet.complete_prefill(id);
    fleet.wake();
}

fn finish(fleet: &mut SimulatedFleet, id: u64) {
    fleet.free(id);
    fleet.wake();
}

/// Classes with permanently queued requests for a single rank.
struct Backlog {
    fleet: SimulatedFleet,
    names: Vec<String>,
    costs: Vec<(u32, u32)>,
    classes: Vec<usize>,
    last: u64,
}

impl Backlog {
    fn new(quanta: &[u32], costs: Vec<(u32, u32)>) -> Self {
        let names: Vec<String> = (0..quanta.len()).map(|class| format!("class-{class}")).collect();
        let classes: Vec<(&str, u32)> = names.iter().map(String::as_str).zip(quanta.iter().copied()).collect();
        let mut fleet = SimulatedFleet::new(one_at_a_time(&classes), 1);
        fleet.occupy(1_000_000, 0, 1);
        let mut backlog = Self { fleet, names, costs, classes: Vec::new(), last: 1_000_000 };
        (0..quanta.len() * 3).for_each(|n| backlog.request(n % quanta.len()));
        backlog
    }

    fn cost(&self, id: u64) -> u32 {
        let (least, most) = self.costs[self.classes[id as usize]];
        least + (mix(id) % u64::from(most - least + 1)) as u32
    }

    fn request(&mut self, class: usize) {
        let id = self.classes.len() as u64;
        self.classes.push(class);
        // A pinned request waits in a separate lane with the same share.
        let mut sample = of_class(&self.names[class], self.cost(id));
        let pin = Pin { worker: WorkerId(0), rank: None, mode: PinMode::Hard };
        sample.options.constraints.pin = id.is_multiple_of(3).then_some(pin);
        self.fleet.request(id, &sample);
    }

    /// Ends the running request, which sends the next one. Returns its class and cost.
    fn send(&mut self) -> (usize, u64) {
        self.fleet.outcomes.clear();
        finish(&mut self.fleet, self.last);
        let [sent] = self.fleet.booked()[..] else { panic!("one is sent at a time: {:?}", self.fleet.outcomes) };
        self.last = sent;
        let class = self.classes[sent as usize];
        self.request(class);
        (class, u64::from(self.cost(sent)))
    }
}

fn costs() -> impl Strategy<Value = (u32, u32)> {
    (1u32..300, 1u32..300).prop_map(|(a, b)| (a.min(b), a.max(b)))
}

proptest! {
    #![proptest_config(effort(24, "tests/schedule_waiting.proptest-regressions"))]

    #[test]
    fn backlogged_classes_share_by_quantum(classes in prop::collection::vec((50u32..200, costs()), 2..4)) {
        let (quanta, costs): (Vec<u32>, Vec<_>) = classes.into_iter().unzip();
        let all_quanta: u64 = quanta.iter().map(|quantum| u64::from(*quantum)).sum();
        let mut backlog = Backlog::new(&quanta, costs);
        let mut sent = vec![0; quanta.len()];
        let rounds = 60 * 300 / u64::from(*quanta.iter().min().unwrap()) + 60;
        while sent.iter().sum::<u64>() < rounds * all_quanta {
            let (class, cost) = backlog.send();
            sent[class] += cost;
        }
        let all: u64 = sent.iter().sum();
        for (sent, quantum) in sent.iter().zip(&quanta) {
            let (share, due) = (*sent as f64 / all as f64, f64::from(*quantum) / all_quanta as f64);
            prop_assert!((share / due - 1.0).abs() < 0.02, "{share} of the tokens sent, {due} of the quanta");
        }
    }

    /// The limit that the queue documents.
    #[test]
    fn no_class_starves(classes in prop::collection::vec((1u32..200, costs()), 2..4)) {
        let (quanta, costs): (Vec<u32>, Vec<_>) = classes.into_iter().unzip();
        let bound = |class: usize| -> u64 {
            let quanta_needed = u64::from(costs[class].1.div_ceil(quanta[class]));
            let others = (0..quanta.len()).filter(|other| *other != class);
            let saved = |other: usize| u64::from(quanta[other].max(costs[other].1) - 1);
            others.map(|other| saved(other) + quanta_needed * u64::from(quanta[other])).sum()
        };
        let mut backlog = Backlog::new(&quanta, costs.clone());
        let mut passed = vec![0; quanta.len()];
        for _ in 0..300 {
            let (sent, cost) = backlog.send();
            for (class, passed) in passed.iter_mut().enumerate() {
                *passed = if class == sent { 0 } else { *passed + cost };
                prop_assert!(*passed <= bound(class), "{passed} tokens passed class {class}");
            }
        }
    }
}

#[test]
fn class_shares_match_the_worked_example() {
    let mut backlog = Backlog::new(&[512, 128], vec![(128, 128); 2]);
    let first = (0..320).filter(|_| backlog.send().0 == 0).count();
    assert!((254..=257).contains(&first), "{first} of 320");
}

#[test]
fn half_of_ten_thousand_waiting_requests_are_cancelled_and_the_rest_served_in_order() {
    let mut fleet = SimulatedFleet::new(one_at_a_time(&[("only", 2_048)]), 1);
    fleet.occupy(20_000, 0, 1);
    let blocks = |id: u64| 1 + (mix(id) % 5) as u32;
    let mut depth = (0, 0);
    for id in 0..10_000 {
        fleet.now = fleet.now + Duration::from_micros(1);
        fleet.request(id, &SampleRequest { blocks: blocks(id), ..SampleRequest::default() });
        depth = (depth.0 + 1, depth.1 + u64::from(blocks(id)));
    }
    let depth_of = |fleet: &SimulatedFleet| {
        let (_, depth) = fleet.schedule.depths().next().expect("the only class");
        (depth.requests, depth.raw_tokens)
    };
    assert_eq!(depth_of(&fleet), depth);
    let mut order: Vec<u64> = (0..10_000).collect();
    order.sort_unstable_by_key(|id| mix(*id));
    let (cancelled, mut kept) = (order[..5_000].to_vec(), order[5_000..].to_vec());
    for id in cancelled {
        fleet.cancel(id);
        depth = (depth.0 - 1, depth.1 - u64::from(blocks(id)));
        assert_eq!(depth_of(&fleet), depth);
        assert!(matches!(fleet.outcomes.last(), Some((last, RequestOutcome::Cancelled)) if *last == id));
    }
    fleet.outcomes.clear();
    let mut running = 20_000;
    kept.sort_unstable();
    for id in kept {
        finish(&mut fleet, running);
        let [(sent, RequestOutcome::Booked(..))] = fleet.outcomes[..] else {
            panic!("one at a time: {:?}", fleet.outcomes)
        };
        assert_eq!(sent, id, "first come, first served");
        fleet.outcomes.clear();
        running = sent;
    }
    finish(&mut fleet, running);
    assert_eq!((depth_of(&fleet), fleet.schedule.pending(), fleet.schedule.next_wake()), ((0, 0), 0, None));
    assert!(fleet.ranks[0].active.is_empty());
}

#[test]
fn aged_overlaps_are_refreshed_once_per_age_and_reorder_the_queue() {
    let wspt = QueueClass { order: QueueOrder::Wspt, ..one_at_a_time(&[("only", 2_048)]).queue.classes[0].clone() };
    let config = RouterConfig {
        queue: QueueConfig { classes: vec![wspt], overlap_refresh_after_ms: 100, ..config().queue },
        ..config()
    };
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

/// A request selected for a rank that is drained during the load query is queued like a new one.
#[test]
fn requests_that_find_all_ranks_busy_are_queued_like_arrivals() {
    let options = |do_not_queue| ResolvedOptions { do_not_queue, ..ResolvedOptions::default() };
    let limited = |requests_max_per_rank| {
        let class = one_at_a_time(&[("only", 2_048)]).queue.classes[0].clone();
        RouterConfig {
            queue: QueueConfig { classes: vec![QueueClass { requests_max_per_rank, ..class }], ..config().queue },
            ..config()
        }
    };
    let asked_about = |config: RouterConfig, sample: &SampleRequest| {
        let mut fleet = SimulatedFleet::new(config, 2);
        // Rank 0 has the prompt active but nothing to prefill, so it needs a load query. Rank 1 is busy.
        fleet.request(80, &SampleRequest { cached: vec![(0, 4)], ..SampleRequest::default() });
        fleet.complete_prefill(80);
        let busy = Target::Exactly { rank: rank(1), cached_tokens: None, expected_duration: None };
        fleet.request(81, &SampleRequest { target: busy, waits: false, prompt: 2, ..SampleRequest::default() });
        fleet.responds_at_once = false;
        fleet.request(0, sample);
        assert_eq!((fleet.open_queries.len(), fleet.worker(80)), (1, 0));
        fleet.drain(0);
        fleet.respond(&[]);
        fleet.settle();
        fleet
    };
    assert_eq!(asked_about(limited(None), &SampleRequest::default()).waiting(), 1);
    let refused = asked_about(limited(None), &SampleRequest::from(options(true))).rejection(0).to_string();
    assert!(refused.starts_with("class only takes no more waiting requests: limit do_not_queue"), "{refused}");
    let refused = asked_about(limited(Some(0)), &SampleRequest::default()).rejection(0).to_string();
    assert!(refused.starts_with("class only takes no more waiting requests: limit requests is 0"), "{refused}");
    for purpose in [Purpose::Book, Purpose::Report] {
        let fleet = asked_about(limited(None), &SampleRequest { purpose, waits: false, ..SampleRequest::default() });
        assert_eq!((fleet.worker(0), fleet.waiting()), (1, 0), "not queued");
    }
    let fleet = asked_about(
        limited(None),
        &SampleRequest { purpose: Purpose::Explain, waits: false, ..SampleRequest::default() },
    );
    assert_eq!(fleet.explanation(0).rejection.as_deref(), Some("busy"));
}

#[test]
fn deadlines_expire_during_queries_for_others() {
    let mut fleet = SimulatedFleet::new(one_at_a_time(&[("only", 2_048)]), 2);
    fleet.occupy(90, 0, 1);
    fleet.occupy(91, 1, 1);
    let due = |fleet: &SimulatedFleet, millis: u64| {
        let due = Some(fleet.now + Duration::from_millis(millis));
        SampleRequest { prompt: 1_090, ..SampleRequest::from(ResolvedOptions { due, ..ResolvedOptions::default() }) }
    };
    let (soon, later) = (due(&fleet, 5), due(&fleet, 6));
    fleet.request(0, &soon);
    assert_eq!((fleet.waiting(), fleet.schedule.next_wake()), (1, soon.options.due));
    fleet.responds_at_once = false;
    fleet.request(1, &SampleRequest { purpose: Purpose::LoadSnapshot, prompt: 1_090, ..SampleRequest::default() });
    fleet.request(2, &later);
    assert_eq!(fleet.open_queries.len(), 1, "the third is behind the load snapshot");
    fleet.now = fleet.now + Duration::from_millis(5);
    fleet.wake();
    assert_eq!(fleet.rejection(0).to_string(), "the deadline passed after 5 ms");
    fleet.now = fleet.now + Duration::from_millis(1);
    fleet.request(3, &later);
    assert_eq!(fleet.rejection(3).to_string(), "the deadline passed after 0 ms", "expired on arrival");
    fleet.respond(&[]);
    assert_eq!(fleet.rejection(2).to_string(), "the deadline passed after 6 ms");
    assert!(fleet.open_queries.is_empty(), "no query for expired requests");
}

#[test]
fn requests_can_be_cancelled_in_every_state() {
    let mut fleet = SimulatedFleet::new(one_at_a_time(&[("only", 2_048)]), 1);
    fleet.request(90, &SampleRequest { cached: vec![(0, 64)], blocks: 4, ..SampleRequest::default() });
    fleet.complete_prefill(90);
    fleet.responds_at_once = false;
    fleet.request(0, &SampleRequest::default()); // in flight
    fleet.request(1, &SampleRequest::default()); // queued behind it
    assert_eq!(fleet.open_queries.len(), 1);
    fleet.cancel(1);
    assert!(matches!(fleet.outcome(1), RequestOutcome::Cancelled));
    fleet.cancel(0);
    assert!(!fleet.is_complete(0), "its replies are pending");
    fleet.respond(&[]);
    assert!(matches!(fleet.outcome(0), RequestOutcome::Cancelled));
    fleet.cancel(0);
    fleet.cancel(77);
    assert_eq!((fleet.outcomes.len(), fleet.schedule.pending()), (3, 0));
}
