//! Whether the chat template of the engines takes system messages after the first.
//!
//! Without a template in the gateway, one engine is tried when a request first depends on it: it renders such a chat, and
//! generates one token. A refusal counts if the same engine accepts a plain chat.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hyper::StatusCode;
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::AnyWorker;
use crate::net::upstream::{UpstreamError, WorkerAccess};

/// Time limit of a trial, in which an engine may queue the chat.
const WITHIN: Duration = Duration::from_secs(10);

/// Time after a trial without a result.
const BETWEEN: Duration = Duration::from_secs(60);

const RESPONSE_BYTES_MAX: usize = 64 << 10;

/// Roles of a chat that some templates refuse; those of the first two messages are taken by all.
const ROLES: [&str; 4] = ["system", "user", "system", "user"];

pub(super) struct InlineSystem {
    workers: WorkerAccess,
    any_worker: AnyWorker,
    model: Arc<str>,
    known: OnceLock<bool>,
    /// Time of the next trial.
    next: Mutex<Option<Instant>>,
}

impl InlineSystem {
    pub(super) fn new(workers: WorkerAccess, any_worker: AnyWorker, model: &str) -> Self {
        Self { workers, any_worker, model: Arc::from(model), known: OnceLock::new(), next: Mutex::default() }
    }

    /// The result, if there is one.
    pub(super) fn known(&self) -> Option<bool> {
        self.known.get().copied()
    }

    /// The same after a trial, which concurrent requests share.
    pub(super) async fn tried(&self) -> Option<bool> {
        let mut next = self.next.lock().await;
        if self.known().is_none() && next.is_none_or(|next| next <= Instant::now()) {
            let result = self.trial().await;
            *next = Some(Instant::now() + BETWEEN);
            if let Some(takes) = result {
                tracing::info!(model = &*self.model, takes, "chat template tried with a system message between turns");
                let _ = self.known.set(takes);
            }
        }
        self.known()
    }

    async fn trial(&self) -> Option<bool> {
        let worker = (self.any_worker)(None, &|_| true)?;
        match self.accepts(&worker, &ROLES).await {
            Some(false) if self.accepts(&worker, &ROLES[..2]).await == Some(true) => Some(false),
            Some(false) | None => None,
            Some(true) => Some(true),
        }
    }

    /// Whether the engine accepts a chat with these roles; `None` for failures of other kinds.
    async fn accepts(&self, worker: &str, roles: &[&str]) -> Option<bool> {
        let messages: Vec<_> = roles.iter().map(|role| json!({ "role": role, "content": "." })).collect();
        let body = json!({ "model": &*self.model, "messages": messages, "max_tokens": 1 }).to_string();
        match self.workers.query((worker, "/v1/chat/completions"), body.into(), WITHIN, RESPONSE_BYTES_MAX).await {
            Ok(_) => Some(true),
            Err(UpstreamError::Status(
                StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY | StatusCode::INTERNAL_SERVER_ERROR,
            )) => Some(false),
            Err(_) => None,
        }
    }
}
