//! Prefix tree of one tier, shared by all ranks.
//!
//! Each node has a run of consecutive block hashes, attached behind a block of its parent's run, and the ranks that
//! hold blocks of the run. Every prefix has exactly one position: a child never starts with the block that continues
//! its parent's run. A prompt that leaves a run in the middle adds a child there and does not split the run, because
//! each holder records its own extent. A popular prefix therefore remains one run. Blocks without holders and children
//! are freed immediately, except the end of a run with many children. [`super::residence`] holds the holes of holders
//! and the names of blocks.

use std::mem::size_of;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use ahash::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;

use super::arena::{Arena, give_back, make_room};
use super::steps;
use crate::protocol::{BlockHash, Slot};

/// RunNode of the empty prefix: no run, no holders, never freed.
pub(super) const ROOT: u32 = 0;
/// Maximum number of blocks of a run; a longer prompt continues in a child. Bounds the work on the bits of a span, whose
/// number is that of the run's blocks.
pub(super) const RUN_BLOCKS_MAX: u32 = 1 << 14;
/// Fraction of a node's children that may be removed before its last child is determined again by a scan of all
/// children.
const RESCAN_SHARE: usize = 8;
/// Null node number.
const NONE: u32 = u32::MAX;

/// Position between blocks: behind the first `offset` blocks of a node's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) node: u32,
    pub(super) offset: u32,
}

impl Point {
    /// Start of every prompt.
    pub(super) const START: Self = Self { node: ROOT, offset: 0 };
}

/// The blocks of a run that one rank holds, as recorded in its span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    /// The rank.
    pub(super) slot: Slot,
    /// The rank's span on this run.
    pub(super) span: u32,
    /// Number of held leading blocks of the run.
    pub(super) cut: u32,
    /// One past the last held block of the run; greater than `cut` only if there is a hole.
    pub(super) extent: u32,
}

/// A run and its position in the tree.
#[derive(Debug)]
pub(super) struct RunNode {
    /// The node whose run this run continues.
    pub(super) parent: u32,
    /// Number of blocks of the parent's run before this run.
    pub(super) attach: u32,
    /// Number of prompt blocks before this run.
    pub(super) depth: u32,
    /// Upper bound of `attach` of all children. May be too high after the removal of a child.
    attach_max: u32,
    first_child: u32,
    next: u32,
    previous: u32,
    /// The blocks. Empty only in the root and in vacant entries.
    pub(super) run: Vec<BlockHash>,
    /// The ranks that hold blocks of the run, by slot.
    pub(super) holders: SmallVec<[Holder; 1]>,
    /// Stamps of the last query or store that reached the run, and of the last one that passed all children. Maintained
    /// only with a budget, in bytes that would be padding; atomic because a query has only shared access.
    hit_at: AtomicU16,
    end_hit_at: AtomicU16,
    /// Number of trims to skip until the last child is determined again.
    trims_left: u16,
    /// Whether the run may be longer than needed because of skipped trims.
    is_untrimmed: bool,
}

impl Default for RunNode {
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

/// Renumbered nodes as pairs of old and new number, ordered by old number.
pub(super) struct Moved(Vec<(u32, u32)>);

impl Moved {
    /// Current number of the node that had number `id`.
    pub(super) fn of(&self, id: u32) -> u32 {
        self.0.binary_search_by_key(&id, |(old, _)| *old).map_or(id, |at| self.0[at].1)
    }
}

/// The runs of one tier.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Arena<RunNode>,
    /// Every node except the root, by position and first block. Keys are read through the nodes.
    children: HashTable<u32>,
    /// Heap bytes owned by the nodes.
    owned: usize,
    /// Stamp for new runs.
    pub(super) now: u16,
    hasher: RandomState,
}

impl Tree {
    pub(super) fn new(hasher: RandomState) -> Self {
        let mut nodes = Arena::new();
        let root = nodes.insert(RunNode::default());
        debug_assert_eq!(root, ROOT, "the root is node 0");
        Self { nodes, children: HashTable::new(), owned: 0, now: 0, hasher }
    }

    pub(super) fn node(&self, id: u32) -> &RunNode {
        &self.nodes[id]
    }

    /// The span of `slot` on a node's run.
    pub(super) fn span_of(&self, node: u32, slot: Slot) -> Option<u32> {
        let holders = &self.nodes[node].holders;
        holders.binary_search_by_key(&slot, |holder| holder.slot).ok().map(|at| holders[at].span)
    }

