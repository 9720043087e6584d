//! Event sources against publishers that restart and a network that loses, duplicates, reorders and delays messages.
//!
//! The model is the publisher's cache after each message of each life. `PROPTEST_CASES` sets the number of cases; a
//! failure prints its seed.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use pointsman::protocol::Timestamp;
use pointsman::test_support::mix;
use pointsman::{
    StreamState,
    internals::ingest::{IngestEffect, IngestInput, Note, Source, SourceConfig},
    internals::wire::Report,
};
use proptest::prelude::*;

use crate::effort::effort;

/// Blocks of a cache.
type Cache = BTreeSet<u8>;
type Payload = Vec<u8>;
type Message = (u64, Payload);

/// Effect of one batch on a cache.
#[derive(Clone, Copy, Debug)]
enum Batch {
    Stored(u8, u8),
    Removed(u8, u8),
    Cleared,
}

impl Batch {
    /// The batch with this number, equal for every publisher whose life begins like the others.
    fn drawn(draw: u64) -> Self {
        let blocks = ((draw >> 8) as u8 % 32, (draw >> 16) as u8 % 32);
        match draw % 16 {
            0 => Self::Cleared,
            1..=9 => Self::Stored(blocks.0, blocks.1),
            _ => Self::Removed(blocks.0, blocks.1),
        }
    }

    /// `mark` distinguishes lives.
    fn encoded(self, mark: u8) -> Payload {
        match self {
            Self::Stored(a, b) => vec![0, a, b, mark],
            Self::Removed(a, b) => vec![1, a, b, mark],
            Self::Cleared => vec![2, mark],
        }
    }

    fn apply(payload: &[u8], cache: &mut Cache) -> Report {
        let mut applied = Report { events: 1, usable: 1, ..Report::default() };
        match payload {
            [0, a, b, _] => {
                cache.extend([*a, *b]);
                applied.stored_blocks = 2;
            }
            [1, a, b, _] => {
                cache.remove(a);
                cache.remove(b);
            }
            [2, _] => {
                cache.clear();
                applied.cleared = true;
            }
            other => panic!("unexpected {other:?}"),
        }
        applied
    }
}

/// One life of a publisher: all sent messages, and its cache after each message.
#[derive(Clone, Debug, Default)]
struct Life {
    /// Number of initial messages that are equal in every life.
    shared: u64,
    sent: Vec<Payload>,
    caches: Vec<Cache>,
}

impl Life {
    fn publish(&mut self, mark: u8) -> Message {
        let sequence = self.sent.len() as u64;
        let mark = if sequence < self.shared { 0 } else { mark };
        let payload = Batch::drawn(mix(sequence ^ u64::from(mark) << 32)).encoded(mark);
        let mut cache = self.caches.last().cloned().unwrap_or_default();
        Batch::apply(&payload, &mut cache);
        self.sent.push(payload.clone());
        self.caches.push(cache);
        (sequence, payload)
    }
}

#[derive(Clone, Debug)]
enum Answer {
    Message(Message),
    Ended,
    Failed,
}

/// State of a requested replay.
#[derive(Clone, Debug)]
enum Asked {
    Nothing,
    Waiting(u64),
    Answering(VecDeque<Answer>),
}

/// State of the source's owner since the rank's blocks were last dropped.
#[derive(Clone, Debug, Default)]
struct Epoch {
    /// Applied messages, and the number of the first one.
    applied: Vec<Payload>,
    first: u64,
    /// Whether the cache is known completely: from the first message on, or since a clear.
    is_exact: bool,
    cache: Cache,
}

impl Epoch {
    /// The number of the next expected message, if any was applied.
    fn next(&self) -> Option<u64> {
        (!self.applied.is_empty()).then_some(self.first + self.applied.len() as u64)
    }

    /// Whether the applied messages are exactly those of `life`.
    fn is_of(&self, life: &Life) -> bool {
        life.sent.get(self.first as usize..).is_some_and(|sent| sent.starts_with(&self.applied))
    }
}

