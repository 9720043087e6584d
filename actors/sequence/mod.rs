//! Sequence actor: one per rank, owner of the rank's bookings.
//!
//! Owns the rank's [`ActiveSequences`] and is the single writer of its board slot. A booking counts before its caller
//! receives the placement, and the board is published after each change. The actor does no token arithmetic: the
//! scheduler computes the charge of a booking and stores it in the lease. After a restart the actor rebuilds its
//! bookings from the leases. If speeds are learned, it reports bookings, progress and completions to its
//! [`SpeedMeter`].

pub(crate) mod table;

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::sync::{Notify, OwnedSemaphorePermit, oneshot};

use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::join::{Continuation, Join, ReplyToken};
use crate::actors::delivery::reply::Reply;
use crate::actors::delivery::strand::{ActorState, DeferredReply};
use crate::actors::io::clock::Clock;
use crate::actors::radix::claim::SpeculationClaim;
use crate::actors::views::incarnation::CurrentIncarnation;
use crate::actors::views::wake_flag::WakeFlag;
use crate::directory::{Directory, Lease, LeaseState};
use crate::load::{
    ActiveSequences, BoardLoad, BoardSlot, PeerLoadCell, PrefillLoadHint, PromptBlocks, SpeedCell, SpeedMeter,
};
use crate::protocol::{Generation, Slot, Timestamp};
use crate::schedule::{BookNumber, Decision, LoadAnswer};

/// Messages to a sequence actor.
#[expect(clippy::large_enum_variant, reason = "a Book is as frequent as the small messages, and a box costs more")]
pub(crate) enum SequenceMsg {
    /// Load query for a batch of prompts.
    Load {
        /// Reply token, which also holds the prompts.
        token: ReplyToken<LoadAnswer, dyn LoadQueryContinuation>,
        now: Timestamp,
    },
    /// Book this lease and reply to its caller.
    Book(Book),
    /// Adjust the bookings to this changed lease.
    Reconcile(Arc<Lease>),
    /// Acknowledge when the last booking has ended. Arrives after the last Book.
    Drain(Acknowledgement),
    /// Cancel the acknowledgement of a drain; the rank accepts work again.
    Undrain,
    /// End every booking, because the rank is removed. Arrives after the last Book.
    Retire(Acknowledgement),
    /// Injected fault: panic, or hold the strand until released.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// Continuation of a load query, with the prompts to project.
pub(crate) trait LoadQueryContinuation: Continuation<LoadAnswer> {
    fn prompts(&self) -> &[PromptBlocks];
}

/// Creates one more token of a load query, for a sequence actor.
pub(crate) fn load_token<C: LoadQueryContinuation + 'static>(
    query: &ReplyToken<LoadAnswer, C>,
) -> ReplyToken<LoadAnswer, dyn LoadQueryContinuation> {
    query.fork_unsized(|join| -> Arc<Join<LoadAnswer, dyn LoadQueryContinuation>> { join })
}

/// Receiver of notifications that the load of a rank has fallen.
pub(crate) trait LoadFallListener: Send + Sync {
    fn load_fell(&self);
}

/// One booking to make.
pub(crate) struct Book {
    pub(crate) lease: Arc<Lease>,
    pub(crate) decision: Decision,
    pub(crate) number: BookNumber,
    /// Incarnation of the scheduler that sends it.
    pub(crate) scheduler: u32,
    /// Permit of the waiting room. Before `answer`, because fields are dropped in this order.
    pub(crate) permit: OwnedSemaphorePermit,
    pub(crate) answer: oneshot::Sender<Reply>,
    /// Claim on a modelled cache for this booking.
    pub(crate) claim: Option<SpeculationClaim>,
    pub(crate) now: Timestamp,
}

