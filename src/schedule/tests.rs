//! Properties and examples of the scheduler with a simulated fleet.

use std::sync::Arc;

use proptest::prelude::*;

use super::rank::ProjectedPrompt;
use super::*;
use crate::config::LoadConfig;
use crate::config::queue::QueueConfig;
use crate::hashing::sequence_hashes;
use crate::load::{BoardLoad, BoardSlot, PromptBlocks};
use crate::policy::{CostFacts, KvConfig, Policy, PolicyConfig};
use crate::protocol::{BlockHash, BookingId, Generation, Slot, WorkerId};
use crate::select::RankTraits;
use crate::test_support::{SimulatedFleet, rank};

const NOW: Timestamp = Timestamp(0);

fn fleet(config: &RouterConfig, ranks: usize, extensions: Extensions) -> SimulatedFleet {
    let schedule = Schedule::new(config.clone(), 0, extensions);
    let mut fleet = SimulatedFleet::of(schedule, config.clone(), ranks);
    fleet.responds_at_once = false;
    fleet
}

fn prompt_of(spec: &RequestSpec, assume_kv_reuse: bool) -> PromptBlocks {
    if !assume_kv_reuse {
        return PromptBlocks::Counted(spec.prompt.len() as u32);
    }
    PromptBlocks::Hashed(sequence_hashes(&spec.prompt.iter().copied().map(BlockHash).collect::<Vec<_>>()))
}

fn request(fleet: &mut SimulatedFleet, id: u64, spec: &RequestSpec) {
    let request = request_of(fleet, id, spec);
    fleet.submit(request);
}

fn request_of(fleet: &SimulatedFleet, id: u64, spec: &RequestSpec) -> Request<u64> {
    let prompt = prompt_of(spec, fleet.config.load.assume_kv_reuse);
    let blocks = prompt.block_count();
    let cached: Vec<_> = spec.overlaps.iter().map(|overlap| *overlap.min(&blocks)).enumerate().collect();
    let overlaps = fleet.overlaps(&cached[..cached.len().min(fleet.ranks.len())]);
    let prompt_tokens = blocks * fleet.config.block_size_or_assumed();
    Request { overlaps, ..Request::new(id, prompt, prompt_tokens) }
}

fn settle(fleet: &mut SimulatedFleet) {
    fleet.settle();
    assert_eq!(fleet.schedule.pending(), 0, "every request is complete");
}

#[derive(Clone, Debug)]
struct RequestSpec {
    prompt: Vec<u64>,
    overlaps: Vec<u32>,
    /// Frees the request this many before, after it was placed.
    frees: Option<u8>,
}

fn request_spec() -> impl Strategy<Value = RequestSpec> {
    // Prompts of few families: chains that begin alike and differ from some depth on.
    let prompt = (0u64..4, 0u64..3, 0usize..24, 0usize..24).prop_map(|(family, branch, depth, length)| {
        (0..length).map(|n| family * 10_000 + if n < depth { 0 } else { 1 + branch } * 100 + n as u64).collect()
    });
    (prompt, prop::collection::vec(0u32..20, 0..9), prop::option::of(0u8..12))
        .prop_map(|(prompt, overlaps, frees)| RequestSpec { prompt, overlaps, frees })
}

fn config(policy: Policy, assume_kv_reuse: bool) -> RouterConfig {
    RouterConfig {
        block_size: Some(4),
        seed: 11,
        policy: policy.into(),
        load: LoadConfig { assume_kv_reuse, ..LoadConfig::default() },
        ..RouterConfig::default()
    }
}

/// Policies that choose the lowest exact cost, or compare none.
fn exact_policy() -> impl Strategy<Value = Policy> {
    deterministic_policy().prop_filter("looks at some ranks only", |policy| *policy != Policy::Latency)
}

fn deterministic_policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(Policy::ALL.to_vec())
}

/// One request after the other, each complete before the next arrives.
fn serially(config: &RouterConfig, ranks: usize, requests: &[RequestSpec]) -> SimulatedFleet {
    serially_in(fleet(config, ranks, Extensions::default()), requests)
}

/// Bursts of requests, each a batch.
fn in_bursts(mut fleet: SimulatedFleet, requests: &[RequestSpec], burst: usize) -> SimulatedFleet {
    for (id, spec) in requests.iter().enumerate() {
        request(&mut fleet, id as u64, spec);
        if id % burst == burst - 1 {
            fleet.respond(&[]);
        }
    }
    settle(&mut fleet);
    fleet
}

