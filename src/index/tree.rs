//! The shape shared by all ranks of one tier: runs of block hashes, and how far each rank reaches into each.
//!
//! Owns nodes, each a run of consecutive block hashes behind some block of its parent's run, and per node the
//! ranks that hold blocks of it. Promises that every prefix has exactly one place: a child never begins with
//! the block that its parent's run continues with. A prompt that leaves a run in its middle hangs a child there
//! and does not split the run, because each holder says for itself how far it reaches; so a popular prefix
//! stays one run. What nobody holds and nothing hangs behind is given back at once, but for the
//! end of a run with many children. Leaves the holders' holes
//! and the engines' names of blocks to [`super::residence`].

use std::mem::size_of;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use ahash::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;

use super::arena::{Arena, give_back, make_room};
use super::steps;
use crate::protocol::{BlockHash, Slot};

/// The node of the empty prefix: no run, no holders, never freed.
pub(super) const ROOT: u32 = 0;
/// Most blocks of one run; a longer prompt goes on in a child. A million, so that an offset leaves room for other
/// bits beside it.
pub(super) const RUN_BLOCKS_MAX: u32 = 1 << 20;
/// What part of a node's children may leave before its last child is looked for again: looking for it visits them all.
const LOOK_SHARE: usize = 8;
/// No node.
const NONE: u32 = u32::MAX;

/// A place between blocks: behind the first `offset` blocks of a node's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) node: u32,
    pub(super) offset: u32,
}

impl Point {
    /// Where every prompt starts.
    pub(super) const START: Self = Self { node: ROOT, offset: 0 };
}

/// One rank's reach into a run, as its span has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    /// The rank.
    pub(super) slot: Slot,
    /// Its span of this run.
    pub(super) span: u32,
    /// Number of leading blocks of the run that it holds.
    pub(super) cut: u32,
    /// One past the last block of the run that it holds; greater than `cut` only when it has a hole.
    pub(super) extent: u32,
}

/// A run and where it hangs.
#[derive(Debug)]
pub(super) struct Node {
    /// The node whose run this one continues.
    pub(super) parent: u32,
    /// How many blocks of the parent's run come before this one.
    pub(super) attach: u32,
    /// How many blocks of a prompt come before this run.
    pub(super) depth: u32,
    /// No child hangs further back than this. May be too high after a child left.
    attach_max: u32,
    first_child: u32,
    next: u32,
    previous: u32,
    /// The blocks. Empty in the root and in vacant entries only.
    pub(super) run: Vec<BlockHash>,
    /// Who holds blocks of the run, by slot.
    pub(super) holders: SmallVec<[Holder; 1]>,
    /// When a question or a store last came to the run, and when one last came further than every child hangs.
    /// Kept under a budget only, in what would be padding; atomic because a question changes nothing else.
    hit_at: AtomicU16,
    end_hit_at: AtomicU16,
    /// How often the run need not be trimmed to its last child before that is looked for again.
    trims_left: u16,
    /// Whether the run may be longer than needed since.
    is_untrimmed: bool,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            parent: NONE,
            attach: 0,
            depth: 0,
            attach_max: 0,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            run: Vec::new(),
            holders: SmallVec::new(),
            hit_at: AtomicU16::new(0),
            end_hit_at: AtomicU16::new(0),
            trims_left: 0,
            is_untrimmed: false,
        }
    }
}

/// Nodes that have another number now: old and new, in order of the old ones.
pub(super) struct Moved(Vec<(u32, u32)>);

impl Moved {
    /// The number of the node that was `id`.
    pub(super) fn of(&self, id: u32) -> u32 {
        self.0.binary_search_by_key(&id, |(old, _)| *old).map_or(id, |at| self.0[at].1)
    }
}

/// The runs of one tier.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Arena<Node>,
    /// Every node but the root, by where it hangs and its first block. Keys are read through the nodes.
    children: HashTable<u32>,
    /// Heap bytes that the nodes own.
    owned: usize,
    /// The stamp of new runs.
    pub(super) now: u16,
    hasher: RandomState,
}

impl Tree {
    pub(super) fn new(hasher: RandomState) -> Self {
        let mut nodes = Arena::new();
        let root = nodes.insert(Node::default());
        debug_assert_eq!(root, ROOT, "the root comes first");
        Self { nodes, children: HashTable::new(), owned: 0, now: 0, hasher }
    }

