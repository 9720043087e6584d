//! Encoding of messages between replicas: a version byte, and the fields in postcard's format.

use serde::{Deserialize, Serialize};

use super::LoadSummary;

/// Version of the encoded messages.
pub const MESSAGE_VERSION: u8 = 1;

/// Reason for rejecting the bytes of a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The sender has another version of the format.
    #[error("message has version {version}, must be {MESSAGE_VERSION}")]
    Version {
        /// Version of the message.
        version: u8,
    },
    /// The bytes are no message.
    #[error("message of {bytes} bytes is malformed: {reason}")]
    Malformed {
        /// Length.
        bytes: usize,
        /// Reason.
        reason: String,
    },
}

impl LoadSummary {
    /// The summary as bytes.
    ///
    /// ```
    /// use pointsman::internals::replica::{LoadSummary, ReplicaLayout, SummaryKind};
    ///
    /// let summary = LoadSummary {
    ///     layout: ReplicaLayout { block_size: 64, hash_seed: 1 }, sequence: 1, interval_ms: 20,
    ///     placements_per_second: 0.0, work_per_second: 0.0, longest_wait_ms: None, kind: SummaryKind::Full, ranks: Vec::new(),
    /// };
    /// assert_eq!(LoadSummary::decode(&summary.encode())?, summary);
    /// # Ok::<(), pointsman::internals::replica::MessageError>(())
    /// ```
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads a summary.
    ///
    /// # Errors
    /// See [`MessageError`]. Any bytes give a summary or an error, and no more memory is allocated than they fill.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        decode(bytes)
    }
}

/// A message of plain numbers, texts and lists as bytes.
pub(super) fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    // Such messages always serialize; an empty one is rejected by receivers.
    postcard::to_extend(message, vec![MESSAGE_VERSION]).unwrap_or_default()
}

/// Reads a message without remaining bytes.
pub(super) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, MessageError> {
    let (&version, fields) = bytes.split_first().ok_or_else(|| malformed(bytes, "it is empty"))?;
    if version != MESSAGE_VERSION {
        return Err(MessageError::Version { version });
    }
    let (message, rest): (T, _) = postcard::take_from_bytes(fields).map_err(|error| malformed(bytes, error))?;
    if !rest.is_empty() {
        return Err(malformed(bytes, format_args!("{} bytes follow the last field", rest.len())));
    }
    Ok(message)
}

pub(super) fn malformed(bytes: &[u8], reason: impl std::fmt::Display) -> MessageError {
    MessageError::Malformed { bytes: bytes.len(), reason: reason.to_string() }
}
