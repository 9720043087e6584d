//! Start and restart of the supervised actors.

use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorId, ActorRef};
use tokio::runtime::Handle;

use super::dependencies::SupervisorDependencies;
use super::messages::SupervisorMsg;
use super::state::SupervisorState;
use super::watchdog::Watchdog;
use crate::actors::delivery::ActorResult;
use crate::actors::delivery::strand::{ActorState, Strand};
use crate::actors::delivery::strand_actor::{StrandActor, Wake};
use crate::actors::engine_load::EngineLoads;
use crate::actors::health::{HealthActor, HealthDependencies, HealthMsg};
use crate::actors::radix::claim::SpeculationSender;
use crate::actors::radix::{Radix, ShardMeters, registered};
use crate::actors::scheduler::{Scheduler, SchedulerDependencies, SchedulerMsg};
use crate::actors::sequence::{Sequence, Wakes};
use crate::actors::views::rank::RankEntry;
use crate::load::SpeedCell;
use crate::membership::Child;
use crate::protocol::WorkerRank;
use crate::schedule::Admission;
use crate::select::RankTraits;
use crate::shell::scheduler::SequenceHandle;
use crate::shell::sequence::{SequenceCells, SequenceShell};
use crate::shell::shard::{ShardCells, ShardShell};
use crate::shell::supervisor::SupervisorInput;

impl SupervisorState {
    pub(super) async fn start_sequence(
        &mut self,
        entry: &RankEntry,
        strand: &Arc<Strand<Sequence>>,
    ) -> ActorResult<ActorId> {
        let child = Child::Sequence(entry.slot);
        let actor = self.spawn(strand, child).await?;
        let (id, place) = (actor.get_id(), (entry.slot, entry.generation));
        let SupervisorDependencies { config, clock, directory, views, strands, .. } = &self.dependencies;
        let wakes = || Wakes { flag: Arc::clone(&views.wake), scheduler: strands.scheduler.clone() };
        let cells = SequenceCells {
            board: Arc::clone(&entry.cells.board),
            learns: config.learns_speed().then(|| Arc::clone(&entry.cells.speed)),
            stalls: (config.health.stall_ms > 0)
                .then(|| (Arc::clone(&entry.stalls), Duration::from_millis(config.health.stall_ms))),
            peers: Arc::clone(&entry.cells.peers),
            scheduler: Arc::clone(&strands.scheduler_incarnation),
            directory: Arc::clone(directory),
        };
        strand.open(actor, || {
            let (incarnation, is_queueing) = (self.shell.membership().incarnation(child), config.queue.is_enabled());
            let settings = (config.block_size_or_assumed(), is_queueing);
            let shell = SequenceShell::restore(place, incarnation, cells, settings, clock.now());
            let (booked, wakes) = (Arc::clone(&views.ranks.booked), is_queueing.then(wakes));
            Sequence { shell, clock: *clock, booked, wakes }
        });
        Ok(id)
    }

    /// Starts an index shard with its ranks and no blocks. `cold`: ranks whose blocks must be sent again.
    pub(super) async fn start_radix(&mut self, shard: usize, cold: &[WorkerRank]) -> ActorResult {
        let strand = Arc::clone(self.dependencies.strands.shards.strand(shard));
        let actor = self.spawn(&strand, Child::IndexShard(shard)).await?;
        let ranks = self.shell.of_shard(shard).map(|(rank, worker)| registered(&rank.entry, &worker.traits));
        let (myself, incarnation) =
            (self.myself.clone(), self.shell.membership().incarnation(Child::IndexShard(shard)));
        let current = self.dependencies.strands.shards.incarnation(shard);
        current.set(incarnation);
        let SupervisorDependencies { config, clock, views, meters, .. } = &self.dependencies;
        let degraded = Arc::clone(&views.ranks.degraded);
        let cells = ShardCells { degraded, incarnation: (Arc::clone(current), incarnation) };
        let cold = cold.iter().copied().collect();
        strand.open(actor, || {
            let shell = ShardShell::new(config, cells, ranks, cold, clock);
            let meters = ShardMeters::new(&meters.pool, config, &shell, shard);
            let on_resync = Box::new(move |rank| {
                drop(myself.send_message(SupervisorMsg::Shell(SupervisorInput::Warmed { rank, incarnation })))
            });
            Radix { shell, clock: *clock, on_resync, meters, effects: Vec::new() }
        });
        Ok(())
    }

