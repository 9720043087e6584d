//! Worked examples of a rank's scheduling, computed by hand: blocks of 4 tokens, 8 usable blocks, 32 tokens at most.

use std::collections::BTreeMap;

use pointsman_trial::engine::{
    BlockShortage, CacheEvent, EngineConfig, Finish, Partial, Rank, RequestSpec, Speculation, Stage, Step,
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
fn a_partial_prompt_without_free_blocks_waits_or_is_preempted() {
    // Computed tokens after each step. The first request takes its third block in step 3 (token 9), its fourth in step 7
    // (token 13). The second takes what is left of 4 tokens: 3, 6, 9, 12, 15 in steps 3 to 7. Then all 8 blocks are
    // used, and the next chunk, up to 18 tokens, needs a fifth block.
    let limited = |block_shortage| EngineConfig { step_tokens_max: 4, sequences_max: 2, block_shortage, ..config() };
    let requests = [(8, 12), (20, 1)];

    let mut waiting = rank(limited(BlockShortage::PromptsWait), &requests);
    let steps: Vec<Step> = (0..8).map(|_| step(&mut waiting)).collect();
    assert_eq!((steps[7].prefill_tokens, steps[7].decode_sequences, steps[7].preempted), (0, 1, 0));
    let load = waiting.load();
    assert_eq!((load.running, load.waiting, load.used_blocks), (2, 0, 8));

    let mut preempting = rank(limited(BlockShortage::PromptsPreempt), &requests);
    let mut steps: Vec<Step> = (0..8).map(|_| step(&mut preempting)).collect();
    let prefills: Vec<u32> = steps.iter().map(|step| step.prefill_tokens).collect();
    assert_eq!(prefills, [4, 4, 3, 3, 3, 3, 3, 0]);
    assert_eq!((steps[7].decode_sequences, steps[7].preempted), (1, 1));
    let load = preempting.load();
    assert_eq!((load.running, load.waiting, load.used_blocks), (1, 1, 4));

    // It needs 5 blocks, 3 of which are cached and free. 4 are free, then 3, until the first request ends in step 13.
    while !preempting.is_idle() {
        steps.push(step(&mut preempting));
    }
    let prefills: Vec<u32> = steps[8..].iter().map(|step| step.prefill_tokens).collect();
    assert_eq!(prefills, [0, 0, 0, 0, 0, 4, 4], "12 of 20 tokens are found in the cache");
    assert_eq!(ids(&steps[14]), [2]);
    assert_eq!(steps[14].outputs[0].cached_tokens, 0, "as found at the first admission");
    let computed: u32 = steps.iter().map(|step| step.prefill_tokens).sum();
    assert_eq!(computed, 8 + 20 + 3, "3 tokens of an incomplete block are computed twice");
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

#[test]
fn slots_limit_the_running_requests() {
    let limited = EngineConfig { step_tokens_max: 8, sequences_max: 2, prefill_chunk_max: 3, ..config() };
    let steps = run(limited, &[(7, 2), (2, 2), (6, 2)]);
    let seen: Vec<_> = steps.iter().map(|step| (step.prefill_tokens, ids(step))).collect();
    // The third request is admitted in step 3, after the end of the second.
    assert_eq!(seen, [(5, vec![2]), (3, vec![2]), (4, vec![1]), (3, vec![1, 3]), (0, vec![3])]);
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

#[test]
fn rejected_draft_tokens_cost_work_and_blocks_only() {
    let steps = run(speculating(3, 0), &[(5, 4)]);
    let seen: Vec<_> = steps.iter().map(|step| (step.draft_tokens, step.outputs.len())).collect();
    assert_eq!(seen, [(0, 1), (3, 1), (3, 1), (3, 1)]);
    assert_eq!(outputs(&steps), outputs(&run(config(), &[(5, 4)])));
    for (config, used_blocks) in [(speculating(3, 0), 3), (config(), 2)] {
        let mut rank = rank(config, &[(5, 4)]);
        step(&mut rank);
        step(&mut rank);
        assert_eq!(rank.load().used_blocks, used_blocks, "6 tokens, and 3 rejected ones");
    }
}

#[test]
fn the_step_and_the_model_length_limit_draft_tokens() {
    let mut two = rank(EngineConfig { step_tokens_max: 6, sequences_max: 2, ..speculating(3, 100) }, &[(2, 9), (2, 9)]);
    step(&mut two);
    let second = step(&mut two);
    assert_eq!((second.decode_sequences, second.draft_tokens), (2, 3 + 1));
    assert_eq!(ids(&second), [1, 1, 1, 1, 2, 2]);

    let steps = run(EngineConfig { max_model_len: 8, ..speculating(3, 100) }, &[(5, 9)]);
    assert_eq!(steps.iter().map(|step| step.draft_tokens).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(
        steps[1].outputs.iter().map(|output| output.finished).collect::<Vec<_>>(),
        [None, Some(Finish::ModelLength)]
    );
}

#[test]
fn bursts_follow_the_acceptance() {
    // 1 + 0.6 + 0.36 + 0.216 tokens a step.
    let long = EngineConfig { kv_blocks: 2_001, max_model_len: 8_000, ..speculating(3, 60) };
    let steps = run(long, &[(4, 7_000)]);
    let mean = 7_000.0 / steps.len() as f64;
    assert!((2.11..2.24).contains(&mean), "{mean} tokens a step");
}

#[test]
fn preempted_requests_have_the_same_output_under_all_limits() {
    let requests = [(12, 9), (12, 9), (12, 9)];
    let alone = EngineConfig { kv_blocks: 101, ..config() };
    let hard = EngineConfig {
        step_tokens_max: 10,
        sequences_max: 3,
        prefill_chunk_max: 4,
        block_shortage: BlockShortage::PromptsPreempt,
        ..speculating(2, 60)
    };
    let steps = run(hard, &requests);
    assert!(steps.iter().any(|step| step.preempted > 0));
    assert_eq!(outputs(&steps), outputs(&run(alone, &requests)));
}

#[test]
fn a_request_as_large_as_the_memory_runs_alone() {
    // 31 tokens and one of output fill 8 blocks. Three such requests run one after another.
    for block_shortage in [BlockShortage::PromptsWait, BlockShortage::PromptsPreempt] {
        let hard = EngineConfig {
            step_tokens_max: 4,
            sequences_max: 3,
            prefill_chunk_max: 2,
            block_shortage,
            ..speculating(3, 50)
        };
        let steps = run(hard, &[(31, 1), (31, 1), (31, 1)]);
        assert_eq!(outputs(&steps).len(), 3);
    }
}

#[test]
fn held_blocks_of_a_prefill_delay_other_requests_until_their_release() {
    let mut rank = Rank::new(config()).expect("valid configuration");
    let tokens = |seed: u32, count: u32| (0..count).map(|n| seed * 100 + n).collect::<Vec<u32>>();
    rank.submit_stage(RequestSpec::new(1, tokens(1, 26), 1), Stage::Prefill).expect("accepted");
    rank.step().expect("a request waits");
    rank.check_invariants();
    assert_eq!((rank.is_idle(), rank.load().used_blocks), (true, 6), "the incomplete block is free");
    rank.submit(RequestSpec::new(2, tokens(2, 12), 1)).expect("accepted");
    assert!(rank.step().is_none() && !rank.is_idle(), "no memory is left");
    assert!(rank.reset_cache(false).is_none());
    assert!(!rank.cancel(1), "the request has ended");
    assert_eq!((rank.release(1), rank.release(1)), (6, 0));
    assert_eq!(rank.step().expect("memory is free").prefill_tokens, 12);
    rank.check_invariants();

    // A transferred prompt uses the local prefix, computes one token, and stores all complete blocks.
    rank.submit_stage(RequestSpec::new(3, tokens(2, 17), 2), Stage::Decode).expect("accepted");
    let step = rank.step().expect("a request waits");
    assert_eq!((step.prefill_tokens, step.outputs[0].cached_tokens, step.outputs[0].transferred_tokens), (1, 16, 4));
    rank.check_invariants();
    assert_eq!(rank.step().expect("a token is left").outputs[0].position, 2);
    assert!(rank.is_idle());
    rank.check_invariants();
}
