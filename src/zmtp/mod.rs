//! ZMTP framing around KV event payloads: frame checks and multi-part messages.
//!
//! Defines the size limits of an engine's messages ([`Caps`]), a check of the byte stream ([`FrameCheck`]), and the two
//! forms of multi-part messages ([`live`], [`replayed`]). In a stream that passes the check, no frame and no message
//! exceeds the caps, so a reader may allocate the announced sizes. The check itself allocates no memory. A library
//! implements the protocol (handshake, subscriptions); [`crate::wire`] decodes payloads.
//!
//! Formats: ZMTP 3.0 (ZeroMQ RFC 23): a greeting of 64 bytes (`ff`, eight bytes of padding, `7f`, version, mechanism as
//! 20 bytes, server flag, 31 bytes of filler), then frames of one flag byte (1 more, 2 long, 4 command) and a length of
//! one byte, or of eight bytes, big-endian, for long frames.

mod handshake;

pub use handshake::{HANDSHAKE_BYTES_MAX, PeerSocket, peer_socket, subscriber_hello};

/// Size limits of the messages of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Bytes per frame.
    pub frame_bytes_max: u64,
    /// Bytes of all frames of one message.
    pub message_bytes_max: u64,
    /// Frames of one message.
    pub message_frames_max: u32,
}

impl Default for Caps {
    /// 16 MiB per frame and per message, 8 frames: a batch of 20,000 blocks of 64 tokens has about 7 MB.
    fn default() -> Self {
        Self { frame_bytes_max: 16 << 20, message_bytes_max: 16 << 20, message_frames_max: 8 }
    }
}

/// Reason for closing a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The stream does not start with a ZMTP 3 greeting.
    #[error("byte {at} of the greeting is {found:#04x}, must be {rule}")]
    Greeting {
        /// Offset of the byte.
        at: usize,
        /// Received value.
        found: u8,
        /// Expected value.
        rule: &'static str,
    },
    /// Only the NULL mechanism is supported: no user, no encryption.
    #[error("the engine requests a security mechanism other than NULL")]
    Mechanism,
    /// Undefined flags, which make the length unreliable.
    #[error("a frame has flags {0:#04x}, must be 1 (more), 2 (long), 4 (command) or a sum of them")]
    Flags(u8),
    /// A command inside a message, or a command with the `more` flag.
    #[error("a command is inside a message, must be between messages")]
    Command,
    /// A frame that exceeds the limit.
    #[error("a frame announces {bytes} bytes, must be at most {bytes_max}")]
    Frame {
        /// Announced bytes.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// A message that exceeds the limit in bytes.
    #[error("a message has at least {bytes} bytes, must be at most {bytes_max}")]
    Message {
        /// Bytes announced so far.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// A message that exceeds the limit in frames.
    #[error("a message has more than {frames_max} frames")]
    Frames {
        /// The limit.
        frames_max: u32,
    },
}

impl StreamError {
    /// The metric label value.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Greeting { .. } => "bad_greeting",
            Self::Mechanism => "mechanism",
            Self::Flags(_) => "bad_flags",
            Self::Command => "misplaced_command",
            Self::Frame { .. } => "frame_too_large",
            Self::Message { .. } => "message_too_large",
            Self::Frames { .. } => "too_many_frames",
        }
    }
}

const GREETING_BYTES: usize = 64;
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Checks the bytes of one connection, split at any positions.
///
/// ```
/// use pointsman::internals::zmtp::{Caps, FrameCheck, StreamError};
///
/// let mut check = FrameCheck::new(Caps::default());
/// let error = check.pass(b"HTTP/1.1 400 Bad Request").expect_err("no greeting");
/// assert_eq!(error, StreamError::Greeting { at: 0, found: b'H', rule: "0xff" });
/// ```
#[derive(Debug)]
pub struct FrameCheck {
    caps: Caps,
    state: FrameState,
    message_bytes: u64,
    message_frames: u32,
}

#[derive(Clone, Copy, Debug)]
enum FrameState {
    /// Number of greeting bytes checked.
    Greeting(usize),
    Flags,
    /// `left` bytes of the length are missing; `bytes` is the value of the received ones.
    Length {
        flags: u8,
        left: u8,
        bytes: u64,
    },
    Body {
        left: u64,
    },
}

