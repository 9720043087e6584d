//! Examples, and property tests of random histories against the ejection limits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::protocol::WorkerId;
use crate::test_support::rank;

const RULES: HealthRules = HealthRules {
    probe_failures_max: 3,
    probe_successes_min: 2,
    probe_stale: Duration::from_secs(21),
    outcome_failures_max: 5,
    ejection: Duration::from_secs(30),
    ejected_share_max: 0.5,
};

const NOBODY: [u64; 0] = [];

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * 1_000_000_000)
}

/// A monitor of single-rank workers 0 to n − 1.
struct Pool {
    monitor: Monitor,
    /// Visits every rank after each input.
    whole: Monitor,
    members: BTreeMap<WorkerRank, Member>,
    changes: Vec<HealthChange>,
}

impl Pool {
    fn new(rules: HealthRules, ranks: u64) -> Self {
        let members = (0..ranks)
            .map(|worker| (rank(worker), Member { incarnation: 0, available: true, asleep: false }))
            .collect();
        let [monitor, whole] = [rules; 2].map(Monitor::new);
        let mut pool = Self { monitor, whole, members, changes: Vec::new() };
        pool.tell_members(at(0));
        pool
    }

    fn step(&mut self, input: HealthInput, now: Timestamp) {
        for input in [input.clone(), HealthInput::Members(self.members.clone())] {
            self.whole.step(input, now, &mut Vec::new());
        }
        self.monitor.step(input, now, &mut self.changes);
        self.monitor.check_invariants().expect("the floor holds");
        assert_eq!(self.monitor.exclusions(), self.whole.exclusions());
    }

    fn tell_members(&mut self, now: Timestamp) {
        self.step(HealthInput::Members(self.members.clone()), now);
    }

    fn set(&mut self, worker: u64, member: Member, now: Timestamp) {
        self.members.insert(rank(worker), member);
        self.tell_members(now);
    }

    fn outcome(&mut self, worker: u64, outcome: Outcome, now: Timestamp) {
        let incarnation = self.members.get(&rank(worker)).map_or(0, |member| member.incarnation);
        self.step(HealthInput::Outcome { rank: rank(worker), incarnation, outcome, began: None }, now);
    }

    /// A request sent at `began` is answered at `now`.
    fn answered(&mut self, worker: u64, began: Timestamp, now: Timestamp) {
        let incarnation = self.members[&rank(worker)].incarnation;
        let input = HealthInput::Outcome { rank: rank(worker), incarnation, outcome: Outcome::Ok, began: Some(began) };
        self.step(input, now);
    }

    fn fail(&mut self, worker: u64, times: u32, now: Timestamp) {
        (0..times).for_each(|_| self.outcome(worker, Outcome::Timeout, now));
    }

    fn probe(&mut self, worker: u64, is_well: bool, now: Timestamp) {
        let answer = if is_well { Ok(()) } else { Err("status 503".to_owned()) };
        self.step(HealthInput::Probed { worker: WorkerId(worker), prober: 1, answer }, now);
    }

    fn ejected(&self) -> Vec<u64> {
        self.monitor.exclusions().out_of_service().iter().map(|rank| rank.worker.0).collect()
    }

    fn of(&self, worker: u64) -> RankHealth {
        self.monitor.report().into_iter().find(|row| row.rank == rank(worker)).expect("a row a rank")
    }
}

#[test]
fn five_failures_in_a_row_eject_and_a_success_between_resets() {
    let mut pool = Pool::new(RULES, 4);
    pool.fail(0, 4, at(1));
    assert!(pool.monitor.counts_failures_of(rank(0)));
    pool.outcome(0, Outcome::Ok, at(1));
    assert!(!pool.monitor.counts_failures_of(rank(0)));
    pool.fail(0, 4, at(1));
    assert_eq!(pool.ejected(), NOBODY);
    pool.outcome(0, Outcome::Reset, at(1));
    assert_eq!(pool.ejected(), [0]);
    assert_eq!(pool.changes, [HealthChange::Ejected { rank: rank(0), cause: Cause::Outcomes }]);
    assert_eq!(pool.of(0).state, HealthState::Ejected { until: Some(at(31)) });
    assert_eq!(
        pool.of(0).to_string(),
        "0/0 is ejected until 31.0 s after the router's start: 5 requests in a row failed, the last: connection reset"
    );
    assert_eq!(pool.of(1).to_string(), "1/0 is healthy");
}

