//! Tests of the table of sessions.

use proptest::prelude::*;

use super::*;
use crate::hashing::sequence_hashes;
use crate::load::PromptBlocks;
use crate::protocol::{BlockHash, WorkerId};

const TTL: u64 = 100;

fn id(name: u64) -> SessionId {
    SessionId::new(&format!("session-{name}")).expect("short")
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank::new(WorkerId(worker), 0)
}

fn sessions(max: u32) -> Sessions {
    Sessions::new(Duration::from_nanos(TTL), max)
}

#[test]
fn ids_have_1_to_256_bytes() {
    assert_eq!(SessionId::new(""), Err(SessionIdError { length: 0 }));
    assert!(SessionId::new(&"é".repeat(128)).is_ok());
    assert_eq!(SessionId::new(&"é".repeat(129)), Err(SessionIdError { length: 258 }));
}

#[test]
fn full_table_stays_below_512_bytes_per_session() {
    for max in [1_000, 4_096, 7_169] {
        let mut sessions = sessions(max);
        for n in 0..2 * max {
            let id = SessionId::new(&format!("{n:0>256}")).expect("maximum length");
            sessions.bind(&id, rank(1), Timestamp(0));
        }
        assert!(sessions.bytes() <= 512 * max as usize, "{} bytes for {max} sessions", sessions.bytes());
    }
}

/// Checks the sums.
fn check_working(sessions: &Sessions) {
    let (mut sums, mut agents) = (BTreeMap::new(), BTreeMap::new());
    let (mut place, mut is_counted) = (sessions.oldest, false);
    while place != NONE {
        let session = sessions.at(place);
        is_counted |= place == sessions.first_counted;
        assert_eq!(session.is_counted, is_counted, "the counted sessions are the last ones");
        if is_counted && session.context.own_tokens() > 0 {
            *sums.entry(session.rank).or_default() += u64::from(session.context.own_tokens());
        }
        if session.program != 0 {
            *agents.entry(session.program).or_default() += 1;
        }
        place = session.newer;
    }
    assert_eq!((&sessions.working, &sessions.agents), (&sums, &agents), "working sets and agents");
    assert!(is_counted || sessions.first_counted == NONE);
}

#[derive(Clone, Debug)]
enum SessionOp {
    RankOf(u64),
    Peek(u64),
    Bind(u64, u64),
    Call(u64, u64, u32),
    Forget(u64),
    ForgetRank(u64),
    Time(i64),
}

fn step() -> impl Strategy<Value = SessionOp> {
    let (name, worker) = (0..8u64, 0..3u64);
    prop_oneof![
        3 => name.clone().prop_map(SessionOp::RankOf),
        2 => name.clone().prop_map(SessionOp::Peek),
        4 => (name.clone(), worker.clone()).prop_map(|(name, worker)| SessionOp::Bind(name, worker)),
        3 => (name.clone(), worker.clone(), 0..900u32).prop_map(|(name, worker, tokens)| SessionOp::Call(name, worker, tokens)),
        1 => name.prop_map(SessionOp::Forget),
        1 => worker.prop_map(SessionOp::ForgetRank),
        3 => (-30..80i64).prop_map(SessionOp::Time),
    ]
}

/// Every current binding, in order of last use.
#[derive(Default)]
struct SessionModel(Vec<(u64, WorkerRank, u64)>);

impl SessionModel {
    fn find(&self, name: u64, now: u64) -> Option<WorkerRank> {
        self.0.iter().find(|known| known.0 == name && now - known.2 < TTL).map(|known| known.1)
    }

    fn bind(&mut self, name: u64, rank: WorkerRank, now: u64, max: usize) {
        self.0.retain(|known| known.0 != name && now - known.2 < TTL);
        self.0.push((name, rank, now));
        let extra = self.0.len().saturating_sub(max);
        self.0.drain(..extra);
    }
}

proptest! {
    #[test]
    fn table_matches_a_list(is_shared: bool, max in 1..6u32, steps in proptest::collection::vec(step(), 1..80)) {
        let (mut sessions, mut model) = (sessions(max), SessionModel::default());
        if is_shared {
            sessions.share_as(1, 0);
        }
        let (mut clock, mut latest) = (1_000u64, 0); // the latest time that the table received
        for step in steps {
            let now = Timestamp(clock);
            match step {
                SessionOp::RankOf(name) => {
                    latest = latest.max(clock);
                    let found = model.find(name, latest);
                    prop_assert_eq!(sessions.rank_of(&id(name), now), found);
                    if let Some(rank) = found {
                        model.bind(name, rank, latest, max as usize);
                    }
                }
                SessionOp::Peek(name) => {
                    prop_assert_eq!(sessions.peek(&id(name), now), model.find(name, latest.max(clock)));
                }
                SessionOp::Bind(name, worker) => {
                    latest = latest.max(clock);
                    sessions.bind(&id(name), rank(worker), now);
                    model.bind(name, rank(worker), latest, max as usize);
                }
                SessionOp::Call(name, worker, tokens) => {
                    latest = latest.max(clock);
                    sessions.call(&id(name), rank(worker), &call(name % 3, &PromptBlocks::Counted(1), tokens, 0), now);
                    let bound = sessions.peek(&id(name), now).expect("it is bound");
                    model.bind(name, bound, latest, max as usize);
                }
                SessionOp::Forget(name) => {
                    sessions.forget(&id(name));
                    model.0.retain(|known| known.0 != name);
                }
                SessionOp::ForgetRank(worker) => {
                    sessions.forget_rank(rank(worker));
                    model.0.retain(|known| known.1 != rank(worker));
                }
                SessionOp::Time(by) => clock = clock.saturating_add_signed(by),
            }
            sessions.check_invariants();
            check_working(&sessions);
        }
        for name in 0..8 {
            prop_assert_eq!(sessions.peek(&id(name), Timestamp(clock)), model.find(name, latest.max(clock)));
        }
    }
}

