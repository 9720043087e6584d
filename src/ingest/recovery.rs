//! Recovery of missing messages.
//!
//! Handles replays from request to completion or failure, and the two ways to restart: the publisher restarts its
//! numbering ([`Source::start_incarnation`]), or messages are permanently lost ([`Source::lose`]). While connected,
//! missing messages are always either requested or given up. A rank's blocks are removed before any message behind a
//! gap is applied. Missing messages at the end of the stream, which no later message reveals, are requested after an
//! idle period.
//!
//! A replay starts with the last applied message. If that message differs or is no longer available, the publisher is
//! another incarnation, independent of its current numbering. [`super::source`] handles messages without gaps.

use super::replay::{Cold, ReplayPurpose, ReplayState, RunningReplay};
use super::source::{MessagePosition, Source};
use super::{DegradationReason, IngestEffect, Note, RestoreState};

/// Maximum number of consecutive replays without new messages.
const ATTEMPTS_MAX: u32 = 2;

/// Number of consecutive end checks that found a defect of the subscription, after which it is replaced.
const SUBSCRIPTION_FAILURES_MAX: u32 = 3;

impl<P: AsRef<[u8]>> Source<P> {
    pub(super) fn on_connected(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        self.link.connected(self.now);
        (self.live_next, self.attempts) = (None, 0);
        self.drop_held(effects);
        if self.config.has_replay {
            self.request_replay(
                if self.next.unwrap_or(0) == 0 { ReplayPurpose::All } else { ReplayPurpose::Verify },
                effects,
            );
        } else if let Some(from) = self.next {
            // The engine may have restarted and published equally many messages, which cannot be verified without a
            // replay.
            self.lose(None, DegradationReason::NoReplay { from }, effects);
        }
    }

    pub(super) fn on_resync(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        self.is_clear = true; // the index lost the content
        self.end_restore(RestoreState::Dropped, effects);
        self.forget(effects);
        (self.replay, self.cold, self.attempts) = (None, None, 0);
        if !self.config.has_replay {
            self.lose(None, DegradationReason::NoReplay { from: 0 }, effects);
        } else if self.link.is_connected() {
            self.request_replay(ReplayPurpose::All, effects);
        }
    }

    pub(super) fn on_replay_ended(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        let Some(ReplayState::Running(running)) = self.replay else { return };
        let is_end_check = running.purpose == ReplayPurpose::End;
        if running.awaits_start && running.first_missing > 0 {
            // The publisher no longer has its earlier messages: it restarted and has not reached the same number.
            self.link.replaced(self.now);
            self.start_incarnation(None, effects);
            // The connection has outlasted the publisher, so it delivers nothing.
            return effects.extend(is_end_check.then_some(IngestEffect::Reconnect));
        }
        if is_end_check {
            self.replay = None;
            if self.end_check_at.is_some() {
                effects.push(IngestEffect::Noted(Note::Recovered)); // the replayed messages were already applied in order
                return self.count_subscription_failure(effects);
            }
            self.subscription_failures = 0;
            self.end_check_at = Some(self.now + self.config.end_check_interval);
            return;
        }
        if self.next.is_none() && self.held.first().is_none_or(|first| first == 0) && !self.is_overflowed() {
            self.start(0, effects);
            self.drain(effects);
        }
        if !self.is_incomplete() {
            self.complete(effects);
        } else if self.next.unwrap_or(0) > running.first_missing {
            self.attempts = 0;
            self.request_replay(ReplayPurpose::Gap, effects);
        } else {
            effects.push(IngestEffect::Noted(Note::ReplayFailed));
            self.try_again(running.purpose, DegradationReason::ReplayHole { from: self.next.unwrap_or(0) }, effects);
        }
    }

    pub(super) fn on_replay_failed(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        let Some(ReplayState::Running(running)) = self.replay else { return };
        effects.push(IngestEffect::Noted(Note::ReplayFailed));
        if running.purpose == ReplayPurpose::End {
            self.replay = None;
            self.schedule_end_check();
            return self.count_subscription_failure(effects);
        }
        if self.next.unwrap_or(0) > running.first_missing {
            // A slow link delivers a long replay in parts.
            self.attempts = 0;
            self.backoff.reset();
        }
        self.try_again(running.purpose, DegradationReason::ReplayFailed { from: self.next.unwrap_or(0) }, effects);
    }

