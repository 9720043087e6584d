//! Supervisor actor: starts and restarts the other actors, and performs the effects of the membership machine.
//!
//! [`SupervisorShell`] makes the decisions. This actor performs their effects in order, and publishes the read views of
//! workers, sources and cold ranks. If it ends without a stop, the router has failed. No request passes through it.

mod children;
mod cpu_share;
pub(crate) mod dependencies;
mod effects;
mod hangs;
mod messages;
#[cfg(feature = "zmq")]
mod readers;
mod report;
mod sources;
mod state;
mod watchdog;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ahash::AHashMap;
use ractor::{Actor, ActorRef, SupervisionEvent};

use crate::actors::delivery::ActorResult;
use crate::actors::views::status::RouterPhase;
use crate::membership::MembershipRules;
use crate::shell::supervisor::SupervisorShell;
use dependencies::SupervisorDependencies;
pub(crate) use messages::{MembershipReply, SupervisorMsg};
#[cfg(feature = "zmq")]
use state::Readers;
use state::{FailGuard, SupervisorState};

pub(crate) struct Supervisor;

impl Actor for Supervisor {
    type Msg = SupervisorMsg;
    type State = SupervisorState;
    type Arguments = SupervisorDependencies;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMsg>,
        dependencies: SupervisorDependencies,
    ) -> ActorResult<SupervisorState> {
        let mut state = SupervisorState {
            shell: SupervisorShell::new(
                MembershipRules::of(&dependencies.config, cfg!(feature = "zmq")),
                Arc::clone(&dependencies.directory),
                dependencies.strands.shards.len(),
            ),
            _guard: FailGuard(dependencies.views.clone(), dependencies.strands.clone()),
            dependencies,
            myself,
            children: AHashMap::new(),
            sources: Vec::new(),
            #[cfg(feature = "faults")]
            misses_next_update: false,
            #[cfg(feature = "zmq")]
            readers: Readers::new(),
            pings_handled: Arc::default(),
            watchdog: None,
        };
        state.start_scheduler().await?;
        for shard in 0..state.dependencies.strands.shards.len() {
            state.start_radix(shard, &[]).await?;
        }
        state.start_health().await?;
        state.start_engine_loads().await?;
        state.start_watchdog();
        Ok(state)
    }

    async fn handle(&self, _: ActorRef<SupervisorMsg>, msg: SupervisorMsg, state: &mut SupervisorState) -> ActorResult {
        state.on_message(msg).await
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<SupervisorMsg>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> ActorResult {
        match event {
            SupervisionEvent::ActorFailed(cell, error) => state.on_death(cell.get_id(), error.to_string()).await,
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                state.on_death(cell.get_id(), reason.unwrap_or_else(|| "stopped".to_owned())).await
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => Ok(()),
        }
    }

    async fn post_stop(&self, _: ActorRef<SupervisorMsg>, state: &mut SupervisorState) -> ActorResult {
        state.dependencies.views.status.enter(RouterPhase::Stopped);
        state.dependencies.close();
        Ok(())
    }
}

impl SupervisorState {
    async fn on_message(&mut self, msg: SupervisorMsg) -> ActorResult {
        match msg {
            SupervisorMsg::Membership(input) => self.apply_membership(input).await?,
            SupervisorMsg::Follow { name, source } => self.on_follow(name, source).await?,
            SupervisorMsg::Reconcile { source, update, done } => {
                self.on_source_update(source, update).await?;
                drop(done);
            }
            SupervisorMsg::Shell(input) => self.apply(input).await?,
            SupervisorMsg::Ping(number) => self.pings_handled.store(number, Ordering::Relaxed),
            SupervisorMsg::Hung { child, progress } => self.on_hung(child, progress).await?,
            #[cfg(feature = "zmq")]
            SupervisorMsg::Snapshot { slot, reply } => self.request_snapshot(slot, reply),
            #[cfg(feature = "zmq")]
            SupervisorMsg::Restore => self.restore_readers(),
            #[cfg(feature = "faults")]
            SupervisorMsg::Fault(injected) => injected.apply(),
            #[cfg(all(feature = "faults", feature = "zmq"))]
            SupervisorMsg::IngestFault(rank, fault) => self.on_ingest_fault(rank, fault),
            #[cfg(feature = "faults")]
            SupervisorMsg::FaultOf(source, fault) => self.on_fault_of(source, fault),
            #[cfg(feature = "faults")]
            SupervisorMsg::MissNext => self.misses_next_update = true,
        }
        Ok(())
    }
}
