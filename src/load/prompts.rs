//! Radix tree of the active prompts of one rank, each distinct prefix counted once.
//!
//! Edges are slices of the prompts' hash arrays, so no operation visits single blocks. Sequence hashes are chained: two
//! prompts agree on their first `k` blocks exactly if their `k`-th hashes are equal. A longest common prefix is
//! therefore a binary search, and a hash array that reaches the end of an edge also represents all ancestors.
//!
//! Sums are exact: a prompt adds its unshared blocks at full weight, and blocks are removed with their last prompt.
//! Arrays without chaining give meaningless counts, but no panic and no residue after all are removed.
//! [`ActiveSequences`](super::ActiveSequences) maps bookings to prompt ends.
//!
//! An edge keeps its source array alive. Edges without an end, a branch or a change of weight between them are joined,
//! so there are at most two per active prompt, plus one for each change of weight on the path, independent of the
//! number of earlier prompts.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{BlockSum, Weight};
use crate::protocol::SequenceHash;

/// The active prompts of one rank, as a tree.
#[derive(Clone, Debug)]
pub(super) struct PromptTree {
    nodes: Vec<PromptNode>,
    /// Vacant entries of `nodes`.
    free: Vec<u32>,
    weighted: BlockSum,
}

/// The end node of a prompt: its claim on the tree, to be removed exactly once. Remains valid while other prompts
/// change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PromptEnd(u32);

/// A node and the edge from its parent.
#[derive(Clone, Debug)]
struct PromptNode {
    /// The edge is `hashes[start..end]` of a prompt that passed here when the edge was created.
    hashes: Arc<[SequenceHash]>,
    start: u32,
    end: u32,
    /// Weight of each block of the edge.
    weight: Weight,
    /// Number of prompts that end here.
    owners: u32,
    parent: u32,
    /// The hash under which the parent lists this node. Equal to `hashes[start]`; stored separately so that unchained
    /// input cannot corrupt the tree.
    key: SequenceHash,
    /// By key.
    children: BTreeMap<SequenceHash, u32>,
}

/// Common prefix of a prompt and the tree.
struct PrefixMatch {
    /// Number of active leading blocks.
    depth: u32,
    /// End of the common prefix: this node, or a point inside the edge to it.
    node: u32,
    /// Whether the end is inside the edge.
    within: bool,
}

const ROOT: u32 = 0;

impl PromptTree {
    pub(super) fn new() -> Self {
        let root = PromptNode {
            hashes: Arc::default(),
            start: 0,
            end: 0,
            weight: Weight::ONE,
            owners: 0,
            parent: ROOT,
            key: SequenceHash::default(),
            children: BTreeMap::new(),
        };
        Self { nodes: vec![root], free: Vec::new(), weighted: BlockSum::default() }
    }

    /// Adds a prompt. Returns its end and the number of its leading blocks that were already active. Those keep their
    /// weights; the others have full weight.
    ///
    /// O(edges on the path × log blocks).
    pub(super) fn insert(&mut self, prompt: Arc<[SequenceHash]>) -> (PromptEnd, u32) {
        let (blocks, found) = (block_count(&prompt), self.descend(&prompt));
        let joint = if found.within { self.split(found.node, found.depth) } else { found.node };
        let end = if found.depth < blocks { self.grow(joint, prompt, found.depth..blocks) } else { joint };
        self.node_mut(end).owners += 1;
        (PromptEnd(end), found.depth)
    }

    /// Removes a prompt added by [`insert`](Self::insert), except blocks used by other prompts. Must be called once per
    /// insertion.
    ///
    /// O(removed edges).
    pub(super) fn remove(&mut self, end: PromptEnd) {
        let mut at = end.0;
        debug_assert!(self.node(at).owners > 0, "{end:?} given back twice");
        self.node_mut(at).owners = self.node(at).owners.saturating_sub(1);
        while at != ROOT && self.node(at).dependants() == 0 {
            at = self.cut(at);
        }
        self.join_with_only_child(at);
    }

    /// Sets the weight of the part of a prompt that no other prompt depends on, from its end upward.
    ///
    /// O(edges of that part), which are joined into one.
    pub(super) fn reweigh(&mut self, end: PromptEnd, weight: Weight) {
        let mut at = end.0;
        while at != ROOT && self.node(at).dependants() == 1 {
            let node = &mut self.nodes[at as usize];
            self.weighted.sub(node.weighted());
            node.weight = weight;
            self.weighted.add(node.weighted());
            let parent = node.parent;
            self.join_with_only_child(at);
            at = parent;
        }
    }

    /// Number of active leading blocks of the prompt.
    ///
    /// O(edges on the path × log blocks).
    pub(super) fn shared_blocks(&self, prompt: &[SequenceHash]) -> u32 {
        self.descend(prompt).depth
    }

