//! Eligibility and preference of ranks: filters, pins, adapters, taints, sessions and slow start, each by a worked
//! example.

use std::collections::BTreeSet;
use std::sync::Arc;

use pointsman::config::{QueueClass, SessionAffinity};
use pointsman::error::ErrorKind;
use pointsman::internals::config::SlowStartConfig;
use pointsman::internals::health::Exclusions;
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::policy::Policy;
use pointsman::protocol::WorkerId;
use pointsman::test_support::{RequestOutcome, SampleRequest, SimulatedFleet, rank};
use pointsman::{
    Constraints, Pin, PinMode, RankTraits, Rejection, RouterConfig, SessionId,
    internals::schedule::{Input, Purpose, ResolvedOptions},
    internals::select::preference_factor,
};
use std::time::Duration;

use crate::fleet::{BLOCK_SIZE, config, config_with};

fn taints(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn tainted(names: &[&str]) -> RankTraits {
    RankTraits { taints: taints(names), ..RankTraits::default() }
}

fn with_adapter(name: &str) -> RankTraits {
    RankTraits { lora_adapters: [name.to_owned()].into(), ..RankTraits::default() }
}

fn constrained(constraints: Constraints) -> SampleRequest {
    SampleRequest::from(ResolvedOptions { constraints, ..ResolvedOptions::default() })
}

fn pinned(worker: u64, mode: PinMode) -> Constraints {
    Constraints { pin: Some(Pin { worker: WorkerId(worker), rank: None, mode }), ..Constraints::default() }
}

fn allowed(workers: &[u64]) -> Constraints {
    Constraints { allowed_workers: Some(workers.iter().copied().map(WorkerId).collect()), ..Constraints::default() }
}

fn excluding(workers: &[u64]) -> Constraints {
    Constraints { excluded_ranks: workers.iter().copied().map(rank).collect(), ..Constraints::default() }
}

fn of_session(id: &str) -> ResolvedOptions {
    ResolvedOptions { session_id: Some(SessionId::new(id).expect("a good id")), ..ResolvedOptions::default() }
}

/// A rank is busy above `tokens` of pending prefill.
fn busy_above(tokens: u64) -> RouterConfig {
    let class = QueueClass { busy_prefill_tokens: Some(tokens), ..QueueClass::named("only") };
    config_with(|c| c.queue.classes = vec![class])
}

/// The rejection of this request by a new fleet of two ranks.
fn refused(prepare: impl FnOnce(&mut SimulatedFleet), sample: &SampleRequest) -> Rejection {
    let mut fleet = SimulatedFleet::new(config(), 2);
    prepare(&mut fleet);
    fleet.request(0, sample);
    assert_eq!(fleet.schedule.pending(), 0);
    fleet.rejection(0).clone()
}

#[test]
fn rejections_count_ranks_by_filter() {
    let nobody = Constraints { required_taints: taints(&["gold"]), ..Constraints::default() };
    let said = |prepare: &dyn Fn(&mut SimulatedFleet), constraints: Constraints| {
        refused(|fleet| prepare(fleet), &constrained(constraints)).to_string()
    };
    let any = Constraints::default;
    assert_eq!(said(&|_| {}, allowed(&[9])), "no rank is eligible: 2 not allowed");
    assert_eq!(said(&|_| {}, excluding(&[0, 1, 9])), "no rank is eligible: 2 excluded");
    assert_eq!(said(&|_| {}, nobody.clone()), "no rank is eligible: 2 without a required taint");
    assert_eq!(said(&|fleet| fleet.set_conditions(&[], &[0, 1]), any()), "no rank is eligible: 2 unavailable");
    let drained = |fleet: &mut SimulatedFleet| (0..2).for_each(|node| fleet.drain(node));
    assert_eq!(said(&drained, any()), "no rank is eligible: 2 draining");
    assert_eq!(said(&|fleet| fleet.drain(1), allowed(&[1])), "no rank is eligible: 1 not allowed, 1 draining");
    let overloaded = |fleet: &mut SimulatedFleet| fleet.set_conditions(&[0, 1], &[]);
    assert_eq!(said(&overloaded, any()), "all eligible workers are overloaded: 2 overloaded");
    let gone = |fleet: &mut SimulatedFleet| (0..2).for_each(|node| fleet.retire(node));
    assert_eq!(said(&gone, any()), "no rank is registered");
    // The adapter filter and the response filter exclude only part of the ranks, so they cause a rejection only
    // together with another filter.
    let adapter = |fleet: &mut SimulatedFleet| {
        fleet.describe(1, with_adapter("sql"));
        fleet.set_conditions(&[1], &[]);
    };
    let sample = SampleRequest::from(ResolvedOptions { lora_name: Some("sql".into()), ..ResolvedOptions::default() });
    assert_eq!(
        refused(adapter, &sample).to_string(),
        "all eligible workers are overloaded: 1 without the LoRA adapter, 1 overloaded"
    );
    let silent = |fleet: &mut SimulatedFleet| {
        fleet.responds_at_once = false;
        fleet.occupy(8, 1, 1);
        fleet.request(9, &SampleRequest { purpose: Purpose::LoadSnapshot, prompt: 1_008, ..SampleRequest::default() });
        fleet.respond(&[1]);
        fleet.set_conditions(&[0], &[]);
    };
    assert_eq!(
        refused(silent, &SampleRequest::default()).to_string(),
        "all eligible workers are overloaded: 1 unresponsive, 1 overloaded"
    );
}

#[test]
fn overload_depends_on_tokens_steps_and_blocks() {
    let traits = RankTraits { max_num_batched_tokens: Some(64), total_kv_blocks: Some(10), ..RankTraits::default() };
    let limits: [fn(&mut RouterConfig); 3] = [
        |config| config.overload.prefill_tokens = Some(31),
        |config| config.overload.prefill_frac = Some(0.49),
        |config| config.overload.blocks_frac = Some(0.19),
    ];
    for (n, limit) in limits.into_iter().enumerate() {
        let mut config = config();
        limit(&mut config);
        let mut fleet = SimulatedFleet::new(config, 0);
        fleet.admit(rank(0), traits.clone());
        fleet.request(0, &SampleRequest { blocks: 1, prompt: 5, ..SampleRequest::default() });
        fleet.request(1, &SampleRequest { blocks: 1, prompt: 6, ..SampleRequest::default() }); // 16 tokens, 1 block
        fleet.request(2, &SampleRequest { blocks: 1, prompt: 7, ..SampleRequest::default() }); // 32 tokens, 2 blocks
        assert_eq!(fleet.booked(), [0, 1], "limit {n}");
        assert_eq!(fleet.rejection(2).to_string(), "all eligible workers are overloaded: 1 overloaded", "limit {n}");
        fleet.free(0);
        fleet.request(3, &SampleRequest { blocks: 1, ..SampleRequest::default() });
        assert_eq!(fleet.worker(3), 0, "limit {n}");
    }
}

#[test]
fn hard_pins_report_the_rejecting_filter() {
    let pin = pinned(1, PinMode::Hard);
    let said = |prepare: &dyn Fn(&mut SimulatedFleet), constraints: &Constraints| {
        refused(|fleet| prepare(fleet), &constrained(constraints.clone())).to_string()
    };
    assert_eq!(said(&|_| {}, &pinned(9, PinMode::Hard)), "pinned to 9, which is not registered");
    assert_eq!(said(&|fleet| fleet.drain(1), &pin), "pinned to 1, which is draining");
    assert_eq!(said(&|fleet| fleet.set_conditions(&[], &[1]), &pin), "pinned to 1, which is unavailable");
    assert_eq!(said(&|fleet| fleet.set_conditions(&[1], &[]), &pin), "pinned to 1, which is overloaded");
    let tainted = Constraints { required_taints: taints(&["gold"]), ..pin.clone() };
    assert_eq!(said(&|_| {}, &tainted), "pinned to 1, which is without a required taint");
    let elsewhere = Constraints { allowed_workers: allowed(&[0]).allowed_workers, ..pin.clone() };
    assert_eq!(said(&|_| {}, &elsewhere), "pinned to 1, which is not allowed");
    let failed = Constraints { excluded_ranks: excluding(&[1]).excluded_ranks, ..pin.clone() };
    assert_eq!(said(&|_| {}, &failed), "pinned to 1, which is excluded");
    assert_eq!(refused(|_| {}, &constrained(failed)).kind(), ErrorKind::Unavailable);
    let one = Constraints { pin: Some(Pin { worker: WorkerId(1), rank: Some(3), mode: PinMode::Hard }), ..pin.clone() };
    assert_eq!(said(&|_| {}, &one), "pinned to 1/3, which is not registered");
    let mut fleet = SimulatedFleet::new(config(), 2);
    fleet.request(0, &SampleRequest { cached: vec![(0, 4)], ..constrained(pin) });
    assert_eq!(fleet.worker(0), 1, "regardless of cost");
}

#[test]
fn a_soft_pin_is_kept_while_its_rank_is_eligible() {
    let dear = SampleRequest { cached: vec![(0, 4)], ..constrained(pinned(1, PinMode::Soft)) };
    let placed = |config: RouterConfig, prepare: &dyn Fn(&mut SimulatedFleet)| {
        let mut fleet = SimulatedFleet::new(config, 2);
        prepare(&mut fleet);
        fleet.request(0, &dear);
        fleet.worker(0)
    };
    assert_eq!(placed(config(), &|_| {}), 1, "regardless of cost");
    assert_eq!(placed(config(), &|fleet| fleet.drain(1)), 0);
    assert_eq!(placed(config(), &|fleet| fleet.retire(1)), 0);
    assert_eq!(placed(config(), &|fleet| fleet.set_conditions(&[1], &[])), 0);
    assert_eq!(placed(config(), &|fleet| fleet.set_conditions(&[], &[1])), 0);
    assert_eq!(placed(busy_above(0), &|fleet| fleet.occupy(9, 1, 1)), 0, "busy");
    assert_eq!(placed(busy_above(0), &|fleet| fleet.occupy(9, 0, 1)), 1);
}

#[test]
fn adapters_restrict_the_choice_if_any_rank_has_them() {
    let sql = SampleRequest {
        cached: vec![(0, 4)],
        ..SampleRequest::from(ResolvedOptions { lora_name: Some("sql".into()), ..ResolvedOptions::default() })
    };
    let mut fleet = SimulatedFleet::new(config(), 3);
    fleet.request(0, &sql);
    assert_eq!(fleet.worker(0), 0, "no rank has the adapter: the warmest is chosen");
    fleet.describe(1, with_adapter("sql"));
    fleet.request(1, &sql);
    assert_eq!(fleet.worker(1), 1);
    fleet.request(
        2,
        &SampleRequest {
            options: ResolvedOptions { constraints: allowed(&[0, 2]), ..sql.options.clone() },
            ..sql.clone()
        },
    );
    assert_eq!(fleet.worker(2), 0, "no allowed rank has the adapter");
    fleet.drain(1);
    fleet.request(3, &sql);
    assert_eq!(fleet.worker(3), 0, "the rank with the adapter is full");
}

#[test]
fn preferred_taints_multiply_the_cost() {
    let prefer = |weight: f64| {
        let preferred_taints = [("near".to_owned(), weight)].into();
        SampleRequest {
            cached: vec![(0, 3)],
            ..constrained(Constraints { preferred_taints, ..Constraints::default() })
        }
    };
    // 1 block to compute and 4 to hold, against 4 and 4.
    let placed = |weight: f64| {
        let mut fleet = SimulatedFleet::new(config(), 2);
        fleet.describe(1, tainted(&["near"]));
        fleet.request(0, &SampleRequest { purpose: Purpose::Explain, ..prefer(weight) });
        let costs: Vec<f64> = fleet.explanation(0).ranks.iter().map(|rank| rank.cost_max).collect();
        assert_eq!(costs, [5.0, 8.0 * preference_factor(weight)]);
        fleet.request(1, &prefer(weight));
        assert_eq!(fleet.explanation(0).chosen, Some(fleet.decision(1).rank()));
        fleet.worker(1)
    };
    assert_eq!(placed(1.0), 1, "8 times 0.467 is 3.7");
    assert_eq!(placed(0.2), 0, "8 times 0.82 is 6.6");
    assert_eq!(placed(-1.0), 0);
}

#[test]
fn a_soft_session_can_be_overruled_by_cost() {
    let mut fleet = SimulatedFleet::new(config(), 2);
    let chat = SampleRequest { prompt: 3, ..SampleRequest::from(of_session("chat")) };
    fleet.request(0, &SampleRequest { cached: vec![(1, 1)], ..chat.clone() });
    assert_eq!(fleet.worker(0), 1);
    fleet.free(0);
    fleet.request(1, &chat);
    assert_eq!(fleet.worker(1), 1, "ties keep the rank of the session");
    fleet.free(1);
    fleet.request(2, &SampleRequest { cached: vec![(0, 1)], ..chat.clone() });
    assert_eq!(fleet.worker(2), 1, "7 are more than 8 times 0.63");
    fleet.free(2);
    fleet.request(3, &SampleRequest { cached: vec![(0, 4)], ..chat.clone() });
    assert_eq!(fleet.worker(3), 0, "4 are less than 8 times 0.63");
    fleet.free(3);
    fleet.request(4, &chat);
    assert_eq!(fleet.worker(4), 0, "the session moved");
    let off = config_with(|c| c.session.affinity = SessionAffinity::Off);
    let mut fleet = SimulatedFleet::new(off, 2);
    fleet.request(0, &SampleRequest { cached: vec![(1, 1)], ..chat.clone() });
    fleet.request(1, &SampleRequest { cached: vec![(0, 1)], ..chat });
    assert_eq!((fleet.worker(0), fleet.worker(1)), (1, 0));
}

/// Whether the turns of a session leave its rank, which has this prefill ahead. Each turn is longer than the one before.
fn ranks_of_a_growing_session(policy: Policy, blocks_ahead: u32, has_events: bool) -> Vec<u64> {
    let mut fleet = SimulatedFleet::new(RouterConfig { policy: policy.into(), ..config() }, 2);
    let turn = |blocks| SampleRequest { prompt: 3, blocks, ..SampleRequest::from(of_session("chat")) };
    fleet.request(0, &turn(4_000));
    let home = usize::try_from(fleet.worker(0)).expect("a position");
    fleet.free(0);
    if has_events {
        fleet.ranks[home].cells.holdings.publish(0, fleet.now);
    }
    fleet.occupy(900, home as u64, blocks_ahead);
    let later = (1..4).map(|n| {
        fleet.request(n, &turn(4_000 + u32::try_from(n).expect("few")));
        let worker = fleet.worker(n);
        fleet.free(n);
        worker
    });
    let later: Vec<u64> = later.collect();
    later.into_iter().map(|worker| u64::from(worker != home as u64)).collect()
}

#[test]
fn the_context_of_a_session_counts_as_cached_on_a_rank_without_events() {
    for (policy, blocks_ahead) in [(Policy::Latency, 4_500), (Policy::Kv, 3_000)] {
        let moves = |has_events| ranks_of_a_growing_session(policy, blocks_ahead, has_events);
        assert_eq!(moves(false), [0, 0, 0], "{policy:?}");
        // An index that follows events and has no block of the session shows that the rank has evicted them.
        assert_eq!(moves(true)[0], 1, "{policy:?}");
    }
}

#[test]
fn hard_sessions_stay_until_their_rank_is_removed() {
    let hard = config_with(|c| c.session.affinity = SessionAffinity::Hard);
    let chat = SampleRequest { prompt: 3, ..SampleRequest::from(of_session("chat")) };
    for leave in [SimulatedFleet::drain as fn(&mut SimulatedFleet, usize), SimulatedFleet::retire] {
        let mut fleet = SimulatedFleet::new(hard.clone(), 2);
        fleet.request(0, &SampleRequest { cached: vec![(1, 1)], ..chat.clone() });
        fleet.request(1, &SampleRequest { cached: vec![(0, 4)], ..chat.clone() });
        assert_eq!((fleet.worker(0), fleet.worker(1)), (1, 1), "regardless of cost");
        leave(&mut fleet, 1);
        fleet.request(2, &chat);
        assert_eq!(fleet.worker(2), 0);
        fleet.admit_in(Slot(1), Generation(2), rank(1), RankTraits::default());
        fleet.request(3, &SampleRequest { cached: vec![(1, 4)], ..chat.clone() });
        assert_eq!(fleet.worker(3), 0, "bound to its new rank");
    }
}

#[test]
fn ejected_ranks_serve_as_a_last_resort_and_return_with_a_slow_start() {
    let mut fleet = SimulatedFleet::new(
        RouterConfig { slow_start: SlowStartConfig { return_ms: 1_000, ..config().slow_start }, ..config() },
        3,
    );
    let eject = |fleet: &mut SimulatedFleet, workers: &[u64]| {
        let ejected = workers.iter().copied().map(rank).collect::<BTreeSet<_>>();
        fleet.step(Input::Exclusions(Arc::new(Exclusions { ejected, ..Exclusions::default() })));
    };
    let open = |fleet: &mut SimulatedFleet, id: u64| {
        fleet.request(id, &SampleRequest { purpose: Purpose::Explain, ..SampleRequest::default() });
        let rows = fleet.explanation(id).ranks.iter();
        rows.filter(|row| row.excluded_by.is_none()).map(|row| row.facts.rank.worker.0).collect::<Vec<_>>()
    };
    eject(&mut fleet, &[1, 2]);
    assert_eq!(open(&mut fleet, 0), [0]);
    fleet.set_conditions(&[], &[0]);
    assert_eq!(open(&mut fleet, 1), [1, 2], "no outcome has confirmed the return");
    fleet.set_conditions(&[], &[]);
    assert_eq!(open(&mut fleet, 2), [0]);
    fleet.drain(0);
    assert_eq!(open(&mut fleet, 3), [1, 2]);
    fleet.retire(0);
    eject(&mut fleet, &[1]);
    assert_eq!(open(&mut fleet, 4), [2]);
    assert_eq!(new_ranks_cost(&mut fleet, 5), 10.0, "2 returns");
    fleet.now = fleet.now + Duration::from_millis(500);
    assert_eq!(new_ranks_cost(&mut fleet, 6), 2.0);
    fleet.now = fleet.now + Duration::from_millis(500);
    assert_eq!(new_ranks_cost(&mut fleet, 7), 1.0);
}

#[test]
fn unreachable_and_refusing_ranks_are_last_under_every_policy() {
    for policy in Policy::ALL {
        let mut fleet = SimulatedFleet::new(
            RouterConfig {
                slow_start: SlowStartConfig { return_ms: 0, ..config().slow_start },
                policy: policy.into(),
                ..config()
            },
            4,
        );
        fleet.responds_at_once = true;
        let mut id = 0;
        let mut draws = |fleet: &mut SimulatedFleet, [down, refusing]: [&[u64]; 2], only: Option<u64>| {
            let set = |workers: &[u64]| workers.iter().copied().map(rank).collect();
            let exclusions = Exclusions { down: set(down), refusing: set(refusing), ..Exclusions::default() };
            fleet.step(Input::Exclusions(Arc::new(exclusions)));
            fleet.now = fleet.now + Duration::from_secs(60); // the work of the previous phase is no longer recent
            let allowed_workers = only.map(|worker| [WorkerId(worker)].into());
            let options = ResolvedOptions {
                constraints: Constraints { allowed_workers, ..Constraints::default() },
                ..ResolvedOptions::default()
            };
            let mut drawn = BTreeSet::new();
            for _ in 0..40 {
                // If few ranks are excluded, they have the prompt cached and must be skipped. Otherwise no rank has it
                // cached, and the load spreads.
                let cached = if down.len() + refusing.len() < 3 { vec![(0, 4), (1, 4)] } else { Vec::new() };
                fleet.request(
                    id,
                    &SampleRequest { blocks: 4, prompt: id, cached, ..SampleRequest::from(options.clone()) },
                );
                drawn.insert(fleet.worker(id));
                fleet.free(id);
                id += 1;
            }
            drawn.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(draws(&mut fleet, [&[0], &[1]], None), [2, 3], "{policy:?}");
        assert_eq!(draws(&mut fleet, [&[0], &[1, 2, 3]], None), [1, 2, 3], "{policy:?}: when all refuse");
        assert_eq!(
            draws(&mut fleet, [&[0, 2, 3], &[1]], None),
            [1],
            "{policy:?}: refusing ranks precede unreachable ones"
        );
        assert_eq!(draws(&mut fleet, [&[0], &[]], Some(0)), [0], "{policy:?}: no other rank is eligible");
        assert_eq!(draws(&mut fleet, [&[0, 1, 2, 3], &[]], None), [0, 1, 2, 3], "{policy:?}: no other rank is left");
    }
}

#[test]
fn sessions_stay_with_refusing_ranks_and_leave_unreachable_ones() {
    let mut fleet = SimulatedFleet::new(config_with(|c| c.session.affinity = SessionAffinity::Hard), 2);
    fleet.request(0, &SampleRequest { cached: vec![(0, 1)], ..SampleRequest::from(of_session("chat")) });
    let only = || BTreeSet::from([rank(0)]);
    fleet.step(Input::Exclusions(Arc::new(Exclusions { refusing: only(), ..Exclusions::default() })));
    fleet.request(1, &SampleRequest::from(of_session("chat")));
    fleet.step(Input::Exclusions(Arc::new(Exclusions { down: only(), ..Exclusions::default() })));
    fleet.request(2, &SampleRequest::from(of_session("chat")));
    assert_eq!([fleet.worker(0), fleet.worker(1), fleet.worker(2)], [0, 0, 1]);
}

fn new_ranks_cost(fleet: &mut SimulatedFleet, id: u64) -> f64 {
    fleet.request(id, &SampleRequest { purpose: Purpose::Explain, ..SampleRequest::default() });
    let row = fleet.explanation(id).ranks.last().expect("a row a rank");
    assert_eq!(row.cost_max, row.cost_terms.total() * row.facts.preference);
    row.facts.preference
}

#[test]
fn new_ranks_cost_more_until_filled_or_timed_out() {
    let slow =
        RouterConfig { slow_start: SlowStartConfig { fill: 0.5, max_ms: 1_000, ..config().slow_start }, ..config() };
    let capacity = RankTraits { total_kv_blocks: Some(100), ..RankTraits::default() };
    let mut fleet = SimulatedFleet::new(slow.clone(), 1);
    let position = fleet.admit(rank(1), capacity.clone());
    assert_eq!(new_ranks_cost(&mut fleet, 0), 10.0);
    fleet.request(1, &SampleRequest { cached: vec![(1, 4)], ..SampleRequest::default() });
    assert_eq!(fleet.worker(1), 0, "8 are less than 4 times 10");
    fleet.ranks[position].cells.holdings.publish(25, fleet.now);
    assert_eq!(new_ranks_cost(&mut fleet, 2), 2.0, "half of the assumed capacity");
    fleet.ranks[position].cells.holdings.publish(50, fleet.now);
    assert_eq!(new_ranks_cost(&mut fleet, 3), 1.0);
    fleet.ranks[position].cells.holdings.publish(0, fleet.now);
    assert_eq!(new_ranks_cost(&mut fleet, 4), 1.0, "permanently ended");
    let mut fleet = SimulatedFleet::new(slow, 1);
    fleet.admit(rank(1), capacity);
    fleet.now = fleet.now + Duration::from_millis(250);
    assert_eq!(new_ranks_cost(&mut fleet, 0), 4.0);
    fleet.now = fleet.now + Duration::from_millis(750);
    assert_eq!(new_ranks_cost(&mut fleet, 1), 1.0);
}

#[test]
fn unknown_capacities_use_the_median_rank() {
    let mut fleet = SimulatedFleet::new(config_with(|c| c.slow_start.fill = 0.5), 3);
    fleet.request(9, &SampleRequest::default()); // all start empty at the same time, so slow start does not apply
    for (node, held) in [(0, 80), (1, 100), (2, 400)] {
        fleet.ranks[node].cells.holdings.publish(held, fleet.now);
    }
    let position = fleet.admit(rank(3), RankTraits::default());
    fleet.ranks[position].cells.holdings.publish(25, fleet.now);
    assert_eq!(new_ranks_cost(&mut fleet, 0), 2.0, "half of half of 100");
}

#[test]
fn ranks_that_join_during_a_query_are_charged_as_new() {
    let mut fleet = SimulatedFleet::new(config_with(|c| c.slow_start.fill = 0.5), 1);
    fleet.occupy(90, 0, 1);
    fleet.responds_at_once = false;
    fleet.request(0, &SampleRequest { prompt: 1_090, blocks: 2, ..SampleRequest::default() });
    assert_eq!(fleet.open_queries.len(), 1);
    fleet.admit(rank(1), RankTraits { total_kv_blocks: Some(100), ..RankTraits::default() });
    fleet.respond(&[]);
    fleet.settle();
    assert_eq!(fleet.worker(0), 0, "3 prefill and 2 held are less than 4 times 10");
}

#[test]
fn backpressure_contains_class_limit_current_and_retry_delay() {
    let class = QueueClass { requests_max_per_rank: Some(1), ..busy_above(0).queue.classes[0].clone() };
    let mut fleet = SimulatedFleet::new(config_with(|c| c.queue.classes = vec![class]), 2);
    fleet.occupy(90, 0, 1);
    fleet.occupy(91, 1, 1);
    (0..3).for_each(|id| fleet.request(id, &SampleRequest::default()));
    assert_eq!(
        fleet.rejection(2).to_string(),
        "class only takes no more waiting requests: limit requests is 2, 2 are waiting, retry after 1s"
    );
    fleet.request(3, &SampleRequest::from(ResolvedOptions { do_not_queue: true, ..ResolvedOptions::default() }));
    let Rejection::Backpressure(refused) = fleet.rejection(3) else { panic!("queueing is disallowed") };
    assert_eq!((&*refused.class, refused.limit.name(), refused.current), ("only", "do_not_queue", 2));
    fleet.request(
        4,
        &SampleRequest::from(ResolvedOptions { policy_class: Some("gold".into()), ..ResolvedOptions::default() }),
    );
    assert_eq!(
        fleet.rejection(4).to_string(),
        "class is \"gold\", must be the name or the family of one of queue.classes"
    );
    assert!(
        !fleet.outcomes.iter().any(|(_, outcome)| matches!(outcome, RequestOutcome::Booked(d, _) if d.number() > 2))
    );
    assert_eq!(u64::from(BLOCK_SIZE) * 8, fleet.schedule.depths().map(|(_, depth)| depth.raw_tokens).sum::<u64>());
}
