//! The source itself: what it knows, and what live messages and time do to it.
//!
//! Owns the cursor, the messages held, and the judgement how far the rank may be trusted. Promises that a message that
//! comes in its turn costs a hash of its bytes and no allocation. Leaves gaps, replays and what is lost to
//! [`super::recovery`].

use super::fit::Fit;
use super::held::{Held, Offered};
use super::link::Link;
use super::recovery::{Cold, Replay, ReplayPurpose, Running};
use super::seen::{Memory, Seen};
use super::{Applied, Backoff, Doubt, Effect, Input, Note, SourceConfig, Trust};
use crate::protocol::Timestamp;

/// A number that no message has: replays end with it.
const END_MARK: u64 = u64::MAX;

/// The state machine of one rank's event source.
///
/// `P` is a message's undecoded bytes. A new source takes it that nothing is known of the rank.
///
/// ```
/// use pointsman::ingest::{Applied, Effect, Input, Source, SourceConfig, Trust};
/// use pointsman::protocol::Timestamp;
///
/// let now = Timestamp::default();
/// let mut source = Source::new(SourceConfig::default(), now);
/// let mut effects = Vec::new();
/// source.step(Input::Connected, now, &mut effects);
/// assert_eq!(effects, [Effect::Replay { from: 0 }]);
/// effects.clear();
/// source.step(Input::Live { sequence: 0, payload: b"batch" }, now, &mut effects);
/// source.step(Input::ReplayEnded, now, &mut effects);
/// assert_eq!(effects[0], Effect::Apply { sequence: 0, payload: b"batch" });
/// source.step(Input::Applied(Applied { events: 1, usable: 1, ..Applied::default() }), now, &mut effects);
/// assert_eq!(source.trust(), Trust::Live);
/// ```
#[derive(Clone, Debug)]
pub struct Source<P> {
    pub(super) config: SourceConfig,
    /// When the last step was taken.
    pub(super) now: Timestamp,
    pub(super) link: Link,
    /// The message that comes next; none before the first, and after a loss that nothing has followed yet.
    pub(super) next: Option<u64>,
    pub(super) seen: Seen,
    pub(super) held: Held<P>,
    /// The last message known to exist, applied or not.
    pub(super) known_last: Option<u64>,
    /// Where live messages go on that go forward on this connection.
    pub(super) live_next: Option<u64>,
    pub(super) replay: Option<Replay>,
    /// When it is asked whether the last message was the last; none once that is known.
    pub(super) asks_at: Option<Timestamp>,
    /// Whether the last answer to that began too late, and nothing has come since.
    pub(super) end_is_gone: bool,
    /// Questions for the end in a row, with no live message since, that a subscription that works would not have needed.
    pub(super) link_troubles: u32,
    pub(super) backoff: Backoff,
    /// Replays in a row that brought nothing.
    pub(super) tries: u32,
    /// Whether a replay has been completed since the publisher last seemed to count anew.
    pub(super) is_settled: bool,
    pub(super) cold: Option<Cold>,
    /// Whether nothing was applied since the rank's blocks were last dropped.
    pub(super) is_clear: bool,
    /// Batches handed on of which nothing was reported yet, and how many of them a clear has followed.
    pub(super) unreported: u64,
    pub(super) unreported_stale: u64,
    fit: Fit,
    trust: Trust,
}

/// Where a message stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It is the one that comes next.
    Next,
    /// Some before it are missing, or where to begin is not known.
    Ahead,
    /// It was applied.
    Applied,
    /// Another was applied under its number.
    Conflicting,
    /// Its turn was before everything that is remembered.
    Forgotten,
}

impl<P: AsRef<[u8]>> Source<P> {
    /// A source that is not connected yet.
    #[must_use]
    pub fn new(config: SourceConfig, now: Timestamp) -> Self {
        Self {
            config,
            now,
            link: Link::new(now),
            next: None,
            seen: Seen::new(config.remembered_max),
            held: Held::new(config.held_messages_max, config.held_bytes_max),
            known_last: None,
            live_next: None,
            replay: None,
            asks_at: None,
            end_is_gone: false,
            link_troubles: 0,
            backoff: Backoff::new(config.seed),
            tries: 0,
            is_settled: true,
            cold: None,
            is_clear: true,
            unreported: 0,
            unreported_stale: 0,
            fit: Fit::default(),
            trust: Trust::Recovering,
        }
    }

