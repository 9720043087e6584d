use std::num::NonZeroU32;

use clap::Parser;
use pointsman::policy::Policy;
use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec, StepCost};
use pointsman_trial::workload::generate::Generator;
use pointsman_trial::workload::{Arrivals, Request, Rng, Segment, Workload};
use serde_json::json;

use super::*;
use crate::fleet::{DisaggregationSetup, Fleet};
use crate::results::{RequestRecord, Summary, Warmup};
use crate::targets::Embedded;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    simulate: Simulate,
}

/// Multi-turn conversations over a few system prompts, with a mean gap of `gap_us` between arrivals.
fn chat(requests: usize, gap_us: u32) -> Workload {
    let mut rng = Rng::new(11);
    let mut conversations: Vec<Vec<Segment>> = Vec::new();
    let (mut at_us, mut next_id) = (0, 1_000);
    let requests = (0..requests).map(|_| {
        at_us += u64::from(rng.below(2 * gap_us));
        let number = rng.below(24) as usize;
        if number >= conversations.len() {
            conversations.push(vec![Segment { id: rng.below(3).into(), tokens: 200 }]);
        }
        let last = conversations.len() - 1;
        let conversation = &mut conversations[number.min(last)];
        next_id += 1;
        conversation.push(Segment { id: next_id, tokens: rng.within(20..=260) });
        Request { arrival_us: at_us, prompt: conversation.clone(), output_tokens: rng.within(1..=60), session: None }
    });
    Workload {
        name: "chat".to_owned(),
        requests: requests.collect(),
        arrivals: Arrivals::OpenLoop,
        trace_checksum: None,
    }
}

/// Slow engines with small blocks, so that short prompts create load.
fn setup(policy: Policy) -> Setup {
    let cost = StepCost { prefill_tokens_per_second: 8_000, ..StepCost::default() };
    let engine = EngineConfig { block_size: 16, max_model_len: 65_536, cost, ..EngineConfig::default() };
    let mut setup = Setup { engines: vec![engine; 3], ..Setup::new(3, 2) };
    setup.router.policy = policy;
    setup
}

fn serve(setup: &Setup, workload: &Workload) -> Run {
    run(setup, workload, Embedded::start).expect("runs")
}

fn summary(setup: &Setup, run: &Run) -> Summary {
    let reporting = Arguments::parse_from(["test"]).simulate.reporting;
    Summary::new(run, &setup.facts(&workload_of(Vec::new()), &reporting))
}

/// Time to the first token of a single request, from the engine itself.
fn lone_first_token_us(config: EngineConfig, request: &Request) -> u64 {
    let mut rank = Rank::new(config).expect("valid engine settings");
    rank.submit(RequestSpec::new(0, request.tokens(), request.output_tokens)).expect("taken");
    let mut sum_us = 0;
    loop {
        let step = rank.step().expect("a request runs");
        sum_us += step.duration_us;
        if step.outputs.iter().any(|output| output.first) {
            return sum_us;
        }
    }
}

fn lone(arrival_us: u64, id: u64, tokens: u32) -> Request {
    Request { arrival_us, prompt: vec![Segment { id, tokens }], output_tokens: 3, session: None }
}

fn workload_of(requests: Vec<Request>) -> Workload {
    Workload { name: "made".to_owned(), requests, arrivals: Arrivals::OpenLoop, trace_checksum: None }
}

