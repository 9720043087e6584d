//! Start and restart of the supervised actors.

use std::collections::BTreeMap;
use std::sync::Arc;

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef};
use tokio::runtime::Handle;

use super::State;
use crate::actors::delivery::strand::{Step, Strand, StrandActor, Wake};
use crate::actors::engine_load::EngineLoads;
use crate::actors::health::{Health, HealthMsg};
use crate::actors::radix::speculation::SpeculationSender;
use crate::actors::radix::{Radix, RegisteredRank};
use crate::actors::scheduler::{Scheduler, SchedulerDependencies, SchedulerMsg, SequenceHandle};
use crate::actors::sequence::{Sequence, SequenceDependencies, Wakes};
use crate::actors::shared::{RankEntry, Status};
use crate::actors::telemetry::Restarts;
use crate::membership::{Child, MembershipInput};
use crate::protocol::WorkerRank;
use crate::schedule::Admission;
use crate::select::RankTraits;

impl State {
    pub(super) async fn start_sequence(&mut self, entry: &Arc<RankEntry>) -> Result<ActorId, ActorProcessingErr> {
        let child = Child::Sequence(entry.slot);
        let actor = self.spawn(&entry.strand, child).await?;
        let (id, place) = (actor.get_id(), (entry.slot, entry.generation));
        let shared = &self.shared;
        let wakes = || Wakes { flag: Arc::clone(&shared.wake), scheduler: Arc::clone(&shared.scheduler) };
        let dependencies = SequenceDependencies {
            board: Arc::clone(&entry.board),
            learns: shared.config.learns_speed().then(|| Arc::clone(&entry.speed)),
            block_size: shared.config.block_size,
            wakes: shared.config.queueing().then(wakes),
            directory: Arc::clone(&shared.directory),
            clock: shared.clock,
        };
        entry.strand.open(actor, || Sequence::restore(place, self.membership.incarnation(child), dependencies));
        Ok(id)
    }