    /// Takes one input in and appends what is to be done for it. `now` that goes back counts as not having moved.
    pub fn step(&mut self, input: Input<P>, now: Timestamp, effects: &mut Vec<Effect<P>>) {
        self.now = self.now.max(now);
        match input {
            Input::Connected => self.on_connected(effects),
            Input::Disconnected => self.on_disconnected(),
            Input::Live { sequence, payload } => self.on_live(sequence, payload, effects),
            Input::Replayed { sequence, payload } => self.on_replayed(sequence, payload, effects),
            Input::ReplayEnded => self.on_replay_ended(effects),
            Input::ReplayFailed => self.on_replay_failed(effects),
            Input::Applied(applied) => self.on_applied(applied, effects),
            Input::Served => self.link.served(self.now),
            Input::Resync => self.on_resync(effects),
            Input::Tick => self.on_tick(effects),
        }
        self.heal_by_time(effects);
        let trust = self.judge();
        if trust != self.trust {
            self.trust = trust;
            effects.push(Effect::Trust(trust));
        }
    }

    /// Whether there is room for live messages. While there is none, the live socket is better not read: what it then
    /// drops is noticed and asked for, what is read would be dropped here.
    #[must_use]
    pub fn wants_live(&self) -> bool {
        self.held.is_empty() || self.held.has_room()
    }

    /// How far the rank may be trusted, as of the last step.
    #[must_use]
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// What is wrong, as of the last step; none while live or recovering.
    #[must_use]
    pub fn doubt(&self) -> Option<Doubt> {
        match self.trust {
            Trust::Live | Trust::Recovering => None,
            Trust::Cold => self.cold.map(|cold| cold.cause),
            Trust::Mismatched => self.fit.doubt(self.config.block_size),
            Trust::Silent => self.link.doubt(self.now),
        }
    }

    /// Whether [`Input::Served`] would matter: nothing has been heard, and the engine has served nothing yet.
    #[must_use]
    pub fn awaits_served(&self) -> bool {
        self.link.awaits_served()
    }

    /// Whether everything that the publisher has said until now is known, as of the last step, be that nothing. Whoever has
    /// nothing to say though its engine has served prompts is [`Trust::Silent`] in time, and caught up as long as it is
    /// connected.
    ///
    /// ```
    /// use pointsman::ingest::{Input, Source, SourceConfig, Trust};
    /// use pointsman::protocol::Timestamp;
    ///
    /// let mut source: Source<Vec<u8>> = Source::new(SourceConfig::default(), Timestamp::default());
    /// let mut effects = Vec::new();
    /// source.step(Input::Connected, Timestamp::default(), &mut effects);
    /// assert!(!source.is_caught_up());
    /// source.step(Input::ReplayEnded, Timestamp::default(), &mut effects);
    /// assert_eq!((source.trust(), source.is_caught_up()), (Trust::Live, true));
    /// source.step(Input::Served, Timestamp::default(), &mut effects);
    /// let much_later = Timestamp(60_000_000_000);
    /// source.step(Input::Tick, much_later, &mut effects);
    /// assert_eq!((source.trust(), source.is_caught_up()), (Trust::Silent, true));
    /// ```
    #[must_use]
    pub fn is_caught_up(&self) -> bool {
        self.link.is_connected() && self.judge_heard() == Trust::Live
    }

    /// When time alone will change something: the next [`Input::Tick`] is due then. None where that is never.
    #[must_use]
    pub fn next_tick(&self) -> Option<Timestamp> {
        let silent = (self.trust != Trust::Silent).then(|| self.link.silent_at(self.config.silent_after)).flatten();
        let replay = self.replay.map(|replay| replay.due(self.config.replay_timeout));
        let asks = self.asks_at.filter(|_| self.may_ask_for_end());
        let healed = self.cold.map(|cold| cold.since + self.config.cold_heals_after);
        [silent, replay, asks, healed].into_iter().flatten().min().filter(|at| *at < Timestamp(u64::MAX))
    }

