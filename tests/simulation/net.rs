//! Virtual clock and messages: each pair of places delivers in order, different pairs with independent delays.
//!
//! A delay is a function of the seed, the pair and the number of the message on it, so that a script with an element less
//! changes the other delays as little as possible.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BinaryHeap};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use pointsman::protocol::Timestamp;
use pointsman::test_support::mix;

use crate::letter::Letter;

/// Sender or receiver of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// The script and the clients.
    Outside,
    Engine(usize),
    /// Replay socket of an engine.
    Replay(usize),
    /// Actor of one life of a gateway.
    Gateway(usize, u32, Actor),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Actor {
    Caller(u64),
    Scheduler,
    Shard(usize),
    /// Slot and generation.
    Sequence(u32, u32),
    Supervisor,
    /// Slot, and number of the reader.
    Reader(u32, u64),
    Health,
    Sharing,
}

struct UnderWay {
    at: u64,
    number: u64,
    to: Place,
    letter: Letter,
}

impl Ord for UnderWay {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for UnderWay {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for UnderWay {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for UnderWay {}

pub(crate) struct Net {
    pub(crate) now: Timestamp,
    /// Number of delivered messages.
    pub(crate) steps: u64,
    /// Hash of all deliveries and decisions so far.
    pub(crate) digest: u64,
    seed: u64,
    under_way: BinaryHeap<UnderWay>,
    sent: u64,
    /// Time of the last delivery and number of messages, by hash of the pair.
    pairs: BTreeMap<u64, (u64, u64)>,
    /// Whether messages within a gateway may take longer than the timeout of load queries.
    pub(crate) is_slow: bool,
}

fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Net {
    pub(crate) fn new(seed: u64, is_slow: bool) -> Self {
        Self {
            now: Timestamp(1_000_000_000),
            steps: 0,
            digest: seed,
            seed: mix(seed),
            under_way: BinaryHeap::new(),
            sent: 0,
            pairs: BTreeMap::new(),
            is_slow,
        }
    }

    /// Sends a message that arrives after all earlier ones of the pair.
    pub(crate) fn send(&mut self, from: Place, to: Place, letter: Letter) {
        let pair = hash_of((from, to));
        let is_local = matches!((from, to), (Place::Gateway(a, ..), Place::Gateway(b, ..)) if a == b);
        let (last, count) = self.pairs.entry(pair).or_insert((0, 0));
        *count += 1;
        let draw = mix(self.seed ^ pair ^ mix(*count));
        let share = draw >> 32;
        let below = |micros: u64| 1_000 + share * micros * 1_000 / (1 << 32);
        let delay = match (is_local, draw % 256) {
            (true, 0) if self.is_slow => below(20_000),
            (true, 1..16) => below(1_000),
            (true, _) => below(30),
            (false, 0..4) => below(200_000),
            (false, _) => 100_000 + below(2_000),
        };
        let at = (self.now.0 + delay).max(*last);
        *last = at;
        self.put(at, to, letter);
    }

    /// Delivers a message of a timer.
    pub(crate) fn after(&mut self, delay: Duration, to: Place, letter: Letter) {
        self.put((self.now + delay).0, to, letter);
    }

    fn put(&mut self, at: u64, to: Place, letter: Letter) {
        self.sent += 1;
        self.under_way.push(UnderWay { at, number: self.sent, to, letter });
    }

    /// The next delivery at or before `until`, at which the clock then stands.
    pub(crate) fn next(&mut self, until: Timestamp) -> Option<(Place, Letter)> {
        if self.under_way.peek()?.at > until.0 {
            return None;
        }
        let UnderWay { at, to, letter, .. } = self.under_way.pop()?;
        self.now = self.now.max(Timestamp(at));
        self.steps += 1;
        self.record((at, to, letter.name()));
        Some((to, letter))
    }

    /// Adds a fact to the digest.
    pub(crate) fn record(&mut self, fact: impl Hash) {
        self.digest = mix(self.digest ^ hash_of(fact));
    }

    /// A number that depends on the seed and the messages so far.
    pub(crate) fn draw(&mut self, below: u64) -> u64 {
        self.sent += 1;
        mix(self.seed ^ mix(self.sent)) % below.max(1)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.draw(n) == 0
    }
}
