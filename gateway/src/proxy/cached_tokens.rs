//! Response body with the values of the prefill leg, and without parameters of transfers.
//!
//! A decode engine counts transferred blocks as cached or not at all. Clients receive the cached tokens of the prefill rank,
//! and the probabilities of the prompt's tokens, which only that rank computes.

use axum::body::{Body, Bytes};
use futures_util::stream::unfold;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};

use super::prefill_report::{Corrections, NextTurn};
use crate::formats::handover::CachedTokensRewriter;
use crate::pools::disaggregation::PrefillValues;

/// A body whose usage is corrected as it passes. The length changes with the digits of the usage, so it is unknown.
pub(super) struct Corrected<B> {
    body: B,
    rewriter: CachedTokensRewriter,
    values: PrefillValues,
    next_turn: Option<NextTurn>,
    has_ended: bool,
}

impl<B> Corrected<B>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<axum::BoxError>,
{
    /// Without corrections, the body passes.
    pub(super) fn body(body: B, is_events: bool, corrections: Option<&Corrections>) -> Body {
        let Some(Corrections { values, adds_logprobs, next_turn }) = corrections.cloned() else {
            return Body::new(body);
        };
        let mut rewriter = CachedTokensRewriter::new(is_events);
        if next_turn.is_some() {
            rewriter = rewriter.taking_parameters();
        }
        if adds_logprobs {
            rewriter = rewriter.adding_logprobs();
        }
        let corrected = Box::new(Self { body, rewriter, values, next_turn, has_ended: false });
        let next = |mut corrected: Box<Self>| async move { Some((corrected.next().await?, corrected)) };
        Body::new(StreamBody::new(unfold(corrected, next)))
    }

    /// The next frame that is not empty; `None` after the last one. A frame with usage, and the end of the body, wait for
    /// the end of the prefill leg.
    async fn next(&mut self) -> Option<Result<Frame<Bytes>, B::Error>> {
        while !self.has_ended {
            let data = match self.body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Some(data),
                    Err(trailers) => return Some(Ok(trailers)),
                },
                Some(Err(error)) => return Some(Err(error)),
                None => None,
            };
            let needs_prefill = data.as_ref().is_none_or(|data| self.rewriter.needs_prefill(data));
            if needs_prefill && !self.values.are_known() {
                self.values.clone().settled().await;
            }
            let cached = self.values.cached_tokens();
            if let Some(prompt) = self.values.logprobs() {
                self.rewriter.set_prompt_logprobs(prompt);
            }
            self.has_ended = data.is_none();
            let bytes = match data {
                Some(data) => self.rewriter.push(data, cached),
                None => self.rewriter.finish(cached),
            };
            if let Some((next_turn, parameters)) = self.next_turn.as_ref().zip(self.rewriter.take_parameters()) {
                next_turn.keep(parameters);
            }
            if !bytes.is_empty() {
                return Some(Ok(Frame::data(bytes)));
            }
        }
        None
    }
}
