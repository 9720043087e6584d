//! Waiting queue: requests whose eligible ranks are all busy, and their dispatch order.
//!
//! Holds the waiting requests with their order and classes, enforces the limits, and provides the queue metrics.
//! Classes share the fleet by deficit round robin, and the tenants of a class share it equally ([`Queue`] documents the
//! order and the maximum wait). Within a class, requests with the same set of eligible ranks share a *lane*; lanes do
//! not block each other. Within a lane, a tenant's requests are ordered by strict priority (higher first), deadline
//! (earlier first), score of the class's order (higher first), and order of insertion.
//!
//! Each request leaves once and stops counting when it leaves for any reason. The order is deterministic. No call costs
//! more than O(log n) per moved request; [`Queue::pop`] additionally visits lanes, and tenants whose lanes are all
//! blocked. The state of a tenant is dropped with its last request.
//!
//! The caller determines eligible and busy ranks, the time of the next attempt, and the handling of removed requests.
//!
//! ```text
//! class_of ─► check_limits ─► push ─► pop | remove | pop_expired | take_lane
//! ```

mod class;
mod classify;
mod heads;
mod ids;
mod key;
mod limits;
mod rounds;
mod share;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use ahash::AHashMap;

use crate::config::{QueueClass, RouterConfig};
use crate::protocol::Timestamp;

use class::Class;
use classify::Classifier;
use key::OrderKey;
use rounds::Rounds;

pub use classify::UnknownClass;
pub use heads::QueueHeads;
pub use ids::{ClassId, Depth, LaneKey, TenantKey};
pub use key::QueueEntry;
pub use limits::{Backpressure, LimitKind, RETRY_AFTER_MAX, RETRY_AFTER_MIN, RETRY_AFTER_UNKNOWN};

#[derive(Debug)]
struct WaitingRequest<E> {
    class: ClassId,
    lane: LaneKey,
    entry: QueueEntry,
    key: OrderKey,
    payload: E,
}

/// The next request of one class.
#[derive(Clone, Copy, Debug)]
struct Head {
    id: u64,
    cost_tokens: u64,
}

/// Waiting requests, each with an id and a payload of the caller (`E`).
///
/// # Order of classes
///
/// Deficit round robin: each class has a deficit, the number of tokens that it may still dispatch. The class served
/// last continues while its deficit covers its next request ([`QueueEntry::cost_tokens`]). Then the other classes
/// follow in a ring: a class whose deficit is too small receives `quantum_tokens` and is checked again; rounds without
/// a dispatch are skipped in one step. Only classes with a dispatchable request take part. The others keep their
/// deficit, but an empty class loses it.
///
/// # Maximum wait of a class
///
/// A class with quantum q that always has a dispatchable request of at most c tokens is served before the other classes
/// together have dispatched more than
///
/// ```text
/// Σ over the others i of  max(qᵢ, mᵢ) − 1 + ⌈c / q⌉ · qᵢ    tokens,
/// ```
///
/// where mᵢ is the maximum cost of a request of class i: its saved deficit, and one quantum for each quantum that the
/// waiting class needs.
///
/// # Tenants
///
/// Within a class tenants ([`QueueEntry::tenant`]) dispatch in turn, with equal shares in tokens. A strict priority
/// precedes any share; deadlines, jumps and the class's order only sort the requests of one tenant. A tenant whose next
/// request costs c tokens, is dispatchable, and has the highest strict priority, is served before the other tenants of
/// the class together have dispatched more than Σ (mᵢ + c) tokens, where mᵢ is the maximum cost of a request of tenant
/// i. Among the requests of one tenant the wait is unbounded: `lcfs` and `wspt` can delay some of them indefinitely.
///
/// ```
/// use std::time::Duration;
/// use pointsman::RouterConfig;
/// use pointsman::protocol::Timestamp;
/// use pointsman::internals::queue::{LaneKey, Queue, QueueEntry};
///
/// let mut queue = Queue::new(&RouterConfig::default());
/// let class = queue.class_of(None, 800)?;
/// let start = Timestamp::default();
/// let entry = |secs, priority_jump| QueueEntry {
///     arrival: start + Duration::from_secs(secs),
///     priority_jump,
///     prompt_tokens: 800,
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
    waiting: AHashMap<u64, WaitingRequest<E>>,
    /// Every deadline, with the sequence and the id of its request.
    dues: BTreeSet<(Timestamp, u64, u64)>,
    /// Sequence number of the next request.
    sequence: u64,
    /// Each class's head during a pop; kept to reuse the allocation.
    heads: Box<[Option<Option<Head>>]>,
    /// Results of `dispatchable` per lane during a pop; kept to reuse the allocation.
    answers: AHashMap<LaneKey, bool>,
}

