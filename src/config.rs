//! One router's configuration: every setting, its unit, default and rule, in one validated struct.
//!
//! Owns the settings and their check. Promises that a value that passed [`RouterConfig::validate`] can be used
//! without another look. Leaves reading files and environments to embedders.

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::select::{KvCost, Needs, Policy, TierWeights};

/// What the ranks of a pool do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolRole {
    /// Prefill and decode on the same rank.
    #[default]
    Aggregated,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

/// Which ranks the scheduler asks for their exact load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fanout {
    /// Only those that can win, by the load board's bounds. Places exactly like [`Fanout::All`].
    #[default]
    Shortlist,
    /// Every eligible rank.
    All,
}

/// Settings of one router: one model, one role, one block size.
///
/// ```
/// use pointsman::config::RouterConfig;
///
/// let config: RouterConfig = serde_json::from_str(r#"{ "block_size": 16, "seed": 7 }"#)?;
/// config.validate()?;
/// assert_eq!(config.requests_max, 65_536);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Tokens a KV block; must be the engines' own. Default 64, at least 1.
    pub block_size: u32,
    /// What the pool's ranks do. Default aggregated.
    pub role: PoolRole,
    /// Whether prompts are hashed in EAGLE windows (block size + 1 tokens). Default false.
    pub is_eagle: bool,
    /// How a rank is chosen. Default `kv`.
    pub policy: Policy,
    /// Credit of a device block against computing it. 0 builds no index at all. Default 1, 0 to 1e9.
    pub overlap_score_credit: f64,
    /// How fast that credit shrinks on ranks busy with prefill. Default 0 (not at all), 0 to 1e9.
    pub overlap_score_credit_decay: f64,
    /// Weight of a block of prefill against a block held. Default 1, 0 to 1e9.
    pub prefill_load_scale: f64,
    /// Cost of each active request, in blocks. Default 0, 0 to 1e9.
    pub decode_active_request_weight: f64,
    /// Worth of a host-pinned block as a share of a device block. Default 0.75, in [0, 1].
    pub host_cache_hit_weight: f64,
    /// Worth of a block on disk or in an external store. Default 0.25, in [0, 1].
    pub disk_cache_hit_weight: f64,
    /// Randomness of the `kv` policy; 0 takes the least cost. Default 0, 0 to 1e9.
    pub temperature: f64,
    /// Whether active requests with a common prefix share its blocks on a rank. An engine without cascade
    /// attention wants false. Default true.
    pub assume_kv_reuse: bool,
    /// Whether prompt and output blocks of active requests count. Default true.
    pub track_active_blocks: bool,
    /// Whether prefill tokens still to compute count. Default true.
    pub track_prefill_tokens: bool,
    /// Shards of the prefix index, 1 to 64; ranks are spread over them. Every query visits every shard: raise it for
    /// event rate only. Default 1.
    pub index_shards: u32,
    /// Which ranks are asked for their exact load. Default `shortlist`.
    pub fanout: Fanout,
    /// How long a load query may take before the board's values stand in, in milliseconds. Default 5, at least 1.
    pub load_query_timeout_ms: u64,
    /// Requests waiting for an answer at once; one more is refused. Default 65,536, at least 1.
    pub requests_max: u32,
    /// Blocks named by KV events that one shard may have waiting; senders wait beyond. Default 1,048,576, at least 1.
    pub event_blocks_max: u32,
    /// Workers that `start` waits for. Default 0.
    pub min_initial_workers: u32,
    /// Actors restarted within `restart_window_ms` before the router gives up. Default 32.
    pub restarts_max: u32,
    /// The window of `restarts_max`, in milliseconds. Default 10,000, at least 1.
    pub restart_window_ms: u64,
    /// Seed of every tie and draw. Default 0.
    pub seed: u64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            block_size: 64,
            role: PoolRole::default(),
            is_eagle: false,
            policy: Policy::default(),
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            decode_active_request_weight: 0.0,
            host_cache_hit_weight: 0.75,
            disk_cache_hit_weight: 0.25,
            temperature: 0.0,
            assume_kv_reuse: true,
            track_active_blocks: true,
            track_prefill_tokens: true,
            index_shards: 1,
            fanout: Fanout::default(),
            load_query_timeout_ms: 5,
            requests_max: 65_536,
            event_blocks_max: 1 << 20,
            min_initial_workers: 0,
            restarts_max: 32,
            restart_window_ms: 10_000,
            seed: 0,
        }
    }
}

/// Why a configuration was refused: the field, its value and the rule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}, must be {rule}")]
pub struct ConfigError {
    /// The field's name.
    pub field: &'static str,
    /// Its value, as text.
    pub value: String,
    /// What it must be.
    pub rule: &'static str,
}

impl RouterConfig {
    /// Largest weight, scale, credit, decay or temperature: costs stay finite whatever the load.
    pub const WEIGHT_MAX: f64 = 1e9;

