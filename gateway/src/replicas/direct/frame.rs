//! Frames of the direct transport, as bytes.
//!
//! On the wire a frame is its length (`u32`), its body, and with a shared key a tag of 32 bytes. The length counts body
//! and tag. The body is a kind (`u8`) and the fields of the kind. Integers are little-endian.

use std::sync::Arc;

use bytes::{Buf as _, BufMut as _, Bytes};
use pointsman::{ReplicaId, ReplicaLife, ReplicaTopic};

use crate::replicas::bus::REFUSALS;

/// Version of the protocol. Replicas of different versions do not connect.
pub(super) const VERSION: u16 = 1;

/// Maximum length of a message payload, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Maximum length of a pool name, in bytes.
const POOL_BYTES_MAX: usize = 1 << 10;

/// Maximum length of a body after the handshake: a message with its fields.
pub(super) const BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX + POOL_BYTES_MAX + 16;

/// Maximum length of a body during the handshake.
pub(super) const HANDSHAKE_BYTES_MAX: usize = 256;

/// Length of the parts of a snapshot, in bytes.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// First bytes of a hello.
const MAGIC: &[u8; 8] = b"PTMREPL\0";

/// Length of a nonce, in bytes.
pub(super) const NONCE_BYTES: usize = 32;

/// First frame in both directions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Version of the protocol.
    pub(super) version: u16,
    /// Whether the sender has a shared key.
    pub(super) is_keyed: bool,
    /// Random bytes that make the proofs and keys of the connection unique.
    pub(super) nonce: [u8; NONCE_BYTES],
    /// Life of the sender.
    pub(super) life: ReplicaLife,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(64);
        body.put_slice(MAGIC);
        body.put_u16_le(self.version);
        body.put_u8(u8::from(self.is_keyed));
        body.put_slice(&self.nonce);
        body.put_u64_le(self.life.replica.0);
        body.put_u64_le(self.life.incarnation);
        body
    }

    /// `None` if the sender is no replica. Of another version only the version is meaningful.
    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut body = body.strip_prefix(MAGIC)?;
        let version = body.try_get_u16_le().ok()?;
        let life = ReplicaLife { replica: ReplicaId(0), incarnation: 0 };
        let mut hello = Self { version, is_keyed: false, nonce: [0; NONCE_BYTES], life };
        if version == VERSION {
            hello.is_keyed = body.try_get_u8().ok()? == 1;
            body.try_copy_to_slice(&mut hello.nonce).ok()?;
            hello.life.replica = ReplicaId(body.try_get_u64_le().ok()?);
            hello.life.incarnation = body.try_get_u64_le().ok()?;
        }
        Some(hello)
    }
}

/// A frame after the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// From the dialling side: a message of the bus.
    Message {
        /// `None`: a topic of a later release.
        topic: Option<ReplicaTopic>,
        pool: Arc<str>,
        payload: Bytes,
    },
    /// From the accepting side, every second and at each change.
    Status { is_serving: bool },
    /// From the dialling side, every second.
    Alive,
    /// From the dialling side.
    SnapshotRequest { id: u32, pool: Arc<str> },
    /// From the accepting side, in order. `remaining` bytes follow in later chunks.
    Chunk { id: u32, remaining: u64, bytes: Bytes },
    /// From the accepting side.
    NoSnapshot { id: u32, refusal: &'static str },
}

/// A body that is no frame of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

impl From<bytes::TryGetError> for Malformed {
    fn from(_: bytes::TryGetError) -> Self {
        Self
    }
}

