//! Serial executor of one actor: delivers a message on the sender's thread if the actor is idle.
//!
//! Waking an actor's task costs more than most messages take to handle. An actor's state and inbox therefore live in a
//! [`Strand`]. A sender that finds the state unlocked locks it and handles the inbox, then its own message. A sender
//! that finds it locked appends to the inbox. The holder of the lock handles up to [`INLINE_DRAIN_MAX`] messages of the
//! inbox before the release, and then wakes the actor's task for the rest.
//!
//! Guarantees: one step at a time, first-in first-out order, no message left in the inbox of an unlocked strand, and no
//! blocking or spinning on the lock. A step that panics ends its actor: the queued messages are dropped, and their
//! senders observe a lost reply. The supervisor opens a strand with fresh state. Semaphores in front of the strand
//! bound its inbox.
//!
//! A sender appends to the inbox and then tries the lock again; the holder releases the lock and then reads the inbox.
//! A full fence on each side (Dekker's pattern) guarantees that at least one sees the other. The same holds for a
//! nested send to a strand that this thread has locked: the message waits until the lock is released. `tests/models`
//! checks all interleavings.
//!
//! **Hangs.** A step that never returns keeps the lock of its state. Each state therefore lives in a [`Cell`] of its
//! own, and [`Strand::abandon`] moves the strand to a free cell. The hung thread finds out when its step returns: it
//! drops its state and its replies, and has no further effect on the strand. Effects inside the hung step, such as
//! messages to other actors, are fenced by their receivers. A relaxed counter of steps lets a watchdog detect a hang.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, TryLockError};

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::sync::{
    AtomicBool, AtomicU64, AtomicUsize, INLINE_DRAIN_MAX, Mutex, MutexGuard, Ordering, StateGuard, StateMutex, fence,
};
use crate::membership::ActorSample;

/// State cells of a replaceable strand: at most one fewer of its threads hang at a time.
pub(crate) const CELLS_MAX: usize = 4;

/// The state of an actor: one message or query at a time.
pub(crate) trait ActorState: Send + Sized + 'static {
    /// Its messages.
    type Msg: Send + 'static;
    /// Replies delivered after the lock is released.
    type Deferred: DeferredReply;

    /// Handles one message. Messages to other actors are sent during the step.
    fn step(&mut self, msg: Self::Msg) -> Option<Self::Deferred>;

    /// Ends a state whose strand was abandoned during its last step. Repairs what late effects may have spoiled for the
    /// successor.
    fn abandoned(self) {}
}

/// A reply delivered after the lock is released, so that the task it wakes finds the actor free.
pub(crate) trait DeferredReply: Send + Sized {
    fn deliver(self);

    /// Ends the reply of a step that returned after its strand was abandoned: its caller has retried. Replies of other
    /// actors in it are delivered.
    fn deliver_late(self) {}
}

/// Item of an inbox.
pub(crate) enum Envelope<S: ActorState> {
    Msg(S::Msg),
    /// A query of the state.
    Query(Box<dyn FnOnce(&mut S) -> Answer + Send>),
}

/// Delivers the result of a query.
pub(crate) type Answer = Box<dyn FnOnce() + Send>;

/// Reply of one step.
enum Deferred<A> {
    Reply(A),
    Answer(Answer),
}

impl<A: DeferredReply> Deferred<A> {
    fn deliver(self) {
        match self {
            Self::Reply(reply) => reply.deliver(),
            Self::Answer(answer) => answer(),
        }
    }
}

/// Deferred replies of the sent message and of drained messages. The sender delivers them once it holds no strand.
#[must_use = "the replies in it are undelivered"]
pub(crate) struct DeferredReplies<A>(SmallVec<[Deferred<A>; 1]>);

impl<A: DeferredReply> DeferredReplies<A> {
    /// Moves the replies to `later`, if there are any.
    pub(crate) fn keep_in(self, later: &mut Vec<Self>) {
        if !self.0.is_empty() {
            later.push(self);
        }
    }

    pub(crate) fn deliver(self) {
        self.0.into_iter().for_each(Deferred::deliver);
    }
}

/// The task of a strand's actor.
pub(crate) trait StrandTask: Send {
    /// Drains the inbox soon.
    fn wake(&self);

    /// Ends the actor, for the supervisor to restart if there is a `reason`.
    fn stop(&self, reason: Option<String>);
}

