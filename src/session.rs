//! Sessions: which rank served a conversation last, so that its next request can find what it left there.
//!
//! Owns the table from session id to rank. Promises that a binding is found under its own id only, that it lasts
//! for a time to live since its last use, that there are never more than so many and the longest idle goes first, and
//! that time which seems to run backwards stands still. Leaves to others what a binding is worth, and whether the rank
//! it names is still there: who removes a rank says so.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

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

// The table is keyed by ids and asked by text: a hash of the one is a hash of the other.
impl Borrow<str> for SessionId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// The rank of each session that was used lately.
///
/// Ids are kept whole, so a collision of hashes costs a comparison and binds nothing. A lookup that counts as a use,
/// and a binding, cost O(log sessions): the order of use is a tree of turns rather than a list threaded through the
/// table, which would be O(1) and twice the code, for a table that is asked once a request.
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
    /// Each session's last turn.
    turns: HashMap<SessionId, u64, ahash::RandomState>,
    /// Sessions by their last turn, longest idle first.
    by_turn: BTreeMap<u64, Session>,
    next_turn: u64,
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
}

/// What the reference count before an id takes.
const ARC_HEAD_BYTES: usize = 2 * size_of::<usize>();

/// What a session takes in the tree at most: a node has room for 11 and, but for one at each end, at least 5.
const TREE_BYTES_MAX: usize = (size_of::<u64>() + size_of::<Session>()) * 11 / 5 + 32;

impl Sessions {
    /// A table that forgets what was not used for `ttl`, and keeps at most `max` sessions; 0 counts as 1.
    #[must_use]
    pub fn new(ttl: Duration, max: u32) -> Self {
        Self {
            ttl,
            max: max.max(1) as usize,
            turns: HashMap::default(),
            by_turn: BTreeMap::new(),
            next_turn: 0,
            id_bytes: 0,
            latest: Timestamp::default(),
        }
    }

    /// The rank that the session is bound to. Counts as a use.
    pub fn rank_of(&mut self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        self.expire(now);
        let turn = self.turns.get_mut(id)?;
        let session = self.by_turn.remove(turn).expect("each session has its turn");
        let rank = session.rank;
        *turn = self.next_turn;
        self.next_turn += 1;
        self.by_turn.insert(*turn, Session { used: self.latest, ..session });
        Some(rank)
    }

    /// The rank that the session is bound to. Does not count as a use.
    #[must_use]
    pub fn peek(&self, id: &str, now: Timestamp) -> Option<WorkerRank> {
        let session = &self.by_turn[self.turns.get(id)?];
        (now.max(self.latest).since(session.used) < self.ttl).then_some(session.rank)
    }

    /// Binds the session to a rank, whatever it was bound to. Counts as a use. Where the table is full, the session
    /// that was idle longest is forgotten.
    pub fn bind(&mut self, id: &SessionId, rank: WorkerRank, now: Timestamp) {
        self.expire(now);
        self.forget(id);
        if self.by_turn.len() == self.max {
            self.forget_first();
        }
        self.turns.insert(id.clone(), self.next_turn);
        self.by_turn.insert(self.next_turn, Session { id: id.clone(), rank, used: self.latest });
        self.next_turn += 1;
        self.id_bytes += id.len();
    }

    /// Forgets one session; the rank it was bound to.
    pub fn forget(&mut self, id: &str) -> Option<WorkerRank> {
        let turn = self.turns.remove(id)?;
        self.id_bytes -= id.len();
        self.by_turn.remove(&turn).map(|session| session.rank)
    }

    /// Forgets every session of a rank that is removed; how many there were.
    ///
    /// Visits every session, some milliseconds where there are 65,536: removals are rare, and a second index from rank
    /// to sessions would be paid for by every request.
    pub fn forget_rank(&mut self, rank: WorkerRank) -> usize {
        let before = self.by_turn.len();
        let Self { turns, by_turn, id_bytes, .. } = self;
        by_turn.retain(|_, session| {
            let stays = session.rank != rank;
            if !stays {
                turns.remove(&session.id);
                *id_bytes -= session.id.len();
            }
            stays
        });
        before - self.by_turn.len()
    }

    /// Sessions remembered, those included that have expired since the last call that was told the time.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_turn.len()
    }

    /// Whether no session is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_turn.is_empty()
    }

    /// Bytes taken, at most. Below 512 a session where all ids are as long as they may be, and the table is full.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.turns.allocation_size() + self.len() * (TREE_BYTES_MAX + ARC_HEAD_BYTES) + self.id_bytes
    }

    /// Forgets what has not been used for the time to live. O(log sessions) for each.
    fn expire(&mut self, now: Timestamp) {
        self.latest = self.latest.max(now);
        while let Some((_, session)) = self.by_turn.first_key_value()
            && self.latest.since(session.used) >= self.ttl
        {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        if let Some((_, session)) = self.by_turn.pop_first() {
            self.turns.remove(&session.id);
            self.id_bytes -= session.id.len();
        }
    }

    /// Compares both sides of the table. For tests.
    ///
    /// # Panics
    /// If they differ, or sessions are out of order, or too many.
    pub fn check_invariants(&self) {
        assert!(self.by_turn.len() <= self.max, "{} sessions, at most {}", self.by_turn.len(), self.max);
        assert_eq!(self.turns.len(), self.by_turn.len(), "a session without a turn, or the reverse");
        for (turn, session) in &self.by_turn {
            assert_eq!(self.turns.get(&session.id), Some(turn), "the turn of {:?} is another", session.id);
            assert!(*turn < self.next_turn, "a turn to come");
            assert!(session.used <= self.latest, "a use in the future");
        }
        assert!(self.by_turn.values().is_sorted_by_key(|session| session.used), "uses are out of order");
        assert_eq!(self.id_bytes, self.by_turn.values().map(|session| session.id.len()).sum::<usize>());
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
