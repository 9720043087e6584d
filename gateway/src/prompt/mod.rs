//! Tokens of prompts for routing.
//!
//! For one model, selects the source of tokens: the request, the local tokenizer, the engine, or none. Missing tokens
//! never fail a request; it is routed by load alone. No tokenization runs on serving threads. The router hashes the
//! ids, which are dropped with the request except for those in `cache`.

mod cache;
mod chat;
mod chunks;
mod engine;
mod engine_breaker;
mod files;
mod format;
#[cfg(test)]
pub(crate) mod hostile;
mod local;
mod media;
mod meters;
mod parity;
mod pool;
mod python;
mod reason;
mod standalone;
mod template;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pointsman::hashing::MmSpan;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::openai::{ChatParts, ClientPrompt, MediaName};
use crate::settings::{TokenSourceChoice, TokensSettings};
use crate::upstream::Upstream;
use engine::{Client, Engine, TokenizeInput};
use local::Local;
use media::Naming;
pub use media::lengths::LengthReport;
use meters::TokenMeters;
use parity::Parity;
use pool::Pool;
use reason::NoTokens;
pub use standalone::{NoTokensError, PromptTokenizer};

/// Source of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The request itself.
    Request,
    /// The gateway's tokenizer.
    Local,
    /// A worker's `/tokenize`.
    Engine,
    /// No tokens.
    None,
}

impl TokenSource {
    /// Label value in metrics.
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

/// Tokens of a prompt; empty without tokens.
#[derive(Clone, Debug)]
pub struct PromptTokens<'a> {
    /// Token ids.
    pub ids: Cow<'a, [u32]>,
    /// Their source.
    pub source: TokenSource,
    /// Images and other media of the prompt.
    pub media: PromptMedia,
}

/// Media of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PromptMedia {
    /// Positions of the items in the tokens.
    pub spans: Vec<MmSpan>,
    /// First token that matches no cache, because an item is not known exactly. The tokens from here on are an estimate.
    pub unknown_from: Option<usize>,
    /// Receives the prompt length reported by the engine.
    pub report: Option<LengthReport>,
    /// Names to be inserted into the messages.
    pub names: Vec<MediaName>,
}

impl PromptTokens<'_> {
    /// Limits an estimated length: an estimate is no reason for a rejection.
    #[must_use]
    pub fn with_estimate_up_to(mut self, tokens_max: Option<u32>) -> Self {
        let PromptMedia { spans, unknown_from, .. } = &mut self.media;
        if let (Some(start), Some(tokens_max)) = (*unknown_from, tokens_max) {
            let length = start.max(tokens_max as usize);
            if self.ids.len() > length {
                self.ids.to_mut().truncate(length);
                spans.retain_mut(|span| {
                    span.end = span.end.min(length);
                    span.start < span.end
                });
            }
        }
        self
    }
}

/// Returns the endpoint of an eligible worker that satisfies the predicate, in rotation; `None` without one. A given
/// endpoint is excluded.
pub type AnyWorker = Arc<dyn Fn(Option<&str>, &dyn Fn(&str) -> bool) -> Option<String> + Send + Sync>;

/// Error while loading the tokenizer of a model.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The source is `local` without a file.
    #[error("tokens.source is local, must come with tokens.tokenizer_file")]
    NoTokenizer,
    /// Unreadable file.
    #[error("{} cannot be read: {error}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// System error.
        error: std::io::Error,
    },
    /// Invalid `tokenizer.json`.
    #[error("{} is no tokenizer: {error}", path.display())]
    Tokenizer {
        /// Path of the file.
        path: PathBuf,
        /// Parser error.
        error: String,
    },
    /// Invalid chat template.
    #[error("{} cannot be used: {error}", path.display())]
    Template {
        /// Path of the file.
        path: PathBuf,
        /// Parser error.
        error: String,
    },
    /// Unknown placeholder.
    #[error("tokens.media_placeholder is {0}, must be an added token of the tokenizer")]
    Placeholder(String),
    /// Failure to start tokenizer threads.
    #[error("no thread can be started: {0}")]
    Threads(std::io::Error),
}

/// Tokenization for one model.
pub struct Tokens {
    source: Source,
    meters: Arc<TokenMeters>,
    parity: Option<JoinHandle<()>>,
    /// Whether images in data URLs receive names.
    names_media: bool,
}

