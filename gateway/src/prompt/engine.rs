//! A worker's own tokenizer.
//!
//! Owns the question (`POST /tokenize`) and when it is not asked. Promises bounded answers in bounded time, and that an
//! engine which keeps failing is left alone for a while. Leaves which worker to whoever knows them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use hyper::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::AnyWorker;
use super::chat;
use super::reason::NoTokens;
use crate::openai::ChatParts;
use crate::upstream::{Upstream, UpstreamError};

/// Failures one after the other, after which the engine is left alone.
const FAILURES_MAX: u32 = 5;

/// For how long. After that one question is asked; if it fails too, as long again.
const PAUSE: Duration = Duration::from_secs(10);

/// Bytes of an answer for each byte of the question: a token's number, and its text where an engine sends that along.
const ANSWER_BYTES_PER_BYTE: usize = 32;

/// Bytes of an answer beside that.
const ANSWER_BYTES_MIN: usize = 64 << 10;

/// What is tokenised.
#[derive(Clone, Copy)]
pub(super) enum Question<'a> {
    Text(&'a str),
    Chat(&'a ChatParts),
}

#[derive(Serialize)]
struct Asked<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_kwargs: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_generation_prompt: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    continue_final_message: Option<bool>,
}

#[derive(Deserialize)]
struct Answered {
    tokens: Vec<u32>,
}

/// Asks one worker once.
pub(super) struct Client {
    upstream: Upstream,
    /// What workers call the model. An adapter's tokens are its base model's.
    model: String,
    within: Duration,
}

/// How asking failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// No answer.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// One that has no tokens.
    #[error("the answer has no list of tokens")]
    Unreadable,
    /// The question itself makes no sense.
    #[error("the question is not JSON")]
    Malformed,
}

impl AskError {
    /// Whether it may be this question alone that is refused.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Upstream(UpstreamError::Status(status)) => {
                [StatusCode::BAD_REQUEST, StatusCode::UNPROCESSABLE_ENTITY, StatusCode::PAYLOAD_TOO_LARGE]
                    .contains(status)
            }
            Self::Malformed => true,
            Self::Upstream(_) | Self::Unreadable => false,
        }
    }
}

impl Client {
    pub(super) fn new(upstream: Upstream, model: String, within: Duration) -> Self {
        Self { upstream, model, within }
    }

    pub(super) async fn ask(&self, endpoint: &str, question: Question<'_>) -> Result<Vec<u32>, AskError> {
        let body = self.body(question)?;
        let bytes_max = ANSWER_BYTES_MIN + body.len() * ANSWER_BYTES_PER_BYTE;
        let url = format!("{}/tokenize", endpoint.trim_end_matches('/'));
        let answer = self.upstream.ask(&url, body, self.within, bytes_max).await?;
        let answered: Answered = serde_json::from_slice(&answer).map_err(|_| AskError::Unreadable)?;
        Ok(answered.tokens)
    }

    fn body(&self, question: Question<'_>) -> Result<Bytes, AskError> {
        let asked = match question {
            Question::Text(text) => Asked { prompt: Some(text), ..self.nothing() },
            Question::Chat(parts) => Asked {
                messages: Some(raw(&parts.messages)?),
                tools: parts.tools.as_ref().map(raw).transpose()?,
                chat_template_kwargs: parts.template_kwargs.as_ref().map(raw).transpose()?,
                add_generation_prompt: parts.add_generation_prompt,
                continue_final_message: parts.continue_final_message,
                ..self.nothing()
            },
        };
        serde_json::to_vec(&asked).map(Bytes::from).map_err(|_| AskError::Malformed)
    }

    fn nothing(&self) -> Asked<'_> {
        Asked {
            model: &self.model,
            prompt: None,
            messages: None,
            tools: None,
            chat_template_kwargs: None,
            add_generation_prompt: None,
            continue_final_message: None,
        }
    }
}

fn raw(json: &Bytes) -> Result<&RawValue, AskError> {
    serde_json::from_slice(json).map_err(|_| AskError::Malformed)
}

