//! `[index]`: the prefix index, and the speculative entries that stand in for KV events.

use serde::{Deserialize, Serialize};

use super::EventMode;
use super::table::settings;
use crate::select::TierWeights;
use crate::validation::Problems;

settings! {
    /// Settings of the prefix index.
    pub struct IndexConfig {
        /// Whether an index is kept. Without one KV events are ignored and requests are placed by load alone. Default
        /// true.
        enabled: bool = true;
        /// Shards of the index, 1 to 64; ranks are spread over them. Every query visits every shard, so raise it for
        /// event rate only. Default 1.
        shards: u32 = 1;
        /// Memory limit in bytes, shared evenly by the shards; entries least likely to be hit are evicted first.
        /// Default: a quarter of the memory of the machine or cgroup
        /// ([`RouterConfig::index_bytes_max`](super::RouterConfig::index_bytes_max)). At least 1 MiB.
        bytes_max: Option<u64>;
        /// Value of a host-pinned block as a share of a device block. It depends on the machine's host link, so it is a
        /// setting. Default 0.75, in [0, 1].
        host_hit_weight: f64 = 0.75;
        /// Value of a block on disk or in an external store, likewise. Default 0.25, in [0, 1].
        disk_hit_weight: f64 = 0.25;
        /// `[index.speculative]`.
        speculative: SpeculativeConfig;
    }
}

settings! {
    /// Settings of speculative index entries: blocks recorded from routing decisions, without an event of the engine.
    pub struct SpeculativeConfig {
        /// Model of the caches of engines without KV events. Default `ttl`; `lru` needs `events.mode = "off"`.
        model: SpeculativeModel;
        /// Time to live of an entry for a rank without KV events, in milliseconds. Default 120,000, at least 1.
        ttl_ms: u64 = 120_000;
        /// Time to live of an entry for a rank with KV events, in milliseconds: it ends earlier when the engine
        /// confirms or removes the block. Default none: no such entries. At least 1; needs `events.mode = "on"`.
        with_events_ttl_ms: Option<u64>;
    }
}

/// Model of the cache of an engine that sends no KV events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpeculativeModel {
    /// A routed prompt counts as cached for `ttl_ms`.
    #[default]
    Ttl,
    /// A rank holds as many blocks as its worker reports, and the least recently used are evicted first. A rank of
    /// unknown capacity uses the time to live.
    Lru,
}

impl IndexConfig {
    /// Largest number of shards.
    pub const SHARDS_MAX: u32 = 64;

    /// Smallest memory limit, in bytes.
    pub const BYTES_MIN: u64 = 1 << 20;

    /// Value of a block in each lower tier.
    #[must_use]
    pub fn tier_weights(&self) -> TierWeights {
        TierWeights { host: self.host_hit_weight, disk: self.disk_hit_weight }
    }

    pub(super) fn check(&self, mode: EventMode, problems: &mut Problems) {
        problems.check("index.shards", self.shards, (1..=Self::SHARDS_MAX).contains(&self.shards), "1 to 64");
        let holds = |bytes: &u64| *bytes >= Self::BYTES_MIN;
        problems.check_given("index.bytes_max", self.bytes_max, holds, "at least 1048576 (1 MiB)");
        problems.share("index.host_hit_weight", self.host_hit_weight);
        problems.share("index.disk_hit_weight", self.disk_hit_weight);
        self.speculative.check(mode, problems);
    }
}

impl SpeculativeConfig {
    /// Speculative blocks over all ranks; beyond, the oldest are dropped. A bound on memory only: it is 64 million tokens
    /// in blocks of 16, more than a fleet computes within a time to live, so it is no setting.
    pub const BLOCKS_MAX: u32 = 1 << 22;

    fn check(&self, mode: EventMode, problems: &mut Problems) {
        let is_ttl = self.model == SpeculativeModel::Ttl;
        problems.check(
            "index.speculative.model",
            "lru",
            is_ttl || mode == EventMode::Off,
            "ttl unless events.mode is off",
        );
        problems.positive("index.speculative.ttl_ms", self.ttl_ms);
        let applies = mode != EventMode::On;
        let default_ms = Self::default().ttl_ms;
        problems.unused("index.speculative.ttl_ms", self.ttl_ms, default_ms, applies, "120000 where events.mode is on");
        let ttl_ms = self.with_events_ttl_ms;
        problems.check_given("index.speculative.with_events_ttl_ms", ttl_ms, |ms| *ms > 0, "at least 1");
        let is_on = |_: &u64| mode == EventMode::On;
        problems.check_given("index.speculative.with_events_ttl_ms", ttl_ms, is_on, "absent unless events.mode is on");
    }
}
