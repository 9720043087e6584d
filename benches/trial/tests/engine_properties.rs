//! Property tests of the engine model against slow reference models, for arbitrary orders of calls: the events rebuild
//! the held blocks, and a single request hits, evicts and stores the same blocks as token lists with linear search.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pointsman_trial::engine::{
    Block, BlockShortage, CacheEvent, EngineConfig, EngineHash, Finish, Rank, RequestSpec, Speculation, Step, Tier,
};
use proptest::prelude::*;

const TIERS: [Tier; 2] = [Tier::Device, Tier::Host];

fn configs() -> impl Strategy<Value = EngineConfig> {
    let memory = (1..5_u32, 2..14_u32, prop_oneof![Just(0), 1..12_u32], any::<bool>(), any::<bool>());
    let shortage = prop_oneof![Just(BlockShortage::PromptsWait), Just(BlockShortage::PromptsPreempt)];
    let limits = (1..5_u32, 0..12_u32, prop_oneof![Just(0), 1..6_u32], shortage);
    let speculation = prop_oneof![Just((0, 0)), (1..4_u32, 0..=100_u32)];
    (memory, limits, speculation).prop_map(
        |(
            (block_size, blocks, host_kv_blocks, writes_through, deduplicates),
            (sequences_max, spare_tokens, prefill_chunk_max, block_shortage),
            (draft_tokens, acceptance_percent),
        )| EngineConfig {
            block_size,
            kv_blocks: blocks + 1,
            host_kv_blocks,
            writes_through,
            deduplicates,
            step_tokens_max: sequences_max + spare_tokens,
            sequences_max,
            prefill_chunk_max,
            block_shortage,
            speculation: Speculation { draft_tokens, acceptance_percent },
            max_model_len: (block_size * blocks).max(2),
            vocab_size: 2,
            ..EngineConfig::default()
        },
    )
}

/// Few distinct tokens and names, so that requests share many prefixes.
fn specs() -> impl Strategy<Value = RequestSpec> {
    let name = || prop_oneof![4 => Just(None), 1 => Just(Some("a")), 1 => Just(Some("b"))];
    (prop::collection::vec(0..2_u32, 1..40), 1..12_u32, name(), name()).prop_map(|(tokens, outputs, lora, salt)| {
        RequestSpec {
            lora_name: lora.map(Into::into),
            cache_salt: salt.map(Into::into),
            ..RequestSpec::new(0, tokens, outputs)
        }
    })
}

#[derive(Clone, Debug)]
enum Call {
    Submit(RequestSpec),
    Step,
    Cancel(u64),
    Reset,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        6 => specs().prop_map(Call::Submit),
        12 => Just(Call::Step),
        1 => (0..40_u64).prop_map(Call::Cancel),
        1 => Just(Call::Reset),
    ];
    prop::collection::vec(call, 0..120)
}

/// Complete identity of a block: adapter, salt, and all tokens from the start of the prompt.
type Chain = (Option<Arc<str>>, Option<Arc<str>>, Vec<u32>);

/// A cache rebuilt from events alone.
#[derive(Default)]
struct Mirror {
    tiers: [BTreeMap<EngineHash, Arc<Block>>; 2],
    /// Number of copies of each block on the device.
    copies: BTreeMap<EngineHash, usize>,
    /// Every chain ever published, by its hash; never removed.
    chains: BTreeMap<EngineHash, Chain>,
}

impl Mirror {
    fn apply(&mut self, events: &[CacheEvent]) {
        for event in events {
            match event {
                CacheEvent::Stored { tier, blocks } => self.store(*tier, blocks),
                CacheEvent::Removed { tier, hash } => {
                    if *tier == Tier::Device {
                        let copies = self.copies.get_mut(hash).expect("a removed block is held");
                        *copies -= 1;
                        if *copies > 0 {
                            continue;
                        }
                        self.copies.remove(hash);
                    }
                    assert!(
                        self.tiers[*tier as usize].remove(hash).is_some(),
                        "{hash:?} is removed from a tier that holds it"
                    );
                    let is_child = |block: &&Arc<Block>| block.parent == Some(*hash);
                    if !self.is_held(hash) {
                        let child = self.tiers.iter().flat_map(BTreeMap::values).find(is_child);
                        assert_eq!(child, None, "{hash:?} is gone before its child");
                    }
                }
                CacheEvent::Cleared => {
                    self.tiers.iter_mut().for_each(BTreeMap::clear);
                    self.copies.clear();
                }
            }
        }
    }

