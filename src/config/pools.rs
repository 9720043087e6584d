//! Settings of the two pools of disaggregated service: what differs from one that does both, and why.

use super::{PoolRole, PrefillModel, RouterConfig};

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
    /// assert_eq!((config.role, config.track_active_blocks, config.block_size), (PoolRole::Prefill, false, 16));
    /// ```
    #[must_use]
    pub fn for_prefill(self) -> Self {
        Self { role: PoolRole::Prefill, track_active_blocks: false, ..self }
    }

    /// The same settings for a pool that only decodes.
    ///
    /// Its requests bring their blocks along from a prefill rank, each its own copy. So there is no prefill to track,
    /// nor a rate of it to learn; what a rank has cached saves nothing, and no index is kept; and a common prefix is not
    /// shared. Where requests may skip the remote prefill because of what the decode rank has cached, an
    /// `overlap_score_credit` above 0 is wanted again, so that this is known.
    ///
    /// ```
    /// use pointsman::config::{PoolRole, RouterConfig};
    ///
    /// let config = RouterConfig::default().for_decode();
    /// assert_eq!((config.role, config.track_prefill_tokens), (PoolRole::Decode, false));
    /// assert!(!config.has_index());
    /// ```
    #[must_use]
    pub fn for_decode(self) -> Self {
        Self {
            role: PoolRole::Decode,
            overlap_score_credit: 0.0,
            assume_kv_reuse: false,
            track_prefill_tokens: false,
            prefill_load_model: PrefillModel::None,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_pools_of_disaggregated_service_pass() {
        let config = RouterConfig { prefill_load_model: PrefillModel::Learned, ..RouterConfig::default() };
        config.clone().for_prefill().validate().expect("a prefill pool");
        config.for_decode().validate().expect("a decode pool has no prefill to learn from");
    }
}
