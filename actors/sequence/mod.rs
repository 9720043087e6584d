//! The sequence actor: one a worker/dp-rank, owner of its bookings.
//!
//! Owns the rank's [`ActiveSequences`] and is the single writer of its board slot. Promises that a booking counts
//! before its caller hears of it, and that after each change the board shows it. Does no token arithmetic: what a
//! booking weighs was decided by the scheduler and stands in its lease. Restarted, it rebuilds from the leases.
//! Where engines' speeds are learned, it tells its [`SpeedMeter`] what it books, is told and frees.

pub(crate) mod table;

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::join::{Continuation, Join, ReplyToken};
use crate::actors::delivery::reply::Reply;
use crate::actors::delivery::strand::{ActorState, DeferredReply};
use crate::actors::io::clock::Clock;
use crate::actors::radix::claim::SpeculationClaim;
use crate::actors::views::wake_flag::WakeFlag;
use crate::directory::{Directory, Lease, LeaseState};
use crate::load::{ActiveSequences, BoardLoad, BoardSlot, PromptBlocks, SpeedCell, SpeedMeter};
use crate::protocol::{Generation, Slot, Timestamp};
use crate::schedule::{BookNumber, Decision, LoadAnswer};

/// What a sequence actor can be told.
pub(crate) enum SequenceMsg {
    /// What would these prompts find here?
    Load {
        /// The answer, and through it the prompts.
        token: ReplyToken<LoadAnswer, dyn LoadQueryContinuation>,
        now: Timestamp,
    },
    /// Book this lease and tell its caller.
    Book(Book),
    /// This lease has changed: make the bookings agree with it.
    Reconcile(Arc<Lease>),
    /// The rank gets no more work: say when its last booking has ended. Comes behind the last Book.
    Drain(Acknowledgement),
    /// The rank gets work again: forget that it was drained.
    Undrain,
    /// The rank is removed: end every booking. Comes behind the last Book.
    Retire(Acknowledgement),
    /// A drill: panic, or hold the turn until told to go on.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// Continuation of a load query, with the prompts to project.
pub(crate) trait LoadQueryContinuation: Continuation<LoadAnswer> {
    fn prompts(&self) -> &[PromptBlocks];
}

/// One more token of a load query, for a sequence actor.
pub(crate) fn load_token<C: LoadQueryContinuation + 'static>(
    query: &ReplyToken<LoadAnswer, C>,
) -> ReplyToken<LoadAnswer, dyn LoadQueryContinuation> {
    query.fork_unsized(|join| -> Arc<Join<LoadAnswer, dyn LoadQueryContinuation>> { join })
}

/// Receiver of the notice that some rank's load has fallen.
pub(crate) trait LoadFallListener: Send + Sync {
    fn load_fell(&self);
}

/// One booking to make.
pub(crate) struct Book {
    pub(crate) lease: Arc<Lease>,
    pub(crate) decision: Decision,
    pub(crate) number: BookNumber,
    pub(crate) answer: oneshot::Sender<Reply>,
    /// The request's place in the waiting room.
    pub(crate) permit: OwnedSemaphorePermit,
    /// What a modelled cache holds for it.
    pub(crate) claim: Option<SpeculationClaim>,
    pub(crate) now: Timestamp,
}

/// One rank's bookings.
pub(crate) struct Sequence {
    slot: Slot,
    generation: Generation,
    incarnation: u32,
    /// The last Book seen, counted for this incarnation.
    applied: u32,
    active: ActiveSequences,
    board: Arc<BoardSlot>,
    /// Where speeds are learned.
    meter: Option<SpeedMeter>,
    directory: Arc<Directory>,
    clock: Clock,
    /// Who wants to hear when load falls; nobody where nothing ever waits.
    wakes: Option<Wakes>,
    /// Told when the last booking has ended.
    draining: Option<Acknowledgement>,
}

/// Who wants to hear when load falls, and whether it waits for that just now.
pub(crate) struct Wakes {
    pub(crate) flag: Arc<WakeFlag>,
    pub(crate) scheduler: Arc<dyn LoadFallListener>,
}

