//! Response body with the cached tokens of the prefill leg in its usage.
//!
//! The engine of a decode leg counts transferred blocks as cached. Clients receive what the prefill rank had cached.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use http_body::{Body, Frame};

use crate::handover::CachedTokensRewriter;
use crate::serve::disaggregation::CachedTokens;

/// A body whose usage is corrected as it passes.
pub(super) struct Corrected<B> {
    body: B,
    rewriter: CachedTokensRewriter,
    cached: CachedTokens,
    has_ended: bool,
}

impl<B> Corrected<B> {
    pub(super) fn new(body: B, is_events: bool, cached: CachedTokens) -> Self {
        Self { body, rewriter: CachedTokensRewriter::new(is_events), cached, has_ended: false }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Corrected<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        while !self.has_ended {
            let cached = self.cached.get();
            let bytes = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rewriter.push(data, cached),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    self.has_ended = true;
                    self.rewriter.finish(cached)
                }
            };
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
        }
        Poll::Ready(None)
    }

    // The length changes with the digits of the usage, so it is unknown.
    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}
