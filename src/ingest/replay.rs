//! State of a replay, and of a permanent loss.

use std::time::Duration;

use super::DegradationReason;
use crate::protocol::Timestamp;

/// Reason for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayPurpose {
    /// No message is known.
    All,
    /// New connection: verifies the incarnation of the publisher and fetches the messages since the disconnection.
    Verify,
    /// A live message arrived too early. Other live messages may close the gap before the replay does.
    Gap,
    /// End check after an idle period. Usually returns no new message, so it does not degrade the stream.
    End,
}

/// A running or scheduled replay.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReplayState {
    Waiting { purpose: ReplayPurpose, at: Timestamp },
    Running(RunningReplay),
}

impl ReplayState {
    /// Time at which the replay requires a tick.
    pub(super) fn due(&self, replay_timeout: Duration) -> Timestamp {
        match self {
            Self::Waiting { at, .. } => *at,
            Self::Running(running) => running.progressed_at + replay_timeout,
        }
    }

    /// Whether messages are known to be missing or the publisher is unverified.
    pub(super) fn degrades(self) -> bool {
        self.purpose() != ReplayPurpose::End
    }

    pub(super) fn purpose(&self) -> ReplayPurpose {
        match self {
            Self::Waiting { purpose, .. } => *purpose,
            Self::Running(running) => running.purpose,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RunningReplay {
    pub(super) purpose: ReplayPurpose,
    /// First requested message.
    pub(super) from: u64,
    /// First message that was missing at the time of the request; its predecessor, if any, was applied.
    pub(super) first_missing: u64,
    /// Whether the first message of the replay is still outstanding.
    pub(super) awaits_start: bool,
    /// Time of the last replayed message that was applied.
    pub(super) progressed_at: Timestamp,
}

/// A permanent loss and the progress since then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cold {
    pub(super) since: Timestamp,
    /// Blocks stored since then.
    pub(super) stored_blocks: u64,
    pub(super) cause: DegradationReason,
}
