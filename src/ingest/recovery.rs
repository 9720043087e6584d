//! What a source does about messages that are missing.
//!
//! Owns replays, from the question to the end or to giving up, and the two ways to start over: the publisher counts
//! anew ([`Source::renew`]), or something is lost for good ([`Source::lose`]). Promises that whatever is missing while
//! connected is asked for or given up, never waited for in silence, and that a rank's blocks are dropped before
//! anything is applied behind a hole. What is missing at the end, where nothing comes behind it, is asked for when it has
//! been quiet for a while.
//!
//! A replay begins one message early, with the last one applied: if that one is other than it was, or no longer there,
//! the publisher is not the one it was, however far it has counted since. Leaves the cursor's daily work to
//! [`super::source`].

use std::time::Duration;

use super::source::{Place, Source};
use super::{Doubt, Effect, Note};
use crate::protocol::Timestamp;

/// Replays in a row that may bring nothing.
const TRIES_MAX: u32 = 2;

/// Questions for the end in a row that show a subscription to be deaf.
const LINK_TROUBLES_MAX: u32 = 3;

/// Why a replay is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayPurpose {
    /// Nothing is known yet, or any more.
    All,
    /// The connection is new: is the publisher the one it was, and what has it said meanwhile?
    Verify,
    /// A live message came too early. Others may still close the gap before the replay does.
    Gap,
    /// Nothing came for a while. As a rule there is nothing to come, so nothing is doubted for it.
    End,
}

/// A replay that was asked for, or will be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Replay {
    Waiting { purpose: ReplayPurpose, at: Timestamp },
    Running(Running),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) purpose: ReplayPurpose,
    /// The message that it must begin with.
    pub(super) from: u64,
    /// The first that was not there when it was asked for; the one before it, if any, was applied.
    pub(super) first_lacking: u64,
    /// Whether the beginning is still to come.
    pub(super) is_awaited: bool,
    /// When it last brought a message whose turn it was.
    pub(super) progressed_at: Timestamp,
}

impl Replay {
    /// When time alone will change it.
    pub(super) fn due(&self, replay_timeout: Duration) -> Timestamp {
        match self {
            Self::Waiting { at, .. } => *at,
            Self::Running(running) => running.progressed_at + replay_timeout,
        }
    }

    /// Whether something is known to be missing, or who is there is not.
    pub(super) fn doubts(self) -> bool {
        self.purpose() != ReplayPurpose::End
    }

    fn purpose(&self) -> ReplayPurpose {
        match self {
            Self::Waiting { purpose, .. } => *purpose,
            Self::Running(running) => running.purpose,
        }
    }
}

/// Something was lost, and this is what is known of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cold {
    pub(super) since: Timestamp,
    /// Blocks stored since then.
    pub(super) stored_blocks: u64,
    pub(super) cause: Doubt,
}

impl<P: AsRef<[u8]>> Source<P> {
    pub(super) fn on_connected(&mut self, effects: &mut Vec<Effect<P>>) {
        self.link.connected(self.now);
        (self.live_next, self.tries) = (None, 0);
        self.drop_held(effects);
        if self.config.has_replay {
            self.ask(if self.next.unwrap_or(0) == 0 { ReplayPurpose::All } else { ReplayPurpose::Verify }, effects);
        } else if let Some(from) = self.next {
            // The engine may have restarted and published just as many messages: nothing can verify that it did not.
            self.lose(None, Doubt::NoReplay { from }, effects);
        }
    }

    pub(super) fn on_resync(&mut self, effects: &mut Vec<Effect<P>>) {
        self.is_clear = true; // elsewhere
        self.forget(effects);
        (self.replay, self.cold, self.tries) = (None, None, 0);
        if !self.config.has_replay {
            self.lose(None, Doubt::NoReplay { from: 0 }, effects);
        } else if self.link.is_connected() {
            self.ask(ReplayPurpose::All, effects);
        }
    }

    pub(super) fn on_replay_ended(&mut self, effects: &mut Vec<Effect<P>>) {
        let Some(Replay::Running(running)) = self.replay else { return };
        if running.purpose == ReplayPurpose::End {
            self.replay = None;
            if self.asks_at.is_some() {
                effects.push(Effect::Noted(Note::Recovered)); // what was brought has been applied in its turn
                return self.suspect_link(effects);
            }
            self.link_troubles = 0;
            self.asks_at = Some(self.now + self.config.asks_again_after);
            return;
        }
        if running.is_awaited && running.first_lacking > 0 {
            // It no longer has what it once said: it counts from new and has not come that far.
            self.link.renewed(self.now);
            return self.renew(None, effects);
        }
        if self.next.is_none() && self.held.first().is_none_or(|first| first == 0) && !self.is_overflowed() {
            self.start(0, effects);
            self.drain(effects);
        }
        if !self.is_incomplete() {
            self.complete(effects);
        } else if self.next.unwrap_or(0) > running.first_lacking {
            self.tries = 0;
            self.ask(ReplayPurpose::Gap, effects);
        } else {
            effects.push(Effect::Noted(Note::ReplayFailed));
            self.try_again(running.purpose, Doubt::ReplayHole { from: self.next.unwrap_or(0) }, effects);
        }
    }

