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
//! nested send to a strand that this thread has locked: the message waits until the lock is released.

use std::any::Any;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use smallvec::SmallVec;

/// Inline drain limit: messages of other senders that one sender handles before it wakes the actor for the rest.
const INLINE_DRAIN_MAX: usize = 16;

/// The state of an actor: one message at a time.
pub(crate) trait ActorState: Send + Sized + 'static {
    /// Its messages.
    type Msg: Send + 'static;
    /// Replies delivered after the lock is released.
    type Deferred: DeferredReply;

    /// Handles one message. Messages to other actors are sent during the step.
    fn step(&mut self, msg: Self::Msg) -> Option<Self::Deferred>;
}

/// A reply delivered after the lock is released, so that the task it wakes finds the actor free.
pub(crate) trait DeferredReply: Send {
    fn deliver(self);
}

/// Deferred replies of the sent message and of drained messages. The sender delivers them once it holds no strand.
#[must_use = "the replies in it are undelivered"]
pub(crate) struct DeferredReplies<A>(SmallVec<[A; 1]>);

impl<A: DeferredReply> DeferredReplies<A> {
    /// Moves the replies to `later`, if there are any.
    pub(crate) fn keep_in(self, later: &mut Vec<Self>) {
        if !self.0.is_empty() {
            later.push(self);
        }
    }

    pub(crate) fn deliver(self) {
        self.0.into_iter().for_each(DeferredReply::deliver);
    }
}

/// An actor's state and its address, which stays the same across restarts.
pub(crate) struct Strand<S: ActorState> {
    /// Absent before the first start, after a step that panicked until the restart, and after the last stop.
    state: Mutex<Option<S>>,
    inbox: Mutex<VecDeque<S::Msg>>,
    /// Length of the inbox, readable without its lock.
    waiting: AtomicUsize,
    /// The only long-lived reference to the actor.
    actor: Mutex<Option<ActorRef<Wake<S>>>>,
    /// Permanent: the holder of the lock drops the state on release.
    closed: AtomicBool,
}

/// Wakes an actor's task to drain its inbox.
pub(crate) struct Wake<S>(PhantomData<fn() -> S>);

type StrandGuard<'a, S> = MutexGuard<'a, Option<S>>;

