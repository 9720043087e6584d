//! Namespace keys of a store event: adapter, salt and extra keys.
//!
//! Parses vLLM's `extra_keys`, one entry per block, in which adapter, multimodal objects and salt are adjacent and
//! untagged. A block with a key of unknown meaning never shares a namespace with blocks without that key, and all
//! unknown keys are counted. [`super::namespace`] handles inheritance.
//!
//! A later vLLM adds a second plain key to each block of an adapter: the identity of its weights. A salt is only in the
//! first block of a prompt. A key directly behind the adapter's name is an identity if all blocks of a store of at least
//! two, from the start of a prompt, have it; then also in the stores of this adapter that show nothing, until such a store
//! lacks it. The identity is not part of the namespace, because requests do not name it.

use ahash::AHashMap;
use smallvec::SmallVec;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::event::WireEvent;
use super::msgpack::{Cursor, MsgpackItem, digest_bytes};
use super::namespace::{self, Namespace};
use super::{DecoderLimits, Finding, Findings};
use crate::hashing::{HashScheme, MmBlocks, MmSpan};

/// Prefix of a salt that NVIDIA Dynamo's frontend adds to the extra keys.
const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// StoreKeys of one store, reused for the next.
#[derive(Debug, Default)]
pub(super) struct StoreKeys {
    /// Multimodal objects as (block of the store, hash), ascending and unique.
    pub(super) objects: Vec<(usize, u64)>,
    /// Namespace changes as (first block of the store, hash of the additional keys), ascending.
    pub(super) changes: Vec<(usize, u64)>,
    /// Hash of the identity of each adapter's weights, by hash of the adapter's name.
    identities: AHashMap<u64, u64>,
}

impl StoreKeys {
    /// Capacity kept between batches, in items per list.
    const KEPT: usize = 1024;
    /// Maximum number of adapters with an identity.
    const IDENTITIES_MAX: usize = 4096;

    /// The keys of a decoder that knows these identities.
    pub(super) fn resumed(identities: &[(u64, u64)]) -> Self {
        Self { identities: identities.iter().copied().take(Self::IDENTITIES_MAX).collect(), ..Self::default() }
    }

    /// Hash of each adapter's name and of the identity of its weights, sorted.
    pub(super) fn identities(&self) -> Vec<(u64, u64)> {
        let mut identities: Vec<_> = self.identities.iter().map(|(name, identity)| (*name, *identity)).collect();
        identities.sort_unstable();
        identities
    }

    /// Reads the keys of a store of `n_blocks` blocks behind a block in namespace `parent`. Returns the namespace of
    /// the first block before any change.
    ///
    /// # Errors
    /// [`Finding::TooLarge`], or the error of truncated keys.
    pub(super) fn read(
        &mut self,
        event: &WireEvent<'_>,
        n_blocks: usize,
        parent: Namespace,
        scheme: HashScheme<'_>,
        limits: &DecoderLimits,
        findings: &mut Findings,
    ) -> Result<Namespace, Finding> {
        self.objects.clear();
        self.changes.clear();
        let mut base = parent;
        let lora_name = event.lora_name.filter(|name| !name.is_empty());
        if let Some(name) = lora_name {
            base.lora = namespace::of_lora(scheme, name);
        } else if let Some(mut id) = event.lora_id.filter(|id| { *id }.item() != Ok(MsgpackItem::Uint(0))) {
            let mut hasher = Xxh3::with_seed(namespace::LORA_ID_SEED);
            id.digest(&mut hasher)?;
            base.lora = hasher.digest();
            findings.add(Finding::UnnamedLora);
        }
        // Engines repeat a salt field with every store: it applies to the whole prompt.
        let named_salt = event.cache_salt.filter(|salt| !salt.is_empty());
        if let Some(salt) = named_salt {
            base.salt = namespace::of_salt(scheme, salt);
        }
        for mut odd in event.odd_keys.into_iter().flatten() {
            let mut hasher = namespace::keys_hasher();
            odd.digest(&mut hasher)?;
            self.changes.push((0, hasher.digest()));
            findings.add(Finding::UnknownNamespace);
        }
        if let Some(mut cursor) = event.extra_keys
            && let MsgpackItem::Array(n_entries) = cursor.item()?
        {
            let identity =
                lora_name.and_then(|name| self.identity(event, name, n_blocks.min(n_entries as usize), cursor));
            let mut keys_left = limits.keys_max;
            for block_idx in 0..n_blocks.min(n_entries as usize) {
                let begins_prompt = block_idx == 0 && event.parent.is_none();
                let entry = BlockKeys { block_idx, begins_prompt, lora_name, identity, named_salt };
                if let Some(salt) = self.read_entry(&mut cursor, entry, &mut keys_left, findings)? {
                    base.salt = namespace::of_salt(scheme, salt);
                }
            }
            self.objects.sort_unstable();
            self.objects.dedup();
        }
        Ok(base)
    }

