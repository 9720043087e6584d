//! Tokenizer cache: tokens of text parts, with least-recently-used eviction.
//!
//! Stays within its byte limit and stores no text: the key of a part is 128 bits of two keyed hashes, with keys drawn
//! at startup, and its length. [`chunks`](super::chunks) defines the parts.
//!
//! A part is stored once, whatever precedes it: conversations share system prompts and beginnings.

use std::sync::Arc;

use ahash::RandomState;
use lru::LruCache;

/// Overhead of an entry: a list node, an allocation with its counters, and a slot of a half-full table.
const ENTRY_BYTES: usize = 192;

/// Key of a part.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    hashes: [u64; 2],
    bytes: usize,
}

/// Key generator. Different instances generate different keys for equal texts.
pub(super) struct Keys([RandomState; 2]);

impl Keys {
    pub(super) fn new() -> Self {
        Self([RandomState::new(), RandomState::new()])
    }

    /// `is_first`: a tokenizer may treat the beginning of a text differently.
    pub(super) fn of(&self, text: &str, is_first: bool) -> Key {
        let hash = |state: &RandomState| state.hash_one((is_first, text));
        Key { hashes: [hash(&self.0[0]), hash(&self.0[1])], bytes: text.len() }
    }
}

/// Cached parts.
pub(super) struct Cache {
    parts: LruCache<Key, Arc<[u32]>, RandomState>,
    pub(super) bytes: usize,
    bytes_max: usize,
}

impl Cache {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { parts: LruCache::unbounded_with_hasher(RandomState::new()), bytes: 0, bytes_max }
    }

    pub(super) fn get(&mut self, key: Key) -> Option<Arc<[u32]>> {
        self.parts.get(&key).cloned()
    }

    /// A part larger than the limit is not stored.
    pub(super) fn put(&mut self, key: Key, ids: &[u32]) {
        let bytes = entry_bytes(ids);
        if bytes > self.bytes_max {
            return;
        }
        if let Some(before) = self.parts.put(key, Arc::from(ids)) {
            self.bytes -= entry_bytes(&before);
        }
        self.bytes += bytes;
        while self.bytes > self.bytes_max {
            let (_, oldest) = self.parts.pop_lru().expect("bytes are those of parts");
            self.bytes -= entry_bytes(&oldest);
        }
    }
}

fn entry_bytes(ids: &[u32]) -> usize {
    size_of_val(ids) + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_part_is_evicted_first() {
        let keys = Keys::new();
        let [a, b, c] = ["a", "b", "c"].map(|text| keys.of(text, false));
        let mut cache = Cache::new(2 * (ENTRY_BYTES + 8));
        cache.put(a, &[1, 2]);
        cache.put(b, &[3, 4]);
        assert_eq!(cache.get(a).as_deref(), Some(&[1, 2][..]));
        cache.put(c, &[5, 6]);
        assert_eq!(cache.bytes, 2 * (ENTRY_BYTES + 8));
        assert_eq!([a, b, c].map(|key| cache.get(key).is_some()), [true, false, true]);
        // A repeated part takes no further space, and an oversized part none.
        cache.put(c, &[5, 6]);
        cache.put(b, &[0; 1_000]);
        assert_eq!((cache.bytes, cache.get(b)), (2 * (ENTRY_BYTES + 8), None));
    }

    #[test]
    fn keys_differ_by_text_position_and_process() {
        let keys = Keys::new();
        assert!(keys.of("a", true) == keys.of("a", true));
        assert!(keys.of("a", true) != keys.of("a", false));
        assert!(keys.of("a", true) != keys.of("b", true));
        assert!(keys.of("a", true) != Keys::new().of("a", true));
    }
}
