//! Tokens of prompts for routing.
//!
//! For one model, selects the source of tokens: the request, the local tokenizer, the engine, or none. Missing tokens
//! never fail a request; it is routed by load alone. Only short texts are tokenized on serving threads. The router hashes the
//! ids, which are dropped with the request except for those in `cache`.

mod cache;
mod chat;
mod chunks;
mod engine;
mod engine_breaker;
mod files;
mod format;
mod inline_system;
mod local;
mod media;
mod meters;
mod parity;
mod python;
mod reason;
mod recent;
mod standalone;
mod template;
#[cfg(test)]
pub(crate) mod tests;
mod threads;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pointsman::hashing::MmSpan;
use pointsman::named;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::formats::openai::{ChatParts, ClientPrompt, MediaName};
use crate::net::upstream::WorkerAccess;
use crate::observe::clock::unix_time;
use crate::settings::{TokenSourceChoice, TokensSettings};
use engine::{Client, Engine, TokenizeInput};
use files::Stamp;
use inline_system::InlineSystem;
use local::Local;
use media::Naming;
pub use media::lengths::LengthReport;
use meters::TokenMeters;
use parity::{Parity, Results};
use reason::NoTokens;
use recent::RecentCounts;
pub use recent::RecentPrompts;
pub use standalone::PromptTokenizer;
use threads::{Job, Pool, here};

named! {
/// Source of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The request itself.
    Request = "request",
    /// The gateway's tokenizer.
    Local = "local",
    /// A worker's `/tokenize`.
    Engine = "engine",
    /// No tokens.
    None = "none",
}
}

/// Tokens of a prompt; empty without tokens.
#[derive(Clone, Debug)]
pub struct PromptTokens<'a> {
    /// Token ids.
    pub ids: Cow<'a, [u32]>,
    /// Their source.
    pub source: TokenSource,
    /// Reason for missing tokens: a label of `pointsman_gateway_tokens_total`.
    pub missing: Option<&'static str>,
    /// Images and other media of the prompt.
    pub media: PromptMedia,
    /// Least number of tokens of a prompt that exceeds the maximum.
    pub tokens_min: Option<u32>,
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

/// What a request has besides its prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptContext<'a> {
    /// Salt of the request, included in the names of its images.
    pub cache_salt: Option<&'a str>,
    /// Name of the client's tenant. Tenants have equal shares of the tokenizer.
    pub tenant: Option<&'a str>,
    /// Maximum tokens of the model: a longer prompt is not tokenized.
    pub tokens_max: Option<u32>,
}

/// Returns the endpoint of an eligible worker that satisfies the predicate, in rotation; `None` without one. A given
/// endpoint is excluded.
pub type AnyWorker = Arc<dyn Fn(Option<&str>, &dyn Fn(&str) -> bool) -> Option<String> + Send + Sync>;

/// Tokenization for one model.
pub struct Tokens {
    source: Source,
    meters: Arc<TokenMeters>,
    recent: RecentCounts,
    parity: Option<JoinHandle<()>>,
    /// Files of the local tokenizer, as they were read.
    stamps: Vec<Stamp>,
    /// Whether images in data URLs receive names.
    names_media: bool,
    /// Longest wait of a prompt for the local tokenizer.
    wait_max: Duration,
    inline_system: InlineSystem,
}

