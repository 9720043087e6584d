//! Response stream from a worker to the client.
//!
//! Forwards each frame without buffering. The booking ends with the response, however it ends. A broken response never
//! looks complete: the error makes the server cut the client's connection. The attempts handle everything before the
//! first byte. A stream with a [`Migration`] continues at another rank after the failure of its engine.

use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use pointsman::{AnswerKind, Outcome, PlacedBody};
use tokio::time::{Instant, Sleep, sleep_until};

use super::attempts::WorkerResponse;
use super::begin::ResponseStart;
use super::hints::SessionCall;
use super::migration::{Migration, Recovery, Resumed};
use super::prefill_report::PrefillReport;
use crate::observe::requests::StreamBreak;
use crate::pools::disaggregation::PrefillResult;
use crate::pools::workers::WorkerRequest;
use crate::proxy::account::Account;
use crate::proxy::context::RequestContext;

/// Reason of a cut-off response, seen only by the HTTP server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cut {
    /// The worker broke off.
    #[error("the worker closed the connection early: {0}")]
    Broken(String),
    /// The worker was silent.
    #[error("the worker sent nothing for {} ms", .0.as_millis())]
    Idle(Duration),
    /// The worker ended the stream with a server error.
    #[error("the worker ended the stream with an error")]
    Failed,
    /// The body ended without its end mark.
    #[error("the response ended without its end mark")]
    Incomplete,
}

impl Cut {
    fn reason(&self) -> StreamBreak {
        match self {
            Self::Broken(_) => StreamBreak::Broken,
            Self::Failed => StreamBreak::Error,
            Self::Idle(_) => StreamBreak::Idle,
            Self::Incomplete => StreamBreak::Incomplete,
        }
    }

    fn outcome(&self) -> Outcome {
        match self {
            Self::Broken(_) => Outcome::Reset,
            Self::Idle(_) => Outcome::Timeout,
            Self::Failed => Outcome::ServerError,
            Self::Incomplete => Outcome::InvalidAnswer,
        }
    }
}

/// Body polled by the client's connection, with the worker's body inside.
pub(crate) struct Answer<B> {
    context: Arc<RequestContext>,
    /// Absent while the response is resumed.
    account: Option<Account>,
    /// What follows after a failure of the engine.
    recovery: Recovery,
    /// Absent after a failure: the booking and the worker's connection have ended.
    body: Option<PlacedBody<B>>,
    /// The attempt at the worker.
    sent: WorkerRequest,
    /// Kind of validation, if any.
    checked: Option<AnswerKind>,
    idle_max: Duration,
    /// Start of the worker's silence; absent while it sends or while the client does not read.
    silent_since: Option<Instant>,
    alarm: Option<Pin<Box<Sleep>>>,
    /// What follows an absent body without a resumption: last bytes, or the reason of a cut for the server.
    pending: Option<Result<Bytes, Cut>>,
    /// Prefill of the request, for a model with a prefill pool.
    prefill: Option<PrefillReport>,
}

impl<B: Body<Data = Bytes, Error: Display> + From<ResponseStart> + Unpin> Answer<B> {
    pub(crate) fn new(
        context: &Arc<RequestContext>,
        account: Account,
        begin: WorkerResponse<impl Into<B>>,
        kind: AnswerKind,
    ) -> Self {
        let WorkerResponse { placement, sent, head: _, body, checked, output_tokens, is_reported, prefill } = begin;
        let context = Arc::clone(context);
        let idle_max = Duration::from_millis(context.settings.gateway.idle_timeout_ms);
        let mut body = placement.wrap_body(body.into(), kind);
        if let Some(tokens) = output_tokens {
            body = body.expecting(tokens);
        }
        if checked.is_some() {
            body = body.requiring_end_mark();
        }
        if is_reported {
            body = body.without_blame();
        }
        if prefill.as_ref().is_some_and(|prefill| prefill.result == PrefillResult::Remote) {
            body = body.without_cached_tokens();
        }
        let mut answer = Self {
            context,
            account: Some(account),
            recovery: Recovery::None,
            body: Some(body),
            sent,
            checked,
            idle_max,
            silent_since: None,
            alarm: None,
            pending: None,
            prefill,
        };
        if answer.has_whole_body() {
            answer.complete();
        }
        answer
    }