    /// Requests a replay that starts with the last applied message.
    pub(super) fn request_replay(&mut self, purpose: ReplayPurpose, effects: &mut Vec<IngestEffect<P>>) {
        let first_missing = self.next.unwrap_or(0);
        let from = first_missing.saturating_sub(1);
        self.end_check_at = None;
        self.replay = Some(ReplayState::Running(RunningReplay {
            purpose,
            from,
            first_missing,
            awaits_start: true,
            progressed_at: self.now,
        }));
        effects.push(IngestEffect::Replay { from });
    }

    /// Counts an end check that found messages which the subscription missed, or that received no response.
    fn count_subscription_failure(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        self.subscription_failures += 1;
        if self.subscription_failures >= SUBSCRIPTION_FAILURES_MAX {
            self.subscription_failures = 0;
            effects.push(IngestEffect::Reconnect);
        }
    }

    /// Schedules an end check for the end of the next idle period.
    pub(super) fn schedule_end_check(&mut self) {
        self.end_check_at = Some(self.now + self.config.end_check_after);
    }

    /// Requests an end check. Postpones it if this tick is late: unread messages may then be waiting, possibly more
    /// than a replay contains.
    pub(super) fn check_end(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        if self.next.is_none() {
            return self.request_replay(ReplayPurpose::All, effects); // no replay has succeeded so far
        }
        let is_late = self.end_check_at.is_some_and(|at| self.now.since(at) > self.config.end_check_after / 2);
        if is_late {
            self.schedule_end_check();
        } else {
            self.request_replay(ReplayPurpose::End, effects);
        }
    }

    /// The publisher no longer has the next message. It may still arrive; it counts as lost if none arrives before the
    /// next end check has the same result.
    pub(super) fn expect_missing_end(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        (self.replay, self.end_is_missing) = (None, true);
        self.schedule_end_check();
        effects.push(IngestEffect::Noted(Note::Late));
    }

    /// Whether an end check is possible.
    pub(super) fn can_check_end(&self) -> bool {
        self.config.has_replay && self.link.is_connected() && self.replay.is_none()
    }

    /// Records progress of the running replay.
    pub(super) fn progressed(&mut self) {
        if let Some(ReplayState::Running(running)) = &mut self.replay {
            running.progressed_at = self.now;
        }
    }

    /// Applies held messages that are next in order, and completes the recovery of a closed gap.
    pub(super) fn drain(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        while let (Some(next), Some(first)) = (self.next, self.held.first()) {
            if first > next {
                break;
            }
            let Some((sequence, payload)) = self.held.pop_first() else { break };
            match self.position_of(sequence, payload.as_ref()) {
                MessagePosition::Next => self.apply(sequence, payload, effects),
                MessagePosition::Applied => effects.push(IngestEffect::Noted(Note::Duplicate)),
                MessagePosition::Forgotten | MessagePosition::Ahead => effects.push(IngestEffect::Noted(Note::Late)),
                MessagePosition::Conflicting => {
                    effects.push(IngestEffect::Noted(Note::Dropped { messages: 1 }));
                    return self.start_incarnation(None, effects);
                }
            }
        }
        let closes_gap = self.replay.is_some_and(|replay| replay.purpose() == ReplayPurpose::Gap);
        if closes_gap && !self.is_incomplete() {
            self.complete(effects);
        }
    }

    /// Starts at `sequence` without knowledge of earlier messages.
    pub(super) fn start(&mut self, sequence: u64, effects: &mut Vec<IngestEffect<P>>) {
        if sequence == 0 {
            self.next = Some(0);
            return self.heal(effects);
        }
        let cause = self.cold.map_or(DegradationReason::NoReplay { from: 0 }, |cold| cold.cause);
        self.lose(Some(sequence), cause, effects);
    }

