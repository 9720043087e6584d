//! Response body with the cached tokens of the prefill leg in its usage, and without parameters of transfers.
//!
//! A decode engine counts transferred blocks as cached or not at all. Clients receive the cached tokens of the prefill rank.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use http_body::{Body, Frame};

use super::split::{Corrections, NextTurn};
use crate::handover::CachedTokensRewriter;
use crate::serve::disaggregation::CachedTokens;

/// A body whose usage is corrected as it passes.
pub(super) struct Corrected<B> {
    body: B,
    rewriter: CachedTokensRewriter,
    cached: CachedTokens,
    next_turn: Option<NextTurn>,
    waiting: Option<Waiting>,
    has_ended: bool,
}

/// A frame with usage, or the end of the body, that waits for the end of the prefill leg.
struct Waiting {
    data: Option<Bytes>,
    settled: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl<B> Corrected<B> {
    pub(super) fn new(body: B, is_events: bool, Corrections { cached, next_turn }: Corrections) -> Self {
        let mut rewriter = CachedTokensRewriter::new(is_events);
        if next_turn.is_some() {
            rewriter = rewriter.taking_parameters();
        }
        Self { body, rewriter, cached, next_turn, waiting: None, has_ended: false }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Corrected<B> {
    /// Bytes after the next frame of the body; `None` after the last one.
    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(waiting) = &mut self.waiting {
            ready!(waiting.settled.as_mut().poll(context));
        }
        let cached = self.cached.get();
        let (data, was_waiting) = match self.waiting.take() {
            Some(waiting) => (waiting.data, true),
            None => match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => (Some(data), false),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => (None, false),
            },
        };
        let needs_cached = data.as_ref().is_none_or(|data| self.rewriter.needs_cached_tokens(data));
        if cached.is_none() && needs_cached && !was_waiting {
            self.waiting = Some(Waiting { data, settled: Box::pin(self.cached.clone().settled()) });
            return self.poll_bytes(context);
        }
        let bytes = match data {
            Some(data) => self.rewriter.push(data, cached),
            None => {
                self.has_ended = true;
                self.rewriter.finish(cached)
            }
        };
        if let Some((next_turn, parameters)) = self.next_turn.as_ref().zip(self.rewriter.take_parameters()) {
            next_turn.keep(parameters);
        }
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Corrected<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        while !self.has_ended {
            match ready!(self.poll_bytes(context)) {
                Some(Ok(frame)) if frame.data_ref().is_some_and(Bytes::is_empty) => {}
                next => return Poll::Ready(next),
            }
        }
        Poll::Ready(None)
    }

    // The length changes with the digits of the usage, so it is unknown.
    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}
