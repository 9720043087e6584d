//! Tries of speculative prompts, one per rank; edges are slices of the prompts' hash arrays.
//!
//! A prompt ends at a node. The node exists because a booking *claims* it or because it has an *LRU entry*, which
//! remembers a prompt after its bookings ended. A block exists exactly while a prompt that starts with it is claimed or
//! remembered, so entries have no holes. Cost: a comparison of the prompt, and one step per edge on its path; nodes
//! without an end or a branch are joined when a prompt passes. [`super::SpeculativePrompts`] decides when and in which
//! order prompts are removed.
//!
//! An edge keeps its array alive; each passing prompt replaces it by its own array.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use ahash::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::index::depth::{DepthEnd, common_blocks};
use crate::protocol::{BlockHash, Slot, Timestamp};

/// Null node number.
const NONE: u32 = u32::MAX;

/// State of a remembered prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LruEntry {
    /// Position in every LRU order; later entries have higher stamps.
    pub(super) stamp: u64,
    /// Creation time.
    pub(super) at: Timestamp,
    /// Leading blocks that the engine itself has reported.
    pub(super) real_blocks: u32,
}

/// Result of inserting a prompt: its end, and the number of blocks that existed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entered {
    pub(super) end: u32,
    pub(super) shared_blocks: u32,
}

/// A node and the edge that leads to it. Vacant entries have no parent and are not a root.
#[derive(Debug)]
struct TrieNode {
    slot: Slot,
    parent: u32,
    /// The edge is `hashes[start..end]`; the earlier hashes belong to its ancestors.
    hashes: Arc<[BlockHash]>,
    start: u32,
    end: u32,
    children: u32,
    /// Number of bookings whose prompts end here.
    claims: u32,
    /// Whether the blocks were speculative when inserted.
    speculative: bool,
    lru: Option<LruEntry>,
    /// End of the prompt in the tree of depths, if it was searched. Evictions of one block each then cost the same for a
    /// prompt of any length.
    depth_end: Option<DepthEnd>,
}

/// The tries of all ranks. See the module documentation.
#[derive(Debug)]
pub(super) struct Tries {
    nodes: Vec<TrieNode>,
    vacant: Vec<u32>,
    /// Every node with a parent, by parent and first block.
    children: HashTable<u32>,
    hasher: RandomState,
}

impl Tries {
    pub(super) fn new() -> Self {
        Self { nodes: Vec::new(), vacant: Vec::new(), children: HashTable::new(), hasher: RandomState::new() }
    }

    /// Creates an empty trie and returns its root.
    pub(super) fn add_root(&mut self, slot: Slot) -> u32 {
        self.insert(TrieNode::edge(slot, NONE, Arc::default(), 0..0, false))
    }

    /// Removes an empty trie.
    pub(super) fn remove_root(&mut self, root: u32) {
        let node = &self.nodes[root as usize];
        debug_assert!(node.is_root() && node.children == 0, "only an empty trie is removed");
        self.vacate(root);
    }

    /// Inserts a prompt whose first `known_blocks` blocks are not speculative. Removes the LRU entries on its path,
    /// because the new prompt covers their blocks; calls `taken` with each entry and its depth. The caller then claims
    /// or remembers the end.
    pub(super) fn enter(
        &mut self,
        root: u32,
        prompt: &Arc<[BlockHash]>,
        known_blocks: u32,
        mut taken: impl FnMut(LruEntry, u32),
    ) -> Entered {
        let blocks = prompt.len() as u32;
        let (mut at, mut depth) = (root, 0);
        while let Some(&first) = prompt.get(depth as usize)
            && let Some(child) = self.child(at, first)
        {
            let agree = common_blocks(self.nodes[child as usize].edge_blocks(), &prompt[depth as usize..]) as u32;
            depth += agree;
            let next = if depth < self.nodes[child as usize].end { self.split(child, depth) } else { child };
            let node = &mut self.nodes[next as usize];
            node.hashes = Arc::clone(prompt);
            if let Some(lru) = node.lru.take() {
                taken(lru, node.end);
            }
            self.join(at, next);
            at = next;
        }
        let shared_blocks = depth;
        if depth < known_blocks.min(blocks) {
            at = self.grow(at, prompt, depth..known_blocks.min(blocks), false);
            depth = known_blocks.min(blocks);
        }
        if depth < blocks {
            at = self.grow(at, prompt, depth..blocks, true);
        }
        Entered { end: at, shared_blocks }
    }