/// An actor's state and its address, which stays the same across restarts.
pub(crate) struct Strand<S: ActorState> {
    first: Cell<S>,
    /// Cells for the states after a hang; empty if the actor is not replaced.
    spares: Box<[Cell<S>]>,
    /// Number of the cell in use. Changed under the lock of the new cell.
    current: AtomicUsize,
    inbox: Mutex<VecDeque<Envelope<S>>>,
    /// Length of the inbox, readable without its lock.
    waiting: AtomicUsize,
    /// The only long-lived reference to the actor.
    task: Mutex<Option<Box<dyn StrandTask>>>,
    /// Permanent: the holder of the lock drops the state on release.
    closed: AtomicBool,
}

/// Place of one state.
struct Cell<S> {
    /// Absent before the first start, after a step that panicked until the restart, and after the last stop. A state in
    /// a cell that is not in use is dropped by its next holder.
    state: StateMutex<Option<S>>,
    /// Begun and ended steps: odd during a step. Written under the lock.
    steps: AtomicU64,
}

impl<S> Cell<S> {
    fn new() -> Self {
        Self { state: StateMutex::new(None), steps: AtomicU64::new(0) }
    }

    /// The state, unless another thread, or an outer call on this one, holds it.
    fn try_lock(&self) -> Option<StateGuard<'_, Option<S>>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()), // see `die`: poison is not used
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The locked cell in use.
struct Held<'a, S> {
    state: StateGuard<'a, Option<S>>,
    cell: &'a Cell<S>,
    number: usize,
}

impl<S: ActorState> Strand<S> {
    /// A strand without state, until [`Strand::open`]. It is not replaced while it hangs.
    pub(crate) fn closed() -> Arc<Self> {
        Self::with_spares(0)
    }

    /// As [`Strand::closed`], with cells for [`Strand::abandon`].
    pub(crate) fn replaceable() -> Arc<Self> {
        Self::with_spares(CELLS_MAX - 1)
    }

    fn with_spares(spares: usize) -> Arc<Self> {
        Arc::new(Self {
            first: Cell::new(),
            spares: (0..spares).map(|_| Cell::new()).collect(),
            current: AtomicUsize::new(0),
            inbox: Mutex::new(VecDeque::new()),
            waiting: AtomicUsize::new(0),
            task: Mutex::new(None),
            closed: AtomicBool::new(false),
        })
    }

    /// Handles `msg` on this thread if the strand is free, else queues it for the holder. Never blocks.
    pub(crate) fn send(&self, msg: S::Msg) -> DeferredReplies<S::Deferred> {
        let (held, reply) = self.handle_or_queue(Envelope::Msg(msg));
        let mut deferred: SmallVec<_> = reply.into_iter().collect();
        self.handle_waiting(held, |reply| deferred.push(reply));
        DeferredReplies(deferred)
    }

    /// Sends, and delivers each deferred reply after its step: its caller may be polling for it. Must not be called from a
    /// step of another strand.
    pub(crate) fn tell(&self, msg: S::Msg) {
        self.tell_envelope(Envelope::Msg(msg));
    }