#[test]
fn refusals_misconfiguration_and_invalid_answers_count_as_failures() {
    for (outcome, apart) in [(refused(Some(1)), 60), (Outcome::Misconfigured, 0), (Outcome::InvalidAnswer, 0)] {
        let mut pool = Pool::new(RULES, 4);
        (0..4).for_each(|n| pool.outcome(0, outcome, at(1 + n * apart)));
        assert_eq!(pool.ejected(), NOBODY, "{outcome:?}");
        pool.outcome(0, outcome, at(1 + 4 * apart));
        assert_eq!(pool.ejected(), [0], "{outcome:?}");
        assert!(pool.of(0).reason.ends_with(outcome.name()), "{}", pool.of(0).reason);
    }
}

#[test]
fn ejections_last_longer_up_to_a_cap_and_healthy_time_shortens_them() {
    let mut pool = Pool::new(RULES, 4);
    let mut now = 0;
    for expected in [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300] {
        pool.fail(0, 5, at(now));
        assert_eq!(pool.monitor.next_wake(), Some(at(now + expected)));
        pool.step(HealthInput::Wake, at(now + expected - 1));
        assert_eq!(pool.ejected(), [0]);
        now += expected;
        pool.step(HealthInput::Wake, at(now));
        assert_eq!(pool.ejected(), NOBODY);
    }
    now += 9 * 30;
    pool.fail(0, 5, at(now));
    assert_eq!(pool.monitor.next_wake(), Some(at(now + 90)), "11 sentences, 9 forgiven, one more");
}

#[test]
fn outcomes_during_an_ejection_are_ignored() {
    let mut pool = Pool::new(RULES, 4);
    pool.fail(0, 5, at(1));
    pool.outcome(0, Outcome::Ok, at(2));
    pool.fail(0, 50, at(3));
    assert_eq!(pool.of(0).state, HealthState::Ejected { until: Some(at(31)) });
    pool.step(HealthInput::Wake, at(31));
    assert_eq!(pool.changes.last(), Some(&HealthChange::Returned(rank(0))));
    pool.fail(0, 4, at(32));
    assert_eq!(pool.ejected(), NOBODY, "counted anew");
}

#[test]
fn failed_probes_eject_all_ranks_of_an_engine_until_enough_succeed() {
    let mut pool = Pool::new(RULES, 4);
    pool.members.insert(WorkerRank::new(WorkerId(0), 1), Member { incarnation: 0, available: true, asleep: false });
    pool.tell_members(at(0));
    pool.probe(0, false, at(1));
    pool.probe(0, false, at(6));
    assert_eq!(pool.ejected(), NOBODY);
    pool.probe(0, false, at(11));
    assert_eq!(pool.ejected(), [0, 0]);
    assert_eq!(
        pool.of(0).to_string(),
        "0/0 is ejected until probes succeed: 3 probes in a row failed, the last: status 503"
    );
    pool.probe(0, true, at(16));
    assert_eq!(pool.ejected(), [0, 0]);
    pool.probe(0, true, at(21));
    assert_eq!(pool.ejected(), NOBODY);
}

#[test]
fn a_probe_without_effect_visits_no_other_rank() {
    let mut pool = Pool::new(RULES, 4);
    (1..=3).for_each(|second| pool.probe(0, false, at(second)));
    let before = pool.monitor.next_wake();
    assert_eq!(before, Some(at(3) + RULES.probe_stale));
    pool.probe(0, false, at(9));
    assert_eq!(pool.monitor.next_wake(), before, "computed from all ranks");
    assert_eq!(pool.whole.next_wake(), Some(at(9) + RULES.probe_stale));
    pool.step(HealthInput::Wake, at(3) + RULES.probe_stale);
    assert_eq!(pool.ejected(), [0], "the prober is not silent");
}

#[test]
fn silent_prober_ejects_no_rank() {
    let mut pool = Pool::new(RULES, 4);
    (0..3).for_each(|n| pool.probe(0, false, at(n)));
    assert_eq!((pool.ejected(), pool.monitor.next_wake()), (vec![0], Some(at(23))));
    pool.step(HealthInput::Wake, at(23));
    assert_eq!((pool.ejected(), pool.monitor.next_wake()), (vec![], None));
}

