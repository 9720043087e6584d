//! Dump of an index as a list of KV events.
//!
//! An index with the same ranks registered that applies the dump in order has the same overlaps and reacts equally to
//! further events. Parents come before children, and equal indexes have equal dumps. Proven blocks are left out.

use std::collections::BTreeMap;

use super::rank::RankBlocks;
use super::residence::Residence;
use super::tree::{Point, ROOT, RunNode, Tree};
use super::{EngineHash, Index};
use crate::protocol::{KvEvent, RouterEvent, Slot, StorageTier, StoredBlock, WorkerRank};

/// Contents of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankDump {
    /// The events of [`Index::dump`] for this rank.
    pub events: Vec<RouterEvent>,
    /// Blocks that a budget has evicted since the last clear: see [`Index::evicted_blocks_of`].
    pub evicted_blocks: u64,
}

impl Index {
    /// Events that rebuild an equal index: ranks in order, parents before children, one store per run and rank. A hole
    /// is stored under a filler name that the rank does not use, and removed after the blocks behind it are stored.
    ///
    /// ```
    /// use pointsman::internals::index::Index;
    ///
    /// assert!(Index::new().dump().is_empty());
    /// ```
    #[must_use]
    pub fn dump(&self) -> Vec<RouterEvent> {
        let mut events = Vec::new();
        for &slot in self.registry.values() {
            self.dump_slot(slot, &mut events);
        }
        events
    }

    /// The contents of one rank; `None` if it is not registered.
    #[must_use]
    pub fn dump_rank(&self, rank: WorkerRank) -> Option<RankDump> {
        let (slot, mut events) = (self.slot_of(rank)?, Vec::new());
        self.dump_slot(slot, &mut events);
        Some(RankDump { events, evicted_blocks: self.evicted_blocks_of(slot) })
    }

    fn dump_slot(&self, slot: Slot, events: &mut Vec<RouterEvent>) {
        let rank = self.rank(slot);
        for (tier, residence) in rank.residences() {
            let tree = self.tree(tier).expect("a rank that holds blocks of a tier made its tree");
            Dump { slot, rank, tier, tree, residence, fillers: BTreeMap::new(), next_filler: 0 }.write(events);
        }
        for ((tier, engine_hash), block) in rank.waiting().map(|waiting| waiting.sorted()).unwrap_or_default() {
            let blocks = vec![StoredBlock { engine_hash, block_hash: block.block_hash }];
            let data = KvEvent::Stored { parent: Some(block.parent), blocks };
            events.push(RouterEvent { rank: rank.id, tier, data });
        }
        let of_device = |data| RouterEvent { rank: rank.id, tier: StorageTier::Device, data };
        events.extend(rank.groups.iter().flat_map(|groups| groups.dump()).map(of_device));
    }
}

/// The dump of one rank's residence in one tier.
struct Dump<'a> {
    slot: Slot,
    rank: &'a RankBlocks,
    tier: StorageTier,
    tree: &'a Tree,
    residence: &'a Residence,
    /// Filler names of holes, by node and offset.
    fillers: BTreeMap<(u32, u32), EngineHash>,
    next_filler: u64,
}

/// A run with a number of leading blocks to dump.
struct Needed {
    /// The rank's span on the run, if it holds any block of it.
    span: Option<u32>,
    /// Number of blocks to dump: up to the last held block or to the attachment point of another dumped run.
    len: u32,
}

impl Dump<'_> {
    fn write(mut self, events: &mut Vec<RouterEvent>) {
        for ((_, id), needed) in self.needed() {
            let node = self.tree.node(id);
            let blocks = (0..needed.len).map(|offset| {
                let held = needed
                    .span
                    .map(|span| self.residence.span(span))
                    .filter(|span| span.holds(offset) && !self.rank.is_proven(self.tier, span.name(offset)));
                let engine_hash = match held {
                    Some(span) => span.name(offset),
                    None => self.fill(id, offset),
                };
                StoredBlock { engine_hash, block_hash: node.run[offset as usize] }
            });
            let blocks = blocks.collect();
            self.push(events, KvEvent::Stored { parent: self.name_before(id, 0), blocks });
        }
        for (spot, names) in self.residence.aliased() {
            let id = self.residence.span(spot.span).node;
            let block_hash = self.tree.node(id).run[spot.offset as usize];
            for engine_hash in names {
                let parent = self.name_before(id, spot.offset);
                self.push(events, KvEvent::Stored { parent, blocks: vec![StoredBlock { engine_hash, block_hash }] });
            }
        }
        let copied = |names: &[EngineHash]| KvEvent::Offloaded {
            parent: None,
            blocks: names.iter().map(|name| (*name, None)).collect(),
        };
        if let Some(copies) = self.residence.copies() {
            copies.names().chunks(1_024).for_each(|names| self.push(events, copied(names)));
            // In pieces, for which the rebuilt index counts copies within the limit.
            for names in copies.reduced().chunks(1_024) {
                self.push(events, copied(names));
                self.push(events, KvEvent::Removed { blocks: names.to_vec() });
            }
        }
        if !self.fillers.is_empty() {
            self.push(events, KvEvent::Removed { blocks: self.fillers.values().copied().collect() });
        }
    }

    /// The runs with held blocks and their ancestors, ordered by depth so that parents come first.
    fn needed(&self) -> BTreeMap<(u32, u32), Needed> {
        let mut needed: BTreeMap<(u32, u32), Needed> = BTreeMap::new();
        for (id, span) in self.residence.spans() {
            let depth = self.tree.node(span.node).depth;
            let run = needed.entry((depth, span.node)).or_insert(Needed { span: None, len: 0 });
            run.span = Some(id);
            run.len = run.len.max(span.extent());
            let mut at = parent(self.tree.node(span.node));
            while at.node != ROOT {
                let above = self.tree.node(at.node);
                let run = needed.entry((above.depth, at.node)).or_insert(Needed { span: None, len: 0 });
                if run.len >= at.offset {
                    break;
                }
                run.len = at.offset;
                at = parent(above);
            }
        }
        needed
    }

    /// The name of the block before the one at `offset` of a run; `None` at the start of a prompt.
    fn name_before(&self, id: u32, offset: u32) -> Option<EngineHash> {
        let at = if offset > 0 { Point { node: id, offset } } else { parent(self.tree.node(id)) };
        if at.node == ROOT {
            return None;
        }
        let offset = at.offset - 1;
        let filler = self.fillers.get(&(at.node, offset)).copied();
        filler.or_else(|| {
            let span = self.tree.span_of(at.node, self.slot).expect("a block without a filler name is held");
            Some(self.residence.span(span).name(offset))
        })
    }

    /// Creates a filler name for a hole: any name that the rank does not use.
    fn fill(&mut self, node: u32, offset: u32) -> EngineHash {
        loop {
            let name = EngineHash(self.next_filler);
            self.next_filler += 1;
            if self.rank.residences().all(|(_, residence)| residence.find(name).is_none()) {
                self.fillers.insert((node, offset), name);
                return name;
            }
        }
    }

    fn push(&self, events: &mut Vec<RouterEvent>, data: KvEvent) {
        events.push(RouterEvent { rank: self.rank.id, tier: self.tier, data });
    }
}

fn parent(node: &RunNode) -> Point {
    Point { node: node.parent, offset: node.attach }
}
