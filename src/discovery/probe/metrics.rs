//! Parser of `/metrics`: vLLM reports its cache and its ranks in labels.

use std::collections::BTreeSet;

use crate::engine_load::series;
use crate::protocol::WorkerConfig;

/// Facts of the page.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct EngineMetrics {
    /// Whether the page has load metrics that the router reads.
    pub(super) has_load: bool,
    pub(super) is_vllm: bool,
    pub(super) models: BTreeSet<String>,
    /// Numbers of data-parallel ranks; empty without labels.
    pub(super) ranks: BTreeSet<u32>,
    pub(super) block_size: Option<u32>,
    /// Blocks of the smallest rank.
    pub(super) blocks: Option<u64>,
}

impl EngineMetrics {
    pub(super) fn read(body: &[u8]) -> Result<Self, String> {
        let page = std::str::from_utf8(body).map_err(|error| error.to_string())?;
        let has_load = series(page).any(|series| series.name.starts_with("sglang:"));
        let mut facts = Self { has_load, ..Self::default() };
        for sample in series(page).filter(|series| series.name.starts_with("vllm:")) {
            facts.is_vllm = true;
            if let Some(rank) = sample.label("engine").and_then(|engine| engine.parse::<u32>().ok())
                && facts.ranks.len() <= WorkerConfig::RANKS_MAX as usize
            {
                facts.ranks.insert(rank);
            }
            match sample.name {
                "vllm:cache_config_info" => {
                    let size = sample.label("block_size").and_then(|size| size.parse().ok());
                    facts.block_size = facts.block_size.or(size.filter(|size| *size > 0));
                    // The value may be `None`; the smallest rank counts.
                    let blocks = sample.label("num_gpu_blocks").and_then(|blocks| blocks.parse::<u32>().ok());
                    facts.blocks = [facts.blocks, blocks.map(u64::from)].into_iter().flatten().min();
                }
                "vllm:num_requests_running" => {
                    facts.models.extend(sample.label("model_name").map(str::to_owned));
                }
                _ => {}
            }
        }
        facts.has_load |= facts.is_vllm;
        let is_page = facts.has_load || page.lines().any(|line| line.starts_with("# TYPE "));
        if is_page { Ok(facts) } else { Err("it is no metrics page".to_owned()) }
    }
}
