//! Instruments of shared load.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use metrics::{Counter, Gauge};

use crate::actors::telemetry::{Pool, as_f64};
use crate::protocol::Timestamp;
use crate::replica::{PeerState, PeerStatus, ReplicaId, ReplicaLife};

/// Interval of updates of gauges, and of log lines about refused messages.
const SHOW_INTERVAL: Duration = Duration::from_secs(1);
const LOG_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(crate) struct ReplicaMeters {
    pool: Pool,
    peers: [(PeerState, Gauge); 3],
    ages: BTreeMap<ReplicaId, Gauge>,
    load: Gauge,
    lost: Counter,
    conflicts: Counter,
    routed_dropped: Counter,
    shown_at: Option<Timestamp>,
    logged_at: Option<Timestamp>,
}

impl ReplicaMeters {
    pub(crate) fn new(pool: &Pool) -> Self {
        let peers = |state: PeerState| (state, pool.gauge("pointsman_replica_peers", &[("state", state.name())]));
        Self {
            peers: PeerState::ALL.map(peers),
            ages: BTreeMap::new(),
            load: pool.gauge("pointsman_replica_load_seconds", &[]),
            lost: pool.counter("pointsman_replica_summaries_lost_total", &[]),
            conflicts: pool.counter("pointsman_replica_conflicts_total", &[]),
            routed_dropped: pool.counter("pointsman_replica_decisions_dropped_total", &[]),
            pool: pool.clone(),
            shown_at: None,
            logged_at: None,
        }
    }

    /// Whether the last publication is older than [`SHOW_INTERVAL`].
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        self.shown_at.is_none_or(|at| now.since(at) >= SHOW_INTERVAL)
    }

    /// Publishes the states and ages of the other replicas, and the remaining prefill time of their requests.
    pub(super) fn show(&mut self, statuses: &[PeerStatus], prefill: Duration, now: Timestamp) {
        self.shown_at = Some(now);
        self.load.set(prefill.as_secs_f64());
        let mut counts = [0; 3];
        let mut gone = std::mem::take(&mut self.ages);
        for status in statuses {
            if let Some(count) = PeerState::ALL.iter().position(|state| *state == status.state) {
                counts[count] += 1;
            }
            let id = status.life.replica;
            let label = id.to_string();
            let name = "pointsman_replica_summary_age_seconds";
            let age = gone.remove(&id).unwrap_or_else(|| self.pool.gauge(name, &[("replica", &label)]));
            age.set(status.summary_age.as_secs_f64());
            self.ages.insert(id, age);
        }
        gone.values().for_each(|age| age.set(0.0));
        for ((_, gauge), count) in self.peers.iter().zip(counts) {
            gauge.set(as_f64(count));
        }
    }

    /// Counts messages that arrived faster than they were applied.
    pub(super) fn lost(&self, messages: u64) {
        self.lost.increment(messages);
    }

    /// Counts decisions that were not sent or not applied because of their number.
    pub(super) fn routed_dropped(&self, decisions: u64) {
        self.routed_dropped.increment(decisions);
    }

    pub(super) fn conflicts(&self, conflicts: u64) {
        self.conflicts.increment(conflicts);
    }

    /// Counts a refused message, and logs one per [`LOG_INTERVAL`].
    pub(super) fn refused(
        &mut self,
        from: ReplicaLife,
        name: &'static str,
        reason: &impl fmt::Display,
        now: Timestamp,
    ) {
        self.pool.counter("pointsman_replica_summaries_refused_total", &[("reason", name)]).increment(1);
        if self.logged_at.is_none_or(|at| now.since(at) >= LOG_INTERVAL) {
            self.logged_at = Some(now);
            tracing::warn!(replica = %from.replica, %reason, "message of a replica refused");
        }
    }
}
