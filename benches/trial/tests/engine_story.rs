//! Events of one small rank, step by step. The first scenario was recorded from a real engine: 9 blocks of 4 tokens,
//! prompts with shared prefixes, a salt, an eviction, a reset. Its events use the recorded hashes.

use std::collections::BTreeMap;

use pointsman_trial::engine::{CacheEvent, EngineConfig, EngineHash, Finish, Rank, Refused, RequestSpec, Step, Tier};

fn rank(config: EngineConfig) -> Rank {
    let cost = config.cost;
    let small = EngineConfig { block_size: 4, kv_blocks: 9, max_model_len: 32, cost, ..config };
    Rank::new(small).expect("valid configuration")
}

/// Text form of events, with each block named by its first token.
fn describe(events: &[CacheEvent], names: &mut BTreeMap<EngineHash, String>) -> Vec<String> {
    let mut describe = Vec::new();
    for event in events {
        describe.push(match event {
            CacheEvent::Stored { tier, blocks } => {
                for block in blocks {
                    names.entry(block.hash).or_insert_with(|| format!("{}", block.tokens[0]));
                }
                let stored: Vec<&str> = blocks.iter().map(|block| names[&block.hash].as_str()).collect();
                let parent = blocks[0].parent.map_or("-", |parent| names[&parent].as_str());
                format!("{tier:?} + {} under {parent}", stored.join(" "))
            }
            CacheEvent::Removed { tier, hash } => format!("{tier:?} - {}", names[hash]),
            CacheEvent::Cleared => "cleared".to_owned(),
        });
    }
    describe
}

fn run_one(rank: &mut Rank, spec: RequestSpec) -> Vec<Step> {
    rank.submit(spec).expect("valid request");
    let steps: Vec<Step> = std::iter::from_fn(|| rank.step()).collect();
    rank.check_invariants();
    steps
}

#[test]
fn events_match_a_recording_of_a_real_engine() {
    // Hashes from the real engine, in the order of its stores.
    let recorded = [
        &["1cccfba573d0cf8a", "f20358aa4fbb8879", "e842ef1712133bd6", "4cb3b9d034695fdd"][..],
        &["c6882bb15d6bfcb9"],
        &["ee50e0714c8a83d5", "d7de0ebd5f006695"],
        &[
            "54471bd62b12bd78",
            "b0f667cf73bae453",
            "ce0c2c7187bdeeff",
            "386236f00b7acb73",
            "6ea2154f9b56418b",
            "95a4d9ce607f2aed",
        ],
    ];
    let mut rank = rank(EngineConfig::default());
    let mut names = BTreeMap::new();
    let mut describe = |rank: &mut Rank, spec: RequestSpec, recorded: &[&str]| {
        rank.submit(spec).expect("valid request");
        let events = rank.step().expect("a request waits").events;
        if let Some(CacheEvent::Stored { blocks, .. }) = events.last() {
            for (block, name) in blocks.iter().zip(recorded) {
                names.insert(block.hash, (*name).to_owned());
            }
        }
        rank.check_invariants();
        describe(&events, &mut names)
    };
    let prompt = |tokens: std::ops::Range<u32>| tokens.collect::<Vec<u32>>();

    let stored = "Device + 1cccfba573d0cf8a f20358aa4fbb8879 e842ef1712133bd6 4cb3b9d034695fdd under -";
    assert_eq!(describe(&mut rank, RequestSpec::new(1, prompt(100..116), 1), recorded[0]), [stored]);

    let shares_two: Vec<u32> = (100..108).chain([7; 4]).collect();
    let stored = "Device + c6882bb15d6bfcb9 under f20358aa4fbb8879";
    assert_eq!(describe(&mut rank, RequestSpec::new(2, shares_two, 1), recorded[1]), [stored]);

    let salted = RequestSpec { cache_salt: Some("tenantB".into()), ..RequestSpec::new(3, prompt(100..108), 1) };
    let stored = "Device + ee50e0714c8a83d5 d7de0ebd5f006695 under -";
    assert_eq!(describe(&mut rank, salted, recorded[2]), [stored]);

    let events = describe(&mut rank, RequestSpec::new(4, prompt(500..524), 1), recorded[3]);
    let expected = [
        "Device - 4cb3b9d034695fdd",
        "Device - e842ef1712133bd6",
        "Device - c6882bb15d6bfcb9",
        "Device - f20358aa4fbb8879",
        "Device - 1cccfba573d0cf8a",
        "Device + 54471bd62b12bd78 b0f667cf73bae453 ce0c2c7187bdeeff 386236f00b7acb73 6ea2154f9b56418b \
         95a4d9ce607f2aed under -",
    ];
    assert_eq!(events, expected);
    assert_eq!(rank.reset_cache(false), Some(CacheEvent::Cleared));
    assert!(rank.held(Tier::Device).is_empty());
}

