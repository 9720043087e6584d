//! Bodies that hold their placement: an answer that passes through reports what there is to report.
//!
//! Owns what a body has shown so far. Promises that the booking ends with the body, at its end, at an error or when it is
//! dropped, whichever is first, and that the bytes stay as they are. Leaves what is in them to [`AnswerReader`].

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
    /// Lets an answer's body do all that is to be done with the placement from here on.
    ///
    /// The first token of a stream of events completes the prefill, and a chunk with only a role does not; an answer that
    /// comes whole says nothing of when that was. As output passes, its blocks are counted, and cached tokens are reported
    /// when a usage says them: see [`answer`](crate::answer) for what is counted, and `kind` for how the body is read. At
    /// the body's end the outcome is [`Outcome::Ok`], at an error [`Outcome::Reset`], unless another was reported before;
    /// a body that is dropped early says nothing of the rank, for it is mostly the client that has gone. Then the
    /// booking is freed, at once and not when the body goes.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use bytes::Bytes;
    /// use http_body_util::{BodyExt as _, Full};
    /// use pointsman::answer::AnswerKind;
    /// use pointsman::protocol::{WorkerConfig, WorkerId};
    /// use pointsman::{Prompt, RouteRequest, Router, RouterConfig};
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

    /// As [`Placement::wrap_body`], for a whole response: its `content-type` says how it is read. A status of 429 or 503 is
    /// [`Outcome::Refused`], with `Retry-After` where that is a number of seconds; another one of 500 or above is
    /// [`Outcome::ServerError`].
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

// Bodies of hyper's clients are `Unpin`, others are not: without this each of them would have to be boxed.
pin_project_lite::pin_project! {
    /// A body that holds the placement of its request: see [`Placement::wrap_body`]. Its data is what the body's is,
    /// without a copy where that is [`Bytes`].
    #[derive(Debug)]
    pub struct PlacedBody<B> {
        #[pin]
        body: B,
        follow: Follow,
    }
}

impl<B> PlacedBody<B> {
    /// So much output is expected of the request, by its caller: its blocks count for less and less as it comes, and for
    /// nothing from there on. Leave it out where only a ceiling or a mean is known: an answer that has outlived the mean
    /// has as much before it as any.
    #[must_use]
    pub fn expecting(mut self, output_tokens: u32) -> Self {
        self.follow.expected_tokens = Some(output_tokens);
        self
    }

    /// Requires the answer's end mark: a body that ends without one is [`Outcome::InvalidAnswer`], and one whose error event
    /// has a status of 500 or above is [`Outcome::ServerError`]. For successful answers in OpenAI's shapes.
    #[must_use]
    pub fn requiring_end_mark(mut self) -> Self {
        self.follow.requires_end_mark = true;
        self
    }

    /// Reports no failure of this body: for a request that already counts against another rank.
    #[must_use]
    pub fn without_blame(mut self) -> Self {
        self.follow.reports_failures = false;
        self
    }

    /// Reports how the request went, as [`Placement::outcome`] does, unless failures of this body are not reported.
    pub fn report(&self, outcome: Outcome) {
        if let Some(placement) = self.placement()
            && (self.follow.reports_failures || outcome.is_ok())
        {
            placement.outcome(outcome);
        }
    }

    /// Whether the answer has come to its end mark: see [`AnswerReader::is_complete`].
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.follow.reader.is_complete()
    }

    /// Whether the first token has come: see [`AnswerReader::is_generating`].
    #[must_use]
    pub fn is_generating(&self) -> bool {
        self.follow.reader.is_generating()
    }

    /// The placement, until the body has ended: for reports of the embedder's own, such as a timeout between two frames.
    pub fn placement(&self) -> Option<&Placement> {
        self.follow.placement.as_ref()
    }

    /// What the engine has said of the whole request so far.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.follow.reader.usage()
    }

    /// Tokens of output so far.
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
        // Whoever reads may stop here, and keep the body for long.
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

/// What is to be done for the placement while its answer passes.
#[derive(Debug)]
struct Follow {
    /// None when it is over.
    placement: Option<Placement>,
    kind: AnswerKind,
    reader: AnswerReader,
    /// Blocks of output that have been reported.
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
        // An answer that is not streamed comes when all of it is there: of when its prefill was done it says nothing.
        if self.kind == AnswerKind::Events && self.reader.is_generating() {
            placement.prefill_completed();
        }
        let block_size = u64::from(placement.block_size());
        while (self.output_blocks + 1) * block_size <= self.reader.output_tokens() {
            self.output_blocks += 1;
            let decay = self.expected_tokens.map(|expected| decay(self.output_blocks * block_size, expected));
            let told = placement.output_block(decay);
            debug_assert!(told.is_ok(), "a decay is a share: {told:?}");
        }
        self.tell_cached();
    }

    fn end(&mut self, outcome: Outcome) {
        if self.placement.is_none() {
            return;
        }
        self.reader.end();
        self.tell_cached();
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

    /// What the content says of a body that came to its end.
    fn outcome_of_content(&self) -> Outcome {
        match self.reader.error_status() {
            Some(500..) => Outcome::ServerError,
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

/// How much the output still counts: the share of it that is yet to come.
fn decay(generated: u64, expected: u32) -> f64 {
    let generated = u32::try_from(generated).unwrap_or(u32::MAX);
    (1.0 - f64::from(generated) / f64::from(expected.max(1))).max(0.0)
}