const SECOND: u64 = 1_000_000_000;

fn shared(writer: u64, sequence: u64, max: u32) -> Sessions {
    let mut sessions = Sessions::new(Duration::from_secs(100), max);
    sessions.share_as(writer, sequence);
    sessions
}

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * SECOND)
}

/// All bindings, new ones first.
fn all(sessions: &mut Sessions, now: Timestamp) -> Vec<SessionBinding> {
    sessions.outbound(Duration::from_secs(1), usize::MAX, now)
}

fn exchange(from: &mut Sessions, to: &mut Sessions, now: Timestamp) {
    all(from, now).iter().for_each(|binding| to.receive(binding, now));
    to.check_invariants();
    check_working(to);
}

#[test]
fn new_bindings_are_sent_once_and_all_are_repeated_within_the_period() {
    let mut one = shared(1, 0, 100);
    let period = Duration::from_secs(10);
    (0..20).for_each(|n| one.bind(&id(n), rank(n), at(0)));
    assert_eq!(one.outbound(period, usize::MAX, at(0)).len(), 20);
    assert_eq!(one.outbound(period, usize::MAX, at(0)).len(), 0);
    one.bind(&id(1), rank(9), at(0));
    assert_eq!(one.outbound(period, usize::MAX, at(0)).len(), 1);
    let mut repeated = std::collections::BTreeSet::new();
    for seconds in 1..=10 {
        let bindings = one.outbound(period, usize::MAX, at(seconds));
        assert_eq!(bindings.len(), 2);
        repeated.extend(bindings.iter().map(|binding| binding.id.to_string()));
    }
    assert_eq!(repeated.len(), 20);
}

#[test]
fn messages_are_bounded_and_later_ones_have_the_rest() {
    let mut one = shared(1, 0, 100);
    (0..20).for_each(|n| one.bind(&id(n), rank(n), at(0)));
    let mut sent = 0;
    while let bindings @ [_, ..] = &*one.outbound(Duration::from_secs(10), 200, at(0)) {
        assert!(bindings.iter().map(SessionBinding::bytes_max).sum::<usize>() <= 200);
        sent += bindings.len();
    }
    assert_eq!(sent, 20);
}

#[test]
fn idle_time_continues_at_other_replicas() {
    let (mut one, mut two) = (shared(1, 0, 8), shared(2, 0, 8));
    one.bind(&id(1), rank(1), at(0));
    exchange(&mut one, &mut two, at(99));
    assert_eq!(two.peek(&id(1), at(99)), Some(rank(1)));
    assert_eq!((two.rank_of(&id(1), at(100)), two.len()), (None, 0));
    one.bind(&id(2), rank(1), at(100));
    let late = all(&mut one, at(200));
    assert_eq!(late, [], "an expired binding is not sent");
}

#[test]
fn a_full_table_keeps_the_latest_uses_of_all_replicas() {
    let (mut one, mut two) = (shared(1, 0, 4), shared(2, 0, 4));
    for n in 0..4 {
        one.bind(&id(n), rank(1), at(2 * n));
        two.bind(&id(10 + n), rank(2), at(2 * n + 1));
    }
    exchange(&mut one, &mut two, at(10));
    exchange(&mut two, &mut one, at(10));
    for known in [&one, &two] {
        let kept: Vec<u64> =
            [0, 10, 1, 11, 2, 12, 3, 13].into_iter().filter(|n| known.peek(&id(*n), at(10)).is_some()).collect();
        assert_eq!(kept, [2, 12, 3, 13]);
    }
}

#[test]
fn a_table_that_is_not_shared_neither_sends_nor_receives() {
    let mut alone = Sessions::new(Duration::from_secs(100), 8);
    let mut other = shared(2, 0, 8);
    other.bind(&id(1), rank(1), at(0));
    exchange(&mut other, &mut alone, at(0));
    alone.bind(&id(2), rank(2), at(1));
    assert_eq!((alone.len(), all(&mut alone, at(2))), (1, vec![]));
    alone.share_as(1, 50);
    let version = BindingVersion { sequence: 51, writer: 1 };
    assert_eq!(all(&mut alone, at(2)).iter().map(|binding| binding.version).collect::<Vec<_>>(), [version]);
    alone.check_invariants();
}