/// What a sequence actor is made with, besides its place.
pub(crate) struct SequenceDependencies {
    pub(crate) board: Arc<BoardSlot>,
    /// Where speeds are learned.
    pub(crate) learns: Option<Arc<SpeedCell>>,
    /// Tokens of a block.
    pub(crate) block_size: u32,
    pub(crate) wakes: Option<Wakes>,
    pub(crate) directory: Arc<Directory>,
    pub(crate) clock: Clock,
}

/// What a sequence actor answers once its turn is given back.
pub(crate) enum SequenceReply {
    Booked {
        answer: oneshot::Sender<Reply>,
        decision: Decision,
        permit: OwnedSemaphorePermit,
        /// Present when requests wait for load to fall, and what the scheduler had added for Books has fallen away.
        fell: Option<Arc<dyn LoadFallListener>>,
    },
    Drained(#[expect(dead_code, reason = "dropping it is the answer")] Acknowledgement),
    Retired(#[expect(dead_code, reason = "dropping it is the answer")] Acknowledgement),
    /// Requests wait for load to fall, and it has.
    LoadFell(Arc<dyn LoadFallListener>),
}

impl Sequence {
    /// The bookings of one incarnation of a slot, as its leases say: none at first, all of them after a restart.
    ///
    /// A speed goes on from what `learns` has published. Restored bookings teach nothing, for when their prefills really
    /// began, or their last blocks were there, is not known.
    pub(crate) fn restore(
        (slot, generation): (Slot, Generation),
        incarnation: u32,
        dependencies: SequenceDependencies,
    ) -> Self {
        let SequenceDependencies { board, learns, block_size, wakes, directory, clock } = dependencies;
        let mut sequence = Self {
            slot,
            generation,
            incarnation,
            applied: 0,
            active: ActiveSequences::new(true), // whether blocks are shared is decided by the prompts it is given
            board,
            meter: learns.map(|cell| SpeedMeter::new(cell, block_size)),
            directory: Arc::clone(&directory),
            clock,
            wakes,
            draining: None,
        };
        let now = clock.now();
        let leases = directory.booked_on(slot, generation);
        for lease in &leases {
            lease.clear_dirty(); // a look on its way to the dead actor is lost
            sequence.book(lease, lease.booked_at()); // its prefill has been under way since then
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
        let Book { lease, decision, number, answer, permit, claim, now } = book;
        if number.incarnation == self.incarnation {
            self.applied = number.number;
        }
        let booked =
            decision.generation == self.generation && lease.book(self.slot, self.generation, decision.hint, now);
        if booked {
            if let Some(claim) = claim {
                claim.leave_to_lease();
            }
            self.book(&lease, now);
            if let Some(meter) = &mut self.meter {
                meter.booked(lease.booking(), decision.hint, now);
            }
            self.agree_with(&lease, now);
        }
        self.publish(now);
        // What it weighs is on the board now, in place of what the scheduler had added for it, and may be less.
        let fell = self.waking();
        if !booked {
            return fell.map(SequenceReply::LoadFell); // a lease that ended first has no caller left; its answer is dropped
        }
        Some(SequenceReply::Booked { answer, decision, permit, fell })
    }

    fn on_reconcile(&mut self, lease: &Lease) -> Option<SequenceReply> {
        let now = self.clock.now();
        lease.clear_dirty(); // before reading: what changes from here on asks for another look
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

    /// The scheduler, if requests wait for load to fall: it is told once each time it asks. Call after publishing.
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

    /// Counts a booked lease in.
    fn book(&mut self, lease: &Lease, at: Timestamp) {
        // A booking number is used once, so it cannot be a duplicate; were it one, it would be counted already.
        let _ = self.active.book(lease.booking(), lease.prompt().clone(), lease.hint(), at);
    }

    /// Brings the bookings up to what the lease says by now.
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

    /// Counts a booking out, if it is counted.
    fn free(&mut self, lease: &Lease, now: Timestamp) {
        self.active.free(lease.booking(), now);
        if let Some(meter) = &mut self.meter {
            meter.ended(lease.booking(), now);
        }
    }

    fn publish(&mut self, now: Timestamp) {
        if let Some(meter) = &mut self.meter {
            meter.load_is(self.active.load(now), now);
        }
        self.board.publish(&BoardLoad::of(&self.active, self.incarnation, self.applied, now));
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
                // A caller that has gone has ended its lease, and asked for the look that frees the booking.
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
    use crate::load::{EngineSpeed, PrefillLoadHint, PromptBlocks, work_tokens};
    use crate::protocol::{WorkerId, WorkerRank};
    use crate::select::TierOverlap;

    const PLACE: (Slot, Generation) = (Slot(0), Generation(1));

    fn restore(incarnation: u32, cell: &Arc<SpeedCell>, directory: &Arc<Directory>, clock: Clock) -> Sequence {
        let (board, learns) = (Arc::new(BoardSlot::default()), Some(Arc::clone(cell)));
        let dependencies = SequenceDependencies {
            board,
            learns,
            block_size: 64,
            wakes: None,
            directory: Arc::clone(directory),
            clock,
        };
        Sequence::restore(PLACE, incarnation, dependencies)
    }

    fn book(sequence: &mut Sequence, id: &str, tokens: u32) -> Arc<Lease> {
        let (slot, generation) = PLACE;
        let now = sequence.clock.now();
        let lease = sequence.directory.enter(id, PromptBlocks::Counted(0), now).expect("a free id");
        let decision = Decision {
            shared_cache_blocks: 0,
            reachable_blocks: 0,
            request: 0,
            rank: WorkerRank::new(WorkerId(1), 0),
            slot,
            generation,
            overlap: TierOverlap::default(),
            hint: PrefillLoadHint::new(tokens, 0, true, None),
            predicted_ttft: None,
        };
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("a free place");
        let number = BookNumber { incarnation: sequence.incarnation, number: 1 };
        let (answer, _) = oneshot::channel();
        let booked = sequence.step(SequenceMsg::Book(Book {
            lease: Arc::clone(&lease),
            decision,
            number,
            answer,
            permit,
            claim: None,
            now,
        }));
        assert!(matches!(booked, Some(SequenceReply::Booked { .. })), "{id} is booked");
        lease
    }

    #[tokio::test(start_paused = true)]
    async fn reports_teach_the_speed_and_a_restart_goes_on_from_it() {
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
        let meter = sequence.meter.as_ref().expect("it learns");
        assert_eq!((meter.rate().samples(), meter.under_way()), (128, 0));
        let learned = cell.speed_or(EngineSpeed::prior(64));
        let rate = learned.work_tokens_per_second;
        assert!((rate / work_tokens(20_000, 0) - 1.0).abs() < 0.05, "{rate}");
        assert_eq!((meter.step().samples(), meter.watched()), (256, 0));
        assert!((learned.step(1.0, 1.0) / 0.010 - 1.0).abs() < 0.03, "{learned:?}");
        assert_eq!(cell.output_tokens(), Some(160.0), "two blocks, and half a block");

        let lease = book(&mut sequence, "under way", 20_000);
        drop(sequence);
        tokio::time::advance(Duration::from_secs(60)).await;
        let mut restored = restore(1, &cell, &directory, clock);
        let _ = lease.complete_prefill();
        restored.step(SequenceMsg::Reconcile(Arc::clone(&lease)));
        lease.push_output_block(None);
        restored.step(SequenceMsg::Reconcile(Arc::clone(&lease)));
        assert_eq!(cell.speed_or(EngineSpeed::prior(64)), learned, "when it began is not known");
        let again = restored.meter.as_ref().expect("it learns").speed();
        assert!((again.work_tokens_per_second - rate).abs() < 1.0, "{again:?} after {rate}");
        assert!((again.step(9.0, 99.0) / learned.step(9.0, 99.0) - 1.0).abs() < 1e-6, "{again:?} after {learned:?}");
    }
}
