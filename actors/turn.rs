//! Turns: how a message reaches an actor without waking a thread for it.
//!
//! A cast wakes the actor's task, and that, not the work, is most of what it costs. So an actor's state and inbox
//! live in a [`Turn`], and whoever brings a message takes the turn if it is free: it handles what waits in the inbox,
//! then its own message, on its own thread. Where the turn is taken, the message goes into the inbox, and whoever
//! has the turn handles it before leaving, for a while; then it wakes the actor, which goes on.
//!
//! Owns the state's lock and the inbox. Promises one step at a time, first-in first-out order, that no message is left
//! behind while the turn is free, that nobody blocks or spins for a turn, and that a step that panicked makes its actor
//! a dead one: its messages are dropped, and what is dropped is answered as lost. Leaves to the supervisor the opening
//! of a turn with fresh state, to gates how much may wait, and knows nothing of what the states are.
//!
//! Why nothing is left behind: a sender puts its message into the inbox before it tries for the turn once more, and
//! whoever gives a turn back looks into the inbox afterwards, each with a full fence between: one of the two sees the
//! other. Nested turns are the same: a message to an actor whose turn this very thread has waits until it is given back.

use std::any::Any;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use smallvec::SmallVec;

/// Messages of others that a sender handles before it leaves the rest to the actor.
const FAVOURS_MAX: usize = 16;

/// The state of an actor: one message at a time.
pub(crate) trait Step: Send + Sized + 'static {
    /// What it can be told.
    type Msg: Send + 'static;
    /// What leaves only once the turn is given back.
    type After: After;

    /// Handles one message. Messages to other actors leave from in here.
    fn step(&mut self, msg: Self::Msg) -> Option<Self::After>;
}

/// Answers that wait until a turn is given back, so that whoever they wake finds the actor free.
pub(crate) trait After: Send {
    fn deliver(self);
}

/// The answers that a sender has to deliver once it holds no turn: its own message's, and those of others that it
/// handled on the way.
#[must_use = "answers in it are undelivered"]
pub(crate) struct Afters<A>(SmallVec<[A; 1]>);

impl<A: After> Afters<A> {
    /// Keeps the answers for later, if there are any.
    pub(crate) fn keep_in(self, later: &mut Vec<Self>) {
        if !self.0.is_empty() {
            later.push(self);
        }
    }

    pub(crate) fn deliver(self) {
        self.0.into_iter().for_each(After::deliver);
    }
}

/// An actor's state and its address, the same across restarts.
pub(crate) struct Turn<S: Step> {
    /// Absent before the first start, after a step that panicked until the restart, and after the last stop.
    state: Mutex<Option<S>>,
    inbox: Mutex<VecDeque<S::Msg>>,
    /// Messages in the inbox, to be seen without its lock.
    waiting: AtomicUsize,
    /// The only lasting holder of the actor's reference.
    actor: Mutex<Option<ActorRef<Wake<S>>>>,
    /// For good: whoever has the turn drops the state on giving it back.
    closed: AtomicBool,
}

/// Tells an actor that its inbox wants it.
pub(crate) struct Wake<S>(PhantomData<fn() -> S>);

type State<'a, S> = MutexGuard<'a, Option<S>>;