    /// Hash of the identity of an adapter's weights, from these entries or from earlier stores.
    fn identity(
        &mut self,
        event: &WireEvent<'_>,
        lora_name: &str,
        n_entries: usize,
        mut entries: Cursor<'_>,
    ) -> Option<u64> {
        let name = xxh3_64(lora_name.as_bytes());
        if event.parent.is_some() || n_entries < 2 {
            return self.identities.get(&name).copied();
        }
        let mut keys = (0..n_entries).map(|_| key_behind(lora_name, &mut entries));
        let first = keys.next().flatten().filter(|first| keys.all(|key| key == Some(*first)));
        match first.map(|key| xxh3_64(key.as_bytes())) {
            Some(identity) if self.identities.len() < Self::IDENTITIES_MAX => {
                self.identities.insert(name, identity);
                Some(identity)
            }
            Some(identity) => Some(identity),
            None => {
                self.identities.remove(&name);
                None
            }
        }
    }

    /// Reads the keys of one block. Returns the salt if the keys contain one.
    fn read_entry<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        entry: BlockKeys<'_>,
        keys_left: &mut usize,
        findings: &mut Findings,
    ) -> Result<Option<&'a str>, Finding> {
        let start = *cursor;
        let head = cursor.item()?;
        if head == MsgpackItem::Nil {
            return Ok(None);
        }
        let mut odd: Option<Xxh3> = None;
        let mut salts: SmallVec<[&'a str; 2]> = SmallVec::new();
        // Each entry contains the adapter name once. A second occurrence is a salt equal to the name.
        let mut lora_name = entry.lora_name;
        let n_keys = if let MsgpackItem::Array(n_keys) = head { n_keys as usize } else { 0 };
        *keys_left = keys_left.checked_sub(n_keys).ok_or(Finding::TooLarge)?;
        if !matches!(head, MsgpackItem::Array(_)) {
            *cursor = start;
            cursor.digest(odd.get_or_insert_with(namespace::keys_hasher))?;
        }
        let mut identity = None;
        for _ in 0..n_keys {
            let start = *cursor;
            match ExtraKey::read(cursor)? {
                Some(ExtraKey::Plain(key)) if identity.take() == Some(xxh3_64(key.as_bytes())) => {}
                Some(ExtraKey::Plain(key)) if lora_name == Some(key) => (lora_name, identity) = (None, entry.identity),
                Some(ExtraKey::Plain(key)) if entry.repeats_salt(key) => {}
                Some(ExtraKey::Plain(key)) if entry.begins_prompt => salts.push(key),
                Some(ExtraKey::Plain(id) | ExtraKey::Object(id)) => {
                    self.objects.extend(MmSpan::hash_of_id(id).map(|mm_hash| (entry.block_idx, mm_hash)));
                }
                None => {
                    *cursor = start;
                    cursor.digest(odd.get_or_insert_with(namespace::keys_hasher))?;
                }
            }
        }
        if let Some(hasher) = odd {
            self.changes.push((entry.block_idx, hasher.digest()));
            findings.add(Finding::UnknownNamespace);
        }
        match salts[..] {
            [] => Ok(None),
            [salt] if entry.named_salt.is_none() => Ok(Some(salt.strip_prefix(SALT_PREFIX).unwrap_or(salt))),
            _ => {
                let mut hasher = namespace::keys_hasher();
                salts.iter().for_each(|salt| digest_bytes(&mut hasher, 5, salt.as_bytes()));
                self.changes.push((entry.block_idx, hasher.digest()));
                findings.add(Finding::AmbiguousNamespace);
                Ok(None)
            }
        }
    }

    /// Frees the memory of stores with many keys.
    pub(super) fn shrink(&mut self) {
        self.objects.shrink_to(Self::KEPT);
        self.changes.shrink_to(Self::KEPT);
    }

    /// Splits the store into runs of blocks with the same namespace: the end of each run and its namespace.
    pub(super) fn runs(&self, base: Namespace, n_blocks: usize) -> impl Iterator<Item = (usize, Namespace)> + '_ {
        let mut changes = self.changes.iter().peekable();
        let mut namespace = base;
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= n_blocks {
                return None;
            }
            while let Some((_, keys)) = changes.next_if(|(from, _)| *from <= at) {
                namespace = namespace.within(*keys);
            }
            at = changes.peek().map_or(n_blocks, |(from, _)| n_blocks.min(*from));
            Some((at, namespace))
        })
    }

    /// The objects in blocks `from..to`.
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

