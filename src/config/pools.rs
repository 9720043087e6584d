//! Settings of the two pools of disaggregated service: what differs from one that does both, and why.

use super::{IndexConfig, LoadConfig, PoolRole, PrefillModel, RouterConfig};

impl RouterConfig {
    /// The same settings for a pool that only prefills.
    ///
    /// Its ranks hold a prompt's blocks only until they are transferred, so what a rank has to compute tells how busy it
    /// is, and active blocks are not tracked. Overlap counts as ever: what is cached need not be computed.
    ///
    /// ```
    /// use pointsman::config::{PoolRole, RouterConfig};
    ///
    /// let config = RouterConfig { block_size: 16, ..RouterConfig::default() }.for_prefill();
    /// assert_eq!((config.role, config.load.track_active_blocks, config.block_size), (PoolRole::Prefill, false, 16));
    /// ```
    #[must_use]
    pub fn for_prefill(self) -> Self {
        let load = LoadConfig { track_active_blocks: false, ..self.load };
        Self { role: PoolRole::Prefill, load, ..self }
    }

    /// The same settings for a pool that only decodes.
    ///
    /// Its requests bring their blocks along from a prefill rank, each its own copy. So there is no prefill to track,
    /// nor a rate of it to learn; what a rank has cached saves nothing, and no index is kept; and a common prefix is not
    /// shared. If requests may skip the remote prefill because of blocks cached on the decode rank, set `index.enabled`
    /// again.
    ///
    /// ```
    /// use pointsman::config::{PoolRole, RouterConfig};
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    #[test]
    fn both_pools_of_disaggregated_serving_are_valid() {
        let load = LoadConfig { prefill_model: PrefillModel::Learned, ..LoadConfig::default() };
        let config = RouterConfig { policy: Policy::Kv.into(), load, ..RouterConfig::default() };
        config.clone().for_prefill().validate().expect("a prefill pool");
        config.for_decode().validate().expect("decode pools run no prefill");
    }
}
