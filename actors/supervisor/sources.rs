//! Actors that follow discovery sources.

use std::sync::Arc;
use std::time::Duration;

use metrics::Counter;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::Mutex;

use super::{State, SupervisorMsg};
use crate::actors::discovery::{AnySource, Assignment, Follower, FollowerMsg};
use crate::membership::{Child, MembershipInput, SourceUpdate};

/// Discovery source and the actor that follows it.
pub(super) struct FollowedSource {
    source: Arc<Mutex<Box<dyn AnySource>>>,
    errors: Counter,
    /// Receiver of injected faults.
    #[cfg_attr(not(feature = "faults"), allow(dead_code, reason = "receives injected faults only"))]
    actor: ActorRef<FollowerMsg>,
}

impl State {
    /// Follows a source; earlier sources have precedence.
    pub(super) async fn on_follow(
        &mut self,
        name: String,
        source: Box<dyn AnySource>,
    ) -> Result<(), ActorProcessingErr> {
        let number = self.sources.len();
        if number == 0 {
            self.reconcile_periodically();
        }
        let errors = self.shared.meters.pool.counter("pointsman_discovery_errors_total", &[("source", &name)]);
        self.apply(MembershipInput::SourceAdded { name }).await?;
        let source = Arc::new(Mutex::new(source));
        let actor = self.start_follower(number, &source).await?;
        self.sources.push(FollowedSource { source, errors, actor });
        Ok(())
    }

    pub(super) async fn restart_follower(&mut self, number: usize) -> Result<(), ActorProcessingErr> {
        let Some(followed) = self.sources.get(number) else { return Ok(()) };
        let source = Arc::clone(&followed.source);
        self.sources[number].actor = self.start_follower(number, &source).await?;
        Ok(())
    }

    async fn start_follower(
        &mut self,
        number: usize,
        source: &Arc<Mutex<Box<dyn AnySource>>>,
    ) -> Result<ActorRef<FollowerMsg>, ActorProcessingErr> {
        let (supervisor, shared) = (self.myself.clone(), Arc::clone(&self.shared));
        let assignment = Assignment { source: Arc::clone(source), number, supervisor, shared };
        let (actor, _) = Actor::spawn_linked(None, Follower, assignment, self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), Child::Source(number));
        Ok(actor)
    }

    /// Applies lost or rejected values at the latest after `discovery_interval_ms`.
    fn reconcile_periodically(&self) {
        let (myself, shared) = (self.myself.clone(), Arc::clone(&self.shared));
        let interval = Duration::from_millis(self.shared.config.discovery_interval_ms);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    _ = shared.down() => break,
                    () = tokio::time::sleep(interval) => {
                        drop(myself.send_message(SupervisorMsg::Membership(MembershipInput::Reconcile)));
                    }
                }
            }
        });
    }

    pub(super) async fn on_source_update(
        &mut self,
        source: usize,
        update: SourceUpdate,
    ) -> Result<(), ActorProcessingErr> {
        if let (SourceUpdate::Failed(_), Some(followed)) = (&update, self.sources.get(source)) {
            followed.errors.increment(1);
        }
        self.apply(MembershipInput::SourceUpdated { source, update }).await?;
        #[cfg(feature = "faults")]
        if std::mem::take(&mut self.misses_next_update) {
            return Ok(());
        }
        self.apply(MembershipInput::Reconcile).await
    }

    #[cfg(feature = "faults")]
    pub(super) fn on_fault_of(&self, source: usize, injected: crate::actors::delivery::fault::InjectedFault) {
        if let Some(followed) = self.sources.get(source) {
            drop(followed.actor.send_message(FollowerMsg::Fault(injected)));
        }
    }
}
