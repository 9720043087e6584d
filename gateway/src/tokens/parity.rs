//! Comparison of the gateway's tokenizer with the engines' tokenizers.
//!
//! Compares fixed samples with each worker: once it can be queried, again when it returns after an ejection, and
//! periodically. No client text is sent or logged. The result of a worker stays in force until its next one; a worker
//! that does not respond changes nothing.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use parking_lot::Mutex;
use pointsman::named;
use tokio::time::{Instant, sleep};

use super::engine::{Client, TokenizeInput};
use super::local::Local;
use super::meters::TokenMeters;
use super::reason::NoTokens;
use super::threads::{Job, Pool};
use super::{AnyWorker, TokenSource};
use crate::formats::openai::ChatParts;

/// Interval of checks for workers to compare with.
const WORKER_AWAITED: Duration = Duration::from_secs(1);

/// Interval of comparisons with one worker.
const BETWEEN: Duration = Duration::from_secs(600);

/// Interval of comparisons with a worker that differs, so that a corrected one is noticed.
const BETWEEN_DIFFERENT: Duration = Duration::from_secs(60);

/// Interval of comparisons with a worker that does not respond.
const BETWEEN_UNANSWERED: Duration = Duration::from_secs(30);

const TEXT: &str = "A plain text,  with two spaces, 12345 numbers, a tab\tand naïve façade – Ελλάδα 東京 🙂.";

const CODE: &str = "fn main() {\n    let x = vec![1, 2, 3];\n\n    println!(\"{:?}\", x[0] != 0x1F);\n}\n";

const CHAT: &str = r#"[{"role":"system","content":"Answer in one word."},{"role":"user","content":"What's the capital of France?\n"}]"#;

named! {
/// Result of the comparison with one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compared {
    Equal = "equal",
    Different = "different",
    /// No response, or a busy gateway.
    Unanswered = "unanswered",
}
}

/// Last results by worker.
#[derive(Default)]
pub(super) struct Results(Mutex<State>);

#[derive(Default)]
struct State {
    /// The result, unless the worker has not responded so far, and the time of the next comparison.
    workers: BTreeMap<String, (Option<Compared>, Instant)>,
    /// Workers with an equal and with a different tokenizer; those of the last time if there are none now.
    equal: usize,
    different: usize,
}

impl Results {
    /// Whether the tokenizer differs from that of every compared worker. If some are equal, the local tokens find the
    /// caches of these; those of the engines depend on the worker that tokenizes.
    pub(super) fn all_differ(&self) -> bool {
        let state = self.0.lock();
        state.equal == 0 && state.different > 0
    }

    /// Workers that differ, and all compared ones; `None` if no worker differs.
    pub(super) fn different(&self) -> Option<(usize, usize)> {
        let state = self.0.lock();
        (state.different > 0).then_some((state.different, state.equal + state.different))
    }

    /// Forgets workers that are gone, so that those that return are compared again.
    fn retain(&self, present: &BTreeSet<String>) {
        let mut state = self.0.lock();
        state.workers.retain(|worker, _| present.contains(worker));
        state.count();
    }

    fn is_due(&self, worker: &str, now: Instant) -> bool {
        self.0.lock().workers.get(worker).is_none_or(|(_, due)| *due <= now)
    }

    /// Records the results of all samples. A worker differs if one of them does.
    fn record(&self, worker: String, samples: &[Compared], now: Instant) {
        let mut state = self.0.lock();
        let earlier = state.workers.get(&worker).and_then(|(earlier, _)| *earlier);
        let any = |which| samples.contains(&which).then_some(which);
        let result = any(Compared::Different).or(any(Compared::Equal)).or(earlier);
        let between = match (result, any(Compared::Unanswered)) {
            (_, Some(_)) => BETWEEN_UNANSWERED,
            (Some(Compared::Different), None) => BETWEEN_DIFFERENT,
            _ => BETWEEN,
        };
        state.workers.insert(worker, (result, now + between));
        state.count();
    }
}

impl State {
    fn count(&mut self) {
        let count = |which| self.workers.values().filter(|(result, _)| *result == Some(which)).count();
        let (equal, different) = (count(Compared::Equal), count(Compared::Different));
        if equal + different > 0 {
            (self.equal, self.different) = (equal, different);
        }
    }
}

/// Longest wait for the tokens of a sample.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Inputs of the comparison.
pub(super) struct Parity {
    pub(super) local: Arc<Local>,
    pub(super) pool: Arc<Pool>,
    pub(super) client: Client,
    pub(super) any_worker: AnyWorker,
    pub(super) meters: Arc<TokenMeters>,
    pub(super) model: String,
    pub(super) results: Arc<Results>,
    /// Whether the engines tokenize while all differ.
    pub(super) falls_back: bool,
}

/// First difference of a sample.
struct Difference {
    sample: &'static str,
    position: usize,
    ours: Option<u32>,
    theirs: Option<u32>,
}

impl Parity {
    /// Compares until aborted.
    pub(super) async fn watch(self) {
        loop {
            let Some(worker) = self.next_worker(Instant::now()) else {
                sleep(WORKER_AWAITED).await;
                continue;
            };
            let before = (self.results.different().is_some(), self.results.all_differ());
            let (samples, difference) = self.compare_all(&worker).await;
            self.results.record(worker.clone(), &samples, Instant::now());
            self.report(before, &worker, difference);
        }
    }

