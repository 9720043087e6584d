//! Inputs of a choice and their effect: overrides, the shared cache, the embedder's selector, explanations and traces.
//! The shortlist must place requests exactly like a query to all ranks.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pointsman::config::{PoolRole, QueueClass, RouterConfigOverride, SessionAffinity};
use pointsman::internals::config::{LoadConfig, OverloadConfig, SessionConfig, SlowStartConfig};
use pointsman::internals::health::Exclusions;
use pointsman::internals::policy::RankFilters;
use pointsman::internals::schedule::{Explanation, Extensions, Input, Purpose, ResolvedOptions};
use pointsman::policy::{
    Candidate, KvConfig, Policy, PolicyConfig, PolicyError, RankFilter, RankPolicy, RankScorer, RankTable, RequestFacts,
};
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::test_support::{RequestOutcome, SampleRequest, SimulatedFleet, mix, rank};
use pointsman::{
    Constraints, Filter, Pin, PinMode, RankTraits, Rejection, RouterConfig, SessionId, internals::select::SharedHits,
};
use proptest::prelude::*;

use crate::effort::effort;
use crate::fleet::{config, config_with};

fn hits(range: Range<u32>) -> SharedHits {
    SharedHits::new([range].into())
}

fn overriding(overrides: RouterConfigOverride) -> SampleRequest {
    SampleRequest::from(ResolvedOptions { overrides, ..ResolvedOptions::default() })
}

/// The worker chosen with this override, and the one chosen without it.
fn with_and_without(
    config: RouterConfig,
    prepare: fn(&mut SimulatedFleet),
    sample: &SampleRequest,
    otherwise: RouterConfigOverride,
) -> [u64; 2] {
    [otherwise, RouterConfigOverride::default()].map(|overrides| {
        let mut fleet = SimulatedFleet::new(config.clone(), 2);
        prepare(&mut fleet);
        let options = ResolvedOptions { overrides, ..sample.options.clone() };
        fleet.request(0, &SampleRequest { options: options.clone(), purpose: Purpose::Explain, ..sample.clone() });
        fleet.request(1, &SampleRequest { options, ..sample.clone() });
        assert_eq!(fleet.explanation(0).chosen, Some(fleet.decision(1).rank()));
        fleet.worker(1)
    })
}

#[test]
fn overrides_change_the_choice_of_one_request() {
    let warm = SampleRequest { cached: vec![(0, 4)], ..SampleRequest::default() };
    let busy: fn(&mut SimulatedFleet) = |fleet| fleet.occupy(9, 0, 2);
    // The warm rank with two blocks of load costs 2 + 6, the cold idle rank 4 + 4; the credit is one block larger.
    let sample = SampleRequest { blocks: 4, cached: vec![(0, 5)], ..SampleRequest::default() };
    let no_credit = RouterConfigOverride { overlap_score_credit: Some(0.0), ..RouterConfigOverride::default() };
    assert_eq!(with_and_without(config(), busy, &sample, no_credit), [1, 0]);
    let no_prefill = RouterConfigOverride { prefill_load_scale: Some(0.0), ..RouterConfigOverride::default() };
    assert_eq!(with_and_without(config(), busy, &sample, no_prefill), [1, 0], "blocks held alone");
    let untracked = RouterConfigOverride { track_prefill_tokens: Some(false), ..RouterConfigOverride::default() };
    assert_eq!(with_and_without(config(), busy, &sample, untracked), [1, 0]);
    let shared_cache = hits(0..4);
    let shared = RouterConfigOverride { shared_cache_multiplier: Some(1.0), ..RouterConfigOverride::default() };
    let idle: fn(&mut SimulatedFleet) = |fleet| fleet.occupy(9, 0, 1);
    let sample = SampleRequest { shared_cache, ..warm };
    let none =
        config_with(|c| c.policy = PolicyConfig::Kv(KvConfig { shared_cache_multiplier: 0.0, ..KvConfig::default() }));
    assert_eq!(with_and_without(none, idle, &sample, shared), [1, 0], "all of it is in the shared cache");
}

