//! Tokens to route by.
//!
//! Owns, for one model, where the tokens of a prompt come from: the request, a tokenizer of its own, the engine's, or
//! nowhere. Promises that a request never fails for want of tokens, only goes by load alone, and that nothing is
//! tokenised on the threads that serve. Leaves hashing and routing to the router; ids are dropped with the request, but
//! for those of the beginnings that `cache` keeps.

mod cache;
mod chat;
mod chunks;
mod engine;
mod engine_breaker;
mod files;
mod format;
mod local;
mod meters;
mod parity;
mod pool;
mod python;
mod reason;
mod template;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::openai::AskedPrompt;
use crate::settings::{TokenSourceChoice, TokensSettings};
use crate::upstream::Upstream;
use engine::{Client, Engine, Question};
use local::Local;
use meters::Meters;
use parity::Parity;
use pool::Pool;
use reason::NoTokens;

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

/// Names the endpoint of a worker in service for which the predicate holds, another one each time; `None` while there is
/// none. Given an endpoint, it names one of the others.
pub type AnyWorker = Arc<dyn Fn(Option<&str>, &dyn Fn(&str) -> bool) -> Option<String> + Send + Sync>;

/// Why a model's tokens cannot be had as its settings say.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The source is `local`, and there is nothing to read.
    #[error("tokens.source is local, must come with tokens.tokenizer_file")]
    NoTokenizer,
    /// A file that cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A `tokenizer.json` that is none.
    #[error("{} is no tokenizer: {error}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// A chat template that cannot be used.
    #[error("{} cannot be used: {error}", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// No threads to tokenise on.
    #[error("no thread can be started: {0}")]
    Threads(std::io::Error),
}

/// One model's tokens.
pub struct Tokens {
    source: Source,
    meters: Arc<Meters>,
    parity: Option<JoinHandle<()>>,
}

enum Source {
    Local {
        local: Arc<Local>,
        pool: Arc<Pool>,
    },
    Engine {
        engine: Box<Engine>,
        model: String,
        /// Whether the engine is used only if it answers.
        is_tried: bool,
        /// Whether it was said that it does not.
        is_given_up: AtomicBool,
    },
    None,
}

impl Tokens {
    /// Loads the model's tokenizer where there is one. `upstream_name` is what workers call the model, and what metrics
    /// and logs call it here. Workers are not asked before there is a prompt, or a comparison to be made.
    ///
    /// Metrics go to the recorder that is installed by now.
    ///
    /// # Errors
    /// A file that cannot be used.
    pub async fn start(
        settings: &TokensSettings,
        upstream_name: &str,
        upstream: Upstream,
        any_worker: AnyWorker,
    ) -> Result<Self, TokensError> {
        let meters = Arc::new(Meters::new(upstream_name));
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
        let tokens = Self { source, meters, parity };
        tokens.meters.source(tokens.source());
        match &tokens.source {
            Source::None => warn_of_none(upstream_name),
            Source::Engine { .. } => {
                tracing::info!(model = upstream_name, "workers are asked for the tokens of prompts, if they answer");
            }
            Source::Local { .. } => {}
        }
        Ok(tokens)
    }

    /// Where the tokens of prompts come from that have none. With a source of `auto` and no tokenizer it is `None` until a
    /// worker has answered.
    #[must_use]
    pub fn source(&self) -> TokenSource {
        match &self.source {
            Source::Local { .. } => TokenSource::Local,
            Source::Engine { engine, is_tried, .. } if !is_tried || engine.is_proven() => TokenSource::Engine,
            Source::Engine { .. } | Source::None => TokenSource::None,
        }
    }

    /// The prompt's tokens. `model` is what the client asked for, the name of an adapter perhaps: adapters have the
    /// tokens of the model they adapt.
    ///
    /// Cancel-safe: dropping the future takes the prompt out of the queue.
    pub async fn of<'a>(&self, prompt: &'a AskedPrompt, _model: &str) -> PromptTokens<'a> {
        if let AskedPrompt::Tokens(ids) = prompt {
            self.meters.had(TokenSource::Request);
            return PromptTokens { ids: Cow::Borrowed(ids), source: TokenSource::Request };
        }
        let begun = Instant::now();
        match self.ask(prompt).await {
            Ok(ids) => {
                let source = self.source();
                self.meters.took(source, begun.elapsed());
                self.meters.had(source);
                PromptTokens { ids: Cow::Owned(ids), source }
            }
            Err(reason) => {
                self.meters.had_not(reason.name());
                PromptTokens { ids: Cow::Borrowed(&[]), source: TokenSource::None }
            }
        }
    }

    async fn ask(&self, prompt: &AskedPrompt) -> Result<Vec<u32>, NoTokens> {
        let question = match prompt {
            AskedPrompt::Tokens(ids) => return Ok(ids.clone()),
            AskedPrompt::Opaque(reason) => return Err(NoTokens::Opaque(reason)),
            AskedPrompt::Text(text) => Question::Text(text),
            AskedPrompt::Chat(parts) => Question::Chat(parts),
        };
        match &self.source {
            Source::None => Err(NoTokens::Off),
            Source::Local { local, pool } => tokenise(local, pool, question).await,
            Source::Engine { engine, model, is_given_up, .. } => {
                let before = self.source();
                let answer = engine.tokens(question).await;
                if before != self.source() {
                    self.meters.source(self.source());
                }
                // Once, and only of an engine that has never answered.
                if self.source() == TokenSource::None
                    && engine.is_paused()
                    && !is_given_up.swap(true, Ordering::Relaxed)
                {
                    warn_of_none(model);
                }
                answer
            }
        }
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        if let Some(parity) = &self.parity {
            parity.abort();
        }
    }
}

async fn tokenise(local: &Arc<Local>, pool: &Pool, question: Question<'_>) -> Result<Vec<u32>, NoTokens> {
    let local = Arc::clone(local);
    match question {
        // Before it is copied.
        Question::Text(text) if text.len() > chat::PROMPT_BYTES_MAX => Err(NoTokens::TooLong),
        Question::Text(text) => {
            let text = text.to_owned();
            pool.run(move || local.text(&text)).await
        }
        Question::Chat(parts) => {
            chat::refused(parts)?;
            let parts = parts.clone();
            pool.run(move || local.chat(&parts)).await
        }
    }
}

async fn load(
    tokenizer_file: &Path,
    settings: &TokensSettings,
    model: &str,
    meters: &Arc<Meters>,
) -> Result<Local, TokensError> {
    let (file, template) = (tokenizer_file.to_owned(), settings.chat_template_file.clone());
    let (bytes_max, meters) = (settings.cache_bytes_max, Arc::clone(meters));
    let reading =
        tokio::task::spawn_blocking(move || Local::load(&file, template.as_deref(), bytes_max, wall_clock_s, meters));
    let failed = |error: tokio::task::JoinError| {
        let path = tokenizer_file.to_owned();
        TokensError::Tokenizer { path, error: error.to_string() }
    };
    let local = reading.await.map_err(failed)??;
    if !local.has_template() {
        tracing::warn!(model, "routes chats by load only: the model has no chat template");
    }
    if !local.is_cached() && bytes_max > 0 {
        tracing::warn!(model, "tokenises every conversation from its beginning: this tokenizer's texts cannot be cut");
    }
    Ok(local)
}

fn warn_of_none(model: &str) {
    tracing::warn!(model, "routes by load only: prompts without token ids have none");
}

/// Seconds since 1970, for templates that show the date.
#[expect(
    clippy::disallowed_methods,
    reason = "chat templates show the calendar's date, which no monotonic clock knows"
)]
fn wall_clock_s() -> u64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
