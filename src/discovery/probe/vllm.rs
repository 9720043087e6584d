//! vLLM: parser of the model list and of metric labels.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::page::samples;
use super::{Described, Engine, ProbeError};
use crate::discovery::HttpUrl;
use crate::protocol::{LoadSource, WorkerConfig};

/// Part of `/v1/models`.
#[derive(Deserialize)]
struct Models {
    data: Vec<ServedModel>,
}

#[derive(Deserialize)]
struct ServedModel {
    id: String,
    /// The base model of an adapter.
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

pub(super) fn describe(url: &HttpUrl, models: &[u8], metrics: &[u8]) -> Result<Described, ProbeError> {
    let broken = |path, reason: String| ProbeError::Broken { path, reason };
    let models: Models = serde_json::from_slice(models).map_err(|error| broken("/v1/models", error.to_string()))?;
    let page = std::str::from_utf8(metrics).map_err(|error| broken("/metrics", error.to_string()))?;
    let (adapters, models): (Vec<ServedModel>, Vec<ServedModel>) =
        models.data.into_iter().partition(|model| model.parent.is_some());
    let max_model_len = models.iter().filter_map(|model| model.max_model_len).filter(|len| *len > 0).max();
    let names = |models: Vec<ServedModel>| models.into_iter().map(|model| model.id).collect();

    let mut ranks = BTreeSet::new();
    let (mut block_size, mut blocks) = (None, None::<u64>);
    let mut is_vllm = false;
    for sample in samples(page, "vllm:") {
        is_vllm = true;
        if let Some(rank) = sample.label("engine").and_then(|engine| engine.parse::<u32>().ok())
            && ranks.len() <= WorkerConfig::RANKS_MAX as usize
        {
            ranks.insert(rank);
        }
        if sample.name == "vllm:cache_config_info" {
            block_size = block_size.or(sample.label("block_size").and_then(|size| size.parse().ok()));
            // The value may be `None`; the smallest rank counts.
            let of_rank = sample.label("num_gpu_blocks").and_then(|blocks| blocks.parse::<u32>().ok()).map(u64::from);
            blocks = [blocks, of_rank].into_iter().flatten().min();
        }
    }
    if !is_vllm {
        return Err(broken("/metrics", "it has no metric that begins with vllm:".to_owned()));
    }
    let (start, size) = in_a_row(&ranks)?;
    Ok(Described {
        engine: Engine::Vllm,
        models: names(models),
        lora_adapters: names(adapters),
        block_size: block_size.filter(|size| *size > 0),
        cache_tokens: blocks.zip(block_size).map(|(blocks, size): (u64, u32)| blocks * u64::from(size)),
        data_parallel_start_rank: start,
        data_parallel_size: size,
        max_num_batched_tokens: None,
        max_model_len,
        transfer_port: None,
        role: None,
        kv_events: None,
        load: Some(LoadSource::Metrics(url.below("/metrics").to_string())),
    })
}

/// First rank and number of ranks; a single rank without labels.
fn in_a_row(ranks: &BTreeSet<u32>) -> Result<(u32, u32), ProbeError> {
    let (Some(&first), Some(&last)) = (ranks.first(), ranks.last()) else { return Ok((0, 1)) };
    let size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    if last - first == size - 1 { Ok((first, size)) } else { Err(ProbeError::Ranks(ranks.clone())) }
}
