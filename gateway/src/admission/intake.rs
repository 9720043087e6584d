//! Reading of request bodies.
//!
//! Enforces limits of length and idle time, and drains unusable bodies. Allocates at most 256 KiB for bytes that have
//! not arrived; all of it counts in the memory budget. A body in one frame is not copied, others once. Memory of large
//! bodies returns to the system when they are dropped.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use memmap2::MmapMut;
use tokio::time::{Instant, timeout, timeout_at};

use crate::admission::coding::{Coding, Decoder};
use crate::formats::openai::ApiError;
use crate::net::budget::{Exhausted, RequestBudget, Reservation};

/// Total time limit of a body, in multiples of the idle timeout.
const FRAME_TIMEOUTS_MAX: u32 = 10;

/// Time limit for draining an unusable body.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(2);

/// Maximum length of a body on the heap.
const HEAP_BYTES_MAX: usize = 256 << 10;

/// Limits of a body.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum length.
    pub(crate) bytes_max: u64,
    /// Idle timeout.
    pub(crate) frame_timeout: Duration,
    /// Whether the client waits for `100 Continue`.
    pub(crate) expects_continue: bool,
    pub(crate) coding: Coding,
}

/// Reads and decodes the whole body within its limits. The bytes stay reserved in `budget` until the last clone of the body is
/// dropped.
///
/// # Errors
/// 415 for an unknown coding, 413, 408, 503 for an exhausted budget, or 400 if the client breaks off or the body does not
/// have its coding.
pub(crate) async fn receive(mut body: Body, limits: Limits, budget: &Arc<RequestBudget>) -> Result<Bytes, ApiError> {
    let Limits { bytes_max, frame_timeout, coding, .. } = limits;
    // Announced length; unknown for chunked bodies.
    let announced = body.size_hint();
    if announced.lower() > bytes_max {
        discard(body, limits).await;
        return Err(ApiError::too_large(bytes_max));
    }
    if coding == Coding::Unknown {
        discard(body, limits).await;
        return Err(ApiError::coding_unsupported());
    }
    let exact = announced.exact().filter(|_| coding == Coding::Identity);
    let mut buffer = Buffer::new(budget, exact.unwrap_or(bytes_max).min(bytes_max));
    let (mut decoder, mut received) = (Decoder::of(coding), 0);
    let end = Instant::now() + frame_timeout.saturating_mul(FRAME_TIMEOUTS_MAX);
    let refused = loop {
        let frame = timeout_at(end.min(Instant::now() + frame_timeout), body.frame());
        let frame = tokio::select! {
            biased;
            () = buffer.rejected() => break ApiError::request_budget_exhausted(),
            frame = frame => frame.map_err(|_| ApiError::body_timeout())?,
        };
        let Some(frame) = frame else {
            // An empty step ends a coding.
            return match buffer.decoded(&mut decoder, Bytes::new(), bytes_max).await {
                Ok(()) => buffer.finish().map_err(|Exhausted| ApiError::request_budget_exhausted()),
                Err(error) => Err(error),
            };
        };
        let Ok(data) = frame.map_err(|_| ApiError::body_broken())?.into_data() else { continue };
        received += data.len() as u64;
        if received > bytes_max {
            break ApiError::too_large(bytes_max);
        }
        if data.is_empty() {
            continue;
        }
        if let Err(error) = buffer.decoded(&mut decoder, data, bytes_max).await {
            break error;
        }
    };
    // Its bytes are free while the rest arrives.
    drop(buffer);
    discard(body, Limits { expects_continue: false, ..limits }).await;
    Err(refused)
}

/// A body that the gateway has written itself, within the budget.
pub(crate) async fn reserved(body: Vec<u8>, budget: &Arc<RequestBudget>) -> Result<Bytes, ApiError> {
    let mut reservation = budget.begin_body();
    let reserving = async {
        reservation.grow_to(body.len() as u64).await?;
        reservation.complete(body.len() as u64)
    };
    reserving.await.map_err(|Exhausted| ApiError::request_budget_exhausted())?;
    Ok(Bytes::from_owner(ReservedBody { body: Store::Heap(body), _reservation: reservation }))
}