enum Source {
    Local {
        local: Arc<Local>,
        pool: Arc<Pool>,
        /// Comparisons with the engines.
        results: Arc<Results>,
        /// The engines, for `auto`: used while the local tokenizer differs from all of them.
        fallback: Option<Box<Engine>>,
    },
    Engine {
        engine: Box<Engine>,
        /// Whether the engine is used only after a successful response.
        is_tried: bool,
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
        workers: WorkerAccess,
        any_worker: AnyWorker,
    ) -> Result<Self, String> {
        let meters = Arc::new(TokenMeters::new(upstream_name));
        let within = Duration::from_millis(settings.engine_timeout_ms);
        let pool = || {
            Pool::start(settings.threads).map(Arc::new).map_err(|error| format!("no thread can be started: {error}"))
        };
        let (mut parity, stamps) = (None, stamps_of(settings));
        let inline_system = InlineSystem::new(workers.clone(), Arc::clone(&any_worker), upstream_name);
        let source = match (settings.source, &settings.tokenizer_file) {
            (TokenSourceChoice::None, _) => Source::None,
            (TokenSourceChoice::Engine, _) | (TokenSourceChoice::Auto, None) => Source::Engine {
                engine: Box::new(Engine::new(Client::new(workers, upstream_name, within, pool()?), any_worker)),
                is_tried: settings.source == TokenSourceChoice::Auto,
            },
            (TokenSourceChoice::Local, None) => {
                return Err("tokens.source is local, must come with tokens.tokenizer_file".to_owned());
            }
            (TokenSourceChoice::Local | TokenSourceChoice::Auto, Some(file)) => {
                let local = Arc::new(load(file, settings, upstream_name, &meters).await?);
                let (pool, results) = (pool()?, Arc::new(Results::default()));
                let client = || Client::new(workers.clone(), upstream_name, within, Arc::clone(&pool));
                let falls_back = settings.parity_check && settings.source == TokenSourceChoice::Auto;
                let fallback = falls_back.then(|| Box::new(Engine::new(client(), Arc::clone(&any_worker))));
                if settings.parity_check {
                    let compared = Parity {
                        local: Arc::clone(&local),
                        pool: Arc::clone(&pool),
                        client: client(),
                        any_worker,
                        meters: Arc::clone(&meters),
                        model: upstream_name.to_owned(),
                        results: Arc::clone(&results),
                        falls_back,
                    };
                    parity = Some(tokio::spawn(compared.watch()));
                }
                Source::Local { local, pool, results, fallback }
            }
        };
        let recent = RecentCounts::new(upstream_name);
        let (names_media, wait_max) = (settings.media_uuids, Duration::from_millis(settings.wait_ms));
        let tokens = Self { source, meters, recent, parity, stamps, names_media, wait_max, inline_system };
        tokens.meters.source(tokens.source());
        match &tokens.source {
            Source::None => {
                tracing::warn!(model = upstream_name, "prompts without token ids are routed by load only");
            }
            Source::Engine { .. } => {
                tracing::info!(model = upstream_name, "workers tokenize prompts if they support it");
            }
            Source::Local { .. } => {}
        }
        Ok(tokens)
    }

    /// Whether a file of the local tokenizer has changed since it was read.
    pub fn is_outdated(&self, settings: &TokensSettings) -> bool {
        matches!(self.source, Source::Local { .. }) && stamps_of(settings) != self.stamps
    }

    /// Token source of prompts without token ids. With source `auto` and no tokenizer it is `None` until a worker has
    /// responded.
    pub fn source(&self) -> TokenSource {
        match &self.source {
            Source::Local { .. } if self.fallback().is_some() => TokenSource::Engine,
            Source::Local { .. } => TokenSource::Local,
            Source::Engine { engine, is_tried } if !is_tried || engine.is_proven() => TokenSource::Engine,
            Source::Engine { .. } | Source::None => TokenSource::None,
        }
    }

    /// Whether the chat template takes system messages after the first; `None` if unknown.
    pub fn takes_inline_system(&self) -> Option<bool> {
        match &self.source {
            Source::Local { local, .. } if local.has_template() => Some(local.takes_inline_system),
            _ => self.inline_system.known(),
        }
    }

    /// The same after a trial at an engine, if it is unknown.
    pub(crate) async fn try_inline_system(&self) -> Option<bool> {
        match self.takes_inline_system() {
            None => Box::pin(self.inline_system.tried()).await,
            known => known,
        }
    }