/// Bookings of one rank.
pub(crate) struct Sequence {
    slot: Slot,
    generation: Generation,
    incarnation: u32,
    /// Number of the last Book in this incarnation.
    applied: u32,
    active: ActiveSequences,
    board: Arc<BoardSlot>,
    /// Load of the rank by other replicas.
    peers: Arc<PeerLoadCell>,
    /// Present if speeds are learned.
    meter: Option<SpeedMeter>,
    directory: Arc<Directory>,
    clock: Clock,
    /// Books of earlier schedulers are dropped.
    scheduler: Arc<CurrentIncarnation>,
    /// Notified after each booking.
    booked: Arc<Notify>,
    /// Receiver of falling-load notifications; `None` without a queue.
    wakes: Option<Wakes>,
    /// Dropped when the last booking has ended.
    draining: Option<Acknowledgement>,
}

/// Flag and receiver of falling-load notifications. The flag is set while the scheduler waits for one.
pub(crate) struct Wakes {
    pub(crate) flag: Arc<WakeFlag>,
    pub(crate) scheduler: Arc<dyn LoadFallListener>,
}

/// Dependencies of a sequence actor, besides its slot.
pub(crate) struct SequenceDependencies {
    pub(crate) board: Arc<BoardSlot>,
    /// Present if speeds are learned.
    pub(crate) learns: Option<Arc<SpeedCell>>,
    /// Load of the rank by other replicas.
    pub(crate) peers: Arc<PeerLoadCell>,
    /// Present incarnation of the scheduler.
    pub(crate) scheduler: Arc<CurrentIncarnation>,
    /// Block size in tokens.
    pub(crate) block_size: u32,
    /// Notified after each booking.
    pub(crate) booked: Arc<Notify>,
    pub(crate) wakes: Option<Wakes>,
    pub(crate) directory: Arc<Directory>,
    pub(crate) clock: Clock,
}

