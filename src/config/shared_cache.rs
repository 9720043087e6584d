//! `[shared_cache]`: the cache that the ranks of a pool share.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of queries to a shared cache. Its credit is a setting of the policy `kv`
    /// ([`KvConfig::shared_cache_multiplier`](crate::policy::KvConfig::shared_cache_multiplier)).
    pub struct SharedCacheConfig {
        /// Timeout of a query, in milliseconds. It depends on the network to the embedder's cache, so it is a setting.
        /// Default 5, at least 1.
        timeout_ms: u64 = 5;
    }
}

impl SharedCacheConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("shared_cache.timeout_ms", self.timeout_ms);
    }
}
