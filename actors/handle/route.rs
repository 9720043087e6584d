//! Placing and booking requests: `Router::route`, bookings by request id, and retries of lost requests.
//!
//! Every call returns a placement, a rejection with its reason, or an error. Tokens stay in the calling task. The
//! scheduler decides; the sequence actors book.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tracing::Span;

use super::attempts::{Attempts, RESTART_WAIT};
use super::edge::Edge;
use super::intake::Intake;
use super::lease_guard::LeaseGuard;
use super::overlap::{OverlapContinuation, OverlapReceiver, query_shared_cache};
use super::placement::Placement;
use super::request::{AddRequest, Preparation, Prepared};
use super::router::Router;
use crate::actors::delivery::join::ReplyToken;
use crate::actors::delivery::reply::Reply;
use crate::actors::radix::{RadixMsg, overlap_token};
use crate::actors::scheduler::{RequestContext, SchedulerMsg};
use crate::actors::sequence::table::SequenceAddress;
use crate::actors::telemetry::{self, BookingResult, PhaseTimestamps, Prediction, RoutePhases};
use crate::actors::views::rank::RankEntry;
use crate::actors::views::status::RouterPhase;
use crate::directory::{Lease, LeaseState};
use crate::error::{RequestError, RouteError};
use crate::load::Weight;
use crate::protocol::BlockHash;
use crate::request::RouteRequest;
use crate::schedule::{Decision, Purpose, Rejection, Request, Target, Waits};

/// Maximum number of bookings for a request whose rank is removed before its reply.
const PLACEMENTS_MAX: u32 = 6;

impl Router {
    /// Places a request: chooses its rank and books it there, in one step.
    ///
    /// Costs one hash of the prompt on the calling task; an idle router wakes no thread. Cancel-safe: dropping the
    /// future frees the booking.
    ///
    /// # Errors
    /// See [`RouteError`]. A request that is lost with an actor is retried before an error is returned.
    pub async fn route(&self, request: RouteRequest<'_>) -> Result<Placement, RouteError> {
        let Edge { config, meters, .. } = &**self.edge();
        let span = telemetry::route_span(&config.pool, request.request_id.as_deref());
        let undecided = meters.decisions.begin(&span);
        let placed = self.place(&request, &span).await;
        undecided.end(&placed, BookingResult::Chosen);
        placed
    }

    async fn place(&self, request: &RouteRequest<'_>, span: &Span) -> Result<Placement, RouteError> {
        let request_id = request.request_id.as_deref().ok_or(RouteError::MissingRequestId)?;
        let prepared = self.prepare(request)?;
        telemetry::trace_hashes(span, prepared.hashes.as_ref());
        let mut attempts = 0;
        loop {
            let timed = (span, request.options.phases);
            let (guard, decision, phases) = self.book(request_id, &prepared, Target::Any, timed).await?;
            // The removal of the rank since the decision has ended the booking.
            if let Some(address) = self.strands().sequences.get(decision.slot, decision.generation) {
                let Edge { block_size, meters, .. } = &**self.edge();
                let hashes = prepared.hashes.as_ref().filter(|_| request.options.routing_hashes).cloned();
                let decision = decision.with_routing_hashes(hashes);
                // A prediction above 0 is evaluated even if the index is incomplete.
                let is_index_complete = decision.cached_tokens() > 0 || self.is_index_complete_for(&address.entry);
                let prediction = Prediction::new(prepared.predicted_kind(), prepared.prompt_tokens, is_index_complete);
                if !span.is_disabled() {
                    span.record("rank", tracing::field::display(decision.rank()));
                }
                meters.placed(prepared.prompt_tokens, block_size.tokens(), &decision, prediction.kind.is_some());
                address.entry.counts.placed();
                let (prompt, targets) = (prepared.provable().cloned(), prepared.targets());
                return Ok(Placement::new((guard, phases), address, decision, (prediction, prompt), targets));
            }
            attempts += 1;
            if attempts == PLACEMENTS_MAX {
                return Err(RouteError::Lost { attempts });
            }
        }
    }

