//! An answer on its way to the client.
//!
//! Owns the body that is passed on, and the placement with it. Promises that a frame in is a frame out, at once; that the
//! booking ends with the answer, however that ends; and that an answer which breaks off never looks whole: the error goes
//! to the server, which cuts the client's connection. Leaves what came before the first byte to the tries.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use pointsman::answer::AnswerKind;
use pointsman::health::Outcome;
use pointsman::{PlacedBody, Placement};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::serve::App;
use crate::serve::metrics::{Account, StreamBreak};

/// Why an answer was cut off. Only the server of connections hears of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Cut {
    /// The worker broke off.
    #[error("the worker broke off: {0}")]
    Broken(hyper::Error),
    /// The worker was silent.
    #[error("the worker was silent for {} ms", .0.as_millis())]
    Idle(Duration),
}

/// A worker's body with its first frame, which was waited for, back in front.
#[derive(Debug)]
pub(super) struct Begun {
    first: Option<Frame<Bytes>>,
    rest: Incoming,
}

impl Begun {
    pub(super) fn new(first: Option<Frame<Bytes>>, rest: Incoming) -> Self {
        Self { first, rest }
    }
}

impl Body for Begun {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + first);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + first);
        }
        hint
    }
}

/// What the client's connection reads.
pub(super) struct Answer {
    app: Arc<App>,
    account: Account,
    /// Absent once it was cut off: the booking and the worker's connection have ended then.
    body: Option<PlacedBody<Begun>>,
    is_streamed: bool,
    idle_max: Duration,
    /// Since when the worker has been silent; absent while it is not, or while nobody listens.
    silent_since: Option<Instant>,
    alarm: Option<Pin<Box<Sleep>>>,
    /// Why it was cut off, until the server hears of it.
    untold: Option<Cut>,
}

impl Answer {
    /// `output_tokens` are expected of it.
    pub(super) fn new(
        app: &Arc<App>,
        account: Account,
        placement: Placement,
        body: Begun,
        kind: AnswerKind,
        output_tokens: Option<u32>,
    ) -> Self {
        let (app, is_streamed) = (Arc::clone(app), kind == AnswerKind::Events);
        let idle_max = Duration::from_millis(app.settings.gateway.idle_timeout_ms);
        let body = placement.wrap_body(body, kind);
        let body = Some(match output_tokens {
            Some(tokens) => body.expecting(tokens),
            None => body,
        });
        let mut answer =
            Self { app, account, body, is_streamed, idle_max, silent_since: None, alarm: None, untold: None };
        answer.look_for_the_end();
        answer
    }

    /// Records when the first token of a stream came.
    fn look_for_the_first_token(&mut self) {
        let has_output = || self.body.as_ref().is_some_and(|body| body.output_tokens() > 0);
        if self.is_streamed && self.account.access.first_token.is_none() && has_output() {
            self.account.access.first_token = Some(self.account.started().elapsed());
        }
    }

    /// Records what the worker reported until now.
    fn record_usage(&mut self) {
        if let Some(body) = &self.body {
            self.account.access.used(body.usage(), body.output_tokens());
        }
    }

    /// Bodies of a length that is known are not asked for more after their last byte.
    fn look_for_the_end(&mut self) {
        if self.body.as_ref().is_some_and(Body::is_end_stream) {
            self.account.complete();
        }
    }

    /// Ends the booking now, and tells the server at its next look: one that hears of an error drops what it has not yet
    /// written, head and all, and it writes whenever a body has nothing for it.
    fn cut(&mut self, why: StreamBreak, cut: Cut, context: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        self.record_usage();
        self.body = None;
        self.account.broke(why);
        if let Some(unsaid) = self.app.broken_streams.may_say(Instant::now()) {
            let request_id = self.account.access.request_id.as_str();
            let (worker, rank) = self.account.access.worker();
            tracing::warn!(request_id, worker, rank, reason = why.name(), unsaid, "an answer was cut off: {cut}");
        }
        self.untold = Some(cut);
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Comes back when the worker has been silent for too long.
    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let since = *self.silent_since.get_or_insert_with(Instant::now);
        let due = since + self.idle_max;
        // One alarm for the whole answer: frames do not move it, it looks again when it rings.
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(due)));
        loop {
            ready!(alarm.as_mut().poll(context));
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            alarm.as_mut().reset(due);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.record_usage();
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(self.untold.take().map(Err)) };
        match Pin::new(body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                self.silent_since = None;
                self.look_for_the_first_token();
                self.look_for_the_end();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => self.cut(StreamBreak::Broken, Cut::Broken(error), context),
            Poll::Ready(None) => {
                self.account.complete();
                Poll::Ready(None)
            }
            Poll::Pending => {
                ready!(self.poll_silence(context));
                // The body would say that the connection broke.
                if let Some(placement) = self.body.as_ref().and_then(PlacedBody::placement) {
                    placement.outcome(Outcome::Timeout);
                }
                let cut = Cut::Idle(self.idle_max);
                self.cut(StreamBreak::Idle, cut, context)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::new, Body::size_hint)
    }
}