#[test]
fn an_override_of_tracking_charges_nothing() {
    let mut fleet = SimulatedFleet::new(config(), 1);
    let overrides = RouterConfigOverride { track_prefill_tokens: Some(false), ..RouterConfigOverride::default() };
    fleet.request(0, &overriding(overrides));
    assert_eq!(fleet.decision(0).prefill_load(), None);
    fleet.request(1, &SampleRequest { prompt: 2, ..SampleRequest::default() });
    assert_eq!(fleet.decision(1).prefill_load().map(|hint| hint.effective_tokens()), Some(64));
}

#[test]
fn an_override_of_the_temperature_spreads_one_request() {
    let mut fleet = SimulatedFleet::new(config(), 2);
    let overrides = RouterConfigOverride { temperature: Some(1.0), ..RouterConfigOverride::default() };
    let mut dear = [0; 2];
    for id in 0..200 {
        let sample = if id % 2 == 0 { overriding(overrides) } else { SampleRequest::default() };
        fleet.request(id, &SampleRequest { cached: vec![(0, 4)], ..sample });
        dear[(id % 2) as usize] += fleet.worker(id);
        fleet.free(id);
    }
    assert!((15..40).contains(&dear[0]), "27 % of 100 by the softmax of two: {dear:?}");
    assert_eq!(dear[1], 0, "other requests take the least cost");
}

/// The formula of a decode pool depends on the request's effective tracking and credit.
#[test]
fn overrides_reach_the_formula_of_decode_pools() {
    let decode = config_with(|c| {
        c.role = PoolRole::Decode;
        c.load.track_prefill_tokens = false;
    });
    let terms_of = |overrides: RouterConfigOverride| {
        let mut fleet = SimulatedFleet::new(decode.clone(), 1);
        let sample = SampleRequest { cached: vec![(0, 1)], purpose: Purpose::Explain, ..overriding(overrides) };
        fleet.request(0, &sample);
        let terms = fleet.explanation(0).ranks[0].cost_terms;
        (terms.prefill_blocks, terms.held_blocks)
    };
    assert_eq!(terms_of(RouterConfigOverride::default()), (0.0, 3.0));
    let tracked = RouterConfigOverride { track_prefill_tokens: Some(true), ..RouterConfigOverride::default() };
    assert_eq!(terms_of(tracked), (3.0, 4.0), "credit reduces the prefill");
    let no_credit = RouterConfigOverride { overlap_score_credit: Some(0.0), ..RouterConfigOverride::default() };
    assert_eq!(terms_of(no_credit), (0.0, 4.0));
}

#[test]
fn shared_cache_hits_change_the_choice() {
    let placed = |hits: SharedHits| {
        let mut fleet = SimulatedFleet::new(config(), 2);
        fleet.occupy(9, 0, 1); // 5 + 5 minus the credit, or 4 + 4
        fleet.request(0, &SampleRequest { cached: vec![(0, 3)], shared_cache: hits, ..SampleRequest::default() });
        (fleet.worker(0), fleet.decision(0).shared_cache_blocks())
    };
    assert_eq!(placed(SharedHits::default()), (0, 0), "7 are less than 8");
    assert_eq!(placed(hits(0..4)), (1, 4), "6.5 are more than 6");
    assert_eq!(placed(hits(3..4)), (0, 1), "one block more for each");
}

/// A selector that records its candidates and returns a set answer.
#[derive(Default)]
struct Told {
    shown: Mutex<Vec<(u64, Vec<Candidate>)>>,
    answer: Mutex<Option<usize>>,
    panics: Mutex<bool>,
}

impl RankPolicy for Told {
    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        let candidates = (0..ranks.len()).map(|index| ranks.candidate(index)).collect();
        self.shown.lock().expect("never poisoned").push((request.request, candidates));
        let panics = *self.panics.lock().expect("never poisoned");
        assert!(!panics, "as configured");
        *self.answer.lock().expect("never poisoned")
    }
}

