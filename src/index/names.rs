//! Names of a rank for audits: their digest, all of them, and the removal of stale ones.

use super::Index;
use super::digest::BlockDigest;
use super::residence::Residence;
use crate::protocol::{EngineHash, StorageTier, WorkerRank};

impl Index {
    /// Digest of all names of the engine that the rank holds or that wait for a parent; `None` if it is not registered.
    /// One step per tier, waiting block and proven block.
    ///
    /// ```
    /// use pointsman::internals::index::{BlockDigest, Index};
    /// use pointsman::internals::protocol::{Generation, Slot};
    /// use pointsman::protocol::{WorkerId, WorkerRank};
    ///
    /// let (mut index, rank) = (Index::new(), WorkerRank::new(WorkerId(7), 0));
    /// assert_eq!(index.digest_of(rank), None);
    /// index.register(rank, Slot(0), Generation(1));
    /// assert_eq!(index.digest_of(rank), Some(BlockDigest::default()));
    /// ```
    #[must_use]
    pub fn digest_of(&self, rank: WorkerRank) -> Option<BlockDigest> {
        let blocks = self.rank(self.slot_of(rank)?);
        let (waiting, proven): (BlockDigest, BlockDigest) =
            (blocks.waiting_names().collect(), blocks.proven_names().collect());
        let held = |digest: BlockDigest, residence: &Residence| BlockDigest {
            sum: digest.sum.wrapping_add(residence.digest()),
            blocks: digest.blocks + residence.names_count() as u64,
        };
        let all = blocks.residences().map(|(_, residence)| residence).fold(waiting, held);
        Some(BlockDigest { sum: all.sum.wrapping_sub(proven.sum), blocks: all.blocks - proven.blocks })
    }

    /// The names in the [digest](Self::digest_of) of a rank, each once, in no order; empty if it is not registered.
    /// Visits every block. Sorting millions of names would delay the queries behind it.
    #[must_use]
    pub fn names_of(&self, rank: WorkerRank) -> Vec<(StorageTier, EngineHash)> {
        let Some(slot) = self.slot_of(rank) else { return Vec::new() };
        let blocks = self.rank(slot);
        let held = blocks.residences().flat_map(|(tier, residence)| residence.names().map(move |name| (tier, name)));
        held.filter(|(tier, name)| !blocks.is_proven(*tier, *name)).chain(blocks.waiting_names()).collect()
    }

    /// Removes names of a rank with all copies of their blocks, for names that the engine no longer has. Returns the
    /// number of removed names.
    pub fn forget(&mut self, rank: WorkerRank, names: &[(StorageTier, EngineHash)]) -> usize {
        let Some(slot) = self.slot_of(rank) else { return 0 };
        let mut known = 0;
        for tier in StorageTier::ALL {
            let of_tier: Vec<_> = names.iter().filter(|(of, _)| *of == tier).map(|(_, name)| *name).collect();
            if of_tier.is_empty() {
                continue;
            }
            let not_pending = self.remove_waiting(slot, tier, &of_tier);
            let held = not_pending.as_deref().unwrap_or(&of_tier);
            known += of_tier.len() - held.len();
            if self.rank(slot).residence(tier).is_some() {
                known += self.blocks(slot, tier).forget(held);
            }
        }
        self.recount(slot);
        known
    }
}