    /// Starts an index shard with its ranks and no blocks. `cold`: ranks whose blocks must be sent again.
    pub(super) async fn start_radix(&mut self, shard: usize, cold: &[WorkerRank]) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.shards[shard].strand);
        let actor = self.spawn(&strand, Child::IndexShard(shard)).await?;
        let ranks = self.ranks_of_shard(shard).map(|(entry, worker)| RegisteredRank::of(entry, &worker.traits));
        let place = (shard, self.membership.incarnation(Child::IndexShard(shard)));
        let cold = cold.iter().copied().collect();
        strand.open(actor, || Radix::new(&self.shared, place, ranks, cold, self.myself.clone()));
        Ok(())
    }

    pub(super) async fn start_scheduler(&mut self) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.scheduler);
        let actor = self.spawn(&strand, Child::Scheduler).await?;
        let shared = &self.shared;
        let dependencies = SchedulerDependencies {
            shards: shared.shards.iter().map(|shard| Arc::clone(&shard.strand)).collect(),
            speculation: SpeculationSender::of(shared),
            wake: Arc::clone(&shared.wake),
            conditions: Arc::clone(&shared.conditions),
            exclusions: Arc::clone(&shared.exclusions),
            clock: shared.clock,
            runtime: Handle::current(),
        };
        strand.open(actor, || {
            let (config, extensions) = (shared.config.clone(), shared.extensions.clone());
            let incarnation = self.membership.incarnation(Child::Scheduler);
            let mut scheduler = Scheduler::new(config, incarnation, extensions, dependencies, &strand);
            for (entry, worker) in self.running_ranks() {
                scheduler.admit(sequence_handle(entry, &worker.traits, worker.draining || worker.cordoned));
            }
            scheduler.load_conditions();
            scheduler.load_exclusions();
            scheduler
        });
        Ok(())
    }

    /// Starts the health actor without records: all ranks are in service again and start slowly.
    pub(super) async fn start_health(&mut self) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.health);
        let actor = self.spawn(&strand, Child::Health).await?;
        strand.open(actor, || Health::new(&self.shared, Handle::current()));
        strand.tell(HealthMsg::MembersChanged);
        Ok(())
    }

    pub(super) async fn start_engine_loads(&mut self) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.engine_loads);
        let actor = self.spawn(&strand, Child::EngineLoads).await?;
        strand.open(actor, || EngineLoads::new(&self.shared));
        Ok(())
    }

    async fn spawn<S: Step>(
        &mut self,
        strand: &Arc<Strand<S>>,
        child: Child,
    ) -> Result<ActorRef<Wake<S>>, ActorProcessingErr> {
        let (actor, _) =
            Actor::spawn_linked(None, StrandActor::new(), Arc::clone(strand), self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), child);
        Ok(actor)
    }

    /// Reports a death to the machine, unless the actor was stopped on purpose.
    pub(super) async fn on_death(&mut self, actor: ActorId, reason: String) -> Result<(), ActorProcessingErr> {
        let Some(child) = self.children.remove(&actor) else { return Ok(()) };
        restart_counter(child, &self.shared.meters.restarts).increment(1);
        let shard_ranks = match child {
            Child::IndexShard(shard) => {
                let ranks = self.ranks_of_shard(shard);
                ranks.map(|(entry, _)| (entry.rank, entry.holdings.changed_at().is_some())).collect()
            }
            Child::Scheduler
            | Child::Sequence(_)
            | Child::Reader(_)
            | Child::Health
            | Child::EngineLoads
            | Child::Source(_) => BTreeMap::new(),
        };
        self.apply(MembershipInput::ChildDied { child, reason, shard_ranks }).await
    }

    pub(super) async fn restart(
        &mut self,
        child: Child,
        reason: &str,
        lost: &[WorkerRank],
    ) -> Result<(), ActorProcessingErr> {
        tracing::warn!(role = child.name(), reason, "an actor died and is restarted");
        match child {
            Child::Scheduler => self.start_scheduler().await?,
            Child::IndexShard(shard) => {
                self.start_radix(shard, lost).await?;
                #[cfg(feature = "zmq")]
                self.request_replay(shard);
            }
            Child::Sequence(slot) => {
                let Some(entry) = self.ranks.get(&slot).map(|rank| Arc::clone(&rank.entry)) else { return Ok(()) };
                let actor = self.start_sequence(&entry).await?;
                if let Some(rank) = self.ranks.get_mut(&slot) {
                    rank.actor = actor;
                }
                if self.shared.config.queueing() {
                    // Bookings may have ended without a report of falling load.
                    self.shared.scheduler.tell(SchedulerMsg::Wake { at: None });
                }
            }
            Child::Reader(_) => {} // restarted by `MembershipEffect::StartReader`
            Child::Health => self.start_health().await?,
            Child::EngineLoads => self.start_engine_loads().await?,
            Child::Source(source) => self.restart_follower(source).await?,
        }
        self.shared.status.send_modify(|Status { restarts, .. }| *restarts += 1);
        Ok(())
    }
}

fn restart_counter(child: Child, restarts: &Restarts) -> &metrics::Counter {
    match child {
        Child::Scheduler => &restarts.scheduler,
        Child::IndexShard(_) => &restarts.radix,
        Child::Sequence(_) => &restarts.sequence,
        Child::Reader(_) => &restarts.ingest,
        Child::Health => &restarts.health,
        Child::EngineLoads => &restarts.engine_loads,
        Child::Source(_) => &restarts.discovery,
    }
}

/// Rank as the scheduler admits it.
pub(super) fn sequence_handle(entry: &RankEntry, traits: &Arc<RankTraits>, draining: bool) -> SequenceHandle {
    let admission = Admission {
        rank: entry.rank,
        slot: entry.slot,
        generation: entry.generation,
        board: Arc::clone(&entry.board),
        speed: Arc::clone(&entry.speed),
        holdings: Arc::clone(&entry.holdings),
        engine_load: Arc::clone(&entry.engine_load),
        traits: Arc::clone(traits),
        since: entry.since,
        draining,
    };
    SequenceHandle { admission, strand: Arc::clone(&entry.strand) }
}