    pub(super) fn node(&self, id: u32) -> &Node {
        &self.nodes[id]
    }

    /// The span of `slot` on a node's run.
    pub(super) fn span_of(&self, node: u32, slot: Slot) -> Option<u32> {
        let holders = &self.nodes[node].holders;
        holders.binary_search_by_key(&slot, |holder| holder.slot).ok().map(|at| holders[at].span)
    }

    /// Shows `visit` each node on the way of `hashes`, with the number of blocks of its run that agree, until
    /// the way ends or `visit` says no.
    pub(super) fn walk(&self, hashes: &[BlockHash], mut visit: impl FnMut(&Node, u32) -> bool) {
        let (mut at, mut rest) = (Point::START, hashes);
        while let Some(&first) = rest.first() {
            let Some(id) = self.child(at, first) else { return };
            let node = &self.nodes[id];
            let agree = common_blocks(&node.run, rest);
            let offset = agree as u32;
            if !visit(node, offset) {
                return;
            }
            (at, rest) = (Point { node: id, offset }, &rest[agree..]);
        }
    }

    /// Makes the tree continue at `at` with the first blocks of `next`. Returns where they lie and how many of
    /// them lie there in one piece: at least one when `next` is not empty. The caller holds at least one of
    /// them, or calls again for what follows and holds something there.
    pub(super) fn grow(&mut self, at: Point, next: impl ExactSizeIterator<Item = BlockHash> + Clone) -> (Point, u32) {
        let Some(first) = next.clone().next() else { return (at, 0) };
        let run = &self.nodes[at.node].run;
        if run.get(at.offset as usize) == Some(&first) {
            return (at, agreeing(&run[at.offset as usize..], next));
        }
        if let Some(child) = self.child(at, first) {
            return (Point { node: child, offset: 0 }, agreeing(&self.nodes[child].run, next));
        }
        if at.node != ROOT && at.offset as usize == run.len() && at.offset < RUN_BLOCKS_MAX {
            let len = next.len().min((RUN_BLOCKS_MAX - at.offset) as usize);
            let run = &mut self.nodes[at.node].run;
            let before = run.capacity();
            make_room(run, len);
            self.owned += (run.capacity() - before) * size_of::<BlockHash>();
            run.extend(next.take(len));
            return (at, len as u32);
        }
        let len = next.len().min(RUN_BLOCKS_MAX as usize);
        (Point { node: self.hang(at, next.take(len).collect()), offset: 0 }, len as u32)
    }

    /// Records a rank's reach into a run; an `extent` of zero removes it. Gives back what nobody needs now.
    pub(super) fn publish(&mut self, id: u32, holder: Holder) {
        debug_assert!(holder.cut <= holder.extent, "the leading blocks are among the held ones");
        let node = &mut self.nodes[id];
        match node.holders.binary_search_by_key(&holder.slot, |holder| holder.slot) {
            Ok(at) if holder.extent == 0 => {
                let before = node.spilled();
                node.holders.remove(at);
                if node.holders.capacity() > 4 * node.holders.len().max(1) {
                    node.holders.shrink_to_fit();
                }
                self.owned -= before - node.spilled();
                self.collapse(id);
            }
            Ok(at) => {
                let before = std::mem::replace(&mut node.holders[at], holder).extent;
                if holder.extent < before && before as usize == node.run.len() {
                    self.trim(id);
                }
            }
            Err(_) if holder.extent == 0 => self.collapse(id),
            Err(at) => {
                let before = node.spilled();
                node.holders.insert(at, holder);
                self.owned += node.spilled() - before;
            }
        }
    }

    /// The block hashes of a prompt up to `at`.
    pub(super) fn path(&self, at: Point) -> Vec<BlockHash> {
        let Point { mut node, mut offset } = at;
        let mut path = vec![BlockHash::default(); (self.nodes[node].depth + offset) as usize];
        while node != ROOT {
            let Node { parent, attach, depth, run, .. } = &self.nodes[node];
            let (start, len) = (*depth as usize, offset as usize);
            path[start..start + len].copy_from_slice(&run[..len]);
            (node, offset) = (*parent, *attach);
        }
        path
    }

