//! The answer to one request: which ranks hold how much of its prompt.

use crate::protocol::{EngineHash, Generation, Slot, StorageTier};

/// A rank that holds some leading blocks of a request.
///
/// ```
/// use pointsman::index::Hit;
/// use pointsman::protocol::{Generation, Slot};
///
/// let hit = Hit { slot: Slot(3), generation: Generation(1), device_blocks: 12 };
/// assert!(hit.device_blocks > 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The rank's slot.
    pub slot: Slot,
    /// Who sat in the slot when the question was answered.
    pub generation: Generation,
    /// Leading blocks held in device memory; zero for a rank whose hit starts in a lower tier.
    pub device_blocks: u32,
}

/// How much further the lower tiers of a rank carry its hit, each from where the one before ended.
///
/// ```
/// use pointsman::index::Extension;
/// use pointsman::protocol::Slot;
///
/// let extension = Extension { slot: Slot(3), host_pinned_blocks: 4, disk_blocks: 0, external_blocks: 1 };
/// assert_eq!(extension.blocks(), 5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// The rank's slot.
    pub slot: Slot,
    /// Blocks that only pinned host memory adds.
    pub host_pinned_blocks: u32,
    /// Blocks that only disk adds.
    pub disk_blocks: u32,
    /// Blocks that only the external store adds.
    pub external_blocks: u32,
}

impl Extension {
    /// Blocks that the lower tiers add together.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.host_pinned_blocks + self.disk_blocks + self.external_blocks
    }

    pub(super) fn none(slot: Slot) -> Self {
        Self { slot, host_pinned_blocks: 0, disk_blocks: 0, external_blocks: 0 }
    }

    pub(super) fn add(&mut self, tier: StorageTier, blocks: u32) {
        match tier {
            StorageTier::Device => debug_assert_eq!(blocks, 0, "the device tier extends nothing"),
            StorageTier::HostPinned => self.host_pinned_blocks += blocks,
            StorageTier::Disk => self.disk_blocks += blocks,
            StorageTier::External => self.external_blocks += blocks,
        }
    }
}

/// The ranks that hold leading blocks of one request, with the buffers to find them: keep it and ask again.
///
/// ```
/// use pointsman::index::{Index, Overlaps};
/// use pointsman::protocol::BlockHash;
///
/// let mut overlaps = Overlaps::default();
/// Index::new().overlaps(&[BlockHash(1)], &mut overlaps);
/// assert!(overlaps.hits().is_empty());
/// ```
#[derive(Debug, Default)]
pub struct Overlaps {
    pub(super) hits: Vec<Hit>,
    pub(super) extensions: Vec<Extension>,
    pub(super) last_matched: Vec<EngineHash>,
    /// Blocks reached so far, by slot. All zero between questions.
    pub(super) reached: Vec<u32>,
    /// Where each rank's hit ended, by slot. Means nothing for slots without a hit.
    pub(super) ends: Vec<End>,
    /// Extensions as they are found.
    pub(super) steps: Vec<(Slot, StorageTier, u32)>,
}

/// The last block of a rank's hit, as its residence numbers it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct End {
    pub(super) tier: StorageTier,
    pub(super) span: u32,
    pub(super) offset: u32,
}

impl Overlaps {
    /// Every rank that holds at least one leading block, in slot order.
    #[must_use]
    pub fn hits(&self) -> &[Hit] {
        &self.hits
    }

    /// The ranks among [`Overlaps::hits`] whose lower tiers carry the hit further, in slot order.
    #[must_use]
    pub fn extensions(&self) -> &[Extension] {
        &self.extensions
    }

    /// Per hit, the engine's name of the last block matched in any tier. Empty unless
    /// [`Index::overlaps_detailed`](super::Index::overlaps_detailed) was asked.
    #[must_use]
    pub fn last_matched(&self) -> &[EngineHash] {
        &self.last_matched
    }

    /// Each hit with its extension, which is all zero for most.
    pub fn iter(&self) -> impl Iterator<Item = (Hit, Extension)> + '_ {
        let mut rest = self.extensions.as_slice();
        self.hits.iter().map(move |&hit| match rest.split_first() {
            Some((extension, others)) if extension.slot == hit.slot => {
                rest = others;
                (hit, *extension)
            }
            Some(_) | None => (hit, Extension::none(hit.slot)),
        })
    }

    /// Forgets the last answer and makes room for `slots` ranks.
    pub(super) fn reset(&mut self, slots: usize) {
        self.hits.clear();
        self.extensions.clear();
        self.last_matched.clear();
        self.steps.clear();
        debug_assert!(self.reached.iter().all(|&blocks| blocks == 0), "buffers are left clean");
        if self.reached.len() < slots {
            self.reached.resize(slots, 0);
        }
    }
}