impl<S: Step> Turn<S> {
    /// A turn that nobody can take yet.
    pub(crate) fn closed() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(None),
            inbox: Mutex::default(),
            waiting: AtomicUsize::new(0),
            actor: Mutex::new(None),
            closed: AtomicBool::new(false),
        })
    }

    /// Handles `msg` here if the turn is free, else leaves it to whoever has the turn. Never blocks.
    pub(crate) fn send(&self, msg: S::Msg) -> Afters<S::After> {
        let mut afters = Afters(SmallVec::new());
        if self.waiting.load(Ordering::Relaxed) == 0
            && let Some(state) = self.try_lock()
        {
            self.handle_one(state, msg, &mut afters);
        } else {
            self.push(msg);
        }
        self.handle_waiting(&mut afters);
        afters
    }

    /// Sends, and delivers the answers. Not from inside another turn.
    pub(crate) fn tell(&self, msg: S::Msg) {
        self.send(msg).deliver();
    }

    /// Handles what waits, for a while, unless somebody has the turn: they will. Where nobody can handle it, because the
    /// actor is dead or closed, it is dropped, and so answered.
    ///
    /// Every path that releases the state's lock reads `waiting` and `closed` again afterwards, behind a fence. A message
    /// or a close that met the lock taken is seen here, because its own thread does not try a second time.
    fn handle_waiting(&self, afters: &mut Afters<S::After>) {
        let (mut favours, mut emptied) = (0, false);
        loop {
            fence(Ordering::SeqCst); // after the turn was given back, before looking: see the module's head
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
            } else if favours < FAVOURS_MAX {
                match self.pop() {
                    Some(msg) => self.handle_one(state, msg, afters),
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
            favours += 1;
        }
    }

    /// The state, unless another thread, or an outer call of this one, has it.
    fn try_lock(&self) -> Option<State<'_, S>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()), // see `die`: nothing depends on the poison
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// One step. A panic is the actor's, not the sender's.
    fn handle_one(&self, mut state: State<'_, S>, msg: S::Msg, afters: &mut Afters<S::After>) {
        match catch_unwind(AssertUnwindSafe(|| state.as_mut().and_then(|state| state.step(msg)))) {
            Ok(after) => {
                drop(state);
                afters.0.extend(after);
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

    /// Drops the state of a closed turn, and what waits.
    fn empty(&self, mut turn: State<'_, S>) {
        let old = turn.take();
        self.drop_waiting(turn);
        drop(old);
    }

    /// Drops what waits: taken under the turn, so that it is nobody else's, and dropped after it, for a drop may send.
    fn drop_waiting(&self, turn: State<'_, S>) {
        let mut inbox = self.inbox();
        self.waiting.store(0, Ordering::Relaxed);
        let dropped = std::mem::take(&mut *inbox);
        drop(inbox);
        #[cfg(test)]
        tests::linger();
        drop(turn);
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
            drop(actor.send_message(Wake(PhantomData))); // a dead actor's inbox is dropped when its death is heard of
        }
    }

    /// A step panicked: its state is dropped, for it may be half changed, and the actor stops, so that its supervisor
    /// restarts it.
    ///
    /// The mutex' own poison would not do: a step that a destructor runs while another panic unwinds does not poison.
    fn die(&self, mut turn: State<'_, S>, panic: &Box<dyn Any + Send>) {
        let half_changed = turn.take();
        self.drop_waiting(turn); // before a successor can be there
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        if let Some(actor) = self.actor().as_ref() {
            actor.stop(Some(format!("panicked: {text}")));
        }
        drop(catch_unwind(AssertUnwindSafe(|| drop(half_changed)))); // nothing is certain of it, not even its drop
    }

    /// Opens the turn for `actor` with fresh state. Messages sent while `state` is being built wait. If building it
    /// panics, the turn stays dead and so is the actor.
    pub(crate) fn open(&self, actor: ActorRef<Wake<S>>, state: impl FnOnce() -> S) {
        let mut turn = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let old_actor = self.actor().replace(actor);
        let old = turn.take();
        match catch_unwind(AssertUnwindSafe(state)) {
            Ok(state) => {
                *turn = Some(state);
                drop(turn);
                self.wake();
            }
            Err(panic) => {
                self.die(turn, &panic);
                self.handle_waiting(&mut Afters(SmallVec::new()));
            }
        }
        drop((old, old_actor)); // outside: what they hold may be answered by being dropped
    }

    /// Closes the turn for good, without waiting for whoever has it: what it holds is dropped, and messages from here on
    /// are lost.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        if let Some(actor) = self.actor().take() {
            actor.stop(None);
        }
        self.handle_waiting(&mut Afters(SmallVec::new()));
    }
}

/// The ractor actor around a turn: its place in the supervision tree, and its own thread of work.
pub(crate) struct TurnActor<S>(PhantomData<fn() -> S>);

impl<S> TurnActor<S> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: Step> Actor for TurnActor<S> {
    type Msg = Wake<S>;
    type State = Arc<Turn<S>>;
    type Arguments = Arc<Turn<S>>;

    async fn pre_start(&self, _: ActorRef<Wake<S>>, turn: Arc<Turn<S>>) -> Result<Arc<Turn<S>>, ActorProcessingErr> {
        Ok(turn)
    }

    async fn handle(
        &self,
        _: ActorRef<Wake<S>>,
        _: Wake<S>,
        turn: &mut Arc<Turn<S>>,
    ) -> Result<(), ActorProcessingErr> {
        let mut afters = Afters(SmallVec::new());
        turn.handle_waiting(&mut afters);
        afters.deliver();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
