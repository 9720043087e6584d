//! The believed prompts of every rank, as tries whose edges are slices of the prompts' own hash arrays.
//!
//! Owns one trie a rank, and in it who needs what: a prompt ends at a node, and is there because a booking claims it or
//! because it is *marked*, which is how a prompt that nobody computes any more is remembered. Promises that a block is
//! there exactly while a prompt that begins with it is claimed or marked, so that no belief has a hole. Costs a
//! comparison of the prompt, and steps per edge on its way, for nodes between which nothing ends or branches any more
//! are joined when a prompt comes by. Leaves to [`super::Predictions`] when marks go, and in which order.
//!
//! An edge keeps the array that it is a slice of alive; each prompt that comes by puts its own in.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use ahash::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::index::depth::common_blocks;
use crate::protocol::{BlockHash, Slot, Timestamp};

/// No node.
const NONE: u32 = u32::MAX;

/// What is remembered of a prompt that ends at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Its place in every order of marks: the later, the higher.
    pub(super) stamp: u64,
    /// When it was made.
    pub(super) at: Timestamp,
    /// Leading blocks that the engine itself said it holds, where it says such things.
    pub(super) real_blocks: u32,
}

/// Where a prompt ends, and how much of it was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entered {
    pub(super) end: u32,
    pub(super) shared_blocks: u32,
}

/// A node and the edge that leads to it. Vacant entries have no parent and are no root.
#[derive(Debug)]
struct Node {
    slot: Slot,
    parent: u32,
    /// The edge is `hashes[start..end]`, and what lies above it comes before.
    hashes: Arc<[BlockHash]>,
    start: u32,
    end: u32,
    children: u32,
    /// Bookings whose prompts end here.
    claims: u32,
    /// Whether the blocks were a guess when they came in.
    guessed: bool,
    mark: Option<Mark>,
}

/// The tries of all ranks. See the module's head.
#[derive(Debug)]
pub(super) struct Tries {
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// Every node that has a parent, by it and its first block.
    children: HashTable<u32>,
    hasher: RandomState,
}

impl Tries {
    pub(super) fn new() -> Self {
        Self { nodes: Vec::new(), vacant: Vec::new(), children: HashTable::new(), hasher: RandomState::new() }
    }

    /// A new, empty trie.
    pub(super) fn plant(&mut self, slot: Slot) -> u32 {
        self.insert(Node::edge(slot, NONE, Arc::default(), 0..0, false))
    }

    /// Gives an empty trie back.
    pub(super) fn fell(&mut self, root: u32) {
        let node = &self.nodes[root as usize];
        debug_assert!(node.is_root() && node.children == 0, "only an empty trie is given back");
        self.vacate(root);
    }

