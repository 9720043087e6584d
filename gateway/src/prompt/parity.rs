//! Comparison of the gateway's tokenizer with the engines' tokenizers.
//!
//! Compares fixed samples at startup and periodically; no client text is sent or logged. After a difference, routing
//! continues with predicted hits that the engine does not have; the operator must act.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::time::sleep;

use super::AnyWorker;
use super::engine::{Client, TokenizeInput};
use super::local::Local;
use super::meters::TokenMeters;
use super::pool::Pool;
use super::reason::NoTokens;
use crate::openai::ChatParts;

/// Interval of checks for a worker.
const WORKER_AWAITED: Duration = Duration::from_secs(1);

/// Interval of comparisons.
const BETWEEN: Duration = Duration::from_secs(600);

/// Interval of comparisons while no worker responds.
const BETWEEN_UNANSWERED: Duration = Duration::from_secs(30);

const TEXT: &str = "A plain text,  with two spaces, 12345 numbers, a tab\tand naïve façade – Ελλάδα 東京 🙂.";

const CODE: &str = "fn main() {\n    let x = vec![1, 2, 3];\n\n    println!(\"{:?}\", x[0] != 0x1F);\n}\n";

const CHAT: &str = r#"[{"role":"system","content":"Answer in one word."},{"role":"user","content":"What's the capital of France?\n"}]"#;

/// Inputs of the comparison.
pub(super) struct Parity {
    pub(super) local: Arc<Local>,
    pub(super) pool: Arc<Pool>,
    pub(super) client: Client,
    pub(super) any_worker: AnyWorker,
    pub(super) meters: Arc<TokenMeters>,
    pub(super) model: String,
}

impl Parity {
    /// Compares periodically until aborted.
    pub(super) async fn watch(self) {
        loop {
            let Some(worker) = (self.any_worker)(None, &|_| true) else {
                sleep(WORKER_AWAITED).await;
                continue;
            };
            let is_answered = self.compare_all(&worker).await;
            sleep(if is_answered { BETWEEN } else { BETWEEN_UNANSWERED }).await;
        }
    }

    /// Whether the worker responded to all samples.
    async fn compare_all(&self, worker: &str) -> bool {
        let chat = ChatParts { messages: Bytes::from_static(CHAT.as_bytes()), ..ChatParts::default() };
        let mut samples = vec![("text", TokenizeInput::Text(TEXT)), ("code", TokenizeInput::Text(CODE))];
        if self.local.has_template() {
            samples.push(("chat", TokenizeInput::Chat(&chat)));
        }
        let mut is_answered = true;
        for (sample, input) in samples {
            is_answered &= self.compare(worker, sample, input).await;
        }
        is_answered
    }

    async fn compare(&self, worker: &str, sample: &str, input: TokenizeInput<'_>) -> bool {
        let theirs = match self.client.query(worker, input).await {
            Ok(ids) => ids,
            Err(error) => {
                self.meters.parity("unanswered");
                tracing::info!(model = self.model, worker, sample, %error, "a worker's tokenizer cannot be compared");
                return false;
            }
        };
        let ours = match self.ours(input).await {
            Ok(ids) => ids,
            Err(NoTokens::Busy) => {
                // No conclusion about the tokenizer.
                self.meters.parity("unanswered");
                return false;
            }
            Err(reason) => {
                let reason = reason.name();
                tracing::warn!(model = self.model, sample, reason, "the local tokenizer failed on the sample");
                Vec::new()
            }
        };
        if ours == theirs {
            self.meters.parity("equal");
            return true;
        }
        self.meters.parity("different");
        let position = ours.iter().zip(&theirs).take_while(|(our, their)| our == their).count();
        let (our_id, their_id) = (ours.get(position), theirs.get(position));
        tracing::warn!(
            model = self.model, worker, sample, position, ours = ?our_id, theirs = ?their_id,
            "the local tokenizer differs from the worker's: cached prefixes will be missed"
        );
        true
    }

    async fn ours(&self, input: TokenizeInput<'_>) -> Result<Vec<u32>, NoTokens> {
        let local = Arc::clone(&self.local);
        match input {
            TokenizeInput::Text(text) => {
                let text = text.to_owned();
                self.pool.run(move || local.text(&text)).await
            }
            TokenizeInput::Chat(parts) => {
                let parts = parts.clone();
                self.pool.run(move || local.chat(&parts)).await
            }
        }
    }
}