struct World {
    lives: Vec<Life>,
    ring_max: usize,
    is_connected: bool,
    in_flight: VecDeque<Message>,
    asked: Asked,
    source: Source<Payload>,
    config: SourceConfig,
    now: Timestamp,
    epoch: Epoch,
    reports: VecDeque<Report>,
    messages_in: u64,
    messages_out: u64,
}

#[derive(Clone, Debug)]
enum Act {
    Publish(u8),
    Deliver(u8),
    DropLive,
    DoubleLive(u8),
    SwapLive(u8),
    ForceLive,
    Serve,
    Answer(u8),
    DropAnswer(u8),
    DoubleAnswer,
    SwapAnswers(u8),
    FailReplay,
    HangReplay,
    Report,
    Disconnect,
    Connect,
    Restart { shared: u8, publishes: u8 },
    Pass(u16),
    Resync,
}

impl World {
    fn new(config: SourceConfig, ring_max: usize, begins_at: u8) -> Self {
        let now = Timestamp::default();
        let mut world = Self {
            lives: vec![Life { shared: 4, ..Life::default() }],
            ring_max,
            is_connected: false,
            in_flight: VecDeque::new(),
            asked: Asked::Nothing,
            source: Source::new(config, now),
            config,
            now,
            epoch: Epoch::default(),
            reports: VecDeque::new(),
            messages_in: 0,
            messages_out: 0,
        };
        (0..begins_at).for_each(|_| world.publish());
        world
    }

    fn life(&self) -> &Life {
        self.lives.last().expect("not empty")
    }

    fn publish(&mut self) {
        let mark = self.lives.len() as u8;
        let message = self.lives.last_mut().expect("not empty").publish(mark);
        if self.is_connected {
            self.in_flight.push_back(message);
        }
    }

    fn act(&mut self, act: &Act) {
        let live = self.in_flight.len();
        match act {
            Act::Publish(count) => (0..*count).for_each(|_| self.publish()),
            Act::Deliver(count) => (0..*count).for_each(|_| self.deliver()),
            Act::DropLive => drop(self.in_flight.pop_front()),
            Act::DoubleLive(at) if live > 0 => {
                let message = self.in_flight[0].clone();
                self.in_flight.insert(usize::from(*at) % (live + 1), message);
            }
            Act::SwapLive(at) if live > 0 => self.in_flight.swap(0, usize::from(*at) % live),
            Act::ForceLive => {
                if let Some((sequence, payload)) = self.in_flight.pop_front() {
                    self.step(IngestInput::Live { sequence, payload });
                }
            }
            Act::Serve => self.serve(),
            Act::Answer(count) => (0..*count).for_each(|_| self.answer()),
            Act::FailReplay if !matches!(self.asked, Asked::Nothing) => {
                self.asked = Asked::Answering([Answer::Failed].into());
            }
            Act::HangReplay => self.asked = Asked::Nothing,
            Act::DropAnswer(_) | Act::DoubleAnswer | Act::SwapAnswers(_) => self.disturb_answers(act),
            Act::Report => self.report(),
            Act::Disconnect => self.disconnect(),
            Act::Connect => self.connect(),
            Act::Restart { shared, publishes } if self.lives.len() < 200 => {
                self.disconnect();
                self.lives.push(Life { shared: u64::from(*shared), ..Life::default() });
                (0..*publishes).for_each(|_| self.publish());
            }
            Act::Pass(ms) => self.pass(Duration::from_millis(u64::from(*ms))),
            Act::Resync => {
                self.epoch = Epoch::default();
                self.step(IngestInput::Resync);
            }
            Act::DoubleLive(_) | Act::SwapLive(_) | Act::FailReplay | Act::Restart { .. } => {}
        }
    }

