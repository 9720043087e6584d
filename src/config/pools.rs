//! Settings of the two pools of disaggregated serving, and their differences from an aggregated pool.

use super::{IndexConfig, LoadConfig, PoolRole, PrefillModel, RouterConfig};

impl RouterConfig {
    /// The same settings for a prefill pool.
    ///
    /// Prefill ranks hold the blocks of a prompt only until their transfer. Their load is therefore the number of tokens
    /// to compute, and active blocks are not tracked. Cached blocks reduce the prefill as in other pools.
    ///
    /// ```
    /// use pointsman::config::PoolRole;
    /// use pointsman::RouterConfig;
    ///
    /// let config = RouterConfig { block_size: Some(16), ..RouterConfig::default() }.for_prefill();
    /// assert_eq!((config.role, config.load.track_active_blocks, config.block_size), (PoolRole::Prefill, false, Some(16)));
    /// ```
    #[must_use]
    pub fn for_prefill(self) -> Self {
        let load = LoadConfig { track_active_blocks: false, ..self.load };
        Self { role: PoolRole::Prefill, load, ..self }
    }

    /// The same settings for a decode pool.
    ///
    /// Requests arrive with their own copy of the blocks from a prefill rank. Prefills are therefore not tracked and no
    /// prefill rate is learned. Cached blocks save nothing, so the pool has no index, and common prefixes are not
    /// shared. If requests may skip the remote prefill because of cached blocks on the decode rank, set `index.enabled`
    /// again.
    ///
    /// ```
    /// use pointsman::config::PoolRole;
    /// use pointsman::RouterConfig;
    ///
    /// let config = RouterConfig::default().for_decode();
    /// assert_eq!((config.role, config.load.track_prefill_tokens), (PoolRole::Decode, false));
    /// assert!(!config.has_index());
    /// ```
    #[must_use]
    pub fn for_decode(self) -> Self {
        let load = LoadConfig {
            assume_kv_reuse: false,
            track_prefill_tokens: false,
            prefill_model: PrefillModel::None,
            ..self.load
        };
        Self { role: PoolRole::Decode, index: IndexConfig { enabled: false, ..self.index }, load, ..self }
    }
}