enum Source {
    Local {
        local: Arc<Local>,
        pool: Arc<Pool>,
    },
    Engine {
        engine: Box<Engine>,
        model: String,
        /// Whether the engine is used only after a successful response.
        is_tried: bool,
        /// Whether the missing response was logged.
        is_given_up: AtomicBool,
    },
    None,
}

impl Tokens {
    /// Loads the tokenizer of the model if configured. `upstream_name` is the model name at the workers, also used in
    /// metrics and logs here. The first query to a worker happens with the first prompt or comparison.
    ///
    /// Metrics use the recorder that is installed now.
    ///
    /// # Errors
    /// An unusable file.
    pub async fn start(
        settings: &TokensSettings,
        upstream_name: &str,
        upstream: Upstream,
        any_worker: AnyWorker,
    ) -> Result<Self, TokensError> {
        let meters = Arc::new(TokenMeters::new(upstream_name));
        let within = Duration::from_millis(settings.engine_timeout_ms);
        let pool = || Pool::start(settings.threads).map(Arc::new).map_err(TokensError::Threads);
        let mut parity = None;
        let source = match (settings.source, &settings.tokenizer_file) {
            (TokenSourceChoice::None, _) => Source::None,
            (TokenSourceChoice::Engine, _) | (TokenSourceChoice::Auto, None) => Source::Engine {
                engine: Box::new(Engine::new(Client::new(upstream, upstream_name, within, pool()?), any_worker)),
                model: upstream_name.to_owned(),
                is_tried: settings.source == TokenSourceChoice::Auto,
                is_given_up: AtomicBool::new(false),
            },
            (TokenSourceChoice::Local, None) => return Err(TokensError::NoTokenizer),
            (TokenSourceChoice::Local | TokenSourceChoice::Auto, Some(file)) => {
                let local = Arc::new(load(file, settings, upstream_name, &meters).await?);
                let pool = pool()?;
                if settings.parity_check {
                    let client = Client::new(upstream, upstream_name, within, Arc::clone(&pool));
                    let (local, pool, meters) = (Arc::clone(&local), Arc::clone(&pool), Arc::clone(&meters));
                    let model = upstream_name.to_owned();
                    let compared = Parity { local, pool, client, any_worker, meters, model };
                    parity = Some(tokio::spawn(compared.watch()));
                }
                Source::Local { local, pool }
            }
        };
        let tokens = Self { source, meters, parity, names_media: settings.media_uuids };
        tokens.meters.source(tokens.source());
        match &tokens.source {
            Source::None => warn_of_none(upstream_name),
            Source::Engine { .. } => {
                tracing::info!(model = upstream_name, "workers tokenize prompts if they support it");
            }
            Source::Local { .. } => {}
        }
        Ok(tokens)
    }

    /// Token source of prompts without token ids. With source `auto` and no tokenizer it is `None` until a worker has
    /// responded.
    #[must_use]
    pub fn source(&self) -> TokenSource {
        match &self.source {
            Source::Local { .. } => TokenSource::Local,
            Source::Engine { engine, is_tried, .. } if !is_tried || engine.is_proven() => TokenSource::Engine,
            Source::Engine { .. } | Source::None => TokenSource::None,
        }
    }

