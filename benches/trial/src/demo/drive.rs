//! Clients of the demo.
//!
//! A client sends a request, waits for the whole answer, pauses for the think time, and continues. Every planned request
//! either succeeds or counts as an error, independently of other clients. [`super::figures`] evaluates the exchanges.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::Uri;
use tokio::time::{Instant, sleep};

use super::fleet::MODEL;
use super::progress::Progress;
use super::workload::ClientScripts;
use crate::driver::{Answer, Client, ClientOptions, Clock, Exchange, HttpClient, TimerLag, drive};

/// Timeout of a whole request.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum number of distinct error reasons that are kept.
const REASONS_MAX: usize = 5;

/// Result of a workload run.
#[derive(Debug, Default)]
pub(super) struct Driven {
    /// Complete answers.
    pub(super) exchanges: Vec<Exchange>,
    /// The first distinct error messages.
    pub(super) reasons: Vec<String>,
    /// Wrapping sum of the hashes of all request bodies.
    pub(super) digest: u64,
    pub(super) took: Duration,
    pub(super) lags: Vec<Duration>,
}

/// Sends the whole workload and returns after the last answer.
///
/// Start and think times are divided by `time_scale`; 0 disables both.
pub(super) async fn run(
    workload: &Arc<ClientScripts>,
    (address, time_scale): (SocketAddr, f64),
    progress: Progress,
    label: &'static str,
) -> Driven {
    let (begun, lag) = (Instant::now(), TimerLag::start());
    let connections_max = u32::try_from(workload.sessions.len()).unwrap_or(u32::MAX);
    let options = ClientOptions { timeout: PATIENCE, connections_max, ..ClientOptions::default() };
    let shared = Arc::new(Shared {
        workload: Arc::clone(workload),
        http: HttpClient::new(&options).expect("no option can be invalid"),
        uri: format!("http://{address}/v1/chat/completions").parse().expect("addresses are ASCII"),
        time_scale,
        clock: Clock::start(),
        done: AtomicUsize::new(0),
        progress,
        label,
    });
    let clients = (0..workload.sessions.len()).map(|session| DemoClient::new(&shared, session));
    let Ok(clients) = drive(clients).await;
    let mut all = Driven { took: begun.elapsed(), lags: lag.end(), ..Driven::default() };
    clients.into_iter().for_each(|client| all.add(client.driven));
    all
}

/// State of all clients.
struct Shared {
    workload: Arc<ClientScripts>,
    http: HttpClient,
    uri: Uri,
    time_scale: f64,
    clock: Clock,
    /// Number of ended requests.
    done: AtomicUsize,
    progress: Progress,
    label: &'static str,
}

impl Shared {
    async fn rest(&self, ms: u32) {
        if self.time_scale > 0.0 {
            sleep(Duration::from_secs_f64(f64::from(ms) / 1e3 / self.time_scale)).await;
        }
    }

    /// Counts an ended request, and shows each quarter of the run.
    fn ended(&self) {
        let (done, planned) = (self.done.fetch_add(1, Ordering::Relaxed), self.workload.requests());
        if 4 * (done + 1) / planned > 4 * done / planned {
            self.progress.print(&format!("{}: {} of {planned} requests", self.label, done + 1));
        }
    }
}

/// One client with its session.
struct DemoClient {
    shared: Arc<Shared>,
    session: usize,
    start_ms: Option<u32>,
    /// Index of the present conversation, and its answers so far.
    conversation: usize,
    answers: Vec<String>,
    driven: Driven,
}

impl DemoClient {
    fn new(shared: &Arc<Shared>, session: usize) -> Self {
        let start_ms = Some(shared.workload.sessions[session].start_ms);
        let (shared, answers, driven) = (Arc::clone(shared), Vec::new(), Driven::default());
        Self { shared, session, start_ms, conversation: 0, answers, driven }
    }

    fn next_conversation(&mut self) {
        self.conversation += 1;
        self.answers.clear();
    }
}

impl Client for DemoClient {
    type Error = Infallible;

    async fn send_next(&mut self) -> Result<bool, Infallible> {
        let shared = Arc::clone(&self.shared);
        let Some(conversation) = shared.workload.sessions[self.session].conversations.get(self.conversation) else {
            return Ok(false);
        };
        if let Some(start_ms) = self.start_ms.take() {
            shared.rest(start_ms).await;
        }
        let turn = &conversation.turns[self.answers.len()];
        let body = conversation.body(MODEL, &self.answers);
        self.driven.digest = self.driven.digest.wrapping_add(fnv1a(&body));
        let answer = Answer::with_content();
        let mut exchange = shared.http.exchange(&shared.uri, body, shared.clock, answer).await;
        shared.ended();
        let failure = exchange.failure.as_ref().map(ToString::to_string);
        let failure = failure.or_else(|| exchange.answer.prompt_tokens().is_none().then(|| "no usage".to_owned()));
        if let Some(reason) = failure {
            // The next request of the conversation would have to quote the missing answer.
            self.driven.complain(reason);
            self.next_conversation();
            return Ok(true);
        }
        self.answers.extend(exchange.answer.content.take());
        self.driven.exchanges.push(exchange);
        shared.rest(turn.think_ms).await;
        if self.answers.len() == conversation.turns.len() {
            self.next_conversation();
        }
        Ok(true)
    }
}

impl Driven {
    fn add(&mut self, other: Self) {
        self.exchanges.extend(other.exchanges);
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
        let scripts = Arc::new(ClientScripts::new(3, 2, 7));
        let driven = run(&scripts, (engine.address(), 0.0), Progress::Silent, "test").await;
        engine.shutdown().await;
        driven
    }

    #[tokio::test]
    async fn repeated_runs_succeed_with_equal_requests() {
        let (first, second) = (driven(Faults::default()).await, driven(Faults::default()).await);
        assert_eq!((first.exchanges.len(), first.reasons.as_slice()), (7, [].as_slice()));
        assert_eq!(first.digest, second.digest, "quoted responses are equal, so requests are equal");
        let answers = || first.exchanges.iter().map(|exchange| &exchange.answer);
        assert!(answers().all(|answer| answer.prompt_tokens() > Some(2_000) && answer.gaps_us.len() >= 31));
        assert!(answers().any(|answer| answer.cached_tokens() > Some(2_000)), "later turns find the earlier ones");
    }

    #[tokio::test]
    async fn equal_errors_are_reported_once() {
        let driven = driven(Faults { status_share: 1.0, status: 503, ..Faults::default() }).await;
        assert!(driven.exchanges.is_empty());
        assert_eq!(driven.reasons, ["status 503 (503)"]);
    }
}
