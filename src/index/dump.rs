//! Events that rebuild the index.
//!
//! Owns nothing. Promises that applying the dump, in order, to an index with the same ranks registered gives
//! one that answers and reacts alike; that parents come before children; and the same dump for the same index.

use std::collections::BTreeMap;

use super::rank::Rank;
use super::residence::Residence;
use super::tree::{Node, Point, ROOT, Tree};
use super::{EngineHash, Index};
use crate::protocol::{KvEvent, RouterEvent, Slot, StorageTier, StoredBlock};

impl Index {
    /// Events that rebuild an equal index, ranks in order and parents first. One store per run and rank;
    /// a hole is stored under a name that the rank does not use, and removed once what lies behind it stands.
    ///
    /// ```
    /// use pointsman::index::Index;
    ///
    /// assert!(Index::new().dump().is_empty());
    /// ```
    #[must_use]
    pub fn dump(&self) -> Vec<RouterEvent> {
        let mut events = Vec::new();
        for &slot in self.registry.values() {
            let rank = self.rank(slot);
            for (tier, residence) in rank.residences() {
                let tree = self.tree(tier).expect("a rank that holds blocks of a tier made its tree");
                Dump { slot, rank, tier, tree, residence, fillers: BTreeMap::new(), next_filler: 0 }.write(&mut events);
            }
            for ((tier, engine_hash), block) in rank.waiting().map(|waiting| waiting.sorted()).unwrap_or_default() {
                let blocks = vec![StoredBlock { engine_hash, block_hash: block.block_hash }];
                let data = KvEvent::Stored { parent: Some(block.parent), blocks };
                events.push(RouterEvent { rank: rank.id, tier, data });
            }
        }
        events
    }
}

/// The dump of one rank's residence in one tier.
struct Dump<'a> {
    slot: Slot,
    rank: &'a Rank,
    tier: StorageTier,
    tree: &'a Tree,
    residence: &'a Residence,
    /// The names that stand in for holes.
    fillers: BTreeMap<(u32, u32), EngineHash>,
    next_filler: u64,
}

/// A run of which some leading blocks are needed.
struct Needed {
    /// The rank's span on it, if it holds any of it.
    span: Option<u32>,
    /// Number of blocks needed: up to the last one held, or to where another needed run hangs.
    len: u32,
}

impl Dump<'_> {
    fn write(mut self, events: &mut Vec<RouterEvent>) {
        for ((_, id), needed) in self.needed() {
            let node = self.tree.node(id);
            let blocks = (0..needed.len).map(|offset| {
                let held = needed.span.map(|span| self.residence.span(span)).filter(|span| span.holds(offset));
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
            for &engine_hash in names {
                let parent = self.name_before(id, spot.offset);
                self.push(events, KvEvent::Stored { parent, blocks: vec![StoredBlock { engine_hash, block_hash }] });
            }
        }
        for (spot, engine_hash, further) in self.residence.copied() {
            let id = self.residence.span(spot.span).node;
            let block_hash = self.tree.node(id).run[spot.offset as usize];
            let parent = self.name_before(id, spot.offset);
            for _ in 0..further {
                self.push(events, KvEvent::Stored { parent, blocks: vec![StoredBlock { engine_hash, block_hash }] });
            }
        }
        if !self.fillers.is_empty() {
            self.push(events, KvEvent::Removed { blocks: self.fillers.values().copied().collect() });
        }
    }

    /// The runs that the rank holds blocks of and those on the way to them, by depth: parents first.
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
            let span = self.tree.span_of(at.node, self.slot).expect("a block that is no filler is held");
            Some(self.residence.span(span).name(offset))
        })
    }

    /// Names a hole: any name will do that stands for nothing else.
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

fn parent(node: &Node) -> Point {
    Point { node: node.parent, offset: node.attach }
}
