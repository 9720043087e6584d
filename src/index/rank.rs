//! All blocks of one rank.
//!
//! Holds one residence per tier, the pending blocks, the names of further cache groups, proven and doubted blocks. A rank
//! pays one null pointer for each part but the device tier that it never used.

use std::mem::size_of;

use ahash::RandomState;

use super::doubts::Doubts;
use super::groups::CacheGroups;
use super::proven::ProvenNames;
use super::residence::Residence;
use super::waiting::PendingBlocks;
use crate::protocol::{EngineHash, StorageTier, WorkerRank};

/// The blocks of one rank in all tiers.
#[derive(Debug)]
pub(super) struct RankBlocks {
    pub(super) id: WorkerRank,
    /// Heap bytes, including this struct, at the last count by an index with a budget.
    pub(super) counted: usize,
    pub(super) evicted_blocks: u64,
    /// Number of blocks in the device tier of the engine, if known.
    pub(super) pool_blocks: Option<u32>,
    pub(super) groups: Option<Box<CacheGroups>>,
    /// Present since the first proof.
    pub(super) proven: Option<Box<ProvenNames>>,
    /// Present since the first store that may have been a further copy.
    pub(super) doubts: Option<Box<Doubts>>,
    device: Residence,
    lower: Option<Box<Lower>>,
}

#[derive(Debug)]
struct Lower {
    residences: [Residence; 3],
    waiting: PendingBlocks,
}

/// Index of a lower tier in arrays of lower tiers; `None` for the device tier.
pub(super) const fn lower_idx(tier: StorageTier) -> Option<usize> {
    match tier {
        StorageTier::Device => None,
        StorageTier::HostPinned => Some(0),
        StorageTier::Disk => Some(1),
        StorageTier::External => Some(2),
    }
}

impl RankBlocks {
    pub(super) fn new(id: WorkerRank, hasher: &RandomState) -> Self {
        Self {
            id,
            counted: 0,
            evicted_blocks: 0,
            pool_blocks: None,
            groups: None,
            proven: None,
            doubts: None,
            device: Residence::new(StorageTier::Device, hasher.clone()),
            lower: None,
        }
    }

    /// Removes all blocks and resets the eviction count.
    pub(super) fn reset(&mut self, hasher: &RandomState) {
        *self = Self { counted: self.counted, pool_blocks: self.pool_blocks, ..Self::new(self.id, hasher) };
    }

    /// Whether the rank holds more blocks than its engine has room for. Proven blocks may have ended.
    pub(super) fn exceeds_pool(&self) -> bool {
        let proven = self.proven.as_ref().map_or(0, |proven| proven.len());
        self.pool_blocks.is_some_and(|pool| self.device.held_blocks() > pool as usize + proven)
    }

    /// The rank's residence in a tier; `None` for a lower tier if the rank never used one.
    pub(super) fn residence(&self, tier: StorageTier) -> Option<&Residence> {
        match lower_idx(tier) {
            None => Some(&self.device),
            Some(idx) => self.lower.as_ref().map(|lower| &lower.residences[idx]),
        }
    }

    /// The rank's residence in a tier; creates a missing one.
    pub(super) fn residence_mut(&mut self, tier: StorageTier, hasher: &RandomState) -> &mut Residence {
        match lower_idx(tier) {
            None => &mut self.device,
            Some(idx) => &mut self.lower_mut(hasher).residences[idx],
        }
    }

    /// The non-empty residences, nearest tier first.
    pub(super) fn residences(&self) -> impl Iterator<Item = (StorageTier, &Residence)> {
        let used = |tier| Some((tier, self.residence(tier)?));
        StorageTier::ALL.into_iter().filter_map(used).filter(|(_, residence)| residence.held_blocks() > 0)
    }

    pub(super) fn waiting(&self) -> Option<&PendingBlocks> {
        self.lower.as_ref().map(|lower| &lower.waiting)
    }

    pub(super) fn waiting_mut(&mut self, hasher: &RandomState) -> &mut PendingBlocks {
        &mut self.lower_mut(hasher).waiting
    }

    /// Tier and name of each pending block, in any order.
    pub(super) fn waiting_names(&self) -> impl Iterator<Item = (StorageTier, EngineHash)> {
        self.waiting().into_iter().flat_map(PendingBlocks::names)
    }

    /// Whether any block is pending behind an unknown parent.
    pub(super) fn has_waiting(&self) -> bool {
        self.lower.as_ref().is_some_and(|lower| !lower.waiting.is_empty())
    }

    /// Whether a name is that of a proven block, not of the engine.
    pub(super) fn is_proven(&self, tier: StorageTier, name: EngineHash) -> bool {
        tier == StorageTier::Device && self.proven.as_ref().is_some_and(|proven| proven.contains(name))
    }

    /// Tier and name of each proven block that is held.
    pub(super) fn proven_names(&self) -> impl Iterator<Item = (StorageTier, EngineHash)> {
        let device = self.residence(StorageTier::Device);
        let names = self.proven.iter().flat_map(|proven| proven.iter());
        let held = names.filter(move |name| device.is_some_and(|device| device.find(*name).is_some()));
        held.map(|name| (StorageTier::Device, name))
    }

    /// Number of names that the cache groups hold.
    pub(super) fn group_names(&self) -> usize {
        self.groups.as_ref().map_or(0, |groups| groups.names())
    }

    /// Drops the names of cache groups that the device tier does not hold. Returns their number.
    pub(super) fn trim_groups(&mut self) -> usize {
        let before = self.group_names();
        self.groups.iter_mut().for_each(|groups| groups.keep_only(&self.device));
        before - self.group_names()
    }

    /// Number of held blocks in all tiers.
    pub(super) fn held_blocks(&self) -> usize {
        self.residences().map(|(_, residence)| residence.held_blocks()).sum()
    }

    /// Number of names and further copies, of held and pending blocks.
    pub(super) fn removable(&self) -> usize {
        let held = self.residences().map(|(_, residence)| residence.removable()).sum::<usize>();
        held + self.waiting().map_or(0, PendingBlocks::len)
    }

    /// Heap bytes owned, from running totals.
    pub(super) fn bytes(&self) -> usize {
        self.bytes_by(Residence::bytes)
    }

    /// Heap bytes owned, summed over every span.
    pub(super) fn bytes_visited(&self) -> usize {
        self.bytes_by(Residence::bytes_visited)
    }

    fn bytes_by(&self, bytes: impl Fn(&Residence) -> usize) -> usize {
        let lower = self.lower.as_ref().map_or(0, |lower| {
            size_of::<Lower>() + lower.residences.iter().map(&bytes).sum::<usize>() + lower.waiting.bytes()
        });
        let groups = self.groups.as_ref().map_or(0, |groups| groups.bytes());
        let doubts = self.doubts.as_ref().map_or(0, |doubts| doubts.bytes());
        bytes(&self.device) + lower + groups + doubts + self.proven.as_ref().map_or(0, |proven| proven.bytes())
    }

    fn lower_mut(&mut self, hasher: &RandomState) -> &mut Lower {
        self.lower.get_or_insert_with(|| {
            let tiers = [StorageTier::HostPinned, StorageTier::Disk, StorageTier::External];
            let residences = tiers.map(|tier| Residence::new(tier, hasher.clone()));
            Box::new(Lower { residences, waiting: PendingBlocks::new(hasher.clone()) })
        })
    }
}
