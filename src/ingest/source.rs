//! Event source state machine: live messages, ticks and the stream state.
//!
//! Holds the cursor and the held messages, and evaluates the stream state. A message in order costs a hash of its bytes
//! and no allocation. [`super::recovery`] handles gaps, replays and losses.

use super::fit::Fit;
use super::hashes::{PayloadHashes, PayloadMatch};
use super::held::{Held, Offered};
use super::replay::{Cold, ReplayPurpose, ReplayState, RunningReplay};
use super::subscription::SubscriptionState;
use super::{Backoff, DegradationReason, IngestEffect, IngestInput, Note, RestoreState, SourceConfig, StreamState};
use crate::protocol::Timestamp;
use crate::wire::Report;

/// Sequence number that marks the end of a replay and that no message has.
const END_MARK: u64 = u64::MAX;

/// State machine of one rank's event source.
///
/// `P` is the type of a message's undecoded bytes. A new source assumes that the index holds no blocks of the rank.
///
/// ```
/// use pointsman::internals::{ingest::{IngestEffect, IngestInput, Source, SourceConfig}, wire::Report};
/// use pointsman::StreamState;
/// use pointsman::protocol::Timestamp;
///
/// let now = Timestamp::default();
/// let mut source = Source::new(SourceConfig::default(), now);
/// let mut effects = Vec::new();
/// source.step(IngestInput::Connected, now, &mut effects);
/// assert_eq!(effects, [IngestEffect::Replay { from: 0 }]);
/// effects.clear();
/// source.step(IngestInput::Live { sequence: 0, payload: b"batch" }, now, &mut effects);
/// source.step(IngestInput::ReplayEnded, now, &mut effects);
/// assert_eq!(effects[0], IngestEffect::Apply { sequence: 0, payload: b"batch" });
/// source.step(IngestInput::Applied(Report { events: 1, usable: 1, ..Report::default() }), now, &mut effects);
/// assert_eq!(source.state(), StreamState::Live);
/// ```
#[derive(Clone, Debug)]
pub struct Source<P> {
    pub(super) config: SourceConfig,
    /// Time of the last step.
    pub(super) now: Timestamp,
    pub(super) link: SubscriptionState,
    /// Sequence number of the next message; `None` before the first message, and after a loss until the next message.
    pub(super) next: Option<u64>,
    pub(super) seen: PayloadHashes,
    pub(super) held: Held<P>,
    /// The last message known to exist, applied or not.
    pub(super) known_last: Option<u64>,
    /// The next live sequence number on this connection.
    pub(super) live_next: Option<u64>,
    pub(super) replay: Option<ReplayState>,
    /// Time of the next end check; `None` while none is scheduled.
    pub(super) end_check_at: Option<Timestamp>,
    /// Whether the last end check found the next message missing, and no live message arrived since.
    pub(super) end_is_missing: bool,
    /// Consecutive end checks, without a live message in between, that a working subscription would have made
    /// unnecessary.
    pub(super) subscription_failures: u32,
    pub(super) backoff: Backoff,
    /// Consecutive replays without new messages.
    pub(super) attempts: u32,
    /// Whether a replay has completed since the last change of incarnation.
    pub(super) has_completed_replay: bool,
    pub(super) cold: Option<Cold>,
    /// Whether no message was applied since the rank's blocks were last removed.
    pub(super) is_clear: bool,
    /// Number of applied batches without a report, and the number of those that a clear has followed.
    pub(super) unreported: u64,
    pub(super) unreported_stale: u64,
    /// Progress of the restore; `None` without one.
    pub(super) restore: Option<RestoreState>,
    pub(super) fit: Fit,
    state: StreamState,
}

/// Position of a message relative to the cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessagePosition {
    /// The next message.
    Next,
    /// Later than the next message, or the start is unknown.
    Ahead,
    /// Already applied.
    Applied,
    /// A different message was applied under its number.
    Conflicting,
    /// Earlier than all remembered messages.
    Forgotten,
}