/// The received part of a body with its reservation.
struct Buffer<'a> {
    budget: &'a Arc<RequestBudget>,
    /// Absent before the first bytes.
    reservation: Option<Reservation>,
    store: Store,
    /// Announced length, or the maximum.
    len_max: usize,
}

/// Storage of a body.
enum Store {
    /// A single frame, uncopied.
    Frame(Bytes),
    /// On the heap, with full capacity.
    Heap(Vec<u8>),
    /// In a mapping with full capacity, and the number of received bytes. The system provides memory as bytes are
    /// written and gets it back at the drop; the allocator would keep it.
    Mapped(MmapMut, usize),
}

impl<'a> Buffer<'a> {
    fn new(budget: &'a Arc<RequestBudget>, len_max: u64) -> Self {
        let len_max = usize::try_from(len_max).unwrap_or(usize::MAX);
        Self { budget, reservation: None, store: Store::Frame(Bytes::new()), len_max }
    }

    /// Resolves when the body is rejected in favor of others.
    async fn rejected(&self) {
        match &self.reservation {
            Some(reservation) => {
                let Exhausted = reservation.rejected().await;
            }
            None => std::future::pending().await,
        }
    }

    /// Appends received bytes, decoded in steps; after an error the buffer is unusable.
    async fn decoded(&mut self, decoder: &mut Option<Decoder>, data: Bytes, bytes_max: u64) -> Result<(), ApiError> {
        let Some(decoder) = decoder else { return self.push_within(data, bytes_max).await };
        for step in data.chunks(decoder.step_bytes()).chain(data.is_empty().then_some(&[][..])) {
            let decoded = decoder.step(step).map_err(|_| ApiError::coding_invalid())?;
            self.push_within(decoded.into(), bytes_max).await?;
        }
        Ok(())
    }

    async fn push_within(&mut self, data: Bytes, bytes_max: u64) -> Result<(), ApiError> {
        if (self.store.bytes().len() + data.len()) as u64 > bytes_max {
            return Err(ApiError::too_large(bytes_max));
        }
        self.push(data).await.map_err(|Exhausted| ApiError::request_budget_exhausted())
    }

    /// Appends a frame; after an error the buffer is unusable.
    async fn push(&mut self, data: Bytes) -> Result<(), Exhausted> {
        if data.is_empty() {
            return Ok(());
        }
        let len = self.store.bytes().len() + data.len();
        let reservation = self.reservation.get_or_insert_with(|| self.budget.begin_body());
        match &mut self.store {
            Store::Frame(frame) if frame.is_empty() => {
                reservation.grow_to(len as u64).await?;
                self.store = Store::Frame(data);
            }
            Store::Frame(frame) => {
                let mut store = if self.len_max <= HEAP_BYTES_MAX {
                    reservation.grow_to(self.len_max.max(len) as u64).await?;
                    Store::Heap(Vec::with_capacity(self.len_max.max(len)))
                } else {
                    reservation.grow_to(len as u64).await?;
                    Store::Mapped(MmapMut::map_anon(self.len_max.max(len)).map_err(|_| Exhausted)?, 0)
                };
                store.extend(frame);
                store.extend(&data);
                self.store = store;
            }
            Store::Heap(_) => self.store.extend(&data),
            Store::Mapped(..) => {
                reservation.grow_to(len as u64).await?;
                self.store.extend(&data);
            }
        }
        Ok(())
    }

    /// The body, which releases its bytes when dropped.
    fn finish(self) -> Result<Bytes, Exhausted> {
        let len = self.store.bytes().len();
        let Some(mut reservation) = self.reservation else { return Ok(Bytes::new()) };
        reservation.complete(len as u64)?;
        Ok(Bytes::from_owner(ReservedBody { body: self.store, _reservation: reservation }))
    }
}

