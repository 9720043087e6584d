//! Programs and working sets: the contexts that agents of a rank will extend.
//!
//! Counts each agent on the rank of its newest context while its last use is less than [`IDLE_MAX`] ago. The order of use
//! has these agents at its end, so that a change costs O(log ranks).

use std::collections::BTreeSet;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use super::context::Call;
use super::{NONE, Session, SessionId, Sessions};
use crate::protocol::{Timestamp, WorkerRank};

/// Idle time after which a context no longer counts. Of the calls of coding agents, 94 % follow the previous one within
/// five minutes; to keep their contexts for an hour takes three times the memory.
const IDLE_MAX: Duration = Duration::from_secs(300);

/// Key of a program with this name; 0 stands for none.
#[must_use]
pub fn program_key(name: &str) -> u64 {
    xxh3_64(name.as_bytes()).max(1)
}

/// Returning calls since the start: those that extend the context of their agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returns {
    /// Their number.
    pub calls: u64,
    /// Blocks of the contexts that a rank still held.
    pub held_blocks: u64,
    /// Blocks that no rank held any more.
    pub evicted_blocks: u64,
    /// Calls that have waited for the claims of other programs.
    pub holds: u64,
    /// Sum of these waits.
    pub hold_seconds: u64,
}

impl Returns {
    /// The increase since `earlier`. After a restart of the scheduler all of it.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        let since = |now: u64, earlier: u64| now.checked_sub(earlier).unwrap_or(now);
        Self {
            calls: since(self.calls, earlier.calls),
            held_blocks: since(self.held_blocks, earlier.held_blocks),
            evicted_blocks: since(self.evicted_blocks, earlier.evicted_blocks),
            holds: since(self.holds, earlier.holds),
            hold_seconds: since(self.hold_seconds, earlier.hold_seconds),
        }
    }
}

impl Sessions {
    /// Binds the session to the rank of a placed call, and keeps its context. Auxiliary calls change neither.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::internals::load::{PromptBlocks, PromptFingerprint};
    /// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
    /// use pointsman::internals::session::{Call, Sessions};
    /// use pointsman::SessionId;
    ///
    /// let (agent, rank, now) = (SessionId::new("task")?, WorkerRank::new(WorkerId(3), 0), Timestamp::default());
    /// let mut sessions = Sessions::new(Duration::from_secs(3600), 65_536);
    /// let (prompt, fingerprint) = (PromptBlocks::Counted(9), PromptFingerprint::unshared());
    /// let call = Call { program: 1, prompt: &prompt, fingerprint, prompt_tokens: 900, held_blocks: 2, held_tokens: 200 };
    /// sessions.call(&agent, rank, &call, now);
    /// assert_eq!((sessions.programs(), sessions.working_tokens(rank)), (1, 700)); // without what others also use
    /// # Ok::<(), pointsman::internals::session::SessionIdError>(())
    /// ```
    pub fn call(&mut self, id: &SessionId, rank: WorkerRank, call: &Call<'_>, now: Timestamp) {
        let place = self.use_of(id, now).unwrap_or_else(|| self.add_new(id, rank));
        self.set_program(place, call.program);
        let common_blocks = self.at(place).context.common_blocks(call.prompt);
        if common_blocks > 0 {
            let held_blocks = call.held_blocks.min(common_blocks);
            self.returns.calls += 1;
            self.returns.held_blocks += u64::from(held_blocks);
            self.returns.evicted_blocks += u64::from(common_blocks - held_blocks);
        }
        if self.at_mut(place).context.is_of(call, now) {
            self.recount(place, |session| {
                session.rank = rank;
                session.context.extend(call, now);
            });
        }
        self.write(place);
    }

    /// Known programs: those with an agent whose calls this process has placed.
    #[must_use]
    pub fn programs(&self) -> usize {
        self.agents.len()
    }

    /// See [`Returns`].
    #[must_use]
    pub fn returns(&self) -> Returns {
        self.returns
    }

    /// Tokens of the contexts that agents of the rank are going to extend, without those shared with other programs.
    #[must_use]
    pub fn working_tokens(&self, rank: WorkerRank) -> u64 {
        self.working.get(&rank).copied().unwrap_or(0)
    }

    /// Ranks whose working set may have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<WorkerRank> {
        std::mem::take(&mut self.changed)
    }

    /// Counts a session that is now in the order of use, and those behind it.
    pub(super) fn begin_counting(&mut self, place: u32) {
        let Session { older, newer, used, .. } = *self.at(place);
        let is_behind_counted = older != NONE && self.at(older).is_counted;
        if !is_behind_counted {
            if newer != self.first_counted || self.latest.since(used) >= IDLE_MAX {
                return;
            }
            self.first_counted = place;
        }
        self.at_mut(place).is_counted = true;
        self.add_working(place);
    }

    /// Stops counting a session that leaves its position in the order of use.
    pub(super) fn end_counting(&mut self, place: u32) {
        if self.first_counted == place {
            self.first_counted = self.at(place).newer;
        }
        self.remove_working(place);
        self.at_mut(place).is_counted = false;
    }

    /// Stops counting sessions that are idle for too long.
    pub(super) fn expire_counts(&mut self) {
        while self.first_counted != NONE && self.latest.since(self.at(self.first_counted).used) >= IDLE_MAX {
            self.end_counting(self.first_counted);
        }
    }

    /// Changes rank or context of a session.
    pub(super) fn recount(&mut self, place: u32, change: impl FnOnce(&mut Session)) {
        self.remove_working(place);
        change(self.at_mut(place));
        self.add_working(place);
    }

    fn add_working(&mut self, place: u32) {
        if let Some((rank, tokens)) = self.counted_tokens(place) {
            *self.working.entry(rank).or_default() += tokens;
            self.changed.insert(rank);
        }
    }

    fn remove_working(&mut self, place: u32) {
        let Some((rank, tokens)) = self.counted_tokens(place) else { return };
        if let Some(sum) = self.working.get_mut(&rank) {
            *sum -= tokens;
            if *sum == 0 {
                self.working.remove(&rank);
            }
            self.changed.insert(rank);
        }
    }

    /// Rank and tokens that a session counts.
    fn counted_tokens(&self, place: u32) -> Option<(WorkerRank, u64)> {
        let Session { rank, context, is_counted, .. } = self.at(place);
        let tokens = u64::from(context.own_tokens());
        (*is_counted && tokens > 0).then_some((*rank, tokens))
    }

    /// Moves a session to a program; 0 stands for none.
    pub(super) fn set_program(&mut self, place: u32, program: u64) {
        let before = std::mem::replace(&mut self.at_mut(place).program, program);
        if before == program {
            return;
        }
        if let Some(agents) = self.agents.get_mut(&before) {
            *agents -= 1;
            if *agents == 0 {
                self.agents.remove(&before);
            }
        }
        if program != 0 {
            *self.agents.entry(program).or_default() += 1;
        }
    }
}
