//! The waiting queue: requests that every eligible rank is too busy for, and which of them goes next.
//!
//! Owns the waiting requests, their order and classes, the limits on how many may wait, and what the metrics say of
//! them. Classes share the fleet by deficit round robin, the tenants of a class share it alike ([`Queue`] says how and how
//! long one can be kept waiting). Within a class requests with the same set of eligible ranks share a *lane*, and lanes
//! neither block nor are blocked. Within a lane the order of a tenant's requests is: higher strict priority, earlier
//! deadline, higher score of the class's order, earlier in the queue.
//!
//! Promises that a request leaves once, that it stops counting when it leaves in whatever way, and the same order for
//! the same calls. No call costs more than O(log n) for each request it moves; [`Queue::pop`] visits besides lanes, and
//! tenants all of whose lanes are blocked. What is kept of a tenant goes with its last request.
//!
//! Leaves to its caller which ranks are eligible or busy, when to look again, and what becomes of whoever leaves.
//!
//! ```text
//! class_of ─► check_limits ─► push ─► pop | remove | pop_expired | take_lane
//! ```

mod class;
mod classify;
mod key;
mod limits;
mod rounds;
mod share;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use ahash::AHashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::config::{QueueClass, RouterConfig};
use crate::protocol::Timestamp;

use class::Class;
use classify::Classifier;
use key::Key;
use rounds::Rounds;

pub use classify::UnknownClass;
pub use key::QueueEntry;
pub use limits::{Backpressure, LimitKind, RETRY_AFTER_MAX, RETRY_AFTER_MIN, RETRY_AFTER_UNKNOWN};

/// A class by its position in [`Queue::classes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

impl ClassId {
    fn at(position: usize) -> Self {
        Self(u32::try_from(position).expect("classes come from a configuration that somebody wrote"))
    }

    fn position(self) -> usize {
        self.0 as usize
    }
}

/// Names a set of eligible ranks: requests of a class with the same one share a lane. 0 stands for all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneKey(pub u64);

/// Names a customer: requests of a class with the same one take turns with those of others. 0 stands for requests that
/// name none. Customers whose keys collide share one turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantKey(pub u64);

impl TenantKey {
    /// The key of a tenant's name.
    ///
    /// ```
    /// use pointsman::queue::TenantKey;
    ///
    /// assert_eq!(TenantKey::of("acme"), TenantKey::of("acme"));
    /// assert_ne!(TenantKey::of("acme"), TenantKey::default());
    /// ```
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self(xxh3_64(name.as_bytes()))
    }
}

/// How much of a class waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Requests.
    pub requests: u64,
    /// Their prompt tokens.
    pub raw_tokens: u64,
    /// Those of them that the best eligible rank has cached.
    pub cached_tokens: u64,
    /// The earliest arrival among them.
    pub oldest: Option<Timestamp>,
}

#[derive(Debug)]
struct Waiting<E> {
    class: ClassId,
    lane: LaneKey,
    entry: QueueEntry,
    key: Key,
    payload: E,
}

/// What one class can send now, once it has been found out.
#[derive(Clone, Copy, Debug)]
struct Head {
    id: u64,
    cost_tokens: u64,
}