/// The engines of one model, asked for each prompt.
pub(super) struct Engine {
    client: Client,
    any_worker: AnyWorker,
    /// Apart, for an engine may tokenise texts and no chats.
    texts: Mutex<Breaker>,
    chats: Mutex<Breaker>,
}

impl Engine {
    pub(super) fn new(client: Client, any_worker: AnyWorker) -> Self {
        Self { client, any_worker, texts: Mutex::default(), chats: Mutex::default() }
    }

    /// Whether a worker has ever answered.
    pub(super) fn is_proven(&self) -> bool {
        [&self.texts, &self.chats].into_iter().any(|breaker| locked(breaker).is_proven)
    }

    /// Whether it is left alone, with texts or with chats.
    pub(super) fn is_paused(&self) -> bool {
        [&self.texts, &self.chats].into_iter().any(|breaker| locked(breaker).paused_until.is_some())
    }

    pub(super) async fn tokens(&self, question: Question<'_>) -> Result<Vec<u32>, NoTokens> {
        let breaker = match question {
            Question::Text(text) if text.len() > chat::PROMPT_BYTES_MAX => return Err(NoTokens::TooLong),
            Question::Text(_) => &self.texts,
            Question::Chat(parts) => {
                chat::refused(parts)?;
                chat::text_only(parts)?;
                if parts.documents.is_some() {
                    return Err(NoTokens::Unsupported);
                }
                &self.chats
            }
        };
        let endpoint = (self.any_worker)().ok_or(NoTokens::NoWorker)?;
        if !locked(breaker).may_ask(Instant::now()) {
            return Err(NoTokens::EnginePaused);
        }
        let answer = self.client.ask(&endpoint, question).await;
        let mut breaker = locked(breaker);
        match answer {
            Ok(ids) => {
                breaker.answered();
                Ok(ids)
            }
            Err(error) => {
                tracing::debug!(worker = endpoint, %error, "a worker does not tokenise a prompt");
                breaker.failed(error.is_refusal(), Instant::now());
                Err(NoTokens::EngineFailed)
            }
        }
    }
}

fn locked(breaker: &Mutex<Breaker>) -> MutexGuard<'_, Breaker> {
    // Nothing panics that holds it.
    breaker.lock().unwrap_or_else(PoisonError::into_inner)
}

/// When not to ask.
#[derive(Default)]
struct Breaker {
    failures: u32,
    paused_until: Option<Instant>,
    is_proven: bool,
}

impl Breaker {
    /// After a pause the first that asks may, and the others once it has been answered.
    fn may_ask(&mut self, now: Instant) -> bool {
        match self.paused_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.paused_until = Some(now + PAUSE);
                true
            }
        }
    }

    fn answered(&mut self) {
        *self = Self { is_proven: true, ..Self::default() };
    }

    /// A refusal says something of the engine only if it has never answered: else one client's questions that make no
    /// sense would take the tokens from all.
    fn failed(&mut self, is_refusal: bool, now: Instant) {
        if is_refusal && self.is_proven {
            return self.answered();
        }
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            self.paused_until = Some(now + PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_failures_pause_and_one_question_ends_the_pause() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        breaker.answered();
        for n in 0..FAILURES_MAX {
            assert!(breaker.may_ask(start), "failure {n}");
            breaker.failed(false, start);
        }
        assert!(!breaker.may_ask(start + PAUSE - Duration::from_millis(1)));
        let later = start + PAUSE;
        assert!(breaker.may_ask(later) && !breaker.may_ask(later));
        breaker.failed(false, later);
        assert!(!breaker.may_ask(later + PAUSE - Duration::from_millis(1)) && breaker.may_ask(later + PAUSE));
        breaker.answered();
        assert!(breaker.may_ask(later + PAUSE) && breaker.may_ask(later + PAUSE));
    }

    #[test]
    fn refusals_count_until_the_engine_has_answered_once() {
        let start = Instant::now();
        let (mut never, mut once) = (Breaker::default(), Breaker::default());
        once.answered();
        for _ in 0..FAILURES_MAX {
            never.failed(true, start);
            once.failed(true, start);
        }
        assert!(!never.may_ask(start) && once.may_ask(start));
    }
}
