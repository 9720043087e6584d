//! Result of an index query: number of leading prompt blocks per rank.

use crate::protocol::{Generation, Slot, StorageTier};

/// Overlap of one rank in its device tier.
///
/// ```
/// use pointsman::internals::index::Hit;
/// use pointsman::internals::protocol::{Generation, Slot};
///
/// let hit = Hit { slot: Slot(3), generation: Generation(1), device_blocks: 12 };
/// assert!(hit.device_blocks > 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The rank's slot.
    pub slot: Slot,
    /// Generation of the slot at the time of the query.
    pub generation: Generation,
    /// Leading blocks in device memory; zero for a rank whose hit starts in a lower tier.
    pub device_blocks: u32,
}

/// Blocks by which the lower tiers extend a rank's hit, each from the end of the nearer tier.
///
/// ```
/// use pointsman::internals::index::Extension;
/// use pointsman::internals::protocol::Slot;
///
/// let extension = Extension { slot: Slot(3), host_pinned_blocks: 4, disk_blocks: 0, external_blocks: 1 };
/// assert_eq!(extension.blocks(), 5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// The rank's slot.
    pub slot: Slot,
    /// Blocks added by pinned host memory.
    pub host_pinned_blocks: u32,
    /// Blocks added by disk.
    pub disk_blocks: u32,
    /// Blocks added by the external store.
    pub external_blocks: u32,
}

impl Extension {
    /// Blocks added by all lower tiers.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.host_pinned_blocks + self.disk_blocks + self.external_blocks
    }

    pub(super) fn none(slot: Slot) -> Self {
        Self { slot, host_pinned_blocks: 0, disk_blocks: 0, external_blocks: 0 }
    }

    pub(super) fn add(&mut self, tier: StorageTier, blocks: u32) {
        match tier {
            StorageTier::Device => debug_assert_eq!(blocks, 0, "the device tier is no extension"),
            StorageTier::HostPinned => self.host_pinned_blocks += blocks,
            StorageTier::Disk => self.disk_blocks += blocks,
            StorageTier::External => self.external_blocks += blocks,
        }
    }
}

/// The ranks that hold leading blocks of one request, and the query buffers. Reuse one value for several queries.
///
/// ```
/// use pointsman::internals::index::{Index, Overlaps};
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
    /// Blocks reached so far, by slot. All zero between queries.
    pub(super) reached: Vec<u32>,
    /// Extensions in the order of discovery, before they are summed.
    pub(super) steps: Vec<(Slot, StorageTier, u32)>,
}

impl Overlaps {
    /// Every rank that holds at least one leading block, in slot order.
    #[must_use]
    pub fn hits(&self) -> &[Hit] {
        &self.hits
    }

    /// Extensions of the ranks in [`Overlaps::hits`] whose lower tiers extend the hit, in slot order.
    #[must_use]
    pub fn extensions(&self) -> &[Extension] {
        &self.extensions
    }

    /// Each hit with its extension; most extensions are zero.
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

    /// Clears the previous result and makes room for `slots` ranks.
    pub(super) fn reset(&mut self, slots: usize) {
        self.hits.clear();
        self.extensions.clear();
        self.steps.clear();
        debug_assert!(self.reached.iter().all(|&blocks| blocks == 0), "buffers are zero between queries");
        if self.reached.len() < slots {
            self.reached.resize(slots, 0);
        }
    }
}
