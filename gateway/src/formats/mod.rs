//! Formats: bytes to types and back.
//!
//! OpenAI's and Anthropic's requests, responses and errors, the bodies of the legs of prefill and decode pools, resumed
//! streams, and the state of the live page. Pure: no I/O, no clock, and no knowledge of what a request is routed by.

/// Names of JSON fields.
macro_rules! names {
    ($($name:ident)*) => { &[$(stringify!($name)),*] };
}

pub mod anthropic;
pub(crate) mod events;
pub mod handover;
mod json;
pub mod live;
pub mod migration;
pub mod openai;
pub mod stream_error;
