//! What a store says about whose blocks they are: adapter, salt, extra keys.
//!
//! Owns the reading of vLLM's `extra_keys`, one entry for each block, in which adapter, multimodal objects and salt
//! stand untagged side by side. Promises that a key of unknown meaning never leaves a block in a namespace that it
//! would share with blocks without the key, and that all odd keys are counted. Leaves inheritance to
//! [`super::namespace`].

use smallvec::SmallVec;
use xxhash_rust::xxh3::Xxh3;

use super::event::Event;
use super::msgpack::{Cursor, Item, digest_bytes};
use super::namespace::{self, Namespace};
use super::{Finding, Findings, Limits};
use crate::hashing::{HashScheme, MmBlocks, mm_hash_of_id};

/// In front of a salt that NVIDIA Dynamo's frontend has put among the extra keys.
const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// What the keys of one store say. Used again for the next.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// Multimodal objects: block of the store, hash. Ascending, each once.
    objects: Vec<(usize, u64)>,
    /// From which block of the store on further keys hold, ascending.
    turns: Vec<(usize, u64)>,
}

impl Keys {
    /// Capacity that is worth keeping between batches, in items of each list.
    const KEPT: usize = 1024;

    /// Reads the keys of a store of `n_blocks` blocks behind a block in `parent`, and says where the first belongs,
    /// before any turn.
    ///
    /// # Errors
    /// [`Finding::TooLarge`], or that the keys break off.
    pub(super) fn read(
        &mut self,
        event: &Event<'_>,
        n_blocks: usize,
        parent: Namespace,
        scheme: HashScheme<'_>,
        limits: &Limits,
        findings: &mut Findings,
    ) -> Result<Namespace, Finding> {
        self.objects.clear();
        self.turns.clear();
        let mut base = parent;
        let lora_name = event.lora_name.filter(|name| !name.is_empty());
        if let Some(name) = lora_name {
            base.lora = namespace::of_lora(scheme, name);
        } else if let Some(mut id) = event.lora_id.filter(|id| { *id }.item() != Ok(Item::Uint(0))) {
            let mut hasher = namespace::lora_id_hasher();
            id.digest(&mut hasher)?;
            base.lora = hasher.digest();
            findings.add(Finding::UnnamedLora);
        }
        // A salt in a field of its own is named with each store: it stands for the whole prompt.
        let named_salt = event.cache_salt.filter(|salt| !salt.is_empty());
        if let Some(salt) = named_salt {
            base.salt = namespace::of_salt(scheme, salt);
        }
        for mut odd in event.odd_keys.into_iter().flatten() {
            let mut hasher = namespace::keys_hasher();
            odd.digest(&mut hasher)?;
            self.turns.push((0, hasher.digest()));
            findings.add(Finding::UnknownNamespace);
        }
        if let Some(mut cursor) = event.extra_keys
            && let Item::Array(n_entries) = cursor.item()?
        {
            let mut keys_left = limits.keys_max;
            for block_idx in 0..n_blocks.min(n_entries as usize) {
                let begins_prompt = block_idx == 0 && event.parent.is_none();
                let entry = Entry { block_idx, begins_prompt, lora_name, named_salt };
                if let Some(salt) = self.read_entry(&mut cursor, entry, &mut keys_left, findings)? {
                    base.salt = namespace::of_salt(scheme, salt);
                }
            }
            self.objects.sort_unstable();
            self.objects.dedup();
        }
        Ok(base)
    }