    /// Lets a prompt in. Its first `known_blocks` blocks are no guess. Marks on its way are taken off, for what they
    /// remembered this prompt needs, too; `taken` hears of each, with the depth it was at. The caller claims or
    /// marks the end next.
    pub(super) fn enter(
        &mut self,
        root: u32,
        prompt: &Arc<[BlockHash]>,
        known_blocks: u32,
        mut taken: impl FnMut(Mark, u32),
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
            if let Some(mark) = node.mark.take() {
                taken(mark, node.end);
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

    /// Notes one more booking whose prompt ends here.
    pub(super) fn claim(&mut self, end: u32) {
        self.nodes[end as usize].claims += 1;
    }

    /// Notes one less.
    pub(super) fn unclaim(&mut self, end: u32) {
        let claims = &mut self.nodes[end as usize].claims;
        debug_assert!(*claims > 0, "node {end} is not claimed");
        *claims = claims.saturating_sub(1);
    }

    pub(super) fn is_claimed(&self, end: u32) -> bool {
        self.nodes[end as usize].claims > 0
    }

    pub(super) fn set_mark(&mut self, end: u32, mark: Option<Mark>) -> Option<Mark> {
        std::mem::replace(&mut self.nodes[end as usize].mark, mark)
    }

    pub(super) fn mark(&self, end: u32) -> Option<Mark> {
        self.nodes[end as usize].mark
    }

    pub(super) fn slot(&self, end: u32) -> Slot {
        self.nodes[end as usize].slot
    }

    /// The array of a prompt that goes at least as far as this node, and how far that is.
    pub(super) fn prompt(&self, end: u32) -> (&Arc<[BlockHash]>, u32) {
        let node = &self.nodes[end as usize];
        (&node.hashes, node.end)
    }

    pub(super) fn is_root(&self, end: u32) -> bool {
        self.nodes[end as usize].is_root()
    }

    /// Takes up to `blocks_max` blocks that nothing needs off the end of the prompt that ended at `end`. `left` hears of
    /// each stretch and whether it was a guess. Returns where the prompt ends now if there is more to take.
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
                left(node.end..blocks.end, node.guessed);
                return Some(at);
            }
            blocks_max -= blocks.len() as u32;
            left(blocks, node.guessed);
            at = self.cut(at);
        }
    }

    /// Heap bytes owned, the arrays that prompts' ends keep alive included. Visits every node.
    pub(super) fn bytes(&self) -> usize {
        let leaves = self.nodes.iter().filter(|node| node.children == 0);
        self.nodes.capacity() * size_of::<Node>()
            + self.vacant.capacity() * size_of::<u32>()
            + self.children.allocation_size()
            + leaves.map(|node| size_of_val(&*node.hashes)).sum::<usize>()
    }

    fn child(&self, at: u32, first: BlockHash) -> Option<u32> {
        self.children.find(hash_of(&self.hasher, at, first), |&id| self.nodes[id as usize].hangs(at, first)).copied()
    }

    fn insert(&mut self, node: Node) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        self.nodes.len() as u32 - 1
    }

    fn vacate(&mut self, id: u32) {
        self.nodes[id as usize] = Node::edge(Slot(0), NONE, Arc::default(), 0..0, false);
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
    fn grow(&mut self, parent: u32, prompt: &Arc<[BlockHash]>, blocks: Range<u32>, guessed: bool) -> u32 {
        let above = &mut self.nodes[parent as usize];
        above.children += 1;
        let slot = above.slot;
        let leaf = self.insert(Node::edge(slot, parent, Arc::clone(prompt), blocks, guessed));
        self.list(leaf);
        leaf
    }

    /// Cuts the edge to `lower` in two, and returns the new node between them. `lower` keeps its number, for claims
    /// and orders name it.
    fn split(&mut self, lower: u32, depth: u32) -> u32 {
        self.unlist(lower);
        let node = &self.nodes[lower as usize];
        let mut upper = Node::edge(node.slot, node.parent, Arc::clone(&node.hashes), node.start..depth, node.guessed);
        upper.children = 1;
        let upper = self.insert(upper);
        let node = &mut self.nodes[lower as usize];
        (node.start, node.parent) = (depth, upper);
        self.list(upper);
        self.list(lower);
        upper
    }

    /// Makes one edge of two if nothing ends or branches between them.
    fn join(&mut self, upper: u32, lower: u32) {
        let node = &self.nodes[upper as usize];
        let ends = node.claims > 0 || node.mark.is_some();
        if node.is_root() || ends || node.children > 1 || node.guessed != self.nodes[lower as usize].guessed {
            return;
        }
        self.unlist(upper);
        self.unlist(lower);
        let Node { start, parent, .. } = self.nodes[upper as usize];
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

    /// Every node with a mark, and every claimed one.
    pub(super) fn check_invariants(&self, roots: usize) {
        let mut children = vec![0; self.nodes.len()];
        for &id in &self.children {
            let node = &self.nodes[id as usize];
            assert_eq!(self.child(node.parent, node.hashes[node.start as usize]), Some(id), "found by its first block");
            let above = &self.nodes[node.parent as usize];
            assert_eq!((node.start, node.slot), (above.end, above.slot), "an edge begins where its parent's ends");
            assert!(node.start < node.end && node.end as usize <= node.hashes.len(), "no edge is empty");
            let agrees = above.end == 0 || node.hashes[..above.end as usize] == above.hashes[..above.end as usize];
            assert!(agrees, "what is above an edge comes before it in its array");
            assert!(node.children > 0 || node.is_needed(), "no leaf is there for nothing");
            children[node.parent as usize] += 1;
        }
        for (node, children) in self.nodes.iter().zip(children) {
            assert_eq!(node.children, children, "children are counted");
        }
        assert_eq!(self.children.len() + self.vacant.len() + roots, self.nodes.len(), "no node is lost");
    }

    /// Number of blocks below a root. Visits every node.
    pub(super) fn block_count(&self, slot: Slot) -> u64 {
        let of_slot = self.nodes.iter().filter(|node| node.slot == slot);
        of_slot.map(|node| u64::from(node.end - node.start)).sum()
    }
}

impl Node {
    fn edge(slot: Slot, parent: u32, hashes: Arc<[BlockHash]>, blocks: Range<u32>, guessed: bool) -> Self {
        let Range { start, end } = blocks;
        Self { slot, parent, hashes, start, end, children: 0, claims: 0, guessed, mark: None }
    }

    fn is_root(&self) -> bool {
        self.parent == NONE
    }

    fn is_needed(&self) -> bool {
        self.children > 0 || self.claims > 0 || self.mark.is_some()
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