fn told(config: RouterConfig, ranks: usize) -> (SimulatedFleet, Arc<Told>) {
    let selector = Arc::new(Told::default());
    let extensions = Extensions { policy: Some(selector.clone()), ..Extensions::default() };
    (SimulatedFleet::with(config, ranks, extensions), selector)
}

#[test]
fn a_custom_policy_reads_exact_facts_of_every_eligible_rank() {
    let (mut fleet, selector) = told(config(), 4);
    let traits = RankTraits { max_num_batched_tokens: Some(512), total_kv_blocks: Some(77), ..RankTraits::default() };
    fleet.describe(1, traits);
    fleet.drain(2);
    fleet.occupy(9, 1, 3);
    fleet.occupy(8, 1, 2);
    fleet.complete_prefill(8);
    fleet.ranks[1].cells.holdings.publish(12, fleet.now);
    fleet.now = fleet.now + Duration::from_millis(7);
    *selector.answer.lock().expect("never poisoned") = Some(1);
    // The prompt already active on rank 1: two of its three blocks are shared.
    fleet.request(0, &SampleRequest { prompt: 1_009, blocks: 2, cached: vec![(1, 1)], ..SampleRequest::default() });
    assert_eq!(fleet.worker(0), 1);
    let shown = selector.shown.lock().expect("never poisoned").clone();
    let [(_, candidates)] = &shown[..] else { panic!("one query") };
    let ranks: Vec<u64> = candidates.iter().map(|candidate| candidate.rank.worker.0).collect();
    assert_eq!(ranks, [0, 1, 3]);
    let busy = &candidates[1];
    assert_eq!((busy.overlap.device_blocks, busy.prefill_tokens, busy.potential_blocks), (1, 48, 5));
    assert_eq!((busy.active_requests, busy.held_blocks), (2, 12));
    assert_eq!((busy.max_num_batched_tokens, busy.total_kv_blocks), (Some(512), Some(77)));
    assert_eq!((busy.index_age, busy.preference), (Some(Duration::from_millis(7)), 1.0));
    let idle = &candidates[2];
    assert_eq!((idle.prefill_tokens, idle.potential_blocks, idle.active_requests), (0, 2, 0));
}

#[test]
fn an_unusable_choice_of_a_custom_policy_is_an_error_of_one_request() {
    let (mut fleet, selector) = told(config(), 2);
    let refused = |fleet: &mut SimulatedFleet, id: u64| {
        fleet.request(id, &SampleRequest::default());
        let Rejection::Policy(error) = fleet.rejection(id).clone() else { panic!("the policy's error") };
        error
    };
    assert_eq!(refused(&mut fleet, 0), PolicyError::Refused { candidates: 2 });
    *selector.answer.lock().expect("never poisoned") = Some(2);
    assert_eq!(refused(&mut fleet, 1), PolicyError::OutOfRange { position: 2, candidates: 2 });
    *selector.answer.lock().expect("never poisoned") = Some(0);
    *selector.panics.lock().expect("never poisoned") = true;
    assert_eq!(refused(&mut fleet, 2), PolicyError::Panicked);
    selector.panics.clear_poison();
    *selector.panics.lock().expect("never poisoned") = false;
    fleet.request(3, &SampleRequest::default());
    assert_eq!(fleet.worker(3), 0);
    assert_eq!(fleet.schedule.pending(), 0);
}

/// Adds `cost` for rank 0.
struct Penalty(f64);

impl RankScorer for Penalty {
    fn cost(&self, _: &RequestFacts<'_>, rank: &Candidate) -> f64 {
        assert!(self.0 < 1e9, "an injected fault");
        if rank.rank.worker == WorkerId(0) { self.0 } else { 0.0 }
    }
}

