//! State of the audits of one rank between the messages of the audit connection.

use std::time::Duration;

use bytes::Bytes;

use crate::actors::io::engine_socket::SocketError;
use crate::actors::views::kv_source::KvDifferenceStatus;
use crate::ingest::{Audit, AuditCause, AuditStep, EngineContents};
use crate::protocol::{KvEventsConfig, RouterEvent, Timestamp};
use crate::wire::{Decoder, Finding, WireConfig};
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
    pub(super) last: Option<KvDifferenceStatus>,
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
    }

    /// Requests the replay buffer in place of the contents of the engine.
    pub(super) fn read_ring(&mut self, now: Timestamp) {
        if let AuditStep::Request(number) = self.audit.unsupported(now, self.next) {
            self.decoder.forget();
            self.ask(number);
        }
    }

    /// Processes a message of the audit connection.
    pub(super) fn on_reply(&mut self, reply: AuditReply, now: Timestamp) {
        match reply {
            Ok(Replayed::Message { sequence, payload }) => {
                self.has_message = true;
                if self.audit.reads_ring() {
                    let decoder = &mut self.decoder;
                    return self.audit.ring_message(now, sequence, || decoded(decoder, &payload));
                }
                match EngineContents::decode(&payload) {
                    Some(contents) => self.audit.replied(sequence, contents),
                    None => self.audit.fail(AuditCause::BrokenReply),
                }
            }
            Ok(Replayed::End) if self.audit.reads_ring() => self.audit.ring_ended(),
            Ok(Replayed::End) if self.has_message => {}
            Ok(Replayed::End) => self.read_ring(now),
            Err(_) => self.audit.fail(AuditCause::BrokenReply),
        }
    }
}

/// Events of a message; `None` if a removal may be missing, which the decoder of the index would miss too.
fn decoded(decoder: &mut Decoder, payload: &[u8]) -> Option<Vec<RouterEvent>> {
    use Finding::{BadHash, Malformed, TooDeep, TooLarge, Truncated, WrongShape, WrongType};
    let mut events = Vec::new();
    let findings = decoder.decode(payload, &mut events).findings;
    let hides_removal = [Truncated, Malformed, TooLarge, TooDeep, WrongType, WrongShape, BadHash];
    hides_removal.iter().all(|finding| findings.get(*finding) == 0).then_some(events)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::protocol::{WorkerId, WorkerRank};
    use crate::wire::DecoderLimits;

    #[test]
    fn a_message_without_all_its_removals_is_no_evidence() {
        let mut decoder = Decoder::new(WireConfig {
            rank: WorkerRank::new(WorkerId(7), 0),
            ranks: 0..1,
            block_size: NonZeroU32::new(4).expect("not zero"),
            is_eagle: false,
            limits: DecoderLimits::default(),
        });
        let mut is_evidence = |payload: &[u8]| decoded(&mut decoder, payload).is_some();
        assert!(is_evidence(b"\x93\x00\x91\x93\xacBlockRemoved\x91\x11\xa3GPU\x00"));
        assert!(is_evidence(b"\x93\x00\x91\x91\xabNoSuchEvent\x00"), "of a later engine");
        assert!(!is_evidence(b"\x93\x00\x91\x93\xacBlockRemoved\x92\x11\xc0\xa3GPU\x00"), "a hash is nil");
        assert!(!is_evidence(b"\x93\x00\x91\x93\xacBlockRemoved\x91"), "truncated");
        assert!(!is_evidence(b""), "empty");
    }
}