    pub(super) fn on_replay_failed(&mut self, effects: &mut Vec<Effect<P>>) {
        let Some(Replay::Running(running)) = self.replay else { return };
        effects.push(Effect::Noted(Note::ReplayFailed));
        if running.purpose == ReplayPurpose::End {
            self.replay = None;
            self.look_for_end_later();
            return self.suspect_link(effects);
        }
        self.try_again(running.purpose, Doubt::ReplayFailed { from: self.next.unwrap_or(0) }, effects);
    }

    /// Asks for everything from the last message applied on, that one included.
    pub(super) fn ask(&mut self, purpose: ReplayPurpose, effects: &mut Vec<Effect<P>>) {
        let first_lacking = self.next.unwrap_or(0);
        let from = first_lacking.saturating_sub(1);
        self.asks_at = None;
        self.replay =
            Some(Replay::Running(Running { purpose, from, first_lacking, is_awaited: true, progressed_at: self.now }));
        effects.push(Effect::Replay { from });
    }

    /// Nothing comes by itself, and what was asked for did, or the question had no answer.
    fn suspect_link(&mut self, effects: &mut Vec<Effect<P>>) {
        self.link_troubles += 1;
        if self.link_troubles >= LINK_TROUBLES_MAX {
            self.link_troubles = 0;
            effects.push(Effect::Reconnect);
        }
    }

    /// Messages come: whether the last one was the last is asked when they have not for a while.
    pub(super) fn look_for_end_later(&mut self) {
        self.asks_at = Some(self.now + self.config.asks_after);
    }

    /// Asks whether the last message was the last, unless nobody has looked for messages all the while: then they may be
    /// there, and are more than a replay has.
    pub(super) fn ask_for_end(&mut self, effects: &mut Vec<Effect<P>>) {
        let is_late = self.asks_at.is_some_and(|at| self.now.since(at) > self.config.asks_after / 2);
        if is_late {
            self.look_for_end_later();
        } else {
            self.ask(ReplayPurpose::End, effects);
        }
    }

    /// The publisher no longer has what would come next. It may be on its way; that it is lost is known when nothing has
    /// come until the same is answered again.
    pub(super) fn mistrust_end(&mut self, effects: &mut Vec<Effect<P>>) {
        (self.replay, self.end_is_gone) = (None, true);
        self.look_for_end_later();
        effects.push(Effect::Noted(Note::Late));
    }

    /// Whether there is somebody to ask for the end, and something to ask from.
    pub(super) fn may_ask_for_end(&self) -> bool {
        self.config.has_replay && self.link.is_connected() && self.replay.is_none() && self.next.is_some()
    }

    /// The running replay has brought something.
    pub(super) fn progressed(&mut self) {
        if let Some(Replay::Running(running)) = &mut self.replay {
            running.progressed_at = self.now;
        }
    }

    /// Hands on what is held and whose turn it is, and ends the recovery of a gap that is closed.
    pub(super) fn drain(&mut self, effects: &mut Vec<Effect<P>>) {
        while let (Some(next), Some(first)) = (self.next, self.held.first()) {
            if first > next {
                break;
            }
            let Some((sequence, payload)) = self.held.pop_first() else { break };
            match self.place(sequence, payload.as_ref()) {
                Place::Next => self.apply(sequence, payload, effects),
                Place::Applied => effects.push(Effect::Noted(Note::Duplicate)),
                Place::Forgotten | Place::Ahead => effects.push(Effect::Noted(Note::Late)),
                Place::Conflicting => {
                    effects.push(Effect::Noted(Note::Dropped { messages: 1 }));
                    return self.renew(None, effects);
                }
            }
        }
        let closes_gap = self.replay.is_some_and(|replay| replay.purpose() == ReplayPurpose::Gap);
        if closes_gap && !self.is_incomplete() {
            self.complete(effects);
        }
    }

    /// Begins, with nothing known of what was before `sequence`.
    pub(super) fn start(&mut self, sequence: u64, effects: &mut Vec<Effect<P>>) {
        if sequence == 0 {
            self.next = Some(0);
            return self.heal(effects);
        }
        let cause = self.cold.map_or(Doubt::NoReplay { from: 0 }, |cold| cold.cause);
        self.lose(Some(sequence), cause, effects);
    }

