//! Properties of all generators, over settings and seeds.

use std::collections::{BTreeMap, BTreeSet};

use pointsman_trial::workload::generate::{Burst, Generator};
use pointsman_trial::workload::{Arrivals, LENGTH_MAX, Link, Request, Segment, Workload};
use proptest::prelude::*;

/// Small workloads of every kind, by their settings.
fn generators() -> impl Strategy<Value = Generator> {
    let span = |max: u32| (1..=max, 0..=max).prop_map(|(min, more)| format!("{min}-{}", min + more));
    let numbers = (0.1..100.0, 1_u32..20, 1_u32..9, 1_u32..200, 0_u32..=2, 0.0..0.5);
    let spans = (span(4), span(50), span(300), 5_000_u32..20_000);
    (0..12_usize, numbers, spans).prop_map(
        |(kind, (rate, few, prefixes, requests, skew, vary), (turns, own, shared, long))| {
            let conversations = format!("rate={rate},sessions={few},turns={turns},own_tokens={own},skew={skew}");
            let text = match kind {
                0 => format!("chat:{conversations}"),
                1 => format!("low:{conversations}"),
                2 => {
                    format!("shared-prefix:rate={rate},requests={requests},prefixes={prefixes},prefix_tokens={shared}")
                }
                3 => format!("agents:agents={few},turns={turns},prefixes={prefixes},context_tokens_max={long}"),
                4 => format!("siblings:rate={rate},groups={few},siblings={prefixes}"),
                5 => format!("burst:requests={requests},prefixes={few}"),
                6 => format!("peer-first:requests={few},input_tokens={long},output_tokens={requests},vary={vary}"),
                7 => format!(
                    "documents:rate={rate},readings={few},questions={turns},document_tokens={shared},skew={skew}"
                ),
                8 => format!("unique:rate={rate},requests={requests},own_tokens={own}"),
                9 => format!("mix:rate={rate},requests={}", requests + 5),
                10 => format!(
                    "programs:programs={few},calls={prefixes},concurrency={skew},scale=0.02,subagents_percent=50"
                ),
                _ => format!("unique:rate={rate},requests={requests},peak={},period_s={few}", 1.01 + vary),
            };
            text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
        },
    )
}

/// Share of prompt tokens that an unbounded cache of whole segments contains.
fn reuse(workload: &Workload) -> f64 {
    let mut seen = BTreeSet::new();
    let (mut cached, mut all) = (0, 0);
    for request in &workload.requests {
        let mut prefix = Vec::new();
        for Segment { id, tokens } in &request.prompt {
            prefix.push((*id, *tokens));
            all += u64::from(*tokens);
            cached += if seen.insert(prefix.clone()) { 0 } else { u64::from(*tokens) };
        }
    }
    cached as f64 / all as f64
}

