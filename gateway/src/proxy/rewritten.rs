//! Response body that is rewritten as it passes: cached tokens, and the model name that the client requested.
//!
//! A decode engine counts transferred blocks as cached or not at all. Clients receive the cached tokens of the prefill rank.

use axum::body::{Body, Bytes};
use futures_util::stream::unfold;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};

use crate::formats::handover::CachedTokensRewriter;
use crate::formats::openai::AnsweredModel;
use crate::pools::disaggregation::PrefillTokens;

/// A body with its changes. Their lengths differ from the originals, so that its length is unknown.
struct Rewritten<B> {
    body: B,
    corrected: Option<(CachedTokensRewriter, PrefillTokens)>,
    model: Option<AnsweredModel>,
    has_ended: bool,
}

/// Without tokens and a name, the body passes.
pub(super) fn rewritten<B>(
    body: B,
    is_events: bool,
    tokens: Option<&PrefillTokens>,
    model: Option<AnsweredModel>,
) -> Body
where
    B: http_body::Body<Data = Bytes, Error: Into<axum::BoxError>> + Send + Unpin + 'static,
{
    if tokens.is_none() && model.is_none() {
        return Body::new(body);
    }
    let corrected = tokens.map(|tokens| (CachedTokensRewriter::new(is_events), tokens.clone()));
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
                Some((rewriter, tokens)) => corrected(rewriter, tokens, data).await,
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
async fn corrected(rewriter: &mut CachedTokensRewriter, tokens: &PrefillTokens, data: Option<Bytes>) -> Bytes {
    if data.as_ref().is_none_or(|data| rewriter.needs_prefill(data)) {
        tokens.clone().settled().await;
    }
    match data {
        Some(data) => rewriter.push(data, tokens.cached_tokens()),
        None => rewriter.finish(tokens.cached_tokens()),
    }
}