/// Queries the load of every rank for each decision.
fn every_rank() -> Extensions {
    Extensions { queries_every_rank: true, ..Extensions::default() }
}

fn serially_in(mut fleet: SimulatedFleet, requests: &[RequestSpec]) -> SimulatedFleet {
    for (id, spec) in requests.iter().enumerate() {
        request(&mut fleet, id as u64, spec);
        settle(&mut fleet);
        if let Some(back) = spec.frees {
            fleet.free((id as u64).saturating_sub(u64::from(back)));
        }
    }
    fleet
}

proptest! {
    #[test]
    fn the_shortlist_places_like_a_query_of_all_ranks(
        policy in exact_policy(), reuse: bool, ranks in 1usize..9,
        requests in prop::collection::vec(request_spec(), 1..60),
    ) {
        let config = config(policy, reuse);
        let all = serially_in(fleet(&config, ranks, every_rank()), &requests);
        let shortlist = serially(&config, ranks, &requests);
        prop_assert_eq!(&all.placed(), &shortlist.placed());
        prop_assert!(shortlist.queried_ranks <= all.queried_ranks);
    }

    /// `latency` looks at few ranks. None of the others has a significantly lower exact cost.
    #[test]
    fn latency_chooses_nearly_the_lowest_exact_cost(
        reuse: bool, ranks in 1usize..40, blocks in prop::option::of(20u32..200),
        requests in prop::collection::vec(request_spec(), 1..60),
    ) {
        let config = config(Policy::Latency, reuse);
        let mut fleet = fleet(&config, ranks, Extensions::default());
        if let Some(total_kv_blocks) = blocks {
            for position in 0..ranks {
                fleet.describe(position, RankTraits { total_kv_blocks: Some(total_kv_blocks), ..RankTraits::default() });
            }
        }
        for (id, spec) in requests.iter().enumerate() {
            let (id, explained) = (id as u64, 1_000 + id as u64);
            fleet.now = fleet.now + Duration::from_millis(7);
            let explain = Request { purpose: Purpose::Explain, ..request_of(&fleet, explained, spec) };
            fleet.submit(explain);
            settle(&mut fleet);
            request(&mut fleet, id, spec);
            settle(&mut fleet);
            let costs = &fleet.explanation(explained).ranks;
            let least = costs.iter().map(|rank| rank.cost_max).fold(f64::INFINITY, f64::min);
            let chosen = fleet.decision(id).rank();
            let cost = costs.iter().find(|rank| rank.facts.rank == chosen).map_or(f64::NAN, |rank| rank.cost_max);
            prop_assert!(cost <= 1.05 / 0.9 * least, "{id}: {cost} on {chosen:?}, least {least}");
            if let Some(back) = spec.frees {
                fleet.free(id.saturating_sub(u64::from(back)));
            }
        }
    }

    /// What the board says of a rank holds the truth, whatever was booked, freed or is still under way.
    #[test]
    fn bounds_of_every_rank_contain_the_exact_load(
        reuse: bool, ranks in 1usize..6, requests in prop::collection::vec(request_spec(), 1..40),
        newcomer in request_spec(),
    ) {
        let config = config(Policy::RoundRobin, reuse);
        let mut fleet = serially(&config, ranks, &requests);
        fleet.schedule.pool.ranks.refresh(&fleet.loads, fleet.now);
        let prompt = prompt_of(&newcomer, reuse);
        let fingerprint = prompt.fingerprint();
        fleet.schedule.pool.ranks.refresh(&fleet.loads, fleet.now);
        let cost = config.kv_cost();
        for (rank, node) in fleet.schedule.pool.ranks.as_slice().iter().zip(&fleet.ranks) {
            let projected = rank.project(ProjectedPrompt { prompt: &prompt, block_count: u64::from(prompt.block_count()), fingerprint: &fingerprint, in_batch: 0 });
            let exact = u64::from(node.active.project(&prompt).potential_blocks);
            let (lo, hi) = projected.potential_blocks;
            prop_assert!(lo <= exact && exact <= hi, "{exact} is not in {lo}..={hi}");
            let tokens = node.active.load(fleet.now).prefill_tokens;
            prop_assert!(projected.prefill_tokens.0 <= tokens && tokens <= projected.prefill_tokens.1);
            let facts = CostFacts { prompt_tokens: 400, potential_blocks: exact, prefill_tokens: tokens, ..CostFacts::default() };
            let bounds = cost.bounds(&facts, projected.potential_blocks, projected.prefill_tokens);
            prop_assert!(bounds.lo <= cost.cost(&facts) && cost.cost(&facts) <= bounds.hi);
        }
    }

    #[test]
    fn a_batch_books_like_a_serial_run(
        policy in exact_policy(), reuse: bool, queries_every_rank: bool,
        ranks in 1usize..9, requests in prop::collection::vec(request_spec(), 1..60), burst in 2usize..20,
    ) {
        let config = config(policy, reuse);
        let extensions = Extensions { queries_every_rank, ..Extensions::default() };
        let requests: Vec<RequestSpec> = requests.into_iter().map(|spec| RequestSpec { frees: None, ..spec }).collect();
        let serial = serially_in(fleet(&config, ranks, extensions.clone()), &requests);
        let batched = in_bursts(fleet(&config, ranks, extensions), &requests, burst);
        prop_assert_eq!(serial.placed(), batched.placed());
    }

    /// The choices of batches, repeated one by one: no other rank has a significantly lower exact cost at that point.
    #[test]
    fn latency_chooses_nearly_the_lowest_exact_cost_in_batches(
        reuse: bool, ranks in 1usize..9, requests in prop::collection::vec(request_spec(), 1..60), burst in 2usize..20,
    ) {
        let config = config(Policy::Latency, reuse);
        let batched = in_bursts(fleet(&config, ranks, Extensions::default()), &requests, burst);
        let mut repeated = fleet(&config, ranks, Extensions::default());
        for (id, spec) in requests.iter().enumerate() {
            let (id, explained) = (id as u64, 1_000 + id as u64);
            let explain = Request { purpose: Purpose::Explain, ..request_of(&repeated, explained, spec) };
            repeated.submit(explain);
            settle(&mut repeated);
            let chosen = batched.decision(id).rank();
            let target = Target::Exactly { rank: chosen, cached_tokens: None, expected_duration: None };
            let request = Request { target, ..request_of(&repeated, id, spec) };
            repeated.submit(request);
            settle(&mut repeated);
            let costs = &repeated.explanation(explained).ranks;
            let least = costs.iter().map(|rank| rank.cost_max).fold(f64::INFINITY, f64::min);
            let cost = costs.iter().find(|rank| rank.facts.rank == chosen).map_or(f64::NAN, |rank| rank.cost_max);
            prop_assert!(cost <= 1.05 / 0.9 * least, "{id}: {cost} on {chosen:?}, least {least}");
        }
    }

    #[test]
    fn every_request_has_one_reply_despite_lost_messages(
        policy in deterministic_policy(), ranks in 0usize..6,
        steps in prop::collection::vec((0u8..10, request_spec()), 1..120),
    ) {
        let config = config(policy, true);
        let mut fleet = fleet(&config, ranks, Extensions::default());
        let mut requests_sent = 0;
        for (step, spec) in steps {
            match step {
                0..5 => {
                    request(&mut fleet, requests_sent, &spec);
                    requests_sent += 1;
                }
                5 => fleet.respond(&[0, 2]), // those two are wedged
                6 => {
                    if let Some(late) = fleet.open_queries.front().cloned() {
                        fleet.respond(&[0, 1, 2, 3, 4, 5, 6]); // everyone is late
                        fleet.open_queries.push_front(late);
                        fleet.respond(&[]); // and answers a batch that is closed
                    }
                }
                7 => drop(fleet.admit(rank(fleet.ranks.len() as u64), RankTraits::default())),
                8 => {
                    let slot = Slot(spec.prompt.len() as u32);
                    fleet.step(Input::Retire { slot, generation: Generation(1) });
                }
                _ => fleet.respond(&[]),
            }
        }
        settle(&mut fleet);
        let mut left: Vec<u64> = fleet.outcomes.iter().map(|(id, _)| *id).collect();
        left.sort_unstable();
        prop_assert_eq!(left, (0..requests_sent).collect::<Vec<_>>());
    }
}

