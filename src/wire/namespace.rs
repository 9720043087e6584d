//! Namespaces: who may share blocks with whom.
//!
//! Owns which blocks of the rank stand in a namespace that is not everybody's, so that what is stored behind them is
//! put there too: engines name a salt on the first block of a prompt only. Promises that namespaces of different
//! origin (adapter by name, salt, adapter by number, keys of unknown meaning) are seeded apart, and no more blocks
//! than the bound. Does not read events.

use std::collections::BTreeMap;
use std::mem;

use ahash::AHashMap;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::Finding;
use crate::hashing::{BASE_SEED, HashScheme};
use crate::protocol::StorageTier;

/// Apart from the seeds 0 and 1 of [`HashScheme::seed`]: no name or salt that a request could give makes one of these.
const KEYS_SEED: u64 = 2;
const LORA_ID_SEED: u64 = 3;
const CHAIN_SEED: u64 = 4;

/// What the blocks of a namespace add to the seed of their hashes: nothing, for most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Namespace {
    /// By the adapter, named with each store; 0 for none.
    pub(super) lora: u64,
    /// By the salt and other keys, named where a prompt begins; 0 for none.
    pub(super) salt: u64,
}

impl Namespace {
    pub(super) fn is_default(self) -> bool {
        self == Self::default()
    }

    pub(super) fn seed(self) -> u64 {
        BASE_SEED.wrapping_add(self.lora).wrapping_add(self.salt)
    }

    /// The namespace inside this one that further keys make.
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

/// What an adapter's name adds: what requests for it add.
pub(super) fn of_lora(scheme: HashScheme<'_>, name: &str) -> u64 {
    HashScheme { lora_name: Some(name), cache_salt: None, ..scheme }.seed().wrapping_sub(BASE_SEED)
}

/// What a salt adds: what requests with it add.
pub(super) fn of_salt(scheme: HashScheme<'_>, salt: &str) -> u64 {
    HashScheme { lora_name: None, cache_salt: Some(salt), ..scheme }.seed().wrapping_sub(BASE_SEED)
}

/// Hash of an adapter's number.
pub(super) fn lora_id_hasher() -> Xxh3 {
    Xxh3::with_seed(LORA_ID_SEED)
}

/// Hash of keys of unknown meaning.
pub(super) fn keys_hasher() -> Xxh3 {
    Xxh3::with_seed(KEYS_SEED)
}

/// One block outside the default namespace.
#[derive(Clone, Copy, Debug)]
struct Entry {
    namespace: Namespace,
    /// One bit for each tier that has the block.
    tiers: u8,
    /// Copies on the device beside the first: each is removed by an event of its own.
    copies: u32,
}

/// The blocks outside the default namespace, by their engine hash.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    entries: AHashMap<u64, Entry>,
    journal: Option<Journal>,
}

/// How things stood when a batch began that may have to be taken back.
#[derive(Debug, Default)]
struct Journal {
    /// What was changed since, up to a clear.
    changed: BTreeMap<u64, Option<Entry>>,
    /// What a clear dropped.
    cleared: Option<AHashMap<u64, Entry>>,
}

impl Namespaces {
    /// Where what follows this block belongs.
    pub(super) fn of(&self, name: u64) -> Namespace {
        self.entries.get(&name).map_or(Namespace::default(), |entry| entry.namespace)
    }

    /// Whether so many names can be remembered.
    ///
    /// # Errors
    /// [`Finding::NamespacesFull`].
    pub(super) fn room_for(&self, names: &[u64], entries_max: usize) -> Result<(), Finding> {
        // Most that come again are counted only when it matters.
        if self.entries.len() + names.len() <= entries_max {
            return Ok(());
        }
        let new = names.iter().filter(|name| !self.entries.contains_key(name)).count();
        if self.entries.len() + new <= entries_max { Ok(()) } else { Err(Finding::NamespacesFull) }
    }

    /// A block was stored. The last store of a name decides where it belongs, in every tier. Behind a parent on the device
    /// it is another copy if it is there already, by the rule of the index, which must not know a block longer than this.
    pub(super) fn stored(&mut self, name: u64, namespace: Namespace, tier: StorageTier, has_parent: bool) {
        if !namespace.is_default() {
            self.note(name);
            let entry = self.entries.entry(name).or_insert(Entry { namespace, tiers: 0, copies: 0 });
            let is_copy = has_parent && tier == StorageTier::Device && entry.tiers & bit(tier) != 0;
            entry.copies = entry.copies.saturating_add(u32::from(is_copy));
            entry.namespace = namespace;
            entry.tiers |= bit(tier);
        } else if self.entries.contains_key(&name) {
            self.note(name);
            self.entries.remove(&name);
        }
    }

    /// A block, or a copy of it, was removed from one tier; forgotten with the last.
    pub(super) fn removed(&mut self, name: u64, tier: StorageTier) {
        if !self.entries.contains_key(&name) {
            return;
        }
        self.note(name);
        if let Some(entry) = self.entries.get_mut(&name) {
            if tier == StorageTier::Device && entry.copies > 0 {
                entry.copies -= 1;
                return;
            }
            entry.tiers &= !bit(tier);
            if entry.tiers == 0 {
                self.entries.remove(&name);
            }
        }
    }

    /// Every block was removed.
    pub(super) fn clear(&mut self) {
        let dropped = mem::take(&mut self.entries);
        if let Some(journal) = &mut self.journal {
            journal.cleared.get_or_insert(dropped);
        }
    }

    /// A batch begins that may have to be taken back.
    pub(super) fn begin(&mut self) {
        self.journal = Some(Journal::default());
    }

    /// The batch stays.
    pub(super) fn keep(&mut self) {
        self.journal = None;
    }

    /// The batch goes, without a trace.
    pub(super) fn take_back(&mut self) {
        let Some(Journal { changed, cleared }) = self.journal.take() else { return };
        if let Some(dropped) = cleared {
            self.entries = dropped;
        }
        for (name, before) in changed {
            match before {
                Some(entry) => self.entries.insert(name, entry),
                None => self.entries.remove(&name),
            };
        }
    }

    /// Before a name changes.
    fn note(&mut self, name: u64) {
        if let Some(journal) = &mut self.journal
            && journal.cleared.is_none()
        {
            journal.changed.entry(name).or_insert_with(|| self.entries.get(&name).copied());
        }
    }

    /// Blocks remembered.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn bit(tier: StorageTier) -> u8 {
    match tier {
        StorageTier::Device => 1,
        StorageTier::HostPinned => 2,
        StorageTier::Disk => 4,
        StorageTier::External => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_remembered_until_its_last_copy_is_removed() {
        let (mut namespaces, namespace) = (Namespaces::default(), Namespace { lora: 0, salt: 7 });
        let device = StorageTier::Device;
        namespaces.stored(1, namespace, device, false);
        namespaces.stored(2, namespace, device, true);
        namespaces.stored(1, namespace, device, false); // reported again
        namespaces.stored(2, namespace, device, true); // another copy
        namespaces.begin();
        namespaces.removed(2, device);
        assert_eq!(namespaces.of(2), namespace);
        namespaces.removed(2, device);
        namespaces.removed(1, device);
        assert_eq!(namespaces.len(), 0);
        namespaces.take_back();
        namespaces.removed(2, device);
        assert_eq!(namespaces.of(2), namespace, "the copy is back, too");
        namespaces.stored(2, namespace, StorageTier::HostPinned, true);
        namespaces.removed(2, device);
        namespaces.removed(2, StorageTier::HostPinned);
        namespaces.removed(1, device);
        assert_eq!(namespaces.len(), 0);
    }
}