    /// Starts a new incarnation of the publisher. Drops all content of the rank; `message` is the first received
    /// message of the new incarnation. Requests a full replay, immediately or, if the previous one did not complete,
    /// after a delay.
    pub(super) fn start_incarnation(&mut self, message: Option<(u64, P)>, effects: &mut Vec<IngestEffect<P>>) {
        effects.push(IngestEffect::Noted(Note::Incarnation));
        self.fit.start_incarnation();
        self.clear(effects);
        self.forget(effects);
        (self.replay, self.cold, self.attempts) = (None, None, 0);
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
            if self.has_completed_replay {
                self.request_replay(ReplayPurpose::All, effects);
            } else {
                let at = self.now + self.backoff.next_delay();
                self.replay = Some(ReplayState::Waiting { purpose: ReplayPurpose::All, at });
            }
        }
        self.has_completed_replay = false;
        if let Some((sequence, payload)) = message {
            self.hold(sequence, payload, effects);
        }
    }

    /// Gives up the messages between the cursor and `at`. Removes the rank's blocks, and continues with `at` or, if
    /// `None`, with the next message.
    pub(super) fn lose(&mut self, at: Option<u64>, cause: DegradationReason, effects: &mut Vec<IngestEffect<P>>) {
        if let (Some(next), Some(at)) = (self.next, at)
            && at > next
        {
            effects.push(IngestEffect::Noted(Note::Lost { messages: at - next }));
        }
        self.clear(effects);
        self.seen.clear();
        (self.next, self.end_is_missing) = (at, false);
        self.become_cold(cause, effects);
    }

    /// Records that contents were lost from here on.
    pub(super) fn become_cold(&mut self, cause: DegradationReason, effects: &mut Vec<IngestEffect<P>>) {
        if self.cold.is_none() {
            effects.push(IngestEffect::Noted(Note::Cold));
        }
        self.cold = Some(Cold { since: self.now, stored_blocks: 0, cause });
    }

    pub(super) fn heal(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        if self.cold.take().is_some() {
            effects.push(IngestEffect::Noted(Note::Healed));
        }
    }

    /// Whether a message is known to exist that was not applied.
    pub(super) fn is_incomplete(&self) -> bool {
        self.known_last.is_some_and(|last| self.next.is_none_or(|next| last >= next))
    }

    /// Whether a message was not held because the buffer was full.
    fn is_overflowed(&self) -> bool {
        self.known_last > self.held.last()
    }

    fn complete(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        (self.replay, self.attempts, self.has_completed_replay) = (None, 0, true);
        self.backoff.reset();
        self.schedule_end_check();
        effects.push(IngestEffect::Noted(Note::Recovered));
        self.end_restore(RestoreState::Resumed, effects);
    }

    fn try_again(&mut self, purpose: ReplayPurpose, cause: DegradationReason, effects: &mut Vec<IngestEffect<P>>) {
        self.attempts += 1;
        if self.attempts < ATTEMPTS_MAX {
            let at = self.now + self.backoff.next_delay();
            self.replay = Some(ReplayState::Waiting { purpose, at });
        } else {
            self.give_up(cause, effects);
        }
    }

    /// Continues after the last hole.
    fn give_up(&mut self, cause: DegradationReason, effects: &mut Vec<IngestEffect<P>>) {
        (self.replay, self.attempts) = (None, 0);
        let at = self.held.last_run_start();
        let mut messages = 0;
        while self.held.first() < at && self.held.pop_first().is_some() {
            messages += 1;
        }
        note_dropped(messages, effects);
        self.known_last = self.held.last();
        self.lose(at, cause, effects);
        self.drain(effects);
        // If no live message follows, nothing else shows that the connection is dead.
        self.end_check_at = Some(self.now + self.config.end_check_interval);
    }

    /// Removes the rank's blocks unless there are none, and marks pending reports as stale.
    fn clear(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        if !self.is_clear {
            self.is_clear = true;
            effects.push(IngestEffect::Clear);
        }
        self.end_restore(RestoreState::Dropped, effects);
        self.unreported_stale = self.unreported;
    }

    /// Resets the cursor and all messages.
    fn forget(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        self.unreported_stale = self.unreported;
        self.seen.clear();
        self.next = None;
        self.drop_held(effects);
    }

    /// Drops all held messages, which the next replay repeats.
    fn drop_held(&mut self, effects: &mut Vec<IngestEffect<P>>) {
        note_dropped(self.held.clear(), effects);
        self.known_last = None;
    }
}

fn note_dropped<P>(messages: u64, effects: &mut Vec<IngestEffect<P>>) {
    if messages > 0 {
        effects.push(IngestEffect::Noted(Note::Dropped { messages }));
    }
}