    /// Adds a booking whose prompt ends here.
    pub(super) fn claim(&mut self, end: u32) {
        self.nodes[end as usize].claims += 1;
    }

    /// Removes a booking.
    pub(super) fn unclaim(&mut self, end: u32) {
        let claims = &mut self.nodes[end as usize].claims;
        debug_assert!(*claims > 0, "node {end} is not claimed");
        *claims = claims.saturating_sub(1);
    }

    pub(super) fn is_claimed(&self, end: u32) -> bool {
        self.nodes[end as usize].claims > 0
    }

    pub(super) fn set_lru(&mut self, end: u32, lru: Option<LruEntry>) -> Option<LruEntry> {
        std::mem::replace(&mut self.nodes[end as usize].lru, lru)
    }

    pub(super) fn lru(&self, end: u32) -> Option<LruEntry> {
        self.nodes[end as usize].lru
    }

    pub(super) fn depth_end(&self, end: u32) -> Option<DepthEnd> {
        self.nodes[end as usize].depth_end
    }

    pub(super) fn set_depth_end(&mut self, end: u32, depth_end: DepthEnd) {
        self.nodes[end as usize].depth_end = Some(depth_end);
    }

    pub(super) fn slot(&self, end: u32) -> Slot {
        self.nodes[end as usize].slot
    }

    /// An array of a prompt that includes this node, and the depth of the node.
    pub(super) fn prompt(&self, end: u32) -> (&Arc<[BlockHash]>, u32) {
        let node = &self.nodes[end as usize];
        (&node.hashes, node.end)
    }

    pub(super) fn is_root(&self, end: u32) -> bool {
        self.nodes[end as usize].is_root()
    }

    /// Removes up to `blocks_max` unneeded blocks from the end of the prompt at `end`. Calls `left` with each removed
    /// range and whether it was speculative. Returns the new end if further blocks are removable.
    pub(super) fn give_up(
        &mut self,
        end: u32,
        mut blocks_max: u32,
        mut left: impl FnMut(Range<u32>, bool),
    ) -> Option<u32> {
        let mut at = end;
        loop {
            let node = &mut self.nodes[at as usize];
            if node.is_root() || node.is_needed() {
                return None;
            }
            if blocks_max == 0 {
                return Some(at);
            }
            let blocks = node.start..node.end;
            if blocks_max < blocks.len() as u32 {
                node.end -= blocks_max;
                left(node.end..blocks.end, node.speculative);
                return Some(at);
            }
            blocks_max -= blocks.len() as u32;
            left(blocks, node.speculative);
            at = self.cut(at);
        }
    }

    /// Heap bytes owned, including the arrays held by leaves. Visits every node.
    pub(super) fn bytes(&self) -> usize {
        let leaves = self.nodes.iter().filter(|node| node.children == 0);
        self.nodes.capacity() * size_of::<TrieNode>()
            + self.vacant.capacity() * size_of::<u32>()
            + self.children.allocation_size()
            + leaves.map(|node| size_of_val(&*node.hashes)).sum::<usize>()
    }

    fn child(&self, at: u32, first: BlockHash) -> Option<u32> {
        self.children.find(hash_of(&self.hasher, at, first), |&id| self.nodes[id as usize].hangs(at, first)).copied()
    }