    /// The same, but the stream continues at another rank after a failure.
    pub(super) fn resumable(mut self, migration: Box<Migration>) -> Self {
        self.recovery = Recovery::Possible(migration);
        self
    }

    fn end_attempt(&mut self, cut: &Cut) {
        self.record_usage();
        self.body = None;
        self.sent.ended(cut.outcome().label());
    }

    /// Whether a required end mark is missing.
    fn is_incomplete(&self) -> bool {
        self.checked.is_some() && self.body.as_ref().is_some_and(|body| !body.is_complete())
    }

    /// Records a forwarded frame.
    fn received(&mut self) {
        self.silent_since = None;
        self.sent.received();
        let is_stream = self.checked == Some(AnswerKind::Events);
        if is_stream && self.body.as_ref().is_some_and(PlacedBody::is_generating) {
            self.sent.first_token();
            let Some(account) = &mut self.account else { return };
            account.first_token(true);
        }
    }

    /// Ends the booking now, and the response unless it can be resumed.
    #[cold]
    fn fail(&mut self, cut: Cut) {
        if let (Cut::Failed, Some(body)) = (&cut, &self.body) {
            body.report(Outcome::ServerError);
        }
        self.end_attempt(&cut);
        match (std::mem::take(&mut self.recovery), self.account.take()) {
            (Recovery::Possible(migration), Some(account)) => {
                self.recovery = Recovery::Running(migration.resumed(Arc::clone(&self.context), account));
                self.pending = Some(Err(cut));
            }
            (_, account) => {
                self.account = account;
                self.give_up(cut);
            }
        }
    }

