//! Paged prefix cache of a rank: device blocks, host blocks, a second cache group, and the cache events of all.
//!
//! Tracks the block and users of each slot and the eviction order of free slots. The parent of a held block is held
//! too, in some tier. The host holds each hash at most once. The device does too, unless [`Cache::fill`] adds copies.
//! The recorded events match the changes exactly and in order. The scheduler decides the computation and its time.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use ahash::{AHashMap, RandomState};
use lru::LruCache;

use crate::engine::beside::BesideGroup;
use crate::engine::block::{Block, EngineHash};
use crate::engine::config::EngineConfig;
use crate::engine::event::{CacheEvent, Tier};

/// Cached part of a prompt: leading blocks on the device, then blocks that only the host holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hit {
    pub(crate) device: usize,
    pub(crate) host: usize,
    /// Number of `device` blocks without a user. Each of them reduces the number of free slots when taken.
    device_free: u32,
}

/// Entries in the order of their use.
type UsageOrder<K, V> = LruCache<K, V, RandomState>;

pub(crate) struct Cache {
    slots: Vec<Slot>,
    by_hash: AHashMap<EngineHash, Copies>,
    /// Number of slots that hold a block.
    filled: usize,
    /// Slots without a user in allocation order: empty slots first, then by the time they became free.
    free: UsageOrder<u32, ()>,
    /// The same for blocks to which open sessions refer: allocated after all others.
    referred: UsageOrder<u32, ()>,
    /// Open sessions by the blocks to which they refer.
    sessions: BTreeMap<EngineHash, BTreeSet<Arc<str>>>,
    /// Blocks in host memory: the least recently evicted from the device or looked up leave first.
    host: Option<UsageOrder<EngineHash, Arc<Block>>>,
    /// Whether computed blocks are copied to the host at once.
    writes_through: bool,
    beside: Option<BesideGroup>,
    events: Vec<CacheEvent>,
}

/// The slots that hold one block, in the order they were filled. Lookups return the first.
struct Copies {
    first: u32,
    further: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    users: u32,
    block: Option<Arc<Block>>,
}

