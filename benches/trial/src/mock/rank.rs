//! Driver of one rank: steps the model in scaled time, publishes its events and delivers its tokens.
//!
//! One lock protects the rank's model, publisher and running requests. The lock is never held across an await. The
//! events of a step are passed to the socket before its tokens are delivered to any request. A request whose receiver
//! is dropped is cancelled. [`crate::engine::Rank`] models batching and cache; [`super::sockets`] has the sockets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::engine::{Block, CacheEvent, Load, Output, Refused, RequestSpec, Stage, Step, Tier};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until};

use super::faults::{Fault, FaultBoard};
use super::ledger::Ledger;
use super::publisher::{EventMessage, Publisher};
use super::sockets::EventSocket;
use crate::kv_events::Encoder;

/// Maximum number of waiting and running requests per rank; further ones are rejected.
const REQUESTS_MAX: usize = 65_536;

/// Start of virtual time in seconds since 1970. It is fixed, so that batches do not depend on the date.
const EPOCH_SECONDS: u64 = 1_700_000_000;

/// Time that an idle rank waits for a message to send before a delayed one.
const OVERTAKEN_WAIT: Duration = Duration::from_millis(20);

/// Maximum lag that a rank catches up. Beyond it the machine cannot keep the pace.
const LAG_MAX: Duration = Duration::from_millis(200);

/// Reasons for the rejection of a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTaken {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("{REQUESTS_MAX} requests are already queued")]
    Full,
}

/// Sums over an incarnation of a rank: requests for the last one, tokens for the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankCounters {
    /// Prompt tokens, each looked up in the cache once.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the cache.
    pub cache_hits: u64,
    /// Generated tokens.
    pub generation_tokens: u64,
    /// Finished requests.
    pub requests_finished: u64,
}

/// Driver of one incarnation of one rank.
pub(crate) struct RankDriver {
    state: Mutex<DriverState>,
    faults: Arc<FaultBoard>,
    /// Notified when there may be work.
    wake: Notify,
    /// Notified when the rank may be quiet.
    quiet: Notify,
}

struct DriverState {
    model: crate::engine::Rank,
    encoder: Encoder,
    publisher: Publisher,
    ledger: Ledger,
    removals: u64,
    events_published: u64,
    requests: BTreeMap<u64, RunningRequest>,
    /// Events that do not belong to a step.
    loose_events: Vec<CacheEvent>,
    counters: RankCounters,
    clock_us: u64,
    /// True from the start of a step until all its results are delivered.
    is_busy: bool,
    is_stopped: bool,
}

struct RunningRequest {
    prompt_tokens: u64,
    outputs: UnboundedSender<Output>,
}

/// Cancels its request on drop, and releases the blocks of a finished prefill.
pub(crate) struct RequestGuard {
    pub(crate) rank: Arc<RankDriver>,
    pub(crate) id: u64,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.rank.cancel(self.id);
        self.rank.release(self.id);
    }
}

/// Next action of a rank.
enum NextAction {
    Step(Step),
    Idle(Vec<EventMessage>),
}

impl RankDriver {
    pub(crate) fn new(
        model: crate::engine::Rank,
        encoder: Encoder,
        ring_messages_max: usize,
        faults: Arc<FaultBoard>,
    ) -> Self {
        let state = DriverState {
            publisher: Publisher::new(encoder.rank, ring_messages_max),
            ledger: Ledger::default(),
            removals: 0,
            events_published: 0,
            model,
            encoder,
            requests: BTreeMap::new(),
            loose_events: Vec::new(),
            counters: RankCounters::default(),
            clock_us: 0,
            is_busy: false,
            is_stopped: false,
        };
        Self { state: Mutex::new(state), faults, wake: Notify::new(), quiet: Notify::new() }
    }

    /// Submits a request. The returned channel delivers its tokens and closes early if the rank stops or has stopped: like
    /// a crashed process, it has no error response.
    pub(crate) fn submit(&self, spec: RequestSpec, stage: Stage) -> Result<UnboundedReceiver<Output>, NotTaken> {
        // The channel is effectively bounded: a request has at most its requested number of outputs.
        let (sender, outputs) = unbounded_channel();
        let mut state = self.lock();
        if state.is_stopped {
            return Ok(outputs);
        }
        if state.requests.len() >= REQUESTS_MAX {
            return Err(NotTaken::Full);
        }
        let (id, prompt_tokens) = (spec.id, spec.tokens.len() as u64);
        state.model.submit_stage(spec, stage)?;
        state.requests.insert(id, RunningRequest { prompt_tokens, outputs: sender });
        drop(state);
        self.wake.notify_one();
        Ok(outputs)
    }

    /// Cancels a request whose receiver was dropped. Has no effect on a request that has ended.
    pub(crate) fn cancel(&self, id: u64) {
        let mut state = self.lock();
        state.requests.remove(&id);
        state.model.cancel(id);
    }

    /// Releases the blocks of a finished prefill. Has no effect on other requests.
    fn release(&self, id: u64) {
        // Requests may have waited for the memory.
        if self.lock().model.release(id) > 0 {
            self.wake.notify_one();
        }
    }

