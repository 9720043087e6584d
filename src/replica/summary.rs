//! Summary of a replica's own load.

use serde::{Deserialize, Serialize};

use crate::protocol::{WorkerId, WorkerRank};

/// What the bookings of one replica contribute to the loads of a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadSummary {
    /// Meaning of blocks.
    pub layout: ReplicaLayout,
    /// Number of the summary; later ones have higher numbers.
    pub sequence: u64,
    /// Time between two summaries, in milliseconds.
    pub interval_ms: u32,
    /// Placements per second.
    pub placements_per_second: f32,
    /// Prefill time of the placements per second, in seconds.
    pub work_per_second: f32,
    /// Time since the arrival of the longest-waiting request, in milliseconds. `None` if no request waits.
    pub longest_wait_ms: Option<u32>,
    /// Meaning of ranks that are not listed.
    pub kind: SummaryKind,
    /// Contributions to ranks.
    pub ranks: Vec<RankContribution>,
}

/// Unit of blocks, and version of their hashes. Replicas with different layouts cannot share loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaLayout {
    /// Tokens per block.
    pub block_size: u32,
    /// Seed of plain block hashes.
    pub hash_seed: u64,
}

/// Meaning of ranks that a summary does not list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SummaryKind {
    /// Their contributions have not changed.
    Changes,
    /// They have no contribution.
    Full,
    /// As `Full`, and the sender ends: no later summary follows.
    Last,
}

/// Contribution to one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankContribution {
    /// Worker of the rank.
    pub worker: u64,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// Active blocks.
    pub active_blocks: u32,
    /// Blocks that a decode step reads.
    pub read_blocks: u32,
    /// Active requests.
    pub requests: u32,
    /// Prefills that are not known to be complete.
    pub prefills: u32,
    /// Tokens to compute of prefills with a modelled time.
    pub prefill_tokens: u32,
    /// Tokens of the other prefills.
    pub unmodelled_tokens: u32,
    /// Modelled time of the prefills alone on the rank, in microseconds.
    pub prefill_us: u32,
    /// Bookings on the rank since the start of its sequence actor; wraps.
    pub booked: u32,
}

impl RankContribution {
    /// The rank.
    #[must_use]
    pub fn rank(&self) -> WorkerRank {
        WorkerRank::new(WorkerId(self.worker), self.dp_rank)
    }

    /// Whether it adds no load.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let Self {
            active_blocks, read_blocks, requests, prefills, prefill_tokens, unmodelled_tokens, prefill_us, ..
        } = *self;
        [active_blocks, read_blocks, requests, prefills, prefill_tokens, unmodelled_tokens, prefill_us] == [0; 7]
    }
}