impl<P: AsRef<[u8]>> Source<P> {
    /// Creates a source without a connection.
    #[must_use]
    pub fn new(config: SourceConfig, now: Timestamp) -> Self {
        Self {
            config,
            now,
            link: SubscriptionState::new(now),
            next: None,
            seen: PayloadHashes::new(config.remembered_max),
            held: Held::new(config.held_messages_max, config.held_bytes_max),
            known_last: None,
            live_next: None,
            replay: None,
            end_check_at: None,
            end_is_missing: false,
            subscription_failures: 0,
            backoff: Backoff::new(config.seed),
            attempts: 0,
            has_completed_replay: true,
            cold: None,
            is_clear: true,
            unreported: 0,
            unreported_stale: 0,
            restore: None,
            fit: Fit::default(),
            state: StreamState::Recovering,
        }
    }

    /// Processes one input and appends the resulting actions to `effects`. A `now` before the previous step counts as
    /// equal to it.
    pub fn step(&mut self, input: IngestInput<P>, now: Timestamp, effects: &mut Vec<IngestEffect<P>>) {
        self.now = self.now.max(now);
        match input {
            IngestInput::Connected => self.on_connected(effects),
            IngestInput::Disconnected => self.on_disconnected(),
            IngestInput::Live { sequence, payload } => self.on_live(sequence, payload, effects),
            IngestInput::Replayed { sequence, payload } => self.on_replayed(sequence, payload, effects),
            IngestInput::ReplayEnded => self.on_replay_ended(effects),
            IngestInput::ReplayFailed => self.on_replay_failed(effects),
            IngestInput::Applied(applied) => self.on_applied(applied, effects),
            IngestInput::Served => self.link.served(self.now),
            IngestInput::Resync => self.on_resync(effects),
            IngestInput::Tick => self.on_tick(effects),
        }
        self.heal_by_time(effects);
        let state = self.evaluate_state();
        if state != self.state {
            self.state = state;
            effects.push(IngestEffect::State(state));
        }
    }

    /// Whether the source has room for live messages. Without room, the live socket should not be read: messages
    /// dropped by the socket are detected and replayed, while messages read now would be dropped here.
    #[must_use]
    pub fn wants_live(&self) -> bool {
        self.held.is_empty() || self.held.has_room()
    }

    /// The stream state after the last step.
    #[must_use]
    pub fn state(&self) -> StreamState {
        self.state
    }

    /// The degradation reason after the last step; `None` while live or recovering.
    #[must_use]
    pub fn degradation(&self) -> Option<DegradationReason> {
        match self.state {
            StreamState::Live | StreamState::Recovering => None,
            StreamState::Cold => self.cold.map(|cold| cold.cause),
            StreamState::Mismatched => self.fit.degradation(self.config.block_size),
            StreamState::Silent => self.link.degradation(self.now),
        }
    }

    /// Block size of the engine's events, once known. A publisher's restart makes it unknown until its next stored block.
    #[must_use]
    pub fn block_size(&self) -> Option<u32> {
        self.fit.block_size(self.config.block_size)
    }

    /// Whether [`IngestInput::Served`] would have an effect: no message was received, and the engine has served no
    /// prompt yet.
    #[must_use]
    pub fn awaits_served(&self) -> bool {
        self.link.awaits_served()
    }

    /// True once every message published so far has been applied, as of the last step (trivially true if there were
    /// none). A publisher without messages although its engine has served prompts becomes [`StreamState::Silent`], and
    /// counts as caught up while connected.
    ///
    /// ```
    /// use pointsman::{internals::ingest::{IngestInput, Source, SourceConfig}, StreamState};
    /// use pointsman::protocol::Timestamp;
    ///
    /// let mut source: Source<Vec<u8>> = Source::new(SourceConfig::default(), Timestamp::default());
    /// let mut effects = Vec::new();
    /// source.step(IngestInput::Connected, Timestamp::default(), &mut effects);
    /// assert!(!source.is_caught_up());
    /// source.step(IngestInput::ReplayEnded, Timestamp::default(), &mut effects);
    /// assert_eq!((source.state(), source.is_caught_up()), (StreamState::Live, true));
    /// source.step(IngestInput::Served, Timestamp::default(), &mut effects);
    /// let much_later = Timestamp(60_000_000_000);
    /// source.step(IngestInput::Tick, much_later, &mut effects);
    /// assert_eq!((source.state(), source.is_caught_up()), (StreamState::Silent, true));
    /// ```
    #[must_use]
    pub fn is_caught_up(&self) -> bool {
        self.link.is_connected() && self.evaluate_connected() == StreamState::Live
    }

