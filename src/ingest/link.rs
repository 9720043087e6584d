//! Whether anybody is there.
//!
//! Owns since when the subscription stands or does not, and since when nothing was ever heard. Promises that a
//! publisher that has spoken and now has nothing to say does not count as silent, and neither does that of an engine that
//! has served no prompt yet. Leaves connecting to others.

use std::time::Duration;

use super::Doubt;
use crate::protocol::Timestamp;

/// The subscription, and whether anything has come of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    is_connected: bool,
    /// When it was last made or lost.
    changed: Timestamp,
    has_heard: bool,
    /// Since when there could have been something to hear.
    listening_since: Option<Timestamp>,
    /// Since when the engine has had something to publish; absent while it has served no prompt.
    served_since: Option<Timestamp>,
}

impl Link {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { is_connected: false, changed: now, has_heard: false, listening_since: None, served_since: None }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub(super) fn connected(&mut self, now: Timestamp) {
        if !self.is_connected {
            (self.is_connected, self.changed) = (true, now);
        }
        // Not anew with each connection: one that never lasts must not hide that nothing ever comes.
        self.listening_since.get_or_insert(now);
    }

    pub(super) fn disconnected(&mut self, now: Timestamp) {
        if self.is_connected {
            (self.is_connected, self.changed) = (false, now);
        }
    }

    pub(super) fn heard(&mut self) {
        self.has_heard = true;
    }

    /// The engine has computed a prompt, of which it should publish the blocks.
    pub(super) fn served(&mut self, now: Timestamp) {
        self.served_since.get_or_insert(now);
    }

    /// Whether it would matter that the engine has served a prompt.
    pub(super) fn awaits_served(&self) -> bool {
        !self.has_heard && self.served_since.is_none()
    }

    /// Somebody else answers at this address, who has said nothing yet.
    pub(super) fn renewed(&mut self, now: Timestamp) {
        (self.has_heard, self.listening_since, self.served_since) = (false, Some(now), None);
    }

    /// Since when the silence lasts, if there is one, however short.
    fn silent_since(&self) -> Option<Timestamp> {
        if !self.is_connected {
            return Some(self.changed);
        }
        // An engine that has served nothing has nothing to publish.
        self.listening_since.max(self.served_since).filter(|_| !self.has_heard && self.served_since.is_some())
    }

    pub(super) fn is_silent(&self, now: Timestamp, silent_after: Duration) -> bool {
        self.silent_since().is_some_and(|since| now.since(since) >= silent_after)
    }

    /// When it will be silent unless something happens.
    pub(super) fn silent_at(&self, silent_after: Duration) -> Option<Timestamp> {
        self.silent_since().map(|since| since + silent_after)
    }

    pub(super) fn doubt(&self, now: Timestamp) -> Option<Doubt> {
        let for_ms = u64::try_from(now.since(self.silent_since()?).as_millis()).unwrap_or(u64::MAX);
        Some(if self.is_connected { Doubt::NeverPublished { for_ms } } else { Doubt::NotConnected { for_ms } })
    }
}
