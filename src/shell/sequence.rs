//! Shell of a sequence actor: the bookings of one rank.
//!
//! Owns the rank's [`ActiveSequences`] and is the single writer of its board slot. The board is published after each
//! change. The shell does no token arithmetic: the scheduler computes the charge of a booking and stores it in the lease.
//! After a restart the bookings are rebuilt from the leases. If speeds are learned, the shell reports bookings, progress
//! and completions to its [`SpeedMeter`].

use std::sync::Arc;

use smallvec::SmallVec;

use super::{CurrentIncarnation, Defect};
use crate::directory::{Directory, Lease, LeaseState};
use crate::load::{
    ActiveSequences, BoardLoad, BoardSlot, PeerLoadCell, PrefillLoadHint, PromptBlocks, SpeedCell, SpeedMeter,
};
use crate::protocol::{Generation, Slot, TimeSource, Timestamp};
use crate::schedule::{BookNumber, Decision, LoadAnswer};

/// Messages to a sequence actor: `C` belongs to the caller of a request, `A` acknowledges, `Q` is a load query.
pub enum SequenceMsg<C, A, Q> {
    /// Load query for a batch of prompts.
    Load {
        /// Reply token, which also holds the prompts.
        query: Q,
        /// Time of the query.
        now: Timestamp,
    },
    /// Book this lease and reply to its caller.
    Book(Book<C>),
    /// Adjust the bookings to this changed lease.
    Reconcile(Arc<Lease>),
    /// Acknowledge when the last booking has ended. Arrives after the last Book.
    Drain(A),
    /// Cancel the acknowledgement of a drain; the rank accepts work again.
    Undrain,
    /// End every booking, because the rank is removed. Arrives after the last Book.
    Retire(A),
}

/// One booking to make.
pub struct Book<C> {
    /// Lease of the request.
    pub lease: Arc<Lease>,
    /// Decision for the rank of the actor.
    pub decision: Decision,
    /// Number of the booking.
    pub number: BookNumber,
    /// Incarnation of the scheduler that sends it.
    pub scheduler: u32,
    /// What the caller of the request receives its reply by.
    pub caller: C,
    /// Time of the decision.
    pub now: Timestamp,
}

/// A load query for some prompts, with the right to respond.
pub trait LoadQueryToken {
    /// The prompts to project.
    fn prompts(&self) -> &[PromptBlocks];
    /// Responds.
    fn push(&self, answer: LoadAnswer);
}

/// Effect of a step.
pub enum SequenceEffect<C, A> {
    /// Reply to the caller of a booked request. The load may have fallen, too: the overlay of the scheduler has ended.
    Booked(C, Decision),
    /// The drain has ended; dropping the value acknowledges it.
    Drained(A),
    /// The rank has no bookings; dropping the value acknowledges the removal.
    Retired(A),
    /// The load may have fallen.
    LoadFell,
}

/// Shared cells of a sequence actor.
pub struct SequenceCells {
    /// Load of the rank.
    pub board: Arc<BoardSlot>,
    /// Present if speeds are learned.
    pub learns: Option<Arc<SpeedCell>>,
    /// Load of the rank by other replicas.
    pub peers: Arc<PeerLoadCell>,
    /// Present incarnation of the scheduler. Books of earlier ones are dropped.
    pub scheduler: Arc<CurrentIncarnation>,
    /// Leases by rank.
    pub directory: Arc<Directory>,
}

/// Bookings of one rank. See the module documentation.
pub struct SequenceShell<A> {
    slot: Slot,
    generation: Generation,
    incarnation: u32,
    /// Number of the last Book in this incarnation.
    applied: u32,
    active: ActiveSequences,
    cells: SequenceCells,
    /// Present if speeds are learned.
    meter: Option<SpeedMeter>,
    /// Whether requests wait for falling load, which is then reported.
    is_queueing: bool,
    /// Dropped when the last booking has ended.
    draining: Option<A>,
}

impl<A> SequenceShell<A> {
    /// Rebuilds one incarnation of a slot from its leases: no bookings at first, all of them after a restart.
    ///
    /// The learned speed continues from the published value. Restored bookings give no speed samples, because the times
    /// of their prefill start and last blocks are unknown. `block_size` is in tokens.
    pub fn restore(
        (slot, generation): (Slot, Generation),
        incarnation: u32,
        cells: SequenceCells,
        (block_size, is_queueing): (u32, bool),
        now: Timestamp,
    ) -> Self {
        let mut shell = Self {
            slot,
            generation,
            incarnation,
            applied: 0,
            active: ActiveSequences::new(true), // the given prompts determine sharing
            meter: cells.learns.as_ref().map(|cell| SpeedMeter::new(Arc::clone(cell), block_size)),
            is_queueing,
            draining: None,
            cells,
        };
        let mut leases = shell.cells.directory.booked_on(slot, generation);
        if Defect::RestoreForgets.is_planted() {
            leases.clear();
        }
        for lease in &leases {
            lease.clear_dirty(); // a reconciliation under way to the dead actor is lost
            shell.book(lease, lease.booked_at()); // its prefill has run since then
        }
        for lease in &leases {
            shell.agree_with(lease, now);
        }
        shell.publish(now);
        shell
    }

