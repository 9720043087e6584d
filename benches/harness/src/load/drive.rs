//! Clients of a workload for an endpoint: each request at its arrival time, or at the end of an earlier request.
//!
//! All clients take requests from one queue, in order. In an open loop a client waits for the arrival time of its request.
//! If all clients are busy, or a body is not ready in time, the request is sent late and keeps its arrival time. Bodies
//! prepared in advance and bodies in flight are limited to [`BODIES_BYTES_MAX`] together, unless a single body is larger.
//! The clock starts when the maximum number of bodies is prepared, so that a burst is sent without delays.

use std::convert::Infallible;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

use hdrhistogram::Histogram;
use pointsman_trial::driver::{self, Client, Clock, Exchange};
use pointsman_trial::workload::{Arrivals, Request, Workload};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::spawn_blocking;

use super::body::Form;
use crate::Failed;
use crate::progress::Progress;
use crate::results::RequestRecord;

/// Maximum memory for bodies in bytes: some thousands of prompts of average length.
pub const BODIES_BYTES_MAX: u64 = 1 << 29;

/// Maximum number of bodies prepared in advance.
const BODIES_AHEAD: usize = 2_048;

/// Allocation unit of the memory for bodies, in bytes.
const PAGE_BYTES: u64 = 1_024;

/// Maximum gap between tokens in the histogram, in µs: an hour.
const GAP_US_MAX: u64 = 3_600_000_000;

/// A prepared body with its share of the memory.
struct Ready {
    index: usize,
    due_us: u64,
    prompt_tokens: u64,
    body: Vec<u8>,
    memory: OwnedSemaphorePermit,
}

/// Result of a workload.
#[derive(Debug)]
pub struct Driven {
    /// One record per request, in the workload's order.
    pub requests: Vec<RequestRecord>,
    /// Gaps between the tokens of an answer, in µs.
    pub itl_us: Histogram<u64>,
    /// End of the last answer.
    pub ended_us: u64,
}

/// Sends all requests of `workload` with `exchange`, with at most `connections` in flight, and waits for all answers.
///
/// Gaps between tokens exclude the first `warmup` requests. The arguments of `exchange` are a body and the run's clock.
///
/// # Errors
/// A body cannot be serialized.
pub async fn drive<E, F>(
    workload: Workload,
    form: Form,
    connections: NonZeroU32,
    warmup: usize,
    exchange: E,
) -> Result<Driven, Failed>
where
    E: Fn(Vec<u8>, Clock) -> F + Send + Sync + 'static,
    F: Future<Output = Exchange> + Send + 'static,
{
    let (clients, is_open_loop) = match &workload.arrivals {
        Arrivals::OpenLoop => (connections, true),
        Arrivals::Concurrency(concurrency) => (connections.min(*concurrency), false),
        Arrivals::Causal { .. } => return Err("programs run in simulations only".into()),
    };
    let records = Mutex::new(Records::new(workload.requests.len(), warmup));
    let (ahead, bodies) = mpsc::channel(BODIES_AHEAD);
    let (begin, begun) = oneshot::channel();
    let writer = tokio::spawn(write(workload.requests, form, ahead, begin));
    // The writer signals by dropping its sender.
    let _ = begun.await;
    let (bodies, clock) = (tokio::sync::Mutex::new(bodies), Clock::start());
    let queue = Arc::new(BodyQueue { bodies, is_open_loop, clock, exchange, records });
    let clients = (0..clients.get()).map(|_| QueueClient(Arc::clone(&queue)));
    drop(driver::drive(clients).await);
    writer.await.expect("writing does not panic")?;
    let queue = Arc::into_inner(queue).expect("all clients have ended");
    let Records { requests, itl_us, .. } = queue.records.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Driven { requests, itl_us, ended_us: clock.now_us() })
}

/// Prepared bodies in order, and the records of those sent.
struct BodyQueue<E> {
    bodies: tokio::sync::Mutex<mpsc::Receiver<Ready>>,
    is_open_loop: bool,
    clock: Clock,
    exchange: E,
    records: Mutex<Records>,
}

struct QueueClient<E>(Arc<BodyQueue<E>>);

impl<E, F> Client for QueueClient<E>
where
    E: Fn(Vec<u8>, Clock) -> F + Send + Sync + 'static,
    F: Future<Output = Exchange> + Send + 'static,
{
    type Error = Infallible;

    async fn send_next(&mut self) -> Result<bool, Infallible> {
        let BodyQueue { bodies, is_open_loop, clock, exchange, records } = &*self.0;
        // A request of a closed loop is due when a client is free, one of an open loop at its arrival time.
        let freed_us = clock.now_us();
        let Some(ready) = bodies.lock().await.recv().await else { return Ok(false) };
        let Ready { index, due_us, prompt_tokens, body, memory } = ready;
        let due_us = if *is_open_loop { due_us } else { freed_us };
        clock.reach(due_us).await;
        let exchanged = exchange(body, *clock).await;
        drop(memory);
        records.lock().unwrap_or_else(PoisonError::into_inner).add(index, due_us, prompt_tokens, &exchanged);
        Ok(true)
    }
}