    fn disturb_answers(&mut self, act: &Act) {
        let Asked::Answering(answers) = &mut self.asked else { return };
        let messages = answers.len().saturating_sub(1); // the end mark stays last
        if messages == 0 {
            return;
        }
        match act {
            Act::DropAnswer(at) => drop(answers.remove(usize::from(*at) % messages)),
            Act::DoubleAnswer => answers.insert(1, answers[0].clone()),
            Act::SwapAnswers(at) => answers.swap(0, usize::from(*at) % messages),
            other => panic!("{other:?} does not affect replies"),
        }
    }

    fn connect(&mut self) {
        if !self.is_connected {
            self.is_connected = true;
            self.step(IngestInput::Connected);
        }
    }

    fn disconnect(&mut self) {
        if self.is_connected {
            self.is_connected = false;
            self.in_flight.clear();
            self.asked = Asked::Nothing;
            self.step(IngestInput::Disconnected);
        }
    }

    fn deliver(&mut self) {
        if self.source.wants_live()
            && let Some((sequence, payload)) = self.in_flight.pop_front()
        {
            self.step(IngestInput::Live { sequence, payload });
        }
    }

    /// The publisher receives the replay request and responds with the current content of its ring.
    fn serve(&mut self) {
        let Asked::Waiting(from) = self.asked else { return };
        let sent = &self.life().sent;
        let oldest = sent.len().saturating_sub(self.ring_max);
        let ring = sent.iter().enumerate().skip(oldest).map(|(sequence, payload)| (sequence as u64, payload.clone()));
        let answers = ring.filter(|(sequence, _)| *sequence >= from).map(Answer::Message);
        self.asked = Asked::Answering(answers.chain([Answer::Ended]).collect());
    }

    fn answer(&mut self) {
        let Asked::Answering(answers) = &mut self.asked else { return };
        match answers.pop_front() {
            Some(Answer::Message((sequence, payload))) => self.step(IngestInput::Replayed { sequence, payload }),
            Some(Answer::Ended) => self.step(IngestInput::ReplayEnded),
            Some(Answer::Failed) => self.step(IngestInput::ReplayFailed),
            None => self.asked = Asked::Nothing,
        }
    }

    fn report(&mut self) {
        while let Some(applied) = self.reports.pop_front() {
            self.step(IngestInput::Applied(applied));
        }
    }

    fn pass(&mut self, by: Duration) {
        self.now = self.now + by;
        self.step(IngestInput::Tick);
    }

    fn step(&mut self, input: IngestInput<Payload>) {
        self.messages_in += u64::from(matches!(input, IngestInput::Live { .. } | IngestInput::Replayed { .. }));
        let (mut effects, before) = (Vec::new(), self.source.state());
        let is_recovery = matches!(input, IngestInput::Connected);
        self.source.step(input, self.now, &mut effects);
        let (mut told, mut wants_anew) = (before, false);
        let has_applied = effects.iter().any(|effect| matches!(effect, IngestEffect::Apply { .. }));
        for effect in effects {
            match effect {
                IngestEffect::Apply { sequence, payload } => self.apply(sequence, &payload),
                IngestEffect::Clear => self.epoch = Epoch::default(),
                IngestEffect::Replay { from } => {
                    assert!(self.is_connected && self.config.has_replay, "the publisher is reachable");
                    self.asked = Asked::Waiting(from);
                }
                IngestEffect::Reconnect => wants_anew = true,
                IngestEffect::State(trust) => told = trust,
                IngestEffect::Noted(note) => self.messages_out += dropped(note),
            }
        }
        assert_eq!(told, self.source.state(), "every change is reported");
        assert!(
            !is_recovery || told == StreamState::Recovering || !self.config.has_replay,
            "the publisher is not known yet"
        );
        self.check();
        if has_applied {
            self.check_truth();
        }
        if wants_anew {
            self.disconnect();
            self.connect();
        }
    }