    pub(super) async fn start_scheduler(&mut self) -> ActorResult {
        let strand = Arc::clone(&self.dependencies.strands.scheduler);
        let actor = self.spawn(&strand, Child::Scheduler).await?;
        let SupervisorDependencies { config, clock, views, strands, extensions, .. } = &self.dependencies;
        let incarnation = self.shell.membership().incarnation(Child::Scheduler);
        strands.scheduler_incarnation.set(incarnation);
        let dependencies = SchedulerDependencies {
            shards: Arc::clone(&strands.shards),
            speculation: SpeculationSender::new(config, &strands.shards),
            wake: Arc::clone(&views.wake),
            incarnation: (Arc::clone(&strands.scheduler_incarnation), incarnation),
            conditions: Arc::clone(&views.conditions),
            exclusions: Arc::clone(&views.exclusions),
            board_changes: Arc::clone(&views.ranks.board_changes),
            arrivals: Arc::clone(&views.ranks.arrivals),
            queue_heads: Arc::clone(&views.ranks.queue_heads),
            decisions: Arc::clone(&views.decisions),
            shadows: Arc::clone(&views.shadows),
            clock: *clock,
            runtime: Handle::current(),
        };
        strand.open(actor, || {
            let ranks = self.shell.running().map(|(rank, worker)| {
                sequence_handle(&rank.entry, &rank.strand, &worker.traits, worker.draining || worker.cordoned)
            });
            Scheduler::new(config, extensions.clone(), dependencies, ranks, &strand)
        });
        Ok(())
    }

    /// Starts the health actor without records: all ranks return to service with a slow start.
    pub(super) async fn start_health(&mut self) -> ActorResult {
        let strand = Arc::clone(&self.dependencies.strands.health);
        let actor = self.spawn(&strand, Child::Health).await?;
        let SupervisorDependencies { config, clock, views, strands, meters, .. } = &self.dependencies;
        let dependencies = HealthDependencies {
            clock: *clock,
            fleet: Arc::clone(&views.fleet),
            ranks: Arc::clone(&views.ranks),
            conditions: Arc::clone(&views.conditions),
            exclusions: Arc::clone(&views.exclusions),
            scheduler: Arc::clone(&strands.scheduler),
            runtime: Handle::current(),
        };
        strand.open(actor, || HealthActor::new(config, &meters.pool, dependencies, &strand));
        strand.tell(HealthMsg::MembersChanged);
        Ok(())
    }

    pub(super) async fn start_engine_loads(&mut self) -> ActorResult {
        let strand = Arc::clone(&self.dependencies.strands.engine_loads);
        let actor = self.spawn(&strand, Child::EngineLoads).await?;
        let SupervisorDependencies { clock, views, strands, .. } = &self.dependencies;
        strand.open(actor, || EngineLoads {
            ranks: Arc::clone(&views.ranks),
            clock: *clock,
            exclusions: Arc::clone(&views.exclusions),
            health: Arc::clone(&strands.health),
        });
        Ok(())
    }

    /// Starts the thread that detects hangs, if the configuration has a timeout.
    pub(super) fn start_watchdog(&mut self) {
        let SupervisorDependencies { config, views, strands, meters, .. } = &self.dependencies;
        let timeout_ms = config.supervision.hang_timeout_ms;
        if timeout_ms == 0 {
            return;
        }
        let watchdog = Watchdog {
            strands: strands.clone(),
            supervisor: self.myself.clone(),
            hung: Arc::clone(&views.hung),
            meters: Arc::clone(meters),
            pool: config.pool.clone(),
            timeout_ms,
            handled: Arc::clone(&self.pings_handled),
            sent: 0,
        };
        self.watchdog = watchdog.start();
    }