    /// Ends the references of a session to blocks.
    pub(crate) fn close_session(&self, session: &str) {
        self.lock().model.close_session(session);
    }

    /// Clears the cache, that of a connector only for sleep. Returns false if a request holds blocks, which prevents it.
    pub(crate) fn reset_cache(&self, sleeps: bool) -> bool {
        let mut state = self.lock();
        let has_connector = state.encoder.format.dialect.has_connector();
        let host = state.model.held(Tier::Host);
        let cleared = state.model.reset_cache(has_connector && !sleeps);
        let is_cleared = cleared.is_some();
        let of_host = host.iter().filter(|_| is_cleared && (sleeps || !has_connector));
        let of_host = of_host.map(|block| CacheEvent::Removed { tier: Tier::Host, hash: block.hash });
        // A clear in vLLM's format is of the device only.
        if has_connector {
            state.ledger.apply(&of_host.collect::<Vec<_>>());
        } else {
            state.loose_events.extend(of_host);
        }
        state.loose_events.extend(cleared);
        drop(state);
        self.wake.notify_one();
        is_cleared
    }

    /// Ends all requests without a response and rejects new ones.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.is_stopped = true;
        state.requests.clear();
        drop(state);
        self.quiet.notify_waiters();
    }

    pub(crate) fn load(&self) -> Load {
        self.lock().model.load()
    }

    pub(crate) fn counters(&self) -> RankCounters {
        self.lock().counters
    }

    pub(crate) fn held(&self, tier: Tier) -> Vec<Arc<Block>> {
        self.lock().model.held(tier)
    }

    pub(crate) fn sequence_next(&self) -> u64 {
        self.lock().publisher.sequence_next()
    }

    pub(crate) fn events_published(&self) -> u64 {
        self.lock().events_published
    }

    /// Messages in reply to a replay request, or the reply to an audit request, which is numbered like the next message.
    pub(crate) fn replay(&self, sequence: u64) -> Vec<EventMessage> {
        let state = self.lock();
        match state.ledger.reply(sequence) {
            Some(payload) => vec![EventMessage { sequence: state.publisher.sequence_next(), payload }],
            None => state.publisher.replay(sequence),
        }
    }

    /// Virtual time in whole seconds since 1970.
    pub(crate) fn seconds(&self) -> u64 {
        EPOCH_SECONDS + self.lock().clock_us / 1_000_000
    }

    /// Returns whether nothing is running and nothing is left to publish. True for a stopped rank.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.lock();
        let is_done = state.model.is_idle() && state.loose_events.is_empty() && !state.publisher.holds_late();
        state.is_stopped || (is_done && !state.is_busy)
    }

    /// Returns when the rank is quiet.
    pub(crate) async fn quiet(&self) {
        loop {
            let fell_quiet = self.quiet.notified();
            // Registered before the check, so that no notification is lost between check and wait.
            if self.is_quiet() {
                return;
            }
            fell_quiet.await;
        }
    }

    /// Runs steps until `stop` is sent or dropped, then returns the socket.
    pub(crate) async fn drive(
        self: Arc<Self>,
        mut socket: EventSocket,
        pace: Pace,
        mut stop: oneshot::Receiver<()>,
    ) -> EventSocket {
        let mut due = Instant::now();
        let mut is_late_due = false;
        loop {
            match self.begin(is_late_due) {
                NextAction::Step(step) => {
                    due = pace.end_of(due, step.duration_us);
                    tokio::select! {
                        biased;
                        _ = &mut stop => break,
                        () = pace.wait(due) => {}
                    }
                    socket.send(self.publish(&step)).await;
                    self.deliver(step.outputs);
                }
                NextAction::Idle(messages) => {
                    socket.send(messages).await;
                    let holds_late = self.rest();
                    is_late_due = tokio::select! {
                        biased;
                        _ = &mut stop => break,
                        () = self.wake.notified() => false,
                        () = sleep(OVERTAKEN_WAIT), if holds_late => true,
                    };
                    due = Instant::now();
                }
            }
        }
        socket
    }

    fn begin(&self, is_late_due: bool) -> NextAction {
        let mut state = self.lock();
        state.is_busy = true;
        match state.model.step() {
            Some(mut step) => {
                // Current loose events precede the step. Later ones, until it is published, follow it.
                step.events.splice(0..0, state.loose_events.drain(..));
                NextAction::Step(step)
            }
            None => {
                let mut messages = Vec::new();
                state.batch(&[], &self.faults, &mut messages);
                if is_late_due {
                    messages.extend(state.publisher.take_late());
                }
                NextAction::Idle(messages)
            }
        }
    }

    fn publish(&self, step: &Step) -> Vec<EventMessage> {
        let (mut state, mut messages) = (self.lock(), Vec::new());
        state.clock_us += step.duration_us;
        state.batch(&step.events, &self.faults, &mut messages);
        messages
    }

    fn deliver(&self, outputs: Vec<Output>) {
        let mut state = self.lock();
        for output in outputs {
            let Some(request) = state.requests.get(&output.id) else { continue };
            let prompt_tokens = request.prompt_tokens;
            // A dropped receiver cancels its request separately.
            let _ = request.outputs.send(output);
            state.counters.generation_tokens += 1;
            if output.first {
                state.counters.prompt_tokens += prompt_tokens;
                // Transferred tokens are no hits of this rank's cache.
                state.counters.cache_hits += u64::from(output.cached_tokens - output.transferred_tokens);
            }
            if output.finished.is_some() {
                state.requests.remove(&output.id);
                state.counters.requests_finished += 1;
            }
        }
    }

    /// Marks the rank as idle. Returns whether a delayed message is waiting.
    fn rest(&self) -> bool {
        let mut state = self.lock();
        state.is_busy = false;
        let holds_late = state.publisher.holds_late();
        drop(state);
        self.quiet.notify_waiters();
        holds_late
    }

    fn lock(&self) -> MutexGuard<'_, DriverState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DriverState {
    /// Publishes `events` followed by the loose events as one batch, if there are any.
    fn batch(&mut self, events: &[CacheEvent], faults: &FaultBoard, out: &mut Vec<EventMessage>) {
        let mut all = events.to_vec();
        all.append(&mut self.loose_events);
        self.ledger.apply(&all);
        all.retain(|event| !self.omits(event, faults));
        self.events_published += all.len() as u64;
        if !all.is_empty() {
            let payload = self.encoder.batch(self.timestamp(), &all).into();
            self.publisher.publish(payload, faults, out);
        }
    }

    /// Whether a fault omits the event.
    fn omits(&mut self, event: &CacheEvent, faults: &FaultBoard) -> bool {
        let is_removal = matches!(event, CacheEvent::Removed { .. });
        self.removals += u64::from(is_removal);
        is_removal
            && faults.strikes(Fault::OmitRemoval, faults.get().omit_removal_share, self.encoder.rank, self.removals)
    }

    #[expect(clippy::cast_precision_loss, reason = "microseconds of a century fit 53 bits")]
    fn timestamp(&self) -> f64 {
        EPOCH_SECONDS as f64 + self.clock_us as f64 / 1e6
    }
}