impl<E> Queue<E> {
    /// Creates an empty queue with the classes of a validated configuration.
    #[must_use]
    pub fn new(config: &RouterConfig) -> Self {
        let settings: Box<[QueueClass]> = config.queue.classes_or_default().into();
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

    /// The classes in the order of the configuration, indexed by [`ClassId`].
    #[must_use]
    pub fn classes(&self) -> &[QueueClass] {
        &self.settings
    }

    /// The class of a request with class name `name` and `uncached_tokens` to compute: the class of that name; else,
    /// for a family name, the family's class for the bucket, or its first class if it has none for the bucket. Without
    /// a name, the same for `queue.default_family`, or else the first class. O(classes).
    ///
    /// # Errors
    ///
    /// No class and no family has this name.
    pub fn class_of(&self, name: Option<&str>, uncached_tokens: u32) -> Result<ClassId, UnknownClass> {
        self.classifier.class_of(&self.settings, name, uncached_tokens)
    }

    /// Checks whether one more request of a class may wait in a pool of `ranks`. Call it before [`push`](Self::push).
    /// Only the waiting requests are compared, so the request that crosses a limit still waits, and a limit of 0 admits
    /// none.
    ///
    /// # Errors
    ///
    /// The first reached limit, in the order requests, tokens, cached tokens.
    pub fn check_limits(&self, class: ClassId, ranks: u32, now: Timestamp) -> Result<(), Backpressure> {
        self.classes[class.position()].check_limits(&self.settings[class.position()], ranks, now)
    }

    /// The rejection of a request that would have to wait but must not.
    #[must_use]
    pub fn refusal(&self, class: ClassId, limit: LimitKind, now: Timestamp) -> Backpressure {
        let requests = self.depth(class).requests;
        self.classes[class.position()].refusal(limit, requests, 0, now)
    }

    /// Adds a waiting request. O(log n).
    ///
    /// # Panics
    ///
    /// If a request with this id is already waiting, or the class does not exist.
    pub fn push(&mut self, id: u64, class: ClassId, lane: LaneKey, entry: QueueEntry, payload: E) {
        let entry = QueueEntry { cached_tokens: entry.cached_tokens.min(entry.prompt_tokens), ..entry };
        let key = OrderKey::new(self.settings[class.position()].order, &entry, self.sequence, id);
        let before = self.waiting.insert(id, WaitingRequest { class, lane, entry, key, payload });
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

    /// Removes a request at any position, for example after a cancellation. O(log n).
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

    /// Updates the number of prompt tokens cached on the best eligible rank, which changes the request's cost and, with
    /// `wspt`, its position. No effect if the request is not waiting. O(log n).
    pub fn set_cached_tokens(&mut self, id: u64, cached_tokens: u32) {
        let Some(waiting) = self.waiting.get_mut(&id) else { return };
        let position = waiting.class.position();
        let entry = QueueEntry { cached_tokens: cached_tokens.min(waiting.entry.prompt_tokens), ..waiting.entry };
        if entry.cached_tokens == waiting.entry.cached_tokens {
            return;
        }
        let key = OrderKey::new(self.settings[position].order, &entry, waiting.key.sequence, id);
        self.classes[position].replace(waiting.lane, (waiting.key, key), (&waiting.entry, &entry));
        (waiting.key, waiting.entry) = (key, entry);
    }

    /// Removes and returns the next request by class, tenant and order, over all dispatchable lanes.
    ///
    /// `dispatchable` checks a lane by one of its heads. It is called at most once per lane and class: about once if
    /// ranks are free, O(lanes) if all are busy. Tenants are skipped only if none of their lanes is dispatchable. The
    /// remaining cost is O(classes + log n). If no lane is dispatchable, nothing changes.
    pub fn pop(
        &mut self,
        now: Timestamp,
        mut dispatchable: impl FnMut(ClassId, LaneKey, &E) -> bool,
    ) -> Option<(u64, E)> {
        let Self { classes, waiting, rounds, heads, answers, .. } = self;
        heads.fill(None);
        let next = rounds.next(|position| {
            let head = heads[position].get_or_insert_with(|| {
                let next = classes[position].next(answers, |lane, OrderKey { id, .. }| {
                    let head = waiting.get(&id).expect("every key is that of a waiting request");
                    dispatchable(head.class, lane, &head.payload)
                });
                next.map(|OrderKey { id, cost_tokens, .. }| Head { id, cost_tokens: u64::from(cost_tokens) })
            });
            head.map(|head| head.cost_tokens)
        })?;
        let Head { id, .. } = heads[next].flatten().expect("only a class with a head is served");
        let WaitingRequest { key, entry, .. } = waiting.get(&id).expect("present");
        classes[next].drain.sent(now, entry);
        classes[next].sent(*key, entry);
        Some((id, self.remove(id).expect("present")))
    }

    /// Removes and returns an expired request: its deadline is `now` or earlier. Earliest first. O(log n).
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

    /// Every non-empty lane with its first request, class by class, ordered by these requests. Visits every tenant.
    pub fn lanes(&self) -> impl Iterator<Item = (ClassId, LaneKey, &E)> {
        self.classes.iter().flat_map(Class::heads).map(|(lane, key)| {
            let head = self.waiting.get(&key.id).expect("every key is that of a waiting request");
            (head.class, lane, &head.payload)
        })
    }

    /// Removes a whole lane and returns it in the order of a single tenant's requests. O(log n) per request.
    pub fn take_lane(&mut self, class: ClassId, lane: LaneKey) -> Vec<(u64, E)> {
        let keys = self.classes[class.position()].lane(lane);
        let take = |key: OrderKey| (key.id, self.remove(key.id).expect("every key is that of a waiting request"));
        keys.into_iter().map(take).collect()
    }

    /// The payload of a waiting request.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&E> {
        self.waiting.get(&id).map(|waiting| &waiting.payload)
    }

    /// The mutable payload of a waiting request. Its position is unaffected.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut E> {
        self.waiting.get_mut(&id).map(|waiting| &mut waiting.payload)
    }