#[test]
fn ranks_beyond_the_limits_are_suspected() {
    let mut pool = Pool::new(RULES, 1);
    pool.fail(0, 9, at(1));
    assert_eq!((pool.ejected(), pool.of(0).state), (vec![], HealthState::Suspected));
    assert!(pool.of(0).to_string().contains("kept as the last eligible rank: 9 requests"), "{}", pool.of(0));

    let mut pool = Pool::new(RULES, 5);
    for worker in 0..5 {
        pool.fail(worker, 5, at(1 + worker));
    }
    assert_eq!(pool.ejected(), [0, 1], "half of 5, rounded down");
    assert_eq!(pool.of(4).state, HealthState::Suspected);
    pool.outcome(4, Outcome::Ok, at(7));
    assert_eq!(pool.of(4).state, HealthState::Healthy, "a success was reported");
    pool.step(HealthInput::Wake, at(31));
    assert_eq!(pool.ejected(), [1, 2], "the longest-suspected rank is ejected");

    let mut pair = Pool::new(HealthRules { ejected_share_max: 0.01, ..RULES }, 2);
    pair.fail(1, 5, at(1));
    assert_eq!(pair.ejected(), [1], "one of two ranks may be ejected");
    let mut never = Pool::new(HealthRules { ejected_share_max: 0.0, ..RULES }, 2);
    never.fail(1, 5, at(1));
    assert_eq!(never.ejected(), NOBODY, "unless ejections are disabled");
}

#[test]
fn new_incarnation_starts_healthy() {
    let mut pool = Pool::new(RULES, 2);
    pool.fail(0, 5, at(1));
    (0..3).for_each(|n| pool.probe(0, false, at(n)));
    pool.set(0, Member { incarnation: 1, available: true, asleep: false }, at(2));
    assert_eq!((pool.ejected(), pool.of(0).state), (vec![], HealthState::Healthy));
    let late = HealthInput::Outcome { rank: rank(0), incarnation: 0, outcome: Outcome::Timeout, began: None };
    (0..9).for_each(|_| pool.step(late.clone(), at(3)));
    assert!(!pool.monitor.counts_failures_of(rank(0)));
    pool.step(HealthInput::Probed { worker: WorkerId(0), prober: 2, answer: Ok(()) }, at(4));
    (0..9).for_each(|_| pool.probe(0, false, at(4)));
    assert_eq!(pool.ejected(), NOBODY, "results of an earlier prober are ignored");
}

/// Four ranks; connections to all but the last fail in sequence.
fn three_of_four_unreachable() -> Pool {
    let mut pool = Pool::new(RULES, 4);
    for worker in 0..3 {
        (0..5).for_each(|_| pool.outcome(worker, Outcome::ConnectFailed, at(1 + worker)));
    }
    pool
}

#[test]
fn unreachable_ranks_are_down_regardless_of_their_share() {
    let mut pool = three_of_four_unreachable();
    assert_eq!(pool.ejected(), [0, 1, 2], "half of 4 are 2");
    assert!(pool.monitor.exclusions().ejected.is_empty(), "the share remains for suspected ranks");
    assert_eq!(
        pool.of(0).to_string(),
        "0/0 is ejected until 31.0 s after the router's start: 5 requests in a row failed, the last: could not connect"
    );
    // The last serving rank is suspected, never ejected; down ranks do not serve.
    pool.fail(3, 5, at(4));
    assert_eq!((pool.ejected(), pool.of(3).state), (vec![0, 1, 2], HealthState::Suspected));
    (0..5).for_each(|_| pool.outcome(3, Outcome::ConnectFailed, at(5)));
    assert_eq!(pool.ejected(), [0, 1, 2, 3], "no rank serves, as reported");
}

#[test]
fn a_broken_connection_after_refused_ones_does_not_prove_reachability() {
    let mut pool = three_of_four_unreachable();
    pool.outcome(0, Outcome::Reset, at(4));
    assert_eq!(pool.ejected(), [0, 1, 2], "sent before the ejection");
    let later =
        HealthInput::Outcome { rank: rank(0), incarnation: 0, outcome: Outcome::ServerError, began: Some(at(5)) };
    pool.step(later, at(5));
    assert_eq!(pool.monitor.exclusions().ejected, [rank(0)].into(), "reachable and suspected");
}