    /// Sum of the weights of all active blocks.
    pub(super) fn weighted(&self) -> BlockSum {
        self.weighted
    }

    fn node(&self, at: u32) -> &PromptNode {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut PromptNode {
        &mut self.nodes[at as usize]
    }

    fn descend(&self, prompt: &[SequenceHash]) -> PrefixMatch {
        let blocks = block_count(prompt);
        let mut found = PrefixMatch { depth: 0, node: ROOT, within: false };
        while found.depth < blocks {
            let Some(child) = self.node(found.node).child(prompt[found.depth as usize]) else { break };
            let edge = self.node(child);
            let limit = edge.end.min(blocks);
            found = PrefixMatch {
                depth: agreement(prompt, &edge.hashes, found.depth + 1, limit),
                node: child,
                within: true,
            };
            if found.depth < edge.end {
                break;
            }
            found.within = false;
        }
        found
    }

    /// Splits the edge to `lower` and returns the new node in between. `lower` keeps its number, because claims refer
    /// to it.
    fn split(&mut self, lower: u32, depth: u32) -> u32 {
        let node = self.node_mut(lower);
        debug_assert!(node.start < depth && depth < node.end, "{depth} is not within the edge");
        let PromptNode { start, weight, parent, key, .. } = *node;
        let hashes = Arc::clone(&node.hashes);
        node.start = depth;
        node.key = hashes[depth as usize];
        let children = BTreeMap::from([(node.key, lower)]);
        let upper = PromptNode { hashes, start, end: depth, weight, owners: 0, parent, key, children };
        let upper = self.allocate(upper);
        self.node_mut(lower).parent = upper;
        self.node_mut(parent).repoint(key, upper);
        upper
    }

    /// Adds a leaf below `parent` for the given blocks of a prompt.
    fn grow(&mut self, parent: u32, hashes: Arc<[SequenceHash]>, blocks: std::ops::Range<u32>) -> u32 {
        let key = hashes[blocks.start as usize];
        let leaf = PromptNode {
            hashes,
            start: blocks.start,
            end: blocks.end,
            weight: Weight::ONE,
            owners: 0,
            parent,
            key,
            children: BTreeMap::new(),
        };
        self.weighted.add(leaf.weighted());
        let leaf = self.allocate(leaf);
        self.node_mut(parent).adopt(key, leaf);
        leaf
    }

    /// Removes a node without dependants and returns its parent.
    fn cut(&mut self, leaf: u32) -> u32 {
        let PromptNode { parent, key, .. } = *self.node(leaf);
        self.weighted.sub(self.node(leaf).weighted());
        self.node_mut(parent).disown(key);
        self.release(leaf);
        parent
    }

    /// Joins a node without an end or a branch with its only child, if their weights are equal. The child remains,
    /// because claims refer to it, and its array includes all ancestors.
    fn join_with_only_child(&mut self, upper: u32) {
        let node = self.node(upper);
        let Some((_, &lower)) = node.children.first_key_value().filter(|_| node.children.len() == 1) else { return };
        if upper == ROOT || node.owners > 0 || node.weight != self.node(lower).weight {
            return;
        }
        let PromptNode { start, parent, key, .. } = *node;
        let below = self.node_mut(lower);
        (below.start, below.parent, below.key) = (start, parent, key);
        self.node_mut(parent).repoint(key, lower);
        self.release(upper);
    }

    fn allocate(&mut self, node: PromptNode) -> u32 {
        if let Some(at) = self.free.pop() {
            self.nodes[at as usize] = node;
            return at;
        }
        let at = u32::try_from(self.nodes.len()).expect("four billion nodes do not fit into memory");
        self.nodes.push(node);
        at
    }

    fn release(&mut self, at: u32) {
        let root = self.node(ROOT);
        let empty = PromptNode { children: BTreeMap::new(), owners: 0, hashes: Arc::clone(&root.hashes), ..*root };
        self.nodes[at as usize] = empty;
        self.free.push(at);
    }

    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If the tree is inconsistent, or contains joinable edges.
    pub(super) fn check_invariants(&self) {
        let (mut live, mut sum, mut todo) = (0, BlockSum::default(), vec![ROOT]);
        while let Some(at) = todo.pop() {
            let node = self.node(at);
            (live, _) = (live + 1, sum.add(node.weighted()));
            assert!(node.weight <= Weight::ONE);
            if at != ROOT {
                assert!(node.start < node.end && node.end as usize <= node.hashes.len(), "{at} has no edge");
                assert!(node.dependants() > 0, "nothing depends on {at}");
            }
            for (&key, &child) in &node.children {
                let below = self.node(child);
                assert_eq!((below.parent, below.key, below.start), (at, key, node.end), "{child} hangs wrong");
                let joinable = at != ROOT && node.dependants() == 1 && node.weight == below.weight;
                assert!(!joinable, "{at} should have been joined with {child}");
                todo.push(child);
            }
        }
        assert_eq!(live + self.free.len(), self.nodes.len(), "every node is live or free");
        assert_eq!(sum, self.weighted, "the sum of weights is wrong");
    }

    /// Number of prompts in the tree.
    pub(super) fn prompt_count(&self) -> usize {
        self.nodes.iter().map(|node| node.owners as usize).sum()
    }
}

impl PromptNode {
    /// Number of prompts that end here and of children.
    fn dependants(&self) -> usize {
        self.owners as usize + self.children.len()
    }