#[test]
fn scorers_add_to_the_cost() {
    let placed = |config: RouterConfig, scorers: Vec<Arc<dyn RankScorer>>| {
        let mut fleet = SimulatedFleet::with(config, 2, Extensions { scorers, ..Extensions::default() });
        fleet.occupy(9, 1, 2);
        fleet.request(0, &SampleRequest { purpose: Purpose::Explain, ..SampleRequest::default() });
        fleet.request(1, &SampleRequest::default());
        let costs: Vec<f64> = fleet.explanation(0).ranks.iter().map(|rank| rank.cost_max).collect();
        (fleet.worker(1), costs)
    };
    for policy in [Policy::Kv, Policy::Latency] {
        let config = config_with(|c| c.policy = policy.into());
        let (plain, costs) = placed(config.clone(), Vec::new());
        let (scored, raised) = placed(config, vec![Arc::new(Penalty(300.0)), Arc::new(Penalty(200.0))]);
        assert_eq!((plain, scored), (0, 1), "{policy:?}");
        assert_eq!(raised, [costs[0] + 500.0, costs[1]], "{policy:?}");
    }
}

#[test]
fn an_unusable_cost_of_a_scorer_is_an_error_of_one_request() {
    for (cost, panics) in [(f64::NAN, true), (f64::INFINITY, true), (-1.0, false), (f64::NEG_INFINITY, false)] {
        let extensions = Extensions { scorers: vec![Arc::new(Penalty(cost))], ..Extensions::default() };
        let mut fleet = SimulatedFleet::with(config(), 2, extensions);
        fleet.request(0, &SampleRequest::default());
        let expected = if panics { PolicyError::Panicked } else { PolicyError::InvalidCost { cost, rank: rank(0) } };
        assert_eq!(fleet.rejection(0), &Rejection::Policy(expected));
    }
}

/// Accepts odd workers for long prompts, and panics for prompts of 3 blocks.
struct OddForLong;

impl RankFilter for OddForLong {
    fn accepts(&self, request: &RequestFacts<'_>, rank: WorkerRank, _: &RankTraits) -> bool {
        let blocks = request.prompt_tokens / request.block_size;
        assert!(blocks != 3, "an injected fault");
        blocks < 4 || rank.worker.0 % 2 == 1
    }
}

fn odd_for_long() -> Extensions {
    let mut filters = RankFilters::default();
    filters.push(Arc::new(OddForLong));
    Extensions { filters, ..Extensions::default() }
}

#[test]
fn filters_apply_to_every_policy() {
    for policy in Policy::ALL {
        let config = config_with(|c| c.policy = policy.into());
        let mut fleet = SimulatedFleet::with(config, 4, odd_for_long());
        let workers: BTreeSet<u64> = (0..40)
            .map(|id| {
                fleet.request(id, &SampleRequest { blocks: 4, prompt: id, ..SampleRequest::default() });
                fleet.worker(id)
            })
            .collect();
        assert_eq!(workers, [1, 3].into(), "{policy:?}");
        fleet.request(50, &SampleRequest { blocks: 3, ..SampleRequest::default() });
        let Rejection::NoneEligible { removed } = fleet.rejection(50) else { panic!("every rank is refused") };
        assert_eq!(removed.by(Filter::Custom), 4);
    }
}

/// A short request, which rank 0 may serve, does not wait behind a long one, which it may not.
#[test]
fn requests_with_different_filter_results_wait_in_different_lanes() {
    let mut fleet = SimulatedFleet::with(busy_above(0), 2, odd_for_long());
    fleet.occupy(8, 0, 2);
    fleet.occupy(9, 1, 2);
    fleet.request(0, &SampleRequest { blocks: 4, prompt: 1, ..SampleRequest::default() });
    fleet.request(1, &SampleRequest { blocks: 2, prompt: 2, ..SampleRequest::default() });
    assert_eq!(fleet.waiting(), 2);
    fleet.complete_prefill(8);
    fleet.wake();
    assert_eq!((fleet.worker(1), fleet.is_complete(0)), (0, false));
}

