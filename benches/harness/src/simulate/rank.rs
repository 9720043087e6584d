//! One rank of the simulated fleet: the engine, its current step, and its backlog.
//!
//! Computes the end of the rank's steps and the cache hit of a prompt. Backlog and cache are the true state of the
//! engine, not the router's view. The driver informs the router.
//!
//! **Publication of events.** A rank publishes its blocks at the end of the step that computes them. No request can use
//! them earlier, and real engines publish when the output of the step is available.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use ahash::AHashMap;
use pointsman::protocol::{self, BlockHash, KvEvent, StorageTier, StoredBlock, WorkerRank};
use pointsman_trial::engine::{
    CacheEvent, ConfigError, EngineConfig, EngineHash, Rank, Refused, RequestSpec, Stage, Step, Tier, Work,
};

use crate::results::RankSample;

/// One rank.
pub(super) struct FleetRank {
    pub(super) name: WorkerRank,
    engine: Rank,
    /// End and result of the current step.
    step: Option<(u64, Step)>,
    /// Submitted prompts whose computation no step has completed.
    backlog: BTreeMap<u64, Owed>,
    /// Total work of the backlog.
    owed: Work,
    /// Number of prompts in the backlog that will store this block.
    promised: AHashMap<EngineHash, u32>,
}

/// Remaining work of one prompt in the backlog.
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
        })
    }

    /// Hashes of the reusable blocks of a prompt, equal on every rank with the same seed.
    pub(super) fn names(&self, tokens: &[u32]) -> Vec<EngineHash> {
        self.engine.reusable_names(tokens)
    }

    /// Number of tokens of a prompt that are cached now.
    pub(super) fn cached_tokens(&self, names: &[EngineHash]) -> u64 {
        let cached = names.iter().take_while(|name| self.engine.holds(name)).count();
        cached as u64 * u64::from(self.engine.config().block_size)
    }

    /// Submits one stage of a request to the engine.
    pub(super) fn submit(&mut self, spec: RequestSpec, stage: Stage, names: Vec<EngineHash>) -> Result<(), Refused> {
        let (id, prompt_tokens) = (spec.id, spec.tokens.len() as u64);
        let work = match stage {
            Stage::Whole | Stage::Prefill => self.work_of(prompt_tokens, &names),
            Stage::Decode => prefill(1, prompt_tokens.saturating_sub(1)),
        };
        self.engine.submit_stage(spec, stage)?;
        for name in &names {
            *self.promised.entry(*name).or_default() += 1;
        }
        add(&mut self.owed, &work);
        self.backlog.insert(id, Owed { work, names });
        Ok(())
    }

    /// Releases the blocks of a prefill leg after their transfer.
    pub(super) fn release(&mut self, id: u64) {
        self.engine.release(id);
    }

    /// Returns whether a step can start.
    pub(super) fn can_begin(&self) -> bool {
        self.step.is_none() && !self.engine.is_idle()
    }

    /// Returns whether no step is running and no request is waiting.
    pub(super) fn is_idle(&self) -> bool {
        self.step.is_none() && self.engine.is_idle()
    }

    /// Starts a step, if possible, and returns its end time.
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

    /// Ends the current step.
    pub(super) fn end(&mut self) -> Option<Step> {
        self.step.take().map(|(_, step)| step)
    }

    /// The oracle's estimate: time in µs to the first token of a prompt that is submitted now. [`crate::simulate`]
    /// documents the model.
    pub(super) fn first_token_us(&self, now_us: u64, prompt_tokens: u64, names: &[EngineHash]) -> u64 {
        let (config, outlook) = (self.engine.config(), self.engine.outlook());
        let mut work = self.left();
        add(&mut work, &self.work_of(prompt_tokens, names));
        let (decodes, drafts) = (u64::from(outlook.decode_sequences), u64::from(outlook.draft_tokens));
        let room = u64::from(config.step_tokens_max).saturating_sub(decodes + drafts).max(1);
        let steps = work.prefill_tokens.div_ceil(room).max(1);
        work.decode_sequences = steps * decodes;
        work.kv_tokens = steps * outlook.kv_tokens;
        work.draft_tokens = steps * drafts;
        let under_way_us = self.step.as_ref().map_or(0, |(ends_us, _)| ends_us.saturating_sub(now_us));
        under_way_us + config.cost.duration_us(&work) + (steps - 1) * u64::from(config.cost.step_us)
    }

    /// Returns whether all submitted work is complete.
    pub(super) fn owes_nothing(&self) -> bool {
        self.is_idle() && self.owed == Work::default() && self.backlog.is_empty() && self.promised.is_empty()
    }

    pub(super) fn sample(&self, at_us: u64, rank: u32) -> RankSample {
        let load = self.engine.load();
        RankSample { at_us, rank, requests: load.running + load.waiting }
    }

    /// Work of the backlog after the current step.
    fn left(&self) -> Work {
        let mut left = self.owed;
        for partial in self.engine.outlook().partials {
            if let Some(owed) = self.backlog.get(&partial.id) {
                subtract(&mut left, &owed.work);
                add(&mut left, &prefill(partial.left.into(), partial.computed.into()));
            }
        }
        left
    }

    /// Work of a prompt on this rank, without the tokens that are cached now or will be after the backlog.
    fn work_of(&self, prompt_tokens: u64, names: &[EngineHash]) -> Work {
        let is_held = |name: &&EngineHash| self.engine.holds(name) || self.promised.contains_key(*name);
        let cached = names.iter().take_while(is_held).count() as u64 * u64::from(self.engine.config().block_size);
        prefill(prompt_tokens.saturating_sub(cached), cached)
    }

    /// Removes a prompt whose computation is completely scheduled from the backlog.
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

