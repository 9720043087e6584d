//! Settings that membership depends on, and the rules for worker configurations.

use std::time::Duration;

use super::initial_block_size;
use crate::config::{EventMode, PoolRole, RouterConfig, SupervisionConfig};
use crate::protocol::{PoolBlockSize, WorkerConfig, WorkerConfigError};

/// Settings of a router that membership depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct MembershipRules {
    /// Role of the pool. Workers of sources that have another role are ignored.
    pub role: PoolRole,
    /// Block size before the first worker.
    pub block_size: PoolBlockSize,
    /// Number of index shards.
    pub index_shards: u32,
    /// EAGLE hashing of the pool. A worker that states another value is rejected.
    pub is_eagle: bool,
    /// True if the build contains the reader of KV events.
    pub has_reader: bool,
    /// True if the router reads the KV events of workers that publish some.
    pub reads_kv_events: bool,
    /// Decides which ranks are cold after the loss of an index shard.
    pub event_mode: EventMode,
    /// True if a limit is a share of `max_num_batched_tokens`, so that a worker without this value is reported.
    pub needs_batched_tokens: bool,
    /// Longest drain of a worker that its source drains.
    pub source_drain_timeout: Duration,
    /// Restarts within `restart_window` before the router fails. KV event readers have a budget of their own.
    pub restarts_max: u32,
    /// Period of `restarts_max`.
    pub restart_window: Duration,
}

impl MembershipRules {
    /// Rules of a validated configuration. `has_reader`: whether the build can read KV events.
    #[must_use]
    pub fn of(config: &RouterConfig, has_reader: bool) -> Self {
        Self {
            role: config.role,
            block_size: initial_block_size(config),
            index_shards: config.index_shards(),
            is_eagle: config.is_eagle,
            has_reader,
            reads_kv_events: has_reader && config.events.mode.reads_events() && config.has_index(),
            event_mode: config.events.mode,
            needs_batched_tokens: config.uses_batched_tokens(),
            source_drain_timeout: Duration::from_millis(config.discovery.drain_timeout_ms),
            restarts_max: config.supervision.restarts_max,
            restart_window: SupervisionConfig::RESTART_WINDOW,
        }
    }

    /// Checks the configuration of a worker.
    pub(super) fn check(&self, config: &WorkerConfig) -> Result<(), WorkerConfigError> {
        config.validate()?;
        if config.has_kv_events() && !self.has_reader {
            return Err(WorkerConfigError::NoReader);
        }
        match config.is_eagle {
            Some(worker) if worker != self.is_eagle => Err(WorkerConfigError::Eagle { worker, pool: self.is_eagle }),
            _ => Ok(()),
        }
    }
}
