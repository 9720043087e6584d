//! One rank of the simulated fleet: the engine, its step under way, and what it owes.
//!
//! Owns when a rank's steps end and what a prompt would find there. Promises that what it says of its backlog and its
//! cache is the engine's truth, not a router's belief. Leaves to the driver who is told.
//!
//! **When events leave.** A rank announces its blocks when the step that computes them ends. Before that nobody could
//! use them, and engines in the field publish once the step's output is there.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use ahash::AHashMap;
use engine_model::{CacheEvent, ConfigError, EngineConfig, EngineHash, Rank, Refused, RequestSpec, Step, Tier, Work};
use pointsman::protocol::{self, BlockHash, KvEvent, StorageTier, StoredBlock, WorkerRank};

use crate::record::RankSample;

/// One rank.
pub(super) struct FleetRank {
    pub(super) name: WorkerRank,
    engine: Rank,
    /// When it ends, and what it did.
    step: Option<(u64, Step)>,
    /// Prompts given to it that no step has taken to their end.
    backlog: BTreeMap<u64, Owed>,
    /// Their work, all of it.
    owed: Work,
    /// How many prompts of the backlog will leave this block behind.
    promised: AHashMap<EngineHash, u32>,
    prompt_tokens_total: u64,
    cached_tokens_total: u64,
}

/// What one prompt of the backlog has to have computed.
struct Owed {
    work: Work,
    names: Vec<EngineHash>,
}

impl FleetRank {
    pub(super) fn new(name: WorkerRank, config: EngineConfig) -> Result<Self, ConfigError> {
        Ok(Self {
            name,
            engine: Rank::new(config)?,
            step: None,
            backlog: BTreeMap::new(),
            owed: Work::default(),
            promised: AHashMap::new(),
            prompt_tokens_total: 0,
            cached_tokens_total: 0,
        })
    }

    /// Names of the blocks that a prompt can find cached, here and on every rank of one seed.
    pub(super) fn names(&self, tokens: &[u32]) -> Vec<EngineHash> {
        self.engine.reusable_names(tokens)
    }

    /// Tokens of a prompt that are cached now.
    pub(super) fn cached_tokens(&self, names: &[EngineHash]) -> u64 {
        let cached = names.iter().take_while(|name| self.engine.holds(name)).count();
        cached as u64 * u64::from(self.engine.config().block_size)
    }

    /// Takes a request, for a later step.
    pub(super) fn submit(&mut self, spec: RequestSpec, names: Vec<EngineHash>) -> Result<(), Refused> {
        let (id, work) = (spec.id, self.work_of(spec.tokens.len() as u64, &names));
        self.engine.submit(spec)?;
        for name in &names {
            *self.promised.entry(*name).or_default() += 1;
        }
        add(&mut self.owed, &work);
        self.backlog.insert(id, Owed { work, names });
        Ok(())
    }

    /// Whether it could begin a step.
    pub(super) fn can_begin(&self) -> bool {
        self.step.is_none() && !self.engine.is_idle()
    }