#[test]
fn timed_out_ranks_are_avoided_until_they_reply() {
    let config = config(Policy::Kv, true);
    let mut fleet = fleet(&config, 2, every_rank());
    let spec = |n: u64| RequestSpec { prompt: vec![n, n + 1, n + 2], overlaps: vec![], frees: None };
    for id in 0..2 {
        request(&mut fleet, id, &spec(7));
        settle(&mut fleet);
    }
    request(&mut fleet, 2, &spec(7));
    let late = fleet.open_queries.front().cloned().expect("both ranks are busy and queried");
    assert_eq!(late.slots, [Slot(0), Slot(1)]);
    fleet.respond(&[0]); // the timer closes the batch without rank 0
    for id in 3..7 {
        request(&mut fleet, id, &spec(7));
        settle(&mut fleet);
    }
    assert!(fleet.placed()[2..].iter().all(|(_, rank)| rank.worker == WorkerId(1)), "{:?}", fleet.placed());
    fleet.open_queries.push_back(late);
    fleet.respond(&[]); // rank 0 answers at last
    request(&mut fleet, 7, &spec(7));
    settle(&mut fleet);
    assert_eq!(fleet.placed().last(), Some(&(7, rank(0))));
}

#[test]
fn a_single_timed_out_rank_is_still_used() {
    let config = config(Policy::Kv, true);
    let mut fleet = fleet(&config, 1, every_rank());
    let spec = RequestSpec { prompt: vec![1, 2, 3], overlaps: vec![], frees: None };
    for id in 0..3 {
        request(&mut fleet, id, &spec);
        fleet.respond(&[0]);
    }
    assert_eq!(fleet.placed().len(), 3);
    assert_eq!(fleet.schedule.batch_in_flight(), None, "no batch waits for a timed-out rank");
}

