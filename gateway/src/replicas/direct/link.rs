//! One connection: handshake, then frames in both directions, each with a tag if there is a shared key.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use pointsman::ReplicaLife;
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader, ReadHalf, WriteHalf};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::frame::{BODY_BYTES_MAX, Frame, HANDSHAKE_BYTES_MAX, Hello, NONCE_BYTES, VERSION};
use super::seal::{DeploymentKey, Seal, Side, TAG_BYTES};
use crate::replicas::meters::{RefusalReason, ReplicaMeters};

/// Interval of frames that show life.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// A connection without a frame for this long is closed.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Time limit of the handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Frames are collected up to this length before they are written.
pub(super) const WRITE_BYTES: usize = 64 << 10;

/// A byte stream, plain or TLS.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// End of a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// Closed by the other side, or a network failure.
    #[error("{}", closed(.0))]
    Closed(#[from] io::Error),
    /// No frame for too long.
    #[error("no frame for {} s", SILENCE_MAX.as_secs())]
    Silent,
    /// The other side violates the protocol.
    #[error("{reason}: {1}", reason = .0.name())]
    Refused(RefusalReason, &'static str),
}

fn closed(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        "connection closed".to_owned()
    } else {
        format!("connection lost: {error}")
    }
}

impl LinkError {
    pub(super) const MALFORMED: Self = Self::Refused(RefusalReason::Malformed, "unexpected frame");
    pub(super) const STALE: Self = Self::Refused(RefusalReason::Stale, "a later life of the replica is connected");
}

/// Ticks now and in each period; late ticks delay those after them.
pub(super) fn every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// An authenticated connection.
pub(super) struct Link<'a> {
    /// Life of the other replica.
    pub(super) life: ReplicaLife,
    pub(super) reader: FrameReader<'a>,
    pub(super) writer: FrameWriter<'a>,
}

/// Exchanges hellos and proofs within [`HANDSHAKE_TIMEOUT`].
pub(super) async fn shake_hands<'a>(
    stream: Box<dyn Stream>,
    side: Side,
    life: ReplicaLife,
    key: Option<&DeploymentKey>,
    meters: &'a ReplicaMeters,
) -> Result<Link<'a>, LinkError> {
    let (read, write) = tokio::io::split(stream);
    let reader = FrameReader { stream: BufReader::with_capacity(16 << 10, read), seal: None, meters };
    let writer = FrameWriter { stream: write, seal: None, buffer: Vec::new(), is_writing: false, meters };
    match timeout(HANDSHAKE_TIMEOUT, shake(reader, writer, side, life, key)).await {
        Ok(link) => link,
        Err(_) => Err(LinkError::Refused(RefusalReason::Timeout, "no handshake within 5 s")),
    }
}

async fn shake<'a>(
    mut reader: FrameReader<'a>,
    mut writer: FrameWriter<'a>,
    side: Side,
    life: ReplicaLife,
    key: Option<&DeploymentKey>,
) -> Result<Link<'a>, LinkError> {
    let refused = |reason, detail| Err(LinkError::Refused(reason, detail));
    let mut nonce = [0; NONCE_BYTES];
    if SystemRandom::new().fill(&mut nonce).is_err() {
        return Err(LinkError::Closed(io::Error::other("the system has no random bytes")));
    }
    let own = Hello { version: VERSION, is_keyed: key.is_some(), nonce, life }.encode();
    // The listener reveals nothing before a hello.
    if side == Side::Dialling {
        writer.send(&own).await?;
    }
    let theirs = reader.body(HANDSHAKE_BYTES_MAX).await?;
    let Some(hello) = Hello::decode(&theirs) else {
        return refused(RefusalReason::Malformed, "the other side is no replica");
    };
    if side == Side::Accepting {
        writer.send(&own).await?;
    }
    if hello.version != VERSION {
        return refused(RefusalReason::Version, "the other replica has another version of the protocol");
    }
    match (key, hello.is_keyed) {
        (None, false) => {}
        (None, true) => return refused(RefusalReason::Authentication, "only the other replica has a shared key"),
        (Some(_), false) => return refused(RefusalReason::Authentication, "the other replica has no shared key"),
        (Some(key), true) => {
            let hellos = match side {
                Side::Dialling => [&own[..], &theirs[..]].concat(),
                Side::Accepting => [&theirs[..], &own[..]].concat(),
            };
            let proof = key.proof(side, &hellos);
            if side == Side::Dialling {
                writer.send(proof.as_ref()).await?;
            }
            let shown = reader.body(HANDSHAKE_BYTES_MAX).await?;
            if !key.is_proof(side.other(), &hellos, &shown) {
                return refused(RefusalReason::Authentication, "the other replica has another shared key");
            }
            if side == Side::Accepting {
                writer.send(proof.as_ref()).await?;
            }
            writer.seal = Some(key.seal(side, &hellos));
            reader.seal = Some(key.seal(side.other(), &hellos));
        }
    }
    Ok(Link { life: hello.life, reader, writer })
}

