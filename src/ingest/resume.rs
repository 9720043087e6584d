//! Export of a source's position, and continuation from one.

use super::hashes::PayloadHashes;
use super::position::{ColdPosition, RestoreState, SourcePosition};
use super::replay::Cold;
use super::source::Source;
use super::{IngestEffect, Note, SourceConfig, StreamState};
use crate::protocol::Timestamp;

impl<P: AsRef<[u8]>> Source<P> {
    /// Creates a source without a connection whose index contents are those at `position`.
    ///
    /// Without a replay socket the publisher cannot be verified, and the contents are dropped at the connection.
    #[must_use]
    pub fn resume(config: SourceConfig, now: Timestamp, position: &SourcePosition) -> Self {
        let mut source = Self::new(config, now);
        source.next = Some(position.next);
        source.known_last = position.next.checked_sub(1);
        source.seen = PayloadHashes::resumed(config.remembered_max, &position.payload_hashes);
        source.is_clear = false;
        source.cold =
            position.cold.map(|ColdPosition { stored_blocks, cause }| Cold { since: now, stored_blocks, cause });
        source.restore = Some(RestoreState::Unverified);
        source
    }

    /// Position of the source if every [`IngestEffect::Apply`] so far is performed and reported. `None` if nothing was
    /// applied since the rank's blocks were last removed, or if the events do not match the pool.
    #[must_use]
    pub fn position(&self) -> Option<SourcePosition> {
        let next = self.next.filter(|next| *next > 0 && !self.is_clear && self.unreported == 0)?;
        let payload_hashes = self.seen.last(SourcePosition::HASHES_MAX);
        let is_usable = !payload_hashes.is_empty() && self.state() != StreamState::Mismatched;
        let cold = self.cold.map(|cold| ColdPosition { stored_blocks: cold.stored_blocks, cause: cold.cause });
        is_usable.then_some(SourcePosition { next, payload_hashes, cold })
    }

    /// Progress of the restore; `None` for a source without one.
    #[must_use]
    pub fn restore(&self) -> Option<RestoreState> {
        self.restore
    }

    /// Whether the contents are incomplete after a loss.
    #[must_use]
    pub fn is_cold(&self) -> bool {
        self.cold.is_some()
    }

    pub(super) fn is_unverified(&self) -> bool {
        self.restore == Some(RestoreState::Unverified)
    }

    /// Ends the restore of unverified contents.
    pub(super) fn end_restore(&mut self, state: RestoreState, effects: &mut Vec<IngestEffect<P>>) {
        if self.is_unverified() {
            self.restore = Some(state);
            let note = if state == RestoreState::Resumed { Note::RestoreResumed } else { Note::RestoreDropped };
            effects.push(IngestEffect::Noted(note));
        }
    }
}