    fn apply(&mut self, sequence: u64, payload: &Payload) {
        let due = self.epoch.next();
        assert!(due.is_none_or(|due| sequence == due), "{sequence} where {due:?} was due");
        if due.is_none() {
            (self.epoch.first, self.epoch.is_exact) = (sequence, sequence == 0);
        }
        let applied = Batch::apply(payload, &mut self.epoch.cache);
        self.epoch.applied.push(payload.clone());
        self.epoch.is_exact |= applied.cleared;
        self.reports.push_back(applied);
        self.messages_out += 1;
    }

    /// Invariants after every step.
    fn check(&self) {
        self.source.check_invariants();
        assert!(self.source.held_messages() <= self.config.held_messages_max);
        assert!(self.source.held_bytes() <= self.config.held_bytes_max);
        assert_eq!(
            self.messages_in,
            self.messages_out + self.source.held_messages() as u64,
            "all messages are counted"
        );
        let is_known = self.epoch.is_exact || self.epoch.applied.is_empty();
        assert!(is_known || self.source.state() != StreamState::Live, "a live stream is complete");
    }

    /// Invariants after every batch.
    fn check_truth(&self) {
        let Epoch { is_exact, cache, .. } = &self.epoch;
        let next = self.epoch.next().expect("something was applied");
        let life = self.lives.iter().find(|life| self.epoch.is_of(life));
        let truth = &life.expect("applied messages belong to one incarnation").caches[next as usize - 1];
        assert!(cache.is_subset(truth), "the index has no wrong block");
        assert!(!is_exact || cache == truth, "the index is complete if the beginning was received");
    }

    /// Delivers everything in order until no work remains.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            let due = self.source.next_tick().filter(|at| at.since(self.now) < Duration::from_secs(60));
            if let Asked::Waiting(_) = self.asked {
                self.serve();
            } else if let Asked::Answering(_) = self.asked {
                self.answer();
            } else if !self.in_flight.is_empty() && self.source.wants_live() {
                self.deliver();
            } else if let Some(due) = due {
                self.now = self.now.max(due);
                self.step(IngestInput::Tick);
            } else {
                return assert!(self.in_flight.is_empty(), "the reader continues");
            }
        }
        panic!("no stable state reached");
    }

    /// After one more delivered message the rank is either live and exact, or cold.
    fn check_healed(&mut self) {
        self.connect();
        self.settle();
        self.publish();
        self.check_known();
    }

    /// Asserts the same without another message.
    fn check_known(&mut self) {
        self.connect();
        self.settle();
        self.report();
        assert_eq!(self.source.held_messages(), 0);
        let truth = self.life().caches.last().cloned().unwrap_or_default();
        assert_eq!(self.epoch.next().unwrap_or(0), self.life().sent.len() as u64, "the last message was applied");
        match self.source.state() {
            StreamState::Live => assert_eq!(self.epoch.cache, truth),
            StreamState::Cold => assert!(self.epoch.cache.is_subset(&truth)),
            other => panic!("{} at rest", other.name()),
        }
    }
}

/// Number of messages that a note reports as dropped.
fn dropped(note: Note) -> u64 {
    match note {
        Note::Duplicate | Note::Late | Note::Verified | Note::HeldOverflow | Note::Refused | Note::Dropped { .. } => {
            note.count()
        }
        Note::Gap
        | Note::Recovered
        | Note::Lost { .. }
        | Note::Incarnation
        | Note::Cold
        | Note::Healed
        | Note::ReplayFailed
        | Note::Restored
        | Note::RestoreResumed
        | Note::RestoreDropped => 0,
    }
}