    /// Whether answers to a replay are wanted; those of one that is over need not be waited for.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        matches!(self.replay, Some(Replay::Running(_)))
    }

    /// Number of messages held until their turn.
    #[must_use]
    pub fn held_messages(&self) -> usize {
        self.held.len()
    }

    /// Payload bytes of the messages held.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held.bytes()
    }

    /// For tests: that all of this fits together.
    ///
    /// # Panics
    /// Where it does not.
    pub fn check_invariants(&self) {
        self.held.check_invariants();
        self.seen.check_invariants();
        assert!(self.unreported_stale <= self.unreported, "what is stale was handed on");
        assert_eq!(self.trust, self.judge(), "trust is what the rest says");
        if let (Some(next), Some(first)) = (self.next, self.held.first()) {
            let is_due = next == first && self.takes_live();
            assert!(next <= first && !is_due, "message {first} is held and {next} is next");
        }
        assert!(self.next.is_some() || self.seen.len() == 0, "nothing is remembered from before a loss");
        assert!(self.held.last() <= self.known_last, "what is held is known");
        assert!(self.config.has_replay || self.replay.is_none() && self.held.is_empty(), "there is nobody to ask");
        assert!(self.link.is_connected() || self.replay.is_none(), "replays end with the connection");
        let is_stuck = self.link.is_connected() && self.is_incomplete() && self.replay.is_none();
        assert!(!is_stuck, "something is missing and nobody asks for it");
    }

    fn on_disconnected(&mut self) {
        self.link.disconnected(self.now);
        (self.replay, self.asks_at, self.link_troubles) = (None, None, 0);
    }

    fn on_live(&mut self, sequence: u64, payload: P, effects: &mut Vec<Effect<P>>) {
        if sequence == END_MARK {
            return effects.push(Effect::Noted(Note::Refused));
        }
        self.link.heard();
        // A stream that still goes forward, though behind what a replay has brought, is no new one.
        let goes_forward = self.live_next.is_some_and(|next| sequence >= next);
        self.live_next = self.live_next.max(Some(sequence + 1));
        (self.end_is_gone, self.link_troubles) = (false, 0);
        self.look_for_end_later();
        match self.place(sequence, payload.as_ref()) {
            Place::Next if self.takes_live() => {
                self.apply(sequence, payload, effects);
                self.drain(effects);
            }
            Place::Ahead if self.next.is_none() && !self.waits_for_replay() => {
                self.start(sequence, effects);
                self.apply(sequence, payload, effects);
            }
            Place::Next | Place::Ahead => self.hold(sequence, payload, effects),
            Place::Applied => effects.push(Effect::Noted(Note::Duplicate)),
            Place::Forgotten if goes_forward => effects.push(Effect::Noted(Note::Late)),
            Place::Forgotten | Place::Conflicting => self.renew(Some((sequence, payload)), effects),
        }
    }

    fn on_replayed(&mut self, sequence: u64, payload: P, effects: &mut Vec<Effect<P>>) {
        if sequence == END_MARK {
            return effects.push(Effect::Noted(Note::Refused));
        }
        let Some(Replay::Running(mut running)) = self.replay else {
            return effects.push(Effect::Noted(Note::Late));
        };
        self.link.heard();
        self.live_next.get_or_insert(running.from);
        let was_awaited = running.is_awaited && sequence >= running.from;
        // Live messages may have gone on where the replay was to begin.
        let is_overtaken = self.next.is_some_and(|next| next > running.first_lacking && sequence <= next);
        // The connection has lasted: who asks for the end need not verify who answers.
        let first_due = if running.purpose == ReplayPurpose::End { running.first_lacking } else { running.from };
        let is_short = was_awaited && sequence > first_due && !is_overtaken;
        if was_awaited {
            (running.is_awaited, running.progressed_at) = (false, self.now);
            self.replay = Some(Replay::Running(running));
        }
        if is_short && running.purpose == ReplayPurpose::End && !self.end_is_gone {
            return self.mistrust_end(effects);
        }
        if is_short {
            self.lose(Some(sequence), Doubt::ReplayGap { from: running.from, first: sequence }, effects);
        } else if was_awaited && self.next.is_none() {
            self.start(sequence, effects);
        }
        match self.place(sequence, payload.as_ref()) {
            Place::Next => {
                self.apply(sequence, payload, effects);
                self.look_for_end_later(); // it did not come by itself, so the next may not either
                self.progressed();
                self.drain(effects);
            }
            Place::Ahead => self.hold(sequence, payload, effects),
            Place::Applied if was_awaited && sequence == running.from => {
                effects.push(Effect::Noted(Note::Verified));
                self.drain(effects);
            }
            Place::Applied => effects.push(Effect::Noted(Note::Duplicate)),
            Place::Forgotten => effects.push(Effect::Noted(Note::Late)),
            Place::Conflicting => {
                effects.push(Effect::Noted(Note::Dropped { messages: 1 }));
                self.renew(None, effects);
            }
        }
    }

    fn on_applied(&mut self, applied: Applied, effects: &mut Vec<Effect<P>>) {
        self.fit.observe(&applied);
        self.unreported = self.unreported.saturating_sub(1);
        if self.unreported_stale > 0 {
            self.unreported_stale -= 1; // the blocks it speaks of are gone again
            return;
        }
        let Some(cold) = &mut self.cold else { return };
        cold.stored_blocks = cold.stored_blocks.saturating_add(u64::from(applied.stored_blocks));
        let capacity = self.config.capacity_blocks.map_or(u64::MAX, u64::from);
        if applied.cleared || cold.stored_blocks >= capacity {
            self.heal(effects);
        }
    }

    fn on_tick(&mut self, effects: &mut Vec<Effect<P>>) {
        match self.replay {
            Some(Replay::Waiting { purpose, at }) if at <= self.now => self.ask(purpose, effects),
            Some(replay @ Replay::Running(_)) if replay.due(self.config.replay_timeout) <= self.now => {
                self.on_replay_failed(effects);
            }
            None if self.may_ask_for_end() && self.asks_at.is_some_and(|at| at <= self.now) => {
                self.ask_for_end(effects);
            }
            Some(Replay::Waiting { .. } | Replay::Running(_)) | None => {}
        }
    }

    pub(super) fn place(&self, sequence: u64, payload: &[u8]) -> Place {
        match self.next {
            Some(next) if sequence == next => Place::Next,
            Some(next) if sequence < next => match self.seen.recall(next - 1 - sequence, payload) {
                Memory::Same => Place::Applied,
                Memory::Other => Place::Conflicting,
                Memory::Forgotten => Place::Forgotten,
            },
            Some(_) | None => Place::Ahead,
        }
    }

    /// Whether live messages may be applied in their turn: not while it is open whose they are.
    fn takes_live(&self) -> bool {
        match self.replay {
            None => self.link.is_connected() || !self.config.has_replay,
            Some(Replay::Waiting { purpose: ReplayPurpose::Gap | ReplayPurpose::End, .. }) => true,
            Some(Replay::Waiting { purpose: ReplayPurpose::All | ReplayPurpose::Verify, .. }) => false,
            Some(Replay::Running(Running { purpose: ReplayPurpose::Gap | ReplayPurpose::End, .. })) => true,
            Some(Replay::Running(running)) => !running.is_awaited,
        }
    }

    fn waits_for_replay(&self) -> bool {
        self.replay.is_some() || self.config.has_replay && !self.link.is_connected()
    }

    /// Keeps a message until its turn, and asks for what is missing before it.
    pub(super) fn hold(&mut self, sequence: u64, payload: P, effects: &mut Vec<Effect<P>>) {
        if !self.config.has_replay {
            // Nothing could come in between any more.
            let from = self.next.unwrap_or(0);
            effects.push(Effect::Noted(Note::Gap));
            self.lose(Some(sequence), Doubt::NoReplay { from }, effects);
            return self.apply(sequence, payload, effects);
        }
        match self.held.offer(sequence, payload) {
            Offered::Held => {}
            Offered::Same => effects.push(Effect::Noted(Note::Duplicate)),
            Offered::Full => effects.push(Effect::Noted(Note::HeldOverflow)),
            Offered::Other(payload) => return self.renew(Some((sequence, payload)), effects),
        }
        self.known_last = self.known_last.max(Some(sequence));
        if let Some(Replay::Running(running)) = &mut self.replay
            && running.purpose == ReplayPurpose::End
        {
            running.purpose = ReplayPurpose::Gap; // more is missing than the end
            effects.push(Effect::Noted(Note::Gap));
        }
        if self.replay.is_none() && self.link.is_connected() {
            effects.push(Effect::Noted(Note::Gap));
            self.ask(ReplayPurpose::Gap, effects);
        }
    }

    /// Hands on the message whose turn it is.
    pub(super) fn apply(&mut self, sequence: u64, payload: P, effects: &mut Vec<Effect<P>>) {
        debug_assert_eq!(self.next, Some(sequence), "messages are applied in their turn");
        self.seen.push(payload.as_ref());
        self.next = Some(sequence + 1);
        self.known_last = self.known_last.max(Some(sequence));
        self.is_clear = false;
        self.unreported += 1;
        effects.push(Effect::Apply { sequence, payload });
    }

    fn judge(&self) -> Trust {
        if self.link.is_silent(self.now, self.config.silent_after) { Trust::Silent } else { self.judge_heard() }
    }

    /// What would be trusted of it if silence were none.
    fn judge_heard(&self) -> Trust {
        if self.fit.doubt(self.config.block_size).is_some() {
            Trust::Mismatched
        } else if self.replay.is_some_and(Replay::doubts)
            || self.is_incomplete()
            || self.next.is_none() && self.cold.is_none()
        {
            Trust::Recovering
        } else if self.cold.is_some() {
            Trust::Cold
        } else {
            Trust::Live
        }
    }

    fn heal_by_time(&mut self, effects: &mut Vec<Effect<P>>) {
        if self.cold.is_some_and(|cold| cold.since + self.config.cold_heals_after <= self.now) {
            self.heal(effects);
        }
    }
}