    fn store(&mut self, tier: Tier, blocks: &[Arc<Block>]) {
        assert!(!blocks.is_empty());
        for pair in blocks.windows(2) {
            assert_eq!(pair[1].parent, Some(pair[0].hash), "blocks follow each other");
        }
        for block in blocks {
            let before = block.parent.map(|parent| {
                assert!(self.is_held(&parent), "the parent of {block:?} is known");
                self.chains[&parent].clone()
            });
            let names = (block.lora_name.clone(), block.cache_salt.clone());
            let (lora, salt, mut tokens) = before.unwrap_or((names.0.clone(), names.1.clone(), Vec::new()));
            assert_eq!((&lora, &salt), (&names.0, &names.1), "a chain has one adapter and one salt");
            assert_eq!(tokens.len(), block.depth as usize * block.tokens.len());
            tokens.extend(&block.tokens);
            let chain = (lora, salt, tokens);
            assert_eq!(self.chains.entry(block.hash).or_insert(chain.clone()), &chain, "a name identifies one chain");
            let is_new = self.tiers[tier as usize].insert(block.hash, Arc::clone(block)).is_none();
            assert!(is_new || tier == Tier::Device, "the host stores each block once");
            if tier == Tier::Device {
                *self.copies.entry(block.hash).or_default() += 1;
            }
        }
    }

    fn is_held(&self, hash: &EngineHash) -> bool {
        self.tiers.iter().any(|held| held.contains_key(hash))
    }

    fn check(&self, rank: &Rank) {
        for tier in TIERS {
            let held = rank.held(tier);
            let known: BTreeSet<EngineHash> = self.tiers[tier as usize].keys().copied().collect();
            assert_eq!(held.iter().map(|block| block.hash).collect::<BTreeSet<_>>(), known, "{tier:?}");
            assert!(held.iter().all(|block| self.tiers[tier as usize][&block.hash] == *block));
            assert!(held.windows(2).all(|pair| pair[0].depth <= pair[1].depth), "parents come first");
        }
        assert!(self.copies.iter().all(|(hash, copies)| rank.copies(hash) == *copies), "each copy is announced");
        assert!(
            !rank.config().deduplicates || self.copies.values().all(|copies| *copies == 1),
            "no block is held twice"
        );
    }
}

/// Requests with their generated tokens, by id.
type Requests = BTreeMap<u64, (RequestSpec, Vec<u32>)>;

/// Runs all calls, then steps until idle. Checks the invariants after every call.
fn run(config: EngineConfig, calls: &[Call]) -> (Vec<Step>, Requests) {
    let mut rank = Rank::new(config).expect("valid configuration");
    let (mut mirror, mut steps) = (Mirror::default(), Vec::new());
    let (mut open, mut ended) = (Requests::new(), Requests::new());
    let mut pending: VecDeque<Call> = calls.iter().cloned().collect();
    let mut next_id = 0;
    for round in 0.. {
        assert!(round < 20_000, "the rank makes no progress");
        let call = pending.pop_front();
        if call.is_none() && rank.is_idle() {
            break;
        }
        match call.unwrap_or(Call::Step) {
            Call::Submit(spec) => {
                let spec = RequestSpec { id: next_id, ..spec };
                next_id += 1;
                let fits = spec.tokens.len() < config.max_model_len as usize;
                assert_eq!(rank.submit(spec.clone()).is_ok(), fits);
                if fits {
                    open.insert(spec.id, (spec, Vec::new()));
                }
            }
            Call::Step => {
                let Some(step) = rank.step() else { continue };
                check_step(&config, &step, &mut open, &mut ended);
                mirror.apply(&step.events);
                steps.push(step);
            }
            Call::Cancel(id) => assert_eq!(rank.cancel(id), open.remove(&id).is_some()),
            Call::Reset => {
                let is_used = rank.load().used_blocks > 0;
                let event = rank.reset_cache(false);
                assert_eq!(event.is_none(), is_used);
                mirror.apply(event.as_slice());
            }
        }
        rank.check_invariants();
        mirror.check(&rank);
        let load = rank.load();
        assert_eq!((load.running + load.waiting) as usize, open.len());
        assert!(load.used_blocks < config.kv_blocks && (0.0..=1.0).contains(&load.kv_usage));
    }
    assert_eq!((rank.load().used_blocks, open.len()), (0, 0));
    let distinct: BTreeSet<&Chain> = mirror.chains.values().collect();
    assert_eq!(distinct.len(), mirror.chains.len(), "a chain has one name");
    (steps, ended)
}

