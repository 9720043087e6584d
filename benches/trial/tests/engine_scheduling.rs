//! Worked examples of a rank's scheduling, computed by hand: blocks of 4 tokens, 8 usable blocks, 32 tokens at most.

use std::collections::BTreeMap;

use pointsman_trial::engine::{
    BlockShortage, CacheEvent, EngineConfig, Finish, Partial, Rank, RequestSpec, Speculation, Step,
};

fn config() -> EngineConfig {
    EngineConfig { block_size: 4, kv_blocks: 9, max_model_len: 32, ..EngineConfig::default() }
}

/// A rank with requests of (prompt tokens, output tokens), with ids from 1 on.
fn rank(config: EngineConfig, requests: &[(u32, u32)]) -> Rank {
    let mut rank = Rank::new(config).expect("valid configuration");
    for (id, (prompt, outputs)) in (1..).zip(requests) {
        let tokens: Vec<u32> = (0..*prompt).map(|token| 100 * id as u32 + token).collect();
        rank.submit(RequestSpec::new(id, tokens, *outputs)).expect("accepted");
    }
    rank
}

fn step(rank: &mut Rank) -> Step {
    let step = rank.step().expect("work is left");
    rank.check_invariants();
    step
}

/// Runs all requests and returns the steps.
fn run(config: EngineConfig, requests: &[(u32, u32)]) -> Vec<Step> {
    let mut rank = rank(config, requests);
    let mut steps = Vec::new();
    while !rank.is_idle() {
        steps.push(step(&mut rank));
    }
    assert_eq!(rank.load().used_blocks, 0);
    steps
}

/// Output tokens by request.
fn outputs(steps: &[Step]) -> BTreeMap<u64, Vec<u32>> {
    let mut outputs = BTreeMap::<u64, Vec<u32>>::new();
    for output in steps.iter().flat_map(|step| &step.outputs) {
        outputs.entry(output.id).or_default().push(output.token);
    }
    outputs
}

/// Ids of the outputs of a step.
fn ids(step: &Step) -> Vec<u64> {
    step.outputs.iter().map(|output| output.id).collect()
}

fn stored_blocks(step: &Step) -> usize {
    let stored = |event: &CacheEvent| match event {
        CacheEvent::Stored { blocks, .. } => blocks.len(),
        CacheEvent::Removed { .. } | CacheEvent::Cleared => 0,
    };
    step.events.iter().map(stored).sum()
}

#[test]
fn admission_needs_the_blocks_of_the_first_chunk_or_of_the_whole_prompt() {
    for (block_shortage, running) in [(BlockShortage::PromptsWait, 2), (BlockShortage::PromptsPreempt, 1)] {
        // 20 tokens take 5 of 8 blocks. 4 tokens of the step are left: one block, while the prompt of 16 needs four.
        let mut rank = rank(
            EngineConfig { step_tokens_max: 24, sequences_max: 2, block_shortage, ..config() },
            &[(20, 2), (16, 2)],
        );
        step(&mut rank);
        assert_eq!(rank.load().running, running);
    }
}

#[test]
fn a_long_prompt_leaves_the_rest_of_the_step_to_others() {
    let limited = EngineConfig { step_tokens_max: 8, sequences_max: 3, prefill_chunk_max: 3, ..config() };
    let requests = [(7, 2), (2, 2), (6, 2)];
    let mut rank = rank(limited, &requests);
    let first = step(&mut rank);
    assert_eq!((first.prefill_tokens, ids(&first)), (3 + 2 + 3, vec![2]));
    let partials = [Partial { id: 1, computed: 3, left: 4 }, Partial { id: 3, computed: 3, left: 3 }];
    assert_eq!(rank.outlook().partials, partials);
    let seen: Vec<_> = (0..3).map(|_| step(&mut rank)).map(|step| (step.prefill_tokens, ids(&step))).collect();
    assert_eq!(seen, [(3 + 3, vec![2, 3]), (1, vec![1, 3]), (0, vec![1])]);
    assert!(rank.is_idle());

    // Without the limit prompts are computed in order: 7 and 1 of 2, then 1 and 6.
    let steps = run(EngineConfig { prefill_chunk_max: 0, ..limited }, &requests);
    let seen: Vec<_> = steps.iter().map(|step| (step.prefill_tokens, ids(step))).collect();
    assert_eq!(seen, [(8, vec![1]), (7, vec![1, 2, 3]), (0, vec![2, 3])]);
}

fn speculating(draft_tokens: u32, acceptance_percent: u32) -> EngineConfig {
    EngineConfig { speculation: Speculation { draft_tokens, acceptance_percent }, ..config() }
}

#[test]
fn accepted_draft_tokens_are_output_in_the_same_step() {
    let steps = run(speculating(3, 100), &[(4, 9)]);
    let seen: Vec<_> = steps.iter().map(|step| (step.prefill_tokens, step.draft_tokens, step.outputs.len())).collect();
    assert_eq!(seen, [(4, 0, 1), (0, 3, 4), (0, 3, 4)]);
    // Tokens 5 to 8 are computed in the second step, and 6 to 8 are verified at its end: the third step publishes them.
    assert_eq!(steps.iter().map(stored_blocks).collect::<Vec<_>>(), [1, 0, 1]);
    let last = steps[2].outputs.last().expect("an output");
    assert_eq!((last.position, last.finished), (9, Some(Finish::Complete)));
    assert_eq!(outputs(&steps), outputs(&run(config(), &[(4, 9)])));
    // Context of 5 and 9 tokens; 3 drafts attend to 6 + 7 + 8 and 10 + 11 + 12 tokens.
    let work: Vec<_> = steps[1..].iter().map(|step| (step.work.kv_tokens, step.work.attention_pairs)).collect();
    assert_eq!(work, [(5, 21), (9, 33)]);
}
