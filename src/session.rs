//! Sessions: the rank that served the last request of each conversation.
//!
//! Maps session ids to ranks. A binding is found only under its own id and expires a time to live after its last use.
//! The table is bounded and evicts the longest idle session first. Time that decreases counts as constant. The caller
//! determines the value of a binding, and reports removed ranks.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;

use crate::protocol::{Timestamp, WorkerRank};

/// Invalid length of a session id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("session id has {length} bytes, must have 1 to {}", SessionId::BYTES_MAX)]
pub struct SessionIdError {
    /// Length in bytes.
    pub length: usize,
}

/// Session id of 1 to 256 bytes of text. Cheap to clone.
///
/// ```
/// use pointsman::session::SessionId;
///
/// assert_eq!(&*SessionId::new("chat-7")?, "chat-7");
/// let error = SessionId::new(&"x".repeat(300)).unwrap_err();
/// assert_eq!(error.to_string(), "session id has 300 bytes, must have 1 to 256");
/// # Ok::<(), pointsman::session::SessionIdError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(Arc<str>);

impl SessionId {
    /// Maximum length in bytes.
    pub const BYTES_MAX: usize = 256;

    /// Validates an id from a caller. An empty id is rejected, because all callers that send one would share a session.
    ///
    /// # Errors
    /// If the id is empty or longer than [`Self::BYTES_MAX`].
    pub fn new(id: &str) -> Result<Self, SessionIdError> {
        Self::try_from(Arc::from(id))
    }
}

impl TryFrom<Arc<str>> for SessionId {
    type Error = SessionIdError;

    fn try_from(id: Arc<str>) -> Result<Self, SessionIdError> {
        match id.len() {
            1..=Self::BYTES_MAX => Ok(Self(id)),
            length => Err(SessionIdError { length }),
        }
    }
}

impl Deref for SessionId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

/// The ranks of recently used sessions.
///
/// Ids are stored completely, so a hash collision costs a comparison and never gives a wrong binding. Lookups and
/// bindings cost O(1): sessions are stored in one array with a linked list in order of use. A tree ordered by use would
/// be simpler, but took one to two microseconds per lookup among 65,536 sessions.
///
/// ```
/// use std::time::Duration;
/// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
/// use pointsman::session::{SessionId, Sessions};
///
/// let (start, hour) = (Timestamp::default(), Duration::from_secs(3600));
/// let (chat, rank) = (SessionId::new("chat-7")?, WorkerRank::new(WorkerId(3), 0));
/// let mut sessions = Sessions::new(hour, 65_536);
/// sessions.bind(&chat, rank, start);
/// assert_eq!(sessions.rank_of(&chat, start + hour / 2), Some(rank)); // a use: the hour begins anew
/// assert_eq!(sessions.peek(&chat, start + hour), Some(rank)); // not a use
/// assert_eq!(sessions.peek(&chat, start + hour * 2), None);
/// # Ok::<(), pointsman::session::SessionIdError>(())
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
}

