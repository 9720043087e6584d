//! The batches that a fleet of modelled engines sends for a workload, before any clock runs.
//!
//! Owns who serves which request and in which order batches come. Promises the same bytes for the same arguments. Each
//! engine has always a few requests waiting, so it is as busy as it can be, and its cache as contended; batches of all
//! engines follow each other in modelled time.

use pointsman_trial::engine::{CacheEvent, EngineConfig, Rank, RequestSpec, Tier};
use pointsman_trial::workload::Prompt;

use super::{Events, EventsError};

/// Requests that wait at an engine as long as there are any.
const WAITING: u32 = 8;

/// One batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// When its engine sent it, in modelled µs.
    sent_us: u64,
    /// Which engine, from 0.
    pub(super) engine: u32,
    pub(super) payload: Vec<u8>,
}

/// All that the engines send, and what is in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recording {
    /// In the order they come in.
    pub(super) messages: Vec<Message>,
    /// Tokens of all stores, one after the other, engine by engine.
    pub(super) tokens: Vec<u32>,
    /// How many of the tokens are of each store.
    pub(super) store_tokens: Vec<usize>,
    /// Blocks that stores name.
    pub(super) stored_blocks: u64,
    /// Blocks that removals name.
    pub(super) removed_blocks: u64,
    /// Blocks that all engines hold at the end.
    pub(super) held_blocks: usize,
}

impl Recording {
    /// Bytes of all batches.
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

/// Lets the engines serve `prompts`, each its share in turn, and records what they send.
pub(super) fn record(options: &Events, prompts: &[Prompt]) -> Result<Recording, EventsError> {
    let tokens_max = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    let mut recording = Recording::default();
    let encoder = options.dialect.encoder(options.block_size.get());
    for engine in 0..options.ranks {
        let mut rank = Rank::new(EngineConfig {
            block_size: options.block_size.get(),
            kv_blocks: options.kv_blocks,
            max_model_len: u32::try_from(tokens_max).unwrap_or(u32::MAX).saturating_add(options.output_tokens),
            hash_seed: engine.into(),
            output_seed: options.seed,
            ..EngineConfig::default()
        })?;
        let mut requests = (0..).zip(prompts).skip(engine as usize).step_by(options.ranks as usize).fuse();
        let mut now_us = 0;
        loop {
            while rank.load().waiting < WAITING
                && let Some((id, prompt)) = requests.next()
            {
                rank.submit(RequestSpec::new(id, &prompt[..], options.output_tokens))?;
            }
            let Some(step) = rank.step() else { break };
            now_us += step.duration_us;
            if !step.events.is_empty() {
                step.events.iter().for_each(|event| recording.count(event));
                let mut payload = encoder.batch(now_us as f64 / 1e6, &step.events);
                payload.shrink_to_fit();
                recording.messages.push(Message { sent_us: now_us, engine, payload });
            }
        }
        recording.held_blocks += rank.held(Tier::Device).len();
    }
    recording.messages.sort_by_key(|message| (message.sent_us, message.engine));
    Ok(recording)
}
