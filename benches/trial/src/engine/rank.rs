//! One rank: its requests, its cache, and their progress in each step.
//!
//! [`super::schedule`] selects the tokens of a step. Every accepted request ends exactly once, with a finished output or by [`Rank::cancel`]. Each step computes at least
//! one token. A step never exceeds the configured tokens, sequences or blocks. The cache manages block contents and
//! events; the caller provides the time.

use std::collections::VecDeque;
use std::sync::Arc;

use ahash::{AHashMap, AHashSet};

use crate::engine::block::{Block, BlockHasher, EngineHash};
use crate::engine::cache::Cache;
use crate::engine::config::{ConfigError, EngineConfig};
use crate::engine::event::{CacheEvent, Tier};
use crate::engine::schedule::Batch;
use crate::engine::sequence::{Refused, RequestSpec, Sequence, Stage};
use crate::engine::state::{Load, Outlook, Partial, Rank, Step};

impl Rank {
    /// Creates an idle rank with an empty cache.
    ///
    /// # Errors
    ///
    /// See [`EngineConfig::validate`].
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            hasher: BlockHasher::new(config.hash_seed),
            cache: Cache::new(&config),
            running: Vec::new(),
            waiting: VecDeque::new(),
            ids: AHashSet::new(),
            retained: AHashMap::new(),
            config,
        })
    }

    /// Configuration of the rank.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Queues a request for admission by a later step and hashes its prompt.
    ///
    /// # Errors
    ///
    /// The request can never run, or a request with the same id has not ended.
    pub fn submit(&mut self, spec: RequestSpec) -> Result<(), Refused> {
        self.submit_stage(spec, Stage::Whole)
    }

    /// Queues one stage of a request, like [`Rank::submit`].
    ///
    /// ```
    /// use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec, Stage};
    ///
    /// let (mut prefill, mut decode) = (Rank::new(EngineConfig::default())?, Rank::new(EngineConfig::default())?);
    /// let tokens: Vec<u32> = (0..200).collect();
    /// prefill.submit_stage(RequestSpec::new(1, tokens.clone(), 1), Stage::Prefill)?;
    /// prefill.step();
    /// assert_eq!(prefill.load().used_blocks, 3);
    /// decode.submit_stage(RequestSpec::new(1, tokens, 2), Stage::Decode)?;
    /// let step = decode.step().expect("a request waits");
    /// assert_eq!((step.prefill_tokens, step.outputs[0].cached_tokens), (1, 199));
    /// assert_eq!(prefill.release(1), 3);
    /// assert_eq!(prefill.load().used_blocks, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The request can never run, or a request with the same id has not ended or released its blocks.
    pub fn submit_stage(&mut self, spec: RequestSpec, stage: Stage) -> Result<(), Refused> {
        let id = spec.id;
        if self.ids.contains(&id) || self.retained.contains_key(&id) {
            return Err(Refused::DuplicateId(id));
        }
        let mut sequence = Sequence::new(spec, &self.config, &mut self.hasher)?;
        sequence.stage = stage;
        self.waiting.push_back(sequence);
        self.ids.insert(id);
        Ok(())
    }

    /// Releases the blocks of a finished [`Stage::Prefill`] and returns their number. They stay cached. Has no effect on
    /// other requests.
    pub fn release(&mut self, id: u64) -> usize {
        let Some(slots) = self.retained.remove(&id) else { return 0 };
        self.cache.release(&slots);
        slots.len()
    }

    /// Ends a request without further output. Returns whether the request existed. Its complete blocks stay cached.
    /// Linear in the number of requests.
    pub fn cancel(&mut self, id: u64) -> bool {
        if !self.ids.remove(&id) {
            return false;
        }
        if let Some(at) = self.running.iter().position(|sequence| sequence.id() == id) {
            let sequence = self.running.remove(at);
            self.cache.release(&sequence.slots);
        } else {
            self.waiting.retain(|sequence| sequence.id() != id);
        }
        true
    }

    /// Returns whether no request is running or waiting.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Runs the next step: the running sequences in order of admission, then waiting requests with the remaining token
    /// budget. Returns none when idle, and if the blocks of finished prefills leave no memory for any request.
    pub fn step(&mut self) -> Option<Step> {
        if self.is_idle() {
            return None;
        }
        let mut batch = Batch::new(&self.config);
        let is_through = self.schedule_running(&mut batch);
        // A sequence preempted in this step would take its blocks back immediately.
        if is_through && batch.preempted == 0 {
            self.admit(&mut batch);
        }
        if batch.is_empty() && !self.retained.is_empty() {
            return None;
        }
        let outputs = self.sample();
        let work = batch.work;
        Some(Step {
            duration_us: self.config.cost.duration_us(&work),
            outputs,
            events: self.cache.take_events(),
            prefill_tokens: work.prefill_tokens as u32,
            decode_sequences: work.decode_sequences as u32,
            draft_tokens: work.draft_tokens as u32,
            preempted: batch.preempted,
            work,
        })
    }

    /// Load between steps.
    #[must_use]
    pub fn load(&self) -> Load {
        let used_blocks = self.cache.used_blocks();
        Load {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            used_blocks,
            kv_usage: f64::from(used_blocks) / f64::from(self.config.blocks_usable()),
        }
    }

    /// Work in progress between steps. Linear in the number of running sequences.
    #[must_use]
    pub fn outlook(&self) -> Outlook {
        let mut outlook = Outlook::default();
        for sequence in &self.running {
            if sequence.is_decoding() {
                outlook.decode_sequences += 1;
                outlook.draft_tokens += sequence.drafts;
                outlook.kv_tokens += u64::from(sequence.len());
            } else {
                let (id, computed) = (sequence.id(), sequence.computed);
                outlook.partials.push(Partial { id, computed, left: sequence.len() - computed });
            }
        }
        outlook
    }

    /// Hashes of the blocks that a prompt without adapter and salt can reuse: its complete blocks, except a block with
    /// the last token, which is always computed.
    #[must_use]
    pub fn reusable_names(&self, tokens: &[u32]) -> Vec<EngineHash> {
        let (block_size, mut hasher) = (self.config.block_size as usize, BlockHasher::new(self.config.hash_seed));
        let reusable = tokens.len().saturating_sub(1) / block_size;
        let mut parent = None;
        let name = |block: &[u32]| *parent.insert(hasher.hash(parent, block.iter().copied(), None, None));
        tokens.chunks_exact(block_size).take(reusable).map(name).collect()
    }

    /// Returns whether any tier holds a block.
    ///
    /// ```
    /// use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec};
    ///
    /// let mut rank = Rank::new(EngineConfig::default())?;
    /// let tokens: Vec<u32> = (0..200).collect();
    /// let names = rank.reusable_names(&tokens);
    /// assert_eq!((names.len(), rank.holds(&names[2])), (3, false));
    /// rank.submit(RequestSpec::new(1, tokens, 1))?;
    /// rank.step();
    /// assert!(names.iter().all(|name| rank.holds(name)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn holds(&self, name: &EngineHash) -> bool {
        self.cache.holds(name)
    }

    /// Number of copies of a block on the device. May exceed 1 if blocks are not deduplicated.
    #[must_use]
    pub fn copies(&self, name: &EngineHash) -> usize {
        self.cache.copies(name)
    }

    /// Ends the references of a session to blocks, which stay cached.
    pub fn close_session(&mut self, session: &str) {
        self.cache.close_session(session);
    }

    /// Clears the device, and the host unless it is kept, and returns the event to publish. As in vLLM, does nothing and
    /// returns none while any request holds blocks. Waiting requests hold none.
    pub fn reset_cache(&mut self, keeps_host: bool) -> Option<CacheEvent> {
        self.cache.clear(keeps_host).then_some(CacheEvent::Cleared)
    }

    /// The blocks that a tier holds now, used or free, without duplicates, parents before children. Sorts all blocks:
    /// for tests, snapshots and checks.
    #[must_use]
    pub fn held(&self, tier: Tier) -> Vec<Arc<Block>> {
        self.cache.held(tier)
    }

    /// Checks the invariants of the rank. Linear in its blocks; for tests, between steps.
    ///
    /// # Panics
    ///
    /// An invariant does not hold.
    pub fn check_invariants(&self) {
        let mut users = vec![0; self.config.blocks_usable() as usize];
        let (block_size, drafts_max) = (self.config.block_size, self.config.speculation.draft_tokens);
        for sequence in &self.running {
            // Slots of rejected draft tokens remain for the next tokens.
            let slots_min = sequence.computed.div_ceil(block_size);
            let slots_max = (sequence.computed + drafts_max).div_ceil(block_size);
            assert!((slots_min..=slots_max).contains(&(sequence.slots.len() as u32)));
            assert!(sequence.computed < sequence.len() && sequence.scheduled == 0);
            sequence.slots.iter().for_each(|slot| users[*slot as usize] += 1);
        }
        #[expect(clippy::iter_over_hash_type, reason = "sums do not depend on the order")]
        for slots in self.retained.values() {
            slots.iter().for_each(|slot| users[*slot as usize] += 1);
        }
        let mut older = self.running.iter().rev().skip(1);
        let allows_partials = self.config.prefill_chunk_max > 0;
        assert!(
            allows_partials || older.all(Sequence::is_decoding),
            "only the youngest may have prompt left to compute"
        );
        self.cache.check_invariants(&users);
        assert!(self.waiting.iter().all(|sequence| sequence.slots.is_empty() && sequence.computed == 0));
        assert!(self.running.len() <= self.config.sequences_max as usize);
        assert_eq!(self.running.len() + self.waiting.len(), self.ids.len());
    }
}
