//! Sessions: which rank served a conversation last, so that its next request can find what it left there.
//!
//! Owns the table from session id to rank. Promises that a binding is found under its own id only, that it lasts
//! for a time to live since its last use, that there are never more than so many and the longest idle goes first, and
//! that time which seems to run backwards stands still. Leaves to others what a binding is worth, and whether the rank
//! it names is still there: who removes a rank says so.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;

use crate::protocol::{Timestamp, WorkerRank};

/// A session id that is no session id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("session id has {length} bytes, must have 1 to {}", SessionId::BYTES_MAX)]
pub struct SessionIdError {
    /// Its length in bytes.
    pub length: usize,
}

/// Names a session: 1 to 256 bytes of text. Cheap to clone.
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
    /// Longest id.
    pub const BYTES_MAX: usize = 256;

    /// Takes an id from a caller. An empty one is refused: all who send one would share a session.
    ///
    /// # Errors
    /// When it has no bytes, or more than [`Self::BYTES_MAX`].
    pub fn new(id: &str) -> Result<Self, SessionIdError> {
        match id.len() {
            1..=Self::BYTES_MAX => Ok(Self(id.into())),
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

/// The rank of each session that was used lately.
///
/// Ids are kept whole, so a collision of hashes costs a comparison and binds nothing. Lookups and bindings cost O(1):
/// sessions stand in one array, threaded by a list in the order of their use. A tree of turns would be less code, but
/// took one to two microseconds a lookup among 65,536 sessions.
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
    /// Places of sessions, by id.
    by_id: HashTable<u32>,
    hasher: ahash::RandomState,
    /// In no order: whoever stands last fills a gap.
    sessions: Vec<Session>,
    /// The place of the one that was idle longest; [`NONE`] where there is none.
    oldest: u32,
    newest: u32,
    /// Bytes of all ids.
    id_bytes: usize,
    /// The latest time heard of.
    latest: Timestamp,
}

#[derive(Clone, Debug)]
struct Session {
    id: SessionId,
    rank: WorkerRank,
    used: Timestamp,
    /// The place of the one used before it; [`NONE`] for the oldest.
    older: u32,
    /// The place of the one used after it; [`NONE`] for the newest.
    newer: u32,
}

/// No place.
const NONE: u32 = u32::MAX;

/// What the reference count before an id takes.
const ARC_HEAD_BYTES: usize = 2 * size_of::<usize>();

impl Sessions {
    /// A table that forgets what was not used for `ttl`, and keeps at most `max` sessions; 0 counts as 1.
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

    /// The rank that the session is bound to. Counts as a use.
    pub fn rank_of(&mut self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        self.expire(now);
        let place = self.place_of(id)?;
        self.unlink(place);
        self.link_newest(place);
        Some(self.at(place).rank)
    }

    /// The rank that the session is bound to. Does not count as a use.
    #[must_use]
    pub fn peek(&self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        let session = self.at(self.place_of(id)?);
        (now.max(self.latest).since(session.used) < self.ttl).then_some(session.rank)
    }

    /// Binds the session to a rank, whatever it was bound to. Counts as a use. Where the table is full, the session
    /// that was idle longest is forgotten.
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

    /// Forgets one session; the rank it was bound to.
    pub fn forget(&mut self, id: &str) -> Option<WorkerRank> {
        let place = self.place_of(id)?;
        Some(self.remove(place).rank)
    }

    /// Forgets every session of a rank that is removed; how many there were.
    ///
    /// Visits every session: removals are rare, and an index from rank to sessions would be paid for by every request.
    pub fn forget_rank(&mut self, rank: WorkerRank) -> usize {
        let before = self.sessions.len();
        let mut place = 0;
        while let Some(session) = self.sessions.get(place as usize) {
            if session.rank == rank {
                self.remove(place); // another one stands here now, if any is left
            } else {
                place += 1;
            }
        }
        before - self.sessions.len()
    }

    /// Sessions remembered, those included that have expired since the last call that was told the time.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether no session is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Bytes taken. Below 512 a session where all ids are as long as they may be, and the table is full.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let ids = self.len() * ARC_HEAD_BYTES + self.id_bytes;
        self.by_id.allocation_size() + self.sessions.capacity() * size_of::<Session>() + ids
    }

    /// Forgets what has not been used for the time to live.
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

    /// Takes a session out of the order of use.
    fn unlink(&mut self, place: u32) {
        let Session { older, newer, .. } = *self.at(place);
        self.point_to(older, newer, newer, older);
    }

    /// Puts a session at the end of the order of use, as used now.
    fn link_newest(&mut self, place: u32) {
        let (older, used) = (self.newest, self.latest);
        let session = self.at_mut(place);
        (session.older, session.newer, session.used) = (older, NONE, used);
        self.point_to(older, place, NONE, place);
    }

    /// Makes `after_older` follow `older`, and `before_newer` precede `newer`; where one of them is none, the end of the
    /// list is meant.
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

    /// Walks the order of use and looks every session up. For tests.
    ///
    /// # Panics
    /// If a session is not found, out of order, or one too many.
    pub fn check_invariants(&self) {
        assert!(self.sessions.len() <= self.max, "{} sessions, at most {}", self.sessions.len(), self.max);
        assert_eq!(self.by_id.len(), self.sessions.len(), "a session without an id, or the reverse");
        let (mut older, mut place, mut walked) = (NONE, self.oldest, 0);
        while place != NONE {
            let session = self.at(place);
            assert_eq!(self.place_of(&session.id), Some(place), "{:?} is found elsewhere", session.id);
            assert_eq!(session.older, older, "the list does not lead back");
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
    fn the_longest_idle_goes_first() {
        let mut sessions = sessions(2);
        sessions.bind(&id(1), rank(1), Timestamp(0));
        sessions.bind(&id(2), rank(2), Timestamp(1));
        assert_eq!(sessions.rank_of(&id(1), Timestamp(2)), Some(rank(1)));
        assert_eq!(sessions.peek(&id(2), Timestamp(2)), Some(rank(2)), "a peek is no use");
        sessions.bind(&id(3), rank(3), Timestamp(3));
        assert_eq!(sessions.peek(&id(2), Timestamp(3)), None);
        sessions.bind(&id(1), rank(9), Timestamp(4));
        assert_eq!(
            (sessions.len(), sessions.peek(&id(3), Timestamp(4))),
            (2, Some(rank(3))),
            "binding again adds none"
        );
    }

    #[test]
    fn a_session_ends_with_its_rank() {
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
    fn a_full_table_of_the_longest_ids_stays_below_512_bytes_a_session() {
        for max in [1_000, 4_096, 7_169] {
            let mut sessions = sessions(max);
            for n in 0..2 * max {
                let id = SessionId::new(&format!("{n:0>256}")).expect("as long as may be");
                sessions.bind(&id, rank(1), Timestamp(0));
            }
            assert!(sessions.bytes() <= 512 * max as usize, "{} bytes for {max} sessions", sessions.bytes());
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        RankOf(u64),
        Peek(u64),
        Bind(u64, u64),
        Forget(u64),
        ForgetRank(u64),
        Time(i64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (name, worker) = (0..8u64, 0..3u64);
        prop_oneof![
            3 => name.clone().prop_map(Step::RankOf),
            2 => name.clone().prop_map(Step::Peek),
            4 => (name.clone(), worker.clone()).prop_map(|(name, worker)| Step::Bind(name, worker)),
            1 => name.prop_map(Step::Forget),
            1 => worker.prop_map(Step::ForgetRank),
            3 => (-30..80i64).prop_map(Step::Time),
        ]
    }

    /// Every binding ever made that nothing has ended, in the order of last use.
    #[derive(Default)]
    struct Model(Vec<(u64, WorkerRank, u64)>);

    impl Model {
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
        fn the_table_agrees_with_a_list(max in 1..6u32, steps in proptest::collection::vec(step(), 1..80)) {
            let (mut sessions, mut model) = (sessions(max), Model::default());
            let (mut clock, mut latest) = (1_000u64, 0); // the latest time that the table has heard of
            for step in steps {
                let now = Timestamp(clock);
                match step {
                    Step::RankOf(name) => {
                        latest = latest.max(clock);
                        let found = model.find(name, latest);
                        prop_assert_eq!(sessions.rank_of(&id(name), now), found);
                        if let Some(rank) = found {
                            model.bind(name, rank, latest, max as usize);
                        }
                    }
                    Step::Peek(name) => {
                        prop_assert_eq!(sessions.peek(&id(name), now), model.find(name, latest.max(clock)));
                    }
                    Step::Bind(name, worker) => {
                        latest = latest.max(clock);
                        sessions.bind(&id(name), rank(worker), now);
                        model.bind(name, rank(worker), latest, max as usize);
                    }
                    Step::Forget(name) => {
                        sessions.forget(&id(name));
                        model.0.retain(|known| known.0 != name);
                    }
                    Step::ForgetRank(worker) => {
                        sessions.forget_rank(rank(worker));
                        model.0.retain(|known| known.1 != rank(worker));
                    }
                    Step::Time(by) => clock = clock.saturating_add_signed(by),
                }
                sessions.check_invariants();
            }
            for name in 0..8 {
                prop_assert_eq!(sessions.peek(&id(name), Timestamp(clock)), model.find(name, latest.max(clock)));
            }
        }
    }
}
