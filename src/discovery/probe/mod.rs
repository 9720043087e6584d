//! Probe responses of engines and their comparison with the pool.
//!
//! Parses the responses and completes the worker's configuration. Explicitly configured values take precedence, except
//! for the number of ranks, which the engine determines. The actors send the probes.

mod page;
mod sglang;
#[cfg(test)]
mod tests;
mod vllm;

use std::collections::BTreeSet;

use super::HttpUrl;
use super::hosts::reach;
use crate::config::RouterConfig;
use crate::protocol::{KvEventsConfig, LoadSource, WorkerConfig, WorkerConfigError, WorkerRole};

/// Type of the responding engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Detected by `/v1/models` and `/metrics`.
    Vllm,
    /// Detected by `/server_info`.
    Sglang,
}

/// Configuration reported by an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// Type of the engine.
    pub engine: Engine,
    /// Names of the served model.
    pub models: BTreeSet<String>,
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
    /// KV event endpoints.
    pub kv_events: Option<KvEventsConfig>,
    /// Source of load reports.
    pub load: Option<LoadSource>,
    /// Port of the bootstrap server, of an engine for prefills.
    pub transfer_port: Option<u16>,
    /// Role in disaggregated serving, if the engine has only one.
    pub role: Option<WorkerRole>,
}

/// Requirements of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Required model name; `None` accepts any model.
    pub model: Option<String>,
    /// Tokens per block of the pool, if configured.
    pub block_size: Option<u32>,
    /// Whether the engine's block size must be that of the pool, as required for its KV events. If not, the reported
    /// size is ignored.
    pub block_size_must_match: bool,
}

/// Reason for rejecting an engine's responses.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProbeError {
    /// An invalid response.
    #[error("the answer of {path} is broken: {reason}")]
    Broken {
        /// The path of the request.
        path: &'static str,
        /// The defect.
        reason: String,
    },
    /// A different model.
    #[error("it serves {served:?}, must serve {expected:?}")]
    Model {
        /// The served names.
        served: BTreeSet<String>,
        /// The required name.
        expected: String,
    },
    /// A different block size: the events would never match a prompt.
    #[error("its block size is {engine}, must be {pool}, as router.block_size sets")]
    BlockSize {
        /// The engine's block size.
        engine: u32,
        /// The pool's block size.
        pool: u32,
    },
    /// Rank numbers that are not consecutive.
    #[error("its ranks are {0:?}, must be in a row")]
    Ranks(BTreeSet<u32>),
    /// The reported values do not form a valid configuration.
    #[error(transparent)]
    Config(#[from] WorkerConfigError),
}

impl Described {
    /// Maximum response size in bytes.
    pub const BYTES_MAX: usize = 4 << 20;

    /// Parses SGLang's response to `/server_info` (formerly `/get_server_info`). `None` if another engine responded.
    ///
    /// # Errors
    /// An invalid response of SGLang.
    pub fn of_sglang(url: &HttpUrl, server_info: &[u8]) -> Result<Option<Self>, ProbeError> {
        sglang::describe(url, server_info)
    }

    /// Parses vLLM's responses to `/v1/models` and `/metrics`.
    ///
    /// ```
    /// use pointsman::discovery::{Described, HttpUrl};
    ///
    /// let models = br#"{ "data": [{ "id": "llama" }] }"#;
    /// let metrics = br#"vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0"#;
    /// let described = Described::of_vllm(&HttpUrl::parse("http://e:8000")?, models, metrics)?;
    /// assert_eq!((described.block_size, described.cache_tokens), (Some(16), Some(16_000)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Invalid responses.
    pub fn of_vllm(url: &HttpUrl, models: &[u8], metrics: &[u8]) -> Result<Self, ProbeError> {
        vllm::describe(url, models, metrics)
    }

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
        if let Some(model) = expected.model.as_ref().filter(|model| !self.models.contains(*model)) {
            return Err(ProbeError::Model { served: self.models, expected: model.clone() });
        }
        let block_size = given.block_size.or(self.block_size).filter(|_| expected.block_size_must_match);
        match (block_size, expected.block_size) {
            (Some(engine), Some(pool)) if engine != pool => return Err(ProbeError::BlockSize { engine, pool }),
            (Some(_) | None, _) => {}
        }
        // The size of a pool that configures none and whose other engines report one is not known here.
        let unit = expected.block_size.or(block_size).unwrap_or(RouterConfig::BLOCK_SIZE_ASSUMED);
        let blocks = self.cache_tokens.map(|tokens| tokens / u64::from(unit.max(1))).filter(|blocks| *blocks > 0);
        let mut config = WorkerConfig {
            data_parallel_start_rank: self.data_parallel_start_rank,
            data_parallel_size: self.data_parallel_size,
            total_kv_blocks: given.total_kv_blocks.or(blocks.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX))),
            block_size,
            max_num_batched_tokens: given.max_num_batched_tokens.or(self.max_num_batched_tokens),
            max_model_len: given.max_model_len.or(self.max_model_len),
            kv_events: given.kv_events.clone().or(self.kv_events),
            load: given.load.clone().or(self.load),
            transfer_port: given.transfer_port.or(self.transfer_port),
            role: given.role.or(self.role),
            ..given.clone()
        };
        if config.lora_adapters.is_empty() {
            config.lora_adapters = self.lora_adapters;
        }
        reach(&mut config, url);
        config.validate()?;
        Ok(config)
    }
}
