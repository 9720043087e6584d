//! Discovery actor: follows one source.
//!
//! Owns the task that awaits the next value of the source. Only this task polls the source, and it passes a value to
//! the supervisor before it polls for the next one. A source that panics is polled again. The source survives the
//! actor: a restarted actor continues with the same source and requests its present value again.

use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorRef};
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;

use super::AnySource;
use crate::actors::delivery::ActorResult;
use crate::actors::views::status::RouterStatus;
use crate::discovery::DiscoveryError;
use crate::membership::SourceUpdate;

/// Delay after a failure of a source.
const PAUSE: Duration = Duration::from_millis(100);

/// Delay after a panic of a source.
const PANIC_PAUSE: Duration = Duration::from_secs(1);

pub(crate) enum FollowerMsg {
    /// The source has panicked.
    Panicked,
    /// Injected fault: panic.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// The source to follow and the receiver of its values.
#[derive(Clone)]
pub(crate) struct Assignment {
    pub(crate) source: Arc<Mutex<Box<dyn AnySource>>>,
    pub(crate) report: SourceReport,
    pub(crate) status: Arc<RouterStatus>,
}

/// Passes an update on, with a channel that is dropped once it has been applied; false if the receiver is gone.
pub(crate) type SourceReport = Arc<dyn Fn(SourceUpdate, Option<oneshot::Sender<()>>) -> bool + Send + Sync>;

pub(crate) struct FollowerState {
    assignment: Assignment,
    following: AbortOnDrop,
}

/// The discovery actor; see the module documentation.
pub(crate) struct Follower;

impl Actor for Follower {
    type Msg = FollowerMsg;
    type State = FollowerState;
    type Arguments = Assignment;

    async fn pre_start(&self, myself: ActorRef<FollowerMsg>, assignment: Assignment) -> ActorResult<FollowerState> {
        let following = AbortOnDrop(tokio::spawn(follow(assignment.clone(), Duration::ZERO, PanicReport(myself))));
        Ok(FollowerState { assignment, following })
    }

    async fn handle(&self, myself: ActorRef<FollowerMsg>, msg: FollowerMsg, state: &mut FollowerState) -> ActorResult {
        match msg {
            FollowerMsg::Panicked => {
                (state.assignment.report)(SourceUpdate::Failed(DiscoveryError::Panicked), None);
                let following = follow(state.assignment.clone(), PANIC_PAUSE, PanicReport(myself));
                state.following = AbortOnDrop(tokio::spawn(following));
            }
            #[cfg(feature = "faults")]
            FollowerMsg::Fault(injected) => injected.apply(),
        }
        Ok(())
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Notifies the actor when the task that owns it panics.
struct PanicReport(ActorRef<FollowerMsg>);

impl Drop for PanicReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            drop(self.0.send_message(FollowerMsg::Panicked));
        }
    }
}

/// Passes each value of the source to the supervisor, until the router is down or the source has closed.
///
/// The task may be aborted at every await. It awaits only without a value in progress: a value of the source becomes a
/// message without an await in between, and the supervisor keeps received values.
async fn follow(assignment: Assignment, pause: Duration, _report: PanicReport) {
    let Assignment { source, report, status } = assignment;
    tokio::time::sleep(pause).await;
    let mut source = source.lock().await; // a previous follower has ended or is ending
    source.rewind();
    loop {
        let next = tokio::select! {
            biased;
            _ = status.down() => return,
            next = source.next() => next,
        };
        let (update, pause) = match next {
            Some(Ok(workers)) => (SourceUpdate::Workers(workers), None),
            Some(Err(error)) => (SourceUpdate::Failed(error), Some(PAUSE)),
            None => (SourceUpdate::Closed, None),
        };
        let is_last = matches!(update, SourceUpdate::Closed);
        let (done, taken_in) = oneshot::channel();
        let is_passed = report(update, Some(done));
        if !is_passed || is_last {
            return;
        }
        drop(taken_in.await);
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
    }
}
