//! Index queries: the number of leading prompt blocks that each rank holds.
//!
//! Results are in slot order. A query costs one step per rank and run on the path of the prompt, independent of the
//! number of blocks in the runs.

use super::tree::RunNode;
use super::{BlockHash, Extension, Hit, Index, Overlaps};
use crate::protocol::StorageTier;

impl Index {
    /// Finds every rank that holds leading blocks of a prompt, and their number. Replaces the content of `overlaps`;
    /// allocates only until its buffers have grown.
    pub fn overlaps(&self, hashes: &[BlockHash], overlaps: &mut Overlaps) {
        self.reusable_overlaps(hashes, u32::MAX, overlaps);
    }

    /// Like [`Index::overlaps`], for an engine that reuses at most `reusable_blocks` of the prompt. Only ranks with cache
    /// groups consider it: their next shorter hit may be much shorter. With a budget that is half used, stamps the matched
    /// runs.
    pub fn reusable_overlaps(&self, hashes: &[BlockHash], reusable_blocks: u32, overlaps: &mut Overlaps) {
        match self.budget.as_ref().filter(|budget| budget.is_filling) {
            None => self.find_overlaps(hashes, reusable_blocks, overlaps, |_, _| {}),
            Some(budget) => {
                let now = budget.tick(self.runs());
                self.find_overlaps(hashes, reusable_blocks, overlaps, |node, blocks| _ = node.stamp(now, blocks));
            }
        }
    }

    /// Finds the overlaps. Calls `hit` with every matched run and the number of its blocks that agree with the prompt.
    fn find_overlaps(
        &self,
        hashes: &[BlockHash],
        reusable_blocks: u32,
        overlaps: &mut Overlaps,
        hit: impl Fn(&RunNode, u32),
    ) {
        overlaps.reset(self.ranks.len());
        self.match_device(hashes, overlaps, &hit);
        if !self.grouped.is_empty() {
            self.restrict(hashes, reusable_blocks, overlaps);
        }
        if self.lower.iter().any(Option::is_some) {
            for tier in [StorageTier::HostPinned, StorageTier::Disk, StorageTier::External] {
                self.extend(tier, hashes, overlaps, &hit);
            }
            self.sum_extensions(overlaps);
        }
        for hit in &overlaps.hits {
            overlaps.reached[hit.slot.index()] = 0;
        }
    }

    /// A rank takes part at a node if its reached depth equals the node's depth, so `reached` also serves as the set of
    /// active ranks.
    fn match_device(&self, hashes: &[BlockHash], overlaps: &mut Overlaps, hit: &impl Fn(&RunNode, u32)) {
        let Overlaps { hits, reached, .. } = overlaps;
        self.device.walk(hashes, |node, agree| {
            let (mut any_matched, mut any_complete) = (false, false);
            for holder in &node.holders {
                let reached = &mut reached[holder.slot.index()];
                if *reached != node.depth || holder.cut == 0 {
                    continue;
                }
                let blocks = holder.cut.min(agree);
                *reached += blocks;
                any_matched = true;
                any_complete |= blocks == agree;
                if node.depth == 0 {
                    let generation = self.generations[holder.slot.index()];
                    hits.push(Hit { slot: holder.slot, generation, device_blocks: 0 });
                }
            }
            if any_matched {
                hit(node, agree);
            }
            any_complete
        });
        for hit in hits {
            hit.device_blocks = reached[hit.slot.index()];
        }
    }

    /// Extends every rank by the blocks of `tier` from its reached depth. Follows the path to its end, because a rank
    /// with a deep hit in nearer tiers takes part only there.
    fn extend(&self, tier: StorageTier, hashes: &[BlockHash], overlaps: &mut Overlaps, hit: &impl Fn(&RunNode, u32)) {
        let Some(tree) = self.tree(tier) else { return };
        let Overlaps { reached, steps, .. } = overlaps;
        tree.walk(hashes, |node, agree| {
            let mut any_matched = false;
            for holder in &node.holders {
                let reached = &mut reached[holder.slot.index()];
                let offset = match reached.checked_sub(node.depth) {
                    Some(offset) if offset < agree.min(holder.extent) => offset,
                    Some(_) | None => continue,
                };
                let end = if offset < holder.cut {
                    Some(holder.cut)
                } else {
                    let residence =
                        self.rank(holder.slot).residence(tier).expect("a holder has a residence in its tier");
                    residence.span(holder.span).end_from(offset)
                };
                let Some(end) = end.map(|end| end.min(agree)) else { continue };
                *reached += end - offset;
                steps.push((holder.slot, tier, end - offset));
                any_matched = true;
            }
            if any_matched {
                hit(node, agree);
            }
            true
        });
    }

    /// Sums the extensions per rank, and adds the ranks without a hit in the device tier.
    fn sum_extensions(&self, overlaps: &mut Overlaps) {
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
