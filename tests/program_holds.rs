//! Holds of programs: calls wait while the contexts of other programs fill the caches.

use std::time::Duration;

use pointsman::config::QueueClass;
use pointsman::internals::load::PromptBlocks;
use pointsman::internals::protocol::{BookingId, SequenceHash, Slot};
use pointsman::internals::schedule::{Input, ResolvedOptions};
use pointsman::internals::session::{Claims, PlacedCall};
use pointsman::protocol::Timestamp;
use pointsman::test_support::{RequestOutcome, SampleRequest, SimulatedFleet, rank};
use pointsman::{LimitKind, RankTraits, Rejection, SessionId};
use proptest::prelude::*;

use crate::effort::effort;
use crate::fleet::config_with;

const HOLD: Duration = Duration::from_secs(10);

/// Ranks of this size.
fn fleet(ranks: u64, total_kv_blocks: Option<u32>) -> SimulatedFleet {
    let program_hold_ms = Some(HOLD.as_millis() as u64);
    let config = config_with(|config| {
        config.queue.classes = vec![
            QueueClass { program_hold_ms, ..QueueClass::named("batch") },
            QueueClass { requests_max_per_rank: Some(0), program_hold_ms, ..QueueClass::named("no-wait") },
            QueueClass::named("interactive"),
            QueueClass { program_hold_ms, refuse_program_starts: true, ..QueueClass::named("refusing") },
            QueueClass {
                busy_prefill_tokens: Some(1),
                program_hold_ms,
                refuse_program_starts: true,
                ..QueueClass::named("thorough")
            },
        ];
    });
    let mut fleet = SimulatedFleet::new(config, 0);
    for worker in 0..ranks {
        fleet.admit(rank(worker), RankTraits { total_kv_blocks, ..RankTraits::default() });
    }
    fleet
}

fn session(n: u64) -> SessionId {
    SessionId::new(&format!("p{n}")).expect("short")
}

/// A call of the program with the same number, with a prompt of its own.
fn call(id: u64, blocks: u32) -> SampleRequest {
    let options = ResolvedOptions { session_id: Some(session(id)), program: 1 + id, ..ResolvedOptions::default() };
    SampleRequest { blocks, prompt: 100 + id, options, ..SampleRequest::default() }
}

fn end(fleet: &mut SimulatedFleet, id: u64, is_stop: bool) {
    fleet.free(id);
    fleet.step(Input::Ended { booking: BookingId(id), is_stop });
}

fn pass(fleet: &mut SimulatedFleet, time: Duration) {
    fleet.now = fleet.now + time;
    fleet.wake();
}

#[test]
fn a_call_waits_for_the_claims_of_others_and_leaves_with_their_end() {
    let mut fleet = fleet(2, Some(100));
    (0..2).for_each(|id| fleet.request(id, &call(id, 60)));
    fleet.request(2, &call(2, 50));
    assert_eq!((fleet.booked(), fleet.schedule.holds().0), (vec![0, 1], 1), "50 blocks fit nowhere");
    end(&mut fleet, 0, false);
    assert_eq!(fleet.booked().len(), 2, "its program returns");
    let keep = fleet.schedule.next_wake().expect("the end of the claim").since(fleet.now);
    assert!((150..350).contains(&keep.as_millis()), "{keep:?} are not twice the time of 960 tokens");
    pass(&mut fleet, keep);
    assert_eq!(fleet.worker(2), fleet.worker(0));
    fleet.request(3, &call(3, 50));
    end(&mut fleet, 1, true);
    assert_eq!(fleet.worker(3), fleet.worker(1), "a finished program claims nothing");
    assert_eq!(fleet.schedule.holds(), (0, 2, keep));
    assert!(fleet.schedule.claims().all(|(_, ratio)| ratio == 0.5));
}

