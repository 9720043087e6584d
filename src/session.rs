//! Sessions: the rank that served the last request of each conversation, and the contexts of agents.
//!
//! Maps session ids to ranks. A binding is found only under its own id and expires a time to live after its last use.
//! The table is bounded and evicts the longest idle session first. Time that decreases counts as constant. The caller
//! determines the value of a binding, and reports removed ranks.
//!
//! Replicas of a router share their tables. Each binding has a [`BindingVersion`], and the highest version of a session
//! wins at every replica, in any order of arrival: a last-writer-wins register with a Lamport clock (Lamport, Time,
//! clocks, and the ordering of events, 1978).

mod claims;
mod context;
mod id;
mod working;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hashbrown::HashTable;

use crate::protocol::{Timestamp, WorkerRank};

pub use claims::{Claims, PlacedCall};
pub use context::Call;
use context::Context;
pub use id::{SessionId, SessionIdError};
pub use working::{Returns, program_key};

/// Version of a binding. The higher one of two replaces the other: the higher number, of equal numbers that of the higher
/// writer, and of equal versions the one with the higher rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BindingVersion {
    /// Number, above those of all bindings that the writer knew.
    pub sequence: u64,
    /// Id of the replica that bound the session.
    pub writer: u64,
}

/// A binding, as sent to other replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionBinding {
    /// The session.
    pub id: SessionId,
    /// Its rank, which may be unknown to the receiver. The binding then has no effect before the rank is registered.
    pub rank: WorkerRank,
    /// Context of the session on this rank.
    pub context_tokens: u32,
    /// Version.
    pub version: BindingVersion,
    /// Time since the last use.
    pub idle: Duration,
}

impl SessionBinding {
    /// Upper bound of its length in a message, in bytes.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        NUMBERS_BYTES_MAX + self.id.len()
    }
}

/// Maximum length of the numbers of a binding in a message, in bytes.
const NUMBERS_BYTES_MAX: usize = 53;

/// The ranks of recently used sessions.
///
/// Ids are stored completely, so a hash collision costs a comparison and never gives a wrong binding. Lookups and
/// bindings cost O(1): sessions are stored in one array with a linked list in order of use. A tree ordered by use would
/// be simpler, but took one to two microseconds per lookup among 65,536 sessions.
///
/// ```
/// use std::time::Duration;
/// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
/// use pointsman::{internals::session::Sessions, SessionId};
///
/// let (start, hour) = (Timestamp::default(), Duration::from_secs(3600));
/// let (chat, rank) = (SessionId::new("chat-7")?, WorkerRank::new(WorkerId(3), 0));
/// let mut sessions = Sessions::new(hour, 65_536);
/// sessions.bind(&chat, rank, start);
/// assert_eq!(sessions.rank_of(&chat, start + hour / 2), Some(rank)); // a use: the hour begins anew
/// assert_eq!(sessions.peek(&chat, start + hour), Some(rank)); // not a use
/// assert_eq!(sessions.peek(&chat, start + hour * 2), None);
/// # Ok::<(), pointsman::internals::session::SessionIdError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sessions {
    ttl: Duration,
    max: usize,
    /// Array positions of sessions, by id.
    by_id: HashTable<u32>,
    hasher: ahash::RandomState,
    /// Unordered: the last session fills the gap of a removed one.
    sessions: Vec<Session>,
    /// Position of the longest idle session; [`NONE`] if empty.
    oldest: u32,
    newest: u32,
    /// Total bytes of all ids.
    id_bytes: usize,
    /// The latest time received.
    latest: Timestamp,
    /// Highest number of a known binding.
    sequence: u64,
    /// Present once bindings are shared with other replicas.
    sharing: Option<Sharing>,
    /// Number of agents by program.
    pub(crate) agents: BTreeMap<u64, u32>,
    /// Position of the longest idle session of a working set; [`NONE`] if there is none.
    first_counted: u32,
    /// Tokens of the working sets, without zeros.
    working: BTreeMap<WorkerRank, u64>,
    changed: BTreeSet<WorkerRank>,
    returns: Returns,
}