/// Replies delivered after the strand is released.
pub(crate) enum SequenceReply {
    Booked {
        permit: OwnedSemaphorePermit,
        answer: oneshot::Sender<Reply>,
        decision: Decision,
        /// Present if requests wait for falling load: the overlay of the scheduler for this Book has ended.
        fell: Option<Arc<dyn LoadFallListener>>,
    },
    Drained(#[expect(dead_code, reason = "dropping it is the reply")] Acknowledgement),
    Retired(#[expect(dead_code, reason = "dropping it is the reply")] Acknowledgement),
    /// Requests wait for falling load, and the load has fallen.
    LoadFell(Arc<dyn LoadFallListener>),
}

impl Sequence {
    /// Rebuilds one incarnation of a slot from its leases: no bookings at first, all of them after a restart.
    ///
    /// The learned speed continues from the value published in `learns`. Restored bookings give no speed samples,
    /// because the times of their prefill start and last blocks are unknown.
    pub(crate) fn restore(
        (slot, generation): (Slot, Generation),
        incarnation: u32,
        dependencies: SequenceDependencies,
    ) -> Self {
        let SequenceDependencies { board, learns, peers, scheduler, block_size, booked, wakes, directory, clock } =
            dependencies;
        let mut sequence = Self {
            slot,
            generation,
            incarnation,
            applied: 0,
            active: ActiveSequences::new(true), // the given prompts determine sharing
            board,
            peers,
            meter: learns.map(|cell| SpeedMeter::new(cell, block_size)),
            directory: Arc::clone(&directory),
            clock,
            scheduler,
            booked,
            wakes,
            draining: None,
        };
        let now = clock.now();
        let leases = directory.booked_on(slot, generation);
        for lease in &leases {
            lease.clear_dirty(); // a reconciliation under way to the dead actor is lost
            sequence.book(lease, lease.booked_at()); // its prefill has run since then
        }
        for lease in &leases {
            sequence.agree_with(lease, now);
        }
        sequence.publish(now);
        sequence
    }

    fn on_load(&self, token: &ReplyToken<LoadAnswer, dyn LoadQueryContinuation>, now: Timestamp) {
        let prompts = token.continuation().prompts();
        let shared_blocks: SmallVec<_> =
            prompts.iter().map(|prompt| self.active.project(prompt).shared_blocks).collect();
        let (slot, generation) = (self.slot, self.generation);
        token.push(LoadAnswer { slot, generation, load: self.active.load(now), shared_blocks });
    }

    fn on_book(&mut self, book: Book) -> Option<SequenceReply> {
        let Book { lease, decision, number, scheduler, answer, permit, claim, now } = book;
        // The scheduler was replaced: its successor does not count this Book, and the caller sends the request again.
        if !self.scheduler.is(scheduler) {
            return None;
        }
        self.read_peers(now);
        if number.incarnation == self.incarnation {
            self.applied = number.number;
        }
        let booked = decision.generation == self.generation
            && lease.book(self.slot, self.generation, decision.prefill_load, now);
        if booked {
            if let Some(claim) = claim {
                claim.leave_to_lease();
            }
            self.book(&lease, now);
            if let Some(meter) = &mut self.meter {
                meter.booked(lease.booking(), decision.prefill_load, now);
                let [ttft, itl] = decision.uncorrected_predictions();
                // The end of an unreported prefill is a model, not an observation.
                let ttft = ttft.filter(|_| decision.prefill_load.is_none_or(PrefillLoadHint::is_reported));
                meter.predicted(lease.booking(), [ttft, itl]);
            }
            self.agree_with(&lease, now);
        }
        self.publish(now);
        self.booked.notify_one();
        // The board now includes the charge in place of the scheduler's overlay, and may be lower.
        let fell = self.waking();
        if !booked {
            return fell.map(SequenceReply::LoadFell); // a lease that ended first has no caller
        }
        Some(SequenceReply::Booked { answer, decision, permit, fell })
    }

    fn on_reconcile(&mut self, lease: &Lease) -> Option<SequenceReply> {
        let now = self.clock.now();
        self.read_peers(now);
        lease.clear_dirty(); // before the read: later changes queue another reconciliation
        let before = self.wakes.as_ref().map(|_| self.active.load(now));
        self.agree_with(lease, now);
        self.publish(now);
        let drained = if self.is_idle() { self.draining.take().map(SequenceReply::Drained) } else { None };
        drained.or_else(|| {
            let (before, after) = (before?, self.active.load(now));
            let fell = after.requests < before.requests
                || after.active_blocks < before.active_blocks
                || after.prefill_tokens < before.prefill_tokens;
            if fell { self.waking().map(SequenceReply::LoadFell) } else { None }
        })
    }

    /// Reads the load by other replicas before the reports of an instant.
    fn read_peers(&mut self, now: Timestamp) {
        if let Some(meter) = &mut self.meter {
            meter.peers_are(self.peers.read(), now);
        }
    }

    /// The scheduler, if it waits for falling load; one notification per wait. Call after publishing.
    fn waking(&self) -> Option<Arc<dyn LoadFallListener>> {
        let wakes = self.wakes.as_ref().filter(|wakes| wakes.flag.take())?;
        Some(Arc::clone(&wakes.scheduler))
    }

    fn on_drain(&mut self, ack: Acknowledgement) -> Option<SequenceReply> {
        if self.is_idle() {
            return Some(SequenceReply::Drained(ack));
        }
        self.draining = Some(ack);
        None
    }

    fn is_idle(&self) -> bool {
        self.active.load(self.clock.now()).requests == 0
    }

    fn on_retire(&mut self, ack: Acknowledgement) -> SequenceReply {
        let now = self.clock.now();
        for lease in self.directory.booked_on(self.slot, self.generation) {
            lease.end();
            self.directory.leave(&lease);
            self.free(&lease, now);
        }
        self.publish(now);
        SequenceReply::Retired(ack)
    }

    /// Adds the booking of a lease.
    fn book(&mut self, lease: &Lease, at: Timestamp) {
        // Booking numbers are unique, so a duplicate cannot occur; it would be counted already.
        let _ = self.active.book(lease.booking(), lease.prompt().clone(), lease.hint(), at);
    }

    /// Updates the booking to the present state of its lease.
    fn agree_with(&mut self, lease: &Lease, now: Timestamp) {
        let progress = lease.progress();
        if progress.prefill_completed {
            self.active.complete_prefill(lease.booking(), now);
        }
        if let Some(meter) = &mut self.meter {
            meter.reported(lease.booking(), progress.prefill_completed, progress.output.block_count(), now);
        }
        self.active.set_output(lease.booking(), &progress.output);
        match lease.state() {
            LeaseState::Booked { .. } => {}
            LeaseState::Pending | LeaseState::Ended => self.free(lease, now),
        }
    }

    /// Removes the booking of a lease, if present.
    fn free(&mut self, lease: &Lease, now: Timestamp) {
        self.active.free(lease.booking(), now);
        if let Some(meter) = &mut self.meter {
            if let Some(itl) = lease.mean_itl() {
                meter.paced(lease.booking(), itl, now);
            }
            meter.ended(lease.booking(), now);
        }
    }

    fn publish(&mut self, now: Timestamp) {
        let board = BoardLoad::of(&self.active, self.incarnation, self.applied, now);
        if let Some(meter) = &mut self.meter {
            meter.load_is(self.active.load(now), now);
            meter.prefill_is(board.prefill.wait(now).0, now);
        }
        self.board.publish(&board);
    }
}

impl ActorState for Sequence {
    type Msg = SequenceMsg;
    type Deferred = SequenceReply;

    fn step(&mut self, msg: SequenceMsg) -> Option<SequenceReply> {
        match msg {
            SequenceMsg::Load { token, now } => self.on_load(&token, now),
            SequenceMsg::Book(book) => return self.on_book(book),
            SequenceMsg::Reconcile(lease) => return self.on_reconcile(&lease),
            SequenceMsg::Drain(ack) => return self.on_drain(ack),
            SequenceMsg::Undrain => return self.draining.take().map(SequenceReply::Drained),
            SequenceMsg::Retire(ack) => return Some(self.on_retire(ack)),
            #[cfg(feature = "faults")]
            SequenceMsg::Fault(injected) => injected.apply(),
        }
        None
    }
}

impl DeferredReply for SequenceReply {
    fn deliver(self) {
        match self {
            Self::Booked { answer, decision, permit, fell } => {
                drop(permit);
                // A caller that cancelled has ended its lease and queued the reconciliation that frees the booking.
                drop(answer.send(Reply::Placed(decision)));
                if let Some(scheduler) = fell {
                    scheduler.load_fell();
                }
            }
            Self::Drained(_) | Self::Retired(_) => {}
            Self::LoadFell(scheduler) => scheduler.load_fell(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::Semaphore;

    use super::*;
    use crate::load::{EngineSpeed, PredictionBias, PromptBlocks, work_tokens};
    use crate::protocol::{WorkerId, WorkerRank};
    use crate::select::TierOverlap;

    const PLACE: (Slot, Generation) = (Slot(0), Generation(1));

    fn restore(incarnation: u32, cell: &Arc<SpeedCell>, directory: &Arc<Directory>, clock: Clock) -> Sequence {
        let (board, learns) = (Arc::new(BoardSlot::default()), Some(Arc::clone(cell)));
        let dependencies = SequenceDependencies {
            board,
            learns,
            peers: Arc::default(),
            scheduler: Arc::default(),
            block_size: 64,
            booked: Arc::default(),
            wakes: None,
            directory: Arc::clone(directory),
            clock,
        };
        Sequence::restore(PLACE, incarnation, dependencies)
    }

    fn book(sequence: &mut Sequence, id: &str, tokens: u32) -> Arc<Lease> {
        let (lease, booked) = book_on(sequence, PLACE, id, tokens);
        assert!(matches!(booked, Some(SequenceReply::Booked { .. })), "{id} is booked");
        lease
    }

    fn book_on(
        sequence: &mut Sequence,
        (slot, generation): (Slot, Generation),
        id: &str,
        tokens: u32,
    ) -> (Arc<Lease>, Option<SequenceReply>) {
        let now = sequence.clock.now();
        let lease = sequence.directory.enter(id, PromptBlocks::Counted(0), now).expect("a free id");
        let decision = Decision {
            number: 0,
            rank: WorkerRank::new(WorkerId(1), 0),
            slot,
            generation,
            overlap: TierOverlap::default(),
            effective_overlap_blocks: 0.0,
            cached_tokens: 0,
            shared_cache_blocks: 0,
            reachable_blocks: 0,
            prefill_load: PrefillLoadHint::new(tokens, 0, true, None),
            predicted_ttft: None,
            predicted_itl: None,
            prediction_bias: PredictionBias::default(),
            routing_hashes: None,
        };
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("a free permit");
        let number = BookNumber { incarnation: sequence.incarnation, number: 1 };
        let (answer, _) = oneshot::channel();
        let booked = sequence.step(SequenceMsg::Book(Book {
            lease: Arc::clone(&lease),
            decision,
            scheduler: 0,
            number,
            answer,
            permit,
            claim: None,
            now,
        }));
        (lease, booked)
    }

    #[tokio::test]
    async fn a_book_for_another_generation_of_the_slot_has_no_effect() {
        let (cell, directory, clock) = (Arc::new(SpeedCell::default()), Arc::default(), Clock::start());
        let mut sequence = restore(0, &cell, &directory, clock);
        let (lease, booked) = book_on(&mut sequence, (PLACE.0, Generation(0)), "earlier", 20_000);
        assert!(booked.is_none() && sequence.is_idle());
        assert_eq!(lease.state(), LeaseState::Pending);
    }

    #[tokio::test(start_paused = true)]
    async fn speed_is_learned_from_reports_and_kept_over_restarts() {
        let (cell, directory, clock) = (Arc::new(SpeedCell::default()), Arc::default(), Clock::start());
        let mut sequence = restore(0, &cell, &directory, clock);
        for n in 0..128 {
            let lease = book(&mut sequence, &n.to_string(), 20_000);
            tokio::time::advance(Duration::from_secs(1)).await;
            for _ in 0..3 {
                let _ = lease.complete_prefill();
                sequence.step(SequenceMsg::Reconcile(Arc::clone(&lease)));
            }
            for _ in 0..2 {
                tokio::time::advance(64 * Duration::from_millis(10)).await;
                lease.push_output_block(None);
                sequence.step(SequenceMsg::Reconcile(Arc::clone(&lease)));
            }
            lease.end();
            directory.leave(&lease);
            sequence.step(SequenceMsg::Reconcile(lease));
        }
        let meter = sequence.meter.as_ref().expect("speed learned");
        assert_eq!((meter.rate().samples(), meter.under_way()), (128, 0));
        let learned = cell.speed_or(EngineSpeed::prior(64));
        let rate = learned.work_tokens_per_second;
        assert!((rate / work_tokens(20_000, 0) - 1.0).abs() < 0.05, "{rate}");
        assert_eq!((meter.step().samples(), meter.watched()), (256, 0));
        assert!((learned.step(1.0, 1.0) / 0.010 - 1.0).abs() < 0.03, "{learned:?}");
        assert_eq!(cell.output_tokens(), Some(160.0), "two and a half blocks");

        let lease = book(&mut sequence, "under way", 20_000);
        drop(sequence);
        tokio::time::advance(Duration::from_secs(60)).await;
        let mut restored = restore(1, &cell, &directory, clock);
        let _ = lease.complete_prefill();
        restored.step(SequenceMsg::Reconcile(Arc::clone(&lease)));
        lease.push_output_block(None);
        restored.step(SequenceMsg::Reconcile(Arc::clone(&lease)));
        assert_eq!(cell.speed_or(EngineSpeed::prior(64)), learned, "the start of the prefill is unknown");
        let again = restored.meter.as_ref().expect("speed learned").speed();
        assert!((again.work_tokens_per_second - rate).abs() < 1.0, "{again:?} after {rate}");
        assert!((again.step(9.0, 99.0) / learned.step(9.0, 99.0) - 1.0).abs() < 1e-6, "{again:?} after {learned:?}");
    }
}
