//! Shell of a sequence actor: the bookings of one rank.
//!
//! Owns the rank's [`ActiveSequences`] and is the single writer of its board slot. The board is published after each
//! change. The shell does no token arithmetic: the scheduler computes the charge of a booking and stores it in the lease.
//! After a restart the bookings are rebuilt from the leases. If speeds are learned, the shell reports bookings, progress
//! and completions to its [`SpeedMeter`].

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::{CurrentIncarnation, Defect};
use crate::directory::{Directory, Lease, LeaseState};
use crate::load::{
    ActiveSequences, BoardLoad, BoardSlot, Change, PeerLoad, PeerLoadCell, PrefillLoadHint, PromptBlocks, SpeedCell,
    SpeedMeter, StallCell, StallMeter,
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
    /// Stalls of the rank, and the constant part of the time allowed; absent if they are not detected.
    pub stalls: Option<(Arc<StallCell>, Duration)>,
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
    stalls: Option<StallMeter>,
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
            stalls: cells.stalls.as_ref().map(|(cell, slack)| StallMeter::new(Arc::clone(cell), *slack)),
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
        if let Some(stalls) = &mut self.stalls {
            stalls.booked(lease.booking(), lease.hint(), peer_tokens(&self.cells), at);
        }
    }

    /// Updates the booking to the present state of its lease.
    fn agree_with(&mut self, lease: &Lease, now: Timestamp) {
        let progress = lease.progress();
        let mut changes = [Change::NoChange; 2];
        if progress.prefill_completed {
            changes[0] = self.active.complete_prefill(lease.booking(), now);
        }
        if let Some(meter) = &mut self.meter {
            meter.reported(lease.booking(), progress.prefill_completed, progress.output.block_count(), now);
        }
        changes[1] = self.active.set_output(lease.booking(), &progress.output);
        if let Some(stalls) = &mut self.stalls
            && changes.contains(&Change::Applied)
        {
            stalls.progressed(lease.booking(), peer_tokens(&self.cells), now);
        }
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
        if let Some(stalls) = &mut self.stalls {
            stalls.ended(lease.booking());
        }
        if let Some(meter) = &mut self.meter {
            if let Some(itl) = lease.mean_itl.get() {
                meter.paced(lease.booking(), *itl, now);
            }
            meter.ended(lease.booking(), lease.delivered_cached_tokens.get().copied(), now);
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

/// Prompt tokens that other replicas have last reported for the rank.
fn peer_tokens(cells: &SequenceCells) -> u64 {
    let PeerLoad { prefill_tokens, unmodelled_tokens, .. } = cells.peers.read();
    u64::from(prefill_tokens) + u64::from(unmodelled_tokens)
}
