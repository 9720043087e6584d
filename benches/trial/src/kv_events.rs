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
    /// `VllmMap` with vLLM's `OffloadingConnector`: a block in host memory has a name and no content.
    VllmOffloading,
    /// `VllmMap` with that connector and `self_describing_kv_events`: blocks in host memory lack salts only.
    VllmSelfDescribing,
    /// `VllmMap` with Mooncake's store: blocks in host memory lack adapters and salts and are never removed.
    VllmMooncake,
    /// `VllmMap` with LMCache in the process of the engine: chunks of two blocks in host memory, with names of their own
    /// and never removed.
    VllmLmcache,
    /// `VllmMap` of a model with a sliding window, group 0, beside full attention, group 1.
    VllmWindow,
    /// `VllmMap` of a model with Mamba states, group 0, beside full attention, group 1.
    VllmMamba,
}

impl Dialect {
    /// Returns whether the engine is SGLang, whose HTTP API also differs in some details.
    #[must_use]
    pub const fn is_sglang(self) -> bool {
        matches!(self, Self::SglangArray | Self::SglangMap)
    }

    /// Returns whether replayed batches carry their topic as the first frame.
    #[must_use]
    pub const fn replays_with_topic(self) -> bool {
        self.has_maps()
    }

    /// Returns whether a connector of vLLM manages the host memory: it copies computed blocks at once, keeps them when the
    /// cache of the device is cleared, and publishes no removal when it is cleared itself.
    #[must_use]
    pub const fn has_connector(self) -> bool {
        matches!(self, Self::VllmOffloading | Self::VllmSelfDescribing | Self::VllmMooncake | Self::VllmLmcache)
    }

    /// Window in blocks of the group beside full attention; 0 without one.
    #[must_use]
    pub const fn beside_window_blocks(self) -> u32 {
        match self {
            Self::VllmWindow => 3,
            Self::VllmMamba => 1,
            Self::VllmArray | Self::VllmMap | Self::SglangArray | Self::SglangMap => 0,
            Self::VllmOffloading | Self::VllmSelfDescribing | Self::VllmMooncake | Self::VllmLmcache => 0,
        }
    }

    const fn has_maps(self) -> bool {
        !matches!(self, Self::VllmArray | Self::SglangArray)
    }