    async fn spawn<S: ActorState>(&mut self, strand: &Arc<Strand<S>>, child: Child) -> ActorResult<ActorRef<Wake<S>>> {
        let (actor, _) =
            Actor::spawn_linked(None, StrandActor::new(), Arc::clone(strand), self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), child);
        Ok(actor)
    }

    /// Reports a death to the machine, unless the actor was stopped on purpose.
    pub(super) async fn on_death(&mut self, actor: ActorId, reason: String) -> ActorResult {
        let Some(child) = self.children.remove(&actor) else { return Ok(()) };
        self.dependencies.meters.restarts.add(child.name(), 1);
        self.apply(SupervisorInput::Died { child, reason }).await
    }

    pub(super) async fn restart(&mut self, child: Child, reason: &str, lost: &[WorkerRank]) -> ActorResult {
        tracing::warn!(role = child.name(), reason, "actor died, restarting");
        self.start_again(child, lost).await?;
        self.dependencies.views.status.count(|state| &mut state.restarts);
        Ok(())
    }

    /// Replaces a running actor. Its requests are lost, and sent again, as after its death.
    pub(super) async fn replace(&mut self, child: Child) -> ActorResult {
        self.children.retain(|_, known| *known != child); // its end is no death
        let cold: Vec<WorkerRank> = match child {
            Child::IndexShard(shard) => self.shell.cold_of(shard).into_iter().collect(),
            Child::Sequence(slot) => {
                if let Some(rank) = self.shell.rank(slot) {
                    rank.entry.cells.speed.restore(&SpeedCell::default().sample()); // of blocks of another size
                }
                Vec::new()
            }
            Child::Scheduler | Child::Reader(_) | Child::Health | Child::EngineLoads | Child::Source(_) => Vec::new(),
        };
        self.start_again(child, &cold).await?;
        self.dependencies.views.status.count(|state| &mut state.renewals);
        Ok(())
    }

    async fn start_again(&mut self, child: Child, lost: &[WorkerRank]) -> ActorResult {
        match child {
            Child::Scheduler => self.start_scheduler().await?,
            Child::IndexShard(shard) => {
                self.start_radix(shard, lost).await?;
                #[cfg(feature = "zmq")]
                self.request_replay(shard);
            }
            Child::Sequence(slot) => {
                let Some(rank) = self.shell.rank(slot) else { return Ok(()) };
                let (entry, strand) = (Arc::clone(&rank.entry), Arc::clone(&rank.strand));
                let actor = self.start_sequence(&entry, &strand).await?;
                if let Some(rank) = self.shell.rank_mut(slot) {
                    rank.actor = actor;
                }
                if self.dependencies.config.queue.is_enabled() {
                    // Bookings may have ended without a report of falling load.
                    self.dependencies.strands.scheduler.tell(SchedulerMsg::Wake { at: None });
                }
            }
            Child::Reader(_) => {} // restarted by `MembershipEffect::StartReader`
            Child::Health => self.start_health().await?,
            Child::EngineLoads => self.start_engine_loads().await?,
            Child::Source(source) => self.restart_follower(source).await?,
        }
        Ok(())
    }
}

/// A rank's admission, its shared cells and its sequence actor, for the scheduler.
pub(super) fn sequence_handle(
    entry: &RankEntry,
    strand: &Arc<Strand<Sequence>>,
    traits: &Arc<RankTraits>,
    draining: bool,
) -> SequenceHandle<Arc<Strand<Sequence>>> {
    let admission = Admission {
        rank: entry.rank,
        slot: entry.slot,
        generation: entry.generation,
        traits: Arc::clone(traits),
        since: entry.since,
        draining,
    };
    SequenceHandle { admission, cells: entry.cells.clone(), handle: Arc::clone(strand) }
}
