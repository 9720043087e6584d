//! Selection of the tokens of a step, after the scheduler of vLLM V1.
//!
//! Source: `vllm/v1/core/sched/scheduler.py`, `Scheduler.schedule` and `update_from_output`, and
//! `KVCacheManager.allocate_slots`. All running sequences are scheduled in order of admission, each with as many tokens
//! as the budget of the step allows; then waiting requests are admitted. [`BlockShortage`] selects the rules for a rank
//! without free blocks.

use std::sync::Arc;

use crate::engine::config::{BlockShortage, EngineConfig};
use crate::engine::sequence::Stage;
use crate::engine::state::{Finish, Output, Rank};
use crate::engine::work::Work;

/// Accumulated state of a step during scheduling.
pub(super) struct Batch {
    tokens_left: u32,
    chunk_max: u32,
    pub(super) work: Work,
    pub(super) preempted: u32,
}

impl Batch {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let chunk_max = if config.prefill_chunk_max > 0 { config.prefill_chunk_max } else { u32::MAX };
        Self { tokens_left: config.step_tokens_max, chunk_max, work: Work::default(), preempted: 0 }
    }

    /// Returns whether the step has computed nothing and preempted no sequence.
    pub(super) fn is_empty(&self) -> bool {
        self.preempted == 0 && self.work.prefill_tokens == 0 && self.work.decode_sequences == 0
    }

    /// Number of tokens that a sequence with `tokens` left gets.
    fn grant(&self, tokens: u32) -> u32 {
        tokens.min(self.chunk_max).min(self.tokens_left)
    }
}

impl Rank {
    /// Schedules the running sequences, the oldest first: a decoding one with its next token and its draft tokens,
    /// another one with a chunk of its prompt. Preempts the youngest if blocks run out. Returns whether requests may be
    /// admitted.
    pub(super) fn schedule_running(&mut self, batch: &mut Batch) -> bool {
        let mut at = 0;
        while at < self.running.len() && batch.tokens_left > 0 {
            let sequence = &self.running[at];
            let (context, left, is_decoding) =
                (sequence.computed, sequence.len() - sequence.computed, sequence.is_decoding());
            // Draft tokens never exceed the model length.
            let room = self.config.max_model_len - 1 - context;
            let tokens = batch.grant(left + sequence.drafts).min(room);
            // Later sequences have no tokens in this step yet, so they can be preempted.
            while !self.extend(at, tokens) {
                let youngest = self.running.len() - 1;
                if youngest == at && !is_decoding && self.config.block_shortage == BlockShortage::PromptsWait {
                    return false;
                }
                self.preempt(youngest, batch);
                if youngest == at {
                    return false;
                }
            }
            if is_decoding {
                batch.work.add_decode(context + 1);
                batch.work.add_drafts(tokens - 1, context + 1);
            } else {
                batch.work.add_prefill(tokens, context);
            }
            batch.tokens_left -= tokens;
            at += 1;
        }
        true
    }

    /// Admits requests from the head of the queue while tokens, sequences and blocks are available.
    pub(super) fn admit(&mut self, batch: &mut Batch) {
        let block_size = self.config.block_size;
        while batch.tokens_left > 0 && self.running.len() < self.config.sequences_max as usize {
            let Some(sequence) = self.waiting.front_mut() else { return };
            let reusable = sequence.reusable(block_size);
            let hit = self.cache.lookup(reusable);
            let cached_blocks = (hit.device + hit.host) as u32;
            let cached_tokens = cached_blocks * block_size;
            let is_transferred = sequence.stage == Stage::Decode && sequence.cached_tokens.is_none();
            let left = sequence.len() - cached_tokens;
            let tokens = if is_transferred { left } else { batch.grant(left) };
            let needed = match self.config.block_shortage {
                BlockShortage::PromptsWait => cached_tokens + tokens,
                BlockShortage::PromptsPreempt => sequence.len(),
            };
            if !self.cache.has_room(&hit, needed.div_ceil(block_size) - cached_blocks) {
                return;
            }
            sequence.slots = self.cache.take(reusable, &hit);
            (sequence.computed, sequence.filled) = (cached_tokens, cached_blocks);
            if is_transferred {
                sequence.transferred_tokens = left - 1;
            }
            sequence.cached_tokens.get_or_insert(cached_tokens + sequence.transferred_tokens);
            let computed = if is_transferred { 1 } else { tokens };
            batch.work.host_tokens += hit.host as u64 * u64::from(block_size);
            batch.work.add_prefill(computed, cached_tokens + tokens - computed);
            batch.tokens_left -= computed;
            self.running.extend(self.waiting.pop_front());
            let is_extended = self.extend(self.running.len() - 1, tokens);
            debug_assert!(is_extended, "capacity was checked");
        }
    }

