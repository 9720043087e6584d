//! Admission: selection of the next requests among arrivals and waiting requests.
//!
//! Decides whether a request must wait, whether it may, and when its wait ends. Without a threshold in any class
//! nothing waits, and requests are decided in order of arrival, many per batch. With a threshold they are decided one
//! at a time, so that each sees the load left by the previous one.

use std::collections::VecDeque;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use super::eligible::EligibilityInputs;
use super::pending::longest_blocks;
use super::program_holds::ProgramHold;
use super::{Effect, LoadView, PendingRequest, Purpose, Rejection, Request, ResolvedOptions, Schedule, Target};
use crate::config::SessionAffinity;
use crate::protocol::{BookingId, Timestamp, WorkerRank};
use crate::queue::{
    Backpressure, ClassId, Depth, LaneKey, LimitKind, QueueEntry, RETRY_AFTER_MAX, RETRY_AFTER_MIN, TenantKey,
    UnknownClass,
};
use crate::select::{Draw, Filter, RankOverlap, TierOverlap};

/// Maximum requests per round of load queries.
const BATCH_MAX: usize = 64;

/// Maximum overlap refreshes per step.
const REFRESHES_MAX: usize = 64;

/// Maximum held calls, and evaluations of a rank for them, when room may have become free.
const HELD_MAX: usize = 1_024;
const HELD_EVALUATIONS_MAX: usize = 16_384;

/// Interval of queue evaluation while load decays with time.
pub(super) const DECAY_RECHECK: Duration = Duration::from_millis(20);

impl<T> PendingRequest<T> {
    /// Inputs of its eligibility, with the class if it waits.
    pub(super) fn eligibility_inputs(&self) -> EligibilityInputs<'_> {
        EligibilityInputs {
            number: self.number,
            prompt_tokens: self.request.prompt_tokens,
            options: self.request.options.as_deref(),
            session: self.session,
            begins: self.begins,
            class: self.class,
            full: &self.full,
        }
    }

    pub(super) fn due(&self) -> Option<Timestamp> {
        self.request.options.as_ref().and_then(|options| options.due)
    }

    fn arrival(&self) -> Option<Timestamp> {
        self.request.waits.as_ref().map(|waits| waits.arrival)
    }

    /// Whether it requests a placement or its preview.
    fn asks_for_place(&self) -> bool {
        matches!(self.request.purpose, Purpose::Book | Purpose::Report)
    }
}

impl<T> Schedule<T> {
    /// Accepts a request. It is evaluated after the batch in flight, if any.
    pub(super) fn arrive(&mut self, request: Request<T>, effects: &mut VecDeque<Effect<T>>) {
        let number = self.requests;
        self.requests += 1;
        let fingerprint = request.prompt.fingerprint();
        let session = self.session_rank(&request);
        let pending = PendingRequest::new(number, fingerprint, request, session);
        if self.is_expired(&pending) {
            effects.push_back(self.expired(pending));
        } else {
            self.arrivals.push_back(pending);
        }
    }

    fn session_rank(&mut self, request: &Request<T>) -> Option<WorkerRank> {
        let session_id = request.options.as_ref()?.session_id.as_deref()?;
        self.sessions.rank_of(session_id, self.pool.now)
    }

    /// Updates the session: a recent decision may have started it, or its rank may have left.
    pub(super) fn renew_session(&mut self, pending: &mut PendingRequest<T>) {
        pending.session = self.session_rank(&pending.request);
    }