    /// Number of nodes, the root not counted.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - 1
    }

    /// Every node with its number, the root and vacant entries not included.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Node)> {
        self.nodes.iter().filter(|(_, node)| !node.run.is_empty())
    }

    /// Heap bytes owned, as counted whenever they changed.
    pub(super) fn bytes(&self) -> usize {
        self.nodes.bytes() + self.children.allocation_size() + self.owned
    }

    /// Heap bytes owned, looked up in every node.
    pub(super) fn bytes_visited(&self) -> usize {
        let owned = self.nodes.iter().map(|(_, node)| node.owned());
        self.nodes.bytes() + self.children.allocation_size() + owned.sum::<usize>()
    }

    /// Heap bytes that the next new run adds beside its blocks: none while there is a place for it.
    pub(super) fn growth(&self) -> usize {
        let children =
            if self.children.len() == self.children.capacity() { self.children.allocation_size() } else { 0 };
        self.nodes.growth() + children
    }

    /// Moves nodes into the places of those that are gone, if these are many, and gives the room behind them back.
    /// Returns which have another number now.
    pub(super) fn compact(&mut self) -> Option<Moved> {
        if self.nodes.vacant() <= self.nodes.len() / 2 + 64 {
            return None;
        }
        let mut moved = Moved(Vec::new());
        self.nodes.compact(|old, new| moved.0.push((old, new)));
        for node in self.nodes.iter_mut() {
            for id in [&mut node.parent, &mut node.first_child, &mut node.next, &mut node.previous] {
                *id = moved.of(*id);
            }
        }
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        let mut children = HashTable::with_capacity(nodes.len());
        for (id, node) in nodes.iter().skip(1) {
            children.insert_unique(node.hash(hasher), id, |&id| nodes[id].hash(hasher));
        }
        self.children = children;
        Some(moved)
    }

    /// Stamps the run that `at` lies on, up to there, and those on the way to it.
    pub(super) fn stamp_path(&self, at: Point, now: u16) {
        let Point { mut node, mut offset } = at;
        while node != ROOT {
            let above = &self.nodes[node];
            above.stamp(now, offset);
            (node, offset) = (above.parent, above.attach);
        }
    }

    /// Halves every stamp, which leaves their order.
    pub(super) fn halve_stamps(&mut self) {
        for (_, node) in self.nodes.iter() {
            node.hit_at.store(node.hit_at.load(Relaxed) / 2, Relaxed);
            node.end_hit_at.store(node.end_hit_at.load(Relaxed) / 2, Relaxed);
        }
        self.now /= 2;
    }

    fn child(&self, at: Point, first: BlockHash) -> Option<u32> {
        self.children.find(self.hash(at, first), |&id| self.nodes[id].hangs(at, first)).copied()
    }

    fn hash(&self, at: Point, first: BlockHash) -> u64 {
        hash_of(&self.hasher, at, first)
    }

    /// Adds a child with the given run at `at`.
    fn hang(&mut self, at: Point, run: Vec<BlockHash>) -> u32 {
        let (first, Point { node: parent, offset: attach }) = (run[0], at);
        let next = self.nodes[parent].first_child;
        let depth = self.nodes[parent].depth + attach;
        self.owned += run.capacity() * size_of::<BlockHash>();
        let (hit_at, end_hit_at) = (AtomicU16::new(self.now), AtomicU16::new(self.now));
        let id = self.nodes.insert(Node { parent, attach, depth, next, run, hit_at, end_hit_at, ..Node::default() });
        if next != NONE {
            self.nodes[next].previous = id;
        }
        let above = &mut self.nodes[parent];
        above.first_child = id;
        above.attach_max = above.attach_max.max(attach);
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        match self.children.entry(hash_of(hasher, at, first), |_| false, |&id| nodes[id].hash(hasher)) {
            Entry::Occupied(_) => unreachable!("nothing equals a child that was just looked up in vain"),
            Entry::Vacant(entry) => drop(entry.insert(id)),
        }
        id
    }

    /// Frees `id` if nobody holds it and nothing hangs on it, and then what that leaves behind further up.
    fn collapse(&mut self, mut id: u32) {
        while id != ROOT {
            let node = &self.nodes[id];
            if !node.holders.is_empty() || node.first_child != NONE {
                return self.trim(id);
            }
            let Point { node: parent, offset: attach } = Point { node: node.parent, offset: node.attach };
            self.unlink(id);
            self.owned -= self.nodes[id].owned();
            self.nodes.remove(id);
            let above = &self.nodes[parent];
            let in_use = !above.holders.is_empty() || above.first_child != NONE;
            if in_use && (attach as usize) < above.run.len() && !above.is_untrimmed {
                return; // the run's end was not this child's doing
            }
            id = parent;
        }
        if self.len() == 0 {
            // Room for many nodes is not kept for none.
            *self = Self { now: self.now, ..Self::new(self.hasher.clone()) };
        }
    }

    fn unlink(&mut self, id: u32) {
        let node = &self.nodes[id];
        let (hash, parent, next, previous) = (node.hash(&self.hasher), node.parent, node.next, node.previous);
        let entry = self.children.find_entry(hash, |&other| other == id).expect("every node but the root is a child");
        entry.remove();
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        if self.children.capacity() > 64 && self.children.len() < self.children.capacity() / 4 {
            self.children.shrink_to(self.children.len() * 2, |&id| nodes[id].hash(hasher));
        }
        if next != NONE {
            self.nodes[next].previous = previous;
        }
        if previous == NONE {
            self.nodes[parent].first_child = next;
        } else {
            self.nodes[previous].next = next;
        }
    }

    /// Cuts off the end of a run that nobody holds and nothing hangs behind. Of a node with many children it does so
    /// once for every few of them that leave, so that a child costs the same however many there are.
    fn trim(&mut self, id: u32) {
        let node = &self.nodes[id];
        let len = node.run.len() as u32;
        let mut keep = node.holders.iter().map(|holder| holder.extent).max().unwrap_or(0);
        if keep < len && keep < node.attach_max {
            let node = &mut self.nodes[id];
            if node.trims_left > 0 {
                (node.trims_left, node.is_untrimmed) = (node.trims_left - 1, true);
                return;
            }
            let (attach_max, children) = self.attach_max(id);
            let node = &mut self.nodes[id];
            node.attach_max = attach_max;
            node.trims_left = u16::try_from(children / LOOK_SHARE).unwrap_or(u16::MAX);
            keep = keep.max(attach_max);
        }
        self.nodes[id].is_untrimmed = false;
        debug_assert!(keep > 0 || id == ROOT, "a node without holders and children is freed, not trimmed");
        let run = &mut self.nodes[id].run;
        let before = run.capacity();
        run.truncate(keep as usize);
        give_back(run);
        self.owned -= (before - run.capacity()) * size_of::<BlockHash>();
    }

    /// How far back the last child of `id` hangs, and how many children were looked at.
    fn attach_max(&self, id: u32) -> (u32, usize) {
        let len = self.nodes[id].run.len() as u32;
        let (mut max, mut child, mut children) = (0, self.nodes[id].first_child, 0);
        while child != NONE && max < len {
            max = max.max(self.nodes[child].attach);
            child = self.nodes[child].next;
            children += 1;
        }
        steps::add(children);
        (max, children)
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        assert_eq!(self.children.len(), self.len(), "every node but the root is a child");
        assert_eq!(self.bytes(), self.bytes_visited(), "no byte is missed");
        assert!(self.nodes[ROOT].run.is_empty() && self.nodes[ROOT].holders.is_empty(), "the root is bare");
        self.check_children(ROOT);
        for (id, node) in self.iter() {
            let above = &self.nodes[node.parent];
            let at = Point { node: node.parent, offset: node.attach };
            assert!(node.parent == ROOT || !above.run.is_empty(), "no parent is vacant");
            assert!(node.attach <= above.attach_max && node.attach as usize <= above.run.len(), "hangs on its parent");
            assert!(node.parent == ROOT || node.attach > 0, "a child follows some block of its parent");
            assert_eq!(node.depth, above.depth + node.attach, "depth adds up");
            assert_eq!(self.child(at, node.run[0]), Some(id), "a child is found by its first block");
            assert_ne!(above.run.get(node.attach as usize), Some(&node.run[0]), "each prefix has one place");
            assert!(node.run.len() <= RUN_BLOCKS_MAX as usize, "no run is too long");
            assert!(node.holders.is_sorted_by(|a, b| a.slot < b.slot), "one holder a slot, in order");
            assert!(node.holders.iter().all(|holder| holder.cut <= holder.extent && holder.extent > 0));
            let held = node.holders.iter().map(|holder| holder.extent).max().unwrap_or(0);
            let (needed, len) = (held.max(self.attach_max(id).0), node.run.len() as u32);
            assert!(len == needed || node.is_untrimmed && len > needed, "no run is longer than needed");
            self.check_children(id);
        }
    }

    fn check_children(&self, id: u32) {
        let (mut previous, mut child) = (NONE, self.nodes[id].first_child);
        while child != NONE {
            assert_eq!((self.nodes[child].parent, self.nodes[child].previous), (id, previous), "siblings are linked");
            (previous, child) = (child, self.nodes[child].next);
        }
    }
}