#[test]
fn only_requests_sent_after_the_ejection_end_it() {
    let mut pool = three_of_four_unreachable();
    pool.answered(0, at(0), at(4));
    assert_eq!(pool.ejected(), [0, 1, 2]);
    pool.answered(0, at(4), at(5));
    assert_eq!(pool.ejected(), [1, 2]);
    assert_eq!(pool.of(0).state, HealthState::Healthy);
    // Two successful probes are sufficient, independent of earlier failures.
    pool.probe(1, true, at(6));
    assert_eq!(pool.ejected(), [1, 2]);
    pool.probe(1, true, at(7));
    assert_eq!(pool.ejected(), [2]);
}

#[test]
fn one_successful_probe_is_sufficient_if_no_rank_serves() {
    let mut pool = Pool::new(RULES, 3);
    for worker in 0..3 {
        (0..3).for_each(|n| pool.probe(worker, false, at(1 + n)));
    }
    assert_eq!(pool.ejected(), [0, 1, 2], "all unreachable ranks are down");
    pool.probe(1, true, at(5));
    assert_eq!(pool.ejected(), [0, 2]);
    pool.probe(2, true, at(6));
    assert_eq!(pool.ejected(), [0, 2], "others serve: as many as the settings say");
}

#[test]
fn successful_requests_contradict_failing_probes() {
    let mut pool = Pool::new(RULES, 2);
    for worker in 0..2 {
        (0..3).for_each(|n| pool.probe(worker, false, at(1 + n)));
    }
    assert_eq!(pool.ejected(), [0, 1]);
    pool.answered(0, at(4), at(5));
    (0..9).for_each(|n| pool.probe(0, false, at(6 + n)));
    assert_eq!(pool.ejected(), [1], "the health path is wrong, the engine is healthy");
    pool.outcome(0, Outcome::Reset, at(16));
    (0..3).for_each(|n| pool.probe(0, false, at(17 + n)));
    assert_eq!(pool.ejected(), [0, 1]);
}

fn refused(seconds: Option<u64>) -> Outcome {
    Outcome::Refused { retry_after: seconds.map(Duration::from_secs) }
}

impl Pool {
    fn refusing(&self) -> Vec<u64> {
        self.monitor.exclusions().refusing.iter().map(|rank| rank.worker.0).collect()
    }
}

#[test]
fn consecutive_refusals_double_the_back_off() {
    let mut pool = Pool::new(RULES, 4);
    let mut now = 1;
    for (n, expected) in [1, 2, 4, 8].into_iter().enumerate() {
        pool.outcome(0, refused(None), at(now));
        // Requests sent before the first refusal arrived count once.
        (0..20).for_each(|_| pool.outcome(0, refused(None), at(now)));
        assert_eq!((pool.refusing(), pool.ejected()), (vec![0], vec![]), "{n}");
        assert_eq!(pool.monitor.next_wake(), Some(at(now + expected)), "{n}");
        assert_eq!(pool.of(0).state, HealthState::Refusing { until: at(now + expected) });
        pool.step(HealthInput::Wake, at(now + expected));
        assert_eq!(pool.refusing(), NOBODY);
        now += expected;
    }
    pool.outcome(0, refused(None), at(now));
    assert_eq!(pool.ejected(), [0], "the fifth back-off in a row");
    assert!(pool.of(0).reason.contains("refused for lack of capacity"), "{}", pool.of(0));
}

#[test]
fn retry_after_extends_the_back_off_up_to_a_minute() {
    let mut pool = Pool::new(RULES, 4);
    pool.outcome(0, refused(Some(7)), at(1));
    assert_eq!(pool.monitor.next_wake(), Some(at(8)));
    pool.answered(0, at(2), at(3));
    assert_eq!(pool.refusing(), [0], "as requested by Retry-After");
    pool.outcome(1, refused(Some(3_600)), at(1));
    pool.step(HealthInput::Wake, at(8));
    assert_eq!((pool.refusing(), pool.monitor.next_wake()), (vec![1], Some(at(61))));
}

#[test]
fn an_accepted_request_ends_a_back_off() {
    let mut pool = Pool::new(RULES, 4);
    pool.outcome(0, refused(None), at(1));
    pool.step(HealthInput::Wake, at(2));
    pool.outcome(0, refused(None), at(2));
    pool.answered(0, at(0), at(3));
    assert_eq!(pool.refusing(), [0], "sent before it was full");
    pool.answered(0, at(2), at(3));
    assert_eq!((pool.refusing(), pool.monitor.counts_failures_of(rank(0))), (vec![], false));
    pool.outcome(0, refused(None), at(4));
    assert_eq!(pool.monitor.next_wake(), Some(at(5)), "counted anew");
}