impl Cache {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let (device_blocks, host_blocks) = (config.blocks_usable(), config.host_kv_blocks);
        let window = config.beside_window_blocks;
        let mut free = LruCache::unbounded_with_hasher(RandomState::new());
        (0..device_blocks).for_each(|slot| _ = free.put(slot, ()));
        Self {
            slots: (0..device_blocks).map(|_| Slot::default()).collect(),
            by_hash: AHashMap::new(),
            filled: 0,
            free,
            referred: LruCache::unbounded_with_hasher(RandomState::new()),
            sessions: BTreeMap::new(),
            host: NonZeroUsize::new(host_blocks as usize).map(|blocks_max| {
                let mut host = LruCache::unbounded_with_hasher(RandomState::new());
                host.resize(blocks_max);
                host
            }),
            writes_through: config.writes_through,
            beside: (window > 0).then(|| BesideGroup::new(window, device_blocks)),
            events: Vec::new(),
        }
    }

    pub(crate) fn used_blocks(&self) -> u32 {
        self.slots.len() as u32 - self.free_blocks()
    }

    pub(crate) fn free_blocks(&self) -> u32 {
        (self.free.len() + self.referred.len()) as u32
    }

    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns whether any tier holds a block.
    pub(crate) fn holds(&self, hash: &EngineHash) -> bool {
        self.by_hash.contains_key(hash) || self.host.as_ref().is_some_and(|host| host.contains(hash))
    }

    /// Finds the cached part of a chain of blocks.
    pub(crate) fn lookup(&self, hashes: &[EngineHash]) -> Hit {
        let mut hit = Hit::default();
        let held = hashes.iter().take_while(|hash| self.by_hash.contains_key(*hash)).count();
        let held = self.beside.as_ref().map_or(held, |beside| beside.longest(&hashes[..held]));
        for hash in &hashes[..held] {
            let first = self.by_hash[hash].first;
            hit.device += 1;
            hit.device_free += u32::from(self.slots[first as usize].users == 0);
        }
        if let Some(host) = &self.host {
            hit.host = hashes[hit.device..].iter().take_while(|hash| host.contains(*hash)).count();
        }
        hit
    }

    /// Returns whether there are enough free slots for a hit and `blocks` more. `blocks` excludes the slots for the
    /// host part of the hit.
    pub(crate) fn has_room(&self, hit: &Hit, blocks: u32) -> bool {
        let needed = u64::from(hit.device_free) + hit.host as u64 + u64::from(blocks);
        needed <= u64::from(self.free_blocks())
    }

    /// Adds a user to the blocks of a hit and returns one slot per block. The caller has checked that there is room.
    pub(crate) fn take(&mut self, hashes: &[EngineHash], hit: &Hit) -> Vec<u32> {
        let mut slots: Vec<u32> = hashes[..hit.device].iter().map(|hash| self.by_hash[hash].first).collect();
        for &slot in &slots {
            self.add_user(slot);
        }
        if let Some(beside) = &mut self.beside {
            beside.touch(&hashes[..hit.device]);
        }
        let Some(host) = &mut self.host else { return slots };
        let found = &hashes[..hit.device + hit.host];
        // Touch the last block first, so that a parent outlives its children in the host tier too.
        for hash in found.iter().rev() {
            host.promote(hash);
        }
        // Read before the evictions below remove host blocks.
        let loaded: Vec<Arc<Block>> = found[hit.device..].iter().filter_map(|hash| host.peek(hash).cloned()).collect();
        if loaded.is_empty() {
            return slots;
        }
        for block in &loaded {
            let slot = self.allocate().expect("the caller checked the capacity");
            self.fill(slot, Arc::clone(block));
            slots.push(slot);
        }
        self.events.push(CacheEvent::Stored { tier: Tier::Device, blocks: loaded });
        slots
    }

    /// Allocates an empty slot for one user and evicts its previous content.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        let (slot, ()) = self.free.pop_lru().or_else(|| self.referred.pop_lru())?;
        self.slots[slot as usize].users = 1;
        if let Some(block) = self.slots[slot as usize].block.take() {
            let hash = block.hash;
            self.unlist(&hash, slot);
            self.sessions.remove(&hash);
            if let Some(host) = &mut self.host {
                keep(host, block, &mut self.events);
            }
            self.events.push(CacheEvent::Removed { tier: Tier::Device, hash });
        }
        Some(slot)
    }

    /// Adds a user to the slot that already holds this content, and releases `slot`.
    pub(crate) fn swap_for_cached(&mut self, slot: u32, hash: &EngineHash) -> Option<u32> {
        let cached = self.by_hash.get(hash)?.first;
        self.add_user(cached);
        self.remove_user(slot);
        Some(cached)
    }

    /// Records the content of a used slot, as a copy if it is already held. The caller publishes it together with
    /// adjacent blocks.
    pub(crate) fn fill(&mut self, slot: u32, block: Arc<Block>) {
        self.by_hash
            .entry(block.hash)
            .and_modify(|copies| copies.further.push(slot))
            .or_insert(Copies { first: slot, further: Vec::new() });
        self.slots[slot as usize].block = Some(block);
        self.filled += 1;
    }

    /// A session refers to these blocks, which are in use.
    pub(crate) fn refer(&mut self, session: &Arc<str>, hashes: &[EngineHash]) {
        hashes.iter().for_each(|hash| _ = self.sessions.entry(*hash).or_default().insert(Arc::clone(session)));
    }

    /// Drops the references of a session. Blocks without another one are the most recently used of the others.
    pub(crate) fn close_session(&mut self, session: &str) {
        self.sessions.retain(|_, sessions| {
            sessions.remove(session);
            !sessions.is_empty()
        });
        let (oldest_first, sessions) = (self.referred.iter().rev().map(|(slot, ())| *slot), &self.sessions);
        let block = |slot: &u32| self.slots[*slot as usize].block.as_ref();
        let left = oldest_first.filter(|slot| block(slot).is_none_or(|block| !sessions.contains_key(&block.hash)));
        for slot in left.collect::<Vec<_>>() {
            self.referred.pop(&slot);
            self.free.put(slot, ());
        }
    }

    /// Removes the mapping from a block to a slot.
    fn unlist(&mut self, hash: &EngineHash, slot: u32) {
        let copies = self.by_hash.get_mut(hash).expect("a block is listed with its slot");
        self.filled -= 1;
        if copies.first != slot {
            copies.further.retain(|other| *other != slot);
        } else if copies.further.is_empty() {
            self.by_hash.remove(hash);
        } else {
            copies.first = copies.further.remove(0);
        }
    }

    /// Number of copies of a block on the device.
    pub(crate) fn copies(&self, hash: &EngineHash) -> usize {
        self.by_hash.get(hash).map_or(0, |copies| 1 + copies.further.len())
    }

    pub(crate) fn announce(&mut self, blocks: Vec<Arc<Block>>) {
        if let Some(beside) = &mut self.beside {
            beside.store(&blocks, &mut self.events);
        }
        self.events.push(CacheEvent::Stored { tier: Tier::Device, blocks: blocks.clone() });
        // The last block first, so that a parent outlives its children.
        if let Some(host) = self.host.as_mut().filter(|_| self.writes_through) {
            blocks.into_iter().rev().for_each(|block| keep(host, block, &mut self.events));
        }
    }

    /// Removes one user from each slot, the last slot first, so that a block is evicted before its ancestors.
    pub(crate) fn release(&mut self, slots: &[u32]) {
        slots.iter().rev().for_each(|slot| self.remove_user(*slot));
    }

    /// Removes all content of the device, and of the host unless it is kept. Has no effect while content is in use.
    pub(crate) fn clear(&mut self, keeps_host: bool) -> bool {
        if self.used_blocks() > 0 {
            return false;
        }
        self.by_hash.clear();
        self.filled = 0;
        self.sessions.clear();
        while let Some((slot, ())) = self.referred.pop_lru() {
            self.free.put(slot, ());
        }
        self.slots.iter_mut().for_each(|slot| slot.block = None);
        if let Some(beside) = &mut self.beside {
            beside.clear();
        }
        if let Some(host) = self.host.as_mut().filter(|_| !keeps_host) {
            host.clear();
        }
        true
    }

    /// All blocks of a tier without duplicates, parents before children.
    pub(crate) fn held(&self, tier: Tier) -> Vec<Arc<Block>> {
        let mut held: Vec<Arc<Block>> = match tier {
            Tier::Device => self.slots.iter().filter_map(|slot| slot.block.clone()).collect(),
            Tier::Host => self.host.iter().flat_map(|host| host.iter().map(|(_, block)| Arc::clone(block))).collect(),
            Tier::Beside => self.beside.iter().flat_map(|beside| beside.held().cloned()).collect(),
        };
        held.sort_by_key(|block| (block.depth, block.hash));
        held.dedup_by_key(|block| block.hash);
        held
    }

    fn add_user(&mut self, slot: u32) {
        let users = &mut self.slots[slot as usize].users;
        if *users == 0 {
            self.free.pop(&slot);
            self.referred.pop(&slot);
        }
        *users += 1;
    }

    fn remove_user(&mut self, slot: u32) {
        let Slot { users, block } = &mut self.slots[slot as usize];
        *users -= 1;
        match (*users, block) {
            (1.., _) => {}
            (0, Some(block)) if self.sessions.contains_key(&block.hash) => _ = self.referred.put(slot, ()),
            (0, is_filled) => {
                self.free.put(slot, ());
                if is_filled.is_none() {
                    self.free.demote(&slot);
                }
            }
        }
    }

    /// Panics if the structure is inconsistent with itself or with `users`, the number of sequences per slot.
    pub(crate) fn check_invariants(&self, users: &[u32]) {
        let mut is_free = vec![false; self.slots.len()];
        self.free.iter().chain(self.referred.iter()).for_each(|(slot, ())| is_free[*slot as usize] = true);
        assert_eq!(is_free.iter().filter(|is_free| **is_free).count(), self.free_blocks() as usize);
        let mut filled = 0;
        for (at, slot) in self.slots.iter().enumerate() {
            assert_eq!(slot.users, users[at], "users of slot {at}");
            assert_eq!(slot.users == 0, is_free[at], "slot {at} is free or used");
            if let Some(block) = &slot.block {
                let copies = &self.by_hash[&block.hash];
                assert!(copies.first == at as u32 || copies.further.contains(&(at as u32)), "slot {at} is found");
                filled += 1;
            }
        }
        let listed = self.by_hash.values().map(|copies| 1 + copies.further.len());
        assert_eq!((filled, listed.sum::<usize>()), (self.filled, self.filled));
        for block in self.held(Tier::Device) {
            assert!(block.parent.is_none_or(|parent| self.by_hash.contains_key(&parent)), "{block:?} hangs in the air");
        }
        for block in self.held(Tier::Host) {
            assert!(block.parent.is_none_or(|parent| self.holds(&parent)), "{block:?} hangs in the air");
        }
    }
}

/// Stores a block evicted from the device in host memory, unless it is there already.
fn keep(host: &mut UsageOrder<EngineHash, Arc<Block>>, block: Arc<Block>, events: &mut Vec<CacheEvent>) {
    if host.promote(&block.hash) {
        return;
    }
    if let Some((hash, _)) = host.push(block.hash, Arc::clone(&block)) {
        events.push(CacheEvent::Removed { tier: Tier::Host, hash });
    }
    events.push(CacheEvent::Stored { tier: Tier::Host, blocks: vec![block] });
}
