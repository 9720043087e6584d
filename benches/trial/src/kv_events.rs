//! Writer of KV event batches in the layouts of vLLM and SGLang.
//!
//! The bytes are those of the engine itself for the same content: order and presence of fields, width of numbers and of
//! map headers. Topic, sequence and replay framing belong to the publisher.

use std::collections::BTreeMap;
use std::sync::Arc;

use rmp::encode;
use rmpv::Value;
use rmpv::encode::write_value;
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
        let events: Vec<_> = events.iter().flat_map(|event| self.events(event)).collect();
        let mut out = vec![0x93]; // an array of three
        write(&mut out, &ts.into());
        encode::write_array_len(&mut out, u32::try_from(events.len()).expect(COUNTABLE)).expect(IN_MEMORY);
        for (kind, fields) in events {
            self.event(&mut out, kind, fields);
        }
        write(&mut out, &self.rank.into());
        out
    }

    /// The published events of a change: kinds and fields in order.
    fn events<'a>(&self, event: &'a CacheEvent) -> Vec<(&'static str, Vec<Field>)> {
        let dialect = self.format.dialect;
        match event {
            CacheEvent::Stored { tier, blocks } => {
                let stored: Vec<Stored<'a>> =
                    std::iter::once(self.content(*tier, blocks)).chain(self.chunks(*tier, blocks)).collect();
                stored.iter().map(|stored| ("BlockStored", self.stored(stored))).collect()
            }
            CacheEvent::Removed { tier, hash } => {
                let names: Value = [self.hash(*hash)].into_iter().collect();
                let mut fields = vec![("block_hashes", names), ("medium", dialect.medium(*tier).into())];
                fields.extend((!dialect.is_sglang()).then(|| ("group_idx", dialect.group(*tier).into())));
                vec![("BlockRemoved", fields)]
            }
            CacheEvent::Cleared => vec![("AllBlocksCleared", Vec::new())],
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
            ..Stored::default()
        })
    }

    /// Writes an event by position or by name.
    fn event(&self, out: &mut Vec<u8>, kind: &'static str, fields: Vec<Field>) {
        let (dialect, len) = (self.format.dialect, u16::try_from(1 + fields.len()).expect("fields are few"));
        if !dialect.has_maps() {
            encode::write_array_len(out, len.into()).expect(IN_MEMORY);
        } else if !dialect.is_sglang() && kind == "BlockStored" {
            // vLLM's struct of a store has more than 15 fields. Its encoder chooses the header width before it omits
            // fields with default values.
            out.push(0xde);
            out.extend_from_slice(&len.to_be_bytes());
        } else {
            encode::write_map_len(out, len.into()).expect(IN_MEMORY);
        }
        for (name, value) in std::iter::once(("type", kind.into())).chain(fields) {
            if dialect.has_maps() {
                write(out, &name.into());
            }
            write(out, &value);
        }
    }

    fn stored(&self, stored: &Stored<'_>) -> Vec<Field> {
        let (dialect, lora_name) = (self.format.dialect, stored.lora_name);
        // SGLang never sets it.
        let lora_id = lora_name.filter(|_| !dialect.is_sglang()).and_then(|name| self.lora_ids.get(name)).copied();
        let tokens = stored.blocks.iter().flat_map(|block| block.tokens.iter().copied());
        let mut fields = vec![
            ("block_hashes", stored.names.iter().map(|hash| self.hash(*hash)).collect()),
            ("parent_block_hash", or_nil(stored.parent.map(|hash| self.hash(hash)))),
            ("token_ids", tokens.collect()),
            ("block_size", stored.block_size.into()),
            ("lora_id", or_nil(lora_id)),
            ("medium", stored.medium.into()),
        ];
        if !dialect.is_sglang() {
            fields.push(("lora_name", or_nil(lora_name)));
            fields.extend(stored.has_keys.then(|| ("extra_keys", stored.extra_keys())));
            fields.extend(stored.group.map(|group| ("group_idx", group.into())));
            fields.extend(stored.kind.map(|kind| ("kv_cache_spec_kind", kind.into())));
            if stored.window_tokens.is_some() || !dialect.has_maps() {
                fields.push(("kv_cache_spec_sliding_window", or_nil(stored.window_tokens)));
            }
        } else if dialect.has_maps() {
            fields.extend(stored.cache_salt.map(|salt| ("cache_salt", salt.into())));
            fields.extend(lora_name.map(|name| ("lora_name", name.into())));
        }
        fields
    }

    fn hash(&self, hash: EngineHash) -> Value {
        if self.format.dialect.is_sglang() {
            hash.as_u64().cast_signed().into()
        } else if self.format.binary_hashes {
            hash.0[..].into()
        } else {
            hash.as_u64().into()
        }
    }
}

/// Name and value of a field.
type Field = (&'static str, Value);

/// A store event with the names of the wire format.
#[derive(Default)]
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
    /// vLLM's extra hash keys, one entry per block: the adapter's name for each block, the salt for the first block of a
    /// prompt.
    fn extra_keys(&self) -> Value {
        let keys = |block: &Arc<Block>| {
            let salt = self.cache_salt.filter(|_| block.parent.is_none());
            let keys: Vec<Value> = self.lora_name.into_iter().chain(salt).map(Value::from).collect();
            if keys.is_empty() { Value::Nil } else { keys.into() }
        };
        self.blocks[self.blocks.len() - self.names.len()..].iter().map(keys).collect()
    }
}

const IN_MEMORY: &str = "writing to memory cannot fail";
const COUNTABLE: &str = "the number of blocks per step fits 32 bits";

fn or_nil<T: Into<Value>>(value: Option<T>) -> Value {
    value.map_or(Value::Nil, Into::into)
}

fn write(out: &mut Vec<u8>, value: &Value) {
    write_value(out, value).expect(IN_MEMORY);
}

#[cfg(test)]
mod tests;