#[test]
fn suspected_rank_backs_off() {
    let mut pool = Pool::new(HealthRules { ejected_share_max: 0.0, ..RULES }, 4);
    (0..5).for_each(|_| pool.outcome(0, Outcome::ServerError, at(1)));
    assert_eq!((pool.of(0).state, pool.refusing()), (HealthState::Suspected, vec![]));
    pool.outcome(0, Outcome::ServerError, at(2));
    assert_eq!((pool.of(0).state, pool.refusing()), (HealthState::Suspected, vec![0]));
    pool.fail(1, 9, at(2));
    assert_eq!(pool.refusing(), [0], "slow ranks are not: others would drown");
}

impl Pool {
    fn stalls(&mut self, overdue: &[u64], progressed: &[u64], now: Timestamp) {
        let overdue = overdue.iter().map(|worker| (rank(*worker), self.members[&rank(*worker)].incarnation)).collect();
        let progressed = progressed.iter().copied().map(rank).collect();
        self.step(HealthInput::Stalls { overdue, progressed }, now);
    }
}

#[test]
fn stalled_rank_is_tried_between_back_offs_until_it_makes_progress() {
    let mut pool = Pool::new(RULES, 4);
    let mut now = 1;
    for seconds in [4, 8, 16, 16] {
        pool.stalls(&[0], &[], at(now));
        assert_eq!(pool.of(0).state, HealthState::Stalled { until: at(now + seconds) });
        assert_eq!((pool.refusing(), pool.ejected()), (vec![0], vec![]));
        pool.stalls(&[0], &[], at(now + seconds - 1));
        assert_eq!(pool.refusing(), [0], "still");
        now += seconds;
        pool.stalls(&[0], &[], at(now));
        assert_eq!(pool.refusing(), NOBODY, "a request may try it, even if no timer came before");
    }
    assert_eq!(pool.changes, [HealthChange::Stalled(rank(0))], "reported once");
    pool.stalls(&[0], &[], at(now));
    pool.stalls(&[], &[0], at(now + 1));
    assert_eq!((pool.of(0).state, pool.monitor.counts_failures_of(rank(0))), (HealthState::Healthy, false));
    pool.stalls(&[0], &[], at(now + 2));
    assert_eq!(pool.of(0).state, HealthState::Stalled { until: at(now + 6) }, "counted anew");
    pool.members.insert(rank(0), Member { incarnation: 1, available: true, asleep: false });
    pool.tell_members(at(now + 3));
    let earlier = BTreeMap::from([(rank(0), 0)]);
    pool.step(HealthInput::Stalls { overdue: earlier, progressed: BTreeSet::new() }, at(now + 3));
    assert_eq!(pool.of(0).state, HealthState::Healthy, "another engine");
}

#[test]
fn progress_ends_no_back_off_of_a_refusal() {
    let mut pool = Pool::new(RULES, 4);
    pool.outcome(0, refused(None), at(1));
    pool.stalls(&[0], &[], at(1));
    pool.stalls(&[], &[0], at(1));
    assert_eq!(pool.of(0).state, HealthState::Refusing { until: at(2) });
}

#[derive(Clone, Debug)]
enum Act {
    Outcome(u64, Outcome),
    Answered(u64),
    Failures(u64),
    Unreachable(u64),
    Probe(u64, bool),
    Available(u64, bool),
    /// The engine falls asleep or wakes up.
    Sleep(u64, bool),
    Stalls(u64, u64),
    Join(u64),
    Leave(u64),
    Pass(u64),
}

fn acts() -> impl Strategy<Value = Act> {
    let outcome = prop_oneof![
        Just(Outcome::Ok),
        Just(Outcome::ConnectFailed),
        Just(Outcome::Timeout),
        Just(Outcome::ServerError),
        Just(Outcome::Reset),
        prop::option::of(0..90u64)
            .prop_map(|seconds| Outcome::Refused { retry_after: seconds.map(Duration::from_secs) }),
        Just(Outcome::Misconfigured),
        Just(Outcome::InvalidAnswer)
    ];
    prop_oneof![
        4 => (0..9u64, outcome).prop_map(|(worker, outcome)| Act::Outcome(worker, outcome)),
        2 => (0..9u64).prop_map(Act::Answered),
        4 => (0..9u64).prop_map(Act::Failures),
        4 => (0..9u64).prop_map(Act::Unreachable),
        6 => (0..9u64, prop::bool::weighted(0.3)).prop_map(|(worker, well)| Act::Probe(worker, well)),
        2 => (0..9u64, any::<bool>()).prop_map(|(worker, available)| Act::Available(worker, available)),
        2 => (0..9u64, 0..9u64).prop_map(|(overdue, progressed)| Act::Stalls(overdue, progressed)),
        2 => (0..9u64, any::<bool>()).prop_map(|(worker, asleep)| Act::Sleep(worker, asleep)),
        1 => (0..9u64).prop_map(Act::Join),
        1 => (0..9u64).prop_map(Act::Leave),
        3 => (0..40u64).prop_map(Act::Pass),
    ]
}

