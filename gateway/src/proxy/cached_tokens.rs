//! Response body with the values of the prefill leg, and without parameters of transfers.
//!
//! A decode engine counts transferred blocks as cached or not at all. Clients receive the cached tokens of the prefill rank,
//! and the probabilities of the prompt's tokens, which only that rank computes.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use http_body::{Body, Frame};

use super::prefill_report::{Corrections, NextTurn};
use crate::formats::handover::CachedTokensRewriter;
use crate::pools::disaggregation::PrefillValues;

/// A body whose usage is corrected as it passes.
pub(super) struct Corrected<B> {
    body: B,
    rewriter: CachedTokensRewriter,
    values: PrefillValues,
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
    pub(super) fn new(body: B, is_events: bool, Corrections { values, adds_logprobs, next_turn }: Corrections) -> Self {
        let mut rewriter = CachedTokensRewriter::new(is_events);
        if next_turn.is_some() {
            rewriter = rewriter.taking_parameters();
        }
        if adds_logprobs {
            rewriter = rewriter.adding_logprobs();
        }
        Self { body, rewriter, values, next_turn, waiting: None, has_ended: false }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Corrected<B> {
    /// Bytes after the next frame of the body; `None` after the last one.
    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(waiting) = &mut self.waiting {
            ready!(waiting.settled.as_mut().poll(context));
        }
        let is_known = self.values.are_known();
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
        let needs_prefill = data.as_ref().is_none_or(|data| self.rewriter.needs_prefill(data));
        if !is_known && needs_prefill && !was_waiting {
            self.waiting = Some(Waiting { data, settled: Box::pin(self.values.clone().settled()) });
            return self.poll_bytes(context);
        }
        let cached = self.values.cached_tokens();
        if let Some(prompt) = self.values.logprobs() {
            self.rewriter.set_prompt_logprobs(prompt);
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