/// Length in tokens of the leading segments that two prompts share.
fn common_tokens(first: &Request, second: &Request) -> usize {
    let pairs = first.prompt.iter().zip(&second.prompt);
    pairs.take_while(|(first, second)| first == second).map(|(segment, _)| segment.tokens as usize).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_are_sorted_bounded_and_determined_by_the_seed(generator in generators(), seed in any::<u64>()) {
        let workload = generator.generate(seed);
        prop_assert!(!workload.requests.is_empty());
        prop_assert!(workload.requests.is_sorted_by_key(|request| request.arrival_us));
        for request in &workload.requests {
            prop_assert!(request.output_tokens >= 1);
            prop_assert!((1..=u64::from(LENGTH_MAX)).contains(&request.prompt_tokens()));
            prop_assert!(request.prompt.iter().all(|segment| segment.tokens > 0));
        }
        prop_assert_eq!(&workload, &generator.generate(seed));
        let other = generator.generate(seed ^ 1);
        prop_assert_ne!(&workload.requests[0].prompt, &other.requests[0].prompt);
    }

    #[test]
    fn only_equal_leading_segments_give_equal_prefixes(generator in generators(), seed in any::<u64>()) {
        let workload = generator.generate(seed);
        let some = &workload.requests[..workload.requests.len().min(6)];
        let tokens: Vec<Vec<u32>> = some.iter().map(Request::tokens).collect();
        for (first, first_tokens) in some.iter().zip(&tokens) {
            prop_assert_eq!(first_tokens.len() as u64, first.prompt_tokens());
            for (second, second_tokens) in some.iter().zip(&tokens) {
                let equal = first_tokens.iter().zip(second_tokens).take_while(|(a, b)| a == b).count();
                let common = common_tokens(first, second);
                // Different texts may have one or two equal first tokens by chance.
                prop_assert!((common..common + 4).contains(&equal), "{} equal, {} common", equal, common);
            }
        }
    }

    #[test]
    fn settings_round_trip(generator in generators()) {
        prop_assert_eq!(generator.to_string().parse(), Ok(generator));
    }

    #[test]
    fn a_turn_contains_the_whole_conversation(seed in any::<u64>()) {
        for generator in ["chat:sessions=8", "agents:agents=3"] {
            let workload = generator.parse::<Generator>().expect("settings").generate(seed);
            let mut last_turns: BTreeMap<u64, (Vec<Segment>, u32, u64)> = BTreeMap::new();
            for request in &workload.requests {
                let session = request.session.expect("a conversation");
                if let Some((before, output_tokens, arrival_us)) = last_turns.get(&session) {
                    let turn = before.len();
                    prop_assert_eq!(&request.prompt[..turn], &before[..]);
                    prop_assert_eq!(request.prompt[turn].tokens, *output_tokens);
                    prop_assert_eq!(request.prompt.len(), turn + 2);
                    prop_assert!(request.arrival_us >= *arrival_us);
                }
                last_turns.insert(session, (request.prompt.clone(), request.output_tokens, request.arrival_us));
            }
        }
    }
}

#[test]
fn lengths_counts_and_reuse_are_within_expected_ranges() {
    for (text, requests, prompt_tokens, reused) in [
        ("chat", 1_500..2_600, 32 + 512..=20_000, 0.5..0.95),
        ("shared-prefix", 4_000..4_001, 2_050..=8_800, 0.85..0.95),
        ("agents", 2_000..3_500, 3_100..=100_000, 0.9..0.99),
        ("programs", 3_000..9_000, 3_000..=260_000, 0.9..0.999),
        ("siblings", 3_200..3_201, 4_020..=12_400, 0.8..0.9),
        ("burst", 1_000..1_001, 4_608..=4_608, 0.8..0.89),
        ("peer-first", 1_000..1_001, 7_000..=7_000, 0.49..0.5),
        ("peer-first:vary=0.43", 1_000..1_001, 3_990..=10_010, 0.45..0.55),
        ("documents", 2_000..2_800, 5_020..=40_200, 0.85..0.97),
        ("documents:documents=100000,skew=0,questions=1-2", 500..700, 5_020..=40_200, 0.2..0.5),
        ("unique", 4_000..4_001, 200..=8_000, 0.0..1e-9),
        ("mix", 3_300..4_700, 200..=100_000, 0.5..0.97),
    ] {
        let workload = text.parse::<Generator>().expect("settings").generate(3);
        assert!(requests.contains(&workload.requests.len()), "{text}: {} requests", workload.requests.len());
        for request in &workload.requests {
            assert!(prompt_tokens.contains(&request.prompt_tokens()), "{text}: {} tokens", request.prompt_tokens());
        }
        let found = reuse(&workload);
        assert!(reused.contains(&found), "{text}: {found} reused");
    }
}

