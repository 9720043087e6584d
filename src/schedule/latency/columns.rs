//! Loads of all ranks as columns, for lower bounds of their costs.
//!
//! A copy of what the ranks hold, by position. It is written where a rank changes, and rebuilt with the typical speeds,
//! several times a second. The sketches of the ranks are stored by bit: one row of ranks per bit, so that a few rows
//! contain the ranks that may share blocks with a prompt.

use std::time::Duration;

use super::lanes::RankGroup;
use super::recent::RecentWork;
use crate::load::{PromptFingerprint, PromptSketch};
use crate::protocol::Timestamp;
use crate::schedule::rank::{Measured, Rank};

const BITS: usize = u64::BITS as usize;

/// Blocks that every rank is assumed to share with a prompt. The rows of a few blocks would exclude few ranks.
pub(in crate::schedule) const SHARED_BLOCKS_ASSUMED: u32 = 3;

/// See the module documentation.
#[derive(Debug, Default)]
pub(in crate::schedule) struct RankColumns {
    /// Time to which the ends of waits refer.
    epoch: Timestamp,
    groups: Vec<RankGroup>,
    /// Words of a row.
    row_words: usize,
    /// Rows of ranks, by level and bit of the sketch.
    rows: Vec<u64>,
    /// Ranks with prompts that no sketch contains yet, or none that is known to the caller.
    unknown: Vec<u64>,
    /// The sketches in the rows, by position.
    sketches: Vec<PromptSketch>,
    /// Recent work, by position.
    recent_work: Vec<RecentWork>,
    /// Least seconds per request and per block of a step.
    least_step: (f64, f64),
}

impl RankColumns {
    /// The columns of these ranks, with the waits at `now`.
    pub(in crate::schedule) fn rebuild(&mut self, ranks: &[Rank], now: Timestamp) {
        self.epoch = now;
        self.row_words = ranks.len().div_ceil(BITS);
        self.groups.clear();
        self.groups.resize(ranks.len().div_ceil(RankGroup::RANKS), RankGroup::VACANT);
        self.rows.clear();
        self.rows.resize(PromptSketch::WORDS * BITS * self.row_words, 0);
        self.unknown.clear();
        self.unknown.resize(self.row_words, 0);
        self.sketches.clear();
        self.sketches.resize(ranks.len(), PromptSketch::default());
        self.recent_work.clear();
        self.recent_work.resize(ranks.len(), RecentWork::default());
        self.least_step = (f64::INFINITY, f64::INFINITY);
        for (position, rank) in ranks.iter().enumerate() {
            self.set(position, rank, now);
        }
    }

    /// Copies a rank.
    #[expect(clippy::cast_possible_truncation, reason = "the margin of the bounds covers the rounding")]
    pub(in crate::schedule) fn set(&mut self, position: usize, rank: &Rank, now: Timestamp) {
        let (Measured { speed, is_full }, wait) = (rank.measured(), rank.wait(now));
        let (group, lane) = (&mut self.groups[position / RankGroup::RANKS], position % RankGroup::RANKS);
        let requests = f64::from(rank.requests());
        let token_seconds = speed.work_tokens_per_second.recip();
        let unmodelled = u32::try_from(wait.unmodelled_tokens).unwrap_or(u32::MAX);
        let wait_seconds = seconds(wait.modelled) + f64::from(unmodelled) * token_seconds;
        group.idle_at[lane] = (seconds(now.since(self.epoch)) + wait_seconds) as f32;
        group.requests[lane] = requests as f32;
        group.step_seconds[lane] = speed.step(requests, f64::from(rank.read_blocks())) as f32;
        group.token_seconds[lane] = token_seconds as f32;
        group.full[lane] = if is_full { 1.0 } else { 0.0 };
        let (request_seconds, block_seconds) = self.least_step;
        self.least_step = (request_seconds.min(speed.request_seconds), block_seconds.min(speed.block_seconds));
        self.recent_work[position] = rank.about.recent_work;
        self.set_sketch(position, rank);
    }

    fn set_sketch(&mut self, position: usize, rank: &Rank) {
        let (word, bit) = (position / BITS, position % BITS);
        let is_unknown = u64::from(!rank.is_settled());
        self.unknown[word] = self.unknown[word] & !(1 << bit) | is_unknown << bit;
        let sketch = rank.sketch();
        if sketch == self.sketches[position] {
            return;
        }
        let before = std::mem::replace(&mut self.sketches[position], sketch);
        for (level, (new, old)) in sketch.to_words().into_iter().zip(before.to_words()).enumerate() {
            let mut changed = new ^ old;
            while changed != 0 {
                let row = level * BITS + changed.trailing_zeros() as usize;
                self.rows[row * self.row_words + word] ^= 1 << bit;
                changed &= changed - 1;
            }
        }
    }

    /// Time of the last rebuild.
    pub(in crate::schedule) fn epoch(&self) -> Timestamp {
        self.epoch
    }

    pub(in crate::schedule) fn groups(&self) -> &[RankGroup] {
        &self.groups
    }

    /// Recent work of the rank at `position`.
    pub(in crate::schedule) fn recent_work(&self, position: usize) -> RecentWork {
        self.recent_work[position]
    }

    /// Seconds of `now` after the epoch.
    pub(in crate::schedule) fn seconds(&self, now: Timestamp) -> f64 {
        seconds(now.since(self.epoch))
    }

    /// Least time that a request with `blocks` blocks adds to a step, on any rank.
    pub(in crate::schedule) fn least_own_step_seconds(&self, blocks: f64) -> f64 {
        let (request_seconds, block_seconds) = self.least_step;
        if request_seconds.is_finite() { request_seconds + block_seconds * blocks } else { 0.0 }
    }

    /// Calls `visit` with each rank that may share more than `assumed_blocks` blocks, and the upper bound of the shared
    /// blocks.
    pub(in crate::schedule) fn visit_sharers(
        &self,
        fingerprint: &PromptFingerprint,
        assumed_blocks: u32,
        mut visit: impl FnMut(usize, u32),
    ) {
        if fingerprint.block_count() <= assumed_blocks {
            return;
        }
        for word in 0..self.row_words {
            let mut visit_all = |mut ranks: u64, blocks: u32| {
                while ranks != 0 {
                    visit(word * BITS + ranks.trailing_zeros() as usize, blocks);
                    ranks &= ranks - 1;
                }
            };
            let mut sharers = !self.unknown[word];
            for (level, bit) in fingerprint.positions() {
                let deeper = sharers & self.rows[(level * BITS + usize::from(bit)) * self.row_words + word];
                let blocks = (1 << level) - 1; // a missing hash proves that no more blocks are shared
                if blocks > assumed_blocks {
                    visit_all(sharers & !deeper, blocks);
                }
                sharers = deeper;
                if sharers == 0 {
                    break;
                }
            }
            visit_all(sharers | self.unknown[word], fingerprint.block_count());
        }
    }
}

/// Seconds without the division of `as_secs_f64`.
fn seconds(duration: Duration) -> f64 {
    duration.as_secs() as f64 + f64::from(duration.subsec_nanos()) * 1e-9
}
