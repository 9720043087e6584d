//! Detection of stalled ranks: one task reads the stall cells of all ranks periodically.
//!
//! The task sends a message only while a rank is overdue. [`StallMeter`](crate::load::StallMeter) computes when a rank
//! is, and the health actor excludes it. A late pass marks no rank: the process itself made no progress, and reports may
//! wait in its queues.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::{HealthActor, HealthMsg};
use crate::actors::delivery::strand::Strand;
use crate::actors::io::clock::Clock;
use crate::actors::views::Views;
use crate::config::RouterConfig;
use crate::health::HealthInput;
use crate::protocol::{Timestamp, WorkerRank};

/// Interval of the passes, and the interval while a rank is overdue, which is tried again for one of those.
const PASS: Duration = Duration::from_millis(500);

/// See [`PASS`].
const PASS_OVERDUE: Duration = Duration::from_millis(50);

/// Starts the detection, if enabled. It ends with the router.
pub(crate) fn watch(config: &RouterConfig, clock: Clock, views: &Views, health: &Arc<Strand<HealthActor>>) {
    if config.health.stall_ms == 0 {
        return;
    }
    let (views, health) = (views.clone(), Arc::clone(health));
    tokio::spawn(async move {
        let mut stalled = BTreeMap::<WorkerRank, Timestamp>::new();
        while !views.status.is_down() {
            let pass = if stalled.is_empty() { PASS } else { PASS_OVERDUE };
            let planned = clock.now() + pass;
            tokio::time::sleep(pass).await;
            let now = clock.now();
            if now.since(planned) < PASS {
                look(&views, &health, &mut stalled, now);
            }
        }
    });
}

/// One pass. `stalled` has the time since which each rank is known to be overdue.
fn look(views: &Views, health: &Strand<HealthActor>, stalled: &mut BTreeMap<WorkerRank, Timestamp>, now: Timestamp) {
    let entries = views.ranks.select(|entry| entry.stalls.is_overdue(now) || stalled.contains_key(&entry.rank));
    if entries.is_empty() {
        return stalled.clear();
    }
    let has_progressed =
        |rank, since| entries.iter().any(|entry| entry.rank == rank && entry.stalls.has_progressed_since(since));
    let progressed: BTreeSet<WorkerRank> =
        stalled.iter().filter(|(rank, since)| has_progressed(**rank, **since)).map(|(rank, _)| *rank).collect();
    let overdue: BTreeMap<WorkerRank, u64> = entries
        .iter()
        .filter(|entry| entry.stalls.is_overdue(now))
        .map(|entry| (entry.rank, entry.incarnation()))
        .collect();
    stalled.retain(|rank, _| overdue.contains_key(rank));
    for rank in overdue.keys() {
        stalled.entry(*rank).or_insert(now);
    }
    health.tell(HealthMsg::Input(HealthInput::Stalls { overdue, progressed }));
}