    /// A worker that is due.
    fn next_worker(&self, now: Instant) -> Option<String> {
        let present = RefCell::new(BTreeSet::new());
        let worker = (self.any_worker)(None, &|worker| {
            present.borrow_mut().insert(worker.to_owned());
            self.results.is_due(worker, now)
        });
        self.results.retain(&present.into_inner());
        worker
    }

    /// Logs a change and updates the source.
    fn report(&self, before: (bool, bool), worker: &str, difference: Option<Difference>) {
        let now = (self.results.different().is_some(), self.results.all_differ());
        if now == before {
            return;
        }
        let is_engine = self.falls_back && now.1;
        self.meters.source(if is_engine { TokenSource::Engine } else { TokenSource::Local });
        let effect = if is_engine { "workers tokenize prompts" } else { "the local tokenizer is used" };
        match difference {
            Some(Difference { sample, position, ours, theirs }) => tracing::warn!(
                model = self.model,
                worker,
                sample,
                position,
                ?ours,
                ?theirs,
                effect,
                "the local tokenizer differs from the worker's: update tokens.tokenizer_file"
            ),
            None => tracing::info!(model = self.model, worker, effect, "the local tokenizer equals the worker's"),
        }
    }

    /// Results of all samples, and the first difference.
    async fn compare_all(&self, worker: &str) -> (Vec<Compared>, Option<Difference>) {
        let chat = ChatParts { messages: Bytes::from_static(CHAT.as_bytes()), ..ChatParts::default() };
        let mut samples = vec![("text", TokenizeInput::Text(TEXT)), ("code", TokenizeInput::Text(CODE))];
        if self.local.has_template() {
            samples.push(("chat", TokenizeInput::Chat(&chat)));
        }
        let (mut results, mut first) = (Vec::new(), None);
        for (sample, input) in samples {
            let (result, difference) = match self.compare(worker, sample, input).await {
                Ok(None) => (Compared::Equal, None),
                Ok(Some(difference)) => (Compared::Different, Some(difference)),
                Err(()) => (Compared::Unanswered, None),
            };
            self.meters.parity(result.name());
            results.push(result);
            first = first.or(difference);
        }
        (results, first)
    }

    /// The first difference of a sample; an error without a response.
    async fn compare(
        &self,
        worker: &str,
        sample: &'static str,
        input: TokenizeInput<'_>,
    ) -> Result<Option<Difference>, ()> {
        let theirs = self.client.query(worker, input).await.map_err(|error| {
            tracing::debug!(model = self.model, worker, sample, %error, "a worker's tokenizer cannot be compared");
        })?;
        let ours = match self.ours(input).await {
            Ok(ids) => ids,
            // No conclusion about the tokenizer.
            Err(reason) if reason == NoTokens::BUSY => return Err(()),
            Err(reason) => {
                let reason = reason.name;
                tracing::warn!(model = self.model, sample, reason, "the local tokenizer failed on the sample");
                Vec::new()
            }
        };
        if ours == theirs {
            return Ok(None);
        }
        let position = ours.iter().zip(&theirs).take_while(|(our, their)| our == their).count();
        let (ours, theirs) = (ours.get(position).copied(), theirs.get(position).copied());
        Ok(Some(Difference { sample, position, ours, theirs }))
    }

    async fn ours(&self, input: TokenizeInput<'_>) -> Result<Vec<u32>, NoTokens> {
        let (local, job) = (Arc::clone(&self.local), Job { bytes: 0, tenant: None, wait_max: WAIT_MAX });
        match input {
            TokenizeInput::Text(text) => {
                let text = text.to_owned();
                self.pool.run(job, move || local.text(&text)).await
            }
            TokenizeInput::Chat(parts) => {
                let parts = parts.clone();
                self.pool.run(job, move || local.chat(&parts, None)).await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn results_stay_until_the_next_one_of_their_worker() {
        let (results, now) = (Results::default(), Instant::now());
        let record = |worker: &str, result| results.record(worker.to_owned(), &[result, Compared::Unanswered], now);
        let present = |workers: &[&str]| results.retain(&workers.iter().map(|worker| (*worker).to_owned()).collect());
        record("a", Compared::Unanswered);
        assert!(!results.all_differ() && results.different().is_none(), "silence is no difference");
        record("a", Compared::Different);
        assert!(results.all_differ());
        record("a", Compared::Unanswered);
        assert!(results.all_differ(), "silence does not end it either");
        record("b", Compared::Equal);
        assert_eq!((results.all_differ(), results.different()), (false, Some((1, 2))));
        present(&["a"]);
        assert_eq!((results.all_differ(), results.different()), (true, Some((1, 1))));
        present(&[]);
        assert!(results.all_differ(), "without any worker the last state stays");
        assert!(results.is_due("a", now), "a worker that returns is compared at once");
        record("a", Compared::Equal);
        assert_eq!((results.all_differ(), results.different()), (false, None));
    }

    #[tokio::test(start_paused = true)]
    async fn workers_that_differ_are_compared_more_often() {
        let (results, now) = (Results::default(), Instant::now());
        let cases: [(&[Compared], _); 4] = [
            (&[Compared::Equal, Compared::Equal], BETWEEN),
            (&[Compared::Equal, Compared::Different], BETWEEN_DIFFERENT),
            (&[Compared::Equal, Compared::Unanswered], BETWEEN_UNANSWERED),
            (&[Compared::Unanswered], BETWEEN_UNANSWERED),
        ];
        for (samples, between) in cases {
            results.record("a".to_owned(), samples, now);
            assert!(!results.is_due("a", now + between - WORKER_AWAITED) && results.is_due("a", now + between));
        }
    }
}
