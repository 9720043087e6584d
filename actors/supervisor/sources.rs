//! Actors that follow discovery sources.

use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorRef};
use tokio::sync::Mutex;

use super::messages::SupervisorMsg;
use super::state::{FollowedSource, SupervisorState};
use crate::actors::delivery::ActorResult;
use crate::actors::discovery::{AnySource, Assignment, Follower, FollowerMsg, SourceReport};
use crate::membership::{Child, MembershipInput, SourceUpdate};

impl SupervisorState {
    /// Follows a source; earlier sources have precedence.
    pub(super) async fn on_follow(&mut self, name: String, source: Box<dyn AnySource>) -> ActorResult {
        let number = self.sources.len();
        if number == 0 {
            self.reconcile_periodically();
        }
        let errors = self.dependencies.meters.pool.counter("pointsman_discovery_errors_total", &[("source", &name)]);
        self.apply_membership(MembershipInput::SourceAdded(name)).await?;
        let source = Arc::new(Mutex::new(source));
        let actor = self.start_follower(number, &source).await?;
        self.sources.push(FollowedSource { source, errors, actor });
        Ok(())
    }

    pub(super) async fn restart_follower(&mut self, number: usize) -> ActorResult {
        let Some(followed) = self.sources.get(number) else { return Ok(()) };
        let source = Arc::clone(&followed.source);
        self.sources[number].actor = self.start_follower(number, &source).await?;
        Ok(())
    }

    async fn start_follower(
        &mut self,
        number: usize,
        source: &Arc<Mutex<Box<dyn AnySource>>>,
    ) -> ActorResult<ActorRef<FollowerMsg>> {
        let (myself, status) = (self.myself.clone(), Arc::clone(&self.dependencies.views.status));
        let report: SourceReport = Arc::new(move |update, done| {
            myself.send_message(SupervisorMsg::Reconcile { source: number, update, done }).is_ok()
        });
        let assignment = Assignment { source: Arc::clone(source), report, status };
        let (actor, _) = Actor::spawn_linked(None, Follower, assignment, self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), Child::Source(number));
        Ok(actor)
    }

    /// Applies lost or rejected values at the latest after `discovery.interval_ms`.
    fn reconcile_periodically(&self) {
        let (myself, status) = (self.myself.clone(), Arc::clone(&self.dependencies.views.status));
        let interval = Duration::from_millis(self.dependencies.config.discovery.interval_ms);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    _ = status.down() => break,
                    () = tokio::time::sleep(interval) => {
                        drop(myself.send_message(SupervisorMsg::Membership(MembershipInput::Reconcile)));
                    }
                }
            }
        });
    }

    pub(super) async fn on_source_update(&mut self, source: usize, update: SourceUpdate) -> ActorResult {
        if let (SourceUpdate::Failed(_), Some(followed)) = (&update, self.sources.get(source)) {
            followed.errors.increment(1);
        }
        self.apply_membership(MembershipInput::SourceUpdated { source, update }).await?;
        #[cfg(feature = "faults")]
        if std::mem::take(&mut self.misses_next_update) {
            return Ok(());
        }
        self.apply_membership(MembershipInput::Reconcile).await
    }

    #[cfg(feature = "faults")]
    pub(super) fn on_fault_of(&self, source: usize, fault: FollowerMsg) {
        if let Some(followed) = self.sources.get(source) {
            drop(followed.actor.send_message(fault));
        }
    }
}