    /// Handles one message.
    pub fn step<C, Q: LoadQueryToken>(
        &mut self,
        msg: SequenceMsg<C, A, Q>,
        time: &impl TimeSource,
    ) -> Option<SequenceEffect<C, A>> {
        match msg {
            SequenceMsg::Load { query, now } => {
                self.on_load(&query, now);
                None
            }
            SequenceMsg::Book(book) => self.on_book(book),
            SequenceMsg::Reconcile(lease) => self.on_reconcile(&lease, time.now()),
            SequenceMsg::Drain(ack) if self.is_idle(time.now()) => Some(SequenceEffect::Drained(ack)),
            SequenceMsg::Drain(ack) => {
                self.draining = Some(ack);
                None
            }
            SequenceMsg::Undrain => self.draining.take().map(SequenceEffect::Drained),
            SequenceMsg::Retire(ack) => Some(self.on_retire(ack, time.now())),
        }
    }

    /// The bookings.
    pub fn active(&self) -> &ActiveSequences {
        &self.active
    }

    fn on_load(&self, query: &impl LoadQueryToken, now: Timestamp) {
        let shared_blocks: SmallVec<_> =
            query.prompts().iter().map(|prompt| self.active.project(prompt).shared_blocks).collect();
        let (slot, generation) = (self.slot, self.generation);
        query.push(LoadAnswer { slot, generation, load: self.active.load(now), shared_blocks });
    }

