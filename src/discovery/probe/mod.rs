//! Probe responses of engines and their comparison with the pool.
//!
//! Parses the responses and completes the worker's configuration. Explicitly configured values take precedence, except
//! for the number of ranks, which the engine determines. The actors send the probes.

mod event_sources;
mod facts;
mod metrics;
mod models;
mod sglang;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub use facts::{EngineFacts, EnginePage, PageAnswer};

use super::HttpUrl;
use super::hosts::reach;
use crate::config::RouterConfig;
pub use crate::protocol::worker::Engine;
use crate::protocol::{KvEventsConfig, LoadSource, PoolBlockSize, WorkerConfig, WorkerConfigError, WorkerRole};

/// Configuration reported by an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// Type of the engine.
    pub engine: Engine,
    /// Names of the served model; `None` if no page has them.
    pub models: Option<BTreeSet<String>>,
    /// Loaded LoRA adapters.
    pub lora_adapters: BTreeSet<String>,
    /// Tokens per cache block, if reported and relevant.
    pub block_size: Option<u32>,
    /// Cache capacity of one rank in tokens.
    pub cache_tokens: Option<u64>,
    /// First data-parallel rank.
    pub data_parallel_start_rank: u32,
    /// Number of data-parallel ranks.
    pub data_parallel_size: u32,
    /// Maximum tokens per step.
    pub max_num_batched_tokens: Option<u32>,
    /// Longest sequence of the model in tokens.
    pub max_model_len: Option<u32>,
    /// KV event endpoints on consecutive ports.
    pub kv_events: Option<KvEventsConfig>,
    /// KV event endpoints by rank, empty without publishers; `None` if the engine does not report them by rank.
    pub kv_events_by_rank: Option<BTreeMap<u32, KvEventsConfig>>,
    /// Source of load reports.
    pub load: Option<LoadSource>,
    /// Port of the bootstrap server, of an engine for prefills.
    pub transfer_port: Option<u16>,
    /// Role in disaggregated serving, if the engine has only one.
    pub role: Option<WorkerRole>,
    /// Whether the engine supports hints of sessions.
    pub session_hints: bool,
    /// Whether the engine supports hints of priorities.
    pub priority_hints: bool,
    /// Whether the list of models may still arrive.
    pub model_is_pending: bool,
    /// Facts that no page reports, with the reasons.
    pub unreported: BTreeMap<String, String>,
}

/// Requirements of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Required model name; `None` accepts any model.
    pub model: Option<String>,
    /// Tokens per block of the pool, if configured.
    pub block_size: Option<u32>,
}

/// Reason for rejecting an engine's responses.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProbeError {
    /// No page with known content.
    #[error("{0}")]
    NoPage(String),
    /// The page with the model's name has not responded.
    #[error("its model is not known yet: {0}")]
    ModelPending(String),
    /// A different model.
    #[error("it serves {served:?}, must serve {expected:?}")]
    Model {
        /// The served names.
        served: BTreeSet<String>,
        /// The required name.
        expected: String,
    },
    /// Rank numbers that are not consecutive.
    #[error("its ranks are {0:?}, must be in a row")]
    Ranks(BTreeSet<u32>),
    /// The reported values do not form a valid configuration.
    #[error(transparent)]
    Config(#[from] WorkerConfigError),
}

impl Described {
    /// The configuration of the worker at `url`: the `given` values, completed by the reported ones.
    ///
    /// # Errors
    /// If the engine does not meet the requirements of the pool.
    pub fn complete(
        self,
        given: &WorkerConfig,
        url: &HttpUrl,
        expected: &Expected,
    ) -> Result<WorkerConfig, ProbeError> {
        self.check_model(expected)?;
        let block_size = given.block_size.or(self.block_size);
        // The size of a pool that configures none and whose other engines report one is not known here.
        let of_engine = block_size.map(PoolBlockSize::of_engine);
        let unit = expected.block_size.or(of_engine).unwrap_or(RouterConfig::BLOCK_SIZE_ASSUMED);
        let blocks = self.cache_tokens.map(|tokens| tokens / u64::from(unit.max(1))).filter(|blocks| *blocks > 0);
        let (kv_events, kv_events_by_rank) = match (given.has_kv_events(), self.kv_events_by_rank) {
            (true, _) => (given.kv_events.clone(), given.kv_events_by_rank.clone()),
            (false, Some(by_rank)) => (None, by_rank),
            (false, None) => (self.kv_events, BTreeMap::new()),
        };
        let mut config = WorkerConfig {
            data_parallel_start_rank: self.data_parallel_start_rank,
            data_parallel_size: self.data_parallel_size,
            total_kv_blocks: given.total_kv_blocks.or(blocks.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX))),
            block_size,
            max_num_batched_tokens: given.max_num_batched_tokens.or(self.max_num_batched_tokens),
            max_model_len: given.max_model_len.or(self.max_model_len),
            kv_events,
            kv_events_by_rank,
            load: given.load.clone().or(self.load),
            transfer_port: given.transfer_port.or(self.transfer_port),
            role: given.role.or(self.role),
            engine: given.engine.or(Some(self.engine)),
            session_hints: given.session_hints && self.session_hints,
            priority_hints: given.priority_hints && self.priority_hints,
            ..given.clone()
        };
        if config.lora_adapters.is_empty() {
            config.lora_adapters = self.lora_adapters;
        }
        config.unreported = self.unreported;
        config.unreported.retain(|fact, _| match fact.as_str() {
            "model" => expected.model.is_some(),
            "block size" => config.block_size.is_none(),
            "KV cache size" => config.total_kv_blocks.is_none(),
            "load" => config.load.is_none(),
            _ => true,
        });
        reach(&mut config, url);
        config.validate()?;
        Ok(config)
    }

    /// The served model must be the expected one. An engine without a page that has the name cannot be checked.
    fn check_model(&self, expected: &Expected) -> Result<(), ProbeError> {
        let Some(model) = &expected.model else { return Ok(()) };
        match &self.models {
            Some(served) if served.contains(model) => Ok(()),
            Some(served) => Err(ProbeError::Model { served: served.clone(), expected: model.clone() }),
            None if self.model_is_pending => {
                Err(ProbeError::ModelPending(self.unreported.get("model").cloned().unwrap_or_default()))
            }
            None => Ok(()),
        }
    }
}