    /// The rank that [`Router::route`] would choose now. Makes no booking and needs no request id.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn find_best_match(&self, request: RouteRequest<'_>) -> Result<Decision, RouteError> {
        let prepared = self.prepare(&request)?;
        let hashes = prepared.hashes.as_ref().filter(|_| request.options.routing_hashes).cloned();
        match self.ask(&prepared, Purpose::Report).await? {
            Reply::Placed(decision) => Ok(decision.with_routing_hashes(hashes)),
            Reply::Rejected(reason) => Err(reason.into()),
            Reply::LoadSnapshot(_) | Reply::Explained(_) => Err(RouteError::Lost { attempts: 0 }),
        }
    }

    /// Books a request on a rank chosen by the embedder. The booking lasts until [`Router::free`], or until
    /// `load.booking_liveness_ms` passes without a report.
    ///
    /// # Errors
    /// See [`RouteError`]; [`UnknownRank`](crate::schedule::Rejection::UnknownRank) when the rank is not registered.
    pub async fn add_request(&self, request: AddRequest<'_>) -> Result<(), RouteError> {
        let span = Span::none();
        let undecided = self.edge().meters.decisions.begin(&span);
        let added = self.add(request, &span).await;
        undecided.end(&added, BookingResult::Given);
        added
    }

    async fn add(&self, request: AddRequest<'_>, span: &Span) -> Result<(), RouteError> {
        let AddRequest { request_id, rank, cached_tokens, expected_prefill_duration, .. } = request;
        let prepared = self.prepare(&request.into_route())?;
        let prepared = if cached_tokens.is_some() { prepared.without_overlap() } else { prepared };
        let target = Target::Exactly { rank, cached_tokens, expected_duration: expected_prefill_duration };
        let (guard, decision, _) = self.book(request_id, &prepared, target, (span, false)).await?;
        if self.strands().sequences.get(decision.slot, decision.generation).is_none() {
            return Err(Rejection::UnknownRank(rank).into()); // the rank was removed, which ended the booking
        }
        let lease = Arc::clone(&guard.lease);
        guard.detach();
        // `LeaseExpiry` may have ended the bookings by id before this one was among them.
        if self.views().status.is_down() {
            self.edge().ender.end(&lease);
        }
        Ok(())
    }

    /// Reports the first token of a request. Repeated calls have no effect.
    ///
    /// # Errors
    /// When no booking has the id.
    pub fn mark_prefill_completed(&self, request_id: &str) -> Result<(), RequestError> {
        let lease = self.lease(request_id)?;
        if lease.complete_prefill()
            && let Some(address) = self.address_of(&lease)
        {
            address.prefill_completed(&lease);
        }
        Ok(())
    }

    /// Reports one more output block of a request; `decay` as in [`Placement::output_block`].
    ///
    /// # Errors
    /// When no booking has the id, or the decay is outside [0, 1].
    pub fn add_output_block(&self, request_id: &str, decay: Option<f64>) -> Result<(), RequestError> {
        let decay = decay.map(Weight::new).transpose()?;
        let lease = self.lease(request_id)?;
        if !self.edge().config.load.track_output_blocks {
            return Ok(());
        }
        lease.push_output_block(decay);
        self.reconcile(&lease);
        Ok(())
    }

    /// Ends the booking of a request.
    ///
    /// # Errors
    /// When no booking has the id.
    pub fn free(&self, request_id: &str) -> Result<(), RequestError> {
        let lease = self.lease(request_id)?;
        lease.freed.store(true, Ordering::SeqCst);
        self.edge().ender.end(&lease);
        Ok(())
    }

    /// Reports that a request is still running, and so extends its booking by id.
    ///
    /// # Errors
    /// When no booking has the id.
    pub fn touch(&self, request_id: &str) -> Result<(), RequestError> {
        self.lease(request_id).map(drop)
    }

    /// Lease of a request, with its expiry extended by this report.
    fn lease(&self, request_id: &str) -> Result<Arc<Lease>, RequestError> {
        let lease = self.intake().directory.find(request_id);
        let lease = lease.ok_or_else(|| RequestError::NotFound(request_id.to_owned()))?;
        lease.seen(self.edge().clock.now());
        Ok(lease)
    }

    fn reconcile(&self, lease: &Arc<Lease>) {
        if let Some(address) = self.address_of(lease) {
            address.reconcile(lease);
        }
    }

    /// Address of the rank that a lease is booked on.
    fn address_of(&self, lease: &Lease) -> Option<Arc<SequenceAddress>> {
        match lease.state() {
            LeaseState::Booked { slot, generation } => self.strands().sequences.get(slot, generation),
            LeaseState::Pending | LeaseState::Ended => None,
        }
    }

    /// Books a request, and retries it if it is lost with an actor.
    async fn book(
        &self,
        request_id: &str,
        prepared: &Prepared,
        target: Target,
        timed: (&Span, bool),
    ) -> Result<(LeaseGuard, Decision, Option<RoutePhases>), RouteError> {
        let mut attempts = Attempts::default();
        loop {
            self.views().status.up()?;
            let before = self.views().status.state();
            let permit = self.intake().admit(&self.strands().scheduler)?;
            let lease = self.intake().directory.enter(request_id, prepared.prompt.clone(), self.edge().clock.now())?;
            if !prepared.request_keys.is_empty() {
                let _ = lease.request_keys.set(prepared.request_keys);
            }
            let guard = LeaseGuard::new(self.edge(), Arc::clone(&lease));
            // Restart time is excluded from the phase timings of a lost request.
            let Edge { meters, clock, .. } = &**self.edge();
            let timestamps = if attempts.is_first() { meters.phases.sample(&lease, timed, *clock) } else { None };
            let answer = self.submit(prepared, target, Purpose::Book, Some(lease), permit, timestamps.clone());
            match self.views().status.reply_of(answer, before).await {
                Some(Reply::Placed(decision)) => {
                    let phases = timestamps
                        .map(|timestamps| meters.phases.record(&timestamps, prepared.started, &guard.lease, timed.0));
                    return Ok((guard, decision, phases));
                }
                Some(Reply::Rejected(reason)) => {
                    guard.was_rejected();
                    return Err(reason.into());
                }
                Some(Reply::LoadSnapshot(_) | Reply::Explained(_)) => return Err(RouteError::Lost { attempts: 0 }),
                None if guard.lease.freed.load(Ordering::SeqCst) => return Err(RouteError::Freed),
                None => {
                    drop(guard); // frees the id for the next attempt
                    attempts.count_lost(self.has_restarted(before.starts()).await?)?;
                }
            }
        }
    }

    /// Queries without a booking, and retries if the query is lost with an actor.
    pub(super) async fn ask(&self, prepared: &Prepared, purpose: Purpose) -> Result<Reply, RouteError> {
        let mut attempts = Attempts::default();
        loop {
            self.views().status.up()?;
            let before = self.views().status.state();
            let permit = self.intake().admit(&self.strands().scheduler)?;
            let answer = self.submit(prepared, Target::Any, purpose, None, permit, None);
            match self.views().status.reply_of(answer, before).await {
                Some(answered) => return Ok(answered),
                None => attempts.count_lost(self.has_restarted(before.starts()).await?)?,
            }
        }
    }

    /// Whether the index has every block of the rank, and at least one. Only then is a prediction of 0 evidence.
    fn is_index_complete_for(&self, entry: &RankEntry) -> bool {
        entry.cells.holdings.held_blocks() > 0
            && entry.source.is_complete()
            && !self.views().cold.borrow().contains(&entry.rank)
    }

    pub(super) fn prepare(&self, request: &RouteRequest<'_>) -> Result<Prepared, RouteError> {
        let Edge { config, block_size, clock, .. } = &**self.edge();
        let block_size = NonZeroU32::new(block_size.tokens()).unwrap_or(NonZeroU32::MIN);
        let Intake { output_lengths, speculates, .. } = self.intake();
        let limits = self.views().fleet.prompt_limits();
        let (now, speculates) = (clock.now(), *speculates);
        let preparation = Preparation { config, block_size, now, limits, output_lengths, speculates };
        Prepared::new(&preparation, request)
    }

    /// Sends a request through the shards to the scheduler.
    fn submit(
        &self,
        prepared: &Prepared,
        target: Target,
        purpose: Purpose,
        lease: Option<Arc<Lease>>,
        permit: OwnedSemaphorePermit,
        timestamps: Option<Arc<PhaseTimestamps>>,
    ) -> oneshot::Receiver<Reply> {
        let (sender, answer) = oneshot::channel();
        // Only a booking without a chosen rank may be queued.
        let may_wait = self.intake().queueing && target == Target::Any;
        let waits = lease.as_ref().filter(|_| may_wait).map(|lease| {
            Box::new(Waits {
                booking: lease.booking(),
                arrival: lease.arrival(),
                block_hashes: prepared.block_hashes().filter(|hashes| !hashes.is_empty()).cloned(),
            })
        });
        let speculative_prompt = lease.as_ref().and_then(|_| prepared.speculative_prompt.clone()).map(Box::new);
        let context = RequestContext { lease, answer: sender, permit, speculative_prompt, timestamps };
        let options = prepared.options.clone();
        let plain = Request::new(context, prepared.prompt.clone(), prepared.prompt_tokens);
        let request = Request { target, purpose, options, waits, ..plain };
        match prepared.block_hashes() {
            Some(hashes) => {
                let receiver = OverlapReceiver::Scheduler(request, Arc::downgrade(&self.strands().scheduler));
                self.query_overlap(hashes, prepared.prompt_tokens, receiver, target == Target::Any);
            }
            None => self.strands().scheduler.tell(SchedulerMsg::Decide(request)),
        }
        answer
    }

    /// Queries every shard, and the shared cache if present. The last one to respond forwards the collected overlaps.
    pub(super) fn query_overlap(
        &self,
        hashes: &Arc<[BlockHash]>,
        prompt_tokens: u32,
        receiver: OverlapReceiver,
        with_shared_cache: bool,
    ) {
        let reusable_blocks = prompt_tokens.saturating_sub(1) / self.block_size().max(1);
        let first = ReplyToken::open(0, OverlapContinuation::new(Arc::clone(hashes), reusable_blocks, receiver));
        if !hashes.is_empty() {
            if let Some(cache) = self.shared_cache().filter(|_| with_shared_cache) {
                let (cache, meters) = (Arc::clone(cache), self.edge().meters.shared_cache.clone());
                let timeout_ms = self.config().shared_cache.timeout_ms;
                tokio::spawn(query_shared_cache(cache, timeout_ms, meters, first.fork()));
            }
            for shard in self.strands().shards.iter() {
                shard.tell(RadixMsg::Overlap(overlap_token(&first)));
            }
        }
        drop(first);
    }

    /// Whether more than `starts` actors were started again within [`RESTART_WAIT`]; an error when the router is down.
    async fn has_restarted(&self, starts: u64) -> Result<bool, RouteError> {
        let mut status = self.views().status.subscribe();
        let restarted = status.wait_for(|status| status.starts() > starts || status.phase != RouterPhase::Serving);
        // Without a restart in time, retry anyway: an attempt is cheap.
        let is_in_time = tokio::time::timeout(RESTART_WAIT, restarted).await.is_ok();
        self.views().status.up()?;
        Ok(is_in_time)
    }
}
