//! Learned lengths of media items, in tokens.
//!
//! The number of placeholder tokens of an item depends on the model's processor. A response reports the length of the
//! whole prompt; the difference to the known parts is the length of the item. Memory is bounded: the least recently
//! used items are forgotten.

use std::num::NonZeroUsize;
use std::sync::Arc;

use ahash::RandomState;
use lru::LruCache;
use parking_lot::Mutex;

/// Maximum number of items; 16,384 take about 1 MiB.
const ITEMS_MAX: NonZeroUsize = NonZeroUsize::new(16_384).expect("not zero");

/// Assumed length before the first report.
const TOKENS_INITIAL: u32 = 1_024;

/// Longest plausible item.
const TOKENS_MAX: u32 = 1 << 18;

/// Weight of the mean of earlier reports against one report.
const MEAN_WEIGHT: u32 = 7;

/// Lengths of the items of one model, by the hash of their names.
#[derive(Debug)]
pub(in crate::tokens) struct MediaLengths {
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    lengths: LruCache<u64, u32, RandomState>,
    /// Moving mean of the reports.
    mean: u32,
    /// Source of hashes that no item has.
    unique: RandomState,
    n_unique: u64,
}

impl MediaLengths {
    pub(in crate::tokens) fn new() -> Self {
        let lengths = LruCache::with_hasher(ITEMS_MAX, RandomState::new());
        let table = Table { lengths, mean: TOKENS_INITIAL, unique: RandomState::new(), n_unique: 0 };
        Self { table: Mutex::new(table) }
    }

    /// Length of the item, if known.
    pub(super) fn get(&self, mm_hash: u64) -> Option<u32> {
        self.table.lock().lengths.get(&mm_hash).copied()
    }

    /// Mean length of recent items.
    pub(super) fn mean(&self) -> u32 {
        self.table.lock().mean
    }

    /// A hash that differs from those of other requests and of events, except by chance (2^-64).
    pub(super) fn unique_hash(&self) -> u64 {
        let mut table = self.table.lock();
        table.n_unique += 1;
        table.unique.hash_one(table.n_unique)
    }
}

/// Report of a prompt's length by the engine, from which the length of one item follows.
#[derive(Clone, Debug)]
pub struct LengthReport {
    pub(super) lengths: Arc<MediaLengths>,
    /// The item; `None` for items without names, which only affect the mean.
    pub(super) mm_hash: Option<u64>,
    /// Tokens of the prompt outside the item.
    pub(super) known_tokens: usize,
    /// Occurrences of the item; not zero.
    pub(super) n_items: usize,
}

impl LengthReport {
    /// Records the prompt length reported by the engine.
    pub fn record(&self, prompt_tokens: u32) {
        let Some(tokens) = (prompt_tokens as usize).checked_sub(self.known_tokens) else { return };
        let length = u32::try_from(tokens / self.n_items).unwrap_or(u32::MAX);
        if !(1..=TOKENS_MAX).contains(&length) || !tokens.is_multiple_of(self.n_items) {
            return;
        }
        let mut table = self.lengths.table.lock();
        table.mean = (table.mean * MEAN_WEIGHT + length) / (MEAN_WEIGHT + 1);
        if let Some(mm_hash) = self.mm_hash {
            table.lengths.put(mm_hash, length);
        }
    }
}
