//! Event loop of the simulation: takes the next event from the heap, advances the clock and informs the router and the
//! engines.
//!
//! The router has settled before it receives any input. The stages of a request occur in order (placed, first token,
//! output blocks, end). A run that cannot end returns an error. The ranks execute the steps, and the target routes the
//! requests.
//!
//! Steps without relevant output (no event, and only tokens between two block boundaries) touch neither the router nor
//! the clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use ahash::AHashSet;
use hdrhistogram::Histogram;
use pointsman::protocol::WorkerRank;
use pointsman_trial::engine::{CacheEvent, EngineHash, Output, RequestSpec, Stage, Step};
use pointsman_trial::workload::{Request, Workload};

use super::feed::Feed;
use super::heap::{Event, Heap};
use super::rank::{FleetRank, announcements};
use super::time::VirtualTime;
use crate::Failed;
use crate::fleet::Setup;
use crate::results::{RankSample, RequestRecord, Run};
use crate::targets::{Call, Routed, Target, misplaced, refused};

/// Interval of rank samples.
const SAMPLE_US: u64 = 1_000_000;

/// Maximum time with only idle ranks, unplaced requests and no further arrivals: an hour.
const IDLE_SAMPLES_MAX: u32 = 3_600;

/// Maximum gap between two tokens in the histogram: an hour.
const ITL_MAX_US: u64 = 3_600_000_000;

/// Results of `route`, in order of completion.
type Answers<H> = Arc<Mutex<Vec<(usize, Result<Routed<H>, Failed>)>>>;

/// State of a running simulation.
pub(super) struct Driver<'a, T: Target> {
    setup: &'a Setup,
    workload: &'a Workload,
    target: Arc<T>,
    time: VirtualTime,
    now_us: u64,
    heap: Heap,
    ranks: Vec<FleetRank>,
    /// Ranks that may start a step at the end of the current instant.
    ready: BTreeSet<usize>,
    /// By rank: published events that the router has not received yet.
    announced: Vec<VecDeque<Vec<T::Event>>>,
    answers: Answers<T::Handle>,
    /// Prompts that were sent to the router and are not placed yet.
    unplaced: BTreeMap<usize, Arc<[u32]>>,
    /// By request: its state on a rank.
    running: Vec<Option<Running<T::Handle>>>,
    unfinished: usize,
    unsent: usize,
    feed: Feed,
    /// Blocks that any rank has been given to compute.
    computed: AHashSet<EngineHash>,
    idle_samples: u32,
    records: Vec<RequestRecord>,
    itl_us: Histogram<u64>,
    samples: Vec<RankSample>,
    ended_us: u64,
    preemptions: u64,
}

/// A request on a rank.
struct Running<H> {
    handle: H,
    last_token_us: u64,
    /// The decode leg, until the transfer of the prompt.
    decode: Option<DecodeLeg>,
}

/// A decode leg that waits for its prompt.
struct DecodeLeg {
    prefill_rank: usize,
    rank: usize,
    tokens: Arc<[u32]>,
}

impl<'a, T: Target> Driver<'a, T> {
    pub(super) fn new(target: T, time: VirtualTime, setup: &'a Setup, workload: &'a Workload) -> Result<Self, Failed> {
        let requests = &workload.requests;
        let mut heap = Heap::default();
        let (feed, first) = Feed::new(workload);
        for (at_us, request) in first {
            heap.push(at_us, Event::Arrival(request));
        }
        heap.push(0, Event::Sample);
        let record = |(number, request): (usize, &Request)| RequestRecord {
            prompt_tokens: request.prompt_tokens(),
            program: feed.link(number).map(|link| link.program),
            ..RequestRecord::default()
        };
        let ranks = fleet_ranks(setup)?;
        Ok(Self {
            setup,
            workload,
            target: Arc::new(target),
            time,
            now_us: 0,
            heap,
            ready: BTreeSet::new(),
            announced: ranks.iter().map(|_| VecDeque::new()).collect(),
            ranks,
            answers: Arc::default(),
            unplaced: BTreeMap::new(),
            running: requests.iter().map(|_| None).collect(),
            unfinished: requests.len(),
            unsent: requests.len(),
            records: requests.iter().enumerate().map(record).collect(),
            feed,
            computed: AHashSet::new(),
            idle_samples: 0,
            itl_us: Histogram::new_with_bounds(1, ITL_MAX_US, 3).expect("valid histogram bounds"),
            samples: Vec::new(),
            ended_us: 0,
            preemptions: 0,
        })
    }

