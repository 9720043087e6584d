//! The discovery actor: follows one source.
//!
//! Owns the task that waits for the source's next value. Promises that nobody asks the source beside it, that a value
//! is with the supervisor before the next is asked for, and that a source that panics is asked again. The source
//! outlives it: a restarted actor finds it where it was, and has it say its present value again.

use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;

use super::AnySource;
use crate::actors::views::status::RouterStatus;
use crate::discovery::DiscoveryError;
use crate::membership::SourceUpdate;

/// How long a source that has just failed is left alone.
const PAUSE: Duration = Duration::from_millis(100);

/// How long one that has panicked is.
const PANIC_PAUSE: Duration = Duration::from_secs(1);

pub(crate) enum FollowerMsg {
    /// The source has panicked.
    Panicked,
    /// A drill: panic.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// Whom to follow, for whom.
#[derive(Clone)]
pub(crate) struct Assignment {
    pub(crate) source: Arc<Mutex<Box<dyn AnySource>>>,
    pub(crate) report: SourceReport,
    pub(crate) status: Arc<RouterStatus>,
}

/// Passes an update on, with a channel that is dropped once it has been applied; false if the receiver is gone.
pub(crate) type SourceReport = Arc<dyn Fn(SourceUpdate, Option<oneshot::Sender<()>>) -> bool + Send + Sync>;

pub(crate) struct State {
    assignment: Assignment,
    following: AbortOnDrop,
}

/// The actor. See the module's head.
pub(crate) struct Follower;

impl Actor for Follower {
    type Msg = FollowerMsg;
    type State = State;
    type Arguments = Assignment;

    async fn pre_start(
        &self,
        myself: ActorRef<FollowerMsg>,
        assignment: Assignment,
    ) -> Result<State, ActorProcessingErr> {
        let following = AbortOnDrop(tokio::spawn(follow(assignment.clone(), Duration::ZERO, PanicReport(myself))));
        Ok(State { assignment, following })
    }

    async fn handle(
        &self,
        myself: ActorRef<FollowerMsg>,
        msg: FollowerMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
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

/// Tells the actor when the task that holds it panics.
struct PanicReport(ActorRef<FollowerMsg>);

impl Drop for PanicReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            drop(self.0.send_message(FollowerMsg::Panicked));
        }
    }
}

/// Passes each value of the source on to the supervisor, until the router is down or the source has closed.
///
/// It may be aborted wherever it awaits. There it holds no value: between the source's answer and the message nothing
/// is awaited, and what the supervisor has it keeps.
async fn follow(assignment: Assignment, pause: Duration, _report: PanicReport) {
    let Assignment { source, report, status } = assignment;
    tokio::time::sleep(pause).await;
    let mut source = source.lock().await; // whoever followed it before has gone, or is going
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