impl Frame {
    pub(super) fn encode(&self) -> Bytes {
        let mut body = Vec::new();
        match self {
            Self::Message { topic, pool, payload } => {
                // A topic of a later release is never sent.
                let code = ReplicaTopic::ALL.iter().position(|known| Some(*known) == *topic);
                body.reserve(4 + pool.len() + payload.len());
                body.put_u8(1);
                body.put_u8(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX));
                put_pool(&mut body, pool);
                body.put_slice(payload);
            }
            Self::Status { is_serving } => {
                body.put_u8(2);
                body.put_u8(u8::from(*is_serving));
            }
            Self::Alive => body.put_u8(3),
            Self::SnapshotRequest { id, pool } => {
                body.put_u8(4);
                body.put_u32_le(*id);
                put_pool(&mut body, pool);
            }
            Self::Chunk { id, remaining, bytes } => {
                body.reserve(13 + bytes.len());
                body.put_u8(5);
                body.put_u32_le(*id);
                body.put_u64_le(*remaining);
                body.put_slice(bytes);
            }
            Self::NoSnapshot { id, refusal } => {
                body.put_u8(6);
                body.put_u32_le(*id);
                body.put_u8(if *refusal == REFUSALS[0] { 0 } else { 1 });
            }
        }
        Bytes::from(body)
    }

    pub(super) fn decode(mut body: Bytes) -> Result<Self, Malformed> {
        let frame = match body.try_get_u8()? {
            1 => {
                let topic = ReplicaTopic::ALL.get(usize::from(body.try_get_u8()?)).copied();
                let pool = take_pool(&mut body)?;
                Self::Message { topic, pool, payload: body.split_off(0) }
            }
            2 => match body.try_get_u8()? {
                flag @ (0 | 1) => Self::Status { is_serving: flag == 1 },
                _ => return Err(Malformed),
            },
            3 => Self::Alive,
            4 => Self::SnapshotRequest { id: body.try_get_u32_le()?, pool: take_pool(&mut body)? },
            5 => {
                let (id, remaining) = (body.try_get_u32_le()?, body.try_get_u64_le()?);
                Self::Chunk { id, remaining, bytes: body.split_off(0) }
            }
            6 => {
                let (id, code) = (body.try_get_u32_le()?, body.try_get_u8()?);
                Self::NoSnapshot { id, refusal: REFUSALS.get(usize::from(code)).copied().ok_or(Malformed)? }
            }
            _ => return Err(Malformed),
        };
        if body.is_empty() { Ok(frame) } else { Err(Malformed) }
    }
}

/// Whether the name of a pool fits into a frame.
pub(crate) fn is_pool_name(pool: &str) -> bool {
    pool.len() <= POOL_BYTES_MAX
}

fn put_pool(body: &mut Vec<u8>, pool: &str) {
    body.put_u16_le(u16::try_from(pool.len()).unwrap_or(u16::MAX));
    body.put_slice(pool.as_bytes());
}

fn take_pool(body: &mut Bytes) -> Result<Arc<str>, Malformed> {
    let length = usize::from(body.try_get_u16_le()?);
    if length > body.len().min(POOL_BYTES_MAX) {
        return Err(Malformed);
    }
    let name = body.split_to(length);
    std::str::from_utf8(&name).map(Arc::from).map_err(|_| Malformed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> Vec<Frame> {
        let pool: Arc<str> = "llama/3 ü".into();
        let payload = Bytes::from_static(b"payload");
        let message = |topic| Frame::Message { topic: Some(topic), pool: Arc::clone(&pool), payload: payload.clone() };
        let mut frames = ReplicaTopic::ALL.map(message).to_vec();
        frames.extend([true, false].map(|is_serving| Frame::Status { is_serving }));
        frames.extend(REFUSALS.map(|refusal| Frame::NoSnapshot { id: 8, refusal }));
        frames.extend([
            Frame::Alive,
            Frame::SnapshotRequest { id: 7, pool: Arc::clone(&pool) },
            Frame::Chunk { id: 9, remaining: 1 << 40, bytes: payload },
        ]);
        frames
    }

    #[test]
    fn cut_frames_are_malformed() {
        for frame in frames() {
            let body = frame.encode();
            // A shorter payload is a valid payload.
            let is_open_ended = matches!(frame, Frame::Message { .. } | Frame::Chunk { .. });
            let lengths = if is_open_ended { 0..4 } else { 0..body.len() };
            for length in lengths {
                assert_eq!(Frame::decode(body.slice(..length)), Err(Malformed), "{frame:?} cut to {length}");
            }
        }
    }

    #[test]
    fn hellos_decode_and_show_other_versions() {
        let life = ReplicaLife { replica: ReplicaId(3), incarnation: 4 };
        let hello = Hello { version: VERSION, is_keyed: true, nonce: [5; NONCE_BYTES], life };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello.clone()));
        let later = Hello { version: VERSION + 1, ..hello };
        assert_eq!(Hello::decode(&later.encode()[..10]).map(|hello| hello.version), Some(VERSION + 1));
        assert_eq!(Hello::decode(b"GET / HTTP/1.1\r\n"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Hello::decode(&bytes);
            if let Ok(frame) = Frame::decode(Bytes::from(bytes)) {
                prop_assert_eq!(Frame::decode(frame.encode()), Ok(frame));
            }
        }
    }
}
