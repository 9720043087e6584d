//! Configuration of the simulated fleets.

use pointsman::RouterConfig;
use pointsman::policy::Policy;

pub(crate) const BLOCK_SIZE: u32 = 16;

pub(crate) fn config() -> RouterConfig {
    RouterConfig { block_size: Some(BLOCK_SIZE), seed: 11, policy: Policy::Kv.into(), ..RouterConfig::default() }
}

/// [`config`] with a change.
pub(crate) fn config_with(change: impl FnOnce(&mut RouterConfig)) -> RouterConfig {
    let mut config = config();
    change(&mut config);
    config
}
