//! `[shared_cache]`: the cache that the ranks of a pool share.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of queries to a shared cache. Its credit is a setting of the policy `kv`
/// ([`KvConfig::shared_cache_multiplier`](crate::policy::KvConfig::shared_cache_multiplier)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharedCacheConfig {
    /// Timeout of a query, in milliseconds. It depends on the network to the embedder's cache, so it is a setting.
    /// Default 5, at least 1.
    pub timeout_ms: u64,
}

impl Default for SharedCacheConfig {
    fn default() -> Self {
        Self { timeout_ms: 5 }
    }
}

impl SharedCacheConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("shared_cache.timeout_ms", self.timeout_ms);
    }
}