impl Store {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame,
            Self::Heap(bytes) => bytes,
            Self::Mapped(map, len) => &map[..*len],
        }
    }

    /// Appends bytes within the capacity. Not for single-frame storage.
    fn extend(&mut self, data: &[u8]) {
        match self {
            Self::Frame(_) => {}
            Self::Heap(bytes) => bytes.extend_from_slice(data),
            Self::Mapped(map, len) => {
                map[*len..*len + data.len()].copy_from_slice(data);
                *len += data.len();
            }
        }
    }
}

/// A body with its reservation.
struct ReservedBody {
    body: Store,
    _reservation: Reservation,
}

impl AsRef<[u8]> for ReservedBody {
    fn as_ref(&self) -> &[u8] {
        self.body.bytes()
    }
}

/// Drains the body for a limited time, up to twice the maximum length. Clients that send everything before they read
/// would otherwise see a connection reset instead of the rejection.
pub(crate) async fn discard(mut body: Body, Limits { bytes_max, expects_continue, .. }: Limits) {
    if expects_continue {
        return;
    }
    let rest = async {
        let mut left = bytes_max.saturating_mul(2);
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
            if left == 0 {
                return;
            }
        }
    };
    // After the time limit the response is sent regardless.
    let _ = timeout(DISCARD_TIME_MAX, rest).await;
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::Write as _;

    use axum::http::StatusCode;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use tokio_stream::StreamExt as _;

    use super::*;

    /// A body in several frames. It has no end after the frame `silence`.
    fn chunks(chunks: &[&'static str]) -> Body {
        let frames = chunks.iter().filter(|chunk| **chunk != "silence").map(|chunk| Ok::<_, Infallible>(*chunk));
        let frames = tokio_stream::iter(frames.collect::<Vec<_>>());
        match chunks.last() {
            Some(&"silence") => Body::from_stream(frames.chain(tokio_stream::pending())),
            _ => Body::from_stream(frames),
        }
    }

    const LIMITS: Limits = Limits {
        bytes_max: 10,
        frame_timeout: Duration::from_secs(3),
        expects_continue: false,
        coding: Coding::Identity,
    };

    async fn taken(body: Body) -> Result<String, StatusCode> {
        let budget = RequestBudget::for_bodies(100);
        let limits = LIMITS;
        let taken = receive(body, limits, &budget).await;
        taken.map(|bytes| String::from_utf8(bytes.to_vec()).expect("text")).map_err(|error| error.status)
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_become_one_body_within_the_limits() {
        assert_eq!(taken(Body::empty()).await, Ok(String::new()));
        assert_eq!(taken(Body::from("0123456789")).await, Ok("0123456789".to_owned()));
        assert_eq!(taken(Body::from("0123456789a")).await, Err(StatusCode::PAYLOAD_TOO_LARGE));
        assert_eq!(taken(chunks(&["0123", "", "45", "6789"])).await, Ok("0123456789".to_owned()));
        assert_eq!(taken(chunks(&["0123", "45", "6789", "a", "silence"])).await, Err(StatusCode::PAYLOAD_TOO_LARGE));
        assert_eq!(taken(chunks(&["0123", "silence"])).await, Err(StatusCode::REQUEST_TIMEOUT));
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_of_the_gateway_count_against_the_budget() {
        let budget = RequestBudget::for_bodies(15);
        let first = reserved(vec![b' '; 10], &budget).await.expect("within the budget");
        let rejected = reserved(vec![b' '; 10], &budget).await.expect_err("budget exhausted");
        assert_eq!(rejected.code, "request_budget_exhausted");
        drop(first);
        assert_eq!(reserved(vec![b' '; 15], &budget).await.expect("within the budget").len(), 15);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_reserved_until_its_last_clone_is_dropped() {
        let budget = RequestBudget::for_bodies(15);
        let limits = LIMITS;
        let first = receive(chunks(&["0123", "45", "6789"]), limits, &budget).await.expect("within the budget");
        let second = receive(Body::from("01234"), limits, &budget).await.expect("within the budget");
        let refused = receive(chunks(&["0"]), limits, &budget).await.expect_err("budget exhausted");
        assert_eq!((refused.status, refused.retry_after_s), (StatusCode::SERVICE_UNAVAILABLE, Some(1)));
        let clone = first.clone();
        drop(first);
        assert!(receive(chunks(&["0"]), limits, &budget).await.is_err(), "a clone is left");
        drop(clone);
        assert_eq!(receive(Body::from("0123456789"), limits, &budget).await.expect("within the budget").len(), 10);
        drop(second);
    }

    /// `text` compressed.
    fn compressed(coding: Coding, text: &[u8]) -> Body {
        let bytes = match coding {
            Coding::Zstd => Ok(compress_to_vec(text, CompressionLevel::Fastest)),
            Coding::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
                encoder.write_all(text).and_then(|()| encoder.finish())
            }
            _ => {
                let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
                encoder.write_all(text).and_then(|()| encoder.finish())
            }
        };
        Body::from(bytes.expect("written to memory"))
    }

    #[tokio::test(start_paused = true)]
    async fn compressed_bodies_count_as_decoded() {
        let budget = RequestBudget::for_bodies(4_000_000);
        let take = async |coding, bytes_max, body| {
            let taken = receive(body, Limits { coding, bytes_max, ..LIMITS }, &budget).await;
            taken.map(|bytes| bytes.to_vec()).map_err(|error| error.code)
        };
        let text: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
        for coding in [Coding::Gzip, Coding::Deflate, Coding::Zstd] {
            assert_eq!(take(coding, 800_000, compressed(coding, &text)).await.as_ref(), Ok(&text), "{coding:?}");
            assert_eq!(take(coding, 799_999, compressed(coding, &text)).await, Err("body_too_large"), "{coding:?}");
            // Fewer bytes than the limit, and a thousand times as many decoded.
            let bomb = compressed(coding, &vec![0; 5_000_000]);
            assert_eq!(take(coding, 3_000_000, bomb).await, Err("body_too_large"), "{coding:?}");
            let over_budget = compressed(coding, &vec![0; 5_000_000]);
            assert_eq!(take(coding, 30_000_000, over_budget).await, Err("request_budget_exhausted"), "{coding:?}");
            assert_eq!(take(coding, 800_000, Body::from("{\"model\":1}")).await, Err("invalid_coding"), "{coding:?}");
        }
        assert_eq!(take(Coding::Gzip, 100, compressed(Coding::Gzip, b"")).await, Ok(Vec::new()));
        let frame = compress_to_vec(&text[..], CompressionLevel::Fastest);
        let two = take(Coding::Zstd, 1_600_000, Body::from([&frame[..], &frame].concat())).await;
        assert_eq!(two, Ok([&text[..], &text].concat()), "two frames");
        let broken_off = Body::from(frame[..frame.len() - 9].to_vec());
        assert_eq!(take(Coding::Zstd, 800_000, broken_off).await, Err("invalid_coding"));
        // Blocks of four bytes, each of which stands for 128 KiB.
        let header = [&0xFD2F_B528_u32.to_le_bytes()[..], &[0, 0x38]].concat();
        let bomb = [&header[..], &[2, 0, 16, 0].repeat(10_000)].concat();
        assert_eq!(take(Coding::Zstd, 3_000_000, Body::from(bomb)).await, Err("body_too_large"));
        // A window of 16 MiB.
        let wide = [&0xFD2F_B528_u32.to_le_bytes()[..], &[0, 0x70], &[1, 0, 0].repeat(6)].concat();
        assert_eq!(take(Coding::Zstd, 3_000_000, Body::from(wide)).await, Err("invalid_coding"));
        assert_eq!(take(Coding::Unknown, 10, Body::from("a")).await, Err("unsupported_coding"));
        assert_eq!(
            take(Coding::Identity, 4_000_000, Body::from(vec![0; 4_000_000])).await.map(|all| all.len()),
            Ok(4_000_000),
            "all bytes are free again"
        );
    }
}
