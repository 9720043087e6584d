//! Injected faults (feature `faults`): a panic or a hang that travels to an actor as a message, and a panic at a message
//! of a chosen kind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, ThreadId};

/// Effect of a fault message when its actor handles it.
pub(crate) enum InjectedFault {
    Panic,
    Hang(Box<InjectedHang>),
}

/// A hang until the sender of `until_dropped` is dropped.
pub(crate) struct InjectedHang {
    /// Present for an actor whose messages run on any sender's thread: the only thread that may hang. A hung thread of
    /// the runtime would block unrelated tasks.
    pub(crate) thread: Option<ThreadId>,
    pub(crate) stuck: mpsc::Sender<()>,
    /// Receives the hang if another thread has handled its message.
    pub(crate) returned: mpsc::Sender<Box<Self>>,
    pub(crate) until_dropped: mpsc::Receiver<()>,
}

impl InjectedFault {
    pub(crate) fn apply(self) {
        match self {
            Self::Panic => panic_now(),
            Self::Hang(hang) => hang.apply(),
        }
    }
}

impl InjectedHang {
    fn apply(self: Box<Self>) {
        if self.thread.is_some_and(|expected| expected != thread::current().id()) {
            let returned = self.returned.clone();
            return drop(returned.send(self));
        }
        let _ = self.stuck.send(());
        let _ = self.until_dropped.recv();
    }
}

#[cfg(feature = "zmq")]
impl InjectedFault {
    /// As [`InjectedFault::apply`], in a task. A hang blocks a thread outside the runtime.
    pub(crate) async fn apply_off_runtime(self) {
        match self {
            Self::Panic => self.apply(),
            Self::Hang(_) => drop(tokio::task::spawn_blocking(move || self.apply()).await),
        }
    }
}

/// Moment of an injected panic in the handling of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultMoment {
    /// Before the message has an effect.
    Before,
    /// After all its effects, and before its reply.
    After,
}

/// Panic at the next message of one kind.
pub(crate) struct MessageFault<M> {
    pub(crate) is_kind: fn(&M) -> bool,
    pub(crate) moment: FaultMoment,
    pub(crate) began: Arc<AtomicBool>,
}

/// The panic that an actor has at a later message.
pub(crate) struct ArmedFault<M>(Mutex<Option<MessageFault<M>>>);

/// Panic after the handling of a message, if it is due then.
#[must_use = "to be applied after the message is handled"]
pub(crate) struct PanicAfter(bool);

impl<M> Default for ArmedFault<M> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<M> ArmedFault<M> {
    /// Replaces an earlier fault.
    pub(crate) fn arm(&self, fault: MessageFault<M>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
    }

    /// Panics if the fault is due before this message.
    pub(crate) fn before(&self, msg: &M) -> PanicAfter {
        let due = self.0.lock().unwrap_or_else(PoisonError::into_inner).take_if(|armed| (armed.is_kind)(msg));
        if let Some(fault) = &due {
            fault.began.store(true, Ordering::SeqCst);
        }
        match due.map(|fault| fault.moment) {
            Some(FaultMoment::Before) => panic_now(),
            Some(FaultMoment::After) => PanicAfter(true),
            None => PanicAfter(false),
        }
    }
}

impl PanicAfter {
    pub(crate) fn apply(self) {
        if self.0 {
            panic_now();
        }
    }
}

fn panic_now() -> ! {
    std::panic::panic_any("an injected fault")
}
