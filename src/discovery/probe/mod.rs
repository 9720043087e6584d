//! What an engine says of itself, and what it must say to belong to a pool.
//!
//! Owns the reading of the answers and the comparison with the pool. Promises that what was given by hand stands,
//! except for the number of ranks, which the engine knows better. Leaves the asking to the actors.

mod page;
mod sglang;
#[cfg(test)]
mod tests;
mod vllm;

use std::collections::BTreeSet;

use super::HttpUrl;
use super::hosts::reach;
use crate::protocol::{KvEventsConfig, LoadSource, WorkerConfig, WorkerConfigError};

/// Which engine answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// By `/v1/models` and `/metrics`.
    Vllm,
    /// By `/server_info`.
    Sglang,
}

/// What an engine says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// Which it is.
    pub engine: Engine,
    /// Names under which it serves its model.
    pub models: BTreeSet<String>,
    /// LoRA adapters that it has loaded.
    pub lora_adapters: BTreeSet<String>,
    /// Tokens a block of its cache, where it says so and it matters.
    pub block_size: Option<u32>,
    /// Tokens that the cache of one rank holds.
    pub cache_tokens: Option<u64>,
    /// First data-parallel rank.
    pub data_parallel_start_rank: u32,
    /// Number of data-parallel ranks.
    pub data_parallel_size: u32,
    /// Tokens one step may hold.
    pub max_num_batched_tokens: Option<u32>,
    /// Longest sequence that its model takes, in tokens.
    pub max_model_len: Option<u32>,
    /// Where it publishes its KV events.
    pub kv_events: Option<KvEventsConfig>,
    /// Where it says how busy it is.
    pub load: Option<LoadSource>,
}

/// What an engine must be to belong to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// A name under which it must serve. None: any model.
    pub model: Option<String>,
    /// Tokens a block of the pool.
    pub block_size: u32,
    /// Whether its own must be the same, for its events to mean anything.
    pub block_size_must_match: bool,
}

/// Why an engine's answers are of no use.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProbeError {
    /// An answer that is not what it should be.
    #[error("the answer of {path} is broken: {reason}")]
    Broken {
        /// What was asked.
        path: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Another model.
    #[error("it serves {served:?}, must serve {expected:?}")]
    Model {
        /// What it serves.
        served: BTreeSet<String>,
        /// What it must.
        expected: String,
    },
    /// Blocks of another size: its events would never match a prompt.
    #[error("its block size is {engine}, must be {pool}, which is the pool's")]
    BlockSize {
        /// The engine's.
        engine: u32,
        /// The pool's.
        pool: u32,
    },
    /// Ranks that are not in a row.
    #[error("its ranks are {0:?}, must be in a row")]
    Ranks(BTreeSet<u32>),
    /// What it says makes no valid configuration.
    #[error(transparent)]
    Config(#[from] WorkerConfigError),
}

impl Described {
    /// Longest answer that is read, of any question.
    pub const BYTES_MAX: usize = 4 << 20;

    /// Reads SGLang's answer to `/server_info` (`/get_server_info` before). `None` when it is another engine's answer.
    ///
    /// # Errors
    /// When it is SGLang's and makes no sense.
    pub fn of_sglang(url: &HttpUrl, server_info: &[u8]) -> Result<Option<Self>, ProbeError> {
        sglang::describe(url, server_info)
    }

    /// Reads vLLM's answers to `/v1/models` and `/metrics`.
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
    /// When they make no sense.
    pub fn of_vllm(url: &HttpUrl, models: &[u8], metrics: &[u8]) -> Result<Self, ProbeError> {
        vllm::describe(url, models, metrics)
    }

    /// The configuration of the worker at `url`: what was `given` of it, and what it says for the rest.
    ///
    /// # Errors
    /// When it does not belong to the pool.
    pub fn complete(
        self,
        given: &WorkerConfig,
        url: &HttpUrl,
        expected: &Expected,
    ) -> Result<WorkerConfig, ProbeError> {
        if let Some(model) = expected.model.as_ref().filter(|model| !self.models.contains(*model)) {
            return Err(ProbeError::Model { served: self.models, expected: model.clone() });
        }
        let block_size = u64::from(expected.block_size.max(1));
        match self.block_size {
            Some(engine) if engine != expected.block_size && expected.block_size_must_match => {
                return Err(ProbeError::BlockSize { engine, pool: expected.block_size });
            }
            Some(_) | None => {}
        }
        let blocks = self.cache_tokens.map(|tokens| tokens / block_size).filter(|blocks| *blocks > 0);
        let mut config = WorkerConfig {
            data_parallel_start_rank: self.data_parallel_start_rank,
            data_parallel_size: self.data_parallel_size,
            total_kv_blocks: given.total_kv_blocks.or(blocks.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX))),
            max_num_batched_tokens: given.max_num_batched_tokens.or(self.max_num_batched_tokens),
            max_model_len: given.max_model_len.or(self.max_model_len),
            kv_events: given.kv_events.clone().or(self.kv_events),
            load: given.load.clone().or(self.load),
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