    /// Runs until every request has ended, then shuts the target down.
    pub(super) async fn run(mut self) -> Result<Run, Failed> {
        while self.unfinished > 0 {
            match self.heap.next_us() {
                Some(at_us) if at_us <= self.now_us => self.happen().await?,
                Some(_) if !self.ready.is_empty() => self.begin_steps(),
                Some(at_us) => self.now_us = at_us,
                None => return Err(self.stuck()),
            }
        }
        debug_assert!(self.ranks.iter().all(FleetRank::owes_nothing), "all requests have ended");
        self.deliver_the_rest().await?;
        if let Some(bookings @ 1..) = self.target.bookings() {
            return Err(format!("{} holds {bookings} bookings after the last request has ended", T::NAME).into());
        }
        drop(self.time); // its timers may now pass without delay
        if let Some(target) = Arc::into_inner(self.target) {
            target.shutdown().await;
        }
        Ok(Run {
            requests: self.records,
            itl_us: self.itl_us,
            rank_samples: self.samples,
            ranks: self.ranks.len() as u32,
            warmup_requests: self.setup.warmup_requests,
            ended_us: self.ended_us,
            preemptions: Some(self.preemptions),
        })
    }

    async fn happen(&mut self) -> Result<(), Failed> {
        match self.heap.pop() {
            Some(Event::Arrival(number)) => self.on_arrival(number).await,
            Some(Event::StepEnd(rank)) => self.on_step_end(rank).await,
            Some(Event::Announcement(rank)) => self.on_announcement(rank).await,
            Some(Event::Transfer(number)) => self.on_transfer(number).await,
            Some(Event::Sample) => self.on_sample().await,
            None => Ok(()),
        }
    }

    /// All events of an instant are processed before a step starts, so that an engine batches simultaneous requests.
    fn begin_steps(&mut self) {
        for rank in mem::take(&mut self.ready) {
            if let Some(ends_us) = self.ranks[rank].begin(self.now_us) {
                self.heap.push(ends_us, Event::StepEnd(rank));
            }
        }
    }

    async fn on_arrival(&mut self, number: usize) -> Result<(), Failed> {
        self.meet_target().await?;
        self.unsent -= 1;
        let record = &mut self.records[number];
        (record.due_us, record.sent_us) = (self.now_us, self.now_us);
        let request = &self.workload.requests[number];
        let tokens = request.tokens();
        self.unplaced.insert(number, tokens.as_slice().into());
        let session = request.session.filter(|_| self.feed.link(number).is_some());
        let session = session.map(|session| format!("session-{session}"));
        let call = Call { id: format!("request-{number}"), tokens, session };
        let (target, answers) = (Arc::clone(&self.target), Arc::clone(&self.answers));
        // A separate task, because the router may suspend the request.
        drop(tokio::spawn(async move {
            let routed = target.route(call).await;
            answers.lock().unwrap_or_else(PoisonError::into_inner).push((number, routed));
        }));
        self.settle().await
    }

    async fn on_step_end(&mut self, rank: usize) -> Result<(), Failed> {
        let Some(Step { outputs, events, preempted, .. }) = self.ranks[rank].end() else { return Ok(()) };
        self.preemptions += u64::from(preempted);
        let block_size = u64::from(self.setup.block_size().get());
        let is_news = |output: &Output| {
            output.first || output.finished.is_some() || u64::from(output.position).is_multiple_of(block_size)
        };
        let has_news = outputs.iter().any(is_news);
        if has_news {
            self.meet_target().await?;
        }
        for output in &outputs {
            self.on_output(output, block_size).await?;
        }
        if has_news {
            self.settle().await?;
        }
        self.announce(rank, &events);
        self.ready.insert(rank);
        Ok(())
    }