impl Node {
    /// Remembers that `blocks` leading blocks of the run were asked for or stored.
    pub(super) fn stamp(&self, now: u16, blocks: u32) {
        self.hit_at.store(now, Relaxed);
        if blocks > self.attach_max {
            self.end_hit_at.store(now, Relaxed);
        }
    }

    /// The last stamps of the run, of what lies before its last child and of what lies behind, and where that is.
    pub(super) fn stamps(&self) -> (u16, u16, u32) {
        (self.hit_at.load(Relaxed), self.end_hit_at.load(Relaxed), self.attach_max)
    }

    fn spilled(&self) -> usize {
        if self.holders.spilled() { self.holders.capacity() * size_of::<Holder>() } else { 0 }
    }

    /// Heap bytes owned.
    fn owned(&self) -> usize {
        self.run.capacity() * size_of::<BlockHash>() + self.spilled()
    }

    fn hangs(&self, at: Point, first: BlockHash) -> bool {
        self.parent == at.node && self.attach == at.offset && self.run[0] == first
    }

    fn hash(&self, hasher: &RandomState) -> u64 {
        hash_of(hasher, Point { node: self.parent, offset: self.attach }, self.run[0])
    }
}

fn hash_of(hasher: &RandomState, at: Point, first: BlockHash) -> u64 {
    hasher.hash_one((u64::from(at.node) << 32 | u64::from(at.offset), first))
}

