//! Open loop of requests to several gateways in turn.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use pointsman_trial::driver::{Client, ClientError, ClientOptions, HttpClient, drive};
use serde_json::{Value, json};
use tokio::task::AbortHandle;
use tokio::time::{Interval, interval};

/// Maximum number of requests in flight, far above those of a healthy fleet.
const REQUESTS_MAX: u32 = 8_192;

/// Tokens per block.
pub(super) const BLOCK_SIZE: u32 = 16;

/// Whole blocks of each prompt: a prefix that a group of prompts shares, and the rest.
const SHARED_BLOCKS: u32 = 4;
const OWN_BLOCKS: u32 = 4;

/// Prompts with the same prefix.
const GROUP: u32 = 20;

/// Tokens of the whole blocks of a prompt.
pub(super) const CACHEABLE_TOKENS: u64 = ((SHARED_BLOCKS + OWN_BLOCKS) * BLOCK_SIZE) as u64;

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Token ids of a prompt: the blocks above, and a part of one.
fn prompt(n: u32) -> Vec<u32> {
    let shared = (0..SHARED_BLOCKS * BLOCK_SIZE).map(|at| (n / GROUP) * 7_919 + at);
    let own = (0..OWN_BLOCKS * BLOCK_SIZE + 3).map(|at| 40_000 + (n * 131 + at * 17) % 60_000);
    shared.chain(own).collect()
}

/// Index of the prompt of request `n`: each prompt once, then all in a scattered order.
fn prompt_index(n: u64, prompts: u64) -> u64 {
    if n < prompts { n } else { n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32) % prompts }
}

/// Whether a response has its end: the end mark of a stream, otherwise choices in valid JSON.
fn is_whole(body: &[u8], is_stream: bool) -> bool {
    if is_stream {
        return body.ends_with(b"data: [DONE]\n\n");
    }
    serde_json::from_slice::<Value>(body).is_ok_and(|body| body["choices"].is_array())
}

/// HTTP client with the bearer token of operators, or without.
pub(super) fn http(api_key: Option<&str>) -> Result<HttpClient, ClientError> {
    let connections_max = REQUESTS_MAX;
    HttpClient::new(&ClientOptions { api_key, timeout: TIMEOUT, connections_max, ..ClientOptions::default() })
}

/// One gateway of the traffic.
#[derive(Debug, Default)]
struct Slot {
    /// None while the gateway is left out.
    address: Mutex<Option<SocketAddr>>,
    ended: AtomicU64,
    failures: Mutex<Vec<String>>,
}

#[derive(Debug)]
struct Shared {
    http: HttpClient,
    /// Times of the requests, and the turn of the gateways.
    ticks: tokio::sync::Mutex<(Interval, usize)>,
    prompts: u32,
    slots: Vec<Slot>,
    is_paused: AtomicBool,
    is_streaming: AtomicBool,
    sent: AtomicU64,
    ended: AtomicU64,
}

/// A running open loop; ends when dropped.
#[derive(Debug)]
pub(super) struct Traffic {
    shared: Arc<Shared>,
    task: AbortHandle,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Traffic {
    /// Starts a paused loop without gateways.
    pub(super) fn start(slots: usize, prompts: u32, rate: u32) -> Result<Self, ClientError> {
        let shared = Arc::new(Shared {
            http: http(None)?,
            ticks: tokio::sync::Mutex::new((interval(Duration::from_secs(1) / rate), 0)),
            prompts,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            is_paused: AtomicBool::new(true),
            is_streaming: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        });
        let clients: Vec<_> = (0..REQUESTS_MAX).map(|_| TrafficClient(Arc::clone(&shared))).collect();
        let task = tokio::spawn(async { drop(drive(clients).await) }).abort_handle();
        Ok(Self { shared, task })
    }

    /// Includes a gateway, or leaves it out.
    pub(super) fn set_gateway(&self, slot: usize, address: Option<SocketAddr>) {
        *lock(&self.shared.slots[slot].address) = address;
    }

    pub(super) fn set_paused(&self, is_paused: bool) {
        self.shared.is_paused.store(is_paused, SeqCst);
    }

    /// Whether every second response is streamed. Otherwise none is.
    pub(super) fn set_streaming(&self, is_streaming: bool) {
        self.shared.is_streaming.store(is_streaming, SeqCst);
    }

    /// Whether no request is in flight.
    pub(super) fn is_quiet(&self) -> bool {
        // In this order, because a request ends after it was sent.
        let ended = self.shared.ended.load(SeqCst);
        self.shared.sent.load(SeqCst) == ended
    }

    /// Number of ended requests.
    pub(super) fn ended(&self) -> u64 {
        self.shared.ended.load(SeqCst)
    }

    /// Number of ended requests of one gateway.
    pub(super) fn ended_of(&self, slot: usize) -> u64 {
        self.shared.slots[slot].ended.load(SeqCst)
    }

    /// Failures of one gateway since the last call.
    pub(super) fn take_failures(&self, slot: usize) -> Vec<String> {
        std::mem::take(&mut *lock(&self.shared.slots[slot].failures))
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A client that sends the next request of the loop.
struct TrafficClient(Arc<Shared>);

impl Client for TrafficClient {
    type Error = Infallible;

    async fn send_next(&mut self) -> Result<bool, Infallible> {
        let (slot, address, n) = self.0.next().await;
        self.0.send(slot, address, n).await;
        Ok(true)
    }
}

impl Shared {
    /// Waits for the time of the next request. Returns its gateway and its number.
    async fn next(&self) -> (usize, SocketAddr, u64) {
        let mut ticks = self.ticks.lock().await;
        let (interval, turn) = &mut *ticks;
        loop {
            interval.tick().await;
            if self.is_paused.load(SeqCst) {
                continue;
            }
            let slots = (*turn..).take(self.slots.len()).map(|slot| slot % self.slots.len());
            let address = |slot: usize| Some((slot, (*lock(&self.slots[slot].address))?));
            if let Some((slot, address)) = slots.filter_map(address).next() {
                *turn = slot + 1;
                return (slot, address, self.sent.fetch_add(1, SeqCst));
            }
        }
    }

    async fn send(&self, slot: usize, address: SocketAddr, n: u64) {
        let index = u32::try_from(prompt_index(n, self.prompts.into())).expect("an index");
        let is_stream = self.is_streaming.load(SeqCst) && n.is_multiple_of(2);
        let body = json!({ "model": "mock", "max_tokens": 8, "prompt": prompt(index), "stream": is_stream });
        let uri = format!("http://{address}/v1/completions").parse().expect("addresses are ASCII");
        let failure = match self.http.fetch(&uri, Some(body.to_string().into())).await {
            Ok((StatusCode::OK, body)) if is_whole(&body, is_stream) => None,
            Ok((status, body)) => {
                let problem = if status == StatusCode::OK { "incomplete response" } else { status.as_str() };
                Some(format!("{problem}: {}", String::from_utf8_lossy(&body)))
            }
            Err(error) => Some(error.to_string()),
        };
        let slot = &self.slots[slot];
        lock(&slot.failures).extend(failure);
        slot.ended.fetch_add(1, SeqCst);
        self.ended.fetch_add(1, SeqCst);
    }
}
