//! Response bodies that hold the placement of their request and report its progress.
//!
//! The booking ends with the body: at its end, at an error, or when it is dropped, whichever is first. Bytes pass
//! through unchanged. [`AnswerReader`] interprets them.

use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};

use super::placement::Placement;
use crate::answer::{AnswerKind, AnswerReader, Usage};
use crate::health::Outcome;

impl Placement {
    /// Wraps a response body that reports the request's progress to the placement from here on.
    ///
    /// The first generated token of an event stream completes the prefill; a chunk with only a role does not. A
    /// response that is not streamed gives no time for its prefill. Output blocks are counted as the output passes, and
    /// cached tokens are reported when a usage record contains them. [`AnswerReader`](crate::AnswerReader) defines what is counted,
    /// and `kind` selects how the body is parsed. The end of the body reports [`Outcome::Ok`] and an error reports
    /// [`Outcome::Reset`], unless an outcome was reported before. A body that is dropped early reports no outcome,
    /// because the usual cause is a disconnected client. The booking is freed at the end of the body, before the body
    /// itself is dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use bytes::Bytes;
    /// use http_body_util::{BodyExt as _, Full};
    /// use pointsman::{AnswerKind, Prompt, RouteRequest, Router, RouterConfig};
    /// use pointsman::protocol::{WorkerConfig, WorkerId};
    ///
    /// let worker = WorkerConfig::at("http://10.0.0.1:8000");
    /// let router = Router::builder(RouterConfig::default()).worker(WorkerId(1), worker).start().await?;
    /// let placement = router.route(RouteRequest::new("req-1", Prompt::Tokens(&[1, 2, 3]))).await?;
    /// let answer = Full::<Bytes>::from(r#"{"usage":{"prompt_tokens":3,"completion_tokens":5}}"#); // the engine's, in truth
    /// let mut body = placement.wrap_body(answer, AnswerKind::Json).expecting(100);
    /// while let Some(frame) = body.frame().await {
    ///     let _to_the_client = frame?;
    /// }
    /// assert_eq!(body.usage().and_then(|usage| usage.output_tokens), Some(5));
    /// assert_eq!(router.health().leases, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn wrap_body<B: Body>(self, body: B, kind: AnswerKind) -> PlacedBody<B> {
        let reader = AnswerReader::new(kind);
        let mut follow = Follow {
            placement: Some(self),
            kind,
            reader,
            output_blocks: 0,
            expected_tokens: None,
            told_cached: false,
            requires_end_mark: false,
            reports_failures: true,
        };
        if body.is_end_stream() {
            follow.end(Outcome::Ok);
        }
        PlacedBody { body, follow }
    }

    /// As [`Placement::wrap_body`], for a complete response, whose `content-type` selects the parser. Status 429 or 503
    /// reports [`Outcome::Refused`], with `Retry-After` if it is a number of seconds. Any other status of 500 or above
    /// reports [`Outcome::ServerError`].
    pub fn wrap_response<B: Body>(self, response: http::Response<B>) -> http::Response<PlacedBody<B>> {
        match response.status() {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                let retry_after = response.headers().get(http::header::RETRY_AFTER);
                let seconds = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
                self.outcome(Outcome::Refused { retry_after: seconds.map(Duration::from_secs) });
            }
            status if status.is_server_error() => self.outcome(Outcome::ServerError),
            _ => {}
        }
        let content_type = response.headers().get(http::header::CONTENT_TYPE);
        let kind = content_type.map_or(AnswerKind::Json, |value| AnswerKind::of_content_type(value.as_bytes()));
        response.map(|body| self.wrap_body(body, kind))
    }
}

// Bodies of hyper's clients are `Unpin`, others are not. Pin projection avoids boxing those.
pin_project_lite::pin_project! {
    /// Response body that holds the placement of its request: see [`Placement::wrap_body`]. Data frames are those of
    /// the inner body, without a copy if they are [`Bytes`].
    #[derive(Debug)]
    pub struct PlacedBody<B> {
        #[pin]
        body: B,
        follow: Follow,
    }
}

impl<B> PlacedBody<B> {
    /// Sets the output length that the caller expects, in tokens. The weight of the output blocks falls linearly with
    /// progress and reaches zero at this length. Omit it if only a limit or a mean is known: the remaining length of an
    /// answer past the mean does not shrink.
    #[must_use]
    pub fn expecting(mut self, output_tokens: u32) -> Self {
        self.follow.expected_tokens = Some(output_tokens);
        self
    }

    /// Requires the end mark of the response. A body that ends without one reports [`Outcome::InvalidAnswer`], and an
    /// error event that the request did not cause reports [`Outcome::ServerError`]. For successful responses in OpenAI
    /// formats.
    #[must_use]
    pub fn requiring_end_mark(mut self) -> Self {
        self.follow.requires_end_mark = true;
        self
    }

    /// Disables the report of cached tokens. For a rank that received the blocks of the prompt from another rank: its
    /// engine counts them as cached.
    #[must_use]
    pub fn without_cached_tokens(mut self) -> Self {
        self.follow.told_cached = true;
        self
    }

    /// Disables failure reports of this body, for a request that already counts against another rank.
    #[must_use]
    pub fn without_blame(mut self) -> Self {
        self.follow.reports_failures = false;
        self
    }

