//! The router's phase, and the end of waits when it goes down.

use tokio::sync::{oneshot, watch};

use crate::error::Down;

/// Polls of a reply before its caller is suspended, about 10 µs. A thread that handles the caller's message beside its own
/// replies sooner than a suspended task runs again.
const REPLY_POLLS: usize = 500;

/// Polls that take a unit of the caller's cooperative budget, of 128, so that a caller without other waits yields after three
/// replies for which it has polled.
const POLLS_CHARGED: usize = 40;

/// Phase and restart count. Written by the supervisor and by a shutdown.
#[derive(Debug, Default)]
pub(crate) struct RouterStatus(watch::Sender<RouterState>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RouterState {
    pub(crate) phase: RouterPhase,
    /// Actors restarted since the start.
    pub(crate) restarts: u64,
    /// Of these, hung actors that were replaced.
    pub(crate) replacements: u64,
    /// Running actors that were replaced for another block size.
    pub(crate) renewals: u64,
}

impl RouterState {
    /// Actors started again since the start, for any reason: requests in the earlier ones are lost.
    pub(crate) fn starts(self) -> u64 {
        self.restarts + self.renewals
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RouterPhase {
    #[default]
    Serving,
    /// Requests in flight continue; new requests are rejected.
    Draining,
    Failed,
    Stopped,
}

impl RouterPhase {
    pub(crate) fn is_down(self) -> bool {
        matches!(self, Self::Failed | Self::Stopped)
    }
}

impl RouterStatus {
    /// Whether the router accepts new work.
    pub(crate) fn up(&self) -> Result<(), Down> {
        match self.0.borrow().phase {
            RouterPhase::Serving => Ok(()),
            RouterPhase::Failed => Err(Down::Failed),
            RouterPhase::Draining | RouterPhase::Stopped => Err(Down::Stopped),
        }
    }

    /// Whether the router has failed or stopped.
    pub(crate) fn is_down(&self) -> bool {
        self.0.borrow().phase.is_down()
    }

    /// Returns when the router has failed or stopped, and which.
    pub(crate) async fn down(&self) -> Down {
        let mut states = self.0.subscribe();
        match states.wait_for(|state| state.phase.is_down()).await.map(|state| state.phase) {
            Ok(RouterPhase::Stopped) => Down::Stopped,
            Ok(RouterPhase::Failed | RouterPhase::Serving | RouterPhase::Draining) | Err(_) => Down::Failed,
        }
    }

    /// An actor's reply; `None` if it was lost with the actor, the router is down, or a hung actor was replaced `since`
    /// the query was sent: the reply may be lost in the hung step. A reply within [`REPLY_POLLS`] costs no suspension.
    pub(crate) async fn reply_of<T>(&self, mut reply: oneshot::Receiver<T>, since: RouterState) -> Option<T> {
        for poll in 0..REPLY_POLLS {
            if poll < POLLS_CHARGED {
                tokio::task::consume_budget().await;
            }
            match reply.try_recv() {
                Err(oneshot::error::TryRecvError::Empty) => std::hint::spin_loop(),
                known => return known.ok(),
            }
        }
        tokio::select! {
            biased;
            reply = reply => reply.ok(),
            () = self.replaced(since) => None,
        }
    }

    /// Returns when the router is down or a hung actor was replaced after `since`.
    pub(crate) async fn replaced(&self, since: RouterState) {
        let mut states = self.0.subscribe();
        let is_over = |state: &RouterState| state.phase.is_down() || state.replacements > since.replacements;
        let _ = states.wait_for(is_over).await; // an error means that the router is gone
    }

    /// The present state, to read before a query is sent.
    pub(crate) fn state(&self) -> RouterState {
        *self.0.borrow()
    }

    /// Actors restarted since the start.
    pub(crate) fn restarts(&self) -> u64 {
        self.0.borrow().restarts
    }

    /// Counts an event. A replacement ends the waits for replies of a hung actor.
    pub(crate) fn count(&self, counter: impl FnOnce(&mut RouterState) -> &mut u64) {
        self.0.send_modify(|state| *counter(state) += 1);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<RouterState> {
        self.0.subscribe()
    }

    /// Enters a later phase; a router that has failed or stopped keeps its phase.
    pub(crate) fn enter(&self, phase: RouterPhase) {
        self.0.send_if_modified(|state| {
            let is_open = !state.phase.is_down();
            if is_open {
                state.phase = phase;
            }
            is_open
        });
    }
}