    const fn medium(self, tier: Tier) -> &'static str {
        match tier {
            Tier::Device | Tier::Beside => "GPU",
            Tier::Host if self.is_sglang() => "CPU_PINNED",
            Tier::Host if matches!(self, Self::VllmMooncake) => "cpu",
            Tier::Host => "CPU",
        }
    }

    const fn group(self, tier: Tier) -> u64 {
        match tier {
            Tier::Device | Tier::Host if self.beside_window_blocks() > 0 => 1,
            Tier::Device | Tier::Host | Tier::Beside => 0,
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
        let chunks = |event: &CacheEvent| match event {
            CacheEvent::Stored { tier, blocks } => self.chunks(*tier, blocks).count(),
            CacheEvent::Removed { .. } | CacheEvent::Cleared => 0,
        };
        let mut out = Writer(Vec::with_capacity(64 + events.len() * 64));
        out.array(3);
        out.float(ts);
        out.array(events.len() + events.iter().map(chunks).sum::<usize>());
        for event in events {
            self.event(&mut out, event);
        }
        out.uint(self.rank.into());
        out.0
    }

    fn event(&self, out: &mut Writer, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { tier, blocks } => {
                self.fields(out, "BlockStored", &self.stored(&self.content(*tier, blocks)));
                for chunk in self.chunks(*tier, blocks) {
                    self.fields(out, "BlockStored", &self.stored(&chunk));
                }
            }
            CacheEvent::Removed { tier, hash } => {
                let (medium, group) = (self.format.dialect.medium(*tier), self.format.dialect.group(*tier));
                let mut fields: Vec<Field<'_>> = vec![
                    ("block_hashes", Box::new(|out| self.hashes(out, std::iter::once(*hash)))),
                    ("medium", Box::new(move |out| out.text(medium))),
                ];
                if !self.format.dialect.is_sglang() {
                    fields.push(("group_idx", Box::new(move |out| out.uint(group))));
                }
                self.fields(out, "BlockRemoved", &fields);
            }
            CacheEvent::Cleared => self.fields(out, "AllBlocksCleared", &[]),
        }
    }

    /// Content of a store event, as far as the engine states it.
    fn content<'a>(&self, tier: Tier, blocks: &'a [Arc<Block>]) -> Stored<'a> {
        let (dialect, first) = (self.format.dialect, &blocks[0]);
        let is_copy = tier == Tier::Host && dialect.has_connector();
        let is_placeholder = is_copy && dialect == Dialect::VllmOffloading;
        let is_described = !is_copy || dialect == Dialect::VllmSelfDescribing;
        let window_blocks = dialect.beside_window_blocks();
        let (kept, kind, window_tokens) = match (tier, window_blocks) {
            (Tier::Beside, 1) => (1, "mamba", None),
            (Tier::Beside, blocks) => (blocks as usize, "sliding_window", Some(blocks * self.block_size + 1)),
            (Tier::Device | Tier::Host, _) => (blocks.len(), "full_attention", None),
        };
        Stored {
            medium: dialect.medium(tier),
            parent: first.parent.filter(|_| !is_placeholder),
            names: blocks[blocks.len().saturating_sub(kept)..].iter().map(|block| block.hash).collect(),
            blocks: if is_placeholder { &[] } else { blocks },
            block_size: if is_placeholder { 0 } else { self.block_size },
            lora_name: first.lora_name.as_deref().filter(|_| is_described),
            cache_salt: first.cache_salt.as_deref(),
            has_keys: !is_copy,
            group: Some(dialect.group(tier)),
            kind: Some(kind).filter(|_| is_described),
            window_tokens,
        }
    }

    /// Stores of LMCache's chunks in a list of computed blocks: two blocks each, from the start of the prompt on.
    fn chunks<'a>(&self, tier: Tier, blocks: &'a [Arc<Block>]) -> impl Iterator<Item = Stored<'a>> {
        let own = |name: EngineHash| EngineHash(name.0.map(|byte| !byte));
        let has_chunks = self.format.dialect == Dialect::VllmLmcache && tier == Tier::Device;
        let block_size = 2 * self.block_size;
        let pairs = blocks.windows(2).filter(move |pair| has_chunks && pair[0].depth.is_multiple_of(2));
        pairs.map(move |pair| Stored {
            medium: "cpu",
            parent: pair[0].parent.map(own),
            names: vec![own(pair[1].hash)],
            blocks: pair,
            block_size,
            lora_name: None,
            cache_salt: None,
            has_keys: false,
            group: None,
            kind: None,
            window_tokens: None,
        })
    }

    /// Writes an event by position or by name.
    fn fields(&self, out: &mut Writer, kind: &str, fields: &[Field<'_>]) {
        let dialect = self.format.dialect;
        if dialect.has_maps() {
            // vLLM's struct of a store has more than 15 fields. Its encoder chooses the header width before it omits
            // fields with default values.
            out.map(1 + fields.len(), !dialect.is_sglang() && kind == "BlockStored");
            out.text("type");
        } else {
            out.array(1 + fields.len());
        }
        out.text(kind);
        for (name, value) in fields {
            if dialect.has_maps() {
                out.text(name);
            }
            value(out);
        }
    }

    fn stored<'a>(&'a self, stored: &'a Stored<'a>) -> Vec<Field<'a>> {
        let (dialect, lora_name) = (self.format.dialect, stored.lora_name);
        // SGLang never sets it.
        let lora_id = lora_name.filter(|_| !dialect.is_sglang()).and_then(|name| self.lora_ids.get(name)).copied();
        let mut fields: Vec<Field<'a>> = vec![
            ("block_hashes", Box::new(|out| self.hashes(out, stored.names.iter().copied()))),
            ("parent_block_hash", Box::new(|out| out.optional(stored.parent, |out, hash| self.hash(out, hash)))),
            ("token_ids", Box::new(|out| stored.tokens(out))),
            ("block_size", Box::new(|out| out.uint(stored.block_size.into()))),
            ("lora_id", Box::new(move |out| out.optional(lora_id, |out, id| out.uint(id.into())))),
            ("medium", Box::new(|out| out.text(stored.medium))),
        ];
        let name: Field<'a> = ("lora_name", Box::new(move |out| out.optional(lora_name, Writer::text)));
        if !dialect.is_sglang() {
            fields.push(name);
            if stored.has_keys {
                fields.push(("extra_keys", Box::new(|out| stored.extra_keys(out))));
            }
            if let Some(group) = stored.group {
                fields.push(("group_idx", Box::new(move |out| out.uint(group))));
            }
            if let Some(kind) = stored.kind {
                fields.push(("kv_cache_spec_kind", Box::new(move |out| out.text(kind))));
            }
            if stored.window_tokens.is_some() || !dialect.has_maps() {
                let window = |out: &mut Writer| out.optional(stored.window_tokens, |out, len| out.uint(len.into()));
                fields.push(("kv_cache_spec_sliding_window", Box::new(window)));
            }
        } else if dialect.has_maps() {
            if let Some(salt) = stored.cache_salt {
                fields.push(("cache_salt", Box::new(move |out| out.text(salt))));
            }
            fields.extend(lora_name.is_some().then_some(name));
        }
        fields
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

/// Name of a field and the writer of its value.
type Field<'a> = (&'static str, Box<dyn Fn(&mut Writer) + 'a>);

/// A store event with the names of the wire format.
struct Stored<'a> {
    medium: &'static str,
    parent: Option<EngineHash>,
    names: Vec<EngineHash>,
    /// Blocks with the stated tokens.
    blocks: &'a [Arc<Block>],
    block_size: u32,
    lora_name: Option<&'a str>,
    cache_salt: Option<&'a str>,
    /// Whether vLLM's extra keys are stated.
    has_keys: bool,
    group: Option<u64>,
    kind: Option<&'static str>,
    window_tokens: Option<u32>,
}

impl Stored<'_> {
    fn tokens(&self, out: &mut Writer) {
        out.array(self.blocks.iter().map(|block| block.tokens.len()).sum());
        self.blocks.iter().flat_map(|block| block.tokens.iter()).for_each(|token| out.uint((*token).into()));
    }

    /// Writes vLLM's extra hash keys, one entry per block: the adapter's name for each block, the salt for the first
    /// block of a prompt.
    fn extra_keys(&self, out: &mut Writer) {
        out.array(self.names.len());
        for block in &self.blocks[self.blocks.len() - self.names.len()..] {
            let salt = self.cache_salt.filter(|_| block.parent.is_none());
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

    /// Writes a map header, `is_wide` of 16 bits regardless of the size of the map.
    fn map(&mut self, len: usize, is_wide: bool) {
        if is_wide {
            self.0.push(0xde);
            self.0.extend_from_slice(&u16::try_from(len).expect("fields are few").to_be_bytes());
        } else {
            encode::write_map_len(&mut self.0, u32::try_from(len).expect(COUNTABLE)).expect(IN_MEMORY);
        }
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