/// Requests that wait, each with an id and whatever the caller wants back (`E`).
///
/// # Whose turn it is
///
/// Deficit round robin: each class has a deficit, tokens it may still send. The class served last goes on as long as its
/// deficit pays for its next request ([`QueueEntry::cost_tokens`]). Then the others have their turn in a ring: whoever cannot
/// pay is given `quantum_tokens` and looked at again, and rounds in which nobody could pay are skipped in one step. Only
/// classes with a request that can be sent take part; the others keep what they have, but an empty class loses it.
///
/// # How long a class can be kept waiting
///
/// A class with quantum q that always has a request that can be sent and costs at most c tokens is served before the
/// others together have sent more than
///
/// ```text
/// Σ over the others i of  max(qᵢ, mᵢ) − 1 + ⌈c / q⌉ · qᵢ    tokens,
/// ```
///
/// where mᵢ is the most that a request of class i costs: what i had saved, and one quantum for each that the waiting
/// class needs.
///
/// # Tenants
///
/// Within a class tenants ([`QueueEntry::tenant`]) send in turn, equal in tokens. A strict priority goes before any turn;
/// deadlines, jumps and the class's order only sort a tenant's own requests. A tenant whose next request costs c tokens,
/// can be sent, and has the highest strict priority there is, is served before the other tenants of the class together
/// have sent more than Σ (mᵢ + c) tokens, where mᵢ is the most that a request of tenant i costs. Among one tenant's
/// requests nothing bounds the wait: `lcfs` and `wspt` let some wait.
///
/// ```
/// use std::time::Duration;
/// use pointsman::RouterConfig;
/// use pointsman::protocol::Timestamp;
/// use pointsman::queue::{LaneKey, Queue, QueueEntry};
///
/// let mut queue = Queue::new(&RouterConfig::default());
/// let class = queue.class_of(None, 800)?;
/// let start = Timestamp::default();
/// let entry = |secs, priority_jump| QueueEntry {
///     arrival: start + Duration::from_secs(secs),
///     priority_jump,
///     isl_tokens: 800,
///     ..QueueEntry::default()
/// };
/// queue.check_limits(class, 8, start)?;
/// queue.push(1, class, LaneKey::default(), entry(10, 0.0), "first");
/// queue.push(2, class, LaneKey::default(), entry(12, 5.0), "five seconds ahead");
/// queue.push(3, class, LaneKey(7), entry(11, 9.0), "its only rank is busy");
/// let pop = |queue: &mut Queue<_>| queue.pop(start, |_, lane, _| lane == LaneKey::default());
/// assert_eq!(pop(&mut queue), Some((2, "five seconds ahead")));
/// assert_eq!(pop(&mut queue), Some((1, "first")));
/// assert_eq!(pop(&mut queue), None);
/// assert_eq!(queue.depth(class).raw_tokens, 800);
/// assert_eq!(queue.remove(3), Some("its only rank is busy"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Queue<E> {
    settings: Box<[QueueClass]>,
    classes: Box<[Class]>,
    classifier: Classifier,
    rounds: Rounds,
    waiting: AHashMap<u64, Waiting<E>>,
    /// Every deadline, with the sequence and the id of the request that has it.
    dues: BTreeSet<(Timestamp, u64, u64)>,
    /// Of the next request.
    sequence: u64,
    /// Each class's head during a pop, kept for its allocation only.
    heads: Box<[Option<Option<Head>>]>,
    /// What a pop was told of each lane of a class, kept for its allocation only.
    answers: AHashMap<LaneKey, bool>,
}

impl<E> Queue<E> {
    /// An empty queue with the classes of a configuration that has been validated.
    #[must_use]
    pub fn new(config: &RouterConfig) -> Self {
        let settings: Box<[QueueClass]> = config.classes().into();
        Self {
            classes: settings.iter().map(Class::new).collect(),
            classifier: Classifier::new(config),
            rounds: Rounds::new(settings.iter().map(|class| class.quantum_tokens)),
            waiting: AHashMap::new(),
            dues: BTreeSet::new(),
            sequence: 0,
            heads: vec![None; settings.len()].into(),
            answers: AHashMap::new(),
            settings,
        }
    }

    /// The classes in the order of the configuration, which [`ClassId`] counts.
    #[must_use]
    pub fn classes(&self) -> &[QueueClass] {
        &self.settings
    }

    /// The class of a request that asks for `name` and has `uncached_tokens` to compute: the class of that name; else, if
    /// it is a family's, the family's class for the bucket, or its first if it has none for it. Without a name, the
    /// same in `queue_default_family`, or else the first class. O(classes).
    ///
    /// # Errors
    ///
    /// No class and no family has this name.
    pub fn class_of(&self, name: Option<&str>, uncached_tokens: u32) -> Result<ClassId, UnknownClass> {
        self.classifier.class_of(&self.settings, name, uncached_tokens)
    }

    /// Whether one more request of a class may wait in a pool of `ranks`. To be asked before [`push`](Self::push). What
    /// waits already is compared, so the request that crosses a limit still waits, and a limit of 0 lets none.
    ///
    /// # Errors
    ///
    /// The first limit that is reached, in the order requests, tokens, cached tokens.
    pub fn check_limits(&self, class: ClassId, ranks: u32, now: Timestamp) -> Result<(), Backpressure> {
        self.classes[class.position()].check_limits(&self.settings[class.position()], ranks, now)
    }