/// State of a table whose bindings are shared.
#[derive(Clone, Debug)]
struct Sharing {
    /// Id of the own replica.
    writer: u64,
    /// Sessions with own bindings that have not been sent.
    unsent: VecDeque<SessionId>,
    /// Last session in the order of use of each second. Received bindings are inserted behind it, so the order of use is
    /// exact to the second.
    seconds: BTreeMap<u64, u32>,
    /// Position of the next repeated session.
    repeated: u32,
    /// Repetitions that are due.
    due: f64,
    /// Time of the last repetition.
    repeated_at: Timestamp,
}

#[derive(Clone, Debug)]
struct Session {
    id: SessionId,
    rank: WorkerRank,
    /// Key of its program; 0 for none.
    program: u64,
    context: Context,
    version: BindingVersion,
    /// Whether its rank counts its context.
    is_counted: bool,
    /// Whether this process has bound it.
    is_own: bool,
    /// Whether it is among the unsent bindings.
    is_unsent: bool,
    used: Timestamp,
    /// Position of the session used before this one; [`NONE`] for the oldest.
    older: u32,
    /// Position of the session used after this one; [`NONE`] for the newest.
    newer: u32,
}

/// Maximum number of unsent bindings. Later ones are sent by the repetition of all.
const UNSENT_MAX: usize = 4_096;

/// Null position.
const NONE: u32 = u32::MAX;

/// Size of the reference counts of an `Arc`.
const ARC_HEAD_BYTES: usize = 2 * size_of::<usize>();

impl Sessions {
    /// Creates a table that forgets sessions unused for `ttl` and keeps at most `max` sessions; 0 counts as 1.
    #[must_use]
    pub fn new(ttl: Duration, max: u32) -> Self {
        Self {
            ttl,
            max: max.clamp(1, NONE - 1) as usize,
            by_id: HashTable::new(),
            hasher: ahash::RandomState::default(),
            sessions: Vec::new(),
            oldest: NONE,
            newest: NONE,
            id_bytes: 0,
            latest: Timestamp::default(),
            sequence: 0,
            sharing: None,
            agents: BTreeMap::new(),
            first_counted: NONE,
            working: BTreeMap::new(),
            changed: BTreeSet::new(),
            returns: Returns::default(),
        }
    }

    /// Shares the bindings as replica `writer`. The numbers of own bindings exceed `sequence`, which exceeds those of the
    /// replica's earlier processes. Existing bindings are new ones. Repeated calls have no effect.
    pub fn share_as(&mut self, writer: u64, sequence: u64) {
        if self.sharing.is_some() {
            return;
        }
        self.sequence = self.sequence.max(sequence);
        let (unsent, repeated_at) = (VecDeque::new(), self.latest);
        self.sharing = Some(Sharing { writer, unsent, seconds: BTreeMap::new(), repeated: 0, due: 0.0, repeated_at });
        let mut place = self.oldest;
        while place != NONE {
            self.write(place);
            let Session { used, newer, .. } = *self.at(place);
            if let Some(Sharing { seconds, .. }) = &mut self.sharing {
                seconds.insert(second(used), place);
            }
            place = newer;
        }
    }

    /// The rank of the session. Counts as a use.
    pub fn rank_of(&mut self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        let place = self.use_of(id, now)?;
        Some(self.at(place).rank)
    }

    /// Position of the session, as used now.
    fn use_of(&mut self, id: &str, now: Timestamp) -> Option<u32> {
        self.expire(now);
        let place = self.place_of(id)?;
        if self.latest.since(self.at(place).used) >= self.ttl {
            self.remove(place);
            return None;
        }
        self.unlink(place);
        self.link(place, self.latest);
        Some(place)
    }

    /// The rank of the session. Does not count as a use.
    #[must_use]
    pub fn peek(&self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        let session = self.at(self.place_of(id)?);
        (now.max(self.latest).since(session.used) < self.ttl).then_some(session.rank)
    }

    /// Version of the binding of the session.
    #[must_use]
    pub fn version_of(&self, id: &str) -> Option<BindingVersion> {
        Some(self.at(self.place_of(id)?).version)
    }

    /// Context of the session on its rank, which that has cached unless it has evicted it since.
    #[must_use]
    pub fn context_tokens(&self, id: &str) -> u32 {
        self.place_of(id).map_or(0, |place| self.at(place).context.tokens)
    }

