//! One rank at work: the model stepped in scaled time, its events published, its tokens delivered.
//!
//! Owns the rank's model, publisher and running requests behind one lock that is never held across a wait. Promises
//! that a step's events are handed to the socket before the tokens of that step reach any request, and that a request
//! whose reader is gone is cancelled. Leaves batching and cache to [`crate::engine::Rank`], sockets to
//! [`super::sockets`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::engine::{Block, CacheEvent, Load, Output, Refused, RequestSpec, Step, Tier};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until};

use super::faults::FaultBoard;
use super::publisher::{Message, Publisher};
use super::sockets::EventSocket;
use crate::kv_events::Encoder;

/// Requests that may wait and run on a rank; what comes then is refused.
const REQUESTS_MAX: usize = 65_536;

/// Virtual time begins here, in seconds since 1970, so that a run's batches do not depend on the day.
const EPOCH_SECONDS: u64 = 1_700_000_000;

/// How long an idle rank waits for the message that is to overtake another.
const OVERTAKEN_WAIT: Duration = Duration::from_millis(20);

/// A rank that is later than this stops catching up: the machine cannot keep the pace.
const LAG_MAX: Duration = Duration::from_millis(200);

/// Why a rank takes no request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTaken {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("{REQUESTS_MAX} requests wait already")]
    Full,
    #[error("the engine restarts")]
    Stopped,
}

/// Sums over a rank's incarnation, in tokens but for the last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) cache_queries: u64,
    pub(crate) cache_hits: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) requests_finished: u64,
}

/// One incarnation of one rank.
pub(crate) struct Rank {
    state: Mutex<State>,
    faults: Arc<FaultBoard>,
    /// There may be something to do.
    wake: Notify,
    /// The rank may have fallen quiet.
    quiet: Notify,
}

struct State {
    model: crate::engine::Rank,
    encoder: Encoder,
    publisher: Publisher,
    requests: BTreeMap<u64, Request>,
    /// Events that no step brought.
    loose_events: Vec<CacheEvent>,
    counters: Counters,
    clock_us: u64,
    /// Between the begin of a step and the hand-over of all that came of it.
    is_busy: bool,
    is_stopped: bool,
}

struct Request {
    prompt_tokens: u64,
    outputs: UnboundedSender<Output>,
}

/// What the rank does next.
enum Turn {
    Step(Step),
    Rest(Vec<Message>),
}

impl Rank {
    pub(crate) fn new(
        model: crate::engine::Rank,
        encoder: Encoder,
        ring_messages_max: usize,
        faults: Arc<FaultBoard>,
    ) -> Self {
        let state = State {
            publisher: Publisher::new(encoder.rank, ring_messages_max),
            model,
            encoder,
            requests: BTreeMap::new(),
            loose_events: Vec::new(),
            counters: Counters::default(),
            clock_us: 0,
            is_busy: false,
            is_stopped: false,
        };
        Self { state: Mutex::new(state), faults, wake: Notify::new(), quiet: Notify::new() }
    }

    /// Takes a request. Its tokens come through what is returned, which closes early when the rank stops.
    pub(crate) fn submit(&self, spec: RequestSpec) -> Result<UnboundedReceiver<Output>, NotTaken> {
        // Unbounded in form only: a request has no more outputs than it asked for.
        let (sender, outputs) = unbounded_channel();
        let mut state = self.lock();
        if state.is_stopped {
            return Err(NotTaken::Stopped);
        }
        if state.requests.len() >= REQUESTS_MAX {
            return Err(NotTaken::Full);
        }
        let (id, prompt_tokens) = (spec.id, spec.tokens.len() as u64);
        state.model.submit(spec)?;
        state.requests.insert(id, Request { prompt_tokens, outputs: sender });
        drop(state);
        self.wake.notify_one();
        Ok(outputs)
    }

    /// Ends a request whose reader is gone. One that has ended already is no error.
    pub(crate) fn cancel(&self, id: u64) {
        let mut state = self.lock();
        state.requests.remove(&id);
        state.model.cancel(id);
    }

    /// Clears the cache; whether it did, for it does not while a request holds blocks.
    pub(crate) fn reset_cache(&self) -> bool {
        let mut state = self.lock();
        let cleared = state.model.reset_cache();
        let is_cleared = cleared.is_some();
        state.loose_events.extend(cleared);
        drop(state);
        self.wake.notify_one();
        is_cleared
    }

    /// Looks for something to do, such as sending what a fault held back.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Ends all requests without an answer; the rank takes no more.
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

    pub(crate) fn counters(&self) -> Counters {
        self.lock().counters
    }

    pub(crate) fn held(&self, tier: Tier) -> Vec<Arc<Block>> {
        self.lock().model.held(tier)
    }

    pub(crate) fn sequence_next(&self) -> u64 {
        self.lock().publisher.sequence_next()
    }

    pub(crate) fn replay(&self, sequence: u64) -> Vec<Message> {
        self.lock().publisher.replay(sequence)
    }

    /// Virtual time in whole seconds since 1970.
    pub(crate) fn seconds(&self) -> u64 {
        EPOCH_SECONDS + self.lock().clock_us / 1_000_000
    }