    /// Runs `read` as one step of the actor, in the order of messages, and its result after the step. If the query is
    /// lost, both are dropped. Needs neither a message of its own nor a reply, and allocates.
    pub(crate) fn query<F: FnOnce() + Send + 'static>(&self, read: impl FnOnce(&mut S) -> F + Send + 'static) {
        self.tell_envelope(Envelope::Query(Box::new(|state| Box::new(read(state)))));
    }

    /// As [`Strand::query`], with the result sent to the receiver.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut S) -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (reply, receiver) = oneshot::channel();
        self.query(|state| {
            let result = read(state);
            || drop(reply.send(result)) // the receiver may be dropped
        });
        receiver
    }

    fn tell_envelope(&self, msg: Envelope<S>) {
        let (held, reply) = self.handle_or_queue(msg);
        reply.into_iter().for_each(Deferred::deliver);
        self.handle_waiting(held, Deferred::deliver);
    }

    /// Drains the inbox, and delivers the deferred replies.
    pub(crate) fn drain(&self) {
        self.handle_waiting(self.cell(), Deferred::deliver);
    }

    /// Returns the number of the cell that this thread has held, and the reply if the message was handled.
    fn handle_or_queue(&self, msg: Envelope<S>) -> (usize, Option<Deferred<S::Deferred>>) {
        if self.waiting.load(Ordering::Relaxed) == 0
            && let Some(held) = self.try_lock()
        {
            return (held.number, self.handle_one(held, msg));
        }
        self.push(msg);
        (self.cell(), None)
    }

    /// Drains the inbox up to the limit, unless another thread holds the strand and drains it. Each reply goes to `reply`,
    /// while the lock is free. If the actor is dead or closed, the messages are dropped, which completes their replies as
    /// lost.
    ///
    /// Every path that releases the lock of the state re-reads `waiting`, `closed` and `current` afterwards, behind a
    /// fence, because a sender, closer or abandoner that found the lock taken does not retry. `held` is the cell that
    /// this thread has released last.
    fn handle_waiting(&self, mut held: usize, mut reply: impl FnMut(Deferred<S::Deferred>)) {
        let (mut drained, mut emptied) = (0, false);
        loop {
            fence(Ordering::SeqCst); // between release and read: see the module docs
            if self.current.load(Ordering::Relaxed) != held {
                self.clear(held);
            }
            let closed = self.closed.load(Ordering::Relaxed);
            if self.waiting.load(Ordering::Relaxed) == 0 && (!closed || emptied) {
                return;
            }
            let Some(lock) = self.try_lock() else { return };
            held = lock.number;
            if closed {
                self.empty(lock);
                emptied = true;
            } else if lock.state.is_none() {
                self.drop_waiting(lock);
            } else if drained < INLINE_DRAIN_MAX {
                match self.pop() {
                    Some(msg) => self.handle_one(lock, msg).into_iter().for_each(&mut reply),
                    None => drop(lock),
                }
            } else {
                drop(lock);
                fence(Ordering::SeqCst);
                let current = self.current.load(Ordering::Relaxed);
                if !self.closed.load(Ordering::Relaxed) && current == held {
                    return self.wake();
                }
            }
            drained += 1;
        }
    }

    /// The number of the cell in use.
    pub(crate) fn cell(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    fn numbered(&self, cell: usize) -> &Cell<S> {
        match cell {
            0 => &self.first,
            spare => &self.spares[spare - 1],
        }
    }

    /// The cell in use, unless another thread, or an outer call on this one, holds it.
    fn try_lock(&self) -> Option<Held<'_, S>> {
        loop {
            let number = self.current.load(Ordering::Acquire);
            let cell = self.numbered(number);
            let state = cell.try_lock()?;
            if self.current.load(Ordering::Relaxed) == number {
                return Some(Held { state, cell, number });
            }
            take(state); // abandoned before the lock
        }
    }

    /// Drops the state in a cell that is not in use, unless another thread holds it: that thread drops it.
    #[cold]
    fn clear(&self, cell: usize) {
        if let Some(state) = self.numbered(cell).try_lock()
            && self.current.load(Ordering::Relaxed) != cell
        {
            take(state);
        }
    }

    /// One step. A panic ends the actor, not the sender.
    fn handle_one(&self, mut held: Held<'_, S>, msg: Envelope<S>) -> Option<Deferred<S::Deferred>> {
        let begun = held.cell.steps.load(Ordering::Relaxed);
        held.cell.steps.store(begun + 1, Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(|| held.state.as_mut().and_then(|state| self.step(state, msg))));
        held.cell.steps.store(begun + 2, Ordering::Relaxed);
        if self.current.load(Ordering::Relaxed) != held.number {
            end_late(held, outcome.ok().flatten());
            return None;
        }
        outcome.unwrap_or_else(|panic| {
            self.die(held, &panic);
            None
        })
    }

    fn step(&self, state: &mut S, msg: Envelope<S>) -> Option<Deferred<S::Deferred>> {
        match msg {
            Envelope::Msg(msg) => state.step(msg).map(Deferred::Reply),
            Envelope::Query(read) => Some(Deferred::Answer(read(state))),
        }
    }

    fn push(&self, msg: Envelope<S>) {
        let mut inbox = self.inbox();
        inbox.push_back(msg);
        self.waiting.store(inbox.len(), Ordering::Relaxed);
    }

    fn pop(&self) -> Option<Envelope<S>> {
        let mut inbox = self.inbox();
        let msg = inbox.pop_front();
        self.waiting.store(inbox.len(), Ordering::Relaxed);
        msg
    }

    /// Drops the state and the inbox of a closed strand.
    fn empty(&self, mut held: Held<'_, S>) {
        let old = held.state.take();
        self.drop_waiting(held);
        drop(old);
    }

    /// Drops the inbox. It is taken under the lock, so that no other thread has it, and dropped after the release,
    /// because a drop may send.
    fn drop_waiting(&self, held: Held<'_, S>) {
        let mut inbox = self.inbox();
        self.waiting.store(0, Ordering::Relaxed);
        let dropped = std::mem::take(&mut *inbox);
        drop(inbox);
        drop(held);
        drop(dropped);
    }

    fn inbox(&self) -> MutexGuard<'_, VecDeque<Envelope<S>>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner) // no step runs under it
    }

    fn task(&self) -> MutexGuard<'_, Option<Box<dyn StrandTask>>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.task().iter().for_each(|task| task.wake());
    }

    /// Ends the actor after a panicked step: drops its state, which may be inconsistent, and stops it for the
    /// supervisor to restart.
    ///
    /// Poison of the mutex does not suffice: a step that a destructor runs during another unwind does not poison it.
    fn die(&self, mut held: Held<'_, S>, panic: &Box<dyn Any + Send>) {
        let half_changed = held.state.take();
        self.drop_waiting(held); // before a successor can start
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        if let Some(task) = self.task().as_ref() {
            task.stop(Some(format!("panicked: {text}")));
        }
        drop(catch_unwind(AssertUnwindSafe(|| drop(half_changed)))); // an inconsistent state may panic in its drop
    }

    /// Opens the strand for an actor with this task, with fresh state. Messages sent while `state` is built are queued. The
    /// state of a running actor is dropped after its present step, and its queued messages go to the new one.
    /// If building it panics, the strand and the actor stay dead.
    pub(crate) fn open(&self, task: impl StrandTask + 'static, state: impl FnOnce() -> S) {
        let number = self.cell();
        let cell = self.numbered(number);
        let mut guard = cell.state.lock().unwrap_or_else(PoisonError::into_inner);
        let old_task = self.task().replace(Box::new(task));
        let old = guard.take();
        match catch_unwind(AssertUnwindSafe(state)) {
            Ok(state) => {
                *guard = Some(state);
                drop(guard);
                self.wake();
            }
            Err(panic) => {
                self.die(Held { state: guard, cell, number }, &panic);
                self.handle_waiting(number, Deferred::deliver);
            }
        }
        if let Some(task) = &old_task {
            task.stop(None); // of a running actor that is replaced
        }
        drop((old, old_task)); // after release: dropping them may send
    }

    /// Leaves the cell of a hung step, as after a panic in it: the queued messages are dropped, and the strand is dead
    /// until [`Strand::open`]. Returns false, without any effect, if every other cell has a hung step too. Only the
    /// supervisor calls this.
    pub(crate) fn abandon(&self) -> bool {
        let hung = self.cell();
        let mut others = (0..=self.spares.len()).filter(|number| *number != hung);
        let free = others.find_map(|number| Some((number, self.numbered(number).try_lock()?)));
        let Some((number, mut state)) = free else { return false };
        let left = state.take(); // `clear` has dropped it, unless it is about to
        self.current.store(number, Ordering::Release);
        let old_task = self.task().take();
        if let Some(task) = &old_task {
            task.stop(None);
        }
        self.drop_waiting(Held { state, cell: self.numbered(number), number });
        // Clears the hung cell if its step has returned in the meantime.
        self.handle_waiting(hung, Deferred::deliver);
        drop((left, old_task));
        true
    }

    /// The present work: a running step. Messages that wait for the task of the actor are work of the runtime.
    pub(crate) fn sample(&self) -> ActorSample {
        let number = self.cell();
        let steps = self.numbered(number).steps.load(Ordering::Relaxed);
        ActorSample { progress: (number as u64) << 56 | steps, has_work: steps % 2 == 1 }
    }

    /// Closes the strand permanently, without waiting for its holder: its state is dropped and later messages are lost.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        if let Some(task) = self.task().take() {
            task.stop(None);
        }
        self.handle_waiting(self.cell(), Deferred::deliver);
    }
}

/// Ends a step that returned after its cell was abandoned, with or without a reply.
#[cold]
fn end_late<S: ActorState>(held: Held<'_, S>, reply: Option<Deferred<S::Deferred>>) {
    take(held.state);
    if let Some(Deferred::Reply(reply)) = reply {
        reply.deliver_late();
    }
}

/// Drops the state of an abandoned cell after the release of its lock, because the drop may send.
#[cold]
fn take<S: ActorState>(mut state: StateGuard<'_, Option<S>>) {
    let old = state.take();
    drop(state);
    drop(catch_unwind(AssertUnwindSafe(|| old.map(S::abandoned))));
}

#[cfg(test)]
mod tests;