    /// What to say to a request that would have to wait and asked not to.
    #[must_use]
    pub fn do_not_queue(&self, class: ClassId, now: Timestamp) -> Backpressure {
        let requests = self.depth(class).requests;
        self.classes[class.position()].refusal(LimitKind::DoNotQueue, requests, 0, now)
    }

    /// Lets a request wait. O(log n).
    ///
    /// # Panics
    ///
    /// A request with this id waits already, or there is no such class.
    pub fn push(&mut self, id: u64, class: ClassId, lane: LaneKey, entry: QueueEntry, payload: E) {
        let entry = QueueEntry { cached_tokens: entry.cached_tokens.min(entry.isl_tokens), ..entry };
        let key = Key::new(self.settings[class.position()].order, &entry, self.sequence, id);
        let before = self.waiting.insert(id, Waiting { class, lane, entry, key, payload });
        assert!(before.is_none(), "request {id} waits already");
        self.sequence += 1;
        let of = &mut self.classes[class.position()];
        if of.is_empty() {
            of.drain.resume(entry.arrival);
        }
        of.insert(lane, key, &entry);
        if let Some(due) = entry.due {
            self.dues.insert((due, key.sequence, id));
        }
    }

    /// Takes a request out, wherever it stands: its caller is gone. O(log n).
    pub fn remove(&mut self, id: u64) -> Option<E> {
        let waiting = self.waiting.remove(&id)?;
        let class = &mut self.classes[waiting.class.position()];
        class.remove(waiting.lane, waiting.key, &waiting.entry);
        if class.is_empty() {
            self.rounds.forget(waiting.class.position());
        }
        if let Some(due) = waiting.entry.due {
            self.dues.remove(&(due, waiting.key.sequence, id));
        }
        Some(waiting.payload)
    }

    /// Says how much of a request's prompt the best eligible rank has now: what it costs and counts changes, and under
    /// `wspt` its place. Nothing, if it does not wait. O(log n).
    pub fn set_cached_tokens(&mut self, id: u64, cached_tokens: u32) {
        let Some(waiting) = self.waiting.get_mut(&id) else { return };
        let position = waiting.class.position();
        let entry = QueueEntry { cached_tokens: cached_tokens.min(waiting.entry.isl_tokens), ..waiting.entry };
        if entry.cached_tokens == waiting.entry.cached_tokens {
            return;
        }
        let key = Key::new(self.settings[position].order, &entry, waiting.key.sequence, id);
        self.classes[position].replace(waiting.lane, (waiting.key, key), (&waiting.entry, &entry));
        (waiting.key, waiting.entry) = (key, entry);
    }

    /// Takes out the request that goes next: of the class whose turn it is and the tenant whose turn it is there, the first
    /// over all lanes that can be sent.
    ///
    /// `dispatchable` says whether a lane can be sent, by one of its heads. It is asked at most once for each lane of each
    /// class: once or so if ranks are free, O(lanes) if all are busy. Tenants are passed over only while none of their
    /// lanes can be sent. The rest is O(classes + log n). Nothing changes if no lane can be sent.
    pub fn pop(
        &mut self,
        now: Timestamp,
        mut dispatchable: impl FnMut(ClassId, LaneKey, &E) -> bool,
    ) -> Option<(u64, E)> {
        let Self { classes, waiting, rounds, heads, answers, .. } = self;
        heads.fill(None);
        let next = rounds.next(|position| {
            let head = heads[position].get_or_insert_with(|| {
                let next = classes[position].next(answers, |lane, Key { id, .. }| {
                    let head = waiting.get(&id).expect("every key is that of a waiting request");
                    dispatchable(head.class, lane, &head.payload)
                });
                next.map(|Key { id, cost_tokens, .. }| Head { id, cost_tokens: u64::from(cost_tokens) })
            });
            head.map(|head| head.cost_tokens)
        })?;
        let Head { id, .. } = heads[next].flatten().expect("only a class with a head has a turn");
        let Waiting { key, entry, .. } = waiting.get(&id).expect("it has just been seen");
        classes[next].drain.sent(now, entry);
        classes[next].sent(*key, entry);
        Some((id, self.remove(id).expect("it has just been seen")))
    }