    /// Whether nothing runs and nothing is left to publish, as it is once the rank has stopped.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.lock();
        let is_done = state.model.is_idle() && state.loose_events.is_empty() && state.publisher.is_drained();
        state.is_stopped || (is_done && !state.is_busy)
    }

    /// Comes back when the rank is quiet.
    pub(crate) async fn quiet(&self) {
        loop {
            let fell_quiet = self.quiet.notified();
            // Notifications count from here, so that none falls between looking and waiting.
            if self.is_quiet() {
                return;
            }
            fell_quiet.await;
        }
    }

    /// Steps until `stop` is sent or dropped, then gives the socket back.
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
                Turn::Step(step) => {
                    due = pace.end_of(due, step.duration_us);
                    tokio::select! {
                        biased;
                        _ = &mut stop => break,
                        () = pace.wait(due) => {}
                    }
                    socket.send(self.publish(&step)).await;
                    self.deliver(step.outputs);
                }
                Turn::Rest(messages) => {
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

    fn begin(&self, is_late_due: bool) -> Turn {
        let mut state = self.lock();
        state.is_busy = true;
        match state.model.step() {
            Some(mut step) => {
                // What is loose now came before the step; what comes until it is published, behind it.
                step.events.splice(0..0, state.loose_events.drain(..));
                Turn::Step(step)
            }
            None => {
                let mut messages = Vec::new();
                state.batch(&[], &self.faults, &mut messages);
                state.publisher.flush(is_late_due, &self.faults, &mut messages);
                Turn::Rest(messages)
            }
        }
    }

    fn publish(&self, step: &Step) -> Vec<Message> {
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
            // A reader that is gone cancels by itself.
            let _ = request.outputs.send(output);
            state.counters.generation_tokens += 1;
            if output.first {
                state.counters.prompt_tokens += prompt_tokens;
                state.counters.cache_queries += prompt_tokens;
                state.counters.cache_hits += u64::from(output.cached_tokens);
            }
            if output.finished.is_some() {
                state.requests.remove(&output.id);
                state.counters.requests_finished += 1;
            }
        }
    }

    /// Says whether a message waits to be overtaken.
    fn rest(&self) -> bool {
        let mut state = self.lock();
        state.is_busy = false;
        let holds_late = state.publisher.holds_late();
        drop(state);
        self.quiet.notify_waiters();
        holds_late
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Publishes `events`, then the loose ones, as one batch; nothing if there is nothing.
    fn batch(&mut self, events: &[CacheEvent], faults: &FaultBoard, out: &mut Vec<Message>) {
        let mut all = events.to_vec();
        all.append(&mut self.loose_events);
        if !all.is_empty() {
            let payload = self.encoder.batch(self.timestamp(), &all).into();
            self.publisher.publish(payload, faults, out);
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "microseconds of a century fit 53 bits")]
    fn timestamp(&self) -> f64 {
        EPOCH_SECONDS as f64 + self.clock_us as f64 / 1e6
    }
}

/// How virtual time passes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Virtual seconds a real one; 0 is as many as the machine can.
    pub(crate) time_scale: f64,
}

impl Pace {
    /// When a step ends that begins when the one before it should have ended. Timers are coarse (about a millisecond),
    /// so it is sums that are kept, not single steps: late ones are followed by some that do not wait.
    fn end_of(self, begin: Instant, duration_us: u64) -> Instant {
        let now = Instant::now();
        if self.time_scale == 0.0 {
            return now;
        }
        let begin = if begin + LAG_MAX < now { now } else { begin };
        #[expect(clippy::cast_precision_loss, reason = "steps last far less than 2^53 µs")]
        let seconds = duration_us as f64 / 1e6 / self.time_scale;
        // A step that would last longer than a day ends in a day.
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

    fn rank() -> Rank {
        let config = EngineConfig { block_size: 4, max_model_len: 64, ..EngineConfig::default() };
        let encoder = Encoder { format: Dialect::VllmMap.into(), block_size: 4, rank: 0, lora_ids: Arc::default() };
        let faults = Arc::new(FaultBoard::new(0, Faults::default()));
        Rank::new(crate::engine::Rank::new(config).expect("valid"), encoder, 10, faults)
    }

    /// The kinds of event in a payload, in order.
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
    fn a_reset_is_told_in_its_place_before_and_behind_a_step() {
        let rank = rank();
        assert!(rank.reset_cache());
        let _outputs = rank.submit(RequestSpec::new(1, vec![7; 9], 1)).expect("it fits");
        let Turn::Step(step) = rank.begin(false) else { panic!("a request waits") };
        assert!(rank.reset_cache(), "the request has ended in this step");
        let messages = rank.publish(&step);
        assert_eq!(kinds(&messages[0].payload), ["AllBlocksCleared", "BlockStored", "AllBlocksCleared"]);
        rank.deliver(step.outputs);
        assert!(rank.held(Tier::Device).is_empty() && !rank.is_quiet());
        assert!(matches!(rank.begin(false), Turn::Rest(messages) if messages.is_empty()));
        rank.rest();
        assert!(rank.is_quiet());
    }

    #[test]
    fn a_stopped_rank_ends_its_requests_and_takes_no_more() {
        let rank = rank();
        let mut outputs = rank.submit(RequestSpec::new(1, [1, 2], 5)).expect("it fits");
        rank.stop();
        assert!(matches!(outputs.try_recv(), Err(tokio::sync::mpsc::error::TryRecvError::Disconnected)));
        assert!(matches!(rank.submit(RequestSpec::new(2, [1, 2], 5)), Err(NotTaken::Stopped)));
        assert!(rank.is_quiet());
    }
}