/// Prepares bodies in order on threads that may block. Drops `begin` when the limit of prepared bodies is reached.
async fn write(
    requests: Vec<Request>,
    form: Form,
    ahead: mpsc::Sender<Ready>,
    begin: oneshot::Sender<()>,
) -> Result<(), Failed> {
    let mut begin = Some(begin);
    let pages_max = u32::try_from(BODIES_BYTES_MAX / PAGE_BYTES).expect("a million pages");
    let memory = Arc::new(Semaphore::new(pages_max as usize));
    let form = Arc::new(form);
    for (index, request) in requests.into_iter().enumerate() {
        let pages = Form::bytes_max(&request).div_ceil(PAGE_BYTES);
        let pages = u32::try_from(pages).unwrap_or(pages_max).min(pages_max);
        let is_full = ahead.capacity() == 0 || memory.available_permits() < pages as usize;
        drop(begin.take_if(|_| is_full));
        let memory = Arc::clone(&memory).acquire_many_owned(pages).await.expect("the semaphore is never closed");
        let (due_us, prompt_tokens, form) = (request.arrival_us, request.prompt_tokens(), Arc::clone(&form));
        let body = spawn_blocking(move || form.write(&request)).await.expect("writing does not panic")?;
        if ahead.send(Ready { index, due_us, prompt_tokens, body, memory }).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Records of a run.
struct Records {
    requests: Vec<RequestRecord>,
    itl_us: Histogram<u64>,
    warmup: usize,
    progress: Progress,
}

impl Records {
    fn new(requests: usize, warmup: usize) -> Self {
        let itl_us = Histogram::new_with_bounds(1, GAP_US_MAX, 3).expect("bounds in order");
        let progress = Progress::new(requests, "requests");
        Self { requests: vec![RequestRecord::default(); requests], itl_us, warmup, progress }
    }

    fn add(&mut self, index: usize, due_us: u64, prompt_tokens: u64, exchanged: &Exchange) {
        let Exchange { sent_us, ended_us, ref answer, rank, ref failure } = *exchanged;
        if index >= self.warmup {
            answer.gaps_us.iter().for_each(|&gap_us| self.itl_us.saturating_record(u64::from(gap_us).max(1)));
        }
        self.requests[index] = RequestRecord {
            due_us,
            sent_us,
            first_token_us: answer.first_token_us,
            ended_us: Some(ended_us),
            prompt_tokens: answer.prompt_tokens().unwrap_or(prompt_tokens),
            output_tokens: answer.output_tokens(),
            cached_tokens: answer.cached_tokens(),
            rank,
            failure: failure.as_ref().map(ToString::to_string),
            ..RequestRecord::default()
        };
        self.progress.add(1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pointsman_trial::driver::Answer;
    use pointsman_trial::workload::generate::SharedPrefix;

    use super::super::body::{Api, Extra};
    use super::*;

    /// Requests with arrival times 0, 100 ms, 200 ms and so on.
    fn workload(requests: u32, arrivals: Arrivals) -> Workload {
        let shared =
            SharedPrefix { requests, prefix_tokens: 8.into(), own_tokens: 8.into(), ..SharedPrefix::default() };
        let mut workload = shared.generate(1);
        workload.requests.iter_mut().zip(0..).for_each(|(request, n)| request.arrival_us = n * 100_000);
        Workload { arrivals, ..workload }
    }

    fn form() -> Form {
        Form { api: Api::Completions, model: "m".to_owned(), vocabulary: 100, extra: Extra::default() }
    }

    /// Sends to an endpoint that responds after `answer_ms`. Returns due and send times in ms.
    async fn sent_ms(workload: Workload, connections: u32, answer_ms: u64) -> Vec<(u64, u64)> {
        let exchange = move |_, clock: Clock| async move {
            let sent_us = clock.now_us();
            tokio::time::sleep(Duration::from_millis(answer_ms)).await;
            Exchange { sent_us, ended_us: clock.now_us(), answer: Answer::default(), rank: None, failure: None }
        };
        let connections = NonZeroU32::new(connections).expect("not 0");
        let driven = drive(workload, form(), connections, 0, exchange).await.expect("driven");
        driven.requests.iter().map(|record| (record.due_us / 1_000, record.sent_us / 1_000)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_loop_sends_at_arrival_times_despite_slow_responses() {
        let sent = sent_ms(workload(5, Arrivals::OpenLoop), 10, 60_000).await;
        assert_eq!(sent, [(0, 0), (100, 100), (200, 200), (300, 300), (400, 400)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_request_keeps_its_arrival_time() {
        let sent = sent_ms(workload(5, Arrivals::OpenLoop), 2, 1_000).await;
        assert_eq!(sent, [(0, 0), (100, 100), (200, 1_000), (300, 1_100), (400, 2_000)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_loop_keeps_a_constant_number_in_flight() {
        let two = Arrivals::Concurrency(NonZeroU32::new(2).expect("not 0"));
        let sent = sent_ms(workload(5, two), 10, 1_000).await;
        assert_eq!(sent, [(0, 0), (0, 0), (1_000, 1_000), (1_000, 1_000), (2_000, 2_000)]);
    }
}