    /// Allocates the blocks for `tokens` more tokens and schedules their computation. Complete blocks without draft
    /// tokens enter the cache. Returns false without a change if blocks run out.
    fn extend(&mut self, at: usize, tokens: u32) -> bool {
        let (sequence, cache, block_size) = (&mut self.running[at], &mut self.cache, self.config.block_size);
        let deduplicates = self.config.deduplicates;
        let computed = sequence.computed + tokens;
        let more = computed.div_ceil(block_size).saturating_sub(sequence.slots.len() as u32);
        if more > cache.free_blocks() {
            return false;
        }
        sequence.slots.extend((0..more).filter_map(|_| cache.allocate()));
        let mut stored = Vec::new();
        let filled = computed.min(sequence.len()) / block_size;
        for block_idx in sequence.filled..filled {
            let hash = sequence.hash(block_idx, block_size, &mut self.hasher);
            let slot = sequence.slots[block_idx as usize];
            let cached = if deduplicates { cache.swap_for_cached(slot, &hash) } else { None };
            if let Some(cached) = cached {
                // Cached blocks only precede new ones, because the ancestors of a cached block are cached.
                debug_assert!(stored.is_empty(), "a new block has a cached child");
                sequence.slots[block_idx as usize] = cached;
            } else {
                let block = Arc::new(sequence.block(block_idx, block_size));
                cache.fill(slot, Arc::clone(&block));
                stored.push(block);
            }
        }
        if !stored.is_empty() {
            cache.announce(stored);
        }
        (sequence.computed, sequence.filled, sequence.scheduled) = (computed, filled, tokens);
        true
    }

    /// Releases the blocks of a running sequence and moves it to the front of the queue.
    fn preempt(&mut self, at: usize, batch: &mut Batch) {
        let mut sequence = self.running.remove(at);
        self.cache.release(&sequence.slots);
        sequence.reset(self.config.block_size, &mut self.hasher);
        self.waiting.push_front(sequence);
        batch.preempted += 1;
    }

    /// Generates the next token of every fully computed sequence, after its accepted draft tokens, and removes the
    /// sequences that end.
    pub(super) fn sample(&mut self) -> Vec<Output> {
        let mut outputs = Vec::with_capacity(self.running.len());
        let (config, cache, ids, retained) = (&self.config, &mut self.cache, &mut self.ids, &mut self.retained);
        self.running.retain_mut(|sequence| {
            if std::mem::take(&mut sequence.scheduled) == 0 || sequence.computed < sequence.len() {
                return true;
            }
            let drafts = sequence.computed - sequence.len();
            let accepted = sequence.accepted(drafts, config);
            sequence.computed -= drafts - accepted;
            sequence.drafts = config.speculation.draft_tokens;
            for _ in 0..=accepted {
                let first = !sequence.has_output();
                let token = sequence.sample(config);
                let ended = sequence.ended();
                outputs.push(Output {
                    id: sequence.id(),
                    token,
                    position: sequence.output_tokens(),
                    first,
                    finished: ended.map(|is_all| if is_all { Finish::Complete } else { Finish::ModelLength }),
                    cached_tokens: sequence.cached_tokens.unwrap_or_default(),
                    transferred_tokens: sequence.transferred_tokens,
                });
                if ended.is_some() {
                    if sequence.stage == Stage::Prefill {
                        let further = sequence.slots.split_off(sequence.prompt_blocks(config.block_size));
                        cache.release(&further);
                        retained.insert(sequence.id(), std::mem::take(&mut sequence.slots));
                    } else {
                        if let Some((session, hashes)) = sequence.session().filter(|_| config.refers_sessions) {
                            cache.refer(session, hashes);
                        }
                        cache.release(&sequence.slots);
                    }
                    ids.remove(&sequence.id());
                    return false;
                }
            }
            true
        });
        outputs
    }
}
