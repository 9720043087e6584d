//! Anthropic Messages: conversion to OpenAI chats and back.
//!
//! [`chat_body`] converts a request, [`message`] a complete response, [`StreamTranslator`] a streamed one, and
//! [`error_body`] an error. All are pure. [`serve`](crate::app) routes and sends the converted chat.
//!
//! # Differences from the Messages API
//!
//! - `cache_control`, `service_tier`, `context_management` and unknown fields of the body have no effect. Engines cache
//!   every prefix.
//! - `thinking` is mapped as vLLM does: `disabled` is no effort, a budget is one of tokens, and `adaptive` is left to the
//!   model. SGLang gets the template variables `enable_thinking` and `thinking`.
//! - Thinking blocks of earlier turns become the reasoning of their message. Redacted ones are dropped, because no
//!   engine can decrypt them. Signatures are neither verified nor meaningful.
//! - `is_error` of a tool result has no counterpart. The text of the result is forwarded.
//! - Server tools, MCP servers, files and PDF documents are rejected with their name.

mod blocks;
mod error;
mod request;
mod response;
mod stream;

pub(crate) use blocks::BILLING_HEADER;
pub(crate) use error::error_response;
pub use error::{Known, error_body, error_message, error_type, in_anthropic_words};
pub use request::{Conversion, ConvertedChat, Purpose, chat_body, converted};
pub use response::message;
pub use stream::StreamTranslator;

#[cfg(test)]
mod tests;