    /// Reports the outcome of the request, as [`Placement::outcome`] does, unless failure reports of this body are
    /// disabled.
    pub fn report(&self, outcome: Outcome) {
        if let Some(placement) = self.placement()
            && (self.follow.reports_failures || outcome.is_ok())
        {
            placement.outcome(outcome);
        }
    }

    /// Whether the end mark of the response has arrived: see [`AnswerReader::is_complete`].
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.follow.reader.is_complete()
    }

    /// The HTTP status of an error event in the stream: see [`AnswerReader::error_status`].
    #[must_use]
    pub fn error_status(&self) -> Option<u16> {
        self.follow.reader.error_status()
    }

    /// Whether the first token has arrived: see [`AnswerReader::is_generating`].
    #[must_use]
    pub fn is_generating(&self) -> bool {
        self.follow.reader.is_generating()
    }

    /// Position of the token's text in the last frame: see [`AnswerReader::repeated_text`].
    #[must_use]
    pub fn repeated_text(&self) -> Option<Range<usize>> {
        self.follow.reader.repeated_text()
    }

    /// The placement, until the body has ended. For reports by the embedder, such as a timeout between two frames.
    pub fn placement(&self) -> Option<&Placement> {
        self.follow.placement.as_ref()
    }

    /// Token usage that the engine has reported for the request so far.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.follow.reader.usage()
    }

    /// Whether the response has ended the turn of an agent: see [`AnswerReader::is_stop`].
    #[must_use]
    pub fn is_stop(&self) -> bool {
        self.follow.reader.is_stop()
    }

    /// Output tokens so far.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.follow.reader.output_tokens()
    }
}

impl<B: Body> Body for PlacedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut this = self.project();
        let frame = match ready!(this.body.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => frame.map_data(|mut data| data.copy_to_bytes(data.remaining())),
            Some(Err(error)) => {
                this.follow.end(Outcome::Reset);
                return Poll::Ready(Some(Err(error)));
            }
            None => {
                this.follow.end(Outcome::Ok);
                return Poll::Ready(None);
            }
        };
        if let Some(data) = frame.data_ref() {
            this.follow.pass(data);
        }
        // The reader may stop polling here and keep the body for a long time.
        if this.body.is_end_stream() {
            this.follow.end(Outcome::Ok);
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Progress of a response and the reports that its placement still expects.
#[derive(Debug)]
struct Follow {
    /// `None` after the booking has been freed.
    placement: Option<Placement>,
    kind: AnswerKind,
    reader: AnswerReader,
    /// Output blocks reported so far.
    output_blocks: u64,
    expected_tokens: Option<u32>,
    told_cached: bool,
    requires_end_mark: bool,
    reports_failures: bool,
}

impl Follow {
    fn pass(&mut self, data: &[u8]) {
        let Some(placement) = self.placement.as_ref().filter(|_| !data.is_empty()) else { return };
        self.reader.read(data);
        // A response that is not streamed arrives after all of it is computed, so its arrival does not date the
        // prefill.
        if self.kind == AnswerKind::Events && self.reader.is_generating() {
            // Before the report of the first token, which counts as one: the frame may have several.
            placement.generated(self.reader.output_tokens());
            placement.prefill_completed();
        }
        let block_size = u64::from(placement.block_size());
        while (self.output_blocks + 1) * block_size <= self.reader.output_tokens() {
            self.output_blocks += 1;
            let decay = self.expected_tokens.map(|expected| decay(self.output_blocks * block_size, expected));
            let reported = placement.output_block(decay);
            debug_assert!(reported.is_ok(), "decay within [0, 1]: {reported:?}");
        }
        self.tell_cached();
    }

    fn end(&mut self, outcome: Outcome) {
        if self.placement.is_none() {
            return;
        }
        self.reader.end();
        self.tell_cached();
        if let Some(placement) = self.placement.as_ref().filter(|_| self.reader.is_stop()) {
            placement.stopped();
        }
        let outcome = match outcome {
            Outcome::Ok if self.requires_end_mark => self.outcome_of_content(),
            outcome => outcome,
        };
        if let Some(placement) = self.placement.take()
            && (self.reports_failures || outcome.is_ok())
        {
            placement.outcome(outcome);
        }
    }

    /// Outcome of a body that ended without a transport error, from its content.
    fn outcome_of_content(&self) -> Outcome {
        match self.reader.error_status() {
            Some(429 | 500..) => Outcome::ServerError,
            _ if self.reader.is_complete() => Outcome::Ok,
            _ => Outcome::InvalidAnswer,
        }
    }

    fn tell_cached(&mut self) {
        let cached = self.reader.usage().and_then(|usage| usage.cached_tokens).filter(|_| !self.told_cached);
        if let Some((placement, cached)) = self.placement.as_ref().zip(cached) {
            self.told_cached = true;
            placement.delivered_cached_tokens(cached);
        }
    }
}

/// Remaining weight of the output: the share of the expected tokens that is not generated yet.
fn decay(generated: u64, expected: u32) -> f64 {
    let generated = u32::try_from(generated).unwrap_or(u32::MAX);
    (1.0 - f64::from(generated) / f64::from(expected.max(1))).max(0.0)
}