fn busy_above(tokens: u64) -> RouterConfig {
    let class = QueueClass { busy_prefill_tokens: Some(tokens), ..QueueClass::named("only") };
    config_with(|c| c.queue.classes = vec![class])
}

#[test]
fn explanations_book_nothing_and_list_every_rank() {
    let mut fleet = SimulatedFleet::new(config(), 3);
    fleet.occupy(9, 2, 2);
    fleet.drain(1);
    fleet.request(0, &SampleRequest { purpose: Purpose::Explain, cached: vec![(0, 1)], ..SampleRequest::default() });
    fleet.request(1, &SampleRequest { purpose: Purpose::Explain, cached: vec![(0, 1)], ..SampleRequest::default() });
    let (first, again) = (fleet.explanation(0), fleet.explanation(1));
    assert_eq!(first.ranks, again.ranks, "nothing was booked");
    assert_eq!((first.schema, first.prompt_tokens, first.custom_selector), (Explanation::SCHEMA, 64, false));
    assert_eq!((first.chosen, &first.rejection), (Some(rank(0)), &None));
    let rows: Vec<_> = first.ranks.iter().map(|row| (row.facts.rank, row.excluded_by, row.cost_max)).collect();
    assert_eq!(rows, [(rank(0), None, 7.0), (rank(1), Some(Filter::Draining), 8.0), (rank(2), None, 12.0)]);
    assert!(first.ranks.iter().all(|row| row.exact && row.cost_min == row.cost_max));
    assert_eq!(first.ranks[0].cached_tokens, 16);
    assert!(fleet.ranks[0].active.is_empty() && fleet.ranks[1].active.is_empty());
    fleet.request(2, &SampleRequest { cached: vec![(0, 1)], ..SampleRequest::default() });
    assert_eq!(fleet.worker(2), 0);
}

#[test]
fn explanations_mark_busy_ranks() {
    let mut fleet = SimulatedFleet::new(busy_above(0), 2);
    fleet.occupy(9, 0, 1);
    let warm = SampleRequest { cached: vec![(0, 4)], ..SampleRequest::default() };
    fleet.request(0, &SampleRequest { purpose: Purpose::Explain, ..warm.clone() });
    fleet.request(1, &warm);
    assert_eq!(fleet.explanation(0).ranks[0].excluded_by, Some(Filter::Busy));
    assert_eq!((fleet.explanation(0).chosen, fleet.worker(1)), (Some(rank(1)), 1));
    fleet.request(2, &SampleRequest { purpose: Purpose::Explain, ..warm.clone() });
    assert_eq!((fleet.explanation(2).chosen, fleet.explanation(2).rejection.as_deref()), (None, Some("busy")));
    fleet.request(3, &SampleRequest { purpose: Purpose::Report, ..warm });
    assert_eq!(fleet.worker(3), 0, "explanations of queued requests name the eventual rank");
    assert_eq!(fleet.waiting(), 0, "no request is queued");
}

#[test]
fn the_configured_share_of_decisions_is_traced() {
    let traced = |share: f64, seed: u64| -> Vec<u64> {
        let mut fleet = SimulatedFleet::new(RouterConfig { decision_trace: share, seed, ..config() }, 3);
        for id in 0..1_000 {
            fleet.request(id, &SampleRequest { cached: vec![((id % 3) as usize, 4)], ..SampleRequest::default() });
            fleet.free(id);
        }
        let traces = fleet.outcomes.iter().filter_map(|(id, outcome)| match outcome {
            RequestOutcome::Booked(decision, Some(trace)) => {
                assert_eq!((trace.request, trace.chosen), (decision.number(), Some(decision.rank())));
                assert_eq!(trace.ranks.len(), 3);
                Some(*id)
            }
            _ => None,
        });
        traces.collect()
    };
    assert_eq!(traced(1.0, 1), (0..1_000).collect::<Vec<_>>());
    assert!(traced(0.0, 1).is_empty());
    let some = traced(0.1, 1);
    assert!((70..130).contains(&some.len()), "{}", some.len());
    assert_eq!(some, traced(0.1, 1));
    assert_ne!(some, traced(0.1, 2));
}