/// Both boards are being written when a restarted scheduler admits their ranks. Rank 0's becomes readable first.
#[test]
fn ranks_without_a_readable_board_are_not_idle() {
    let mut schedule = Schedule::<u64>::new(config(Policy::LeastLoaded, true), 1, Extensions::default());
    let mut effects = VecDeque::new();
    let mut loads = LiveLoads::default();
    let boards = [Arc::new(BoardSlot::default()), Arc::new(BoardSlot::default())];
    for (slot, board) in boards.iter().enumerate() {
        board.publish(&BoardLoad { applied: 500, requests: 9, ..BoardLoad::default() });
        board.begin_write();
        let (rank, slot) = (rank(slot as u64), Slot(slot as u32));
        loads.insert(slot, RankCells { board: Arc::clone(board), ..RankCells::default() });
        schedule.step(Input::Admit(Admission::new(rank, slot, Generation(1))), &loads, NOW, &mut effects);
    }
    let mut book = |schedule: &mut Schedule<u64>| {
        let request = Request::new(0, PromptBlocks::Counted(1), 4);
        schedule.step(Input::Request(request), &loads, NOW, &mut effects);
        match effects.pop_front() {
            Some(Effect::Book { decision, number, .. }) => (decision.slot.0, number),
            other => unreachable!("a Book was due, not {other:?}"),
        }
    };
    boards[0].publish(&BoardLoad { applied: 500, requests: 9, ..BoardLoad::default() });
    let booked: Vec<_> = (0..3).map(|_| book(&mut schedule)).collect();
    let expected = [501, 502, 503].map(|number| (0, BookNumber { incarnation: 0, number }));
    assert_eq!(booked, expected, "nine requests are fewer than an unknown number");
    boards[1].publish(&BoardLoad { applied: 700, requests: 2, ..BoardLoad::default() });
    assert_eq!(book(&mut schedule), (1, BookNumber { incarnation: 0, number: 701 }), "numbers go on");
}

/// No valid configuration leads here. An endless loop would take the scheduler with it all the same.
#[test]
fn ranks_of_infinite_cost_are_drawn_at_random() {
    for prefill_load_scale in [f64::INFINITY, f64::NAN] {
        let config = RouterConfig {
            policy: PolicyConfig::Kv(KvConfig { prefill_load_scale, ..KvConfig::default() }),
            ..config(Policy::Kv, true)
        };
        let mut fleet = fleet(&config, 4, Extensions::default());
        for id in 0..64 {
            request(&mut fleet, id, &RequestSpec { prompt: vec![id], overlaps: vec![], frees: None });
            settle(&mut fleet);
        }
        let chosen: BTreeSet<_> = fleet.placed().iter().map(|(_, rank)| *rank).collect();
        assert_eq!((fleet.placed().len(), chosen.len()), (64, 4), "a scale of {prefill_load_scale}");
    }
}