    /// Problems that cost cache hits, as sentences.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Source::Local { results, fallback, .. } = &self.source
            && let Some((different, compared)) = results.different()
        {
            let effect = match fallback {
                Some(_) if results.all_differ() => "workers tokenize the prompts until it is equal",
                Some(_) | None => "their cached prefixes are missed",
            };
            warnings.push(format!(
                "the tokenizer differs from that of {different} of {compared} workers: {effect}; update \
                 tokens.tokenizer_file"
            ));
        }
        warnings.extend(Some(self.recent()).filter(RecentPrompts::is_problem).map(|recent| recent.to_string()));
        warnings
    }

    /// Prompts of the last minute.
    pub fn recent(&self) -> RecentPrompts {
        self.recent.recent(Instant::now())
    }

    /// The engines, while they replace the local tokenizer.
    fn fallback(&self) -> Option<&Engine> {
        match &self.source {
            Source::Local { results, fallback, .. } => fallback.as_deref().filter(|_| results.all_differ()),
            Source::Engine { .. } | Source::None => None,
        }
    }

    /// Tokens of the prompt. An adapter has the tokens of its base model.
    ///
    /// Cancel-safe: dropping the future removes the prompt from the queue.
    pub async fn of<'a>(&self, prompt: &'a ClientPrompt, context: PromptContext<'_>) -> PromptTokens<'a> {
        if let ClientPrompt::Tokens(ids) = prompt {
            self.meters.with_tokens(TokenSource::Request);
            self.recent.with_tokens();
            return PromptTokens {
                ids: Cow::Borrowed(ids),
                source: TokenSource::Request,
                missing: None,
                media: PromptMedia::default(),
                tokens_min: None,
            };
        }
        let begun = Instant::now();
        match self.compute(prompt, context).await {
            Ok((ids, media, source)) => {
                self.recent.with_tokens();
                self.meters.record_time(source, begun.elapsed());
                if media.unknown_from.is_some() {
                    self.meters.media_prefix(source);
                } else {
                    self.meters.with_tokens(source);
                }
                PromptTokens { ids: Cow::Owned(ids), source, missing: None, media, tokens_min: None }
            }
            Err(reason) => {
                self.meters.without_tokens(reason.name);
                // The choice of the operator is no problem.
                if reason != NoTokens::OFF {
                    self.meters.record_time(TokenSource::None, begun.elapsed());
                    self.recent.without_tokens(reason);
                }
                let (ids, media) = (Cow::Borrowed(&[][..]), PromptMedia::default());
                PromptTokens {
                    ids,
                    source: TokenSource::None,
                    missing: Some(reason.name),
                    media,
                    tokens_min: reason.tokens_min,
                }
            }
        }
    }

    async fn compute(
        &self,
        prompt: &ClientPrompt,
        context: PromptContext<'_>,
    ) -> Result<(Vec<u32>, PromptMedia, TokenSource), NoTokens> {
        let text_only = |source| move |ids| (ids, PromptMedia::default(), source);
        let input = match prompt {
            ClientPrompt::Tokens(ids) => return Ok(text_only(TokenSource::Request)(ids.clone())),
            ClientPrompt::Opaque(reason) => return Err(NoTokens::of(reason)),
            ClientPrompt::Text(text) => TokenizeInput::Text(text),
            ClientPrompt::Chat(parts) => TokenizeInput::Chat(parts),
        };
        match &self.source {
            Source::None => Err(NoTokens::OFF),
            Source::Local { local, pool, .. } => {
                // Other tokens still serve for the length of the prompt, and as names of blocks placed by this gateway.
                if let Some(engine) = self.fallback()
                    && let Ok(ids) = Box::pin(engine.tokens(input, context.tenant)).await
                {
                    return Ok(text_only(TokenSource::Engine)(ids));
                }
                match input {
                    TokenizeInput::Text(text) => {
                        self.text(local, pool, text, context).await.map(text_only(TokenSource::Local))
                    }
                    TokenizeInput::Chat(parts) => self.conversation(local, pool, parts, context).await,
                }
            }
            Source::Engine { engine, .. } => {
                let before = self.source();
                let answer = Box::pin(engine.tokens(input, context.tenant)).await;
                if before != self.source() {
                    self.meters.source(self.source());
                }
                answer.map(text_only(TokenSource::Engine))
            }
        }
    }

    async fn conversation(
        &self,
        local: &Arc<Local>,
        pool: &Pool,
        parts: &ChatParts,
        context: PromptContext<'_>,
    ) -> Result<(Vec<u32>, PromptMedia, TokenSource), NoTokens> {
        match chat::refused(parts) {
            // The data of media is removed before the length is checked again.
            Err(reason) if reason == NoTokens::TOO_LONG && media::may_occur(parts) => {}
            checked => checked?,
        }
        let job = self.job(chat::bytes(parts), context);
        let (local, parts, tokens_max) = (Arc::clone(local), parts.clone(), context.tokens_max);
        let (is_on, salt) = (self.names_media, context.cache_salt.filter(|salt| !salt.is_empty()).map(str::to_owned));
        let is_quick = local.is_quick(job.bytes);
        let work = move || local.conversation(&parts, Naming { is_on, salt: salt.as_deref() }, tokens_max);
        let conversation = if is_quick { here(work) } else { pool.run(job, work).await };
        conversation.map(|(ids, media)| (ids, media.unwrap_or_default(), TokenSource::Local))
    }
}