/// Request options of all kinds, derived from the digits of a pseudo-random number.
fn some_options(noise: u64, workers: u64) -> ResolvedOptions {
    let pick = |at: u32, of: u64| (noise >> at) % of;
    let mut constraints = Constraints::default();
    if pick(0, 4) == 0 {
        let allowed: BTreeSet<WorkerId> = (0..workers).filter(|n| (noise >> (4 + n)) & 1 == 1).map(WorkerId).collect();
        constraints.allowed_workers = Some(allowed);
    }
    if pick(14, 6) == 0 {
        let mode = if pick(17, 2) == 0 { PinMode::Hard } else { PinMode::Soft };
        constraints.pin = Some(Pin { worker: WorkerId(pick(18, workers)), rank: None, mode });
    }
    if pick(22, 8) == 0 {
        constraints.required_taints = ["odd".to_owned()].into();
    }
    if pick(25, 3) == 0 {
        constraints.preferred_taints = [("odd".to_owned(), pick(27, 5) as f64 - 2.0), ("third".to_owned(), 0.7)].into();
    }
    let given = |at: u32, value: f64| (pick(at, 5) == 0).then_some(value);
    ResolvedOptions {
        constraints,
        lora_name: (pick(30, 6) == 0).then(|| "sql".into()),
        session_id: (pick(33, 2) == 0).then(|| SessionId::new(&format!("s{}", pick(34, 4))).expect("a good id")),
        overrides: RouterConfigOverride {
            overlap_score_credit: given(37, pick(40, 3) as f64),
            prefill_load_scale: given(42, pick(44, 3) as f64),
            temperature: given(46, 0.5),
            track_prefill_tokens: (pick(48, 6) == 0).then_some(false),
            shared_cache_multiplier: given(51, 1.0),
            ..RouterConfigOverride::default()
        },
        ..ResolvedOptions::default()
    }
}

/// Places requests one at a time on a fleet whose drains, overloads, ejections and traits are derived from `seeds`.
/// With `burst`, that many requests arrive before responses, and the conditions stay constant.
fn placed(
    config: &RouterConfig,
    queries_every_rank: bool,
    workers: u64,
    seeds: &[u64],
    burst: Option<usize>,
) -> (Vec<Option<WorkerRank>>, usize) {
    let mut fleet = SimulatedFleet::with(config.clone(), 0, Extensions { queries_every_rank, ..Extensions::default() });
    for worker in 0..workers {
        let mut traits = RankTraits { total_kv_blocks: Some(60), ..RankTraits::default() };
        traits.taints.extend((worker % 2 == 1).then(|| "odd".to_owned()));
        traits.taints.extend((worker % 3 == 0).then(|| "third".to_owned()));
        traits.lora_adapters.extend((worker % 4 == 2).then(|| "sql".to_owned()));
        let node = fleet.admit(rank(worker), traits);
        fleet.ranks[node].cells.holdings.publish(7 * node, fleet.now);
    }
    fleet.responds_at_once = burst.is_none();
    for (id, &seed) in (0..).zip(seeds) {
        if burst.is_none() {
            match mix(seed) % 16 {
                0 => fleet.drain((seed % workers) as usize),
                1 => fleet.set_conditions(&[seed % workers], &[(seed >> 8) % workers]),
                2 => fleet.set_conditions(&[], &[]),
                3..6 => {
                    let some = |at: u32| (0..workers).filter(|n| seed >> at >> n & 1 == 1).map(rank).collect();
                    let (ejected, down, refusing) = ([rank((seed >> 32) % workers)].into(), some(24), some(40));
                    let asleep = some(56);
                    fleet.step(Input::Exclusions(Arc::new(Exclusions { ejected, down, refusing, asleep })));
                }
                6 => fleet.step(Input::Exclusions(Arc::default())),
                _ => {}
            }
            fleet.now = fleet.now + Duration::from_millis(seed % 50);
        }
        let cached = (0..workers as usize).map(|node| (node, (mix(seed + node as u64) % 9) as u32));
        let sample = SampleRequest {
            blocks: 1 + (seed >> 12) as u32 % 12,
            prompt: (seed >> 16) % 4,
            cached: cached.filter(|(_, blocks)| *blocks > 0).collect(),
            shared_cache: hits(0..(seed >> 20) as u32 % 9),
            options: some_options(mix(seed ^ 7), workers),
            waits: false,
            ..SampleRequest::default()
        };
        fleet.request(id, &sample);
        if let Some(burst) = burst {
            while (id as usize).is_multiple_of(burst) && !fleet.open_queries.is_empty() {
                fleet.respond(&[]);
            }
            continue;
        }
        if seed % 3 == 0 {
            fleet.complete_prefill(id);
        }
        if id > 8 {
            fleet.free(id - 8);
        }
    }
    fleet.settle();
    fleet.outcomes.sort_by_key(|(id, _)| *id);
    let placed = fleet.outcomes.iter().map(|(_, outcome)| match outcome {
        RequestOutcome::Booked(decision, _) => Some(decision.rank()),
        _ => None,
    });
    (placed.collect(), fleet.queried_ranks)
}

