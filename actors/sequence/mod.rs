//! Sequence actor: one per rank, owner of the rank's bookings.
//!
//! [`SequenceShell`] decides. A booking counts before its caller receives the placement. Replies are sent after the release
//! of the strand.

pub(crate) mod table;

use std::sync::Arc;

use tokio::sync::{Notify, OwnedSemaphorePermit, oneshot};

use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::join::{Continuation, Join, ReplyToken};
use crate::actors::delivery::reply::Reply;
use crate::actors::delivery::strand::{ActorState, DeferredReply};
use crate::actors::io::clock::Clock;
use crate::actors::radix::claim::SpeculationClaim;
use crate::actors::views::wake_flag::WakeFlag;
use crate::load::PromptBlocks;
use crate::schedule::LoadAnswer;
use crate::shell::sequence::{LoadQueryToken, SequenceEffect, SequenceMsg as Msg, SequenceShell};

/// Messages to a sequence actor.
pub(crate) type SequenceMsg = Msg<BookCaller, Acknowledgement, LoadToken>;

/// Reply token of a load query.
pub(crate) type LoadToken = ReplyToken<LoadAnswer, dyn LoadQueryContinuation>;

/// Continuation of a load query, with the prompts to project.
pub(crate) trait LoadQueryContinuation: Continuation<LoadAnswer> {
    fn prompts(&self) -> &[PromptBlocks];
}

impl LoadQueryToken for LoadToken {
    fn prompts(&self) -> &[PromptBlocks] {
        self.continuation().prompts()
    }

    fn push(&self, answer: LoadAnswer) {
        self.push(answer);
    }
}

/// Creates one more token of a load query, for a sequence actor.
pub(crate) fn load_token<C: LoadQueryContinuation + 'static>(query: &ReplyToken<LoadAnswer, C>) -> LoadToken {
    query.fork_unsized(|join| -> Arc<Join<LoadAnswer, dyn LoadQueryContinuation>> { join })
}

/// Receiver of notifications that the load of a rank has fallen.
pub(crate) trait LoadFallListener: Send + Sync {
    fn load_fell(&self);
}

/// Caller of a request that is booked.
pub(crate) struct BookCaller {
    /// Permit of the waiting room. Before `answer`, because fields are dropped in this order.
    pub(crate) permit: OwnedSemaphorePermit,
    pub(crate) answer: oneshot::Sender<Reply>,
    /// Claim on a modelled cache for this booking.
    pub(crate) claim: Option<SpeculationClaim>,
}

/// Bookings of one rank.
pub(crate) struct Sequence {
    pub(crate) shell: SequenceShell<Acknowledgement>,
    pub(crate) clock: Clock,
    /// Notified after each booking.
    pub(crate) booked: Arc<Notify>,
    /// Receiver of falling-load notifications; `None` without a queue.
    pub(crate) wakes: Option<Wakes>,
}

/// Flag and receiver of falling-load notifications. The flag is set while the scheduler waits for one.
pub(crate) struct Wakes {
    pub(crate) flag: Arc<WakeFlag>,
    pub(crate) scheduler: Arc<dyn LoadFallListener>,
}

/// Replies delivered after the strand is released: an effect, and the scheduler if it waits for falling load.
pub(crate) struct SequenceReply(SequenceEffect<BookCaller, Acknowledgement>, Option<Arc<dyn LoadFallListener>>);

impl ActorState for Sequence {
    type Msg = SequenceMsg;
    type Deferred = SequenceReply;

    fn step(&mut self, msg: SequenceMsg) -> Option<SequenceReply> {
        let is_book = matches!(msg, Msg::Book(_));
        let mut effect = self.shell.step(msg, &self.clock);
        if is_book {
            self.booked.notify_one();
        }
        let may_have_fallen = match &mut effect {
            Some(SequenceEffect::Booked(caller, _)) => {
                if let Some(claim) = caller.claim.take() {
                    claim.leave_to_lease();
                }
                true
            }
            Some(SequenceEffect::LoadFell) => true,
            Some(SequenceEffect::Drained(_) | SequenceEffect::Retired(_)) | None => false,
        };
        // One notification per wait. The board is published.
        let wakes = self.wakes.as_ref().filter(|wakes| may_have_fallen && wakes.flag.take());
        Some(SequenceReply(effect?, wakes.map(|wakes| Arc::clone(&wakes.scheduler))))
    }
}

impl DeferredReply for SequenceReply {
    fn deliver(self) {
        if let SequenceEffect::Booked(BookCaller { permit, answer, .. }, decision) = self.0 {
            drop(permit);
            // A caller that cancelled has ended its lease and queued the reconciliation that frees the booking.
            drop(answer.send(Reply::Placed(decision)));
        }
        if let Some(scheduler) = self.1 {
            scheduler.load_fell();
        }
    }
}