    /// Binds the session to a rank without a call. Counts as a use. A full table evicts the longest idle session.
    pub fn bind(&mut self, id: &SessionId, rank: WorkerRank, now: Timestamp) {
        let place = self.use_of(id, now).unwrap_or_else(|| self.add_new(id, rank));
        if self.at(place).rank != rank {
            self.recount(place, |session| (session.rank, session.context) = (rank, Context::default()));
        }
        self.write(place);
    }

    /// Adds a session that is not known, and evicts the longest idle one from a full table.
    fn add_new(&mut self, id: &SessionId, rank: WorkerRank) -> u32 {
        if self.sessions.len() == self.max {
            self.remove(self.oldest);
        }
        self.add(id, rank, self.latest)
    }

    /// Gives the binding at `place` a new own version, above all known ones, and queues it for sending.
    fn write(&mut self, place: u32) {
        let Some(Sharing { writer, unsent, .. }) = &mut self.sharing else { return };
        self.sequence = self.sequence.saturating_add(1);
        let session = &mut self.sessions[place as usize];
        session.version = BindingVersion { sequence: self.sequence, writer: *writer };
        session.is_own = true;
        if !session.is_unsent && unsent.len() < UNSENT_MAX {
            session.is_unsent = true;
            unsent.push_back(session.id.clone());
        }
    }

