//! Namespaces: sets of requests that may share blocks.
//!
//! Remembers which blocks of the rank are outside the default namespace, so that their children and their copies in
//! other tiers inherit the namespace: engines send a salt only with the first block of a prompt, and connectors none. Namespaces from different sources (adapter name, salt,
//! adapter number, keys of unknown meaning) have separate hash seeds. The number of remembered blocks is bounded. Event
//! parsing is in [`super::keys`].

use std::collections::BTreeMap;
use std::mem;

use ahash::AHashMap;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::{Finding, NamespaceRecord};
use crate::hashing::HashScheme;
use crate::protocol::{EngineHash, StorageTier};

/// Distinct from the seeds 0 and 1 of [`HashScheme::seed`], so no adapter name or salt of a request can produce one of
/// these namespaces.
const KEYS_SEED: u64 = 2;
pub(super) const LORA_ID_SEED: u64 = 3;
const CHAIN_SEED: u64 = 4;

/// Number of blocks without counted copies that are remembered.
const DOUBTED_MAX: usize = 1 << 16;

/// Contribution of a namespace to the seed of block hashes; zero for most blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Namespace {
    /// From the adapter, which is sent with each store; 0 without an adapter.
    pub(super) lora: u64,
    /// From the salt and other keys, which are sent at the start of a prompt; 0 without a salt.
    pub(super) salt: u64,
}

impl Namespace {
    pub(super) fn is_default(self) -> bool {
        self == Self::default()
    }

    pub(super) fn seed(self) -> u64 {
        HashScheme::BASE_SEED.wrapping_add(self.lora).wrapping_add(self.salt)
    }

    /// The sub-namespace for further keys.
    pub(super) fn within(self, keys: u64) -> Self {
        let salt = match self.salt {
            0 => keys,
            salt => {
                let mut both = [0; 16];
                both[..8].copy_from_slice(&salt.to_le_bytes());
                both[8..].copy_from_slice(&keys.to_le_bytes());
                xxh3_64_with_seed(&both, CHAIN_SEED)
            }
        };
        Self { salt, ..self }
    }
}

/// Seed contribution of an adapter name, equal to that of requests for the adapter.
pub(super) fn of_lora(scheme: HashScheme<'_>, name: &str) -> u64 {
    HashScheme { lora_name: Some(name), cache_salt: None, ..scheme }.seed().wrapping_sub(HashScheme::BASE_SEED)
}

/// Seed contribution of a salt, equal to that of requests with the salt.
pub(super) fn of_salt(scheme: HashScheme<'_>, salt: &str) -> u64 {
    HashScheme { lora_name: None, cache_salt: Some(salt), ..scheme }.seed().wrapping_sub(HashScheme::BASE_SEED)
}

/// Hasher for keys of unknown meaning.
pub(super) fn keys_hasher() -> Xxh3 {
    Xxh3::with_seed(KEYS_SEED)
}

/// One block outside the default namespace.
#[derive(Clone, Copy, Debug)]
struct NamespacedBlock {
    namespace: Namespace,
    /// Copies in each tier; each is removed by a separate event. The last number is 1 if the device may have another copy.
    holds: [u32; 5],
}

impl NamespacedBlock {
    fn of(namespace: Namespace) -> Self {
        Self { namespace, holds: [0; 5] }
    }
}

/// The blocks outside the default namespace, by engine hash.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    entries: AHashMap<u64, NamespacedBlock>,
    /// Whether lower tiers may have copies.
    has_copies: bool,
    /// Upper bound of the entries without counted copies since the last purge.
    doubted: usize,
    journal: Option<Journal>,
}

/// Undo log of a batch that may be rolled back.
#[derive(Debug, Default)]
struct Journal {
    /// Entries changed since the start of the batch, up to a clear.
    changed: BTreeMap<u64, Option<NamespacedBlock>>,
    /// Entries dropped by a clear.
    cleared: Option<AHashMap<u64, NamespacedBlock>>,
}

impl Namespaces {
    /// Namespace inherited by the children of this block.
    pub(super) fn of(&self, name: u64) -> Namespace {
        self.entries.get(&name).map_or(Namespace::default(), |entry| entry.namespace)
    }

    /// Checks that the names fit within the limit.
    ///
    /// # Errors
    /// [`Finding::NamespacesFull`].
    pub(super) fn room_for(&self, names: &[u64], entries_max: usize) -> Result<(), Finding> {
        // Known names are excluded only if the upper bound does not fit.
        if self.entries.len() + names.len() <= entries_max {
            return Ok(());
        }
        let new = names.iter().filter(|name| !self.entries.contains_key(name)).count();
        if self.entries.len() + new <= entries_max { Ok(()) } else { Err(Finding::NamespacesFull) }
    }

    /// The lower tier with copies of the most blocks, if the names do not fit within the limit.
    #[cold]
    pub(super) fn crowded_tier(&mut self, names: &[u64], entries_max: usize) -> Option<StorageTier> {
        if !self.has_copies || self.room_for(names, entries_max).is_ok() {
            return None;
        }
        let blocks = |tier: &StorageTier| self.entries.values().filter(|entry| entry.holds[*tier as usize] > 0).count();
        let counted = StorageTier::ALL.into_iter().skip(1).map(|tier| (blocks(&tier), tier));
        let crowded = counted.filter(|(blocks, _)| *blocks > 0).max().map(|(_, tier)| tier);
        self.has_copies = crowded.is_some();
        crowded
    }

