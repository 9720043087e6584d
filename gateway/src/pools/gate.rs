//! Gate of a model's requests, closed while its engines pause, sleep or take new weights.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::timeout;

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

/// The gate: open without reasons against it.
#[derive(Default)]
pub(crate) struct Gate(watch::Sender<BTreeMap<&'static str, OnPause>>);

impl Gate {
    /// Closes the gate for a reason.
    pub(crate) fn close(&self, reason: &'static str, requests: OnPause) {
        self.0.send_modify(|reasons| _ = reasons.insert(reason, requests));
    }

    /// Removes a reason.
    pub(crate) fn open(&self, reason: &str) {
        self.0.send_modify(|reasons| _ = reasons.remove(reason));
    }

    /// Waits until the gate is open, at most `within`, and not at all if a reason refuses requests. Returns whether it is
    /// open.
    pub(crate) async fn is_open(&self, within: Duration) -> bool {
        if self.0.borrow().is_empty() {
            return true;
        }
        let mut reasons = self.0.subscribe();
        let refuses = |reasons: &BTreeMap<_, _>| reasons.values().any(|requests| *requests == OnPause::Refuse);
        let is_decided = |reasons: &BTreeMap<_, _>| reasons.is_empty() || refuses(reasons);
        let decided = timeout(within, reasons.wait_for(|reasons| is_decided(reasons))).await;
        decided.is_ok_and(|reasons| reasons.is_ok_and(|reasons| reasons.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_wait_until_every_reason_is_gone() {
        let gate = std::sync::Arc::new(Gate::default());
        let within = Duration::from_secs(5);
        assert!(gate.is_open(within).await);
        gate.close("pause", OnPause::Hold);
        gate.close("sleep", OnPause::Hold);
        assert!(!gate.is_open(within).await, "after the time");
        let waiting = tokio::spawn({
            let gate = std::sync::Arc::clone(&gate);
            async move { gate.is_open(within).await }
        });
        yield_now().await;
        gate.open("pause");
        yield_now().await;
        assert!(!waiting.is_finished());
        gate.open("sleep");
        assert!(waiting.await.expect("no panic"));
        gate.close("pause", OnPause::Refuse);
        let now = tokio::time::Instant::now();
        assert!(!gate.is_open(within).await && now.elapsed().is_zero(), "refused at once");
    }
}
