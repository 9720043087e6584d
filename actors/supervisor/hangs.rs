//! Replacement of hung actors.
//!
//! The scheduler and the index shards are replaced: their state is rebuilt as after a crash. The hung thread keeps the
//! old state, and its late effects are fenced: a sequence actor drops a Book of an earlier incarnation, a shard
//! publishes only as the present incarnation, and replies reach callers that have retried. Not replaced are sequence
//! actors, because the load board has one writer per rank, and the supervisor, because the membership exists only there.

use super::state::SupervisorState;
use crate::actors::delivery::ActorResult;
use crate::actors::delivery::strand::{ActorState, Strand};
use crate::membership::Child;

/// Result of the attempt to leave a hung step.
enum Abandonment {
    /// The step has ended in the meantime.
    NotNeeded,
    /// Every cell of the strand has a hung step.
    Impossible,
    Done,
}

impl SupervisorState {
    /// Replaces an actor that made no progress since `progress`.
    pub(super) async fn on_hung(&mut self, child: Child, progress: u64) -> ActorResult {
        let strands = &self.dependencies.strands;
        let abandonment = match child {
            Child::Scheduler => abandon(&strands.scheduler, progress),
            Child::IndexShard(shard) => abandon(strands.shards.strand(shard), progress),
            Child::Sequence(_) | Child::Reader(_) | Child::Health | Child::EngineLoads | Child::Source(_) => {
                Abandonment::NotNeeded // the watchdog requests no replacement
            }
        };
        match abandonment {
            Abandonment::NotNeeded => return Ok(()),
            Abandonment::Impossible => {
                tracing::error!(role = child.name(), "hung actor not replaced: its predecessors hang too");
                return Ok(());
            }
            Abandonment::Done => {}
        }
        let actor = self.children.iter().find(|(_, known)| **known == child).map(|(actor, _)| *actor);
        let Some(actor) = actor else { return Ok(()) }; // it died before, and its death is about to be reported
        self.on_death(actor, "hung".to_owned()).await?;
        if child == Child::Scheduler {
            // Counts acknowledgements that the hung scheduler may hold as received, as after its death.
            for input in self.shell.lost_acknowledgements() {
                self.apply(input).await?;
            }
        }
        self.dependencies.views.status.count(|state| &mut state.replacements);
        Ok(())
    }
}

fn abandon<S: ActorState>(strand: &Strand<S>, progress: u64) -> Abandonment {
    let sample = strand.sample();
    if sample.progress != progress || !sample.has_work {
        Abandonment::NotNeeded
    } else if strand.abandon() {
        Abandonment::Done
    } else {
        Abandonment::Impossible
    }
}