    /// Waits for another rank that continues the stream.
    #[cold]
    fn poll_resumption(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Recovery::Running(resumption) = &mut self.recovery else { return Poll::Ready(()) };
        let (account, migration, resumed) = ready!(resumption.as_mut().poll(context));
        self.recovery = Recovery::None;
        match resumed {
            Resumed::By(begin) => {
                *self = Self::new(&self.context, account, *begin, AnswerKind::Events).resumable(migration);
            }
            Resumed::Ended(bytes) => {
                self.account = Some(account);
                self.pending = (!bytes.is_empty()).then_some(Ok(bytes));
            }
            Resumed::Failed => {
                self.account = Some(account);
                if let Some(Err(cut)) = self.pending.take() {
                    self.give_up(cut);
                }
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        Poll::Ready(())
    }

    /// Ends the response with an error, which the next poll reports. The caller is pending in between: a server that
    /// receives an error drops unwritten data, including the head, and it flushes whenever a body is pending.
    fn give_up(&mut self, cut: Cut) {
        let reason = cut.reason();
        if let Some(account) = &mut self.account {
            account.broke(reason);
            if let Some(suppressed) = self.context.meters.broken_streams.next_line(Instant::now()) {
                let request_id = account.access.request_id.as_str();
                let (worker, rank) = account.access.worker();
                tracing::warn!(request_id, worker, rank, reason = reason.name(), suppressed, "response cut off: {cut}");
            }
        }
        self.pending = Some(Err(cut));
    }

    fn has_whole_body(&self) -> bool {
        self.body.as_ref().is_some_and(Body::is_end_stream)
    }

    /// Records a frame for a resumption, and replaces its data by the bytes for the client. Returns whether any are left.
    #[inline]
    fn joins(&mut self, frame: &mut Frame<Bytes>) -> bool {
        let (Recovery::Possible(migration), Some(data)) = (&mut self.recovery, frame.data_mut()) else { return true };
        let text = self.body.as_ref().and_then(PlacedBody::repeated_text);
        if text.is_some_and(|text| migration.joiner.push_text(data, text)) {
            return true;
        }
        *data = migration.joiner.push(std::mem::take(data));
        if migration.joiner.has_failed() {
            self.fail(Cut::Failed);
        }
        !data.is_empty()
    }

    /// Ends the response. Returns the last bytes of a stream that could have been resumed.
    fn end(&mut self) -> Option<Frame<Bytes>> {
        self.complete();
        let Recovery::Possible(mut migration) = std::mem::take(&mut self.recovery) else { return None };
        Some(migration.joiner.finish()).filter(|rest| !rest.is_empty()).map(Frame::data)
    }

    /// Resolves after the idle timeout of the worker.
    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let since = *self.silent_since.get_or_insert_with(Instant::now);
        let due = since + self.idle_max;
        // One timer for the whole response: frames do not reset it; it re-checks when it fires.
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

impl<B> Answer<B> {
    fn complete(&mut self) {
        let body = self.body.as_ref().filter(|_| self.checked.is_some());
        let error = body.and_then(PlacedBody::error_status);
        let is_stop = body.is_some_and(PlacedBody::is_stop);
        if let Some(account) = &mut self.account {
            account.engine_session.take().filter(|_| is_stop).iter().for_each(SessionCall::stopped);
            match error {
                Some(429 | 500..) => account.broke(StreamBreak::Error),
                Some(status) => account.complete_as(status),
                None => account.complete(),
            }
        }
        if let Some(prefill) = &mut self.prefill {
            prefill.decode_abort.ended();
        }
        match error {
            Some(429 | 500..) => self.sent.ended(Outcome::ServerError.label()),
            Some(_) => self.sent.ended("client_error"),
            None => self.sent.completed(),
        }
    }

    /// Records the usage in the access log. Cached tokens are those of the prefill leg, if there is one.
    fn record_usage(&mut self) {
        let Some(body) = &self.body else { return };
        let mut usage = body.usage();
        if let (Some(prefill), Some(usage)) = (&self.prefill, &mut usage)
            && prefill.result == PrefillResult::Remote
        {
            usage.cached_tokens = prefill.tokens.cached_tokens();
        }
        if let Some(account) = &mut self.account {
            account.used(usage, body.output_tokens());
        }
    }
}

impl<B> Drop for Answer<B> {
    fn drop(&mut self) {
        // Clients close the connection at the end mark.
        if self.checked.is_some() && self.body.as_ref().is_some_and(PlacedBody::is_complete) {
            self.complete();
        }
        self.record_usage();
    }
}

impl<B: Body<Data = Bytes, Error: Display> + From<ResponseStart> + Unpin> Body for Answer<B> {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        loop {
            let Some(body) = &mut self.body else {
                if matches!(self.recovery, Recovery::Running(_)) {
                    ready!(self.poll_resumption(context));
                    continue;
                }
                return Poll::Ready(self.pending.take().map(|pending| pending.map(Frame::data)));
            };
            let cut = match Pin::new(body).poll_frame(context) {
                Poll::Ready(Some(Ok(mut frame))) => {
                    self.received();
                    // Bodies of known length are not polled after their last byte.
                    let is_last = self.has_whole_body();
                    if is_last && self.is_incomplete() {
                        Cut::Incomplete
                    } else {
                        if is_last {
                            self.complete();
                        }
                        if self.joins(&mut frame) {
                            return Poll::Ready(Some(Ok(frame)));
                        }
                        continue;
                    }
                }
                Poll::Ready(Some(Err(error))) => Cut::Broken(error.to_string()),
                Poll::Ready(None) if self.is_incomplete() => Cut::Incomplete,
                Poll::Ready(None) => return Poll::Ready(self.end().map(Ok)),
                Poll::Pending => {
                    ready!(self.poll_silence(context));
                    // The body itself would report a broken connection.
                    if let Some(body) = &self.body {
                        body.report(Outcome::Timeout);
                    }
                    Cut::Idle(self.idle_max)
                }
            };
            self.fail(cut);
            if !matches!(self.recovery, Recovery::Running(_)) {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    /// Later attempts change the end and the length of a stream.
    fn is_end_stream(&self) -> bool {
        matches!(self.recovery, Recovery::None) && self.has_whole_body()
    }

    fn size_hint(&self) -> SizeHint {
        let body = self.body.as_ref().filter(|_| matches!(self.recovery, Recovery::None));
        body.map_or_else(SizeHint::new, Body::size_hint)
    }
}
