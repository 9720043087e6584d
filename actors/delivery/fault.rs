//! Injected faults: a panic or a hang that travels to an actor as a message (feature `faults`).

use std::sync::mpsc;

/// Effect of a fault message when its actor handles it.
pub(crate) enum InjectedFault {
    Panic,
    Hang { stuck: mpsc::Sender<()>, until_dropped: mpsc::Receiver<()> },
}

impl InjectedFault {
    pub(crate) fn apply(self) {
        match self {
            Self::Panic => std::panic::panic_any("an injected fault"),
            Self::Hang { stuck, until_dropped } => {
                let _ = stuck.send(());
                let _ = until_dropped.recv();
            }
        }
    }
}

#[cfg(feature = "zmq")]
impl InjectedFault {
    /// As [`InjectedFault::happen`], in a task. A hang blocks a thread outside the runtime.
    pub(crate) async fn apply_off_runtime(self) {
        match self {
            Self::Panic => self.apply(),
            Self::Hang { .. } => drop(tokio::task::spawn_blocking(move || self.apply()).await),
        }
    }
}