    /// Calls `visit` with each node on the path of `hashes` and the number of agreeing blocks of its run, until the
    /// path ends or `visit` returns false.
    pub(super) fn walk<'a>(&'a self, hashes: &[BlockHash], mut visit: impl FnMut(&'a RunNode, u32) -> bool) {
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

    /// Extends the tree at `at` by the first blocks of `next`. Returns the position of these blocks and their number in
    /// one stretch: at least one if `next` is not empty. The caller must hold one of these blocks, or call again for
    /// the following blocks and hold one of those.
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

    /// The position behind a path from the start. Adds the missing blocks of the path; the caller must then hold a block at
    /// this position.
    pub(super) fn grow_path(&mut self, path: &[BlockHash]) -> Point {
        let (mut at, mut rest) = (Point::START, path);
        while let Some(&first) = rest.first()
            && let Some(child) = self.child(at, first)
        {
            let agree = common_blocks(&self.nodes[child].run, rest);
            (at, rest) = (Point { node: child, offset: agree as u32 }, &rest[agree..]);
        }
        while !rest.is_empty() {
            let (start, len) = self.grow(at, rest.iter().copied());
            at = Point { node: start.node, offset: start.offset + len };
            rest = &rest[len as usize..];
        }
        at
    }

    /// Records a rank's holder of a run; an `extent` of zero removes it. Frees blocks that are no longer needed.
    pub(super) fn publish(&mut self, id: u32, holder: Holder) {
        debug_assert!(holder.cut <= holder.extent, "`cut` is at most `extent`");
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

    /// Block hashes of a prompt up to `at`.
    pub(super) fn path(&self, at: Point) -> Vec<BlockHash> {
        let Point { mut node, mut offset } = at;
        let mut path = vec![BlockHash::default(); (self.nodes[node].depth + offset) as usize];
        while node != ROOT {
            let RunNode { parent, attach, depth, run, .. } = &self.nodes[node];
            let (start, len) = (*depth as usize, offset as usize);
            path[start..start + len].copy_from_slice(&run[..len]);
            (node, offset) = (*parent, *attach);
        }
        path
    }

    /// The position before the last block of the path to `at`, and that block. `at` is behind a block.
    pub(super) fn step_back(&self, at: Point) -> (Point, BlockHash) {
        let node = &self.nodes[at.node];
        let offset = at.offset - 1;
        let before =
            if offset > 0 { Point { node: at.node, offset } } else { Point { node: node.parent, offset: node.attach } };
        (before, node.run[offset as usize])
    }

    /// Number of nodes without the root.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - 1
    }

    /// Every node with its number, without the root and vacant entries.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &RunNode)> {
        self.nodes.iter().filter(|(_, node)| !node.run.is_empty())
    }

    /// Heap bytes owned, from running totals.
    pub(super) fn bytes(&self) -> usize {
        self.nodes.bytes() + self.children.allocation_size() + self.owned
    }

    /// Heap bytes owned, summed over every node.
    pub(super) fn bytes_visited(&self) -> usize {
        let owned = self.nodes.iter().map(|(_, node)| node.owned());
        self.nodes.bytes() + self.children.allocation_size() + owned.sum::<usize>()
    }

    /// Heap bytes that the next new run adds beyond its blocks: zero if the containers have room.
    pub(super) fn growth(&self) -> usize {
        let children =
            if self.children.len() == self.children.capacity() { self.children.allocation_size() } else { 0 };
        self.nodes.growth() + children
    }

    /// Moves nodes into vacant places if there are many, and frees the remaining memory. Returns the renumbered nodes.
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

    /// Stamps the run at `at` and its ancestors. Ends at the first run that has this stamp, whose ancestors have it, too.
    /// Each run is therefore passed once per stamp, and the mean cost per event is bounded in a tree of any depth.
    pub(super) fn stamp_path(&self, at: Point, now: u16) {
        let Point { mut node, mut offset } = at;
        while node != ROOT {
            steps::add(1);
            let above = &self.nodes[node];
            if above.stamp(now, offset) {
                return;
            }
            (node, offset) = (above.parent, above.attach);
        }
    }

    /// Halves every stamp, which preserves their order.
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

    /// Adds a child with the given run at `at`. The child and its ancestors have the current stamp.
    fn hang(&mut self, at: Point, run: Vec<BlockHash>) -> u32 {
        let (first, Point { node: parent, offset: attach }) = (run[0], at);
        let next = self.nodes[parent].first_child;
        let depth = self.nodes[parent].depth + attach;
        self.owned += run.capacity() * size_of::<BlockHash>();
        let (hit_at, end_hit_at) = (AtomicU16::new(self.now), AtomicU16::new(self.now));
        let id =
            self.nodes.insert(RunNode { parent, attach, depth, next, run, hit_at, end_hit_at, ..RunNode::default() });
        if next != NONE {
            self.nodes[next].previous = id;
        }
        let above = &mut self.nodes[parent];
        above.first_child = id;
        above.attach_max = above.attach_max.max(attach);
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        match self.children.entry(hash_of(hasher, at, first), |_| false, |&id| nodes[id].hash(hasher)) {
            Entry::Occupied(_) => unreachable!("the lookup found no such child"),
            Entry::Vacant(entry) => drop(entry.insert(id)),
        }
        self.stamp_path(at, self.now);
        id
    }

