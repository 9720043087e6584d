//! Answering: how many leading blocks of a request each rank holds.
//!
//! Owns nothing. Promises slot order, and that a question costs one step per rank and run on the request's way,
//! whatever the number of blocks in the runs.

use std::mem::take;

use super::overlaps::End;
use super::tree::Node;
use super::{BlockHash, Extension, Hit, Index, Overlaps};
use crate::protocol::{Slot, StorageTier};

impl Index {
    /// Finds every rank that holds leading blocks of a prompt, and how many. Replaces what `overlaps` held;
    /// allocates only until its buffers have grown.
    pub fn overlaps(&self, hashes: &[BlockHash], overlaps: &mut Overlaps) {
        self.gather(hashes, overlaps, |_, _| {});
    }

    /// Like [`Index::overlaps`], and tells each rank's last matched engine hash. Costs about a cache miss more
    /// per rank.
    pub fn overlaps_detailed(&self, hashes: &[BlockHash], overlaps: &mut Overlaps) {
        let mut ends = take(&mut overlaps.ends);
        ends.resize(ends.len().max(self.ranks.len()), End::default());
        self.gather(hashes, overlaps, |slot, end| ends[slot.index()] = end);
        let name = |hit: &Hit| {
            let End { tier, span, offset } = ends[hit.slot.index()];
            let residence = self.rank(hit.slot).residence(tier).expect("the hit ended in this tier");
            residence.span(span).name(offset)
        };
        overlaps.last_matched.extend(overlaps.hits.iter().map(name));
        overlaps.ends = ends;
    }

    /// Finds the overlaps, and tells `note` of every block at which a rank's hit may end; the last word counts.
    /// Under a budget, runs that were of use are stamped.
    fn gather(&self, hashes: &[BlockHash], overlaps: &mut Overlaps, note: impl FnMut(Slot, End)) {
        match &self.budget {
            None => self.gather_and(hashes, overlaps, note, |_, _| {}),
            Some(budget) => {
                let now = budget.tick(self.runs());
                self.gather_and(hashes, overlaps, note, |node, blocks| node.stamp(now, blocks));
            }
        }
    }

    /// Finds the overlaps, and tells `hit` of every run that some rank's is on, with the blocks that agree.
    fn gather_and(
        &self,
        hashes: &[BlockHash],
        overlaps: &mut Overlaps,
        mut note: impl FnMut(Slot, End),
        hit: impl Fn(&Node, u32),
    ) {
        overlaps.reset(self.ranks.len());
        self.match_device(hashes, overlaps, &mut note, &hit);
        if self.lower.iter().any(Option::is_some) {
            for tier in [StorageTier::HostPinned, StorageTier::Disk, StorageTier::External] {
                self.extend(tier, hashes, overlaps, &mut note, &hit);
            }
            self.settle_extensions(overlaps);
        }
        for hit in &overlaps.hits {
            overlaps.reached[hit.slot.index()] = 0;
        }
    }

    /// A rank is in the running at a node while it has reached exactly the node's depth: what it has reached
    /// serves as the set of those still in it.
    fn match_device(
        &self,
        hashes: &[BlockHash],
        overlaps: &mut Overlaps,
        note: &mut impl FnMut(Slot, End),
        hit: &impl Fn(&Node, u32),
    ) {
        let Overlaps { hits, reached, .. } = overlaps;
        self.device.walk(hashes, |node, agree| {
            let (mut anyone, mut anyone_left) = (false, false);
            for holder in &node.holders {
                let reached = &mut reached[holder.slot.index()];
                if *reached != node.depth || holder.cut == 0 {
                    continue;
                }
                let blocks = holder.cut.min(agree);
                *reached += blocks;
                anyone = true;
                anyone_left |= blocks == agree;
                note(holder.slot, End { tier: StorageTier::Device, span: holder.span, offset: blocks - 1 });
                if node.depth == 0 {
                    let generation = self.generations[holder.slot.index()];
                    hits.push(Hit { slot: holder.slot, generation, device_blocks: 0 });
                }
            }
            if anyone {
                hit(node, agree);
            }
            anyone_left
        });
        for hit in hits {
            hit.device_blocks = reached[hit.slot.index()];
        }
    }

    /// Carries every rank further by what `tier` holds from where the rank got to. Follows the way to its end:
    /// a rank that got far by nearer tiers joins in only there.
    fn extend(
        &self,
        tier: StorageTier,
        hashes: &[BlockHash],
        overlaps: &mut Overlaps,
        note: &mut impl FnMut(Slot, End),
        hit: &impl Fn(&Node, u32),
    ) {
        let Some(tree) = self.tree(tier) else { return };
        let Overlaps { reached, steps, .. } = overlaps;
        tree.walk(hashes, |node, agree| {
            let mut anyone = false;
            for holder in &node.holders {
                let reached = &mut reached[holder.slot.index()];
                let offset = match reached.checked_sub(node.depth) {
                    Some(offset) if offset < agree.min(holder.extent) => offset,
                    Some(_) | None => continue,
                };
                let end = if offset < holder.cut {
                    Some(holder.cut)
                } else {
                    let residence = self.rank(holder.slot).residence(tier).expect("a holder uses the tier");
                    residence.span(holder.span).end_from(offset)
                };
                let Some(end) = end.map(|end| end.min(agree)) else { continue };
                *reached += end - offset;
                steps.push((holder.slot, tier, end - offset));
                anyone = true;
                note(holder.slot, End { tier, span: holder.span, offset: end - 1 });
            }
            if anyone {
                hit(node, agree);
            }
            true
        });
    }

    /// Sums the steps up per rank, and lists those ranks that the device tier alone did not hit.
    fn settle_extensions(&self, overlaps: &mut Overlaps) {
        let Overlaps { hits, extensions, steps, .. } = overlaps;
        steps.sort_unstable_by_key(|(slot, ..)| *slot);
        let by_device = hits.len();
        for of_slot in steps.chunk_by(|a, b| a.0 == b.0) {
            let slot = of_slot[0].0;
            let mut extension = Extension::none(slot);
            for &(_, tier, blocks) in of_slot {
                extension.add(tier, blocks);
            }
            extensions.push(extension);
            if hits[..by_device].binary_search_by_key(&slot, |hit| hit.slot).is_err() {
                hits.push(Hit { slot, generation: self.generations[slot.index()], device_blocks: 0 });
            }
        }
        if hits.len() > by_device {
            hits.sort_unstable_by_key(|hit| hit.slot);
        }
    }
}