    fn insert(&mut self, node: TrieNode) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        self.nodes.len() as u32 - 1
    }

    fn vacate(&mut self, id: u32) {
        self.nodes[id as usize] = TrieNode::edge(Slot(0), NONE, Arc::default(), 0..0, false);
        self.vacant.push(id);
    }

    fn list(&mut self, id: u32) {
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        let node = &nodes[id as usize];
        let rehash = |&id: &u32| nodes[id as usize].hash(hasher);
        match self.children.entry(node.hash(hasher), |&other| other == id, rehash) {
            Entry::Occupied(_) => unreachable!("a node is listed once"),
            Entry::Vacant(entry) => drop(entry.insert(id)),
        }
    }

    fn unlist(&mut self, id: u32) {
        let hash = self.nodes[id as usize].hash(&self.hasher);
        let entry = self.children.find_entry(hash, |&other| other == id).expect("every node but a root is listed");
        let _ = entry.remove();
        if self.children.capacity() > 64 && self.children.len() < self.children.capacity() / 4 {
            let (nodes, hasher) = (&self.nodes, &self.hasher);
            self.children.shrink_to(self.children.len() * 2, |&id| nodes[id as usize].hash(hasher));
        }
    }

    /// Adds a leaf behind `parent`.
    fn grow(&mut self, parent: u32, prompt: &Arc<[BlockHash]>, blocks: Range<u32>, speculative: bool) -> u32 {
        let above = &mut self.nodes[parent as usize];
        above.children += 1;
        let slot = above.slot;
        let leaf = self.insert(TrieNode::edge(slot, parent, Arc::clone(prompt), blocks, speculative));
        self.list(leaf);
        leaf
    }

    /// Splits the edge to `lower`, and returns the new node in between. `lower` keeps its number, because claims and
    /// LRU orders refer to it.
    fn split(&mut self, lower: u32, depth: u32) -> u32 {
        self.unlist(lower);
        let node = &self.nodes[lower as usize];
        let mut upper =
            TrieNode::edge(node.slot, node.parent, Arc::clone(&node.hashes), node.start..depth, node.speculative);
        upper.children = 1;
        let upper = self.insert(upper);
        let node = &mut self.nodes[lower as usize];
        (node.start, node.parent) = (depth, upper);
        self.list(upper);
        self.list(lower);
        upper
    }

    /// Joins two edges if no prompt ends and no edge branches between them.
    fn join(&mut self, upper: u32, lower: u32) {
        let node = &self.nodes[upper as usize];
        let ends = node.claims > 0 || node.lru.is_some();
        if node.is_root() || ends || node.children > 1 || node.speculative != self.nodes[lower as usize].speculative {
            return;
        }
        self.unlist(upper);
        self.unlist(lower);
        let TrieNode { start, parent, .. } = self.nodes[upper as usize];
        let node = &mut self.nodes[lower as usize];
        (node.start, node.parent) = (start, parent);
        self.list(lower);
        self.vacate(upper);
    }

    /// Removes a leaf and returns its parent.
    fn cut(&mut self, leaf: u32) -> u32 {
        self.unlist(leaf);
        let parent = self.nodes[leaf as usize].parent;
        self.nodes[parent as usize].children -= 1;
        self.vacate(leaf);
        parent
    }

    /// Checks the invariants of all tries.
    pub(super) fn check_invariants(&self, roots: usize) {
        let mut children = vec![0; self.nodes.len()];
        for &id in &self.children {
            let node = &self.nodes[id as usize];
            assert_eq!(self.child(node.parent, node.hashes[node.start as usize]), Some(id), "found by its first block");
            let above = &self.nodes[node.parent as usize];
            assert_eq!((node.start, node.slot), (above.end, above.slot), "an edge begins where its parent's ends");
            assert!(node.start < node.end && node.end as usize <= node.hashes.len(), "edges are not empty");
            let agrees = above.end == 0 || node.hashes[..above.end as usize] == above.hashes[..above.end as usize];
            assert!(agrees, "an edge's array starts with its ancestors' blocks");
            assert!(node.children > 0 || node.is_needed(), "every leaf is claimed or remembered");
            children[node.parent as usize] += 1;
        }
        for (node, children) in self.nodes.iter().zip(children) {
            assert_eq!(node.children, children, "children are counted");
        }
        assert_eq!(
            self.children.len() + self.vacant.len() + roots,
            self.nodes.len(),
            "every node is listed, vacant or a root"
        );
    }

    /// Number of blocks below a root. Visits every node.
    pub(super) fn block_count(&self, slot: Slot) -> u64 {
        let of_slot = self.nodes.iter().filter(|node| node.slot == slot);
        of_slot.map(|node| u64::from(node.end - node.start)).sum()
    }
}

impl TrieNode {
    fn edge(slot: Slot, parent: u32, hashes: Arc<[BlockHash]>, blocks: Range<u32>, speculative: bool) -> Self {
        let Range { start, end } = blocks;
        Self { slot, parent, hashes, start, end, children: 0, claims: 0, speculative, lru: None, depth_end: None }
    }

    fn is_root(&self) -> bool {
        self.parent == NONE
    }

    fn is_needed(&self) -> bool {
        self.children > 0 || self.claims > 0 || self.lru.is_some()
    }

    fn edge_blocks(&self) -> &[BlockHash] {
        &self.hashes[self.start as usize..self.end as usize]
    }

    fn hangs(&self, at: u32, first: BlockHash) -> bool {
        self.parent == at && self.hashes[self.start as usize] == first
    }

    fn hash(&self, hasher: &RandomState) -> u64 {
        hash_of(hasher, self.parent, self.hashes[self.start as usize])
    }
}

fn hash_of(hasher: &RandomState, parent: u32, first: BlockHash) -> u64 {
    hasher.hash_one((parent, first))
}