    async fn on_output(&mut self, output: &Output, block_size: u64) -> Result<(), Failed> {
        let number = output.id as usize;
        let Some(running) = &mut self.running[number] else { return Ok(()) };
        if running.decode.is_some() {
            return self.on_prefilled(output).await;
        }
        let record = &mut self.records[number];
        record.output_tokens += 1;
        if output.first {
            record.first_token_us = Some(self.now_us);
            let is_whole = self.setup.disaggregation.is_none();
            if is_whole {
                record.cached_tokens = Some(output.cached_tokens.into());
            }
            if self.setup.is_streamed {
                if is_whole {
                    self.target.delivered(&mut running.handle, output.cached_tokens.into());
                }
                let done = self.target.prefill_completed(&mut running.handle).await;
                done.map_err(refused::<T>("complete the prefill of", number))?;
            }
        } else if number >= self.setup.warmup_requests && self.now_us > running.last_token_us {
            // The tokens of one step arrive together and count as one interval.
            self.itl_us.saturating_record(self.now_us - running.last_token_us);
        }
        running.last_token_us = self.now_us;
        if self.setup.is_streamed && record.output_tokens.is_multiple_of(block_size) {
            let counted = self.target.output_block(&mut running.handle).await;
            counted.map_err(refused::<T>("count the output of", number))?;
        }
        if output.finished.is_some() {
            record.ended_us = Some(self.now_us);
            if let Some(running) = self.running[number].take() {
                self.target.free(running.handle).await.map_err(refused::<T>("free", number))?;
            }
            self.finish(number);
        }
        Ok(())
    }

    /// The prefill booking ends with the leg, and the transfer starts.
    async fn on_prefilled(&mut self, output: &Output) -> Result<(), Failed> {
        let number = output.id as usize;
        let Some(running) = &mut self.running[number] else { return Ok(()) };
        let record = &mut self.records[number];
        record.cached_tokens = Some(output.cached_tokens.into());
        self.target.delivered(&mut running.handle, output.cached_tokens.into());
        let done = self.target.prefill_completed(&mut running.handle).await;
        done.map_err(refused::<T>("complete the prefill of", number))?;
        let transfer_us = self.setup.disaggregation.map_or(0, |setup| setup.transfer_us(record.prompt_tokens));
        self.heap.push(self.now_us + transfer_us, Event::Transfer(number));
        Ok(())
    }

    /// Releases the blocks on the prefill rank and submits the decode leg.
    async fn on_transfer(&mut self, number: usize) -> Result<(), Failed> {
        let Some(leg) = self.running[number].as_mut().and_then(|running| running.decode.take()) else { return Ok(()) };
        self.ranks[leg.prefill_rank].release(number as u64);
        self.ready.extend([leg.prefill_rank, leg.rank]);
        let names = self.ranks[leg.rank].names(&leg.tokens);
        let spec = RequestSpec::new(number as u64, leg.tokens, self.workload.requests[number].output_tokens);
        if let Err(reason) = self.ranks[leg.rank].submit(spec, Stage::Decode, names) {
            self.meet_target().await?;
            self.fail(number, reason.to_string());
            if let Some(running) = self.running[number].take() {
                self.target.free(running.handle).await.map_err(refused::<T>("free", number))?;
            }
            self.settle().await?;
        }
        Ok(())
    }

    fn announce(&mut self, rank: usize, events: &[CacheEvent]) {
        if events.is_empty() {
            return;
        }
        let (name, announced) = (self.ranks[rank].name, announcements(events, self.setup.block_size(), T::hash));
        let events = announced.into_iter().map(|(tier, data)| self.target.event(name, tier, data));
        self.announced[rank].push_back(events.collect());
        self.heap.push(self.now_us + self.setup.event_delay_us, Event::Announcement(rank));
    }

    async fn on_announcement(&mut self, rank: usize) -> Result<(), Failed> {
        let Some(events) = self.announced[rank].pop_front() else { return Ok(()) };
        self.meet_target().await?;
        self.target.apply_events(events).await.map_err(not_applied::<T>)?;
        self.settle().await
    }

    async fn on_sample(&mut self) -> Result<(), Failed> {
        self.meet_target().await?; // a queued request may only wait for time to pass
        for (number, rank) in (0..).zip(&self.ranks) {
            self.samples.push(rank.sample(self.now_us, number));
        }
        self.heap.push(self.now_us + SAMPLE_US, Event::Sample);
        let is_idle = self.unsent == 0 && self.ready.is_empty() && self.ranks.iter().all(FleetRank::is_idle);
        self.idle_samples = if is_idle { self.idle_samples + 1 } else { 0 };
        if self.idle_samples > IDLE_SAMPLES_MAX { Err(self.stuck()) } else { Ok(()) }
    }

    /// Delivers the last published events, so that the router has all events before the check for remaining bookings.
    async fn deliver_the_rest(&mut self) -> Result<(), Failed> {
        while let Some(at_us) = self.heap.next_us() {
            match self.heap.pop() {
                Some(Event::Announcement(rank)) => {
                    self.now_us = self.now_us.max(at_us);
                    self.on_announcement(rank).await?;
                }
                Some(Event::Arrival(_) | Event::StepEnd(_) | Event::Transfer(_) | Event::Sample) | None => {}
            }
        }
        Ok(())
    }