#[derive(Clone, Debug)]
struct Session {
    id: SessionId,
    rank: WorkerRank,
    used: Timestamp,
    /// Position of the session used before this one; [`NONE`] for the oldest.
    older: u32,
    /// Position of the session used after this one; [`NONE`] for the newest.
    newer: u32,
}

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
        }
    }

    /// The rank of the session. Counts as a use.
    pub fn rank_of(&mut self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        self.expire(now);
        let place = self.place_of(id)?;
        self.unlink(place);
        self.link_newest(place);
        Some(self.at(place).rank)
    }

    /// The rank of the session. Does not count as a use.
    #[must_use]
    pub fn peek(&self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        let session = self.at(self.place_of(id)?);
        (now.max(self.latest).since(session.used) < self.ttl).then_some(session.rank)
    }

    /// Binds the session to a rank and replaces an earlier binding. Counts as a use. A full table evicts the longest
    /// idle session.
    pub fn bind(&mut self, id: &SessionId, rank: WorkerRank, now: Timestamp) {
        if self.rank_of(id, now).is_some() {
            self.at_mut(self.newest).rank = rank;
            return;
        }
        if self.sessions.len() == self.max {
            self.remove(self.oldest);
        }
        let place = u32::try_from(self.sessions.len()).expect("fewer sessions than places");
        let Self { by_id, hasher, sessions, .. } = self;
        sessions.push(Session { id: id.clone(), rank, used: self.latest, older: NONE, newer: NONE });
        by_id.insert_unique(hasher.hash_one(&**id), place, |known| hasher.hash_one(&*sessions[*known as usize].id));
        self.id_bytes += id.len();
        self.link_newest(place);
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
    fn expire(&mut self, now: Timestamp) {
        self.latest = self.latest.max(now);
        while self.oldest != NONE && self.latest.since(self.at(self.oldest).used) >= self.ttl {
            self.remove(self.oldest);
        }
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
        let Session { older, newer, .. } = *self.at(place);
        self.point_to(older, newer, newer, older);
    }

    /// Appends a session to the order of use, as used now.
    fn link_newest(&mut self, place: u32) {
        let (older, used) = (self.newest, self.latest);
        let session = self.at_mut(place);
        (session.older, session.newer, session.used) = (older, NONE, used);
        self.point_to(older, place, NONE, place);
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
        let hash = self.hasher.hash_one(&*self.at(place).id);
        let entry = self.by_id.find_entry(hash, |known| *known == place).expect("each session is found by its id");
        let _ = entry.remove();
        let removed = self.sessions.swap_remove(place as usize);
        self.id_bytes -= removed.id.len();
        let moved = u32::try_from(self.sessions.len()).expect("fewer sessions than places");
        if moved != place {
            let Session { id, older, newer, .. } = self.at(place);
            let (hash, older, newer) = (self.hasher.hash_one(&**id), *older, *newer);
            *self.by_id.find_mut(hash, |known| *known == moved).expect("each session is found by its id") = place;
            self.point_to(older, place, newer, place);
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
            assert!(older == NONE || self.at(older).used <= session.used, "uses are out of order");
            assert!(session.used <= self.latest, "a use in the future");
            (older, place, walked) = (place, session.newer, walked + 1);
        }
        assert_eq!((self.newest, walked), (older, self.sessions.len()), "the list ends early");
        assert_eq!(self.id_bytes, self.sessions.iter().map(|session| session.id.len()).sum::<usize>());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::WorkerId;

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
    fn longest_idle_session_is_evicted_first() {
        let mut sessions = sessions(2);
        sessions.bind(&id(1), rank(1), Timestamp(0));
        sessions.bind(&id(2), rank(2), Timestamp(1));
        assert_eq!(sessions.rank_of(&id(1), Timestamp(2)), Some(rank(1)));
        assert_eq!(sessions.peek(&id(2), Timestamp(2)), Some(rank(2)), "a peek does not count as a use");
        sessions.bind(&id(3), rank(3), Timestamp(3));
        assert_eq!(sessions.peek(&id(2), Timestamp(3)), None);
        sessions.bind(&id(1), rank(9), Timestamp(4));
        assert_eq!(
            (sessions.len(), sessions.peek(&id(3), Timestamp(4))),
            (2, Some(rank(3))),
            "a repeated binding adds no session"
        );
    }

    #[test]
    fn sessions_end_with_their_rank() {
        let mut sessions = sessions(8);
        for n in 0..6 {
            sessions.bind(&id(n), rank(n % 2), Timestamp(n));
        }
        assert_eq!(sessions.forget_rank(rank(1)), 3);
        assert_eq!(sessions.forget_rank(rank(1)), 0);
        assert_eq!(sessions.forget(&id(0)), Some(rank(0)));
        assert_eq!((sessions.len(), sessions.rank_of(&id(1), Timestamp(9))), (2, None));
        sessions.check_invariants();
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

    #[derive(Clone, Debug)]
    enum SessionOp {
        RankOf(u64),
        Peek(u64),
        Bind(u64, u64),
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
        fn table_matches_a_list(max in 1..6u32, steps in proptest::collection::vec(step(), 1..80)) {
            let (mut sessions, mut model) = (sessions(max), SessionModel::default());
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
            }
            for name in 0..8 {
                prop_assert_eq!(sessions.peek(&id(name), Timestamp(clock)), model.find(name, latest.max(clock)));
            }
        }
    }
}
