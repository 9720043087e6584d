//! Response body with the model name that the client requested.

use axum::body::{Body, Bytes};
use futures_util::stream::unfold;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};

use crate::formats::openai::AnsweredModel;

/// A body whose model name is replaced as it passes.
struct Renamed {
    body: Body,
    model: AnsweredModel,
    has_ended: bool,
}

/// Without a replacement, the body passes. Otherwise its length is unknown.
pub(super) fn renamed(body: Body, model: Option<AnsweredModel>) -> Body {
    let Some(model) = model else { return body };
    let renamed = Box::new(Renamed { body, model, has_ended: false });
    let next = |mut renamed: Box<Renamed>| async move { Some((renamed.next().await?, renamed)) };
    Body::new(StreamBody::new(unfold(renamed, next)))
}

impl Renamed {
    async fn next(&mut self) -> Option<Result<Frame<Bytes>, axum::Error>> {
        while !self.has_ended {
            let bytes = match self.body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.model.push(data),
                    Err(trailers) => return Some(Ok(trailers)),
                },
                Some(Err(error)) => return Some(Err(error)),
                None => {
                    self.has_ended = true;
                    self.model.finish()
                }
            };
            if !bytes.is_empty() {
                return Some(Ok(Frame::data(bytes)));
            }
        }
        None
    }
}