#[test]
fn blocks_of_open_sessions_are_evicted_last() {
    let mut rank = rank(EngineConfig { refers_sessions: true, deduplicates: true, ..EngineConfig::default() });
    // Each request uses four of the eight blocks, and three of them stay cached.
    let cached = |rank: &mut Rank, first: u32, session: Option<&str>| {
        let prompt: Vec<u32> = (first..first + 13).collect();
        let spec = RequestSpec { session_id: session.map(Into::into), ..RequestSpec::new(1, prompt, 1) };
        run_one(rank, spec)[0].outputs[0].cached_tokens
    };
    let found = [(100, Some("s")), (200, None), (300, None), (400, None), (100, Some("s"))];
    assert_eq!(found.map(|(first, session)| cached(&mut rank, first, session)), [0, 0, 0, 0, 12]);
    rank.close_session("s");
    let found = [500, 600, 700, 100].map(|first| cached(&mut rank, first, None));
    assert_eq!(found, [0; 4]);
}

#[test]
fn blocks_of_generated_tokens_are_published_and_reused() {
    let mut rank = rank(EngineConfig::default());
    let mut names = BTreeMap::new();
    let steps = run_one(&mut rank, RequestSpec::new(1, [1, 2, 3, 4, 5, 6], 4));
    let events: Vec<Vec<String>> = steps.iter().map(|step| describe(&step.events, &mut names)).collect();
    // The third step computes the second generated token; the fourth token is never computed.
    assert_eq!(events, [vec!["Device + 1 under -"], vec![], vec!["Device + 5 under 1"], vec![]]);
    // 4000 + 6 * 40 + 21 * 0.0012; then 4000 + 20 and 0.065 for each of 7, 8 and 9 tokens read.
    let durations: Vec<u64> = steps.iter().map(|step| step.duration_us).collect();
    let read: Vec<u64> = steps.iter().map(|step| step.work.kv_tokens).collect();
    assert_eq!((durations, read), (vec![4241, 4021, 4021, 4021], vec![0, 7, 8, 9]));
    let outputs: Vec<u32> = steps.iter().map(|step| step.outputs[0].token).collect();
    let firsts: Vec<bool> = steps.iter().map(|step| step.outputs[0].first).collect();
    let finished: Vec<Option<Finish>> = steps.iter().map(|step| step.outputs[0].finished).collect();
    assert_eq!(firsts, [true, false, false, false]);
    assert_eq!(finished, [None, None, None, Some(Finish::Complete)]);

    let next_turn: Vec<u32> = [1, 2, 3, 4, 5, 6].into_iter().chain(outputs).chain([9]).collect();
    let steps = run_one(&mut rank, RequestSpec::new(1, next_turn, 1));
    assert_eq!(steps[0].outputs[0].cached_tokens, 8);
}

#[test]
fn running_requests_with_equal_output_keep_separate_copies() {
    let mut rank = rank(EngineConfig::default());
    let prompt = |id| RequestSpec::new(id, [1, 2, 3, 4, 5], 5);
    rank.submit(prompt(1)).expect("sound");
    rank.submit(prompt(2)).expect("sound");
    let steps: Vec<Step> = std::iter::from_fn(|| rank.step()).collect();
    let stored = steps.iter().flat_map(|step| &step.events).filter(|event| matches!(event, CacheEvent::Stored { .. }));
    assert_eq!(
        (stored.count(), rank.held(Tier::Device).len()),
        (3, 2),
        "one event for the prompt, two for one block of output"
    );
    rank.check_invariants();
}

#[test]
fn running_requests_share_blocks_from_the_step_that_computes_them() {
    let mut rank = rank(EngineConfig::default());
    let prompt = |last| [1, 2, 3, 4, 5, 6, 7, 8, last];
    rank.submit(RequestSpec::new(1, prompt(9), 3)).expect("sound");
    rank.submit(RequestSpec::new(2, prompt(10), 3)).expect("sound");
    let step = rank.step().expect("requests wait");
    assert_eq!(step.outputs.iter().map(|output| output.cached_tokens).collect::<Vec<_>>(), [0, 8]);
    assert_eq!(rank.load().used_blocks, 4);
    assert!(rank.reset_cache(false).is_none(), "blocks are in use");
    assert!(rank.cancel(1) && !rank.cancel(1));
    assert_eq!(rank.load().used_blocks, 3);
    rank.check_invariants();
}

#[test]
fn requests_that_can_never_run_are_rejected() {
    let mut rank = rank(EngineConfig::default());
    let long = Refused::PromptTooLong { id: 1, prompt_tokens: 32, max_model_len: 32 };
    assert_eq!(rank.submit(RequestSpec::new(1, [], 1)), Err(Refused::EmptyPrompt(1)));
    assert_eq!(rank.submit(RequestSpec::new(1, [1], 0)), Err(Refused::NoOutput(1)));
    assert_eq!(rank.submit(RequestSpec::new(1, [1; 32], 1)), Err(long));
    assert_eq!(rank.submit(RequestSpec::new(1, [1; 31], u32::MAX)), Ok(()));
    assert_eq!(rank.submit(RequestSpec::new(1, [1; 31], 1)), Err(Refused::DuplicateId(1)));
    let step = rank.step().expect("a request waits");
    assert_eq!(step.outputs[0].finished, Some(Finish::ModelLength));
    assert!(rank.is_idle() && rank.step().is_none());
}
