//! State of the audits of one rank between the messages of the audit connection.

use std::time::Duration;

use bytes::Bytes;

use crate::actors::io::engine_socket::SocketError;
use crate::actors::views::kv_source::DifferenceRecord;
use crate::ingest::{Audit, AuditStep, EngineContents};
use crate::protocol::{KvEventsConfig, Timestamp};
use crate::wire::{Decoder, WireConfig};
use crate::zmtp::Replayed;

/// Audits of one rank.
pub(super) struct Auditor {
    pub(super) audit: Audit,
    /// The number after the last applied message.
    pub(super) next: u64,
    /// Request to send.
    request: Option<u64>,
    has_message: bool,
    /// Decoder of the replay buffer.
    decoder: Decoder,
    pub(super) last: Option<DifferenceRecord>,
    /// Time of a difference without an audit that proves its correction.
    pub(super) different_since: Option<Timestamp>,
}

/// Message of the audit connection.
pub(super) type AuditReply = Result<Replayed<Bytes>, SocketError>;

impl Auditor {
    pub(super) fn new(interval_ms: u32, now: Timestamp, endpoints: &KvEventsConfig, wire: WireConfig) -> Self {
        // Without a replay socket there is no engine to query.
        let interval_ms = if endpoints.replay_endpoint.is_some() { interval_ms } else { 0 };
        Self {
            audit: Audit::new(Duration::from_millis(interval_ms.into()), now),
            next: 0,
            request: None,
            has_message: false,
            decoder: Decoder::new(wire),
            last: None,
            different_since: None,
        }
    }

    /// The request to send now.
    pub(super) fn take_request(&mut self) -> Option<u64> {
        self.request.take()
    }

    /// Ends a running audit.
    pub(super) fn abort(&mut self) {
        self.audit.abort();
        self.request = None;
    }

    pub(super) fn ask(&mut self, number: u64) {
        (self.has_message, self.request) = (false, Some(number));
        self.decoder.forget();
    }

    /// Processes a message of the audit connection.
    pub(super) fn on_reply(&mut self, reply: AuditReply, now: Timestamp) {
        match reply {
            Ok(Replayed::Message { sequence, payload }) => {
                self.has_message = true;
                if let Some(ring) = self.audit.ring() {
                    let mut events = Vec::new();
                    self.decoder.decode(&payload, &mut events);
                    ring.add(sequence, &events);
                    return;
                }
                match EngineContents::decode(&payload) {
                    Some(contents) => self.audit.replied(sequence, contents),
                    None => self.abort(),
                }
            }
            Ok(Replayed::End) if self.audit.ring().is_some() => self.audit.ring_ended(),
            Ok(Replayed::End) if self.has_message => {}
            Ok(Replayed::End) => {
                if let AuditStep::Request(number) = self.audit.unsupported(now) {
                    self.ask(number);
                }
            }
            // The source detects and reports unreachable engines.
            Err(_) => self.abort(),
        }
    }
}
