//! What clients ask and are told, in OpenAI's shapes.
//!
//! Owns which parts of a request's body routing reads ([`Ask`]), how the body is changed where routing must change it,
//! what headers ask for ([`RequestTerms`]) and which of them pass, and errors ([`ApiError`]). Promises that everything
//! else of a body passes through byte for byte, and that a body which is not understood is refused in words. Leaves
//! tokens to [`prompt`](crate::prompt) and sending to [`serve`](crate::serve).

mod ask;
mod error;
mod fields;
mod headers;
mod prompt;
mod responses;

pub use ask::{Ask, AskedPrompt, ChatParts, Edits, Endpoint};
pub use error::{ApiError, ErrorType};
pub use headers::{Authorization, RequestTerms, ToWorker, request_id, to_client, to_worker};

#[cfg(test)]
mod tests;