#[test]
fn calls_of_a_program_follow_each_other_and_extend_prompts() {
    let text = "programs:programs=60,subagents_percent=50,concurrency=5";
    let workload = text.parse::<Generator>().expect("settings").generate(2);
    let Arrivals::Causal { links, programs } = &workload.arrivals else { panic!("programs") };
    assert_eq!((links.len(), programs.map(|programs| programs.get())), (workload.requests.len(), Some(5)));
    let mut last = BTreeMap::<u64, &Request>::new();
    let (mut compacted, mut joined, mut gaps_us) = (0, 0, Vec::new());
    for (number, (request, Link { program, after, gap_us, is_stop })) in workload.requests.iter().zip(links).enumerate()
    {
        let is_earlier = |call: &u32| (*call as usize) < number && links[*call as usize].program == *program;
        assert!(after.iter().all(is_earlier) && program.abs_diff(links[number.saturating_sub(1)].program) <= 1);
        joined += usize::from(after.len() > 1);
        let stopped = after.iter().any(|call| links[*call as usize].is_stop);
        gaps_us.extend((after.len() == 1 && !stopped && !is_stop).then_some(*gap_us));
        if let Some(before) = last.insert(request.session.expect("a session"), request) {
            let extends = request.prompt.len() == before.prompt.len() + 1;
            assert!(extends && request.prompt.starts_with(&before.prompt) || request.prompt.len() <= 4);
            compacted += usize::from(!extends);
        }
    }
    gaps_us.sort_unstable();
    let median_us = gaps_us[gaps_us.len() / 2];
    assert!(compacted > 10 && joined > 5, "{compacted} {joined}");
    assert!((2_000_000..5_000_000).contains(&median_us), "{median_us}");
}

#[test]
fn invalid_settings_are_rejected_with_a_reason() {
    for (text, expected) in [
        ("chats", "unknown workload \"chats\"; known are chat, low, shared-prefix, agents"),
        ("chat:rate", "chat: \"rate\" is not of the form setting=value"),
        ("chat:speed=1", "chat has no setting \"speed\"; known are "),
        ("chat:rate=fast", "chat: rate is \"fast\": invalid type: string"),
        ("chat:rate=0", "chat: rate is 0, must be 0.000001 to 1000000 requests per second"),
        ("chat:rate=NaN", "chat: rate is \"NaN\""),
        ("chat:turns=5-2", "chat: turns is \"5-2\": the minimum exceeds the maximum"),
        ("chat:turns=0-3", "chat: turns is 0, must be 1 to 1000000"),
        ("chat:turns=few", "chat: turns is \"few\": must be a whole number or a range such as 32-768"),
        ("chat:turns=0", "chat: sessions and turns give 0 requests, must be 1 to 20000000"),
        ("chat:own_tokens=0-5", "chat: own_tokens is 0, must be at least 1"),
        ("chat:own_tokens=9000000", "give prompts of up to"),
        ("chat:sessions=9000000", "chat: sessions and turns give 81000000 requests, must be 1 to 20000000"),
        ("chat:skew=9", "chat: skew is 9, must be 0 to 2"),
        ("documents:skew=3", "documents: skew is 3, must be 0 to 2"),
        ("programs:stop_percent=101", "programs: stop_percent is 101, must be at most 100"),
        ("programs:scale=0", "programs: scale is 0, must be 0.01 to 10"),
        ("mix:requests=4", "mix: requests is 4, must be 5 to 5000000"),
        ("unique:peak=2", "unique: peak is 2, must be at least 1 and below 1 / peak_share"),
        ("unique:period_s=0", "unique: period_s is 0, must be 1 to 1000000"),
        ("burst:peak=1.5", "burst has no setting \"peak\""),
        ("shared-prefix:prefixes=0", "shared-prefix: prefixes is 0, must be 1 to 1000000"),
        ("shared-prefix:requests=-1", "shared-prefix: requests is \"-1\""),
        ("siblings:siblings=0", "siblings: groups and siblings give 0 requests"),
        ("peer-first:concurrency=0", "peer-first: concurrency is \"0\""),
        ("peer-first:vary=0.7", "peer-first: prefix_share 0.5 and vary 0.7 leave no prompt longer than its prefix"),
    ] {
        let error = text.parse::<Generator>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    assert_eq!("burst".parse(), Ok(Generator::Burst(Burst::default())));
    let chat: Generator = "chat:rate=2,turns=1-9".parse().expect("settings");
    assert_eq!((chat.to_string().as_str(), chat.generate(1).name.as_str()), ("chat:rate=2.0", "chat:rate=2.0"));
}