    /// Reads the keys of one block, and the salt if they name it.
    fn read_entry<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        entry: Entry<'_>,
        keys_left: &mut usize,
        findings: &mut Findings,
    ) -> Result<Option<&'a str>, Finding> {
        let start = *cursor;
        let head = cursor.item()?;
        if head == Item::Nil {
            return Ok(None);
        }
        let mut odd: Option<Xxh3> = None;
        let mut salts: SmallVec<[&'a str; 2]> = SmallVec::new();
        // Named once in each entry. A second time it is a salt that somebody chose to look like it.
        let mut lora_name = entry.lora_name;
        let n_keys = if let Item::Array(n_keys) = head { n_keys as usize } else { 0 };
        *keys_left = keys_left.checked_sub(n_keys).ok_or(Finding::TooLarge)?;
        if !matches!(head, Item::Array(_)) {
            *cursor = start;
            cursor.digest(odd.get_or_insert_with(namespace::keys_hasher))?;
        }
        for _ in 0..n_keys {
            let start = *cursor;
            match Key::read(cursor)? {
                Some(Key::Plain(key)) if lora_name == Some(key) => lora_name = None,
                Some(Key::Plain(key)) if entry.names_salt(key) => {}
                Some(Key::Plain(key)) if entry.begins_prompt => salts.push(key),
                Some(Key::Plain(id) | Key::Object(id)) => {
                    self.objects.extend(mm_hash_of_id(id).map(|mm_hash| (entry.block_idx, mm_hash)));
                }
                None => {
                    *cursor = start;
                    cursor.digest(odd.get_or_insert_with(namespace::keys_hasher))?;
                }
            }
        }
        if let Some(hasher) = odd {
            self.turns.push((entry.block_idx, hasher.digest()));
            findings.add(Finding::UnknownNamespace);
        }
        match salts[..] {
            [] => Ok(None),
            [salt] if entry.named_salt.is_none() => Ok(Some(salt.strip_prefix(SALT_PREFIX).unwrap_or(salt))),
            _ => {
                let mut hasher = namespace::keys_hasher();
                salts.iter().for_each(|salt| digest_bytes(&mut hasher, 5, salt.as_bytes()));
                self.turns.push((entry.block_idx, hasher.digest()));
                findings.add(Finding::AmbiguousNamespace);
                Ok(None)
            }
        }
    }

    /// Gives back what a store with many keys made it take.
    pub(super) fn shrink(&mut self) {
        self.objects.shrink_to(Self::KEPT);
        self.turns.shrink_to(Self::KEPT);
    }

    /// Whether all blocks belong where the first does.
    pub(super) fn is_uniform(&self) -> bool {
        self.turns.is_empty()
    }

    /// The store in runs of blocks that belong together: where each run ends, and its namespace.
    pub(super) fn runs(&self, base: Namespace, n_blocks: usize) -> impl Iterator<Item = (usize, Namespace)> + '_ {
        let mut turns = self.turns.iter().peekable();
        let mut namespace = base;
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= n_blocks {
                return None;
            }
            while let Some((_, keys)) = turns.next_if(|(from, _)| *from <= at) {
                namespace = namespace.within(*keys);
            }
            at = turns.peek().map_or(n_blocks, |(from, _)| n_blocks.min(*from));
            Some((at, namespace))
        })
    }

    /// The objects in the blocks from one to before another.
    pub(super) fn objects(&self, from: usize, to: usize) -> MmBlocks {
        if self.objects.is_empty() {
            return MmBlocks::NONE;
        }
        let mut rest = &self.objects[self.objects.partition_point(|(block_idx, _)| *block_idx < from)..];
        MmBlocks::listed((from..to).map(|block_idx| {
            let (of_block, behind) = rest.split_at(rest.partition_point(|(idx, _)| *idx <= block_idx));
            rest = behind;
            of_block.iter().map(|(_, mm_hash)| *mm_hash)
        }))
    }
}

/// One block's keys, and what is known of them beforehand.
#[derive(Clone, Copy)]
struct Entry<'e> {
    block_idx: usize,
    /// Whether a salt may stand here.
    begins_prompt: bool,
    lora_name: Option<&'e str>,
    named_salt: Option<&'e str>,
}

impl Entry<'_> {
    /// Whether the key is nothing but the salt that the event names in a field of its own.
    fn names_salt(&self, key: &str) -> bool {
        let salt = key.strip_prefix(SALT_PREFIX).unwrap_or(key);
        salt.is_empty() || self.named_salt == Some(salt)
    }
}

/// A key whose meaning its form tells.
enum Key<'a> {
    /// A string.
    Plain(&'a str),
    /// A multimodal object's name, which stands with its offset.
    Object(&'a str),
}

impl<'a> Key<'a> {
    /// None if the form tells nothing; the cursor is then somewhere in the key.
    fn read(cursor: &mut Cursor<'a>) -> Result<Option<Self>, Finding> {
        let head = cursor.item()?;
        if let Item::Str(key) = head {
            return Ok(str::from_utf8(key).ok().map(Self::Plain));
        }
        if head == Item::Array(2)
            && let Item::Str(id) = cursor.item()?
            && let Item::Uint(_) | Item::Neg(_) = cursor.item()?
        {
            return Ok(str::from_utf8(id).ok().map(Self::Object));
        }
        Ok(None)
    }
}