    /// Whether it does nothing and has nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.step.is_none() && self.engine.is_idle()
    }

    /// Begins a step, if it can; when it ends.
    pub(super) fn begin(&mut self, now_us: u64) -> Option<u64> {
        if !self.can_begin() {
            return None;
        }
        let step = self.engine.step()?;
        for output in step.outputs.iter().filter(|output| output.first) {
            self.settle_debt(output.id);
        }
        let ends_us = now_us.saturating_add(step.duration_us);
        self.step = Some((ends_us, step));
        Some(ends_us)
    }

    /// Ends the step under way.
    pub(super) fn end(&mut self) -> Option<Step> {
        self.step.take().map(|(_, step)| step)
    }

    /// Counts a prompt that was admitted.
    pub(super) fn count(&mut self, prompt_tokens: u64, cached_tokens: u64) {
        self.prompt_tokens_total += prompt_tokens;
        self.cached_tokens_total += cached_tokens;
    }

    /// The oracle's estimate: in how many µs a prompt's first token would come if it were given to this rank now. What
    /// it goes by is told in [`crate::simulate`].
    pub(super) fn first_token_us(&self, now_us: u64, prompt_tokens: u64, names: &[EngineHash]) -> u64 {
        let (config, outlook) = (self.engine.config(), self.engine.outlook());
        let mut work = self.left();
        add(&mut work, &self.work_of(prompt_tokens, names));
        let decodes = u64::from(outlook.decode_sequences);
        let room = u64::from(config.step_tokens_max).saturating_sub(decodes).max(1);
        let steps = work.prefill_tokens.div_ceil(room).max(1);
        work.decode_sequences = steps * decodes;
        work.kv_tokens = steps * outlook.kv_tokens;
        let under_way_us = self.step.as_ref().map_or(0, |(ends_us, _)| ends_us.saturating_sub(now_us));
        under_way_us + config.cost.duration_us(&work) + (steps - 1) * u64::from(config.cost.step_us)
    }

    pub(super) fn sample(&self, at_us: u64, rank: u32) -> RankSample {
        let load = self.engine.load();
        RankSample {
            at_us,
            rank,
            requests: load.running + load.waiting,
            prefill_tokens: self.left().prefill_tokens,
            used_blocks: load.used_blocks,
            prompt_tokens_total: self.prompt_tokens_total,
            cached_tokens_total: self.cached_tokens_total,
        }
    }

    /// What is left of the backlog behind the step under way.
    fn left(&self) -> Work {
        let mut left = self.owed;
        if let Some(partial) = self.engine.outlook().partial
            && let Some(owed) = self.backlog.get(&partial.id)
        {
            subtract(&mut left, &owed.work);
            add(&mut left, &prefill(partial.left.into(), partial.computed.into()));
        }
        left
    }

    /// What a prompt would have computed here: not what is cached, nor what the backlog will leave in the cache.
    fn work_of(&self, prompt_tokens: u64, names: &[EngineHash]) -> Work {
        let is_there = |name: &&EngineHash| self.engine.holds(name) || self.promised.contains_key(*name);
        let cached = names.iter().take_while(is_there).count() as u64 * u64::from(self.engine.config().block_size);
        prefill(prompt_tokens.saturating_sub(cached), cached)
    }

    /// A prompt's computation has been scheduled to its end.
    fn settle_debt(&mut self, id: u64) {
        let Some(owed) = self.backlog.remove(&id) else { return };
        subtract(&mut self.owed, &owed.work);
        for name in owed.names {
            if let Some(prompts) = self.promised.get_mut(&name) {
                *prompts -= 1;
                if *prompts == 0 {
                    self.promised.remove(&name);
                }
            }
        }
    }
}

/// Computing `tokens` of a prompt behind `context` earlier ones.
fn prefill(tokens: u64, context: u64) -> Work {
    let attention_pairs = tokens * context + tokens * (tokens + 1) / 2;
    Work { prefill_tokens: tokens, attention_pairs, ..Work::default() }
}

fn add(sum: &mut Work, work: &Work) {
    sum.prefill_tokens += work.prefill_tokens;
    sum.attention_pairs += work.attention_pairs;
}

fn subtract(sum: &mut Work, work: &Work) {
    sum.prefill_tokens -= work.prefill_tokens;
    sum.attention_pairs -= work.attention_pairs;
}

/// What a step announces, with the blocks' content hashed as the router hashes it. Removals in a row become one.
pub(super) fn announcements(
    events: &[CacheEvent],
    block_size: NonZeroU32,
    hash: impl Fn(&[u32], NonZeroU32) -> Vec<BlockHash>,
) -> Vec<(StorageTier, KvEvent)> {
    let named = |hash: &EngineHash| protocol::EngineHash(hash.as_u64());
    let mut announced: Vec<(StorageTier, KvEvent)> = Vec::with_capacity(events.len());
    for event in events {
        match event {
            CacheEvent::Stored { tier, blocks } => {
                let parent = blocks.first().and_then(|first| first.parent.as_ref()).map(named);
                let stored = blocks.iter().filter_map(|block| {
                    let block_hash = *hash(&block.tokens, block_size).first()?;
                    Some(StoredBlock { engine_hash: named(&block.hash), block_hash })
                });
                announced.push((storage_tier(*tier), KvEvent::Stored { parent, blocks: stored.collect() }));
            }
            CacheEvent::Removed { tier, hash } => match announced.last_mut() {
                Some((last, KvEvent::Removed { blocks })) if *last == storage_tier(*tier) => blocks.push(named(hash)),
                Some(_) | None => {
                    announced.push((storage_tier(*tier), KvEvent::Removed { blocks: vec![named(hash)] }));
                }
            },
            CacheEvent::Cleared => announced.push((StorageTier::Device, KvEvent::Cleared)),
        }
    }
    announced
}

fn storage_tier(tier: Tier) -> StorageTier {
    match tier {
        Tier::Device => StorageTier::Device,
        Tier::Host => StorageTier::HostPinned,
    }
}
