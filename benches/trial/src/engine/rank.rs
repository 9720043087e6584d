//! The scheduler of a rank: who runs, and how far, in each step.
//!
//! Owns the requests, running and waiting. Promises that every request it took ends exactly once (with a finished
//! output, or by [`Rank::cancel`]), that each step computes something, and that a step never has more tokens,
//! sequences or blocks than configured. Leaves block contents and events to the cache, and the passing of time to the
//! caller.

use std::collections::VecDeque;
use std::sync::Arc;

use ahash::AHashSet;

use crate::engine::block::{Block, BlockHasher, EngineHash};
use crate::engine::cache::{Cache, CacheEvent, Tier};
use crate::engine::config::{ConfigError, EngineConfig, Work};
use crate::engine::sequence::{Refused, RequestSpec, Sequence};

/// One rank of an engine.
pub struct Rank {
    config: EngineConfig,
    hasher: BlockHasher,
    cache: Cache,
    /// In the order they were admitted in: the last one is the youngest.
    running: Vec<Sequence>,
    /// Preempted ones in front.
    waiting: VecDeque<Sequence>,
    ids: AHashSet<u64>,
}

/// What one step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// How long it took, in µs; at least 1.
    pub duration_us: u64,
    /// The tokens that it generated, there at its end; at most one a request.
    pub outputs: Vec<Output>,
    /// What changed in the cache, in order. Blocks are announced when their computation is scheduled, so an event may
    /// be published when the step begins or when it ends.
    pub events: Vec<CacheEvent>,
    /// What it had to compute and read.
    pub work: Work,
    /// Prompt tokens that it computed.
    pub prefill_tokens: u32,
    /// Sequences that decoded.
    pub decode_sequences: u32,
    /// Sequences that lost their blocks and wait again.
    pub preempted: u32,
}

/// A generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// The request's id.
    pub id: u64,
    /// The token, below `vocab_size`.
    pub token: u32,
    /// Whether it is the request's first.
    pub first: bool,
    /// Why it is the request's last, if it is.
    pub finished: Option<Finish>,
    /// Prompt tokens that were found in the cache, in any tier, when the request was first admitted.
    pub cached_tokens: u32,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// It has all the tokens it asked for.
    Complete,
    /// It reached `max_model_len` before.
    ModelLength,
}

/// How busy a rank is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests that run.
    pub running: u32,
    /// Requests that wait, preempted ones included.
    pub waiting: u32,
    /// Device blocks in use; freed ones that are still found do not count.
    pub used_blocks: u32,
    /// The same as a share of what can be used, from 0 to 1.
    pub kv_usage: f64,
}

/// What a rank has begun, between steps: what its next steps are made of besides what waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outlook {
    /// Sequences that decode: each takes a token of every step.
    pub decode_sequences: u32,
    /// Tokens of context that these read in the next step.
    pub kv_tokens: u64,
    /// The prompt that is computed in part, if one is.
    pub partial: Option<Partial>,
}

/// A prompt that has been computed in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// The request's id.
    pub id: u64,
    /// Tokens computed, or found in the cache.
    pub computed: u32,
    /// Tokens left to compute.
    pub left: u32,
}