/// Speed of virtual time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Virtual seconds per real second; 0 means as fast as possible.
    pub(crate) time_scale: f64,
}

impl Pace {
    /// End time of a step that starts at the scheduled end of the previous one. Timers have a resolution of about a
    /// millisecond, so the cumulative schedule is kept instead of single durations: steps after a late one do not wait
    /// until the lag is gone.
    fn end_of(self, begin: Instant, duration_us: u64) -> Instant {
        let now = Instant::now();
        if self.time_scale == 0.0 {
            return now;
        }
        let begin = if begin + LAG_MAX < now { now } else { begin };
        #[expect(clippy::cast_precision_loss, reason = "steps last far less than 2^53 µs")]
        let seconds = duration_us as f64 / 1e6 / self.time_scale;
        // The duration of a step is limited to one day.
        begin + Duration::from_secs_f64(seconds.min(86_400.0))
    }

    async fn wait(self, due: Instant) {
        if due > Instant::now() {
            sleep_until(due).await;
        } else {
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::engine::EngineConfig;

    use super::*;
    use crate::mock::{Dialect, Faults};

    fn rank() -> RankDriver {
        let config = EngineConfig { block_size: 4, max_model_len: 64, ..EngineConfig::default() };
        let encoder = Encoder { format: Dialect::VllmMap.into(), block_size: 4, rank: 0, lora_ids: Arc::default() };
        let faults = Arc::new(FaultBoard::new(0, Faults::default()));
        RankDriver::new(crate::engine::Rank::new(config).expect("valid"), encoder, 10, faults)
    }

    /// Kinds of the events in a payload, in order.
    fn kinds(payload: &[u8]) -> Vec<&'static str> {
        let find = |kind: &'static str| {
            payload
                .windows(kind.len())
                .enumerate()
                .filter(move |(_, w)| *w == kind.as_bytes())
                .map(move |(at, _)| (at, kind))
        };
        let mut found: Vec<_> = find("BlockStored").chain(find("AllBlocksCleared")).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, kind)| kind).collect()
    }

    #[test]
    fn a_reset_event_keeps_its_order_relative_to_a_step() {
        let rank = rank();
        assert!(rank.reset_cache(false));
        let _outputs = rank.submit(RequestSpec::new(1, vec![7; 9], 1), Stage::Whole).expect("accepted");
        let NextAction::Step(step) = rank.begin(false) else { panic!("a request waits") };
        assert!(rank.reset_cache(false), "the request has ended in this step");
        let messages = rank.publish(&step);
        assert_eq!(kinds(&messages[0].payload), ["AllBlocksCleared", "BlockStored", "AllBlocksCleared"]);
        rank.deliver(step.outputs);
        assert!(rank.held(Tier::Device).is_empty() && !rank.is_quiet());
        assert!(matches!(rank.begin(false), NextAction::Idle(messages) if messages.is_empty()));
        rank.rest();
        assert!(rank.is_quiet());
    }
}
