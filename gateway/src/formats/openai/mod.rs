//! OpenAI-compatible requests, headers and errors.
//!
//! [`RequestBody`] parses the body fields used for routing and rewrites the body, [`request_options`] parses request
//! options from headers, and [`ApiError`] formats errors. All other parts of a body are forwarded unchanged; invalid
//! bodies are rejected with a reason. [`prompt`](crate::tokens) computes tokens and [`serve`](crate::app) sends
//! requests.

mod answered_model;
mod body;
mod client_prompt;
mod endpoint;
mod error;
mod fields;
mod form;
mod headers;
mod prompt;
mod rejection;
mod responses;
mod session;
mod work;

pub use answered_model::AnsweredModel;
pub use body::{Edits, RequestBody};
pub use client_prompt::{ChatParts, ChatStyle, ClientPrompt, MediaName};
pub use endpoint::{BodyForm, Endpoint};
pub(crate) use error::ErrorCode;
pub use error::{ApiError, ErrorType, Limit};
pub(crate) use fields::{checked_text, is_deeper_than};
pub(crate) use headers::{API_KEY, stripped_headers};
pub use headers::{Authorization, ToWorker, request_id, request_options, to_client, to_worker};
pub use session::Session;
pub(crate) use session::{RESERVED, hashed};
pub use work::{FurtherPrompts, FurtherWork};

#[cfg(test)]
mod tests;