impl Rank {
    /// An idle rank with an empty cache.
    ///
    /// # Errors
    ///
    /// As [`EngineConfig::validate`].
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            hasher: BlockHasher::new(config.hash_seed),
            cache: Cache::new(config.blocks_usable(), config.host_kv_blocks),
            running: Vec::new(),
            waiting: VecDeque::new(),
            ids: AHashSet::new(),
            config,
        })
    }

    /// What it was made with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Takes a request, to be admitted by a later step. Hashes its prompt.
    ///
    /// # Errors
    ///
    /// It could never run, or one of the same id has not ended.
    pub fn submit(&mut self, spec: RequestSpec) -> Result<(), Refused> {
        let id = spec.id;
        if self.ids.contains(&id) {
            return Err(Refused::DuplicateId(id));
        }
        self.waiting.push_back(Sequence::new(spec, &self.config, &mut self.hasher)?);
        self.ids.insert(id);
        Ok(())
    }

    /// Ends a request without another output; says whether it was there. Its complete blocks stay cached. Linear in
    /// the requests.
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

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Does the next step: a token for each decoding sequence, and the rest of the step's tokens for prompts in the
    /// order they were admitted or arrived in. None when idle.
    pub fn step(&mut self) -> Option<Step> {
        if self.is_idle() {
            return None;
        }
        let mut batch = Batch { tokens_left: self.config.step_tokens_max, work: Work::default(), preempted: 0 };
        self.schedule_decodes(&mut batch);
        let is_through = self.schedule_prefill(&mut batch);
        // What was just preempted would take its blocks back.
        if is_through && batch.preempted == 0 {
            self.admit(&mut batch);
        }
        let outputs = self.sample();
        let work = batch.work;
        Some(Step {
            duration_us: self.config.cost.duration_us(&work),
            outputs,
            events: self.cache.take_events(),
            prefill_tokens: work.prefill_tokens as u32,
            decode_sequences: work.decode_sequences as u32,
            preempted: batch.preempted,
            work,
        })
    }

    /// How busy it is, between steps.
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

    /// What it has begun, between steps. Linear in the running sequences.
    #[must_use]
    pub fn outlook(&self) -> Outlook {
        let mut outlook = Outlook::default();
        for sequence in &self.running {
            if sequence.is_decoding() {
                outlook.decode_sequences += 1;
                outlook.kv_tokens += u64::from(sequence.len());
            } else {
                let (id, computed) = (sequence.id(), sequence.computed);
                outlook.partial = Some(Partial { id, computed, left: sequence.len() - computed });
            }
        }
        outlook
    }

    /// Names of the blocks that a prompt without adapter and salt could find cached: its complete ones, but not the one
    /// with its last token, for that is always computed.
    #[must_use]
    pub fn reusable_names(&self, tokens: &[u32]) -> Vec<EngineHash> {
        let (block_size, mut hasher) = (self.config.block_size as usize, BlockHasher::new(self.config.hash_seed));
        let reusable = tokens.len().saturating_sub(1) / block_size;
        let mut parent = None;
        let name = |block: &[u32]| *parent.insert(hasher.hash(parent, block.iter().copied(), None, None));
        tokens.chunks_exact(block_size).take(reusable).map(name).collect()
    }

    /// Whether a block is held, in any tier.
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

    /// Number of copies that the device holds of a block: more than one where blocks are not de-duplicated.
    #[must_use]
    pub fn copies(&self, name: &EngineHash) -> usize {
        self.cache.copies(name)
    }

    /// Forgets all cached blocks, in both tiers, and says what to announce. As in vLLM nothing happens, and nothing
    /// is returned, while any request holds blocks; requests that only wait are no obstacle.
    pub fn reset_cache(&mut self) -> Option<CacheEvent> {
        self.cache.clear().then_some(CacheEvent::Cleared)
    }

    /// The blocks that a tier holds now, used or free, parents before children, each once however many copies there
    /// are. Sorts them all: for tests, snapshots and checks.
    #[must_use]
    pub fn held(&self, tier: Tier) -> Vec<Arc<Block>> {
        self.cache.held(tier)
    }

    /// Panics where the rank contradicts itself. Linear in its blocks; for tests, between steps.
    ///
    /// # Panics
    ///
    /// An invariant does not hold.
    pub fn check_invariants(&self) {
        let mut users = vec![0; self.config.blocks_usable() as usize];
        for sequence in &self.running {
            assert_eq!(sequence.slots.len() as u32, sequence.computed.div_ceil(self.config.block_size));
            assert!(sequence.computed < sequence.len() && sequence.scheduled == 0);
            sequence.slots.iter().for_each(|slot| users[*slot as usize] += 1);
        }
        let older = &self.running[..self.running.len().saturating_sub(1)];
        assert!(older.iter().all(Sequence::is_decoding), "only the youngest may have prompt left to compute");
        self.cache.check_invariants(&users);
        assert!(self.waiting.iter().all(|sequence| sequence.slots.is_empty() && sequence.computed == 0));
        assert!(self.running.len() <= self.config.sequences_max as usize);
        assert_eq!(self.running.len() + self.waiting.len(), self.ids.len());
    }

    /// A token for each sequence that decodes, the oldest first, at the expense of the youngest.
    fn schedule_decodes(&mut self, batch: &mut Batch) {
        let mut at = 0;
        while at < self.running.len() {
            if !self.running[at].is_decoding() {
                at += 1;
                continue;
            }
            // Whoever comes behind has no tokens in this step yet, so it can be preempted.
            while !self.extend(at, 1) {
                let youngest = self.running.len() - 1;
                self.preempt(youngest, batch);
                if youngest == at {
                    return;
                }
            }
            batch.work.add_decode(self.running[at].computed);
            batch.tokens_left -= 1;
            at += 1;
        }
    }

    /// A chunk for the running sequence whose prompt is not computed yet: the youngest, for nobody is admitted before
    /// it is through. One that finds no blocks waits for the decoding ones, which get on. Says whether others may be
    /// admitted behind it.
    fn schedule_prefill(&mut self, batch: &mut Batch) -> bool {
        let Some(sequence) = self.running.last().filter(|youngest| youngest.scheduled == 0) else { return true };
        let (context, tokens) = (sequence.computed, batch.tokens_left.min(sequence.len() - sequence.computed));
        let is_extended = self.extend(self.running.len() - 1, tokens);
        if is_extended {
            batch.work.add_prefill(tokens, context);
            batch.tokens_left -= tokens;
        }
        is_extended
    }

    /// Admits from the head of the queue while there are tokens, sequences and blocks for it.
    fn admit(&mut self, batch: &mut Batch) {
        let block_size = self.config.block_size;
        while batch.tokens_left > 0 && self.running.len() < self.config.sequences_max as usize {
            let Some(sequence) = self.waiting.front_mut() else { return };
            let reusable = sequence.reusable(block_size);
            let hit = self.cache.lookup(reusable);
            let cached_blocks = (hit.device + hit.host) as u32;
            let cached_tokens = cached_blocks * block_size;
            let tokens = batch.tokens_left.min(sequence.len() - cached_tokens);
            if !self.cache.has_room(&hit, (cached_tokens + tokens).div_ceil(block_size) - cached_blocks) {
                return;
            }
            sequence.slots = self.cache.take(reusable, &hit);
            sequence.computed = cached_tokens;
            sequence.cached_tokens.get_or_insert(cached_tokens);
            batch.work.host_tokens += hit.host as u64 * u64::from(block_size);
            batch.work.add_prefill(tokens, cached_tokens);
            batch.tokens_left -= tokens;
            self.running.extend(self.waiting.pop_front());
            let is_extended = self.extend(self.running.len() - 1, tokens);
            debug_assert!(is_extended, "there was room");
        }
    }

    /// Gives a sequence the blocks for `tokens` more and has them computed, or does nothing for want of blocks.
    fn extend(&mut self, at: usize, tokens: u32) -> bool {
        let (sequence, cache, block_size) = (&mut self.running[at], &mut self.cache, self.config.block_size);
        let deduplicates = self.config.deduplicates;
        let computed = sequence.computed + tokens;
        let more = computed.div_ceil(block_size) - sequence.slots.len() as u32;
        if more > cache.free_blocks() {
            return false;
        }
        sequence.slots.extend((0..more).filter_map(|_| cache.allocate()));
        let mut stored = Vec::new();
        for block_idx in sequence.computed / block_size..computed / block_size {
            let hash = sequence.hash(block_idx, block_size, &mut self.hasher);
            let slot = sequence.slots[block_idx as usize];
            let cached = if deduplicates { cache.swap_for_cached(slot, &hash) } else { None };
            if let Some(cached) = cached {
                // Never between two new ones: a cached block's ancestors are cached.
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
        sequence.computed = computed;
        sequence.scheduled = tokens;
        true
    }

    /// Takes a running sequence's blocks away and puts it in front of those that wait.
    fn preempt(&mut self, at: usize, batch: &mut Batch) {
        let mut sequence = self.running.remove(at);
        self.cache.release(&sequence.slots);
        sequence.slots.clear();
        sequence.computed = 0;
        self.waiting.push_front(sequence);
        batch.preempted += 1;
    }

    /// The next token of all that were computed to their end; takes out those that it ends.
    fn sample(&mut self) -> Vec<Output> {
        let mut outputs = Vec::with_capacity(self.running.len());
        let (config, cache, ids) = (&self.config, &mut self.cache, &mut self.ids);
        self.running.retain_mut(|sequence| {
            if std::mem::take(&mut sequence.scheduled) == 0 || sequence.computed < sequence.len() {
                return true;
            }
            let first = !sequence.has_output();
            let token = sequence.sample(config);
            let ended = sequence.ended();
            outputs.push(Output {
                id: sequence.id(),
                token,
                first,
                finished: ended.map(|is_all| if is_all { Finish::Complete } else { Finish::ModelLength }),
                cached_tokens: sequence.cached_tokens.unwrap_or_default(),
            });
            if ended.is_some() {
                cache.release(&sequence.slots);
                ids.remove(&sequence.id());
            }
            ended.is_none()
        });
        outputs
    }
}

/// A step in the making.
struct Batch {
    tokens_left: u32,
    work: Work,
    preempted: u32,
}