proptest! {
    /// The limits hold after each step (`Pool::step`), and when the faults end all ranks return.
    #[test]
    fn the_floor_holds_and_every_rank_returns(
        ranks in 1..9u64,
        share in prop_oneof![Just(0.0), Just(0.5), Just(1.0), 0.0..1.0f64],
        history in prop::collection::vec(acts(), 1..120),
    ) {
        let rules = HealthRules { ejected_share_max: share, ..RULES };
        let (mut pool, mut now) = (Pool::new(rules, ranks), 0);
        let mut incarnation = 0;
        for act in history {
            match act {
                Act::Outcome(worker, outcome) => pool.outcome(worker, outcome, at(now)),
                Act::Answered(worker) => if pool.members.contains_key(&rank(worker)) {
                    pool.answered(worker, at(now), at(now));
                    let down = &pool.monitor.exclusions().down;
                    prop_assert!(!down.contains(&rank(worker)), "response from {}", worker);
                },
                Act::Failures(worker) => pool.fail(worker, 5, at(now)),
                Act::Unreachable(worker) => {
                    (0..5).for_each(|_| pool.outcome(worker, Outcome::ConnectFailed, at(now)));
                    let down = &pool.monitor.exclusions().down;
                    prop_assert_eq!(down.contains(&rank(worker)), pool.members.contains_key(&rank(worker)));
                }
                Act::Probe(worker, well) => pool.probe(worker, well, at(now)),
                Act::Available(worker, available) => if let Some(&known) = pool.members.get(&rank(worker)) {
                    pool.set(worker, Member { available, ..known }, at(now));
                },
                Act::Sleep(worker, asleep) => if let Some(&known) = pool.members.get(&rank(worker)) {
                    pool.set(worker, Member { asleep, ..known }, at(now));
                },
                Act::Stalls(overdue, progressed) => if pool.members.contains_key(&rank(overdue)) {
                    pool.stalls(&[overdue], &[progressed], at(now));
                },
                Act::Join(worker) => {
                    incarnation += 1;
                    pool.set(worker, Member { incarnation, available: true, asleep: false }, at(now));
                }
                Act::Leave(worker) => {
                    pool.members.remove(&rank(worker));
                    pool.tell_members(at(now));
                }
                Act::Pass(seconds) => {
                    now += seconds;
                    pool.step(HealthInput::Wake, at(now));
                }
            }
            let (ejected, ranks) = (pool.monitor.exclusions().ejected.len(), pool.members.len());
            let allowed = if share > 0.0 && ranks > 1 { ((ranks as f64 * share) as usize).clamp(1, ranks - 1) } else { 0 };
            prop_assert!(ejected <= allowed, "{ejected} of {ranks} at {share}");
            let asleep = pool.members.iter().filter(|(_, member)| member.asleep).map(|(rank, _)| *rank);
            prop_assert_eq!(&pool.monitor.exclusions().asleep, &asleep.collect());
            for row in pool.monitor.report() {
                prop_assert_eq!(row.reason.is_empty(), row.state == HealthState::Healthy, "{}", row);
            }
        }
        pool.members.values_mut().for_each(|member| member.asleep = false);
        pool.tell_members(at(now));
        // After the faults only ticks are sent, when the monitor requires them.
        let mut steps = 0;
        while let Some(at) = pool.monitor.next_wake() {
            pool.step(HealthInput::Wake, at);
            steps += 1;
            prop_assert!(steps <= 40, "each rank, back-off and prober ends once");
        }
        prop_assert!(pool.monitor.exclusions().is_empty());
        prop_assert!(pool.monitor.report().iter().all(|row| row.state == HealthState::Healthy));
    }
}