#[test]
fn returning_calls_pass_and_small_ones_do_not_wait_for_larger_ones() {
    let mut fleet = fleet(1, Some(100));
    fleet.request(0, &call(0, 60));
    [(1, 60), (2, 30)].into_iter().for_each(|(id, blocks)| fleet.request(id, &call(id, blocks)));
    assert_eq!(fleet.booked(), [0, 2]);
    end(&mut fleet, 0, false);
    fleet.request(3, &SampleRequest { cached: vec![(0, 60)], ..call(3, 80) });
    assert_eq!(fleet.booked(), [0, 2, 3], "three quarters are cached");
    assert_eq!(fleet.schedule.claims().next().map(|(_, ratio)| ratio), Some(1.7), "idle programs keep their claims");
    let mut fleet = self::fleet(1, Some(100));
    fleet.request(0, &call(0, 60));
    end(&mut fleet, 0, false);
    fleet.request(1, &call(1, 60));
    fleet.request(2, &SampleRequest { prompt: 100, options: call(0, 60).options, ..call(2, 62) });
    assert_eq!(fleet.booked(), [0, 2], "its own claim does not count");
}

#[test]
fn a_hold_ends_at_its_limit_and_with_its_caller() {
    let mut fleet = fleet(1, Some(100));
    fleet.request(0, &call(0, 90));
    (1..4).for_each(|id| fleet.request(id, &call(id, 20)));
    fleet.cancel(2);
    assert!(matches!(fleet.outcome(2), RequestOutcome::Cancelled));
    assert_eq!((fleet.waiting(), fleet.schedule.holds().0), (2, 2));
    assert_eq!(fleet.schedule.next_wake(), Some(fleet.now + HOLD));
    pass(&mut fleet, HOLD);
    assert_eq!(fleet.booked(), [0, 1, 3], "placed, not rejected");
    let mut urgent = call(7, 20);
    urgent.options.due = Some(fleet.now + HOLD / 2);
    fleet.request(7, &urgent);
    pass(&mut fleet, HOLD / 2 * 9 / 10);
    assert_eq!(fleet.booked(), [0, 1, 3, 7], "before its deadline");
    for (id, class) in [(4, "no-wait"), (5, "interactive")] {
        let mut placed = call(id, 20);
        placed.options.policy_class = Some(class.into());
        fleet.request(id, &placed);
        assert_eq!(fleet.booked().last(), Some(&id), "{class} holds nobody");
    }
}

#[test]
fn a_class_can_refuse_programs_that_would_have_to_wait() {
    let of_program = |id, program, blocks| {
        let mut call = call(id, blocks);
        (call.options.program, call.options.policy_class) = (program, Some("refusing".into()));
        call
    };
    let mut fleet = fleet(1, Some(100));
    fleet.request(0, &of_program(0, 1, 60));
    fleet.request(1, &of_program(1, 2, 50));
    let RequestOutcome::Rejected(Rejection::Backpressure(refused)) = fleet.outcome(1) else { panic!("no room") };
    assert_eq!((refused.limit, &*refused.class), (LimitKind::ProgramStarts, "refusing"));
    end(&mut fleet, 0, false);
    fleet.request(2, &of_program(2, 3, 50));
    let RequestOutcome::Rejected(Rejection::Backpressure(refused)) = fleet.outcome(2) else { panic!("claimed") };
    let keep = refused.retry_after;
    assert!((150..350).contains(&keep.as_millis()), "{keep:?} are not twice the time of 960 tokens");
    fleet.request(3, &of_program(3, 4, 30));
    assert_eq!(fleet.booked(), [0, 3], "small ones find room");
    pass(&mut fleet, keep);
    fleet.request(4, &of_program(4, 5, 50));
    fleet.request(5, &of_program(5, 1, 60));
    assert_eq!((fleet.booked(), fleet.schedule.holds().0), (vec![0, 3, 4], 1), "an agent of a known program waits");
}

