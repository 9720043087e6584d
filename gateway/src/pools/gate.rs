//! Gate of a model's requests, closed while its engines pause, sleep or take new weights.
//!
//! The state of each reason is the rank of a session that no client can name, so replicas share it as they share sessions,
//! and a restarted one receives it.

use std::time::Duration;

use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{Router, SessionId};
use serde::Deserialize;
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

use crate::formats::openai::RESERVED;

/// Handling of requests at a closed gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnPause {
    /// They wait.
    #[default]
    Hold,
    /// They are refused at once.
    Refuse,
}

/// Reason of a closed gate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Sleep,
    Pause,
    Weights,
}

/// Two bits for each reason, 0 if it is absent, else the handling of requests plus 1.
type State = u32;

/// The bits of [`OnPause::Refuse`] of all reasons.
const REFUSE: State = 0b10_10_10;

/// The gate: open without reasons against it.
pub(crate) struct Gate {
    router: Router,
    state: watch::Sender<State>,
    /// Held by a change or a read of the shared state.
    change: Mutex<()>,
}

impl Gate {
    pub(crate) fn new(router: Router) -> Self {
        Self { router, state: watch::Sender::new(0), change: Mutex::new(()) }
    }

    /// Closes the gate for a reason, or removes the reason.
    pub(crate) async fn set(&self, reason: Reason, requests: Option<OnPause>) {
        let _change = self.change.lock().await;
        self.share(reason, requests.map_or(0, |requests| requests as State + 1));
        self.read().await;
    }

    /// Applies changes by other replicas.
    pub(super) async fn follow(&self) {
        let _change = self.change.lock().await;
        self.read().await;
    }

    /// Reads the shared state. Own reasons that the router has lost are shared again.
    async fn read(&self) {
        let (own, mut state) = (*self.state.borrow(), 0);
        for reason in [Reason::Sleep, Reason::Pause, Reason::Weights] {
            let at = 2 * reason as u32;
            let own = own >> at & 0b11;
            let shared = self.router.session_rank(&session(reason)).await;
            if shared.is_none() && own != 0 {
                self.share(reason, own);
            }
            state |= shared.map_or(own, |rank| rank.rank & 0b11) << at;
        }
        self.state.send_if_modified(|known| std::mem::replace(known, state) != state);
    }

    fn share(&self, reason: Reason, state: State) {
        // No worker has this id, so no removal ends the session.
        self.router.bind_session(&session(reason), WorkerRank::new(WorkerId(u64::MAX), state));
    }

    /// Waits until the gate is open, at most `within`, and not at all if a reason refuses requests. Returns whether it is
    /// open.
    pub(crate) async fn is_open(&self, within: Duration) -> bool {
        if *self.state.borrow() == 0 {
            return true;
        }
        let mut state = self.state.subscribe();
        let decided = timeout(within, state.wait_for(|state| *state == 0 || state & REFUSE != 0)).await;
        decided.is_ok_and(|state| state.is_ok_and(|state| *state == 0))
    }
}

/// The session of a reason.
fn session(reason: Reason) -> SessionId {
    SessionId::new(&format!("{RESERVED}gate {}", reason as u32)).expect("short")
}

#[cfg(test)]
mod tests {
    use pointsman::RouterConfig;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_gate_is_closed_until_every_reason_is_gone() {
        let router = Router::builder(RouterConfig::default()).start().await.expect("valid");
        let gate = Gate::new(router.clone());
        let within = Duration::from_secs(5);
        assert!(gate.is_open(within).await);
        gate.set(Reason::Pause, Some(OnPause::Hold)).await;
        gate.set(Reason::Sleep, Some(OnPause::Hold)).await;
        gate.set(Reason::Pause, None).await;
        assert!(!gate.is_open(within).await, "after the time");
        gate.set(Reason::Sleep, None).await;
        assert!(gate.is_open(within).await);
        gate.set(Reason::Weights, Some(OnPause::Refuse)).await;
        let now = tokio::time::Instant::now();
        assert!(!gate.is_open(within).await && now.elapsed().is_zero(), "refused at once");
        // Another gate of the same state.
        let other = Gate::new(router);
        other.follow().await;
        assert!(!other.is_open(within).await);
        other.set(Reason::Weights, None).await;
        gate.follow().await;
        assert!(gate.is_open(within).await);
    }
}
