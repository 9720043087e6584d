//! Whether the gateway's tokenizer is the engines'.
//!
//! Owns the samples and when they are compared. Promises that no client's text is sent or shown. Leaves what to do about a
//! difference to the operator: routing goes on, with hits that the engine does not have.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::time::sleep;

use super::AnyWorker;
use super::engine::{Client, Question};
use super::local::Local;
use super::meters::Meters;
use super::pool::Pool;
use super::reason::NoTokens;
use crate::openai::ChatParts;

/// How often to look whether there is a worker by now.
const WORKER_AWAITED: Duration = Duration::from_secs(1);

/// Between comparisons.
const BETWEEN: Duration = Duration::from_secs(600);

/// Between comparisons while no worker answers.
const BETWEEN_UNANSWERED: Duration = Duration::from_secs(30);

const TEXT: &str = "A plain text,  with two spaces, 12345 numbers, a tab\tand naïve façade – Ελλάδα 東京 🙂.";

const CODE: &str = "fn main() {\n    let x = vec![1, 2, 3];\n\n    println!(\"{:?}\", x[0] != 0x1F);\n}\n";

const CHAT: &str = r#"[{"role":"system","content":"Answer in one word."},{"role":"user","content":"What's the capital of France?\n"}]"#;

/// What the comparison needs.
pub(super) struct Parity {
    pub(super) local: Arc<Local>,
    pub(super) pool: Arc<Pool>,
    pub(super) client: Client,
    pub(super) any_worker: AnyWorker,
    pub(super) meters: Arc<Meters>,
    pub(super) model: String,
}

impl Parity {
    /// Compares again and again, until it is aborted.
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

    /// Whether the worker answered all.
    async fn compare_all(&self, worker: &str) -> bool {
        let chat = ChatParts { messages: Bytes::from_static(CHAT.as_bytes()), ..ChatParts::default() };
        let mut samples = vec![("text", Question::Text(TEXT)), ("code", Question::Text(CODE))];
        if self.local.has_template() {
            samples.push(("chat", Question::Chat(&chat)));
        }
        let mut is_answered = true;
        for (sample, question) in samples {
            is_answered &= self.compare(worker, sample, question).await;
        }
        is_answered
    }

    async fn compare(&self, worker: &str, sample: &str, question: Question<'_>) -> bool {
        let theirs = match self.client.ask(worker, question).await {
            Ok(ids) => ids,
            Err(error) => {
                self.meters.parity("unanswered");
                tracing::info!(model = self.model, worker, sample, %error, "a worker's tokenizer cannot be compared");
                return false;
            }
        };
        let ours = match self.ours(question).await {
            Ok(ids) => ids,
            Err(NoTokens::Busy) => {
                // It says nothing of the tokenizer.
                self.meters.parity("unanswered");
                return false;
            }
            Err(reason) => {
                let reason = reason.name();
                tracing::warn!(model = self.model, sample, reason, "the sample has no tokens here");
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
            "the tokenizer here is not the worker's: cached prefixes will be missed"
        );
        true
    }

    async fn ours(&self, question: Question<'_>) -> Result<Vec<u32>, NoTokens> {
        let local = Arc::clone(&self.local);
        match question {
            Question::Text(text) => {
                let text = text.to_owned();
                self.pool.run(move || local.text(&text)).await
            }
            Question::Chat(parts) => {
                let parts = parts.clone();
                self.pool.run(move || local.chat(&parts)).await
            }
        }
    }
}