    /// Tokens of the prompt. `cache_salt` is the salt of the request, included in the names of its images. An adapter has
    /// the tokens of its base model.
    ///
    /// Cancel-safe: dropping the future removes the prompt from the queue.
    pub async fn of<'a>(&self, prompt: &'a ClientPrompt, cache_salt: Option<&str>) -> PromptTokens<'a> {
        if let ClientPrompt::Tokens(ids) = prompt {
            self.meters.with_tokens(TokenSource::Request);
            return PromptTokens {
                ids: Cow::Borrowed(ids),
                source: TokenSource::Request,
                media: PromptMedia::default(),
            };
        }
        let begun = Instant::now();
        match self.compute(prompt, cache_salt).await {
            Ok((ids, media)) => {
                let source = self.source();
                self.meters.record_time(source, begun.elapsed());
                if media.unknown_from.is_some() {
                    self.meters.media_prefix(source);
                } else {
                    self.meters.with_tokens(source);
                }
                PromptTokens { ids: Cow::Owned(ids), source, media }
            }
            Err(reason) => {
                self.meters.without_tokens(reason.name());
                PromptTokens { ids: Cow::Borrowed(&[]), source: TokenSource::None, media: PromptMedia::default() }
            }
        }
    }

    async fn compute(
        &self,
        prompt: &ClientPrompt,
        cache_salt: Option<&str>,
    ) -> Result<(Vec<u32>, PromptMedia), NoTokens> {
        let text_only = |ids| (ids, PromptMedia::default());
        let input = match prompt {
            ClientPrompt::Tokens(ids) => return Ok(text_only(ids.clone())),
            ClientPrompt::Opaque(reason) => return Err(NoTokens::Opaque(reason)),
            ClientPrompt::Text(text) => TokenizeInput::Text(text),
            ClientPrompt::Chat(parts) => TokenizeInput::Chat(parts),
        };
        match &self.source {
            Source::None => Err(NoTokens::Off),
            Source::Local { local, pool } => match input {
                TokenizeInput::Text(text) => tokenise(local, pool, text).await.map(text_only),
                TokenizeInput::Chat(parts) => self.conversation(local, pool, parts, cache_salt).await,
            },
            Source::Engine { engine, model, is_given_up, .. } => {
                let before = self.source();
                let answer = engine.tokens(input).await;
                if before != self.source() {
                    self.meters.source(self.source());
                }
                // Logged once, and only for an engine without any successful response.
                if self.source() == TokenSource::None
                    && engine.is_paused()
                    && !is_given_up.swap(true, Ordering::Relaxed)
                {
                    warn_of_none(model);
                }
                answer.map(text_only)
            }
        }
    }

    async fn conversation(
        &self,
        local: &Arc<Local>,
        pool: &Pool,
        parts: &ChatParts,
        cache_salt: Option<&str>,
    ) -> Result<(Vec<u32>, PromptMedia), NoTokens> {
        match chat::refused(parts) {
            // The data of media is removed before the length is checked again.
            Err(NoTokens::TooLong) if media::may_occur(parts) => {}
            checked => checked?,
        }
        let (local, parts) = (Arc::clone(local), parts.clone());
        let (is_on, salt) = (self.names_media, cache_salt.filter(|salt| !salt.is_empty()).map(str::to_owned));
        let conversation = pool.run(move || local.conversation(&parts, Naming { is_on, salt: salt.as_deref() }));
        conversation.await.map(|(ids, media)| (ids, media.unwrap_or_default()))
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        if let Some(parity) = &self.parity {
            parity.abort();
        }
    }
}

async fn tokenise(local: &Arc<Local>, pool: &Pool, text: &str) -> Result<Vec<u32>, NoTokens> {
    // Checked before the copy.
    if text.len() > chat::PROMPT_BYTES_MAX {
        return Err(NoTokens::TooLong);
    }
    let (local, text) = (Arc::clone(local), text.to_owned());
    pool.run(move || local.text(&text)).await
}

async fn load(
    tokenizer_file: &Path,
    settings: &TokensSettings,
    model: &str,
    meters: &Arc<TokenMeters>,
) -> Result<Local, TokensError> {
    let (file, template) = (tokenizer_file.to_owned(), settings.chat_template_file.clone());
    let (bytes_max, meters) = (settings.cache_bytes_max, Arc::clone(meters));
    let reading =
        tokio::task::spawn_blocking(move || Local::load(&file, template.as_deref(), bytes_max, wall_clock_s, meters));
    let failed = |error: tokio::task::JoinError| {
        let path = tokenizer_file.to_owned();
        TokensError::Tokenizer { path, error: error.to_string() }
    };
    let mut local = reading.await.map_err(failed)??;
    if let Some(placeholder) = &settings.media_placeholder
        && !local.set_placeholder(placeholder)
    {
        return Err(TokensError::Placeholder(placeholder.clone()));
    }
    if !local.has_template() {
        tracing::warn!(model, "chats are routed by load only: the model has no chat template");
    }
    if !local.is_cached() && bytes_max > 0 {
        tracing::warn!(model, "every conversation is tokenized from its beginning: this tokenizer has no cut points");
    }
    Ok(local)
}

fn warn_of_none(model: &str) {
    tracing::warn!(model, "prompts without token ids are routed by load only");
}

/// Seconds since 1970, for templates with the current date.
#[expect(clippy::disallowed_methods, reason = "chat templates render the date, which needs the wall clock")]
fn wall_clock_s() -> u64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