impl FrameCheck {
    /// A check for a new connection, before its greeting.
    #[must_use]
    pub fn new(caps: Caps) -> Self {
        Self { caps, state: FrameState::Greeting(0), message_bytes: 0, message_frames: 0 }
    }

    /// Checks the next bytes. The caller may forward them only if the check succeeds.
    ///
    /// # Errors
    /// The first violation of a rule; the caller must close the connection.
    pub fn pass(&mut self, mut bytes: &[u8]) -> Result<(), StreamError> {
        while let Some(&first) = bytes.first() {
            let passed = match self.state {
                FrameState::Greeting(at) => {
                    check_greeting(at, first)?;
                    self.state =
                        if at + 1 == GREETING_BYTES { FrameState::Flags } else { FrameState::Greeting(at + 1) };
                    1
                }
                FrameState::Flags if first & !(MORE | LONG | COMMAND) != 0 => return Err(StreamError::Flags(first)),
                FrameState::Flags => {
                    let left = if first & LONG == 0 { 1 } else { 8 };
                    self.state = FrameState::Length { flags: first, left, bytes: 0 };
                    1
                }
                FrameState::Length { flags, left, bytes } => {
                    let bytes = bytes << 8 | u64::from(first);
                    self.state = match left {
                        1 => self.begin_frame(flags, bytes)?,
                        _ => FrameState::Length { flags, left: left - 1, bytes },
                    };
                    1
                }
                FrameState::Body { left } => {
                    let passed = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    let left = left - passed as u64;
                    self.state = if left == 0 { FrameState::Flags } else { FrameState::Body { left } };
                    passed
                }
            };
            bytes = &bytes[passed..];
        }
        Ok(())
    }

    fn begin_frame(&mut self, flags: u8, bytes: u64) -> Result<FrameState, StreamError> {
        let Caps { frame_bytes_max, message_bytes_max, message_frames_max } = self.caps;
        if bytes > frame_bytes_max {
            return Err(StreamError::Frame { bytes, bytes_max: frame_bytes_max });
        }
        if flags & COMMAND != 0 {
            // Readers continue with the message after a command, so a command must not reset the counts of a message.
            let is_between_messages = flags & MORE == 0 && self.message_frames == 0;
            return if is_between_messages { Ok(Self::body(bytes)) } else { Err(StreamError::Command) };
        }
        self.message_bytes += bytes; // both are bounded by their caps
        if self.message_bytes > message_bytes_max {
            return Err(StreamError::Message { bytes: self.message_bytes, bytes_max: message_bytes_max });
        }
        self.message_frames += 1;
        if self.message_frames > message_frames_max {
            return Err(StreamError::Frames { frames_max: message_frames_max });
        }
        if flags & MORE == 0 {
            (self.message_bytes, self.message_frames) = (0, 0);
        }
        Ok(Self::body(bytes))
    }

    fn body(bytes: u64) -> FrameState {
        if bytes == 0 { FrameState::Flags } else { FrameState::Body { left: bytes } }
    }
}

fn check_greeting(at: usize, found: u8) -> Result<(), StreamError> {
    let wrong = |rule| Err(StreamError::Greeting { at, found, rule });
    match at {
        0 if found != 0xff => wrong("0xff"),
        9 if found != 0x7f => wrong("0x7f"),
        10 if found < 3 => wrong("at least 3 (ZMTP 3)"),
        12..32 if MECHANISM.get(at - 12) != Some(&found) => Err(StreamError::Mechanism),
        _ => Ok(()),
    }
}

/// The sequence number that ends a replay response.
const END: u64 = u64::MAX;

/// One part of a replay response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replayed<P> {
    /// An earlier message.
    Message {
        /// Its sequence number.
        sequence: u64,
        /// Its payload.
        payload: P,
    },
    /// End of the response.
    End,
}

/// Reason for rejecting a multi-part message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// Too few or too many parts.
    #[error("a message has {parts} parts, must have {rule}")]
    Count {
        /// Received number of parts.
        parts: usize,
        /// Expected parts.
        rule: &'static str,
    },
    /// A sequence number of the wrong length.
    #[error("a sequence number has {0} bytes, must have 8")]
    Sequence(usize),
}

impl PartsError {
    /// The metric label value.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Count { .. } => "part_count",
            Self::Sequence(_) => "sequence_length",
        }
    }
}