/// Incoming frames.
pub(super) struct FrameReader<'a> {
    stream: BufReader<ReadHalf<Box<dyn Stream>>>,
    seal: Option<Seal>,
    meters: &'a ReplicaMeters,
}

impl FrameReader<'_> {
    /// The next frame. After an error or cancellation the connection is unusable.
    pub(super) async fn next(&mut self) -> Result<Frame, LinkError> {
        let body = timeout(SILENCE_MAX, self.body(BODY_BYTES_MAX)).await.map_err(|_| LinkError::Silent)??;
        Frame::decode(body).map_err(|_| LinkError::MALFORMED)
    }

    /// A body of at most `bytes_max`, after verification of its tag.
    async fn body(&mut self, bytes_max: usize) -> Result<Bytes, LinkError> {
        let tag_bytes = if self.seal.is_some() { TAG_BYTES } else { 0 };
        let length = usize::try_from(self.stream.read_u32_le().await?).unwrap_or(usize::MAX);
        if length > bytes_max + tag_bytes {
            return Err(LinkError::Refused(RefusalReason::Oversized, "frame above the maximum length"));
        }
        let Some(body_bytes) = length.checked_sub(tag_bytes) else {
            return Err(LinkError::Refused(RefusalReason::Malformed, "frame shorter than its tag"));
        };
        let mut body = BytesMut::zeroed(length);
        self.stream.read_exact(&mut body).await?;
        self.meters.received_bytes.increment(4 + length as u64);
        let tag = body.split_off(body_bytes);
        if let Some(seal) = &mut self.seal
            && !seal.accepts(&body, &tag)
        {
            return Err(LinkError::Refused(RefusalReason::Authentication, "forged, repeated or reordered frame"));
        }
        Ok(body.freeze())
    }
}

/// Outgoing frames.
pub(super) struct FrameWriter<'a> {
    pub(super) stream: WriteHalf<Box<dyn Stream>>,
    seal: Option<Seal>,
    pub(super) buffer: Vec<u8>,
    /// Whether a part of the buffer may have been written.
    is_writing: bool,
    meters: &'a ReplicaMeters,
}

impl FrameWriter<'_> {
    /// Adds a frame to the buffer, and returns the length of the buffer.
    pub(super) fn add(&mut self, body: &[u8]) -> usize {
        let tag = self.seal.as_mut().map(|seal| seal.tag(body));
        let tag = tag.as_ref().map_or(&[][..], AsRef::as_ref);
        let length = u32::try_from(body.len() + tag.len()).expect("frames are short");
        self.buffer.extend_from_slice(&length.to_le_bytes());
        self.buffer.extend_from_slice(body);
        self.buffer.extend_from_slice(tag);
        self.buffer.len()
    }

    /// Writes the buffer. After an error or cancellation the connection is unusable.
    pub(super) async fn flush(&mut self) -> Result<(), LinkError> {
        self.is_writing = true;
        self.stream.write_all(&self.buffer).await?;
        self.stream.flush().await?;
        self.is_writing = false;
        self.meters.sent_bytes.increment(self.buffer.len() as u64);
        self.buffer.clear();
        // A burst must not occupy memory for ever.
        self.buffer.shrink_to(2 * WRITE_BYTES);
        Ok(())
    }

    /// Whether frames can follow after a cancellation.
    pub(super) fn is_usable(&self) -> bool {
        !self.is_writing
    }

    /// Writes one frame.
    pub(super) async fn send(&mut self, body: &[u8]) -> Result<(), LinkError> {
        self.add(body);
        self.flush().await
    }

    /// Ends the outgoing direction.
    pub(super) async fn shut_down(&mut self) {
        let _ = timeout(HEARTBEAT, self.stream.shutdown()).await;
    }
}
