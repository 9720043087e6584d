//! Turns: how a message reaches an actor without waking a thread for it.
//!
//! A cast wakes the actor's task, and that, not the work, is most of what it costs. So an actor's state lives in
//! a [`Turn`], and a message to an *idle* actor runs on its sender's thread: nothing queued, the lock free. In
//! every other case it goes through the actor's mailbox as any cast does.
//!
//! Owns the state's lock and the count of messages in the mailbox. Promises one step at a time, first-in
//! first-out order for each sender, that nobody blocks while holding a turn, and that a step that panicked makes
//! its actor a dead one: its messages are dropped, and what is dropped is answered as lost. Leaves to the
//! supervisor the opening of a turn with fresh state, and knows nothing of what the states are.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};

/// The state of an actor: one message at a time.
pub(crate) trait Step: Send + Sized + 'static {
    /// What it can be told.
    type Msg: Send + 'static;
    /// What leaves only once the turn is given back.
    type After: After;

    /// Handles one message. Messages to other actors leave from in here.
    fn step(&mut self, msg: Self::Msg) -> Self::After;
}

/// Answers that wait until a turn is given back, so that whoever they wake finds the actor free.
pub(crate) trait After: Send {
    fn deliver(self);
}

/// How a message went.
#[must_use = "answers in it are undelivered"]
pub(crate) enum Sent<A> {
    /// It was handled on this thread.
    Ran(A),
    /// It is in the mailbox.
    Queued,
    /// The actor is dead: the message was dropped.
    Lost,
}

impl<A: After> Sent<A> {
    /// Delivers the answers; whether the message went into the mailbox, so that its actor must run.
    pub(crate) fn deliver(self) -> bool {
        match self {
            Self::Ran(after) => after.deliver(),
            Self::Queued => return true,
            Self::Lost => {}
        }
        false
    }
}

/// How often a handler whose turn is lent lets other tasks run before it sleeps. A turn takes microseconds.
const YIELDS_MAX: u32 = 1_000;

/// How long it sleeps between tries then.
const RETRY: Duration = Duration::from_millis(1);

/// An actor's state and its address, the same across restarts.
pub(crate) struct Turn<S: Step> {
    /// Absent before the first start and after the last stop; poisoned when a step panicked.
    state: Mutex<Option<S>>,
    /// Messages in the mailbox.
    queued: AtomicUsize,
    /// The only lasting holder of the actor's reference. Casts hold it for reading, a change for writing, so that
    /// the count above always belongs to this mailbox.
    mailbox: RwLock<Option<ActorRef<S::Msg>>>,
}

impl<S: Step> Turn<S> {
    /// A turn that nobody can take yet.
    pub(crate) fn closed() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(None), queued: AtomicUsize::new(0), mailbox: RwLock::new(None) })
    }

    /// Handles `msg` here if the actor is idle, else puts it in its mailbox.
    pub(crate) fn send(&self, msg: S::Msg) -> Sent<S::After> {
        if self.queued.load(Ordering::Acquire) == 0 {
            match self.state.try_lock() {
                Ok(state) if state.is_none() => return Sent::Lost,
                Ok(state) if self.queued.load(Ordering::Acquire) == 0 => return self.lend(state, msg),
                Ok(_) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Poisoned(_)) => return Sent::Lost,
            }
        }
        self.cast(msg)
    }

    /// Sends, and delivers the answers. Not from inside another turn.
    pub(crate) fn tell(&self, msg: S::Msg) -> bool {
        self.send(msg).deliver()
    }

    /// Runs the step on this thread. A panic is the actor's, not the sender's.
    fn lend(&self, state: MutexGuard<'_, Option<S>>, msg: S::Msg) -> Sent<S::After> {
        let step = move || {
            let mut state = state; // dropped by the panic, which poisons the turn
            state.as_mut().map(|state| state.step(msg))
        };
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Some(after)) => Sent::Ran(after),
            Ok(None) => Sent::Lost,
            Err(panic) => {
                self.die(&panic);
                Sent::Lost
            }
        }
    }

    fn cast(&self, msg: S::Msg) -> Sent<S::After> {
        let mailbox = self.mailbox.read().unwrap_or_else(PoisonError::into_inner);
        let Some(actor) = mailbox.as_ref() else { return Sent::Lost };
        self.queued.fetch_add(1, Ordering::AcqRel);
        match actor.send_message(msg) {
            Ok(()) => Sent::Queued,
            Err(_dead) => {
                self.queued.fetch_sub(1, Ordering::AcqRel);
                Sent::Lost
            }
        }
    }

    /// What the actor's own handler does with a message from its mailbox.
    ///
    /// Waits for its turn without blocking the thread: whoever has lent it may be slow, or stuck for good.
    async fn handle(&self, msg: S::Msg) -> Result<(), ActorProcessingErr> {
        let mut msg = Some(msg);
        let mut tries = 0;
        let after = loop {
            match self.state.try_lock() {
                Ok(mut state) => {
                    self.queued.fetch_sub(1, Ordering::AcqRel);
                    break state.as_mut().zip(msg.take()).map(|(state, msg)| state.step(msg));
                }
                Err(TryLockError::Poisoned(_)) => return Err("a lent turn panicked".into()),
                Err(TryLockError::WouldBlock) => tries += 1,
            }
            if tries < YIELDS_MAX {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(RETRY).await;
            }
        };
        if let Some(after) = after {
            after.deliver();
        }
        Ok(())
    }

    /// A lent step panicked: the actor follows, so that its supervisor hears of it.
    fn die(&self, panic: &Box<dyn Any + Send>) {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        if let Some(actor) = self.mailbox.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
            actor.stop(Some(format!("panicked: {text}")));
        }
    }

    /// Opens the turn for `actor` with fresh state. Messages sent while `state` is being built wait in the mailbox.
    pub(crate) fn open(&self, actor: ActorRef<S::Msg>, state: impl FnOnce() -> S) {
        let mut turn = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let old_mailbox = self.set_mailbox(Some(actor));
        let old = turn.replace(state());
        self.state.clear_poison();
        drop(turn);
        drop((old, old_mailbox)); // outside: what they hold may be answered by being dropped
    }

    /// Closes the turn for good; what the state holds is dropped, and messages from here on are lost.
    pub(crate) fn close(&self) {
        let old_mailbox = self.set_mailbox(None);
        let old = self.state.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(actor) = &old_mailbox {
            actor.stop(None);
        }
        drop((old, old_mailbox));
    }

    fn set_mailbox(&self, actor: Option<ActorRef<S::Msg>>) -> Option<ActorRef<S::Msg>> {
        let mut mailbox = self.mailbox.write().unwrap_or_else(PoisonError::into_inner);
        self.queued.store(0, Ordering::Release);
        std::mem::replace(&mut *mailbox, actor)
    }
}

/// The ractor actor around a turn: its mailbox and its place in the supervision tree.
pub(crate) struct TurnActor<S>(PhantomData<fn() -> S>);

impl<S> TurnActor<S> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: Step> Actor for TurnActor<S> {
    type Msg = S::Msg;
    type State = Arc<Turn<S>>;
    type Arguments = Arc<Turn<S>>;

    async fn pre_start(&self, _: ActorRef<S::Msg>, turn: Arc<Turn<S>>) -> Result<Arc<Turn<S>>, ActorProcessingErr> {
        Ok(turn)
    }

    async fn handle(
        &self,
        _: ActorRef<S::Msg>,
        msg: S::Msg,
        turn: &mut Arc<Turn<S>>,
    ) -> Result<(), ActorProcessingErr> {
        turn.handle(msg).await
    }
}