    /// Counts the last context of its session as cached on the rank of the session, if that publishes no KV events: nothing
    /// else is known of its cache.
    fn credit_session<V: LoadView>(&self, pending: &mut PendingRequest<T>, loads: &V) {
        let PendingRequest { request, session, longest_blocks, .. } = pending;
        let settings = &self.active.settings;
        let bound = session.filter(|_| settings.rules.credits_sessions).and_then(|rank| self.pool.ranks.position(rank));
        let rank = bound.map(|position| &self.pool.ranks.as_slice()[position]);
        let Some(rank) = rank.filter(|rank| loads.index_changed_at(rank.slot()).is_none()) else { return };
        let session_id = request.options.as_ref().and_then(|options| options.session_id.as_deref());
        let context_tokens = session_id.map_or(0, |session_id| self.sessions.context_tokens(session_id));
        let blocks = (context_tokens / settings.pool.block_size).min(request.prompt.block_count());
        let is_its = |known: &&mut RankOverlap| (known.slot, known.generation) == (rank.slot(), rank.generation);
        match request.overlaps.iter_mut().find(is_its) {
            _ if blocks == 0 => return,
            Some(known) => known.overlap.device_blocks = known.overlap.device_blocks.max(blocks),
            None => {
                let overlap = TierOverlap { device_blocks: blocks, ..TierOverlap::default() };
                request.overlaps.push(RankOverlap { slot: rank.slot(), generation: rank.generation, overlap });
            }
        }
        *longest_blocks = blocks.max(*longest_blocks);
    }

    /// Reads the state of all loads on which the next batch decides.
    pub(super) fn prepare<V: LoadView>(&mut self, loads: &V, effects: &mut VecDeque<Effect<T>>) {
        self.pool.ranks.take_working_changes();
        self.update_working_sets();
        let pool = &mut self.pool;
        pool.ranks.refresh(loads, pool.now);
        if self.learns_typical
            && let Some(typical) = pool.typical.update_speeds(pool.ranks.iter_mut(), loads, pool.now)
        {
            pool.typical.wait_seconds = pool.ranks.mean_wait_seconds();
            pool.typical.step_ratio = pool.ranks.mean_step_ratio();
            pool.ranks.measure(loads, typical);
            if self.active.settings.is_in_seconds() {
                effects.push_back(Effect::PublishTypical { speed: typical, rate: pool.arrival_rate.rate(pool.now) });
            }
        }
        pool.peers = loads.peer_arrivals();
        self.active.settings.rules.warm_up(&mut pool.ranks, loads, pool.now);
        self.active.settings.rules.look_at_engines(&mut pool.ranks, loads, pool.now);
    }

    /// The next requests to decide; none if all present requests wait.
    pub(super) fn next_batch<V: LoadView>(
        &mut self,
        loads: &V,
        effects: &mut VecDeque<Effect<T>>,
    ) -> VecDeque<PendingRequest<T>> {
        let mut batch = self.take_batch(loads, effects);
        for pending in &mut batch {
            self.credit_session(pending, loads);
            pending.begins = self.begins(pending);
        }
        batch
    }

    /// Whether the program of a request has to begin on some rank, because none holds half of the prompt: a shorter match is
    /// probably a system prompt.
    fn begins(&self, pending: &PendingRequest<T>) -> bool {
        let settings = &self.active.settings;
        let is_program = |options: &ResolvedOptions| {
            options.session_id.is_some() && options.overrides.overlap_score_credit != Some(0.0)
        };
        settings.pool.counts_overlap
            && settings.rules.session_affinity != SessionAffinity::Off
            && pending.request.options.as_deref().is_some_and(is_program)
            && pending.held_blocks() < pending.fingerprint.block_count() / 2
    }

    /// Copies changed working sets to the ranks.
    pub(super) fn update_working_sets(&mut self) {
        for rank in self.sessions.take_changed() {
            self.pool.ranks.set_working_tokens(rank, self.sessions.working_tokens(rank));
        }
    }

