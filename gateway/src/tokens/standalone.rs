//! Local tokenizer of a model for programs without a gateway.

use std::path::Path;
use std::sync::Arc;

use super::local::Local;
use super::meters::TokenMeters;
use super::reason::NoTokens;
use super::{TokensError, wall_clock_s};
use crate::formats::openai::{ClientPrompt, Endpoint, RequestBody};

/// Memory for the tokens of earlier conversations.
const CACHE_BYTES_MAX: u64 = 64 << 20;

/// A tokenizer with its chat template. Calls take milliseconds on the calling thread.
pub struct PromptTokenizer(Local);

/// A prompt without tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTokensError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The tokens are unknown, with the reason as a metric label.
    #[error("the tokens of the prompt are unknown: {0}")]
    Unknown(&'static str),
}

impl From<NoTokens> for NoTokensError {
    fn from(reason: NoTokens) -> Self {
        Self::Unknown(reason.name())
    }
}

impl PromptTokenizer {
    /// Reads the files. Without `chat_template_file` the template beside the tokenizer is used. Blocks: large tokenizers
    /// take a second.
    ///
    /// # Errors
    /// An unusable file.
    pub fn load(tokenizer_file: &Path, chat_template_file: Option<&Path>) -> Result<Self, TokensError> {
        let model = tokenizer_file.display().to_string();
        let meters = Arc::new(TokenMeters::new(&model));
        Local::load(tokenizer_file, chat_template_file, CACHE_BYTES_MAX, wall_clock_s, meters).map(Self)
    }

    /// Tokens of a text, including tokens added around it.
    ///
    /// # Errors
    /// The text is too long, or the tokenizer rejects it.
    pub fn text(&self, text: &str) -> Result<Vec<u32>, NoTokensError> {
        Ok(self.0.text(text)?)
    }

    /// Tokens of the conversation in a chat completion request, a JSON object.
    ///
    /// # Errors
    /// An invalid request, a conversation that the template rejects, or one with images and other media.
    pub fn chat(&self, request: String) -> Result<Vec<u32>, NoTokensError> {
        let invalid = |error: crate::formats::openai::ApiError| NoTokensError::Invalid(error.message);
        match RequestBody::parse(Endpoint::Chat, request.into()).map_err(invalid)?.prompt {
            ClientPrompt::Tokens(ids) => Ok(ids),
            ClientPrompt::Text(text) => self.text(&text),
            ClientPrompt::Chat(parts) => Ok(self.0.chat(&parts)?),
            ClientPrompt::Opaque(reason) => Err(NoTokens::Opaque(reason).into()),
        }
    }
}