/// Context for reading one block's keys.
#[derive(Clone, Copy)]
struct BlockKeys<'e> {
    block_idx: usize,
    /// Whether the keys may contain a salt.
    begins_prompt: bool,
    lora_name: Option<&'e str>,
    /// Hash of the key that may follow the adapter's name.
    identity: Option<u64>,
    named_salt: Option<&'e str>,
}

/// The plain key directly behind the adapter's name in the next entry.
fn key_behind<'a>(lora_name: &str, entries: &mut Cursor<'a>) -> Option<&'a str> {
    let MsgpackItem::Array(n_keys @ 2..) = entries.item().ok()? else { return None };
    let (name, key) = (ExtraKey::read(entries).ok()?, ExtraKey::read(entries).ok()?);
    entries.pass(u64::from(n_keys) - 2, 1).ok()?;
    match (name?, key?) {
        (ExtraKey::Plain(name), ExtraKey::Plain(key)) if name == lora_name => Some(key),
        (ExtraKey::Plain(_) | ExtraKey::Object(_), ExtraKey::Plain(_) | ExtraKey::Object(_)) => None,
    }
}

impl BlockKeys<'_> {
    /// Whether the key only repeats the salt from the event's own field, or is empty.
    fn repeats_salt(&self, key: &str) -> bool {
        let salt = key.strip_prefix(SALT_PREFIX).unwrap_or(key);
        salt.is_empty() || self.named_salt == Some(salt)
    }
}

/// A key with a recognised form.
enum ExtraKey<'a> {
    /// A string.
    Plain(&'a str),
    /// Identifier of a multimodal object, paired with its offset.
    Object(&'a str),
}

impl<'a> ExtraKey<'a> {
    /// Returns `None` for an unrecognised form; the cursor is then at any position inside the key.
    fn read(cursor: &mut Cursor<'a>) -> Result<Option<Self>, Finding> {
        let head = cursor.item()?;
        if let MsgpackItem::Str(key) = head {
            return Ok(str::from_utf8(key).ok().map(Self::Plain));
        }
        if head == MsgpackItem::Array(2)
            && let MsgpackItem::Str(id) = cursor.item()?
            && let MsgpackItem::Uint(_) | MsgpackItem::Neg(_) = cursor.item()?
        {
            return Ok(str::from_utf8(id).ok().map(Self::Object));
        }
        Ok(None)
    }
}
