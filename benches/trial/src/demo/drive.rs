//! Driver of a workload.
//!
//! Runs one task per client. A client sends a request, waits for the whole answer, pauses for the think time, and
//! continues. Every planned request either succeeds or counts as an error, independently of other clients.
//! [`super::figures`] evaluates the samples.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::client::{Answer, Client};
use super::lag::LagWatch;
use super::progress::Progress;
use super::workload::{ClientScripts, ConversationScript, Session};

/// Maximum number of distinct error reasons that are kept.
const REASONS_MAX: usize = 5;

/// Interval between progress updates.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);

/// Result of a workload run.
#[derive(Clone, Debug, Default)]
pub(super) struct Driven {
    pub(super) answers: Vec<Answer>,
    /// The first distinct error messages.
    pub(super) reasons: Vec<String>,
    /// Wrapping sum of the hashes of all request bodies.
    pub(super) digest: u64,
    pub(super) took: Duration,
    pub(super) lags: Vec<Duration>,
}

/// Address, model and pace for the requests.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) address: SocketAddr,
    pub(super) model: String,
    /// Divisor of start and think times; 0 disables both.
    pub(super) time_scale: f64,
}

/// Sends the whole workload and returns after the last answer.
pub(super) async fn drive(workload: &Arc<ClientScripts>, target: &Target, progress: &Progress, label: &str) -> Driven {
    let (planned, begun, lag) = (workload.requests(), Instant::now(), LagWatch::start());
    let done = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for n in 0..workload.sessions.len() {
        let (workload, target, done) = (Arc::clone(workload), target.clone(), Arc::clone(&done));
        clients.spawn(async move { run_session(&workload.sessions[n], &target, &done).await });
    }
    let (mut all, mut ticks) = (Driven::default(), interval(PROGRESS_EVERY));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            biased;
            ended = clients.join_next() => match ended {
                Some(Ok(driven)) => all.add(driven),
                Some(Err(error)) => all.complain(format!("a client task failed: {error}")),
                None => break,
            },
            _ = ticks.tick() => progress.show(label, done.load(Ordering::Relaxed), planned),
        }
    }
    progress.show(label, done.load(Ordering::Relaxed), planned);
    all.took = begun.elapsed();
    all.lags = lag.end();
    all
}

async fn run_session(session: &Session, target: &Target, done: &AtomicUsize) -> Driven {
    let (mut client, mut driven) = (Client::new(target.address), Driven::default());
    rest(session.start_ms, target.time_scale).await;
    for conversation in &session.conversations {
        driven.send(conversation, &mut client, target, done).await;
    }
    driven
}

async fn rest(ms: u32, time_scale: f64) {
    if time_scale > 0.0 {
        sleep(Duration::from_secs_f64(f64::from(ms) / 1e3 / time_scale)).await;
    }
}

impl Driven {
    /// Sends all requests of a conversation. An error ends the conversation, because the next request must quote the
    /// missing answer.
    async fn send(
        &mut self,
        conversation: &ConversationScript,
        client: &mut Client,
        target: &Target,
        done: &AtomicUsize,
    ) {
        let mut answers = Vec::new();
        for turn in &conversation.turns {
            let body = conversation.body(&target.model, &answers);
            self.digest = self.digest.wrapping_add(fnv1a(&body));
            let answered = client.chat(body).await;
            done.fetch_add(1, Ordering::Relaxed);
            match answered {
                Ok(mut answer) => {
                    answers.push(std::mem::take(&mut answer.content));
                    self.answers.push(answer);
                }
                Err(error) => return self.complain(error.to_string()),
            }
            rest(turn.think_ms, target.time_scale).await;
        }
    }

    fn add(&mut self, other: Self) {
        self.answers.extend(other.answers);
        self.digest = self.digest.wrapping_add(other.digest);
        other.reasons.into_iter().for_each(|reason| self.complain(reason));
    }

    fn complain(&mut self, reason: String) {
        if self.reasons.len() < REASONS_MAX && !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{Faults, MockConfig, MockEngine};

    async fn driven(faults: Faults) -> Driven {
        let config =
            MockConfig { data_parallel_size: 2, kv_blocks: 1024, time_scale: 0.0, faults, ..Default::default() };
        let engine = MockEngine::start(config).await.expect("the engine starts");
        let target = Target { address: engine.address(), model: "mock".to_owned(), time_scale: 0.0 };
        let driven = drive(&Arc::new(ClientScripts::new(3, 2, 7)), &target, &Progress::silent(), "test").await;
        engine.shutdown().await;
        driven
    }

    #[tokio::test]
    async fn repeated_runs_succeed_with_equal_requests() {
        let (first, second) = (driven(Faults::default()).await, driven(Faults::default()).await);
        assert_eq!((first.answers.len(), first.reasons.as_slice()), (7, [].as_slice()));
        assert_eq!(first.digest, second.digest, "quoted responses are equal, so requests are equal");
        assert!(first.answers.iter().all(|answer| answer.prompt_tokens > 2_000 && answer.gaps.len() >= 31));
        assert!(first.answers.iter().any(|answer| answer.cached_tokens > 2_000), "later turns find the earlier ones");
    }

    #[tokio::test]
    async fn equal_errors_are_reported_once() {
        let driven = driven(Faults { status_share: 1.0, status: 503, ..Faults::default() }).await;
        assert!(driven.answers.is_empty());
        assert_eq!(driven.reasons.len(), 1, "{:?}", driven.reasons);
        assert!(driven.reasons[0].contains("503") && driven.reasons[0].contains("injected fault"));
    }
}
