//! Writer of KV event batches in the layouts of vLLM and SGLang.
//!
//! The bytes are those of the engine itself for the same content: order and presence of fields, width of numbers and of
//! map headers. Topic, sequence and replay framing belong to the publisher.

use std::collections::BTreeMap;
use std::sync::Arc;

use rmp::encode;
use serde::{Deserialize, Serialize};

use crate::engine::{Block, CacheEvent, EngineHash, Tier};

/// Layout of KV events, by engine and release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mock", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// vLLM 0.20 to 0.23: events are arrays of positional fields, replayed without their topic.
    VllmArray,
    /// vLLM 0.24 and later, as 0.33 writes it: events are maps, replayed with their topic.
    #[default]
    VllmMap,
    /// SGLang up to 0.5.18: arrays, signed hashes. Like the real engine, it carries neither salt nor adapter: a
    /// subscriber cannot distinguish salted prompts from plain ones.
    SglangArray,
    /// SGLang 0.5.22 and later: maps, signed hashes, salt and adapter as named fields.
    SglangMap,
}

impl Dialect {
    /// Returns whether the engine is SGLang, whose HTTP API also differs in some details.
    #[must_use]
    pub const fn is_sglang(self) -> bool {
        match self {
            Self::VllmArray | Self::VllmMap => false,
            Self::SglangArray | Self::SglangMap => true,
        }
    }

    /// Returns whether replayed batches carry their topic as the first frame.
    #[must_use]
    pub const fn replays_with_topic(self) -> bool {
        match self {
            Self::VllmArray | Self::SglangArray => false,
            Self::VllmMap | Self::SglangMap => true,
        }
    }

    const fn medium(self, tier: Tier) -> &'static str {
        match (tier, self.is_sglang()) {
            (Tier::Device, _) => "GPU",
            (Tier::Host, false) => "CPU",
            (Tier::Host, true) => "CPU_PINNED",
        }
    }
}

/// Format of a rank's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventFormat {
    /// Layout of events and fields.
    pub dialect: Dialect,
    /// Writes hashes as 32 bytes instead of integers; vLLM only.
    #[serde(default)]
    pub binary_hashes: bool,
}

impl From<Dialect> for EventFormat {
    fn from(dialect: Dialect) -> Self {
        Self { dialect, binary_hashes: false }
    }
}

/// Encoder for the batches of one rank.
#[derive(Clone, Debug)]
pub struct Encoder {
    /// Format of the batches.
    pub format: EventFormat,
    /// Tokens per block.
    pub block_size: u32,
    /// Rank number, which each batch contains.
    pub rank: u32,
    /// Ids of the adapters in loading order, from 1.
    pub lora_ids: Arc<BTreeMap<String, u32>>,
}

impl Encoder {
    /// Encodes one batch: `[ts, events, rank]`. `ts` is in seconds.
    #[must_use]
    pub fn batch(&self, ts: f64, events: &[CacheEvent]) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(64 + events.len() * 64));
        out.array(3);
        out.float(ts);
        out.array(events.len());
        for event in events {
            self.event(&mut out, event);
        }
        out.uint(self.rank.into());
        out.0
    }

    fn event(&self, out: &mut Writer, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { tier, blocks } => {
                let first = blocks.first();
                let stored = Stored {
                    medium: self.format.dialect.medium(*tier),
                    parent: first.and_then(|block| block.parent),
                    blocks,
                    lora_name: first.and_then(|block| block.lora_name.as_deref()),
                    cache_salt: first.and_then(|block| block.cache_salt.as_deref()),
                };
                self.stored(out, &stored);
            }
            CacheEvent::Removed { tier, hash } => self.removed(out, self.format.dialect.medium(*tier), *hash),
            CacheEvent::Cleared => match self.format.dialect {
                Dialect::VllmArray | Dialect::SglangArray => {
                    out.array(1);
                    out.text("AllBlocksCleared");
                }
                Dialect::VllmMap | Dialect::SglangMap => {
                    out.map(1);
                    out.entry("type", |out| out.text("AllBlocksCleared"));
                }
            },
        }
    }

    fn stored(&self, out: &mut Writer, stored: &Stored<'_>) {
        let lora_id = stored.lora_name.and_then(|name| self.lora_ids.get(name)).copied();
        match self.format.dialect {
            Dialect::VllmArray => {
                out.array(12);
                out.text("BlockStored");
                self.content(out, stored);
                out.optional(lora_id, |out, id| out.uint(id.into()));
                out.text(stored.medium);
                out.optional(stored.lora_name, Writer::text);
                stored.extra_keys(out);
                out.uint(0); // group_idx
                out.text("full_attention");
                out.nil(); // kv_cache_spec_sliding_window
            }
            Dialect::VllmMap => {
                // The engine's struct has more than 15 fields. The encoder chooses the header width before it omits
                // fields with default values.
                out.map_wide(11);
                out.entry("type", |out| out.text("BlockStored"));
                self.content_entries(out, stored);
                out.entry("lora_id", |out| out.optional(lora_id, |out, id| out.uint(id.into())));
                out.entry("medium", |out| out.text(stored.medium));
                out.entry("lora_name", |out| out.optional(stored.lora_name, Writer::text));
                out.entry("extra_keys", |out| stored.extra_keys(out));
                out.entry("group_idx", |out| out.uint(0));
                out.entry("kv_cache_spec_kind", |out| out.text("full_attention"));
            }
            Dialect::SglangArray => {
                out.array(7);
                out.text("BlockStored");
                self.content(out, stored);
                out.nil(); // lora_id, which SGLang never sets
                out.text(stored.medium);
            }
            Dialect::SglangMap => {
                let named = usize::from(stored.cache_salt.is_some()) + usize::from(stored.lora_name.is_some());
                out.map(7 + named);
                out.entry("type", |out| out.text("BlockStored"));
                self.content_entries(out, stored);
                out.entry("lora_id", Writer::nil);
                out.entry("medium", |out| out.text(stored.medium));
                if let Some(salt) = stored.cache_salt {
                    out.entry("cache_salt", |out| out.text(salt));
                }
                if let Some(name) = stored.lora_name {
                    out.entry("lora_name", |out| out.text(name));
                }
            }
        }
    }

    fn removed(&self, out: &mut Writer, medium: &str, hash: EngineHash) {
        match self.format.dialect {
            Dialect::VllmArray | Dialect::SglangArray => {
                let group = !self.format.dialect.is_sglang();
                out.array(3 + usize::from(group));
                out.text("BlockRemoved");
                self.hashes(out, std::iter::once(hash));
                out.text(medium);
                if group {
                    out.uint(0);
                }
            }
            Dialect::VllmMap | Dialect::SglangMap => {
                let group = !self.format.dialect.is_sglang();
                out.map(3 + usize::from(group));
                out.entry("type", |out| out.text("BlockRemoved"));
                out.entry("block_hashes", |out| self.hashes(out, std::iter::once(hash)));
                out.entry("medium", |out| out.text(medium));
                if group {
                    out.entry("group_idx", |out| out.uint(0));
                }
            }
        }
    }

    /// Writes the four fields common to all layouts, by position.
    fn content(&self, out: &mut Writer, stored: &Stored<'_>) {
        self.hashes(out, stored.blocks.iter().map(|block| block.hash));
        out.optional(stored.parent, |out, hash| self.hash(out, hash));
        stored.tokens(out);
        out.uint(self.block_size.into());
    }

    /// Writes the same four fields by name.
    fn content_entries(&self, out: &mut Writer, stored: &Stored<'_>) {
        out.entry("block_hashes", |out| self.hashes(out, stored.blocks.iter().map(|block| block.hash)));
        out.entry("parent_block_hash", |out| out.optional(stored.parent, |out, hash| self.hash(out, hash)));
        out.entry("token_ids", |out| stored.tokens(out));
        out.entry("block_size", |out| out.uint(self.block_size.into()));
    }

    fn hashes(&self, out: &mut Writer, hashes: impl ExactSizeIterator<Item = EngineHash>) {
        out.array(hashes.len());
        hashes.for_each(|hash| self.hash(out, hash));
    }

    fn hash(&self, out: &mut Writer, hash: EngineHash) {
        if self.format.dialect.is_sglang() {
            out.sint(hash.as_u64().cast_signed());
        } else if self.format.binary_hashes {
            out.binary(&hash.0);
        } else {
            out.uint(hash.as_u64());
        }
    }
}