/// Policies that choose the lowest exact cost of all ranks, or compare none.
fn exact_policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(Policy::ALL.into_iter().filter(|policy| *policy != Policy::Latency).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(effort(64, "tests/schedule_choice.proptest-regressions"))]

    #[test]
    fn the_shortlist_places_like_a_query_of_all_ranks_for_any_request(
        workers in 1u64..9, seeds in prop::collection::vec(any::<u64>(), 1..80), slow: bool, hard: bool, overload: bool,
        policy in exact_policy(), assume_kv_reuse: bool,
    ) {
        let config = RouterConfig { slow_start: SlowStartConfig { fill: if slow { 0.6 } else { 0.0 }, max_ms: if slow { 1_000 } else { 60_000 }, ..config().slow_start }, session: SessionConfig { affinity: if hard { SessionAffinity::Hard } else { SessionAffinity::Soft }, ..config().session }, overload: OverloadConfig { prefill_tokens: overload.then_some(300), blocks_frac: overload.then_some(0.5), ..config().overload }, load: LoadConfig { assume_kv_reuse, ..config().load }, policy: policy.into(), ..config() };
        let seeds: Vec<u64> = seeds.into_iter().map(|seed| seed >> 1).collect();
        let (everyone, asked_all) = placed(&config, true, workers, &seeds, None);
        let (shortlist, asked) = placed(&config, false, workers, &seeds, None);
        prop_assert_eq!(everyone, shortlist);
        prop_assert!(asked <= asked_all);
    }
    #[test]
    fn bursts_are_placed_like_sequential_requests(
        workers in 1u64..9, seeds in prop::collection::vec(any::<u64>(), 1..60), burst in 2usize..20,
        hard: bool, everyone: bool, policy in exact_policy(), assume_kv_reuse: bool,
    ) {
        let config = RouterConfig { session: SessionConfig { affinity: if hard { SessionAffinity::Hard } else { SessionAffinity::Soft }, ..config().session }, overload: OverloadConfig { prefill_tokens: Some(600), ..config().overload }, load: LoadConfig { assume_kv_reuse, ..config().load }, policy: policy.into(), ..config() };
        let seeds: Vec<u64> = seeds.into_iter().map(|seed| seed >> 1).collect();
        let (serial, _) = placed(&config, everyone, workers, &seeds, Some(1));
        let (batched, _) = placed(&config, everyone, workers, &seeds, Some(burst));
        prop_assert_eq!(serial, batched);
    }
}
