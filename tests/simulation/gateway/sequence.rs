//! Sequence actors: start of the shipped shell, and its effects.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::schedule::LoadAnswer;
use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::internals::shell::sequence::{
    LoadQueryToken, SequenceCells, SequenceEffect, SequenceMsg, SequenceShell,
};
use pointsman::protocol::Timestamp;

use super::{Entry, Gateway, Surroundings};
use crate::letter::{Ack, Answer, Context, Letter, LoadJoin};
use crate::net::Actor;

/// Load query of a batch, to one rank.
pub(crate) struct LoadQuery(pub(crate) Rc<LoadJoin>);

impl LoadQueryToken for LoadQuery {
    fn prompts(&self) -> &[pointsman::internals::load::PromptBlocks] {
        &self.0.prompts
    }

    fn push(&self, answer: LoadAnswer) {
        self.0.found.borrow_mut().push(answer);
    }
}

pub(super) struct Sequence {
    pub(super) shell: SequenceShell<Ack>,
    is_retired: bool,
    is_draining: bool,
}

impl Gateway {
    /// Starts the sequence actor of a rank: without bookings at first, with those of the leases after a restart.
    pub(super) fn start_sequence(&mut self, entry: &Rc<Entry>, incarnation: u32, now: Timestamp) {
        let config = &self.settings.config;
        let cells = SequenceCells {
            board: Arc::clone(&entry.cells.board),
            learns: config.learns_speed().then(|| Arc::clone(&entry.cells.speed)),
            stalls: Some((Arc::default(), Duration::from_secs(3))),
            peers: Arc::clone(&entry.cells.peers),
            scheduler: Arc::clone(&self.scheduler_incarnation),
            directory: Arc::clone(&self.directory),
        };
        let (place, settings) = ((entry.slot, entry.generation), (config.block_size_or_assumed(), self.is_queueing()));
        let shell = SequenceShell::restore(place, incarnation, cells, settings, now);
        self.changed_at = now;
        self.sequences
            .insert(entry.slot, (entry.generation, Some(Sequence { shell, is_retired: false, is_draining: false })));
    }

    pub(super) fn on_sequence(
        &mut self,
        (slot, generation): (Slot, Generation),
        msg: SequenceMsg<Context, Ack, LoadQuery>,
        around: &mut Surroundings<'_>,
    ) {
        let now = around.net.now;
        let here = self.sequences.get_mut(&slot).filter(|(current, _)| *current == generation);
        let Some(sequence) = here.and_then(|(_, sequence)| sequence.as_mut()) else { return }; // the message is lost
        match &msg {
            SequenceMsg::Book(book) if self.scheduler_incarnation.is(book.scheduler) => {
                assert!(!sequence.is_retired, "a Book arrives after the removal of the rank on slot {slot}");
                let board = self.supervisor.rank(slot).and_then(|rank| rank.0.cells.board.read());
                let applied = board.filter(|board| board.incarnation == book.number.incarnation);
                let expected = applied.map_or(book.number.number, |board| board.applied + 1);
                assert_eq!(book.number.number, expected, "Books are numbered without a gap");
            }
            SequenceMsg::Retire(_) => sequence.is_retired = true,
            SequenceMsg::Drain(_) | SequenceMsg::Undrain => {
                sequence.is_draining = matches!(msg, SequenceMsg::Drain(_));
            }
            _ => {}
        }
        if !matches!(msg, SequenceMsg::Load { .. }) {
            self.changed_at = now;
        }
        let from = Actor::Sequence(slot.0, generation.0);
        let is_book = matches!(msg, SequenceMsg::Book(_));
        let effect = sequence.shell.step(msg, &now);
        sequence.is_draining &= !matches!(effect, Some(SequenceEffect::Drained(_)));
        let is_idle = sequence.shell.active().is_empty();
        assert!(
            !sequence.is_draining || !is_idle || sequence.is_retired,
            "the drain of slot {slot} has no acknowledgement"
        );
        if is_book {
            self.send(from, Actor::Sharing, Letter::Booked, around);
        }
        let may_have_fallen = match effect {
            Some(SequenceEffect::Booked(mut context, decision)) => {
                context.reply.is_used = true;
                let (call, attempt) = (context.reply.call, context.reply.attempt);
                drop(context);
                self.send(from, Actor::Caller(call), Letter::Answered(attempt, Answer::Placed(decision)), around);
                true
            }
            Some(SequenceEffect::LoadFell) => true,
            Some(SequenceEffect::Drained(ack) | SequenceEffect::Retired(ack)) => {
                drop(ack);
                false
            }
            None => false,
        };
        if may_have_fallen && self.is_queueing() && self.wake.replace(false) {
            self.send(from, Actor::Scheduler, Letter::scheduler(SchedulerMsg::Wake { at: None }), around);
        }
    }
}