    /// The queue entry of a waiting request.
    #[must_use]
    pub fn entry(&self, id: u64) -> Option<&QueueEntry> {
        self.waiting.get(&id).map(|waiting| &waiting.entry)
    }

    /// The waiting amount of a class.
    #[must_use]
    pub fn depth(&self, class: ClassId) -> Depth {
        self.classes[class.position()].depth()
    }

    /// Number of waiting requests of all classes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request is waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Checks that the position of every request matches its entry, that sums, heads and deadlines match the waiting
    /// requests, and that an empty class has no deficit. O(n log n), for tests.
    ///
    /// # Panics
    ///
    /// If an invariant is violated.
    pub fn check_invariants(&self) {
        let (mut requests, mut dues) = (0, BTreeSet::new());
        for (position, (class, settings)) in self.classes.iter().zip(&self.settings).enumerate() {
            let id = ClassId::at(position);
            class.check_invariants(|lane, key| {
                let waiting = self.waiting.get(&key.id).expect("every key is that of a waiting request");
                assert_eq!((waiting.class, waiting.lane, waiting.key), (id, lane, key));
                assert_eq!(key, OrderKey::new(settings.order, &waiting.entry, key.sequence, key.id));
                assert!(waiting.entry.cached_tokens <= waiting.entry.prompt_tokens);
                assert!(key.sequence < self.sequence);
                &waiting.entry
            });
            for key in class.heads().into_iter().flat_map(|(lane, _)| class.lane(lane)) {
                requests += 1;
                let due = self.waiting.get(&key.id).and_then(|waiting| waiting.entry.due);
                dues.extend(due.map(|due| (due, key.sequence, key.id)));
            }
            assert_eq!(self.depth(id).oldest.is_none(), class.is_empty());
            assert!(!class.is_empty() || self.rounds.deficit_tokens(position) == 0, "an empty class has no deficit");
        }
        assert_eq!(requests, self.waiting.len());
        assert_eq!(self.dues, dues);
    }
}