    /// Records a block stored in device memory. The last such store of a name determines its namespace in every tier. A
    /// repeated store adds a copy where one of the index may: the index must not hold a block longer than this map.
    pub(super) fn stored(&mut self, name: u64, namespace: Namespace, may_be_copy: bool) {
        if !namespace.is_default() {
            self.save(name);
            let entry = self.entries.entry(name).or_insert(NamespacedBlock::of(namespace));
            let [device, .., doubted] = &mut entry.holds;
            *doubted |= u32::from(!may_be_copy && *device > 0);
            *device = if may_be_copy { device.saturating_add(1) } else { (*device).max(1) };
            entry.namespace = namespace;
        } else if self.entries.contains_key(&name) {
            self.save(name);
            self.entries.remove(&name);
        }
    }

    /// Records a copy of a block in a lower tier. A known name keeps its namespace; any other block is in `namespace`.
    pub(super) fn offloaded(&mut self, name: u64, namespace: Namespace, tier: StorageTier) {
        if namespace.is_default() && !self.entries.contains_key(&name) {
            return;
        }
        self.save(name);
        self.has_copies = true;
        let entry = self.entries.entry(name).or_insert(NamespacedBlock::of(namespace));
        let holds = &mut entry.holds[tier as usize];
        *holds = holds.saturating_add(1);
    }

    /// Records the removal of a copy from one tier. Forgets the block with its last removal, or with the next one if it may
    /// have a copy that is not counted.
    pub(super) fn removed(&mut self, name: u64, tier: StorageTier) {
        if !self.entries.contains_key(&name) {
            return;
        }
        self.save(name);
        if let Some(entry) = self.entries.get_mut(&name) {
            let is_counted = entry.holds[tier as usize] > 0;
            let holds = &mut entry.holds[if is_counted || tier != StorageTier::Device { tier as usize } else { 4 }];
            *holds = holds.saturating_sub(1);
            if entry.holds == [0; 5] {
                self.entries.remove(&name);
            } else if entry.holds[..4] == [0; 4] {
                self.doubted += 1;
            }
        }
    }

    /// Records that a tier was cleared.
    pub(super) fn clear_tier(&mut self, tier: StorageTier) {
        if let Some(journal) = &mut self.journal {
            journal.cleared.get_or_insert_with(|| self.entries.clone());
        }
        self.entries.retain(|_, entry| {
            entry.holds[tier as usize] = 0;
            if tier == StorageTier::Device {
                entry.holds[4] = 0;
            }
            entry.holds != [0; 5]
        });
    }

    /// Forgets every block.
    pub(super) fn clear(&mut self) {
        let dropped = mem::take(&mut self.entries);
        if let Some(journal) = &mut self.journal {
            journal.cleared.get_or_insert(dropped);
        }
    }

    /// Starts a batch that may be rolled back.
    pub(super) fn start_batch(&mut self) {
        self.journal = Some(Journal::default());
    }

    /// Commits the batch.
    pub(super) fn commit(&mut self) {
        self.journal = None;
        if self.doubted > DOUBTED_MAX {
            self.entries.retain(|_, entry| entry.holds[..4] != [0; 4]);
            self.doubted = 0;
        }
    }

    /// Rolls the batch back.
    pub(super) fn roll_back(&mut self) {
        let Some(Journal { changed, cleared }) = self.journal.take() else { return };
        if let Some(dropped) = cleared {
            (self.entries, self.has_copies) = (dropped, true);
        }
        for (name, before) in changed {
            match before {
                Some(entry) => self.entries.insert(name, entry),
                None => self.entries.remove(&name),
            };
        }
    }

    /// Saves the entry of a name before a change.
    fn save(&mut self, name: u64) {
        if let Some(journal) = &mut self.journal
            && journal.cleared.is_none()
        {
            journal.changed.entry(name).or_insert_with(|| self.entries.get(&name).copied());
        }
    }

    /// Every remembered block, sorted by engine hash.
    pub(super) fn sorted(&self) -> Vec<NamespaceRecord> {
        let record = |(name, block): (&u64, &NamespacedBlock)| NamespaceRecord {
            engine_hash: EngineHash(*name),
            lora: block.namespace.lora,
            salt: block.namespace.salt,
            holds: block.holds,
        };
        let mut records: Vec<_> = self.entries.iter().map(record).collect();
        records.sort_unstable_by_key(|record| record.engine_hash);
        records
    }

    /// The map with these blocks.
    pub(super) fn resumed(records: &[NamespaceRecord]) -> Self {
        let entry = |record: &NamespaceRecord| {
            let NamespaceRecord { engine_hash, lora, salt, holds } = *record;
            (engine_hash.0, NamespacedBlock { holds, ..NamespacedBlock::of(Namespace { lora, salt }) })
        };
        Self { entries: records.iter().map(entry).collect(), has_copies: true, ..Self::default() }
    }

    /// Number of remembered blocks.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports without copies leave blocks behind, for which no second removal comes.
    #[test]
    fn possible_copies_keep_their_namespace_in_bounded_memory() {
        let (mut namespaces, namespace) = (Namespaces::default(), Namespace { lora: 0, salt: 7 });
        let twice = |namespaces: &mut Namespaces, name| (0..2).for_each(|_| namespaces.stored(name, namespace, false));
        let removed = |namespaces: &mut Namespaces, name| namespaces.removed(name, StorageTier::Device);
        twice(&mut namespaces, 1);
        removed(&mut namespaces, 1);
        assert_eq!(namespaces.of(1), namespace);
        removed(&mut namespaces, 1);
        assert_eq!(namespaces.len(), 0);
        for name in 0..3 * DOUBTED_MAX as u64 {
            twice(&mut namespaces, name);
            removed(&mut namespaces, name);
            namespaces.commit();
            assert!(namespaces.len() <= DOUBTED_MAX);
        }
    }
}