#[test]
fn temperature_spreads_and_repeats_with_the_seed() {
    let config = RouterConfig {
        policy: PolicyConfig::Kv(KvConfig { temperature: 0.7, ..KvConfig::default() }),
        ..config(Policy::Kv, true)
    };
    let requests: Vec<RequestSpec> =
        (0..200).map(|n| RequestSpec { prompt: vec![n * 10], overlaps: vec![9, 3], frees: Some(0) }).collect();
    let first = serially(&config, 4, &requests).placed();
    assert_eq!(first, serially(&config, 4, &requests).placed());
    let on = |worker| first.iter().filter(|(_, rank)| rank.worker == WorkerId(worker)).count();
    assert!((0..4).all(|worker| on(worker) > 10), "{:?}", (0..4).map(on).collect::<Vec<_>>());
}

#[test]
fn round_robin_rotates_in_rank_order() {
    let config = config(Policy::RoundRobin, true);
    let requests = vec![RequestSpec { prompt: vec![1], overlaps: vec![], frees: None }; 6];
    let placed = serially(&config, 3, &requests).placed();
    let workers: Vec<u64> = placed.iter().map(|(_, rank)| rank.worker.0).collect();
    assert_eq!(workers, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn bookings_of_a_dead_incarnation_leave_the_overlay() {
    let config = config(Policy::LeastLoaded, true);
    let mut schedule = Schedule::<u64>::new(config, 0, Extensions::default());
    let mut effects = VecDeque::new();
    let mut loads = LiveLoads::default();
    let boards = [Arc::new(BoardSlot::default()), Arc::new(BoardSlot::default())];
    for (slot, board) in boards.iter().enumerate() {
        let (rank, slot) = (rank(slot as u64), Slot(slot as u32));
        loads.insert(slot, RankCells { board: Arc::clone(board), ..RankCells::default() });
        schedule.step(Input::Admit(Admission::new(rank, slot, Generation(1))), &loads, NOW, &mut effects);
    }
    let mut book = |schedule: &mut Schedule<u64>| {
        let request = Request::new(0, PromptBlocks::Counted(1), 4);
        schedule.step(Input::Request(request), &loads, NOW, &mut effects);
        match effects.pop_front() {
            Some(Effect::Book { decision, number, .. }) => (decision.slot, number),
            other => unreachable!("a Book was due, not {other:?}"),
        }
    };
    // Nobody applies these: the overlay alone keeps the ranks apart.
    let slots: Vec<u32> = (0..4).map(|_| book(&mut schedule).0.0).collect();
    assert_eq!(slots.iter().filter(|slot| **slot == 0).count(), 2, "{slots:?}");
    // Rank 0 dies with its two Books and comes back empty.
    boards[0].publish(&BoardLoad { incarnation: 1, ..BoardLoad::default() });
    let (slot, number) = book(&mut schedule);
    assert_eq!((slot, number), (Slot(0), BookNumber { incarnation: 1, number: 1 }));
    assert_eq!(book(&mut schedule).0, Slot(0), "one there, two here");
}

#[test]
fn replies_to_an_earlier_incarnation_are_ignored() {
    let config = config(Policy::Kv, true);
    let spec = RequestSpec { prompt: vec![1, 2, 3], overlaps: vec![], frees: None };
    let first_question = |incarnation| {
        let schedule = Schedule::new(config.clone(), incarnation, every_rank());
        let mut fleet = SimulatedFleet::of(schedule, config.clone(), 2);
        fleet.responds_at_once = false;
        request(&mut fleet, 0, &spec);
        request(&mut fleet, 1, &spec);
        request(&mut fleet, 2, &spec);
        fleet.open_queries.front().expect("a twin of what runs must be queried").batch
    };
    assert_ne!(first_question(0), first_question(1));
}

#[test]
fn ages_are_kept_only_if_overlaps_are_refreshed() {
    for (overlap_refresh_after_ms, kept) in [(0, 0), (10, 1)] {
        let queueing = config(Policy::Kv, true);
        let config = RouterConfig {
            queue: QueueConfig { threshold: Some(0.0), overlap_refresh_after_ms, ..queueing.queue },
            ..queueing
        };
        let mut fleet = fleet(&config, 1, Extensions::default());
        for id in 0..2 {
            let block_hashes = Some([BlockHash(id)].into());
            let waits = Some(Waits { booking: BookingId(id), arrival: fleet.now, block_hashes });
            let plain = Request::new(id, PromptBlocks::Counted(1), 4);
            fleet.submit(Request { waits: waits.map(Box::new), ..plain });
        }
        assert_eq!((fleet.schedule.queue.len(), fleet.schedule.overlap_ages.len()), (1, kept));
    }
}