    /// Applies a binding from another replica if its version is higher than the known one. A full table keeps the
    /// sessions with the latest uses. Has no effect on a table that is not shared.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
    /// use pointsman::{internals::session::Sessions, SessionId};
    ///
    /// let (now, hour) = (Timestamp::default(), Duration::from_secs(3600));
    /// let shared_by = |writer| {
    ///     let mut sessions = Sessions::new(hour, 65_536);
    ///     sessions.share_as(writer, 0);
    ///     sessions
    /// };
    /// let (mut one, mut two) = (shared_by(1), shared_by(2));
    /// let (chat, rank) = (SessionId::new("chat-7")?, |worker| WorkerRank::new(WorkerId(worker), 0));
    /// one.bind(&chat, rank(3), now);
    /// two.bind(&chat, rank(4), now); // of equal numbers the higher writer wins
    /// let (from_one, from_two) = (one.outbound(hour, 8_192, now), two.outbound(hour, 8_192, now));
    /// from_one.iter().for_each(|binding| two.receive(binding, now));
    /// from_two.iter().for_each(|binding| one.receive(binding, now));
    /// assert_eq!((one.peek(&chat, now), two.peek(&chat, now)), (Some(rank(4)), Some(rank(4))));
    /// # Ok::<(), pointsman::internals::session::SessionIdError>(())
    /// ```
    pub fn receive(&mut self, binding: &SessionBinding, now: Timestamp) {
        self.expire(now);
        let Some(Sharing { writer: own, .. }) = self.sharing else { return };
        if binding.idle >= self.ttl {
            return;
        }
        let SessionBinding { ref id, rank, context_tokens, version, idle } = *binding;
        self.sequence = self.sequence.max(version.sequence);
        let idle = u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX);
        let used = Timestamp(self.latest.0.saturating_sub(idle));
        let place = match self.place_of(id) {
            Some(place) => {
                let known = self.at(place);
                // Equal versions are of two processes of one replica, whose clock has been set back.
                if (version, rank) <= (known.version, known.rank) {
                    return;
                }
                if known.is_own && version.writer == own {
                    // From an earlier process of this replica, whose clock was ahead.
                    return self.write(place);
                }
                let used = used.max(known.used);
                self.unlink(place);
                self.link(place, used);
                place
            }
            None => {
                if self.sessions.len() == self.max {
                    if second(used) <= second(self.at(self.oldest).used) {
                        return;
                    }
                    self.remove(self.oldest);
                }
                self.add(id, rank, used)
            }
        };
        self.recount(place, |session| {
            if session.rank != rank || session.context.tokens != context_tokens {
                session.context = session.context.received(context_tokens);
            }
            (session.rank, session.version, session.is_own) = (rank, version, false);
        });
    }

    /// Bindings to send to the other replicas: new own ones, and a part of all, own or not, so that each is repeated once
    /// per `period`. At most `bytes_max` bytes; what exceeds them follows later.
    pub fn outbound(&mut self, period: Duration, bytes_max: usize, now: Timestamp) -> Vec<SessionBinding> {
        self.expire(now);
        let Some(mut sharing) = self.sharing.take() else { return Vec::new() };
        let (mut bindings, mut bytes) = (Vec::new(), 0);
        let mut fits = |sessions: &Self, place: u32| {
            let &Session { ref id, rank, ref context, version, used, .. } = sessions.at(place);
            let idle = sessions.latest.since(used);
            let binding = SessionBinding { id: id.clone(), rank, context_tokens: context.tokens, version, idle };
            bytes += binding.bytes_max();
            let fits = bytes <= bytes_max;
            if fits && idle < sessions.ttl {
                bindings.push(binding);
            }
            fits
        };
        while let Some(id) = sharing.unsent.pop_front() {
            let Some(place) = self.place_of(&id).filter(|place| self.at(*place).is_unsent) else { continue };
            if !fits(self, place) {
                sharing.unsent.push_front(id);
                break;
            }
            self.at_mut(place).is_unsent = false;
        }
        let count = self.sessions.len() as f64;
        let elapsed = self.latest.since(sharing.repeated_at).as_secs_f64();
        sharing.due = (sharing.due + count * elapsed / period.as_secs_f64().max(1e-3)).min(count);
        sharing.repeated_at = self.latest;
        while sharing.due >= 1.0 {
            if sharing.repeated as usize >= self.sessions.len() {
                sharing.repeated = 0;
            }
            if !fits(self, sharing.repeated) {
                break;
            }
            sharing.repeated += 1;
            sharing.due -= 1.0;
        }
        self.sharing = Some(sharing);
        bindings
    }

    /// Adds a session that is not known.
    fn add(&mut self, id: &SessionId, rank: WorkerRank, used: Timestamp) -> u32 {
        let place = u32::try_from(self.sessions.len()).expect("fewer sessions than places");
        let Self { by_id, hasher, sessions, .. } = self;
        sessions.push(Session {
            id: id.clone(),
            rank,
            program: 0,
            context: Context::default(),
            version: BindingVersion::default(),
            is_counted: false,
            is_own: false,
            is_unsent: false,
            used,
            older: NONE,
            newer: NONE,
        });
        by_id.insert_unique(hasher.hash_one(&**id), place, |known| hasher.hash_one(&*sessions[*known as usize].id));
        self.id_bytes += id.len();
        self.link(place, used);
        place
    }

    /// Forgets one session and returns its rank.
    pub fn forget(&mut self, id: &str) -> Option<WorkerRank> {
        let place = self.place_of(id)?;
        Some(self.remove(place).rank)
    }

    /// Forgets every session of a removed rank and returns their number.
    ///
    /// Visits every session: removals are rare, and an index by rank would add a cost to every request.
    pub fn forget_rank(&mut self, rank: WorkerRank) -> usize {
        let before = self.sessions.len();
        let mut place = 0;
        while let Some(session) = self.sessions.get(place as usize) {
            if session.rank == rank {
                self.remove(place); // the last session is now at this position
            } else {
                place += 1;
            }
        }
        before - self.sessions.len()
    }

    /// Number of sessions, including those that expired since the last call with a time.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether there is no session.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Bytes used. Below 512 per session in a full table with ids of maximum length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let ids = self.len() * ARC_HEAD_BYTES + self.id_bytes;
        self.by_id.allocation_size() + self.sessions.capacity() * size_of::<Session>() + ids
    }

    /// Forgets expired sessions.
    pub(crate) fn expire(&mut self, now: Timestamp) {
        self.latest = self.latest.max(now);
        while self.oldest != NONE && self.latest.since(self.at(self.oldest).used) >= self.ttl {
            self.remove(self.oldest);
        }
        self.expire_counts();
    }

    fn place_of(&self, id: &str) -> Option<u32> {
        self.by_id.find(self.hasher.hash_one(id), |place| *self.at(*place).id == *id).copied()
    }

    fn at(&self, place: u32) -> &Session {
        &self.sessions[place as usize]
    }

    fn at_mut(&mut self, place: u32) -> &mut Session {
        &mut self.sessions[place as usize]
    }

    /// Removes a session from the order of use.
    fn unlink(&mut self, place: u32) {
        self.end_counting(place);
        let Session { older, newer, used, .. } = *self.at(place);
        let is_in = |place: u32| place != NONE && second(self.at(place).used) == second(used);
        let (is_last, before) = (!is_in(newer), Some(older).filter(|older| is_in(*older)));
        if let Some(Sharing { seconds, .. }) = self.sharing.as_mut().filter(|_| is_last) {
            match before {
                Some(before) => seconds.insert(second(used), before),
                None => seconds.remove(&second(used)),
            };
        }
        self.point_to(older, newer, newer, older);
    }

    /// Inserts a session into the order of use, behind the others of the same second.
    fn link(&mut self, place: u32, used: Timestamp) {
        let mut older = self.newest;
        if let Some(Sharing { seconds, .. }) = &mut self.sharing {
            let last = seconds.range(..=second(used)).next_back();
            older = last.map_or(NONE, |(_, last)| *last);
            seconds.insert(second(used), place);
        }
        let newer = if older == NONE { self.oldest } else { self.at(older).newer };
        let session = self.at_mut(place);
        (session.older, session.newer, session.used) = (older, newer, used);
        self.point_to(older, place, newer, place);
        self.begin_counting(place);
    }

    /// Makes `after_older` follow `older`, and `before_newer` precede `newer`; [`NONE`] represents the end of the list.
    fn point_to(&mut self, older: u32, after_older: u32, newer: u32, before_newer: u32) {
        match older {
            NONE => self.oldest = after_older,
            older => self.at_mut(older).newer = after_older,
        }
        match newer {
            NONE => self.newest = before_newer,
            newer => self.at_mut(newer).older = before_newer,
        }
    }

    fn remove(&mut self, place: u32) -> Session {
        self.unlink(place);
        self.set_program(place, 0);
        let hash = self.hasher.hash_one(&*self.at(place).id);
        let entry = self.by_id.find_entry(hash, |known| *known == place).expect("each session is found by its id");
        let _ = entry.remove();
        let removed = self.sessions.swap_remove(place as usize);
        self.id_bytes -= removed.id.len();
        let moved = u32::try_from(self.sessions.len()).expect("fewer sessions than places");
        if moved != place {
            let Session { id, older, newer, used, .. } = self.at(place);
            let (hash, older, newer, used) = (self.hasher.hash_one(&**id), *older, *newer, *used);
            *self.by_id.find_mut(hash, |known| *known == moved).expect("each session is found by its id") = place;
            self.point_to(older, place, newer, place);
            if self.first_counted == moved {
                self.first_counted = place;
            }
            let last = self.sharing.as_mut().and_then(|sharing| sharing.seconds.get_mut(&second(used)));
            if let Some(last) = last.filter(|last| **last == moved) {
                *last = place;
            }
        }
        removed
    }

    /// Checks the order of use and every lookup, for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn check_invariants(&self) {
        assert!(self.sessions.len() <= self.max, "{} sessions, at most {}", self.sessions.len(), self.max);
        assert_eq!(self.by_id.len(), self.sessions.len(), "a session without an id, or the reverse");
        let (mut older, mut place, mut walked) = (NONE, self.oldest, 0);
        while place != NONE {
            let session = self.at(place);
            assert_eq!(self.place_of(&session.id), Some(place), "{:?} is at another position", session.id);
            assert_eq!(session.older, older, "the list is not doubly linked");
            let is_before = |older: Timestamp| match self.sharing {
                Some(_) => second(older) <= second(session.used),
                None => older <= session.used,
            };
            assert!(older == NONE || is_before(self.at(older).used), "uses are out of order");
            assert!(session.used <= self.latest, "a use in the future");
            (older, place, walked) = (place, session.newer, walked + 1);
        }
        assert_eq!((self.newest, walked), (older, self.sessions.len()), "the list ends early");
        assert_eq!(self.id_bytes, self.sessions.iter().map(|session| session.id.len()).sum::<usize>());
        if let Some(Sharing { seconds, unsent, .. }) = &self.sharing {
            let mut lasts = BTreeMap::new();
            let mut place = self.oldest;
            while place != NONE {
                lasts.insert(second(self.at(place).used), place);
                place = self.at(place).newer;
            }
            assert_eq!(*seconds, lasts, "last sessions of the seconds");
            assert!(unsent.len() <= UNSENT_MAX, "{} unsent bindings", unsent.len());
        }
    }
}

/// The whole seconds of a time.
fn second(at: Timestamp) -> u64 {
    at.0 / 1_000_000_000
}

#[cfg(test)]
mod tests;