    /// Takes out a request for which it is too late: `due` is `now` or before. The earliest first. O(log n).
    pub fn pop_expired(&mut self, now: Timestamp) -> Option<(u64, E)> {
        let &(due, _, id) = self.dues.first()?;
        if now < due {
            return None;
        }
        Some((id, self.remove(id).expect("every deadline is that of a waiting request")))
    }

    /// The earliest deadline.
    #[must_use]
    pub fn next_due(&self) -> Option<Timestamp> {
        self.dues.first().map(|&(due, ..)| due)
    }

    /// Every lane that has requests, with its first: class by class, and in each in the order of these. Visits every
    /// tenant.
    pub fn lanes(&self) -> impl Iterator<Item = (ClassId, LaneKey, &E)> {
        self.classes.iter().flat_map(Class::heads).map(|(lane, key)| {
            let head = self.waiting.get(&key.id).expect("every key is that of a waiting request");
            (head.class, lane, &head.payload)
        })
    }

    /// Whether somebody waits in a lane, whom a newcomer to it would pass. O(log n).
    #[must_use]
    pub fn is_lane_empty(&self, class: ClassId, lane: LaneKey) -> bool {
        !self.classes[class.position()].has_lane(lane)
    }

    /// Takes out a whole lane, in the order of a single tenant's requests.
    pub fn take_lane(&mut self, class: ClassId, lane: LaneKey) -> Vec<(u64, E)> {
        let keys = self.classes[class.position()].lane(lane);
        let take = |key: Key| (key.id, self.remove(key.id).expect("every key is that of a waiting request"));
        keys.into_iter().map(take).collect()
    }

    /// What waits under an id.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&E> {
        self.waiting.get(&id).map(|waiting| &waiting.payload)
    }

    /// What waits under an id, to be changed. Its place stays.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut E> {
        self.waiting.get_mut(&id).map(|waiting| &mut waiting.payload)
    }

    /// What a waiting request weighs, as last said.
    #[must_use]
    pub fn entry(&self, id: u64) -> Option<&QueueEntry> {
        self.waiting.get(&id).map(|waiting| &waiting.entry)
    }

    /// How much of a class waits.
    #[must_use]
    pub fn depth(&self, class: ClassId) -> Depth {
        self.classes[class.position()].depth()
    }

    /// How many requests wait, of all classes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Checks that every request stands exactly where its entry puts it, that sums, heads and deadlines are those of the
    /// requests that wait, and that an empty class has nothing saved. O(n log n), for tests.
    ///
    /// # Panics
    ///
    /// Something does not hold.
    pub fn check_invariants(&self) {
        let (mut requests, mut dues) = (0, BTreeSet::new());
        for (position, (class, settings)) in self.classes.iter().zip(&self.settings).enumerate() {
            let id = ClassId::at(position);
            class.check_invariants(|lane, key| {
                let waiting = self.waiting.get(&key.id).expect("every key is that of a waiting request");
                assert_eq!((waiting.class, waiting.lane, waiting.key), (id, lane, key));
                assert_eq!(key, Key::new(settings.order, &waiting.entry, key.sequence, key.id));
                assert!(waiting.entry.cached_tokens <= waiting.entry.isl_tokens);
                assert!(key.sequence < self.sequence);
                &waiting.entry
            });
            for key in class.heads().into_iter().flat_map(|(lane, _)| class.lane(lane)) {
                requests += 1;
                let due = self.waiting.get(&key.id).and_then(|waiting| waiting.entry.due);
                dues.extend(due.map(|due| (due, key.sequence, key.id)));
            }
            assert_eq!(self.depth(id).oldest.is_none(), class.is_empty());
            assert!(!class.is_empty() || self.rounds.deficit_tokens(position) == 0, "an empty class has nothing saved");
        }
        assert_eq!(requests, self.waiting.len());
        assert_eq!(self.dues, dues);
    }
}