    fn take_batch<V: LoadView>(&mut self, loads: &V, effects: &mut VecDeque<Effect<T>>) -> VecDeque<PendingRequest<T>> {
        if !self.queueing {
            return std::iter::from_fn(|| self.arrivals.pop_front()).take(BATCH_MAX).collect();
        }
        loop {
            if let Some(first) = self.again.pop_front() {
                if self.is_expired(&first) {
                    effects.push_back(self.expired(first));
                    continue;
                }
                return VecDeque::from([first]);
            }
            if let Some(pending) = self.pop_dispatchable(loads) {
                return VecDeque::from([pending]);
            }
            let passing = if self.is_serial { VecDeque::new() } else { self.take_passing() };
            if !passing.is_empty() {
                return passing;
            }
            let Some(arrival) = self.arrivals.pop_front() else { return VecDeque::new() };
            if let Some(pending) = self.admit(arrival, loads, effects) {
                return VecDeque::from([pending]);
            }
        }
    }

    /// The next arrivals that are not held, in a pool without thresholds.
    fn take_passing(&mut self) -> VecDeque<PendingRequest<T>> {
        let mut passing = VecDeque::new();
        while passing.len() < BATCH_MAX
            && let Some(arrival) = self.arrivals.pop_front()
        {
            if self.may_hold(&arrival) {
                self.arrivals.push_front(arrival);
                break;
            }
            passing.push_back(arrival);
        }
        passing
    }

    /// Returns requests that need another query to the head of the queue.
    pub(super) fn query_again(&mut self, mut requests: VecDeque<PendingRequest<T>>) {
        let line = if self.is_serial { &mut self.again } else { &mut self.arrivals };
        while let Some(pending) = requests.pop_back() {
            line.push_front(pending);
        }
    }

    /// Decides on an arrival: returns it if it proceeds, otherwise queues or rejects it.
    fn admit<V: LoadView>(
        &mut self,
        mut pending: PendingRequest<T>,
        loads: &V,
        effects: &mut VecDeque<Effect<T>>,
    ) -> Option<PendingRequest<T>> {
        if self.is_expired(&pending) {
            effects.push_back(self.expired(pending));
            return None;
        }
        if pending.request.purpose == Purpose::LoadSnapshot || pending.request.target != Target::Any {
            return Some(pending);
        }
        self.renew_session(&mut pending);
        self.credit_session(&mut pending, loads);
        let (class, cached_tokens) = match self.class_of(&pending) {
            Ok(class) => class,
            Err(unknown) => {
                let reason = Rejection::UnknownClass(unknown);
                effects.push_back(Effect::Reject { context: pending.request.context, reason });
                return None;
            }
        };
        pending.class = Some(class);
        if !pending.asks_for_place() {
            return Some(pending); // an explanation shows that the request would wait
        }
        pending.full = self.program_holds.full_ranks(&self.pool, &pending, class, cached_tokens);
        self.active.settings.rules.evaluate(&self.pool.ranks, pending.eligibility_inputs(), &mut self.eligibility);
        let open = self.eligibility.count_open();
        if open > 0 && self.program_holds.holds(class) {
            return Some(pending);
        }
        if open > 0 {
            return self.admit_in_turn(pending, class, open, loads, effects);
        }
        // Only busy and sleeping ranks justify waiting; every other reason is reported immediately.
        if !self.eligibility.waits() {
            return Some(pending);
        }
        if let Some(refused) = self.start_refusal(&pending, class) {
            effects.push_back(Effect::Reject { context: pending.request.context, reason: refused.into() });
            return None;
        }
        let case = self.active.case(&self.pool, &pending, 0, loads);
        if let Some(missed) = case.targets_missed_by_all(&self.eligibility) {
            let reason = Rejection::TargetsMissed(missed);
            effects.push_back(Effect::Reject { context: pending.request.context, reason });
            return None;
        }
        self.hold(pending, class, effects)
    }

    /// Class of a request, and its prompt tokens on the best rank.
    pub(super) fn class_of(&mut self, pending: &PendingRequest<T>) -> Result<(ClassId, u32), UnknownClass> {
        let name = pending.request.options.as_ref().and_then(|options| options.policy_class.as_deref());
        let cached_tokens = self.best_cached_tokens(pending.eligibility_inputs(), &pending.request.overlaps);
        let uncached_tokens = pending.request.prompt_tokens.saturating_sub(cached_tokens);
        Ok((self.queue.class_of(name, uncached_tokens)?, cached_tokens))
    }