#[test]
fn only_programs_without_any_room_are_refused() {
    let mut fleet = fleet(2, Some(100));
    let mut starts = |id, class: &str, blocks, excluded_rank: Option<u64>| {
        let mut start = call(id, blocks);
        start.options.policy_class = Some(class.into());
        start.options.constraints.excluded_ranks = excluded_rank.map(rank).into_iter().collect();
        fleet.request(id, &start);
        (fleet.is_complete(id), fleet.booked().len())
    };
    assert_eq!(starts(0, "refusing", 80, None), (true, 1));
    assert_eq!(starts(1, "refusing", 30, None), (true, 2));
    assert_eq!(starts(2, "thorough", 40, None), (false, 2), "a busy rank has room");
    assert_eq!(starts(3, "refusing", 70, Some(0)), (false, 2), "a retry waits");
    assert_eq!(starts(4, "refusing", 70, None), (true, 2), "refused");
}

#[test]
fn ranks_of_unknown_size_and_empty_ones_have_room() {
    let (mut unknown, mut small) = (fleet(1, None), fleet(1, Some(100)));
    (0..4).for_each(|id| unknown.request(id, &call(id, 90)));
    small.request(0, &call(0, 140));
    assert_eq!((unknown.booked().len(), small.booked().len()), (4, 1));
}

proptest! {
    #![proptest_config(effort(48, "tests/program_holds.proptest-regressions"))]

    /// Every call leaves, and none waits beside an unused rank.
    #[test]
    fn every_held_call_leaves(workers in 1u64..5, seeds in prop::collection::vec(any::<u64>(), 1..120)) {
        let mut fleet = fleet(workers, Some(60));
        for (id, &seed) in (0..).zip(&seeds) {
            let options = call(seed % 7, 1).options;
            fleet.request(id, &SampleRequest { prompt: seed % 9, options, ..call(id, 1 + (seed >> 8) as u32 % 50) });
            if !seed.is_multiple_of(3) && let Some(&ended) = fleet.booked().get((seed >> 16) as usize % (id as usize + 1)) {
                end(&mut fleet, ended, seed.is_multiple_of(5));
            }
            pass(&mut fleet, Duration::from_millis(seed % 100));
            let mut unused = fleet.ranks.iter().filter(|rank| rank.active.is_empty());
            let is_free = unused.any(|rank| fleet.schedule.claims().any(|(of, ratio)| (of, ratio) == (rank.rank, 0.0)));
            prop_assert!(!is_free || fleet.waiting() == 0);
        }
        pass(&mut fleet, HOLD);
        prop_assert_eq!((fleet.waiting(), fleet.outcomes.len()), (0, seeds.len()));
    }

    #[test]
    fn all_claims_end(seeds in prop::collection::vec(any::<u64>(), 1..200)) {
        let mut claims = Claims::default();
        for (id, &seed) in (0..).zip(&seeds) {
            let hashes = (0..1 + (seed >> 12) % 40).map(|block| SequenceHash(((seed >> 8) % 4) << 32 | block));
            let (prompt, session) = (PromptBlocks::Hashed(hashes.collect()), session(seed % 5));
            let (slot, now) = (Slot((seed >> 20) as u32 % 2), Timestamp(id));
            let call = PlacedCall { session: &session, slot, capacity_blocks: 64, prompt: &prompt, prompt_tokens: 1 };
            claims.begin(BookingId(id), &call, now);
            claims.end(BookingId(id - (seed >> 24) % (id + 1)), Duration::from_nanos(seed % 7), now);
            if seed.is_multiple_of(17) {
                claims.forget(slot);
            }
            claims.expire(now);
            claims.check_invariants();
        }
        (0..200).for_each(|id| claims.end(BookingId(id), Duration::ZERO, Timestamp(200)));
        prop_assert!(claims.expire(Timestamp(300)) || claims.next_end().is_none());
        prop_assert_eq!((claims.ratio(Slot(0)), claims.ratio(Slot(1))), (0.0, 0.0));
    }
}
