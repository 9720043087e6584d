//! Last known state of one other replica.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{LoadSummary, RankContribution, ReplicaLife, SummaryKind};
use crate::load::PlacementRate;
use crate::protocol::{Timestamp, WorkerRank};

/// Another replica.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) life: ReplicaLife,
    /// Incarnations that this one has replaced, the latest first.
    earlier: Vec<u64>,
    /// Number of the newest full summary.
    full_sequence: u64,
    /// Number of the newest summary.
    pub(super) latest_sequence: u64,
    /// Time of the last message.
    pub(super) received_at: Timestamp,
    interval: Duration,
    rate: PlacementRate,
    /// Arrival of its longest-waiting request, by the own clock.
    queue_head: Option<Timestamp>,
    pub(super) has_left: bool,
    /// Contributions by rank, without idle ones that a full summary confirms.
    pub(super) ranks: BTreeMap<WorkerRank, Known>,
}

/// A contribution, and the summary that it is from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) contribution: RankContribution,
    sequence: u64,
    pub(super) received_at: Timestamp,
}

/// Number of replaced incarnations that are kept.
const EARLIER_MAX: usize = 4;

/// Multiple of the interval, beside [`SILENCE_MIN`], after which a replica without messages is silent.
const SILENT_INTERVALS: u32 = 3;

/// See [`SILENT_INTERVALS`]. Longer than the interval of full summaries.
const SILENCE_MIN: Duration = Duration::from_millis(1_200);

/// Arrivals that differ less are one, for a reader of two summaries.
const SAME_ARRIVAL: Duration = Duration::from_millis(10);

/// Time in which the share of a silent replica decreases to nothing: its requests may still run.
pub(super) const FADE: Duration = Duration::from_secs(10);

impl Peer {
    /// A replica at the first message of a life, which replaces the one `before`.
    pub(super) fn new(life: ReplicaLife, before: Option<&Self>, now: Timestamp) -> Self {
        let of_before = |before: &Self| [&[before.life.incarnation], &before.earlier[..]].concat();
        let mut earlier = before.map(of_before).unwrap_or_default();
        earlier.truncate(EARLIER_MAX);
        Self {
            life,
            earlier,
            full_sequence: 0,
            latest_sequence: 0,
            received_at: now,
            interval: Duration::ZERO,
            rate: PlacementRate::default(),
            queue_head: None,
            has_left: false,
            ranks: BTreeMap::new(),
        }
    }

    /// Applies a summary. Each rank takes the newest summary that concerns it, whatever the order of arrival. Adds the
    /// ranks that may have changed to `changed`.
    pub(super) fn apply(&mut self, summary: &LoadSummary, now: Timestamp, changed: &mut Vec<WorkerRank>) {
        self.received_at = now;
        let sequence = summary.sequence;
        for contribution in &summary.ranks {
            let rank = contribution.rank();
            let newest = self.ranks.get(&rank).map_or(0, |known| known.sequence).max(self.full_sequence);
            if sequence > newest {
                self.ranks.insert(rank, Known { contribution: *contribution, sequence, received_at: now });
                changed.push(rank);
            }
        }
        let is_full = summary.kind != SummaryKind::Changes;
        if is_full && sequence > self.full_sequence {
            self.full_sequence = sequence;
            let gone = |known: &Known| known.sequence < sequence;
            changed.extend(self.ranks.iter().filter(|(_, known)| gone(known)).map(|(rank, _)| *rank));
            self.ranks.retain(|_, known| !gone(known));
        }
        if sequence > self.latest_sequence {
            self.latest_sequence = sequence;
            self.interval = Duration::from_millis(summary.interval_ms.into());
            self.rate = PlacementRate {
                placements_per_second: rate(summary.placements_per_second),
                work_per_second: rate(summary.work_per_second),
            };
            let head = summary.longest_wait_ms.map(|millis| now - Duration::from_millis(millis.into()));
            // Estimates of one arrival differ by the delay of messages.
            let is_same = |known: Timestamp, head: Timestamp| known.since(head).max(head.since(known)) < SAME_ARRIVAL;
            if !self.queue_head.zip(head).is_some_and(|(known, head)| is_same(known, head)) {
                self.queue_head = head;
            }
            self.has_left = summary.kind == SummaryKind::Last;
        }
    }

    /// Whether a message of this incarnation comes late: it was replaced, and its successor lives. Incarnations have no
    /// order, so an unknown one is a new life.
    pub(super) fn has_replaced(&self, incarnation: u64, now: Timestamp) -> bool {
        self.earlier.contains(&incarnation) && !self.is_silent(now)
    }

    /// Time without messages after which the replica is silent.
    fn silent_after(&self) -> Duration {
        SILENCE_MIN + self.interval.min(Duration::from_secs(10)) * SILENT_INTERVALS
    }

    /// Factor of its contributions: 1, decreasing to 0 after it has become silent.
    pub(super) fn weight(&self, now: Timestamp) -> f64 {
        let silent = now.since(self.received_at).saturating_sub(self.silent_after());
        (1.0 - silent.as_secs_f64() / FADE.as_secs_f64()).max(0.0)
    }

    pub(super) fn is_silent(&self, now: Timestamp) -> bool {
        now.since(self.received_at) > self.silent_after()
    }

    /// Its arrivals; none while it is silent.
    pub(super) fn rate(&self, now: Timestamp) -> PlacementRate {
        if self.is_silent(now) { PlacementRate::default() } else { self.rate }
    }

    /// Arrival of its longest-waiting request; none while it is silent.
    pub(super) fn queue_head(&self, now: Timestamp) -> Option<Timestamp> {
        self.queue_head.filter(|_| !self.is_silent(now))
    }

    pub(super) fn contribution(&self, rank: WorkerRank) -> Option<&Known> {
        self.ranks.get(&rank)
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        self.ranks.keys().copied()
    }
}

/// A finite rate that is not negative.
fn rate(reported: f32) -> f64 {
    if reported.is_finite() { f64::from(reported.clamp(0.0, 1e6)) } else { 0.0 }
}