/// A store event with the names of the wire format.
struct Stored<'a> {
    medium: &'static str,
    parent: Option<EngineHash>,
    blocks: &'a [Arc<Block>],
    lora_name: Option<&'a str>,
    cache_salt: Option<&'a str>,
}

impl Stored<'_> {
    fn tokens(&self, out: &mut Writer) {
        out.array(self.blocks.iter().map(|block| block.tokens.len()).sum());
        self.blocks.iter().flat_map(|block| block.tokens.iter()).for_each(|token| out.uint((*token).into()));
    }

    /// Writes vLLM's extra hash keys, one entry per block: the adapter's name for each block, the salt for the first
    /// block of a prompt.
    fn extra_keys(&self, out: &mut Writer) {
        out.array(self.blocks.len());
        for block_idx in 0..self.blocks.len() {
            let salt = self.cache_salt.filter(|_| block_idx == 0 && self.parent.is_none());
            let keys: Vec<&str> = self.lora_name.into_iter().chain(salt).collect();
            if keys.is_empty() {
                out.nil();
            } else {
                out.array(keys.len());
                keys.into_iter().for_each(|key| out.text(key));
            }
        }
    }
}

/// MessagePack writer into memory, which cannot fail.
struct Writer(Vec<u8>);

const IN_MEMORY: &str = "writing to memory cannot fail";
const COUNTABLE: &str = "the number of blocks per step fits 32 bits";

impl Writer {
    fn array(&mut self, len: usize) {
        encode::write_array_len(&mut self.0, u32::try_from(len).expect(COUNTABLE)).expect(IN_MEMORY);
    }

    fn map(&mut self, len: usize) {
        encode::write_map_len(&mut self.0, u32::try_from(len).expect(COUNTABLE)).expect(IN_MEMORY);
    }

    /// Writes a 16-bit map header, regardless of the size of the map.
    fn map_wide(&mut self, len: u16) {
        self.0.push(0xde);
        self.0.extend_from_slice(&len.to_be_bytes());
    }

    fn entry(&mut self, key: &str, value: impl FnOnce(&mut Self)) {
        self.text(key);
        value(self);
    }

    fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    fn text(&mut self, text: &str) {
        encode::write_str(&mut self.0, text).expect(IN_MEMORY);
    }

    fn uint(&mut self, value: u64) {
        encode::write_uint(&mut self.0, value).expect(IN_MEMORY);
    }

    fn sint(&mut self, value: i64) {
        encode::write_sint(&mut self.0, value).expect(IN_MEMORY);
    }

    fn float(&mut self, value: f64) {
        encode::write_f64(&mut self.0, value).expect(IN_MEMORY);
    }

    fn binary(&mut self, bytes: &[u8]) {
        encode::write_bin(&mut self.0, bytes).expect(IN_MEMORY);
    }

    fn nil(&mut self) {
        encode::write_nil(&mut self.0).expect(IN_MEMORY);
    }
}

#[cfg(test)]
mod tests;