    /// Advances the target to the current time and processes the effects of its timers.
    async fn meet_target(&mut self) -> Result<(), Failed> {
        self.time.reach(self.now_us).await;
        self.place().await
    }

    /// Lets the target finish all possible work, and submits the requests that it has placed.
    async fn settle(&mut self) -> Result<(), Failed> {
        self.target.settle().await.map_err(not_applied::<T>)?;
        self.time.settle().await;
        self.place().await
    }

    async fn place(&mut self) -> Result<(), Failed> {
        let answers = mem::take(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner));
        for (number, routed) in answers {
            let Some(tokens) = self.unplaced.remove(&number) else { continue };
            match routed {
                Ok(routed) => self.on_placed(number, routed, tokens).await?,
                Err(reason) => self.fail(number, reason.to_string()),
            }
        }
        Ok(())
    }

    async fn on_placed(&mut self, number: usize, routed: Routed<T::Handle>, tokens: Arc<[u32]>) -> Result<(), Failed> {
        let Routed { rank: name, handle, cached_tokens, ttft_us } = routed;
        let index = |name: WorkerRank| self.setup.fleet.index(name).ok_or_else(|| misplaced::<T>(number, name));
        let rank = index(name)?;
        let decode_rank = self.target.decode_rank(&handle).map(index).transpose()?;
        let candidates = self.setup.disaggregation.map_or(self.ranks.len(), |setup| setup.prefill_ranks as usize);
        let candidates = &self.ranks[..candidates];
        let names = self.ranks[rank].names(&tokens);
        let record = &mut self.records[number];
        record.placed_us = Some(self.now_us);
        record.predicted_cached_tokens = cached_tokens;
        record.predicted_ttft_us = ttft_us;
        record.rank = Some(rank as u32);
        let known = names.iter().take_while(|name| self.computed.contains(*name)).count();
        record.known_tokens = Some(known as u64 * u64::from(self.setup.block_size().get()));
        self.computed.extend(names.iter().copied());
        record.reachable_tokens = candidates.iter().map(|rank| rank.cached_tokens(&names)).max();
        let foreseen_us = |rank: &FleetRank| rank.first_token_us(self.now_us, record.prompt_tokens, &names);
        let least_us = candidates.iter().map(foreseen_us).min().unwrap_or_default();
        record.regret_us = Some(foreseen_us(&self.ranks[rank]) - least_us);

        let (stage, output_tokens) = match decode_rank {
            Some(_) => (Stage::Prefill, 1),
            None => (Stage::Whole, self.workload.requests[number].output_tokens),
        };
        let decode = decode_rank.map(|decode| DecodeLeg { prefill_rank: rank, rank: decode, tokens: tokens.clone() });
        let spec = RequestSpec::new(number as u64, tokens, output_tokens);
        if let Err(reason) = self.ranks[rank].submit(spec, stage, names) {
            self.fail(number, reason.to_string());
            return self.target.free(handle).await.map_err(refused::<T>("free", number));
        }
        self.running[number] = Some(Running { handle, last_token_us: self.now_us, decode });
        self.ready.insert(rank);
        Ok(())
    }

    fn fail(&mut self, number: usize, reason: String) {
        self.records[number].failure = Some(reason);
        self.finish(number);
    }

    fn finish(&mut self, number: usize) {
        self.unfinished -= 1;
        for (delay_us, next) in self.feed.ended(number) {
            self.heap.push(self.now_us + delay_us, Event::Arrival(next));
        }
        self.ended_us = self.now_us;
    }

    fn stuck(&self) -> Failed {
        let (target, requests, at_us) = (T::NAME, self.unfinished, self.now_us);
        format!("{target} leaves {requests} requests unplaced over idle engines, {at_us} µs after the start").into()
    }
}

fn not_applied<T: Target>(reason: Failed) -> Failed {
    format!("{} could not apply events: {reason}", T::NAME).into()
}

/// Idle ranks with empty caches, in order of their dense numbers.
fn fleet_ranks(setup: &Setup) -> Result<Vec<FleetRank>, Failed> {
    let mut ranks = Vec::with_capacity(setup.fleet.ranks());
    for (worker, engine) in setup.fleet.worker_ids().zip(&setup.engines) {
        for rank in 0..setup.fleet.dp_size {
            let rank = FleetRank::new(WorkerRank::new(worker, rank), *engine);
            ranks.push(rank.map_err(|reason| format!("worker {worker}: {reason}"))?);
        }
    }
    Ok(ranks)
}