    /// The publisher counts anew. All that is known of the rank is another life's; `message` is the first of this one
    /// that was seen. Everything is asked for, at once or, if it happens again before that came to an end, later.
    pub(super) fn renew(&mut self, message: Option<(u64, P)>, effects: &mut Vec<Effect<P>>) {
        effects.push(Effect::Noted(Note::Incarnation));
        self.clear(effects);
        self.forget(effects);
        (self.replay, self.cold, self.tries) = (None, None, 0);
        if let Some((sequence, _)) = message {
            self.live_next = Some(sequence + 1);
        }
        if !self.config.has_replay {
            if let Some((sequence, payload)) = message {
                self.start(sequence, effects);
                self.apply(sequence, payload, effects);
            }
            return;
        }
        if self.link.is_connected() {
            if self.is_settled {
                self.ask(ReplayPurpose::All, effects);
            } else {
                let at = self.now + self.backoff.next_delay();
                self.replay = Some(Replay::Waiting { purpose: ReplayPurpose::All, at });
            }
        }
        self.is_settled = false;
        if let Some((sequence, payload)) = message {
            self.hold(sequence, payload, effects);
        }
    }

    /// What lies between the cursor and `at` cannot be had. The rank's blocks go, and everything from `at` on, or from
    /// whatever comes next, is applied to what is then known to be true.
    pub(super) fn lose(&mut self, at: Option<u64>, cause: Doubt, effects: &mut Vec<Effect<P>>) {
        if let (Some(next), Some(at)) = (self.next, at)
            && at > next
        {
            effects.push(Effect::Noted(Note::Lost { messages: at - next }));
        }
        self.clear(effects);
        self.seen.clear();
        (self.next, self.end_is_gone) = (at, false);
        if self.cold.is_none() {
            effects.push(Effect::Noted(Note::Cold));
        }
        self.cold = Some(Cold { since: self.now, stored_blocks: 0, cause });
    }

    pub(super) fn heal(&mut self, effects: &mut Vec<Effect<P>>) {
        if self.cold.take().is_some() {
            effects.push(Effect::Noted(Note::Healed));
        }
    }

    /// Whether a message is known to exist that has not been applied.
    pub(super) fn is_incomplete(&self) -> bool {
        self.known_last.is_some_and(|last| self.next.is_none_or(|next| last >= next))
    }

    /// Whether something that ought to be held is not, for want of room.
    fn is_overflowed(&self) -> bool {
        self.known_last > self.held.last()
    }

    fn complete(&mut self, effects: &mut Vec<Effect<P>>) {
        (self.replay, self.tries, self.is_settled) = (None, 0, true);
        self.backoff.reset();
        self.look_for_end_later();
        effects.push(Effect::Noted(Note::Recovered));
    }

    fn try_again(&mut self, purpose: ReplayPurpose, cause: Doubt, effects: &mut Vec<Effect<P>>) {
        self.tries += 1;
        if self.tries < TRIES_MAX {
            let at = self.now + self.backoff.next_delay();
            self.replay = Some(Replay::Waiting { purpose, at });
        } else {
            self.give_up(cause, effects);
        }
    }

    /// Goes on behind the last hole.
    fn give_up(&mut self, cause: Doubt, effects: &mut Vec<Effect<P>>) {
        (self.replay, self.tries) = (None, 0);
        let at = self.held.last_run_start();
        let mut messages = 0;
        while self.held.first() < at && self.held.pop_first().is_some() {
            messages += 1;
        }
        note_dropped(messages, effects);
        self.known_last = self.held.last();
        self.lose(at, cause, effects);
        self.drain(effects);
    }

    /// Drops the rank's blocks, if there can be any, and what is reported of them later.
    fn clear(&mut self, effects: &mut Vec<Effect<P>>) {
        if !self.is_clear {
            self.is_clear = true;
            effects.push(Effect::Clear);
        }
        self.unreported_stale = self.unreported;
    }

    /// Drops the cursor and what was kept beside it.
    fn forget(&mut self, effects: &mut Vec<Effect<P>>) {
        self.unreported_stale = self.unreported;
        self.seen.clear();
        self.next = None;
        self.drop_held(effects);
    }

    /// Drops what is held: a replay that is about to be asked for brings it again.
    fn drop_held(&mut self, effects: &mut Vec<Effect<P>>) {
        note_dropped(self.held.clear(), effects);
        self.known_last = None;
    }
}

fn note_dropped<P>(messages: u64, effects: &mut Vec<Effect<P>>) {
    if messages > 0 {
        effects.push(Effect::Noted(Note::Dropped { messages }));
    }
}
