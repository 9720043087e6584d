//! Injected faults (feature `faults`): a panic or a hang that travels to an actor as a message.

use std::sync::mpsc;
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

fn panic_now() -> ! {
    std::panic::panic_any("an injected fault")
}
