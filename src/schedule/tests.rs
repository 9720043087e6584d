//! Properties and examples of the scheduler with a simulated fleet.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::config::LoadConfig;
use crate::hashing::sequence_hashes;
use crate::load::{BoardLoad, BoardSlot, PromptBlocks};
use crate::policy::{KvConfig, Policy, PolicyConfig};
use crate::protocol::{BlockHash, Generation, Slot};
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

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

    /// The choices of batches, repeated one by one: no other rank has a much lower exact cost at that point. The prices of
    /// a batch are those at its begin; in 45,000 decisions the highest ratio was 1.28.
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
            prop_assert!(cost <= 1.4 * least, "{id}: {cost} on {chosen:?}, least {least}");
        }
    }
}

/// A scheduler of two ranks, whose boards `prepare` has seen before it admits them.
fn least_loaded_of_two(
    incarnation: u32,
    prepare: impl Fn(&BoardSlot),
) -> (Schedule<u64>, LiveLoads, [Arc<BoardSlot>; 2]) {
    let mut schedule = Schedule::new(config(Policy::LeastLoaded, true), incarnation, Extensions::default());
    let (mut loads, boards) = (LiveLoads::default(), [0, 1].map(|_| Arc::new(BoardSlot::default())));
    for (slot, board) in boards.iter().enumerate() {
        prepare(board);
        let (rank, slot) = (rank(slot as u64), Slot(slot as u32));
        loads.insert(slot, RankCells { board: Arc::clone(board), ..RankCells::default() });
        schedule.step(Input::Admit(Admission::new(rank, slot, Generation(1))), &loads, NOW, &mut VecDeque::new());
    }
    (schedule, loads, boards)
}

/// Slot and number of the next booking.
fn book(schedule: &mut Schedule<u64>, loads: &LiveLoads) -> (u32, BookNumber) {
    let (request, mut effects) = (Request::new(0, PromptBlocks::Counted(1), 4), VecDeque::new());
    schedule.step(Input::Request(request), loads, NOW, &mut effects);
    match effects.pop_front() {
        Some(Effect::Book { decision, number, .. }) => (decision.slot.0, number),
        other => unreachable!("a Book was due, not {other:?}"),
    }
}

/// Both boards are being written when a restarted scheduler admits their ranks. Rank 0's becomes readable first.
#[test]
fn ranks_without_a_readable_board_are_not_idle() {
    let (mut schedule, loads, boards) = least_loaded_of_two(1, |board| {
        board.publish(&BoardLoad { applied: 500, requests: 9, ..BoardLoad::default() });
        board.begin_write();
    });
    boards[0].publish(&BoardLoad { applied: 500, requests: 9, ..BoardLoad::default() });
    let booked: Vec<_> = (0..3).map(|_| book(&mut schedule, &loads)).collect();
    let expected = [501, 502, 503].map(|number| (0, BookNumber { incarnation: 0, number }));
    assert_eq!(booked, expected, "nine requests are fewer than an unknown number");
    boards[1].publish(&BoardLoad { applied: 700, requests: 2, ..BoardLoad::default() });
    assert_eq!(book(&mut schedule, &loads), (1, BookNumber { incarnation: 0, number: 701 }), "numbers go on");
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
fn round_robin_rotates_in_rank_order() {
    let config = config(Policy::RoundRobin, true);
    let requests = vec![RequestSpec { prompt: vec![1], overlaps: vec![], frees: None }; 6];
    let placed = in_bursts(fleet(&config, 3, Extensions::default()), &requests, 1).placed();
    let workers: Vec<u64> = placed.iter().map(|(_, rank)| rank.worker.0).collect();
    assert_eq!(workers, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn bookings_of_a_dead_incarnation_leave_the_overlay() {
    let (mut schedule, loads, boards) = least_loaded_of_two(0, |_| {});
    // Nobody applies these: the overlay alone keeps the ranks apart.
    let slots: Vec<u32> = (0..4).map(|_| book(&mut schedule, &loads).0).collect();
    assert_eq!(slots.iter().filter(|slot| **slot == 0).count(), 2, "{slots:?}");
    // Rank 0 dies with its two Books and comes back empty.
    boards[0].publish(&BoardLoad { incarnation: 1, ..BoardLoad::default() });
    assert_eq!(book(&mut schedule, &loads), (0, BookNumber { incarnation: 1, number: 1 }));
    assert_eq!(book(&mut schedule, &loads).0, 0, "one there, two here");
}

#[test]
fn replies_to_an_earlier_incarnation_are_ignored() {
    let config = config(Policy::Kv, true);
    let spec = RequestSpec { prompt: vec![1, 2, 3], overlaps: vec![], frees: None };
    let first_question = |incarnation| {
        let schedule = Schedule::new(
            config.clone(),
            incarnation,
            Extensions { queries_every_rank: true, ..Extensions::default() },
        );
        let mut fleet = SimulatedFleet::of(schedule, config.clone(), 2);
        fleet.responds_at_once = false;
        request(&mut fleet, 0, &spec);
        request(&mut fleet, 1, &spec);
        request(&mut fleet, 2, &spec);
        fleet.open_queries.front().expect("a twin of what runs must be queried").batch
    };
    assert_ne!(first_question(0), first_question(1));
}