fn check_step(config: &EngineConfig, step: &Step, open: &mut Requests, ended: &mut Requests) {
    let tokens = step.prefill_tokens + step.decode_sequences + step.draft_tokens;
    assert!((1..=config.step_tokens_max).contains(&tokens), "{tokens} tokens in a step");
    assert_eq!(step.duration_us, config.cost.duration_us(&step.work));
    for output in &step.outputs {
        let (spec, outputs) = open.get_mut(&output.id).expect("only open requests get tokens");
        assert_eq!((output.first, output.position as usize), (outputs.is_empty(), outputs.len() + 1));
        assert!((output.cached_tokens as usize) < spec.tokens.len() && output.token < config.vocab_size);
        outputs.push(output.token);
        let is_complete = outputs.len() == spec.output_tokens_max as usize;
        let is_full = spec.tokens.len() + outputs.len() == config.max_model_len as usize;
        let finish = is_complete.then_some(Finish::Complete).or(is_full.then_some(Finish::ModelLength));
        assert_eq!(output.finished, finish);
        if finish.is_some() {
            ended.extend(open.remove_entry(&output.id));
        }
    }
}

/// Reference model of a rank with a single request and without draft tokens: lists of chains with linear search.
struct Slow {
    config: EngineConfig,
    /// In allocation order, each with its store order.
    free: Vec<Option<Stored>>,
    host: Vec<Chain>,
    /// Number of blocks stored so far.
    stored: u64,
}

type Stored = (u64, Chain);

#[derive(Clone, Debug, PartialEq)]
enum EngineEvent {
    Stored(Tier, Vec<Chain>),
    Removed(Tier, Chain),
}

impl Slow {
    fn new(config: EngineConfig) -> Self {
        Self { config, free: vec![None; config.kv_blocks as usize - 1], host: Vec::new(), stored: 0 }
    }

    /// Removes the copy of a block that was stored first from the free list.
    fn find(&mut self, chain: &Chain) -> Option<Stored> {
        let copies = self.free.iter().enumerate().filter_map(|(at, held)| Some((at, held.as_ref()?)));
        let (at, _) = copies.filter(|(_, held)| held.1 == *chain).min_by_key(|(_, held)| held.0)?;
        self.free.remove(at)
    }

    fn store(&mut self, chain: Chain) -> Stored {
        self.stored += 1;
        (self.stored, chain)
    }

    /// Runs one request that generates `outputs`. Returns the events of each step and the number of cached tokens.
    fn run(&mut self, spec: &RequestSpec, outputs: &[u32]) -> (Vec<Vec<EngineEvent>>, usize) {
        let block_size = self.config.block_size as usize;
        let mut tokens = spec.tokens.to_vec();
        let chain = |tokens: &[u32]| (spec.lora_name.clone(), spec.cache_salt.clone(), tokens.to_vec());
        let (mut steps, mut events, mut mine) = (Vec::new(), Vec::new(), Vec::new());
        let reusable: Vec<Chain> =
            (1..=(tokens.len() - 1) / block_size).map(|blocks| chain(&tokens[..blocks * block_size])).collect();
        for found in &reusable {
            let Some(held) = self.find(found) else { break };
            mine.push(Some(held));
        }
        let missing = &reusable[mine.len()..];
        let loaded: Vec<Chain> = missing.iter().take_while(|chain| self.host.contains(chain)).cloned().collect();
        for found in reusable[..mine.len() + loaded.len()].iter().rev() {
            self.touch_host(found);
        }
        for _ in &loaded {
            self.take_one(&mut events);
        }
        if !loaded.is_empty() {
            events.push(EngineEvent::Stored(Tier::Device, loaded.clone()));
        }
        mine.extend(loaded.into_iter().map(|chain| Some(self.store(chain))));
        let cached = mine.len() * block_size;
        let mut computed = cached;
        for output in outputs {
            let chunk = match self.config.prefill_chunk_max {
                0 => self.config.step_tokens_max,
                limit => limit.min(self.config.step_tokens_max),
            };
            while computed < tokens.len() {
                let to = tokens.len().min(computed + chunk as usize);
                while mine.len() * block_size < to {
                    self.take_one(&mut events);
                    mine.push(None);
                }
                let mut run = Vec::new();
                for block in computed / block_size..to / block_size {
                    let filled = chain(&tokens[..(block + 1) * block_size]);
                    let cached = if self.config.deduplicates { self.find(&filled) } else { None };
                    mine[block] = Some(match cached {
                        Some(held) => {
                            self.free.insert(0, None);
                            held
                        }
                        None => {
                            run.push(filled.clone());
                            self.store(filled)
                        }
                    });
                }
                events.extend((!run.is_empty()).then_some(EngineEvent::Stored(Tier::Device, run)));
                steps.push(std::mem::take(&mut events));
                computed = to;
            }
            tokens.push(*output);
        }
        for held in mine.into_iter().rev() {
            let at = if held.is_some() { self.free.len() } else { 0 };
            self.free.insert(at, held);
        }
        (steps, cached)
    }