    /// Queues a request for which ranks are open if requests of other replicas precede. Returns one that does not or
    /// cannot wait.
    fn admit_in_turn<V: LoadView>(
        &mut self,
        pending: PendingRequest<T>,
        class: ClassId,
        open: usize,
        loads: &V,
        effects: &mut VecDeque<Effect<T>>,
    ) -> Option<PendingRequest<T>> {
        let Some(arrival) = pending.arrival().filter(|_| pending.request.purpose == Purpose::Book) else {
            return Some(pending);
        };
        let head = self.queue_head().map_or(arrival, |head| head.min(arrival));
        if !self.turn.must_yield(loads, open, head, self.pool.now) || self.may_wait(&pending, class).is_err() {
            return Some(pending);
        }
        self.turn.give_way(self.pool.now);
        self.look_again = true;
        self.hold(pending, class, effects)
    }

    /// Queues or rejects a request for which all ranks are busy. Returns requests that cannot wait (queries, and
    /// bookings without a way to cancel them), which are decided as if no rank were busy.
    pub(super) fn hold(
        &mut self,
        mut pending: PendingRequest<T>,
        class: ClassId,
        effects: &mut VecDeque<Effect<T>>,
    ) -> Option<PendingRequest<T>> {
        let waited = pending.overlaps_at.is_some(); // it was admitted before
        if !waited && let Err(backpressure) = self.may_wait(&pending, class) {
            if !pending.full.is_empty() {
                pending.full.clear(); // a hold is a preference
                return Some(pending);
            }
            let reason = Rejection::Backpressure(backpressure);
            effects.push_back(Effect::Reject { context: pending.request.context, reason });
            return None;
        }
        let Some(waits) = pending.request.waits.as_ref().filter(|_| pending.request.purpose == Purpose::Book) else {
            pending.class = None;
            return Some(pending);
        };
        let refreshes = waits.block_hashes.is_some() && self.overlap_refresh_after.is_some();
        let booking = waits.booking;
        let cached_tokens = self.best_cached_tokens(pending.eligibility_inputs(), &pending.request.overlaps);
        let (entry, lane) = (queue_entry(&pending, cached_tokens), self.lane_of(&pending));
        let overlaps_at = *pending.overlaps_at.get_or_insert(self.pool.now);
        self.program_holds.hold(&pending, class);
        self.queue.push(booking.0, class, lane, entry, pending);
        if refreshes {
            self.overlap_ages.insert((overlaps_at, booking));
        }
        None
    }

