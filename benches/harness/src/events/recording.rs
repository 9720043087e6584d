//! Recording of the batches that a fleet of simulated engines publishes for a workload.
//!
//! Assigns requests to engines and orders the batches. Equal arguments give equal bytes. Each engine always has several
//! waiting requests, so that its load and its cache contention are maximal. The batches of all engines are merged by
//! modelled time.

use std::sync::Arc;

use pointsman_trial::engine::{CacheEvent, EngineConfig, Rank, RequestSpec, Tier};
use pointsman_trial::kv_events::Encoder;
use pointsman_trial::workload::Prompt;

use super::Events;
use crate::Failed;

/// Minimum number of waiting requests per engine while requests remain.
const WAITING: u32 = 8;

/// One batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RecordedBatch {
    /// Time of publication in modelled µs.
    sent_us: u64,
    /// Number of the engine, from 0.
    pub(super) engine: u32,
    pub(super) payload: Vec<u8>,
}

/// All batches of the engines and their content.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recording {
    /// Batches in order of arrival.
    pub(super) messages: Vec<RecordedBatch>,
    /// Tokens of all stores, concatenated per engine.
    pub(super) tokens: Vec<u32>,
    /// Number of tokens of each store.
    pub(super) store_tokens: Vec<usize>,
    /// Number of blocks in store events.
    pub(super) stored_blocks: u64,
    /// Number of blocks in removal events.
    pub(super) removed_blocks: u64,
    /// Number of blocks that all engines hold at the end.
    pub(super) held_blocks: usize,
}

impl Recording {
    /// Size of all batches in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.messages.iter().map(|message| message.payload.len() as u64).sum()
    }

    fn count(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { blocks, .. } => {
                self.stored_blocks += blocks.len() as u64;
                let before = self.tokens.len();
                blocks.iter().for_each(|block| self.tokens.extend_from_slice(&block.tokens));
                self.store_tokens.push(self.tokens.len() - before);
            }
            CacheEvent::Removed { .. } => self.removed_blocks += 1,
            CacheEvent::Cleared => {}
        }
    }
}

/// Distributes `prompts` over the engines in rotation and records the batches.
pub(super) fn record(options: &Events, prompts: &[Prompt]) -> Result<Recording, Failed> {
    let tokens_max = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    let mut recording = Recording::default();
    let (format, block_size) = (options.dialect.into(), options.block_size.get());
    let encoder = Encoder { format, block_size, rank: 0, lora_ids: Arc::default() };
    for engine in 0..options.ranks {
        let mut rank = Rank::new(EngineConfig {
            block_size: options.block_size.get(),
            kv_blocks: options.kv_blocks,
            max_model_len: u32::try_from(tokens_max).unwrap_or(u32::MAX).saturating_add(options.output_tokens),
            hash_seed: engine.into(),
            output_seed: options.seed,
            ..EngineConfig::default()
        })
        .map_err(|error| format!("no engine can serve the workload: {error}"))?;
        let mut requests = (0..).zip(prompts).skip(engine as usize).step_by(options.ranks as usize).fuse();
        let mut now_us = 0;
        loop {
            while rank.load().waiting < WAITING
                && let Some((id, prompt)) = requests.next()
            {
                let taken = rank.submit(RequestSpec::new(id, &prompt[..], options.output_tokens));
                taken.map_err(|error| format!("an engine rejected a request: {error}"))?;
            }
            let Some(step) = rank.step() else { break };
            now_us += step.duration_us;
            if !step.events.is_empty() {
                step.events.iter().for_each(|event| recording.count(event));
                let mut payload = encoder.batch(now_us as f64 / 1e6, &step.events);
                payload.shrink_to_fit();
                recording.messages.push(RecordedBatch { sent_us: now_us, engine, payload });
            }
        }
        recording.held_blocks += rank.held(Tier::Device).len();
    }
    recording.messages.sort_by_key(|message| (message.sent_us, message.engine));
    Ok(recording)
}
