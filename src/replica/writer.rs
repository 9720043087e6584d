//! Selection of the content of summaries: what has changed, and everything at longer intervals.

use std::time::Duration;

use ahash::AHashMap;

use super::{LoadSummary, RankContribution, ReplicaLayout, SummaryKind};
use crate::load::PlacementRate;
use crate::protocol::{Timestamp, WorkerRank};

/// Writes the summaries of one pool.
///
/// A summary lists the ranks that have changed, each in three consecutive summaries, so that a single lost message has no
/// effect. A full summary follows every second. Without changes nothing is written for a tenth of a second, or a second
/// if the replica has no load.
#[derive(Debug)]
pub struct SummaryWriter {
    layout: ReplicaLayout,
    interval: Duration,
    sequence: u64,
    /// Ranks whose last change is still repeated: number of repetitions left.
    ranks: AHashMap<WorkerRank, u8>,
    full_at: Option<Timestamp>,
    written_at: Timestamp,
    /// Arrival of the longest-waiting request in the last summary.
    queue_head: Option<Timestamp>,
    has_load: bool,
}

/// Interval of full summaries.
const FULL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum interval of summaries of a replica with load.
const HEARTBEAT: Duration = Duration::from_millis(100);

impl SummaryWriter {
    /// Number of summaries that repeat a change.
    pub const REPETITIONS: u8 = 2;

    /// A writer that is called every `interval`. The number of its first summary follows `sequence`, which must exceed
    /// those of earlier writers in this life.
    #[must_use]
    pub fn new(layout: ReplicaLayout, interval: Duration, sequence: u64) -> Self {
        let (ranks, written_at) = (AHashMap::new(), Timestamp::default());
        Self { layout, interval, sequence, ranks, full_at: None, written_at, queue_head: None, has_load: false }
    }

    /// The next summary, if one is due. `contributions`: the ranks, each with whether it has changed since the last call.
    /// Ranks without load and change may be omitted after [`Self::REPETITIONS`] further calls. `queue_head`: arrival of the
    /// longest-waiting request.
    pub fn write(
        &mut self,
        contributions: impl Iterator<Item = (RankContribution, bool)>,
        rate: PlacementRate,
        queue_head: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<LoadSummary> {
        let is_full = self.full_at.is_none_or(|at| now.since(at) >= FULL_INTERVAL);
        let (mut has_load, mut ranks) = (false, Vec::new());
        // Ranks that have left are forgotten.
        let repeated = std::mem::take(&mut self.ranks);
        for (contribution, has_changed) in contributions {
            has_load |= !contribution.is_idle();
            let repetitions = repeated.get(&contribution.rank()).copied().unwrap_or(0);
            let left = if has_changed { Some(Self::REPETITIONS) } else { repetitions.checked_sub(1) };
            if let Some(left @ 1..) = left {
                self.ranks.insert(contribution.rank(), left);
            }
            if if is_full { !contribution.is_idle() } else { left.is_some() } {
                ranks.push(contribution);
            }
        }
        self.has_load = has_load;
        let is_due = is_full
            || !ranks.is_empty()
            || queue_head != self.queue_head
            || has_load && now.since(self.written_at) >= HEARTBEAT;
        if !is_due {
            return None;
        }
        (self.written_at, self.queue_head) = (now, queue_head);
        if is_full {
            self.full_at = Some(now);
        }
        let kind = if is_full { SummaryKind::Full } else { SummaryKind::Changes };
        let mut summary = self.summary(kind, ranks, rate);
        let millis = |arrival| u32::try_from(now.since(arrival).as_millis()).unwrap_or(u32::MAX);
        summary.longest_wait_ms = queue_head.map(millis);
        Some(summary)
    }

    /// Whether there was nothing to publish except the full summaries: no load, no repeated change, no waiting request.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.has_load && self.ranks.is_empty() && self.queue_head.is_none()
    }

    /// The last summary, at the end of the replica.
    pub fn last(&mut self) -> LoadSummary {
        self.summary(SummaryKind::Last, Vec::new(), PlacementRate::default())
    }

    #[expect(clippy::cast_possible_truncation, reason = "rates need no more than the precision of `f32`")]
    fn summary(&mut self, kind: SummaryKind, ranks: Vec<RankContribution>, rate: PlacementRate) -> LoadSummary {
        self.sequence += 1;
        LoadSummary {
            layout: self.layout,
            sequence: self.sequence,
            interval_ms: u32::try_from(self.interval.as_millis()).unwrap_or(u32::MAX),
            placements_per_second: rate.placements_per_second as f32,
            work_per_second: rate.work_per_second as f32,
            longest_wait_ms: None,
            kind,
            ranks,
        }
    }
}
