//! Resumption of streamed responses whose engine fails after the first token.
//!
//! The resume request is the prompt with the output so far, so that the next engine generates the rest.
//! [`ResumableRequest`] decides whether a request has a sound resumption and builds its body. [`StreamJoiner`] forwards the
//! events of all attempts as one stream: each event once and whole, with the ids of the first attempt. This module is free
//! of I/O; the proxy detects failures and places the resume request.
//!
//! The output so far is text, except for prompts of token ids, whose output ids the client must request
//! (`return_token_ids`). The next engine tokenizes the text again, and may split it into other tokens than the first one
//! generated. Sampling continues with another random state, so a request with a seed is not resumed.

mod chunk;
mod request;
mod stream;
mod unread;

#[cfg(test)]
mod tests;

pub use request::{ResumableRequest, Resume, SentOutput};
pub use stream::{StreamJoiner, StreamState};