impl<S: ActorState> Strand<S> {
    /// A strand without state, until [`Strand::open`].
    pub(crate) fn closed() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(None),
            inbox: Mutex::default(),
            waiting: AtomicUsize::new(0),
            actor: Mutex::new(None),
            closed: AtomicBool::new(false),
        })
    }

    /// Handles `msg` on this thread if the strand is free, else queues it for the holder. Never blocks.
    pub(crate) fn send(&self, msg: S::Msg) -> DeferredReplies<S::Deferred> {
        let mut deferred = self.handle_or_queue(msg);
        self.handle_waiting(&mut deferred);
        deferred
    }

    /// Sends, and delivers the deferred replies: that of `msg` before those of the inbox, because its caller is waiting on
    /// this thread. Must not be called from a step of another strand.
    pub(crate) fn tell(&self, msg: S::Msg) {
        self.handle_or_queue(msg).deliver();
        self.drain();
    }

    fn handle_or_queue(&self, msg: S::Msg) -> DeferredReplies<S::Deferred> {
        let mut deferred = DeferredReplies(SmallVec::new());
        if self.waiting.load(Ordering::Relaxed) == 0
            && let Some(state) = self.try_lock()
        {
            self.handle_one(state, msg, &mut deferred);
        } else {
            self.push(msg);
        }
        deferred
    }

    /// Drains the inbox, and delivers the deferred replies.
    fn drain(&self) {
        let mut deferred = DeferredReplies(SmallVec::new());
        self.handle_waiting(&mut deferred);
        deferred.deliver();
    }

    /// Drains the inbox up to the limit, unless another thread holds the strand and drains it. If the actor is dead or
    /// closed, the messages are dropped, which completes their replies as lost.
    ///
    /// Every path that releases the lock of the state re-reads `waiting` and `closed` afterwards, behind a fence,
    /// because a sender or closer that found the lock taken does not retry.
    fn handle_waiting(&self, deferred: &mut DeferredReplies<S::Deferred>) {
        let (mut drained, mut emptied) = (0, false);
        loop {
            fence(Ordering::SeqCst); // between release and read: see the module docs
            let closed = self.closed.load(Ordering::Relaxed);
            if self.waiting.load(Ordering::Relaxed) == 0 && (!closed || emptied) {
                return;
            }
            let Some(state) = self.try_lock() else { return };
            if closed {
                self.empty(state);
                emptied = true;
            } else if state.is_none() {
                self.drop_waiting(state);
            } else if drained < INLINE_DRAIN_MAX {
                match self.pop() {
                    Some(msg) => self.handle_one(state, msg, deferred),
                    None => drop(state),
                }
            } else {
                #[cfg(test)]
                tests::linger();
                drop(state);
                fence(Ordering::SeqCst);
                if !self.closed.load(Ordering::Relaxed) {
                    return self.wake();
                }
            }
            drained += 1;
        }
    }

    /// The state, unless another thread, or an outer call on this one, holds it.
    fn try_lock(&self) -> Option<StrandGuard<'_, S>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()), // see `die`: poison is not used
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// One step. A panic ends the actor, not the sender.
    fn handle_one(&self, mut state: StrandGuard<'_, S>, msg: S::Msg, deferred: &mut DeferredReplies<S::Deferred>) {
        match catch_unwind(AssertUnwindSafe(|| state.as_mut().and_then(|state| state.step(msg)))) {
            Ok(reply) => {
                drop(state);
                deferred.0.extend(reply);
            }
            Err(panic) => self.die(state, &panic),
        }
    }

    fn push(&self, msg: S::Msg) {
        let mut inbox = self.inbox();
        inbox.push_back(msg);
        self.waiting.store(inbox.len(), Ordering::Relaxed);
    }

    fn pop(&self) -> Option<S::Msg> {
        let mut inbox = self.inbox();
        let msg = inbox.pop_front();
        self.waiting.store(inbox.len(), Ordering::Relaxed);
        msg
    }

    /// Drops the state and the inbox of a closed strand.
    fn empty(&self, mut state: StrandGuard<'_, S>) {
        let old = state.take();
        self.drop_waiting(state);
        drop(old);
    }

    /// Drops the inbox. It is taken under the lock, so that no other thread has it, and dropped after the release,
    /// because a drop may send.
    fn drop_waiting(&self, state: StrandGuard<'_, S>) {
        let mut inbox = self.inbox();
        self.waiting.store(0, Ordering::Relaxed);
        let dropped = std::mem::take(&mut *inbox);
        drop(inbox);
        #[cfg(test)]
        tests::linger();
        drop(state);
        drop(dropped);
    }

    fn inbox(&self) -> MutexGuard<'_, VecDeque<S::Msg>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner) // no step runs under it
    }

    fn actor(&self) -> MutexGuard<'_, Option<ActorRef<Wake<S>>>> {
        self.actor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if let Some(actor) = self.actor().as_ref() {
            drop(actor.send_message(Wake(PhantomData))); // a dead actor's inbox is dropped when its death is reported
        }
    }

    /// Ends the actor after a panicked step: drops its state, which may be inconsistent, and stops it for the
    /// supervisor to restart.
    ///
    /// Poison of the mutex does not suffice: a step that a destructor runs during another unwind does not poison it.
    fn die(&self, mut guard: StrandGuard<'_, S>, panic: &Box<dyn Any + Send>) {
        let half_changed = guard.take();
        self.drop_waiting(guard); // before a successor can start
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        if let Some(actor) = self.actor().as_ref() {
            actor.stop(Some(format!("panicked: {text}")));
        }
        drop(catch_unwind(AssertUnwindSafe(|| drop(half_changed)))); // an inconsistent state may panic in its drop
    }

    /// Opens the strand for `actor` with fresh state. Messages sent while `state` is built are queued. If building it
    /// panics, the strand and the actor stay dead.
    pub(crate) fn open(&self, actor: ActorRef<Wake<S>>, state: impl FnOnce() -> S) {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let old_actor = self.actor().replace(actor);
        let old = guard.take();
        match catch_unwind(AssertUnwindSafe(state)) {
            Ok(state) => {
                *guard = Some(state);
                drop(guard);
                self.wake();
            }
            Err(panic) => {
                self.die(guard, &panic);
                self.handle_waiting(&mut DeferredReplies(SmallVec::new()));
            }
        }
        drop((old, old_actor)); // after release: dropping them may send
    }

    /// Closes the strand permanently, without waiting for its holder: its state is dropped and later messages are lost.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        if let Some(actor) = self.actor().take() {
            actor.stop(None);
        }
        self.handle_waiting(&mut DeferredReplies(SmallVec::new()));
    }
}

/// The ractor actor of a strand: its node in the supervision tree, and its task for the rest of the inbox.
pub(crate) struct StrandActor<S>(PhantomData<fn() -> S>);

impl<S> StrandActor<S> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: ActorState> Actor for StrandActor<S> {
    type Msg = Wake<S>;
    type State = Arc<Strand<S>>;
    type Arguments = Arc<Strand<S>>;

    async fn pre_start(
        &self,
        _: ActorRef<Wake<S>>,
        strand: Arc<Strand<S>>,
    ) -> Result<Arc<Strand<S>>, ActorProcessingErr> {
        Ok(strand)
    }

    async fn handle(
        &self,
        _: ActorRef<Wake<S>>,
        _: Wake<S>,
        strand: &mut Arc<Strand<S>>,
    ) -> Result<(), ActorProcessingErr> {
        let mut deferred = DeferredReplies(SmallVec::new());
        strand.handle_waiting(&mut deferred);
        deferred.deliver();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