    /// Frees `id` if it has no holder and no child, then its ancestors that are no longer needed.
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
                return; // the run has this length for another reason
            }
            id = parent;
        }
        if self.len() == 0 {
            // An empty tree returns its memory.
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

    /// Cuts the end of a run that has no holder and no child. With many children, it runs only after a fraction of them
    /// was removed, so the cost per removed child is independent of their number.
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
            node.trims_left = u16::try_from(children / RESCAN_SHARE).unwrap_or(u16::MAX);
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

    /// Highest `attach` of the children of `id`, and the number of visited children.
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

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        assert_eq!(self.children.len(), self.len(), "every node but the root is a child");
        assert_eq!(self.bytes(), self.bytes_visited(), "counted bytes match the visited bytes");
        assert!(
            self.nodes[ROOT].run.is_empty() && self.nodes[ROOT].holders.is_empty(),
            "the root has no run and no holders"
        );
        self.check_children(ROOT);
        for (id, node) in self.iter() {
            let above = &self.nodes[node.parent];
            let at = Point { node: node.parent, offset: node.attach };
            assert!(node.parent == ROOT || !above.run.is_empty(), "the parent is not vacant");
            assert!(
                node.attach <= above.attach_max && node.attach as usize <= above.run.len(),
                "the child is attached to its parent's run"
            );
            assert!(node.parent == ROOT || node.attach > 0, "a child follows some block of its parent");
            assert_eq!(node.depth, above.depth + node.attach, "depth is the parent's depth plus the offset");
            assert_eq!(self.child(at, node.run[0]), Some(id), "a child is found by its first block");
            assert_ne!(above.run.get(node.attach as usize), Some(&node.run[0]), "each prefix has one position");
            assert!(node.run.len() <= RUN_BLOCKS_MAX as usize, "runs respect the maximum length");
            assert!(node.holders.is_sorted_by(|a, b| a.slot < b.slot), "holders are sorted and unique by slot");
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

impl RunNode {
    /// Stamps a run of which `blocks` leading blocks were queried or stored. Returns whether it had this stamp.
    pub(super) fn stamp(&self, now: u16, blocks: u32) -> bool {
        if blocks > self.attach_max {
            self.end_hit_at.store(now, Relaxed);
        }
        let had = self.hit_at.load(Relaxed) == now;
        self.hit_at.store(now, Relaxed);
        had
    }

    /// Stamps of the run: of the part before its last child and of the part after it, with the boundary.
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

/// Number of equal leading blocks of two lists. Compares whole chunks first, without a branch per block, which vectorises.
pub(crate) fn common_blocks(a: &[BlockHash], b: &[BlockHash]) -> usize {
    const CHUNK: usize = 16;
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let differing = |a: &[BlockHash], b: &[BlockHash]| a.iter().zip(b).fold(0, |bits, (a, b)| bits | (a.0 ^ b.0));
    let chunks = a.chunks_exact(CHUNK).zip(b.chunks_exact(CHUNK));
    let chunks = chunks.take_while(|(a, b)| differing(a, b) == 0).count();
    let start = chunks * CHUNK;
    start + a[start..].iter().zip(&b[start..]).take_while(|(a, b)| a == b).count()
}

fn agreeing(run: &[BlockHash], next: impl Iterator<Item = BlockHash>) -> u32 {
    run.iter().zip(next).take_while(|(ours, theirs)| *ours == theirs).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps to remove children attached at each block of a run, the last one first.
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
        let started = steps::count();
        for (left, tail) in tails.iter().enumerate().rev() {
            tree.publish(*tail, holder(0));
            let run = if left > 0 { tree.node(start.node).run.len() } else { 0 };
            assert!(run <= left + 2 * left / RESCAN_SHARE + 1, "{run} blocks for {left} children");
        }
        assert_eq!(tree.len(), 0, "all nodes are freed");
        steps::count() - started
    }

    #[test]
    fn cost_of_removing_a_child_is_independent_of_their_number() {
        let (small, large) = (cost_of_leaving(1_000), cost_of_leaving(16_000));
        assert!(large <= 20 * small, "{small} steps, {large} for sixteen times as many children");
    }
}