    /// Total weight of the edge's blocks.
    fn weighted(&self) -> u64 {
        self.weight.times(self.end - self.start)
    }

    fn child(&self, key: SequenceHash) -> Option<u32> {
        self.children.get(&key).copied()
    }

    fn adopt(&mut self, key: SequenceHash, child: u32) {
        let before = self.children.insert(key, child);
        debug_assert!(before.is_none(), "{key} has a child already");
    }

    fn repoint(&mut self, key: SequenceHash, child: u32) {
        match self.children.get_mut(&key) {
            Some(known) => *known = child,
            None => debug_assert!(false, "{key} has no child"),
        }
    }

    fn disown(&mut self, key: SequenceHash) {
        let before = self.children.remove(&key);
        debug_assert!(before.is_some(), "{key} has no child");
    }
}

/// Number of blocks of a prompt. Prompts beyond `u32::MAX` blocks (34 GB of hashes) are truncated.
pub(super) fn block_count(prompt: &[SequenceHash]) -> u32 {
    u32::try_from(prompt.len()).unwrap_or(u32::MAX)
}

/// Number of equal leading hashes of two chained arrays.
pub(super) fn shared_blocks(a: &[SequenceHash], b: &[SequenceHash]) -> u32 {
    match block_count(a).min(block_count(b)) {
        0 => 0,
        limit => agreement(a, b, 0, limit),
    }
}

/// Number of equal leading hashes, at most `limit`, of two chained arrays whose first `known` hashes are equal.
fn agreement(a: &[SequenceHash], b: &[SequenceHash], known: u32, limit: u32) -> u32 {
    let agree = |blocks: u32| a[blocks as usize - 1] == b[blocks as usize - 1];
    if agree(limit) {
        return limit;
    }
    let (mut equal, mut unequal) = (known, limit);
    while equal + 1 < unequal {
        let middle = equal + (unequal - equal) / 2;
        if agree(middle) {
            equal = middle;
        } else {
            unequal = middle;
        }
    }
    equal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(of: &[u64]) -> Arc<[SequenceHash]> {
        of.iter().copied().map(SequenceHash).collect()
    }

    fn insert(tree: &mut PromptTree, of: &[u64]) -> (PromptEnd, u32) {
        let inserted = tree.insert(hashes(of));
        tree.check_invariants();
        inserted
    }

    fn remove(tree: &mut PromptTree, end: PromptEnd) {
        tree.remove(end);
        tree.check_invariants();
    }

    #[test]
    fn arrays_are_freed_with_their_last_edge() {
        let mut tree = PromptTree::new();
        let (first, second) = (hashes(&[1, 2, 3, 4]), hashes(&[1, 2, 3, 4, 5]));
        let (a, _) = tree.insert(Arc::clone(&first));
        let (b, _) = tree.insert(Arc::clone(&second));
        tree.remove(a);
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 2), "the longer array represents both");
        tree.remove(b);
        assert_eq!(Arc::strong_count(&second), 1);
    }

    /// Invalid arrays must be harmless.
    #[test]
    fn unchained_arrays_are_tolerated() {
        let mut seed = 1_u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut tree = PromptTree::new();
        let mut ends = Vec::new();
        for step in 0..20_000 {
            if next(2) == 0 || ends.is_empty() {
                let prompt: Vec<u64> = (0..next(8)).map(|_| next(4)).collect();
                ends.push(insert(&mut tree, &prompt).0);
            } else if next(3) == 0 {
                let weight = Weight::new(next(3) as f64 / 2.0).expect("in range");
                tree.reweigh(ends[next(ends.len() as u64) as usize], weight);
                tree.check_invariants();
            } else {
                let at = next(ends.len() as u64) as usize;
                remove(&mut tree, ends.swap_remove(at));
            }
            if step % 500 == 0 {
                ends.drain(..).for_each(|end| remove(&mut tree, end));
                assert_eq!((tree.weighted(), tree.nodes.len() - tree.free.len()), (BlockSum::default(), 1));
            }
        }
    }
}