/// A call with a prompt of hashes or of counted blocks, of which a rank holds `held_blocks` of 10 tokens.
fn call(program: u64, prompt: &PromptBlocks, prompt_tokens: u32, held_blocks: u32) -> Call<'_> {
    let (fingerprint, held_tokens) = (prompt.fingerprint(), held_blocks * 10);
    Call { program, prompt, fingerprint, prompt_tokens, held_blocks, held_tokens }
}

/// A prompt of `blocks` blocks, of which the first `common` are those of all families.
fn prompt(family: u64, common: usize, blocks: usize) -> PromptBlocks {
    let block = |n: usize| BlockHash(crate::test_support::mix(n as u64 ^ if n < common { 0 } else { family << 32 }));
    PromptBlocks::Hashed(sequence_hashes(&(0..blocks).map(block).collect::<Vec<_>>()))
}

/// Calls of an agent, as blocks of its prompt, the family of these, and the time in seconds. Returns the tokens of its
/// context after each.
fn contexts(calls: &[(usize, u64, u64)]) -> Vec<u32> {
    let mut sessions = Sessions::new(Duration::from_secs(3_600), 9);
    let after = |&(blocks, family, seconds): &(usize, u64, u64)| {
        let prompt = prompt(family, 2, blocks);
        sessions.call(&id(1), rank(1), &call(1, &prompt, blocks as u32 * 10, 0), at(seconds));
        check_working(&sessions);
        sessions.context_tokens(&id(1))
    };
    calls.iter().map(after).collect()
}

#[test]
fn auxiliary_calls_keep_the_context_and_compactions_replace_it() {
    let grows = [(100, 1, 0), (120, 1, 5), (118, 1, 9), (60, 1, 12)];
    assert_eq!(contexts(&grows), [1_000, 1_200, 1_180, 600]);
    let titles = [(100, 1, 0), (9, 2, 1), (8, 3, 2), (110, 1, 9), (9, 2, 10), (120, 1, 100)];
    assert_eq!(contexts(&titles), [1_000, 1_000, 1_000, 1_100, 1_100, 1_200]);
    let compacted = [(200, 1, 0), (20, 1, 9), (22, 1, 12)];
    assert_eq!(contexts(&compacted), [2_000, 200, 220], "it begins like the context");
    let replaced = [(200, 1, 0), (20, 2, 20), (22, 2, 40), (25, 2, 45)];
    assert_eq!(contexts(&replaced), [2_000, 2_000, 220, 250], "the second short call after half a minute");

    let mut sessions = Sessions::new(Duration::from_secs(3_600), 9);
    sessions.call(&id(1), rank(1), &call(1, &prompt(1, 5, 20), 200, 0), at(0));
    sessions.call(&id(1), rank(2), &call(1, &PromptBlocks::Counted(0), 0, 0), at(1));
    assert_eq!(sessions.rank_of(&id(1), at(2)), Some(rank(2)), "a prompt of unknown length is no auxiliary call");
}

#[test]
fn working_sets_follow_the_newest_contexts() {
    let mut sessions = Sessions::new(Duration::from_secs(3_600), 9);
    let place = |sessions: &mut Sessions, agent, to, blocks: usize, held, seconds| {
        let prompt = prompt(agent, 5, blocks);
        sessions.call(&id(agent), rank(to), &call(agent / 2 + 1, &prompt, blocks as u32 * 10, held), at(seconds));
        check_working(sessions);
        [1, 2].map(|worker| sessions.working_tokens(rank(worker)))
    };
    assert_eq!(place(&mut sessions, 1, 1, 20, 0, 0), [200, 0]);
    assert_eq!(place(&mut sessions, 2, 1, 15, 5, 1), [300, 0], "five blocks are those of the first agent");
    assert_eq!(place(&mut sessions, 2, 2, 30, 5, 2), [200, 250], "ten were evicted");
    assert_eq!(
        (sessions.programs(), sessions.returns()),
        (2, Returns { calls: 1, held_blocks: 5, evicted_blocks: 10, ..Returns::default() })
    );
    assert_eq!(place(&mut sessions, 3, 2, 10, 5, 250), [200, 300]);
    assert_eq!(place(&mut sessions, 2, 2, 31, 30, 301), [0, 310], "the first agent is idle");
    assert_eq!(sessions.returns(), Returns { calls: 2, held_blocks: 35, evicted_blocks: 10, ..Returns::default() });
    assert_eq!((sessions.programs(), sessions.forget_rank(rank(2))), (2, 2));
    assert_eq!((sessions.programs(), sessions.working_tokens(rank(2))), (1, 0));
    let (now, restarted) = (Returns { calls: 9, ..Returns::default() }, Returns { calls: 2, ..Returns::default() });
    assert_eq!((now.since(restarted).calls, restarted.since(now).calls), (7, 2));
}
