//! Local tokenizer of a model for programs without a gateway.

use std::path::Path;
use std::sync::Arc;

use super::local::Local;
use super::meters::TokenMeters;
use super::reason::NoTokens;
use super::wall_clock_s;
use crate::formats::openai::{ClientPrompt, Endpoint, RequestBody};

/// Memory for the tokens of earlier conversations.
const CACHE_BYTES_MAX: u64 = 64 << 20;

/// A tokenizer with its chat template. Calls take milliseconds on the calling thread.
pub struct PromptTokenizer(Local);

impl PromptTokenizer {
    /// Reads the files. Without `chat_template_file` the template beside the tokenizer is used. Blocks: large tokenizers
    /// take a second.
    ///
    /// # Errors
    /// An unusable file.
    pub fn load(tokenizer_file: &Path, chat_template_file: Option<&Path>) -> Result<Self, String> {
        let model = tokenizer_file.display().to_string();
        let meters = Arc::new(TokenMeters::new(&model));
        Local::load(tokenizer_file, chat_template_file, CACHE_BYTES_MAX, wall_clock_s, meters).map(Self)
    }

    /// Tokens of a text, including tokens added around it.
    ///
    /// # Errors
    /// The text is too long, or the tokenizer rejects it.
    pub fn text(&self, text: &str) -> Result<Vec<u32>, String> {
        self.0.text(text).map_err(unknown)
    }

    /// Tokens of the conversation in a chat completion request, a JSON object.
    ///
    /// # Errors
    /// An invalid request, a conversation that the template rejects, or one with images and other media.
    pub fn chat(&self, request: String) -> Result<Vec<u32>, String> {
        match RequestBody::parse(Endpoint::Chat, request.into()).map_err(|error| error.message)?.prompt {
            ClientPrompt::Tokens(ids) => Ok(ids),
            ClientPrompt::Text(text) => self.text(&text),
            ClientPrompt::Chat(parts) => self.0.chat(&parts, None).map_err(unknown),
            ClientPrompt::Opaque(reason) => Err(unknown(NoTokens::of(reason))),
        }
    }
}

fn unknown(reason: NoTokens) -> String {
    format!("the tokens of the prompt are unknown: {}", reason.name)
}