    /// Most index shards.
    pub const INDEX_SHARDS_MAX: u32 = 64;

    /// Checks every rule.
    ///
    /// # Errors
    /// The first field that breaks its rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let not_negative = [
            ("overlap_score_credit", self.overlap_score_credit),
            ("overlap_score_credit_decay", self.overlap_score_credit_decay),
            ("prefill_load_scale", self.prefill_load_scale),
            ("decode_active_request_weight", self.decode_active_request_weight),
            ("temperature", self.temperature),
        ];
        for (field, value) in not_negative {
            check(field, value, (0.0..=Self::WEIGHT_MAX).contains(&value), "between 0 and 1e9")?;
        }
        let shares = [
            ("host_cache_hit_weight", self.host_cache_hit_weight),
            ("disk_cache_hit_weight", self.disk_cache_hit_weight),
        ];
        for (field, value) in shares {
            check(field, value, (0.0..=1.0).contains(&value), "between 0 and 1")?;
        }
        let positive = [
            ("block_size", u64::from(self.block_size)),
            ("load_query_timeout_ms", self.load_query_timeout_ms),
            ("requests_max", u64::from(self.requests_max)),
            ("event_blocks_max", u64::from(self.event_blocks_max)),
            ("restart_window_ms", self.restart_window_ms),
        ];
        for (field, value) in positive {
            check(field, value, value > 0, "at least 1")?;
        }
        let shards = self.index_shards;
        check("index_shards", shards, (1..=Self::INDEX_SHARDS_MAX).contains(&shards), "1 to 64")
    }

    /// The block size as hashing wants it. A zero, which validation refuses, counts as 1.
    #[must_use]
    pub fn block_size_nonzero(&self) -> NonZeroU32 {
        NonZeroU32::new(self.block_size).unwrap_or(NonZeroU32::MIN)
    }

    /// The parameters of the `kv` cost.
    #[must_use]
    pub fn kv_cost(&self) -> KvCost {
        KvCost {
            overlap_score_credit: self.overlap_score_credit,
            overlap_score_credit_decay: self.overlap_score_credit_decay,
            prefill_load_scale: self.prefill_load_scale,
            active_request_weight: self.decode_active_request_weight,
            tier_weights: self.tier_weights(),
            track_prefill_tokens: self.track_prefill_tokens,
            decode_only: self.role == PoolRole::Decode && !self.track_prefill_tokens && self.has_index(),
            block_size: self.block_size,
        }
    }

    /// Worth of the lower tiers.
    #[must_use]
    pub fn tier_weights(&self) -> TierWeights {
        TierWeights { host: self.host_cache_hit_weight, disk: self.disk_cache_hit_weight }
    }

    /// Whether overlap counts for anything, so that an index is kept.
    #[must_use]
    pub fn has_index(&self) -> bool {
        self.overlap_score_credit > 0.0
    }

    /// What the scheduler must know before it decides.
    #[must_use]
    pub fn needs(&self) -> Needs {
        let needs = self.policy.needs(self.temperature, self.overlap_score_credit_decay);
        if self.fanout == Fanout::All { Needs::All } else { needs }
    }

    /// How long a load query may take.
    #[must_use]
    pub fn load_query_timeout(&self) -> Duration {
        Duration::from_millis(self.load_query_timeout_ms)
    }
}

fn check(field: &'static str, value: impl ToString, holds: bool, rule: &'static str) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError { field, value: value.to_string(), rule }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_pass() {
        RouterConfig::default().validate().expect("the defaults follow the rules");
    }

    #[test]
    fn every_rule_names_field_value_and_rule() {
        let refused = |json: &str| {
            let config: RouterConfig = serde_json::from_str(json).expect("well formed");
            config.validate().expect_err("must be refused").to_string()
        };
        assert_eq!(refused(r#"{"block_size":0}"#), "block_size is 0, must be at least 1");
        assert_eq!(refused(r#"{"temperature":-0.5}"#), "temperature is -0.5, must be between 0 and 1e9");
        assert_eq!(
            refused(r#"{"host_cache_hit_weight":1.5}"#),
            "host_cache_hit_weight is 1.5, must be between 0 and 1"
        );
        assert_eq!(refused(r#"{"index_shards":65}"#), "index_shards is 65, must be 1 to 64");
        assert_eq!(
            refused(r#"{"prefill_load_scale":1e300}"#).split(" is ").next(),
            Some("prefill_load_scale"),
            "costs must stay finite"
        );
        let nan = RouterConfig { overlap_score_credit: f64::NAN, ..RouterConfig::default() };
        assert!(nan.validate().expect_err("refused").to_string().contains("NaN"));
    }

    #[test]
    fn unknown_keys_are_refused_by_name() {
        let error = serde_json::from_str::<RouterConfig>(r#"{"blok_size":16}"#).expect_err("refused");
        assert!(error.to_string().contains("blok_size"));
    }
}