/// Work to compute `tokens` of a prompt after `context` earlier ones.
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

/// KV events of a step, with block hashes computed by the router's `hash`. Consecutive removals are merged.
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
        Tier::Device | Tier::Beside => StorageTier::Device,
        Tier::Host => StorageTier::HostPinned,
    }
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerId;
    use pointsman_trial::workload::{Request, Segment};
    use proptest::prelude::*;

    use super::*;

    /// A prompt of a few shared texts and a unique suffix.
    fn prompt(shared: &[u64], own: (u64, u32)) -> Vec<u32> {
        let begin = shared.iter().map(|&id| Segment { id, tokens: 700 });
        let prompt = begin.chain([Segment { id: 1_000 + own.0, tokens: own.1 }]).collect();
        Request { arrival_us: 0, prompt, output_tokens: 1, session: None }.tokens()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Without decoding sequences the oracle is exact, except for the rounding of each step to µs.
        #[test]
        fn the_oracle_matches_the_engine(
            prompts in prop::collection::vec((prop::collection::vec(0_u64..2, 0..4), 1_u32..3_000), 1..10),
            steps_first in 0_usize..3,
            share in 0.0..1.0,
        ) {
            let config = EngineConfig { step_tokens_max: 1_024, ..EngineConfig::default() };
            let mut rank = FleetRank::new(WorkerRank::new(WorkerId(1), 0), config).expect("valid engine settings");
            let prompts: Vec<Vec<u32>> =
                prompts.iter().zip(0..).map(|((shared, tokens), id)| prompt(shared, (id, *tokens))).collect();
            let (last, earlier) = prompts.split_last().expect("at least one");
            for (id, tokens) in (0..).zip(earlier) {
                rank.submit(RequestSpec::new(id, tokens.clone(), 1), Stage::Whole, rank.names(tokens)).expect("taken");
            }
            let mut now_us = 0;
            for _ in 0..steps_first {
                let Some(ends_us) = rank.begin(now_us) else { break };
                rank.end();
                now_us = ends_us;
            }
            if let Some(ends_us) = rank.begin(now_us) {
                now_us += ((ends_us - now_us) as f64 * share) as u64;
            }

            let names = rank.names(last);
            let foreseen_us = now_us + rank.first_token_us(now_us, last.len() as u64, &names);
            rank.submit(RequestSpec::new(99, last.clone(), 1), Stage::Whole, names).expect("taken");
            let (mut ended_us, mut steps) = (now_us, 0);
            loop {
                if let Some((ends_us, _)) = &rank.step {
                    ended_us = *ends_us;
                }
                if rank.end().is_some_and(|step| step.outputs.iter().any(|output| output.id == 99)) {
                    break;
                }
                prop_assert!(rank.begin(ended_us).is_some(), "the request never runs");
                steps += 1;
            }
            prop_assert!(foreseen_us.abs_diff(ended_us) <= steps, "{foreseen_us} for {ended_us} after {steps} steps");
            prop_assert!(rank.owes_nothing());
        }
    }
}