fn config() -> impl Strategy<Value = SourceConfig> {
    (prop::bool::weighted(0.85), 0_usize..12, 0_usize..48, 1_usize..12, any::<u64>()).prop_map(
        |(has_replay, held_messages_max, held_bytes_max, remembered_max, seed)| SourceConfig {
            has_replay,
            held_messages_max,
            held_bytes_max,
            remembered_max,
            silent_after: Duration::MAX,
            cold_heals_after: Duration::MAX,
            end_check_interval: Duration::from_secs(600), // longer than the time that settling simulates
            seed,
            ..SourceConfig::default()
        },
    )
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        12 => (1_u8..6).prop_map(Act::Publish),
        12 => (1_u8..8).prop_map(Act::Deliver),
        4 => Just(Act::DropLive),
        3 => any::<u8>().prop_map(Act::DoubleLive),
        3 => any::<u8>().prop_map(Act::SwapLive),
        1 => Just(Act::ForceLive),
        8 => Just(Act::Serve),
        12 => (1_u8..12).prop_map(Act::Answer),
        1 => any::<u8>().prop_map(Act::DropAnswer),
        2 => Just(Act::DoubleAnswer),
        1 => any::<u8>().prop_map(Act::SwapAnswers),
        1 => Just(Act::FailReplay),
        1 => Just(Act::HangReplay),
        4 => Just(Act::Report),
        2 => Just(Act::Disconnect),
        5 => Just(Act::Connect),
        2 => (0_u8..12, 0_u8..12).prop_map(|(shared, publishes)| Act::Restart { shared, publishes }),
        4 => (0_u16..7000).prop_map(Act::Pass),
        1 => Just(Act::Resync),
    ]
}

/// Faults of a publisher and TCP: live messages are lost and connections break, but nothing is duplicated, reordered or
/// hangs.
fn is_mild(act: &Act) -> bool {
    !matches!(
        act,
        Act::DoubleLive(_)
            | Act::SwapLive(_)
            | Act::DropAnswer(_)
            | Act::DoubleAnswer
            | Act::SwapAnswers(_)
            | Act::FailReplay
            | Act::HangReplay
            | Act::Pass(_)
    )
}

proptest! {
    #![proptest_config(effort(256, "tests/ingest_properties.proptest-regressions"))]

    #[test]
    fn after_any_inputs_the_rank_is_known_or_cold(
        config in config(),
        ring_max in 1_usize..40,
        begins_at in 0_u8..20,
        acts in prop::collection::vec(act(), 0..120),
    ) {
        let mut world = World::new(config, ring_max, begins_at);
        for act in &acts {
            world.act(act);
        }
        world.check_healed();
    }

    /// With a complete ring and a responding replay socket no message is lost.
    #[test]
    fn complete_replays_lose_nothing(
        config in config(),
        begins_at in 0_u8..20,
        acts in prop::collection::vec(act(), 0..150),
    ) {
        let mut world = World::new(SourceConfig { has_replay: true, ..config }, usize::MAX, begins_at);
        for act in acts.iter().filter(|act| is_mild(act)) {
            world.act(act);
        }
        world.check_known();
        prop_assert_eq!(world.source.state(), StreamState::Live);
    }

    /// Inputs in an order that no network produces.
    #[test]
    fn arbitrary_inputs_never_panic(
        config in config(),
        inputs in prop::collection::vec((0_u8..9, prop_oneof![4 => 0_u64..12, 1 => any::<u64>()], 0_u8..3, 0_u64..9000), 0..100),
    ) {
        let mut source = Source::new(config, Timestamp::default());
        let (mut now, mut effects) = (Timestamp::default(), Vec::new());
        for (kind, sequence, content, ms) in inputs {
            now = now + Duration::from_millis(ms);
            let payload = vec![content; usize::from(content) * 5];
            let input = match kind {
                0 => IngestInput::Connected,
                1 => IngestInput::Disconnected,
                2 | 3 => IngestInput::Live { sequence, payload },
                4 | 5 => IngestInput::Replayed { sequence, payload },
                6 => if content == 0 { IngestInput::ReplayFailed } else { IngestInput::ReplayEnded },
                7 => if content == 0 { IngestInput::Resync } else { IngestInput::Applied(Report::default()) },
                _ => IngestInput::Tick,
            };
            effects.clear();
            source.step(input, now, &mut effects);
            source.check_invariants();
            prop_assert!(source.held_messages() <= config.held_messages_max);
        }
    }
}