    fn on_book<C>(&mut self, book: Book<C>) -> Option<SequenceEffect<C, A>> {
        let Book { lease, decision, number, scheduler, caller, now } = book;
        // The scheduler was replaced: its successor does not count this Book, and the caller sends the request again.
        if !self.cells.scheduler.is(scheduler) {
            return None;
        }
        self.read_peers(now);
        if number.incarnation == self.incarnation {
            self.applied = number.number;
        }
        let booked = decision.generation == self.generation
            && lease.book(self.slot, self.generation, decision.prefill_load, now);
        if booked {
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
        if !Defect::BookUnpublished.is_planted() {
            self.publish(now);
        }
        // A lease that ended first has no caller. The board now includes the charge in place of the scheduler's overlay,
        // and may be lower.
        if booked {
            Some(SequenceEffect::Booked(caller, decision))
        } else {
            self.is_queueing.then_some(SequenceEffect::LoadFell)
        }
    }

    fn on_reconcile<C>(&mut self, lease: &Lease, now: Timestamp) -> Option<SequenceEffect<C, A>> {
        self.read_peers(now);
        if !Defect::StaysDirty.is_planted() {
            lease.clear_dirty(); // before the read: later changes queue another reconciliation
        }
        let before = self.is_queueing.then(|| self.active.load(now));
        self.agree_with(lease, now);
        self.publish(now);
        let drained =
            if self.is_idle(now) && !Defect::DrainForgotten.is_planted() { self.draining.take() } else { None };
        drained.map(SequenceEffect::Drained).or_else(|| {
            let (before, after) = (before?, self.active.load(now));
            let fell = after.requests < before.requests
                || after.active_blocks < before.active_blocks
                || after.prefill_tokens < before.prefill_tokens;
            fell.then_some(SequenceEffect::LoadFell)
        })
    }

    /// Reads the load by other replicas before the reports of an instant.
    fn read_peers(&mut self, now: Timestamp) {
        if let Some(meter) = &mut self.meter {
            meter.peers_are(self.cells.peers.read(), now);
        }
    }

    fn is_idle(&self, now: Timestamp) -> bool {
        self.active.load(now).requests == 0
    }

    fn on_retire<C>(&mut self, ack: A, now: Timestamp) -> SequenceEffect<C, A> {
        for lease in self.cells.directory.booked_on(self.slot, self.generation) {
            if !Defect::RetireKeepsLeases.is_planted() {
                lease.end();
                self.cells.directory.leave(&lease);
            }
            self.free(&lease, now);
        }
        self.publish(now);
        SequenceEffect::Retired(ack)
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
        if Defect::BookingKept.is_planted() {
            return;
        }
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
        self.cells.board.publish(&board);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::load::{EngineSpeed, PredictionBias, work_tokens};
    use crate::protocol::{WorkerId, WorkerRank};
    use crate::select::TierOverlap;

    const PLACE: (Slot, Generation) = (Slot(0), Generation(1));

    /// Load queries without a receiver.
    struct Unused;

    impl LoadQueryToken for Unused {
        fn prompts(&self) -> &[PromptBlocks] {
            &[]
        }

        fn push(&self, _: LoadAnswer) {}
    }

    type Step = Option<SequenceEffect<(), ()>>;

    fn step(sequence: &mut SequenceShell<()>, msg: SequenceMsg<(), (), Unused>, now: Timestamp) -> Step {
        sequence.step(msg, &now)
    }

    fn restore(
        incarnation: u32,
        cell: &Arc<SpeedCell>,
        directory: &Arc<Directory>,
        now: Timestamp,
    ) -> SequenceShell<()> {
        let cells = SequenceCells {
            board: Arc::default(),
            learns: Some(Arc::clone(cell)),
            peers: Arc::default(),
            scheduler: Arc::default(),
            directory: Arc::clone(directory),
        };
        SequenceShell::restore(PLACE, incarnation, cells, (64, false), now)
    }

    fn book(sequence: &mut SequenceShell<()>, id: &str, tokens: u32, now: Timestamp) -> Arc<Lease> {
        let (lease, booked) = book_on(sequence, PLACE, id, tokens, now);
        assert!(matches!(booked, Some(SequenceEffect::Booked(..))), "{id} is booked");
        lease
    }

    fn book_on(
        sequence: &mut SequenceShell<()>,
        (slot, generation): (Slot, Generation),
        id: &str,
        tokens: u32,
        now: Timestamp,
    ) -> (Arc<Lease>, Step) {
        let lease = sequence.cells.directory.enter(id, PromptBlocks::Counted(0), now).expect("a free id");
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
        let number = BookNumber { incarnation: sequence.incarnation, number: 1 };
        let book = Book { lease: Arc::clone(&lease), decision, number, scheduler: 0, caller: (), now };
        let booked = step(sequence, SequenceMsg::Book(book), now);
        (lease, booked)
    }

    #[test]
    fn a_book_for_another_generation_of_the_slot_has_no_effect() {
        let now = Timestamp::default();
        let mut sequence = restore(0, &Arc::default(), &Arc::default(), now);
        let (lease, booked) = book_on(&mut sequence, (PLACE.0, Generation(0)), "earlier", 20_000, now);
        assert!(booked.is_none() && sequence.is_idle(now));
        assert_eq!(lease.state(), LeaseState::Pending);
    }

    #[test]
    fn speed_is_learned_from_reports_and_kept_over_restarts() {
        let (cell, directory, mut now) = (Arc::new(SpeedCell::default()), Arc::default(), Timestamp(1));
        let mut sequence = restore(0, &cell, &directory, now);
        for n in 0..128 {
            let lease = book(&mut sequence, &n.to_string(), 20_000, now);
            now = now + Duration::from_secs(1);
            for _ in 0..3 {
                let _ = lease.complete_prefill();
                step(&mut sequence, SequenceMsg::Reconcile(Arc::clone(&lease)), now);
            }
            for _ in 0..2 {
                now = now + 64 * Duration::from_millis(10);
                lease.push_output_block(None);
                step(&mut sequence, SequenceMsg::Reconcile(Arc::clone(&lease)), now);
            }
            lease.end();
            directory.leave(&lease);
            step(&mut sequence, SequenceMsg::Reconcile(lease), now);
        }
        let meter = sequence.meter.as_ref().expect("speed learned");
        assert_eq!((meter.rate().samples(), meter.under_way()), (128, 0));
        let learned = cell.speed_or(EngineSpeed::prior(64));
        let rate = learned.work_tokens_per_second;
        assert!((rate / work_tokens(20_000, 0) - 1.0).abs() < 0.05, "{rate}");
        assert_eq!((meter.step().samples(), meter.watched()), (256, 0));
        assert!((learned.step(1.0, 1.0) / 0.010 - 1.0).abs() < 0.03, "{learned:?}");
        assert_eq!(cell.output_tokens(), Some(160.0), "two and a half blocks");

        let lease = book(&mut sequence, "under way", 20_000, now);
        drop(sequence);
        now = now + Duration::from_secs(60);
        let mut restored = restore(1, &cell, &directory, now);
        let _ = lease.complete_prefill();
        step(&mut restored, SequenceMsg::Reconcile(Arc::clone(&lease)), now);
        lease.push_output_block(None);
        step(&mut restored, SequenceMsg::Reconcile(Arc::clone(&lease)), now);
        assert_eq!(cell.speed_or(EngineSpeed::prior(64)), learned, "the start of the prefill is unknown");
        let again = restored.meter.as_ref().expect("speed learned").speed();
        assert!((again.work_tokens_per_second - rate).abs() < 1.0, "{again:?} after {rate}");
        assert!((again.step(9.0, 99.0) / learned.step(9.0, 99.0) - 1.0).abs() < 1e-6, "{again:?} after {learned:?}");
    }
}