    /// Takes the first free block and moves its previous content to the host.
    fn take_one(&mut self, events: &mut Vec<EngineEvent>) {
        let Some((_, evicted)) = self.free.remove(0) else { return };
        if self.config.host_kv_blocks > 0 && !self.touch_host(&evicted) {
            if self.host.len() == self.config.host_kv_blocks as usize {
                events.push(EngineEvent::Removed(Tier::Host, self.host.remove(0)));
            }
            self.host.push(evicted.clone());
            events.push(EngineEvent::Stored(Tier::Host, vec![evicted.clone()]));
        }
        events.push(EngineEvent::Removed(Tier::Device, evicted));
    }

    fn touch_host(&mut self, chain: &Chain) -> bool {
        let Some(at) = self.host.iter().position(|held| held == chain) else { return false };
        let chain = self.host.remove(at);
        self.host.push(chain);
        true
    }
}

/// Events of the model with chains in place of hashes.
fn literal(events: &[CacheEvent], chains: &BTreeMap<EngineHash, Chain>) -> Vec<EngineEvent> {
    let chain = |hash: &EngineHash| chains[hash].clone();
    let events_of_steps = |event: &CacheEvent| match event {
        CacheEvent::Stored { tier, blocks } => {
            EngineEvent::Stored(*tier, blocks.iter().map(|block| chain(&block.hash)).collect())
        }
        CacheEvent::Removed { tier, hash } => EngineEvent::Removed(*tier, chain(hash)),
        CacheEvent::Cleared => unreachable!("the rank is never cleared"),
    };
    events.iter().map(events_of_steps).collect()
}

proptest! {
    #[test]
    fn events_rebuild_held_blocks_and_every_request_ends_once(config in configs(), calls in calls()) {
        let (steps, ended) = run(config, &calls);
        let finished = steps.iter().flat_map(|step| &step.outputs).filter(|output| output.finished.is_some()).count();
        prop_assert_eq!(finished, ended.len());
    }

    #[test]
    fn the_same_calls_give_the_same_steps(config in configs(), calls in calls()) {
        prop_assert_eq!(run(config, &calls), run(config, &calls));
    }

    #[test]
    fn outputs_do_not_depend_on_other_requests_or_the_cache(config in configs(), calls in calls()) {
        let (_, ended) = run(EngineConfig { vocab_size: 1000, ..config }, &calls);
        let roomy = EngineConfig { block_size: 4, kv_blocks: 16, step_tokens_max: 256, ..config };
        let roomy = EngineConfig { vocab_size: 1000, ..roomy };
        for (spec, outputs) in ended.into_values() {
            let (_, alone) = run(roomy, &[Call::Submit(RequestSpec { cache_salt: None, ..spec })]);
            prop_assert_eq!(&alone[&0].1, &outputs);
        }
    }

    // A preempted prompt computes tokens again, or finds more of them than at its first admission, which alone is
    // reported: another request may have computed them in between.
    #[test]
    fn every_prompt_token_is_found_or_computed_once_without_preemptions(config in configs(), specs in prop::collection::vec(specs(), 0..20)) {
        let calls: Vec<Call> = specs.into_iter().map(Call::Submit).collect();
        let (steps, ended) = run(config, &calls);
        let firsts = steps.iter().flat_map(|step| &step.outputs).filter(|output| output.first);
        let cached: u32 = firsts.map(|output| output.cached_tokens).sum();
        let prompts: u32 = ended.values().map(|(spec, _)| spec.tokens.len() as u32).sum();
        let computed: u32 = steps.iter().map(|step| step.prefill_tokens).sum();
        let preempted: u32 = steps.iter().map(|step| step.preempted).sum();
        prop_assert!(preempted > 0 || computed + cached == prompts, "{computed} + {cached} of {prompts} tokens");
    }

    #[test]
    fn a_single_request_matches_the_reference_model(
        config in configs(),
        specs in prop::collection::vec(specs(), 0..40),
    ) {
        let config = EngineConfig { speculation: Speculation::default(), writes_through: false, ..config };
        let mut rank = Rank::new(config).expect("valid configuration");
        let (mut slow, mut mirror) = (Slow::new(config), Mirror::default());
        for spec in specs {
            if rank.submit(spec.clone()).is_err() {
                continue;
            }
            let (mut events_of_steps, mut outputs, mut cached_tokens) = (Vec::new(), Vec::new(), 0);
            while let Some(step) = rank.step() {
                prop_assert!(events_of_steps.len() < 1000, "the rank makes no progress");
                mirror.apply(&step.events);
                events_of_steps.push(literal(&step.events, &mirror.chains));
                outputs.extend(step.outputs.iter().map(|output| output.token));
                cached_tokens = step.outputs.last().map_or(0, |output| output.cached_tokens as usize);
            }
            prop_assert_eq!((events_of_steps, cached_tokens), slow.run(&spec, &outputs));
        }
    }
}
