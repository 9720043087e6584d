//! Property tests of the engine model for arbitrary orders of calls: the events rebuild the held blocks, every request
//! ends once, and its output depends on nothing else.

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
            refers_sessions: deduplicates,
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
            session_id: salt.map(Into::into),
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
    CloseSession,
    Reset,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        6 => specs().prop_map(Call::Submit),
        12 => Just(Call::Step),
        1 => (0..40_u64).prop_map(Call::Cancel),
        1 => Just(Call::CloseSession),
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
            Call::CloseSession => rank.close_session("a"),
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
}
