//! Message with ranks of sessions.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::codec::{MessageError, decode, encode, malformed};
use crate::protocol::{WorkerId, WorkerRank};
use crate::session::{BindingVersion, SessionBinding, SessionId};

/// Maximum number of bindings in a message.
pub const SESSIONS_MAX: usize = 1_024;

#[derive(Serialize, Deserialize)]
struct EncodedBinding<'a> {
    id: &'a str,
    worker: u64,
    dp_rank: u32,
    context_tokens: u32,
    sequence: u64,
    writer: u64,
    idle_ms: u64,
}

impl<'a> EncodedBinding<'a> {
    fn of(binding: &'a SessionBinding) -> Self {
        let SessionBinding { id, rank, context_tokens, version, idle } = binding;
        Self {
            id,
            worker: rank.worker.0,
            dp_rank: rank.rank,
            context_tokens: *context_tokens,
            sequence: version.sequence,
            writer: version.writer,
            idle_ms: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Bindings as bytes.
///
/// ```
/// use std::time::Duration;
/// use pointsman::protocol::{WorkerId, WorkerRank};
/// use pointsman::internals::replica::{decode_sessions, encode_sessions};
/// use pointsman::{internals::session::{BindingVersion, SessionBinding}, SessionId};
///
/// let binding = SessionBinding {
///     id: SessionId::new("chat-7")?,
///     rank: WorkerRank::new(WorkerId(3), 0),
///     context_tokens: 900,
///     version: BindingVersion { sequence: 9, writer: 1 },
///     idle: Duration::from_secs(2),
/// };
/// let bytes = encode_sessions(std::slice::from_ref(&binding));
/// assert!(bytes.len() < binding.bytes_max());
/// assert_eq!(decode_sessions(&bytes)?, [binding]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn encode_sessions(bindings: &[SessionBinding]) -> Vec<u8> {
    encode(&bindings.iter().map(EncodedBinding::of).collect::<Vec<_>>())
}

/// Reads bindings.
///
/// # Errors
/// See [`MessageError`]. One invalid session id, or more than [`SESSIONS_MAX`] bindings, make the message malformed.
pub fn decode_sessions(bytes: &[u8]) -> Result<Vec<SessionBinding>, MessageError> {
    let encoded: Vec<EncodedBinding<'_>> = decode(bytes)?;
    if encoded.len() > SESSIONS_MAX {
        let count = encoded.len();
        return Err(malformed(bytes, format_args!("it has {count} sessions, must have at most {SESSIONS_MAX}")));
    }
    let decoded = |binding: EncodedBinding<'_>| {
        Ok(SessionBinding {
            id: SessionId::new(binding.id).map_err(|error| malformed(bytes, error))?,
            rank: WorkerRank::new(WorkerId(binding.worker), binding.dp_rank),
            context_tokens: binding.context_tokens,
            version: BindingVersion { sequence: binding.sequence, writer: binding.writer },
            idle: Duration::from_millis(binding.idle_ms),
        })
    };
    encoded.into_iter().map(decoded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bindings(count: usize) -> Vec<SessionBinding> {
        let binding = |n: usize| SessionBinding {
            id: SessionId::new(&format!("{n:0>256}")).expect("maximum length"),
            rank: WorkerRank::new(WorkerId(u64::MAX), u32::MAX),
            context_tokens: u32::MAX,
            version: BindingVersion { sequence: u64::MAX, writer: u64::MAX },
            idle: Duration::from_millis(u64::MAX),
        };
        (0..count).map(binding).collect()
    }

    #[test]
    fn length_is_bounded() {
        let bindings = bindings(20);
        let bytes_max: usize = bindings.iter().map(SessionBinding::bytes_max).sum();
        assert!(encode_sessions(&bindings).len() <= bytes_max + 2);
    }

    #[test]
    fn errors_name_the_value_and_the_rule() {
        let error = |bytes: &[u8]| decode_sessions(bytes).expect_err("malformed").to_string();
        let bytes = encode_sessions(&bindings(SESSIONS_MAX + 1));
        let length = bytes.len();
        let too_many = "it has 1025 sessions, must have at most 1024";
        assert_eq!(error(&bytes), format!("message of {length} bytes is malformed: {too_many}"));
        let mut binding =
            EncodedBinding { id: "", worker: 1, dp_rank: 0, context_tokens: 0, sequence: 1, writer: 1, idle_ms: 0 };
        let reason = "session id has 0 bytes, must have 1 to 256";
        assert_eq!(error(&encode(&vec![&binding])), format!("message of 9 bytes is malformed: {reason}"));
        let id = "x".repeat(257);
        binding.id = &id;
        assert!(error(&encode(&vec![&binding])).ends_with("session id has 257 bytes, must have 1 to 256"));
        assert_eq!(error(&[7]), "message has version 7, must be 1");
    }
}