#[test]
fn every_request_ends_and_its_figures_are_consistent() {
    let workload = chat(200, 8_000);
    let run = serve(&setup(Policy::Kv), &workload);
    let mut last_us = 0;
    for (record, request) in run.requests.iter().zip(&workload.requests) {
        let placed_us = record.placed_us.expect("placed");
        let first_us = record.first_token_us.expect("answered");
        let ended_us = record.ended_us.expect("ended");
        assert!(record.due_us == record.sent_us && record.sent_us <= placed_us, "{record:?}");
        assert!(placed_us < first_us && first_us <= ended_us, "{record:?}");
        assert_eq!(record.output_tokens, u64::from(request.output_tokens));
        assert_eq!((record.prompt_tokens, &record.failure), (request.prompt_tokens(), &None));
        let (cached, reachable) = (record.cached_tokens.expect("reported"), record.reachable_tokens.expect("known"));
        assert!(cached.max(reachable) < record.prompt_tokens, "{record:?}");
        last_us = last_us.max(ended_us);
    }
    assert_eq!((run.ranks, run.ended_us), (6, last_us));
    let gaps: u64 = run.requests.iter().map(|record| record.output_tokens - 1).sum();
    assert_eq!(run.itl_us.len(), gaps);

    let last = run.rank_samples.chunk_by(|one, next| one.at_us == next.at_us).next_back().expect("sampled");
    assert_eq!(last.iter().map(|sample| sample.rank).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_single_request_takes_the_duration_of_its_engine_steps() {
    // A prompt of one step, one of several steps, and one with a cached prefix.
    let first = lone(0, 1, 500);
    let mut second = lone(10_000_000, 2, 20_001);
    second.output_tokens = 70;
    let again = lone(20_000_000, 1, 500);
    let mut setup = setup(Policy::Kv);
    setup.fleet = Fleet { workers: 1, dp_size: 1 };
    setup.engines.truncate(1);
    let run = serve(&setup, &workload_of(vec![first.clone(), second.clone(), again]));
    let [one, two, three] = &run.requests[..] else { panic!("three records") };
    let ttft_us = |record: &RequestRecord| record.first_token_us.expect("answered") - record.due_us;
    assert_eq!(ttft_us(one), lone_first_token_us(setup.engines[0], &first));
    assert_eq!(ttft_us(two), lone_first_token_us(setup.engines[0], &second));
    assert_eq!(three.cached_tokens, Some(496));
    assert_eq!((three.reachable_tokens, three.predicted_cached_tokens), (Some(496), Some(496)));
    assert!(ttft_us(three) < ttft_us(one));
    assert!(run.requests.iter().all(|record| record.regret_us == Some(0) && record.rank == Some(0)));
}

#[test]
fn a_disaggregated_request_takes_prefill_transfer_and_decode() {
    let disaggregation = Some(DisaggregationSetup { prefill_ranks: 1, transfer_us_per_token: 2.6 });
    let setup = Setup { disaggregation, ..Setup::new(2, 1) };
    let run = serve(&setup, &workload_of(vec![lone(0, 1, 500)]));
    let record = &run.requests[0];
    // A step of 4,000 µs, 500 tokens at 25,000 a second, and attention of 500 * 501 / 2 pairs at 1.2 ns, rounded up.
    let prefill_us = 4_000 + 20_000 + 151;
    let transfer_us = 1_300;
    // A step, the last token of the prompt, and its attention to 500 tokens, rounded up.
    let decode_us = 4_000 + 40 + 1;
    assert_eq!(record.first_token_us, Some(prefill_us + transfer_us + decode_us));
    assert_eq!((record.output_tokens, record.cached_tokens, record.rank), (3, Some(0), Some(0)));
    assert_eq!((run.ranks, run.itl_us.len()), (2, 2));
}

#[test]
fn disaggregated_runs_with_one_seed_are_equal_and_complete() {
    let disaggregation = Some(DisaggregationSetup { prefill_ranks: 2, transfer_us_per_token: 2.6 });
    let (workload, setup) = (chat(150, 8_000), Setup { disaggregation, ..setup(Policy::Kv) });
    let (first, second) = (serve(&setup, &workload), serve(&setup, &workload));
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
    for (record, request) in first.requests.iter().zip(&workload.requests) {
        assert!(record.ended_us.is_some() && record.rank < Some(2), "{record:?}");
        assert_eq!((record.output_tokens, &record.failure), (u64::from(request.output_tokens), &None));
    }
    assert!(first.requests.iter().any(|record| record.cached_tokens > Some(0)));
}

#[test]
fn slower_workers_have_longer_ttft_and_regret() {
    let arguments = "test --workers 3 --engine 2-3:prefill-tokens-per-second=12500 --engine 3:step-us=9000";
    let arguments = Arguments::parse_from(arguments.split_whitespace()).simulate;
    let mut setup = arguments.setup(3).expect("a setup");
    setup.router.policy = Policy::RoundRobin;
    let requests: Vec<Request> = (0..3).map(|number| lone(number * 10_000_000, number, 4_000)).collect();
    let run = serve(&setup, &workload_of(requests.clone()));
    let ranks: std::collections::BTreeSet<_> = run.requests.iter().filter_map(|record| record.rank).collect();
    assert_eq!(ranks.len(), 3);
    for (record, request) in run.requests.iter().zip(&requests) {
        let engine = setup.engines[record.rank.expect("placed") as usize];
        let expected_us = lone_first_token_us(engine, request);
        assert_eq!(record.first_token_us.expect("answered") - record.due_us, expected_us);
        let least_us = lone_first_token_us(setup.engines[0], request);
        assert_eq!(record.regret_us, Some(expected_us - least_us));
    }
}

#[test]
fn requests_rejected_by_engines_fail_without_a_booking() {
    let mut workload = chat(20, 20_000);
    workload.requests.push(lone(workload.requests[19].arrival_us, 1, 200_000));
    let run = serve(&setup(Policy::Kv), &workload);
    let failures: Vec<_> = run.requests.iter().filter_map(|record| record.failure.as_deref()).collect();
    assert_eq!(failures, ["request 20 has a prompt of 200000 tokens, not fewer than max_model_len 65536"]);
}

#[test]
fn warm_up_is_excluded_from_figures() {
    let workload = chat(100, 25_000);
    let mut setup = setup(Policy::Kv);
    setup.warmup_requests = Warmup::of("20%".parse().expect("a share"), workload.requests.len());
    let run = serve(&setup, &workload);
    assert_eq!((run.warmup_requests, summary(&setup, &run).requests), (20, 80));
    let gaps: u64 = run.requests[20..].iter().map(|record| record.output_tokens - 1).sum();
    assert_eq!(run.itl_us.len(), gaps);
}

#[test]
fn a_closed_loop_sends_at_the_end_of_earlier_requests() {
    let inflight = 5;
    let mut workload = chat(60, 1);
    workload.arrivals = Arrivals::Concurrency(NonZeroU32::new(inflight).expect("not 0"));
    let run = serve(&setup(Policy::Kv), &workload);
    let mut ends: Vec<u64> = run.requests.iter().map(|record| record.ended_us.expect("ended")).collect();
    ends.sort_unstable();
    for (number, record) in run.requests.iter().enumerate() {
        let expected_us = number.checked_sub(inflight as usize).map_or(0, |end| ends[end]);
        assert_eq!((record.due_us, record.sent_us), (expected_us, expected_us), "request {number}");
    }
}

#[test]
fn calls_of_programs_arrive_their_gaps_after_the_ends_before_them() {
    let text = "programs:programs=12,calls=6,concurrency=3,scale=0.05,subagents_percent=60";
    let workload = text.parse::<Generator>().expect("settings").generate(4);
    let run = serve(&setup(Policy::Latency), &workload);
    let Arrivals::Causal { links, .. } = &workload.arrivals else { panic!("programs") };
    let ended_us = |call: &u32| run.requests[*call as usize].ended_us.expect("ended");
    let mut spans = vec![(u64::MAX, 0); 12];
    for (record, link) in run.requests.iter().zip(links) {
        let last_us = link.after.iter().map(ended_us).max();
        assert!(last_us.is_none_or(|last_us| record.due_us == last_us + link.gap_us), "{record:?}");
        // The last block of a prompt can be cached for another one.
        assert!(record.known_tokens.map(|known| known + 16) >= record.cached_tokens, "{record:?}");
        let span = &mut spans[link.program as usize];
        *span = (span.0.min(record.due_us), span.1.max(record.ended_us.expect("ended")));
    }
    for (start_us, _) in &spans {
        let live = spans.iter().filter(|(start, end)| (*start..*end).contains(start_us)).count();
        assert!((1..=3).contains(&live), "{live} programs at {start_us}");
    }
    let programs = summary(&setup(Policy::Latency), &run).programs.expect("programs");
    assert_eq!(programs.task_seconds.count, 12);
    let again = serve(&setup(Policy::Latency), &workload);
    assert_eq!(format!("{run:?}"), format!("{again:?}"));
}

#[test]
fn invalid_setups_are_rejected_by_name() {
    let refused = |change: fn(&mut Setup)| {
        let mut setup = setup(Policy::Kv);
        change(&mut setup);
        run(&setup, &chat(2, 1_000), Embedded::start).expect_err("refused").to_string()
    };
    assert_eq!(refused(|setup| setup.engines[1].block_size = 64), "block sizes 16 and 64 in one fleet");
    assert_eq!(refused(|setup| setup.engines.truncate(2)), "2 engines for 3 workers");
    let slow = StepCost { prefill_tokens_per_second: 0, ..StepCost::default() };
    let refused_engine = run(
        &Setup { engines: vec![EngineConfig { cost: slow, ..EngineConfig::default() }; 3], ..setup(Policy::Kv) },
        &chat(2, 1_000),
        Embedded::start,
    );
    let error = refused_engine.expect_err("refused").to_string();
    assert!(error.starts_with("worker 1: cost.prefill_tokens_per_second is 0"), "{error}");
    let unknown = refused(|setup| setup.router.settings.push(("no_such_setting".to_owned(), json!(1))));
    assert!(unknown.contains("no_such_setting"), "{unknown}");
}

#[test]
fn small_memories_reduce_max_model_len() {
    let arguments = Arguments::parse_from(["test", "--kv-blocks", "512", "--engine", "2:kv-blocks=9999"]);
    let setup = arguments.simulate.setup(1).expect("a setup");
    assert_eq!((setup.engines[0].max_model_len, setup.engines[1].max_model_len), (511 * 64, 131_072));
}
