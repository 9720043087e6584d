//! Addresses of the index shards, and the semaphore in front of each.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::{Radix, RadixMsg};
use crate::actors::delivery::gate::Gate;
use crate::actors::delivery::strand::Strand;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::status::RouterStatus;
use crate::error::Down;
use crate::protocol::{BlockHash, WorkerRank};
use crate::shell::CurrentIncarnation;
use crate::shell::shard::shard_of;

/// All shards of one router; empty if the index is off.
pub(crate) struct Shards {
    shards: Vec<Shard>,
    event_blocks_max: u32,
}

struct Shard {
    strand: Arc<Strand<Radix>>,
    /// One permit per block in queued events.
    gate: Gate,
    incarnation: Arc<CurrentIncarnation>,
}

impl Shards {
    /// `events.blocks_max` is the limit of blocks in the queued events of one shard.
    pub(crate) fn new(shards: u32, event_blocks_max: u32) -> Self {
        let shard =
            |_| Shard { strand: Strand::replaceable(), gate: Gate::new(event_blocks_max), incarnation: Arc::default() };
        let shards = (0..shards).map(shard).collect();
        Self { shards, event_blocks_max }
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Strand<Radix>>> {
        self.shards.iter().map(|shard| &shard.strand)
    }

    /// Strand of the shard with this number.
    pub(crate) fn strand(&self, shard: usize) -> &Arc<Strand<Radix>> {
        &self.shards[shard].strand
    }

    /// Present incarnation of a shard.
    pub(crate) fn incarnation(&self, shard: usize) -> &Arc<CurrentIncarnation> {
        &self.shards[shard].incarnation
    }

    /// Number of a rank's shard.
    pub(crate) fn number_of(&self, rank: WorkerRank) -> usize {
        shard_of(rank, self.len())
    }

    /// Shard of a rank; `None` if the index is off.
    pub(crate) fn of(&self, rank: WorkerRank) -> Option<&Arc<Strand<Radix>>> {
        self.shards.get(self.number_of(rank)).map(|shard| &shard.strand)
    }

    /// Takes permits to queue `blocks` blocks at a shard. Waits while the shard is behind, unless the router is down.
    pub(crate) async fn admit(
        &self,
        shard: usize,
        blocks: usize,
        status: &RouterStatus,
    ) -> Result<OwnedSemaphorePermit, Down> {
        // A batch larger than the gate takes all permits; an event without blocks takes one.
        let weight = u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, self.event_blocks_max);
        let Shard { strand, gate, .. } = &self.shards[shard];
        loop {
            let before = status.state();
            tokio::select! {
                biased;
                permit = Arc::clone(gate.room(strand)).acquire_many_owned(weight) => {
                    return permit.map_err(|_| Down::Stopped);
                }
                () = status.replaced(before) => {}
            }
            if status.is_down() {
                return Err(status.down().await);
            }
        }
    }

    /// Takes permits to queue `blocks` blocks at a shard; `None` while the shard is behind.
    pub(crate) fn try_admit(&self, shard: usize, blocks: usize) -> Option<OwnedSemaphorePermit> {
        let weight = u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, self.event_blocks_max);
        let Shard { strand, gate, .. } = &self.shards[shard];
        Arc::clone(gate.room(strand)).try_acquire_many_owned(weight).ok()
    }

    /// Reports that the engine of a rank took the first `blocks` blocks of a prompt from its cache. While the shard is
    /// behind, the report is dropped.
    pub(crate) fn prove(&self, entry: &RankEntry, prompt: &Arc<[BlockHash]>, blocks: u32, is_cold: bool) {
        let shard = self.number_of(entry.rank);
        if let Some(permit) = self.try_admit(shard, prompt.len()) {
            let (rank, generation, prompt) = (entry.rank, entry.generation, Arc::clone(prompt));
            self.strand(shard).tell(RadixMsg::Proven { rank, generation, prompt, blocks, is_cold, permit });
        }
    }

    /// Blocks of queued events, over all shards.
    pub(crate) fn queued_blocks(&self) -> u64 {
        self.shards.iter().map(|shard| shard.gate.taken()).sum()
    }

    /// Closes every shard.
    pub(crate) fn close(&self) {
        self.shards.iter().for_each(|shard| shard.strand.close());
    }
}

#[cfg(feature = "zmq")]
impl Shards {
    /// Sends events of one generation of a rank to its shard. Waits while the shard is behind.
    pub(crate) async fn apply_of(
        &self,
        entry: &RankEntry,
        events: Vec<crate::protocol::RouterEvent>,
        status: &RouterStatus,
    ) {
        let shard = self.number_of(entry.rank);
        let blocks = events.iter().map(|event| event.data.block_count().max(1)).sum();
        if let Ok(permit) = self.admit(shard, blocks, status).await {
            let only = Some((entry.slot, entry.generation));
            self.strand(shard).tell(RadixMsg::Apply { events, only, permit });
        }
    }
}