impl Tokens {
    async fn text(
        &self,
        local: &Arc<Local>,
        pool: &Pool,
        text: &str,
        context: PromptContext<'_>,
    ) -> Result<Vec<u32>, NoTokens> {
        // Checked before the copy.
        local.check_length(text, context.tokens_max)?;
        if text.len() > chat::PROMPT_BYTES_MAX {
            return Err(NoTokens::TOO_LONG);
        }
        if local.is_quick(text.len()) {
            return here(|| local.text(text));
        }
        let job = self.job(text.len(), context);
        let (local, text) = (Arc::clone(local), text.to_owned());
        pool.run(job, move || local.text(&text)).await
    }

    fn job<'a>(&self, bytes: usize, context: PromptContext<'a>) -> Job<'a> {
        Job { bytes, tenant: context.tenant, wait_max: self.wait_max }
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        if let Some(parity) = &self.parity {
            parity.abort();
        }
    }
}

fn stamps_of(settings: &TokensSettings) -> Vec<Stamp> {
    let stamps = |file: &PathBuf| files::stamps(file, settings.chat_template_file.as_deref());
    settings.tokenizer_file.as_ref().map(stamps).unwrap_or_default()
}

async fn load(
    tokenizer_file: &Path,
    settings: &TokensSettings,
    model: &str,
    meters: &Arc<TokenMeters>,
) -> Result<Local, String> {
    let (file, template) = (tokenizer_file.to_owned(), settings.chat_template_file.clone());
    let (bytes_max, meters) = (settings.cache_bytes_max, Arc::clone(meters));
    let reading =
        tokio::task::spawn_blocking(move || Local::load(&file, template.as_deref(), bytes_max, wall_clock_s, meters));
    let mut local = reading.await.map_err(|error| files::no_tokenizer(tokenizer_file, &error))??;
    if let Some(placeholder) = &settings.media_placeholder
        && !local.set_placeholder(placeholder)
    {
        return Err(format!("tokens.media_placeholder is {placeholder}, must be an added token of the tokenizer"));
    }
    if !local.has_template() {
        tracing::warn!(model, "chats are routed by load only: the model has no chat template");
    }
    if !local.is_cached() && bytes_max > 0 {
        tracing::warn!(model, "every conversation is tokenized from its beginning: this tokenizer has no cut points");
    }
    Ok(local)
}

/// Seconds since 1970, for templates with the current date.
fn wall_clock_s() -> u64 {
    unix_time().as_secs()
}