    /// Rejection of the first call of a program by a class that refuses it, if the call could only wait for the claims of
    /// other programs. Retries are not rejected: their excluded rank may have taken the session with it.
    fn start_refusal(&self, pending: &PendingRequest<T>, class: ClassId) -> Option<Backpressure> {
        let ProgramHold { refuses_starts, .. } = self.program_holds.hold_of(class)?;
        let options = pending.request.options.as_deref().filter(|_| refuses_starts && pending.session.is_none())?;
        let is_known = self.sessions.agents.contains_key(&options.program)
            || self.active.settings.rules.session_affinity == SessionAffinity::Off
            || !options.constraints.excluded_ranks.is_empty();
        let [is_full, is_busy, is_asleep] =
            [Filter::Full, Filter::Busy, Filter::Asleep].map(|f| self.eligibility.has(f));
        if is_known || is_busy || is_asleep || !is_full {
            return None;
        }
        let refused = self.queue.refusal(class, LimitKind::ProgramStarts, self.pool.now);
        let end = self.program_holds.claims.next_end();
        let retry_after = end.map_or(refused.retry_after, |end| end.since(self.pool.now));
        Some(Backpressure { retry_after: retry_after.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX), ..refused })
    }

    fn may_wait(&self, pending: &PendingRequest<T>, class: ClassId) -> Result<(), Backpressure> {
        let ranks = u32::try_from(self.pool.ranks.as_slice().len()).unwrap_or(u32::MAX);
        if pending.request.options.as_ref().is_some_and(|options| options.do_not_queue) {
            return Err(self.queue.refusal(class, LimitKind::DoNotQueue, self.pool.now));
        }
        self.queue.check_limits(class, ranks, self.pool.now)
    }

    /// Requests with the same eligible ranks share a lane: every restriction of the choice is part of its key.
    fn lane_of(&self, pending: &PendingRequest<T>) -> LaneKey {
        let filtered = self.active.settings.rules.filter_lane(&self.pool.ranks, &pending.eligibility_inputs());
        let Some(options) = pending.request.options.as_deref() else { return LaneKey(filtered) };
        let adapter = options.lora_name.as_deref().map_or(0, |name| xxh3_64(name.as_bytes()));
        let bound = pending.session.filter(|_| self.active.settings.rules.session_affinity == SessionAffinity::Hard);
        let bound = bound.map_or(0, |rank| Draw { seed: 1, request: 0 }.key(rank));
        // Held calls need room for different prompts.
        let held = pending.booking().filter(|_| !pending.full.is_empty());
        let held = held.map_or(0, |booking| xxh3_64(&booking.0.to_le_bytes()));
        LaneKey(options.constraints.lane() ^ adapter ^ bound ^ filtered ^ held)
    }

    fn best_cached_tokens(&mut self, inputs: EligibilityInputs<'_>, overlaps: &[RankOverlap]) -> u32 {
        self.active.settings.best_cached_tokens(&self.pool.ranks, &mut self.eligibility, inputs, overlaps)
    }

    /// The next request to leave the queue.
    ///
    /// If no request can leave, the lanes are not evaluated again before some rank may have gained capacity: arrivals,
    /// departures and bookings free none.
    fn pop_dispatchable<V: LoadView>(&mut self, loads: &V) -> Option<PendingRequest<T>> {
        self.look_again |= self.pool.ranks.take_eased();
        if !self.look_again {
            return None;
        }
        if self.queue.is_empty() {
            self.look_again = false;
            self.turn.reset();
            return None;
        }
        let head = self.queue_head().unwrap_or(self.pool.now);
        let Self { queue, active, pool, eligibility, turn, program_holds, .. } = self;
        let held_max = (HELD_EVALUATIONS_MAX / pool.ranks.as_slice().len().max(1)).min(HELD_MAX);
        let (mut yields, mut held) = (false, 0);
        let popped = queue.pop(pool.now, |class, _, pending: &PendingRequest<T>| {
            held += usize::from(!pending.full.is_empty());
            if held > held_max {
                return false;
            }
            let inputs = pending.eligibility_inputs();
            let cached_tokens = if program_holds.holds(class) {
                active.settings.best_cached_tokens(&pool.ranks, eligibility, inputs, &pending.request.overlaps)
            } else {
                0
            };
            let full = program_holds.full_ranks(pool, pending, class, cached_tokens);
            let inputs = EligibilityInputs { full: &full, ..inputs };
            let open = active.settings.rules.count_open_to(&pool.ranks, inputs, eligibility);
            let gives_way = open > 0 && !program_holds.holds(class) && turn.must_yield(loads, open, head, pool.now);
            yields |= gives_way;
            open > 0 && !gives_way
        });
        if yields && popped.is_none() {
            turn.give_way(pool.now);
        } else {
            turn.end(head, pool.now);
        }
        self.look_again = yields || popped.is_some();
        let (_, mut pending) = popped?;
        self.forget_age(&pending);
        if let Some(class) = pending.class.filter(|class| self.program_holds.holds(*class)) {
            let cached_tokens = self.best_cached_tokens(pending.eligibility_inputs(), &pending.request.overlaps);
            pending.full = self.program_holds.full_ranks(&self.pool, &pending, class, cached_tokens);
        }
        Some(pending)
    }

    /// Removes the times of a request that leaves the queue.
    fn forget_age(&mut self, pending: &PendingRequest<T>) {
        self.program_holds.release(pending, self.pool.now);
        if let Some((since, waits)) = pending.overlaps_at.zip(pending.request.waits.as_ref()) {
            self.overlap_ages.remove(&(since, waits.booking));
        }
    }

    /// Rejects expired requests.
    pub(super) fn expire(&mut self, effects: &mut VecDeque<Effect<T>>) {
        while let Some((_, pending)) = self.queue.pop_expired(self.pool.now) {
            self.forget_age(&pending);
            effects.push_back(self.expired(pending));
        }
    }

    pub(super) fn is_expired(&self, pending: &PendingRequest<T>) -> bool {
        pending.asks_for_place() && pending.due().is_some_and(|due| due <= self.pool.now)
    }

    pub(super) fn expired(&self, pending: PendingRequest<T>) -> Effect<T> {
        let targets = pending.request.options.as_ref().and_then(|options| options.targets);
        let reason = match targets.and_then(|targets| targets.expired(self.pool.now)) {
            Some(missed) => Rejection::TargetsMissed(missed),
            None => {
                let waited = pending.arrival().map_or(Duration::ZERO, |arrival| self.pool.now.since(arrival));
                Rejection::DeadlineExceeded { waited }
            }
        };
        Effect::Reject { context: pending.request.context, reason }
    }

    /// Removes a request whose caller has left, immediately or after its load replies.
    pub(super) fn on_cancel(&mut self, booking: BookingId, effects: &mut VecDeque<Effect<T>>) {
        let removed = self.queue.remove(booking.0);
        let removed = removed.or_else(|| self.again.remove(booking)).or_else(|| self.arrivals.remove(booking));
        self.program_holds.claims.end(booking, Duration::ZERO, self.pool.now);
        if let Some(pending) = removed {
            self.forget_age(&pending);
            effects.push_back(Effect::Cancelled { context: pending.request.context });
            return;
        }
        let in_flight = self.in_flight.iter_mut().flat_map(|batch| &mut batch.requests);
        in_flight.filter(|pending| pending.booking() == Some(booking)).for_each(|pending| pending.cancelled = true);
    }

    /// Queries the index again for requests with aged overlaps.
    pub(super) fn refresh_overlaps(&mut self, effects: &mut VecDeque<Effect<T>>) {
        let Some(after) = self.overlap_refresh_after else { return };
        let pool = self.active.settings.pool;
        for _ in 0..REFRESHES_MAX {
            let Some((since, booking)) = self.overlap_ages.first().copied() else { return };
            if self.pool.now < since + after {
                return;
            }
            self.overlap_ages.pop_first();
            let Some(pending) = self.queue.get_mut(booking.0) else { continue }; // not waiting, or not at present
            let block_hashes = pending.request.waits.as_ref().and_then(|waits| waits.block_hashes.clone());
            let Some(block_hashes) = block_hashes else { continue };
            // A lost reply is requested again after the same time.
            pending.overlaps_at = Some(self.pool.now);
            self.overlap_ages.insert((self.pool.now, booking));
            let reusable_blocks = pool.reusable_tokens(pending.request.prompt_tokens) / pool.block_size;
            effects.push_back(Effect::Refresh { booking, block_hashes, reusable_blocks });
        }
    }

    /// The queue key of a waiting request follows its overlap.
    pub(super) fn on_overlaps(&mut self, booking: BookingId, overlaps: Vec<RankOverlap>) {
        let Some(pending) = self.queue.get(booking.0) else { return };
        let (number, prompt_tokens) = (pending.number, pending.request.prompt_tokens);
        let (options, session, class) = (pending.request.options.clone(), pending.session, pending.class);
        let (options, begins) = (options.as_deref(), pending.begins);
        self.look_again |= !pending.full.is_empty(); // a rank may hold more of the prompt
        let inputs = EligibilityInputs { number, prompt_tokens, options, session, begins, class, full: &[] };
        let cached_tokens = self.best_cached_tokens(inputs, &overlaps);
        if let Some(pending) = self.queue.get_mut(booking.0) {
            pending.longest_blocks = longest_blocks(&overlaps);
            pending.request.overlaps = overlaps;
            let since = pending.overlaps_at.replace(self.pool.now);
            if since.is_some_and(|since| self.overlap_ages.remove(&(since, booking))) {
                self.overlap_ages.insert((self.pool.now, booking));
            }
        }
        self.queue.set_cached_tokens(booking.0, cached_tokens);
    }

    /// Rejects requests that no rank may serve any more.
    pub(super) fn reject_unservable(&mut self, effects: &mut VecDeque<Effect<T>>) {
        let (pool, rules, eligibility) = (&self.pool, &self.active.settings.rules, &mut self.eligibility);
        let mut lanes = Vec::new();
        for (class, lane, pending) in self.queue.lanes() {
            rules.evaluate(&pool.ranks, pending.eligibility_inputs(), eligibility);
            if !eligibility.may_open() {
                lanes.push((class, lane));
            }
        }
        let unservable: Vec<_> =
            lanes.into_iter().flat_map(|(class, lane)| self.queue.take_lane(class, lane)).collect();
        for (_, pending) in unservable {
            self.forget_age(&pending);
            self.active.settings.rules.evaluate(&self.pool.ranks, pending.eligibility_inputs(), &mut self.eligibility);
            let reason = self.pool.rejection(&pending, &self.eligibility);
            effects.push_back(Effect::Reject { context: pending.request.context, reason });
        }
    }

    /// The next time to wake without other input: an expiry, an aged overlap, or decaying load.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        if self.queue.is_empty() {
            return None;
        }
        let refresh =
            self.overlap_refresh_after.zip(self.overlap_ages.first()).map(|(after, (since, _))| *since + after);
        let decays = self.is_serial && self.pool.ranks.as_slice().iter().any(super::rank::Rank::decays);
        let decays = decays.then(|| self.pool.now + DECAY_RECHECK);
        let room = self.program_holds.next_room(self.pool.now);
        [self.queue.next_due(), refresh, decays, self.turn.ends_at(), room].into_iter().flatten().min()
    }

    /// Whether any request waits for the load of a rank to fall.
    #[must_use]
    pub fn waits_for_load(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Arrival of the longest-waiting request, without those of classes that hold programs: they take no turns.
    pub fn queue_head(&self) -> Option<Timestamp> {
        let classes = self.depths().zip(0..).filter(|(_, id)| !self.program_holds.holds(ClassId(*id)));
        classes.filter_map(|((_, depth), _)| depth.oldest).min()
    }

    /// Queue depths by class.
    pub fn depths(&self) -> impl Iterator<Item = (&str, Depth)> {
        let classes = self.queue.classes().iter().zip(0..);
        classes.map(|(class, id)| (class.name.as_str(), self.queue.depth(ClassId(id))))
    }
}

fn queue_entry<T>(pending: &PendingRequest<T>, cached_tokens: u32) -> QueueEntry {
    let options = pending.request.options.as_deref();
    QueueEntry {
        tenant: options.map_or_else(TenantKey::default, |options| options.tenant),
        strict_priority: options.map_or(0, |options| options.strict_priority),
        priority_jump: options.map_or(0.0, |options| options.priority_jump),
        due: pending.due(),
        arrival: pending.arrival().unwrap_or_default(),
        prompt_tokens: pending.request.prompt_tokens,
        cached_tokens,
    }
}
