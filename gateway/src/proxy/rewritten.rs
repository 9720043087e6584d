//! Response body that is rewritten as it passes: values of the prefill leg, and the model name that the client requested.
//!
//! A decode engine counts transferred blocks as cached or not at all. Clients receive the cached tokens of the prefill rank,
//! and the probabilities of the prompt's tokens, which only that rank computes.

use axum::body::{Body, Bytes};
use futures_util::stream::unfold;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};

use super::prefill_report::Corrections;
use crate::formats::handover::CachedTokensRewriter;
use crate::formats::openai::AnsweredModel;
use crate::pools::disaggregation::PrefillValues;

/// A body with its changes. Their lengths differ from the originals, so that its length is unknown.
struct Rewritten<B> {
    body: B,
    corrected: Option<(CachedTokensRewriter, PrefillValues)>,
    model: Option<AnsweredModel>,
    has_ended: bool,
}

/// Without corrections and a name, the body passes.
pub(super) fn rewritten<B>(
    body: B,
    is_events: bool,
    corrections: Option<&Corrections>,
    model: Option<AnsweredModel>,
) -> Body
where
    B: http_body::Body<Data = Bytes, Error: Into<axum::BoxError>> + Send + Unpin + 'static,
{
    if corrections.is_none() && model.is_none() {
        return Body::new(body);
    }
    let corrected = corrections.map(|Corrections { values, adds_logprobs }| {
        let rewriter = CachedTokensRewriter::new(is_events);
        (if *adds_logprobs { rewriter.adding_logprobs() } else { rewriter }, values.clone())
    });
    let rewritten = Box::new(Rewritten { body, corrected, model, has_ended: false });
    let next = |mut rewritten: Box<Rewritten<B>>| async move { Some((rewritten.next().await?, rewritten)) };
    Body::new(StreamBody::new(unfold(rewritten, next)))
}

impl<B: http_body::Body<Data = Bytes> + Unpin> Rewritten<B> {
    /// The next frame that is not empty; `None` after the last one.
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
            self.has_ended = data.is_none();
            let mut bytes = match &mut self.corrected {
                Some((rewriter, values)) => corrected(rewriter, values, data).await,
                None => data.unwrap_or_default(),
            };
            if let Some(model) = &mut self.model {
                bytes = model.push(bytes);
                if self.has_ended {
                    bytes = [bytes, model.finish()].concat().into();
                }
            }
            if !bytes.is_empty() {
                return Some(Ok(Frame::data(bytes)));
            }
        }
        None
    }
}

/// The bytes for a frame, or for the end of the body. A frame with usage, and the end, wait for the end of the prefill leg.
async fn corrected(rewriter: &mut CachedTokensRewriter, values: &PrefillValues, data: Option<Bytes>) -> Bytes {
    let needs_prefill = data.as_ref().is_none_or(|data| rewriter.needs_prefill(data));
    if needs_prefill && !values.are_known() {
        values.clone().settled().await;
    }
    if let Some(prompt) = values.logprobs() {
        rewriter.set_prompt_logprobs(prompt);
    }
    match data {
        Some(data) => rewriter.push(data, values.cached_tokens()),
        None => rewriter.finish(values.cached_tokens()),
    }
}
