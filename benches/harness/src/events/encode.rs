//! A step's cache events as the engine would publish them: one batch of msgpack.
//!
//! Owns the two layouts of vLLM. Promises the fields that the engine sends for plain prompts, in its order. Leaves
//! other engines, adapters and salts to the mock engine, whose dialects are tested against captured ones.

use std::sync::Arc;

use pointsman_trial::engine::{Block, CacheEvent};
use rmp::encode;

use super::Dialect;

const IN_MEMORY: &str = "writing to memory cannot fail";
const COUNTABLE: &str = "what one step of an engine stores is counted in 32 bits";
const MEDIUM: &str = "GPU";

/// Writes the batch `[time in seconds, events, rank]` of one rank's engine.
pub(super) fn batch(dialect: Dialect, block_size: u32, now_us: u64, events: &[CacheEvent]) -> Vec<u8> {
    let mut out = Writer { bytes: Vec::new(), dialect };
    out.array(3);
    encode::write_f64(&mut out.bytes, now_us as f64 / 1e6).expect(IN_MEMORY);
    out.array(events.len());
    for event in events {
        match event {
            CacheEvent::Stored { blocks, .. } => out.stored(blocks, block_size),
            CacheEvent::Removed { hash, .. } => out.removed(hash.as_u64()),
            CacheEvent::Cleared => out.head("AllBlocksCleared", 1),
        }
    }
    out.uint(0);
    out.bytes.shrink_to_fit();
    out.bytes
}

struct Writer {
    bytes: Vec<u8>,
    dialect: Dialect,
}

impl Writer {
    fn stored(&mut self, blocks: &[Arc<Block>], block_size: u32) {
        match self.dialect {
            Dialect::Map => {
                // The engine chooses the width of the header before it leaves out what it need not say.
                self.bytes.extend([0xde, 0, 11]);
                self.text("type");
                self.text("BlockStored");
            }
            Dialect::Array => self.head("BlockStored", 12),
        }
        self.key("block_hashes");
        self.array(blocks.len());
        blocks.iter().for_each(|block| self.uint(block.hash.as_u64()));
        self.key("parent_block_hash");
        match blocks.first().and_then(|block| block.parent) {
            Some(parent) => self.uint(parent.as_u64()),
            None => self.nil(),
        }
        self.key("token_ids");
        self.array(blocks.iter().map(|block| block.tokens.len()).sum());
        blocks.iter().flat_map(|block| &block.tokens).for_each(|token| self.uint((*token).into()));
        self.key("block_size");
        self.uint(block_size.into());
        self.key("lora_id");
        self.nil();
        self.key("medium");
        self.text(MEDIUM);
        self.key("lora_name");
        self.nil();
        self.key("extra_keys");
        self.array(blocks.len());
        blocks.iter().for_each(|_| self.nil());
        self.key("group_idx");
        self.uint(0);
        self.key("kv_cache_spec_kind");
        self.text("full_attention");
        if self.dialect == Dialect::Array {
            self.nil(); // no sliding window
        }
    }

    fn removed(&mut self, name: u64) {
        self.head("BlockRemoved", 4);
        self.key("block_hashes");
        self.array(1);
        self.uint(name);
        self.key("medium");
        self.text(MEDIUM);
        self.key("group_idx");
        self.uint(0);
    }

    /// Begins an event of so many fields, its tag among them.
    fn head(&mut self, tag: &str, fields: u32) {
        match self.dialect {
            Dialect::Map => {
                encode::write_map_len(&mut self.bytes, fields).expect(IN_MEMORY);
                self.text("type");
            }
            Dialect::Array => self.array(fields as usize),
        }
        self.text(tag);
    }

    /// Names the next field where fields have names.
    fn key(&mut self, key: &str) {
        match self.dialect {
            Dialect::Map => self.text(key),
            Dialect::Array => {}
        }
    }

    fn array(&mut self, len: usize) {
        encode::write_array_len(&mut self.bytes, u32::try_from(len).expect(COUNTABLE)).expect(IN_MEMORY);
    }

    fn text(&mut self, text: &str) {
        encode::write_str(&mut self.bytes, text).expect(IN_MEMORY);
    }

    fn uint(&mut self, value: u64) {
        encode::write_uint(&mut self.bytes, value).expect(IN_MEMORY);
    }

    fn nil(&mut self) {
        encode::write_nil(&mut self.bytes).expect(IN_MEMORY);
    }
}
