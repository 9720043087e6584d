//! Reasons for a failed request.

use std::time::Duration;

use hyper::StatusCode;

use crate::sse::EventTooLong;

/// Reasons for a missing or incomplete response. The text of a failure is its key in the figures of a run.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The connection failed.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The connection broke.
    #[error("connection closed early: {0}")]
    Broken(String),
    /// The response has another status than 200.
    #[error("status {}{}", status.as_u16(), in_brackets(code.as_deref()))]
    Status {
        /// Status of the response.
        status: StatusCode,
        /// Code or type of the error, if any.
        code: Option<String>,
    },
    /// The response is no event stream.
    #[error("the response is not an event stream")]
    NotStreamed,
    /// The request timed out.
    #[error("no response within {} s", .0.as_secs())]
    Timeout(Duration),
    /// The stream ended too early.
    #[error("the stream ended without [DONE]")]
    Truncated,
    /// The stream contained no token.
    #[error("the stream contained no token")]
    NoToken,
    /// The stream contained an error.
    #[error("error in the stream{}", in_brackets(.0.as_deref()))]
    InStream(Option<String>),
    /// The stream contained an invalid chunk.
    #[error("an event is not a valid chunk")]
    Chunk,
    /// An event exceeded the maximum size.
    #[error("an event exceeds the maximum size")]
    EventTooLong,
    /// The answer exceeded the maximum length.
    #[error("the response exceeds the maximum length")]
    Endless,
}

impl From<EventTooLong> for Failure {
    fn from(_: EventTooLong) -> Self {
        Self::EventTooLong
    }
}

fn in_brackets(code: Option<&str>) -> String {
    code.map(|code| format!(" ({code})")).unwrap_or_default()
}
