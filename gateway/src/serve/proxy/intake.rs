//! A request's body, taken in.
//!
//! Owns limits of length and silence, and what is done with bodies of no use. Promises that nothing is reserved for bytes
//! that have not come, and that a body in one piece is not copied.

use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout, timeout_at};

use crate::openai::ApiError;

/// How long a body may come in all, in times of the longest silence.
const SILENCES_MAX: u32 = 10;

/// How long a body of no use may come, to be thrown away.
const REST_MAX: Duration = Duration::from_secs(2);

/// What a body may cost.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Its longest length.
    pub(super) bytes_max: u64,
    /// How long it may be silent.
    pub(super) silence_max: Duration,
    /// The client sends it only when it is told to go on.
    pub(super) asks_first: bool,
}

/// The whole body, within its limits.
///
/// # Errors
/// 413, 408, or 400 where the client breaks off.
pub(super) async fn take_in(mut body: Body, limits: Limits) -> Result<Bytes, ApiError> {
    let Limits { bytes_max, silence_max, .. } = limits;
    // What the client announces; nothing where it sends chunks.
    if body.size_hint().lower() > bytes_max {
        throw_away(body, limits).await;
        return Err(ApiError::too_large(bytes_max));
    }
    let mut whole = Vec::new();
    let mut first = Bytes::new();
    let end = Instant::now() + silence_max.saturating_mul(SILENCES_MAX);
    loop {
        let frame = timeout_at(end.min(Instant::now() + silence_max), body.frame()).await;
        let Some(frame) = frame.map_err(|_| ApiError::body_timeout())? else { break };
        let Ok(data) = frame.map_err(|_| ApiError::body_broken())?.into_data() else { continue };
        if (first.len() + whole.len() + data.len()) as u64 > bytes_max {
            drop((first, whole, data));
            throw_away(body, Limits { asks_first: false, ..limits }).await;
            return Err(ApiError::too_large(bytes_max));
        }
        if first.is_empty() && whole.is_empty() {
            first = data;
        } else {
            whole.extend_from_slice(&std::mem::take(&mut first));
            whole.extend_from_slice(&data);
        }
    }
    Ok(if whole.is_empty() { first } else { whole.into() })
}

/// Reads on for a while, at most twice as much as a body may have. Clients that send all before they read any would find
/// the connection reset if it were closed on what they send, and never see why they are refused.
pub(super) async fn throw_away(mut body: Body, Limits { bytes_max, asks_first, .. }: Limits) {
    if asks_first {
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
    // Whoever is not through by then is told all the same.
    let _ = timeout(REST_MAX, rest).await;
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use pieces::chunks;

    use super::*;

    /// Bodies that come in pieces.
    mod pieces {
        use std::collections::VecDeque;
        use std::convert::Infallible;
        use std::pin::Pin;
        use std::task::{Context, Poll};

        use axum::body::{Body, Bytes};
        use http_body::Frame;

        struct Chunks(VecDeque<&'static str>);

        impl http_body::Body for Chunks {
            type Data = Bytes;
            type Error = Infallible;

            fn poll_frame(
                mut self: Pin<&mut Self>,
                _: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
                if self.0.front() == Some(&"silence") {
                    return Poll::Pending;
                }
                let chunk = self.0.pop_front();
                Poll::Ready(chunk.map(|chunk| Ok(Frame::data(Bytes::from_static(chunk.as_bytes())))))
            }
        }

        pub(super) fn chunks(chunks: &[&'static str]) -> Body {
            Body::new(Chunks(chunks.iter().copied().collect()))
        }
    }

    async fn taken(body: Body) -> Result<String, StatusCode> {
        let taken =
            take_in(body, Limits { bytes_max: 10, silence_max: Duration::from_secs(3), asks_first: false }).await;
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
}