/// Splits a live message into topic, sequence number (8 bytes, big-endian) and payload.
///
/// ```
/// let parts = [&b"kv-events"[..], &[0, 0, 0, 0, 0, 0, 0, 7], b"payload"];
/// assert_eq!(pointsman::internals::zmtp::live(&parts)?, (7, &parts[2]));
/// # Ok::<(), pointsman::internals::zmtp::PartsError>(())
/// ```
///
/// # Errors
/// A wrong number of parts, or a sequence number of the wrong length.
pub fn live<P: AsRef<[u8]>>(parts: &[P]) -> Result<(u64, &P), PartsError> {
    match parts {
        [_topic, sequence, payload] => Ok((sequence_of(sequence.as_ref())?, payload)),
        _ => Err(PartsError::Count { parts: parts.len(), rule: "3 (topic, sequence number, payload)" }),
    }
}

/// Splits a part of a replay response: an optional empty part, an optional topic (vLLM from 0.26.0, SGLang from
/// 0.5.22), sequence number, payload.
///
/// ```
/// use pointsman::internals::zmtp::{replayed, Replayed};
///
/// let seven = [0, 0, 0, 0, 0, 0, 0, 7];
/// let message = Replayed::Message { sequence: 7, payload: &&b"payload"[..] };
/// assert_eq!(replayed(&[&b""[..], &seven, b"payload"])?, message);
/// assert_eq!(replayed(&[&b""[..], b"kv-events", &seven, b"payload"])?, message);
/// assert_eq!(replayed(&[&b""[..], b"", &[0xff; 8], b""])?, Replayed::End);
/// # Ok::<(), pointsman::internals::zmtp::PartsError>(())
/// ```
///
/// # Errors
/// A wrong number of parts, or a sequence number of the wrong length.
pub fn replayed<P: AsRef<[u8]>>(parts: &[P]) -> Result<Replayed<&P>, PartsError> {
    let (sequence, payload) = match parts {
        [sequence, payload] | [_, sequence, payload] | [_, _, sequence, payload] => (sequence, payload),
        _ => {
            let rule = "2 to 4 (an empty one, topic, sequence number, payload)";
            return Err(PartsError::Count { parts: parts.len(), rule });
        }
    };
    match sequence_of(sequence.as_ref())? {
        END => Ok(Replayed::End),
        _ if payload.as_ref().is_empty() => Ok(Replayed::End),
        sequence => Ok(Replayed::Message { sequence, payload }),
    }
}

fn sequence_of(bytes: &[u8]) -> Result<u64, PartsError> {
    bytes.try_into().map(u64::from_be_bytes).map_err(|_| PartsError::Sequence(bytes.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting() -> Vec<u8> {
        let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
        bytes.extend_from_slice(MECHANISM);
        bytes.resize(GREETING_BYTES, 0);
        bytes
    }

    fn frame(flags: u8, bytes: u64) -> Vec<u8> {
        match u8::try_from(bytes) {
            Ok(short) if flags & LONG == 0 => vec![flags, short],
            Ok(_) | Err(_) => [&[flags | LONG][..], &bytes.to_be_bytes()].concat(),
        }
    }

    fn with_body(flags: u8, bytes: u64) -> Vec<u8> {
        let mut frame = frame(flags, bytes);
        frame.resize(frame.len() + usize::try_from(bytes).expect("small"), 0xab);
        frame
    }

    const SMALL: Caps = Caps { frame_bytes_max: 1000, message_bytes_max: 1500, message_frames_max: 3 };

    proptest! {
        /// The bytes and frames that a reader buffers for one message stay within the caps while the check succeeds,
        /// with and without commands.
        #[test]
        fn buffered_data_is_within_the_caps(frames in proptest::collection::vec((0u8..8, 0u64..1100), 1..30)) {
            let mut check = FrameCheck::new(SMALL);
            check.pass(&greeting()).expect("a greeting");
            let (mut kept_bytes, mut kept_frames) = (0, 0);
            for (flags, bytes) in frames {
                if check.pass(&with_body(flags, bytes)).is_err() {
                    break;
                }
                if flags & COMMAND == 0 {
                    (kept_bytes, kept_frames) = (kept_bytes + bytes, kept_frames + 1);
                    prop_assert!(kept_bytes <= SMALL.message_bytes_max && kept_frames <= SMALL.message_frames_max);
                    if flags & MORE == 0 {
                        (kept_bytes, kept_frames) = (0, 0);
                    }
                }
            }
        }
    }
}