/// Number of leading blocks in which two lists agree. Whole chunks first, which compare as wide as the machine
/// can.
pub(crate) fn common_blocks(a: &[BlockHash], b: &[BlockHash]) -> usize {
    const CHUNK: usize = 16;
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let chunks = a.chunks_exact(CHUNK).zip(b.chunks_exact(CHUNK)).take_while(|(a, b)| a == b).count();
    let start = chunks * CHUNK;
    start + a[start..].iter().zip(&b[start..]).take_while(|(a, b)| a == b).count()
}

fn agreeing(run: &[BlockHash], next: impl Iterator<Item = BlockHash>) -> u32 {
    run.iter().zip(next).take_while(|(ours, theirs)| *ours == theirs).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps for children that hang at each block of a run, and leave, the last one first.
    fn cost_of_leaving(children: u32) -> usize {
        let holder = |extent| Holder { slot: Slot(0), span: 0, cut: extent, extent };
        let mut tree = Tree::new(RandomState::new());
        let (start, _) = tree.grow(Point::START, (0..children + 1).map(|n| BlockHash(n.into())));
        tree.publish(start.node, holder(children + 1));
        let hang = |attach| {
            let at = Point { node: start.node, offset: attach };
            let (child, _) = tree.grow(at, std::iter::once(BlockHash(u64::MAX)));
            tree.publish(child.node, holder(1));
            child.node
        };
        let tails: Vec<u32> = (1..=children).map(hang).collect();
        tree.publish(start.node, holder(0));
        tree.check_invariants();
        let begun = steps::count();
        for (left, tail) in tails.iter().enumerate().rev() {
            tree.publish(*tail, holder(0));
            let run = if left > 0 { tree.node(start.node).run.len() } else { 0 };
            assert!(run <= left + 2 * left / LOOK_SHARE + 1, "{run} blocks for {left} children");
        }
        assert_eq!(tree.len(), 0, "nothing is left behind");
        steps::count() - begun
    }

    #[test]
    fn a_child_that_leaves_costs_no_more_where_there_are_many() {
        let (small, large) = (cost_of_leaving(1_000), cost_of_leaving(16_000));
        assert!(large <= 20 * small, "{small} steps, for sixteen times as many {large}");
    }
}
