//! State of the subscription to an engine's events: connection and silence.
//!
//! Tracks since when the subscription is connected or disconnected, and since when messages are overdue. A publisher
//! that has published before and currently has no events is not silent. Neither is the publisher of an engine that has
//! served no prompt yet. The owner manages the connection.

use std::time::Duration;

use super::DegradationReason;
use crate::protocol::Timestamp;

/// The subscription and its activity.
#[derive(Clone, Copy, Debug)]
pub(super) struct SubscriptionState {
    is_connected: bool,
    /// Time of the last connection or disconnection.
    changed: Timestamp,
    has_received: bool,
    /// Time from which messages could have been received.
    listening_since: Option<Timestamp>,
    /// Time from which the engine has had events to publish; `None` while it has served no prompt.
    served_since: Option<Timestamp>,
}

impl SubscriptionState {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { is_connected: false, changed: now, has_received: false, listening_since: None, served_since: None }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub(super) fn connected(&mut self, now: Timestamp) {
        if !self.is_connected {
            (self.is_connected, self.changed) = (true, now);
        }
        // Keeps the time of the first connection: short-lived connections must not hide that no message ever arrives.
        self.listening_since.get_or_insert(now);
    }

    pub(super) fn disconnected(&mut self, now: Timestamp) {
        if self.is_connected {
            (self.is_connected, self.changed) = (false, now);
        }
    }

    pub(super) fn received(&mut self) {
        self.has_received = true;
    }

    /// Records that the engine has computed a prompt, whose blocks it should publish.
    pub(super) fn served(&mut self, now: Timestamp) {
        self.served_since.get_or_insert(now);
    }

    /// Whether [`Self::served`] would have an effect.
    pub(super) fn awaits_served(&self) -> bool {
        !self.has_received && self.served_since.is_none()
    }

    /// Records that another publisher, without any message so far, uses the address.
    pub(super) fn replaced(&mut self, now: Timestamp) {
        (self.has_received, self.listening_since, self.served_since) = (false, Some(now), None);
    }

    /// Start of the current silence of any length.
    fn silent_since(&self) -> Option<Timestamp> {
        if !self.is_connected {
            return Some(self.changed);
        }
        // An engine that has served no prompt has no events.
        self.listening_since.max(self.served_since).filter(|_| !self.has_received && self.served_since.is_some())
    }

    pub(super) fn is_silent(&self, now: Timestamp, silent_after: Duration) -> bool {
        self.silent_since().is_some_and(|since| now.since(since) >= silent_after)
    }

    /// Time at which the stream becomes silent without further input.
    pub(super) fn silent_at(&self, silent_after: Duration) -> Option<Timestamp> {
        self.silent_since().map(|since| since + silent_after)
    }

    pub(super) fn degradation(&self, now: Timestamp) -> Option<DegradationReason> {
        let for_ms = u64::try_from(now.since(self.silent_since()?).as_millis()).unwrap_or(u64::MAX);
        Some(if self.is_connected {
            DegradationReason::NeverPublished { for_ms }
        } else {
            DegradationReason::NotConnected { for_ms }
        })
    }
}