    /// Time at which the next [`IngestInput::Tick`] is due; `None` if no tick is required.
    #[must_use]
    pub fn next_tick(&self) -> Option<Timestamp> {
        let silent =
            (self.state != StreamState::Silent).then(|| self.link.silent_at(self.config.silent_after)).flatten();
        let replay = self.replay.map(|replay| replay.due(self.config.replay_timeout));
        let asks = self.end_check_at.filter(|_| self.can_check_end());
        let healed = self.cold.map(|cold| cold.since + self.config.cold_heals_after);
        [silent, replay, asks, healed].into_iter().flatten().min().filter(|at| *at < Timestamp(u64::MAX))
    }

    /// Whether a replay is running. Messages of an earlier replay can be ignored.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        matches!(self.replay, Some(ReplayState::Running(_)))
    }

    /// Number of held messages.
    #[must_use]
    pub fn held_messages(&self) -> usize {
        self.held.len()
    }

    /// Payload bytes of the held messages.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held.bytes()
    }

    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn check_invariants(&self) {
        self.held.check_invariants();
        self.seen.check_invariants();
        assert!(self.unreported_stale <= self.unreported, "stale batches are among the unreported ones");
        assert_eq!(self.state, self.evaluate_state(), "the state matches its evaluation");
        if let (Some(next), Some(first)) = (self.next, self.held.first()) {
            let is_due = next == first && self.takes_live();
            assert!(next <= first && !is_due, "message {first} is held and {next} is next");
        }
        assert!(self.next.is_some() || self.seen.len() == 0, "hashes are dropped at a loss");
        assert!(self.held.last() <= self.known_last, "held messages are known");
        assert!(
            self.config.has_replay || self.replay.is_none() && self.held.is_empty(),
            "replays require a replay socket"
        );
        assert!(self.link.is_connected() || self.replay.is_none(), "replays end with the connection");
        let is_stuck = self.link.is_connected() && self.is_incomplete() && self.replay.is_none();
        assert!(!is_stuck, "missing messages are always requested");
    }

    fn on_disconnected(&mut self) {
        self.link.disconnected(self.now);
        (self.replay, self.end_check_at, self.subscription_failures) = (None, None, 0);
    }

    fn on_live(&mut self, sequence: u64, payload: P, effects: &mut Vec<IngestEffect<P>>) {
        if sequence == END_MARK {
            return effects.push(IngestEffect::Noted(Note::Refused));
        }
        self.link.received();
        // A stream with ascending numbers is the same incarnation, even behind messages that a replay already
        // delivered.
        let is_ascending = self.live_next.is_some_and(|next| sequence >= next);
        self.live_next = self.live_next.max(Some(sequence + 1));
        (self.end_is_missing, self.subscription_failures) = (false, 0);
        self.schedule_end_check();
        match self.position_of(sequence, payload.as_ref()) {
            MessagePosition::Next if self.takes_live() => {
                self.apply(sequence, payload, effects);
                self.drain(effects);
            }
            MessagePosition::Ahead if self.next.is_none() && !self.waits_for_replay() => {
                self.start(sequence, effects);
                self.apply(sequence, payload, effects);
            }
            MessagePosition::Next | MessagePosition::Ahead => self.hold(sequence, payload, effects),
            MessagePosition::Applied => effects.push(IngestEffect::Noted(Note::Duplicate)),
            MessagePosition::Forgotten if is_ascending => effects.push(IngestEffect::Noted(Note::Late)),
            MessagePosition::Forgotten | MessagePosition::Conflicting => {
                self.start_incarnation(Some((sequence, payload)), effects)
            }
        }
    }

    fn on_replayed(&mut self, sequence: u64, payload: P, effects: &mut Vec<IngestEffect<P>>) {
        if sequence == END_MARK {
            return effects.push(IngestEffect::Noted(Note::Refused));
        }
        let Some(ReplayState::Running(mut running)) = self.replay else {
            return effects.push(IngestEffect::Noted(Note::Late));
        };
        self.link.received();
        self.live_next.get_or_insert(running.from);
        let was_awaiting_start = running.awaits_start && sequence >= running.from;
        // Live messages may have passed the start of the replay.
        let is_overtaken = self.next.is_some_and(|next| next > running.first_missing && sequence <= next);
        // Also during an end check: a connection can outlast its publisher.
        let is_short = was_awaiting_start && sequence > running.from && !is_overtaken;
        if was_awaiting_start {
            (running.awaits_start, running.progressed_at) = (false, self.now);
            self.replay = Some(ReplayState::Running(running));
        }
        if is_short && running.purpose == ReplayPurpose::End && !self.end_is_missing {
            return self.expect_missing_end(effects);
        }
        if is_short {
            self.lose(Some(sequence), DegradationReason::ReplayGap { from: running.from, first: sequence }, effects);
        } else if was_awaiting_start && self.next.is_none() {
            self.start(sequence, effects);
        }
        match self.position_of(sequence, payload.as_ref()) {
            MessagePosition::Next => {
                self.apply(sequence, payload, effects);
                self.schedule_end_check(); // the subscription missed this message, so it may also miss the next one
                self.progressed();
                self.drain(effects);
            }
            MessagePosition::Ahead => self.hold(sequence, payload, effects),
            MessagePosition::Applied if was_awaiting_start && sequence == running.from => {
                effects.push(IngestEffect::Noted(Note::Verified));
                self.drain(effects);
            }
            MessagePosition::Applied => effects.push(IngestEffect::Noted(Note::Duplicate)),
            MessagePosition::Forgotten => effects.push(IngestEffect::Noted(Note::Late)),
            MessagePosition::Conflicting => {
                effects.push(IngestEffect::Noted(Note::Dropped { messages: 1 }));
                self.start_incarnation(None, effects);
            }
        }
    }

    fn on_applied(&mut self, applied: Report, effects: &mut Vec<IngestEffect<P>>) {
        self.fit.observe(&applied, self.config.block_size);
        self.unreported = self.unreported.saturating_sub(1);
        if self.unreported_stale > 0 {
            self.unreported_stale -= 1; // a clear already removed these blocks
            return;
        }
        if let Some(finding) = applied.lost_removals.filter(|_| self.fit.has_fitted()) {
            return self.become_cold(DegradationReason::LostRemoval { finding }, effects);
        }
        let Some(cold) = &mut self.cold else { return };
        cold.stored_blocks = cold.stored_blocks.saturating_add(u64::from(applied.stored_blocks));
        let capacity = self.config.capacity_blocks.map_or(u64::MAX, u64::from);
        if applied.cleared || cold.stored_blocks >= capacity {
            self.heal(effects);
        }
    }

    fn on_tick(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        match self.replay {
            Some(ReplayState::Waiting { purpose, at }) if at <= self.now => self.request_replay(purpose, effects),
            Some(replay @ ReplayState::Running(_)) if replay.due(self.config.replay_timeout) <= self.now => {
                self.on_replay_failed(effects);
            }
            None if self.can_check_end() && self.end_check_at.is_some_and(|at| at <= self.now) => {
                self.check_end(effects);
            }
            Some(ReplayState::Waiting { .. } | ReplayState::Running(_)) | None => {}
        }
    }

    pub(super) fn position_of(&self, sequence: u64, payload: &[u8]) -> MessagePosition {
        match self.next {
            Some(next) if sequence == next => MessagePosition::Next,
            Some(next) if sequence < next => match self.seen.recall(next - 1 - sequence, payload) {
                PayloadMatch::Same => MessagePosition::Applied,
                PayloadMatch::Other => MessagePosition::Conflicting,
                PayloadMatch::Forgotten => MessagePosition::Forgotten,
            },
            Some(_) | None => MessagePosition::Ahead,
        }
    }

    /// Whether live messages may be applied in order: not while the incarnation of the publisher is unverified.
    fn takes_live(&self) -> bool {
        match self.replay {
            None => self.link.is_connected() || !self.config.has_replay,
            Some(ReplayState::Waiting { purpose: ReplayPurpose::Gap | ReplayPurpose::End, .. }) => true,
            Some(ReplayState::Waiting { purpose: ReplayPurpose::All | ReplayPurpose::Verify, .. }) => false,
            Some(ReplayState::Running(RunningReplay { purpose: ReplayPurpose::Gap | ReplayPurpose::End, .. })) => true,
            Some(ReplayState::Running(running)) => !running.awaits_start,
        }
    }

    fn waits_for_replay(&self) -> bool {
        self.replay.is_some() || self.config.has_replay && !self.link.is_connected()
    }

    /// Holds a message until its predecessors are applied, and requests these.
    pub(super) fn hold(&mut self, sequence: u64, payload: P, effects: &mut Vec<IngestEffect<P>>) {
        if !self.config.has_replay {
            // Without a replay socket, the missing messages cannot be recovered.
            let from = self.next.unwrap_or(0);
            effects.push(IngestEffect::Noted(Note::Gap));
            self.lose(Some(sequence), DegradationReason::NoReplay { from }, effects);
            return self.apply(sequence, payload, effects);
        }
        match self.held.offer(sequence, payload) {
            Offered::Held => {}
            Offered::Same => effects.push(IngestEffect::Noted(Note::Duplicate)),
            Offered::Full => effects.push(IngestEffect::Noted(Note::HeldOverflow)),
            Offered::Other(payload) => return self.start_incarnation(Some((sequence, payload)), effects),
        }
        self.known_last = self.known_last.max(Some(sequence));
        if let Some(ReplayState::Running(running)) = &mut self.replay
            && running.purpose == ReplayPurpose::End
        {
            running.purpose = ReplayPurpose::Gap; // more messages are missing than the end check expected
            effects.push(IngestEffect::Noted(Note::Gap));
        }
        if self.replay.is_none() && self.link.is_connected() {
            effects.push(IngestEffect::Noted(Note::Gap));
            self.request_replay(ReplayPurpose::Gap, effects);
        }
    }

    /// Applies the next message.
    pub(super) fn apply(&mut self, sequence: u64, payload: P, effects: &mut Vec<IngestEffect<P>>) {
        debug_assert_eq!(self.next, Some(sequence), "messages are applied in order");
        self.seen.push(payload.as_ref());
        self.next = Some(sequence + 1);
        self.known_last = self.known_last.max(Some(sequence));
        self.is_clear = false;
        self.unreported += 1;
        effects.push(IngestEffect::Apply { sequence, payload });
    }

    fn evaluate_state(&self) -> StreamState {
        if self.link.is_silent(self.now, self.config.silent_after) {
            StreamState::Silent
        } else {
            self.evaluate_connected()
        }
    }

    /// The stream state without regard to silence.
    fn evaluate_connected(&self) -> StreamState {
        if self.fit.degradation(self.config.block_size).is_some() {
            StreamState::Mismatched
        } else if self.replay.is_some_and(ReplayState::degrades)
            || self.is_incomplete()
            || self.is_unverified()
            || self.next.is_none() && self.cold.is_none()
        {
            StreamState::Recovering
        } else if self.cold.is_some() {
            StreamState::Cold
        } else {
            StreamState::Live
        }
    }

    fn heal_by_time(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        if self.cold.is_some_and(|cold| cold.since + self.config.cold_heals_after <= self.now) {
            self.heal(effects);
        }
    }
}
