use std::num::NonZeroU32;

use clap::Parser;
use pointsman::policy::Policy;
use pointsman::protocol::{BlockHash, KvEvent, StorageTier, WorkerId, WorkerRank};
use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec, StepCost};
use pointsman_trial::workload::{Arrivals, Request, Rng, Segment, Workload};
use serde_json::json;

use super::*;
use crate::fleet::{DisaggregationSetup, Fleet};
use crate::results::{RequestRecord, Summary, Warmup};
use crate::targets::{Call, Embedded, Routed};

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
    let reporting = Arguments::parse_from(["test", "--series"]).simulate.reporting;
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
    let cached: u64 = run.requests.iter().filter_map(|record| record.cached_tokens).sum();
    assert!(last.iter().map(|sample| sample.cached_tokens_total).sum::<u64>() <= cached);
    assert!(last.iter().any(|sample| sample.prompt_tokens_total > 0));
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
fn disaggregated_setups_need_ranks_in_both_roles() {
    let refused = |prefill_ranks, transfer_us_per_token| {
        let disaggregation = Some(DisaggregationSetup { prefill_ranks, transfer_us_per_token });
        let setup = Setup { disaggregation, ..setup(Policy::Kv) };
        run(&setup, &chat(2, 1_000), Embedded::start).expect_err("rejected").to_string()
    };
    assert_eq!(refused(6, 2.6), "6 prefill ranks of 6 ranks leave a role without ranks");
    assert_eq!(refused(3, 2.6), "3 prefill ranks are not whole workers of 2 ranks");
    assert_eq!(refused(2, -1.0), "transfer_us_per_token is -1, must be 0 to 1000000");
}

#[test]
fn the_oracle_predicts_a_single_request_to_the_microsecond() {
    let (prompt, config) = (lone(0, 1, 30_000), EngineConfig::default());
    let rank = rank::FleetRank::new(WorkerRank::new(WorkerId(1), 0), config).expect("valid engine settings");
    let foreseen_us = rank.first_token_us(0, 30_000, &rank.names(&prompt.tokens()));
    let exact_us = lone_first_token_us(config, &prompt);
    assert!(foreseen_us.abs_diff(exact_us) <= 4, "{foreseen_us} for {exact_us}: a rounding a step");
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
fn queued_requests_are_placed_later() {
    let workload = workload_of((0..40).map(|id| lone(0, id, 2_000)).collect());
    let mut setup = setup(Policy::Kv);
    setup.router.settings = [("queue.threshold".to_owned(), json!(0.5))].into_iter().collect();
    let run = serve(&setup, &workload);
    let waited = run.requests.iter().filter(|record| record.placed_us > Some(record.due_us)).count();
    assert!((10..40).contains(&waited), "{waited} waited");
    assert!(run.requests.iter().all(|record| record.ended_us.is_some()));
}

#[test]
fn simultaneous_requests_form_one_batch() {
    let mut setup = setup(Policy::Kv);
    setup.fleet = Fleet { workers: 1, dp_size: 1 };
    setup.engines.truncate(1);
    let run = serve(&setup, &workload_of((0..8).map(|id| lone(0, id, 1_000)).collect()));
    let first: Vec<_> = run.requests.iter().map(|record| record.first_token_us).collect();
    assert!(first.iter().all(|first_us| *first_us == first[0]), "{first:?}");
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
fn delayed_events_reduce_predicted_cached_tokens() {
    let workload = chat(200, 8_000);
    let mut late = setup(Policy::Kv);
    late.event_delay_us = 5_000_000;
    let predicted = |setup: &Setup| -> u64 {
        serve(setup, &workload).requests.iter().filter_map(|record| record.predicted_cached_tokens).sum()
    };
    assert!(predicted(&late) < predicted(&setup(Policy::Kv)));
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

/// Target that never places a request, places every request on an unknown rank, or leaks bookings.
enum Broken {
    Silent,
    Lost,
    Leaking,
}

impl Target for Broken {
    type Handle = ();
    type Event = ();

    const NAME: &'static str = "broken";

    fn hash(_: &[u32], _: NonZeroU32) -> Vec<BlockHash> {
        Vec::new()
    }

    fn event(&self, _: WorkerRank, _: StorageTier, _: KvEvent) {}

    async fn route(&self, _: Call) -> Result<Routed<()>, Failed> {
        match self {
            Self::Silent => std::future::pending().await,
            Self::Lost => Ok(Routed::new(WorkerRank::new(WorkerId(9), 0), ())),
            Self::Leaking => Ok(Routed::new(WorkerRank::new(WorkerId(1), 0), ())),
        }
    }

    async fn apply_events(&self, _: Vec<()>) -> Result<(), Failed> {
        Ok(())
    }

    async fn prefill_completed(&self, (): &mut ()) -> Result<(), Failed> {
        Ok(())
    }

    fn bookings(&self) -> Option<usize> {
        Some(1)
    }

    async fn free(&self, (): ()) -> Result<(), Failed> {
        Ok(())
    }

    async fn shutdown(self) {}
}

#[test]
fn broken_routers_are_reported_as_errors() {
    for (broken, expected) in [
        (Broken::Silent, "broken leaves 1 requests unplaced over idle engines"),
        (Broken::Lost, "broken placed request 0 on 9/0, which is not in the fleet"),
        (Broken::Leaking, "broken holds 1 bookings after the last request has ended"),
    ] {
        let one = workload_of(vec![lone(5_000, 1, 100)]);
        let error = run(&setup(Policy::Kv), &one, async |_: &Setup| Ok(broken)).expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn predicted_ttft_is_recorded() {
    let workload = chat(60, 8_000);
    let foreseen = |policy| {
        let run = serve(&setup(policy), &workload);
        run.requests.iter().filter(|record| record.predicted_ttft_us.is_some_and(|us| us > 0)).count()
    };
    assert_eq!((foreseen(Policy::Latency), foreseen(Policy::RoundRobin)), (60, 0));
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
fn invalid_engine_specs_are_rejected_with_a_reason() {
    for (spec, expected) in [
        ("1-2", "no ':'"),
        ("0-3:step-us=1", "count from 1"),
        ("3-2:step-us=1", "are empty or contain 0"),
        ("1:step-us", "no '='"),
        ("1:speed=3", "unknown figure \"speed\""),
        ("1:step-us=fast", "step-us \"fast\""),
    ] {
        let error = spec.parse::<cli::EngineSpec>().expect_err(spec);
        assert!(error.contains(expected), "{spec}: {error}");
    }
    let arguments = Arguments::parse_from(["test", "--workers", "2", "--engine", "3:step-us=1"]);
    let error = arguments.simulate.setup(1).expect_err("rejected").to_string();
    assert_eq!(error, "no worker 3 among 2");
}

#[test]
fn small_memories_reduce_max_model_len() {
    let arguments = Arguments::parse_from(["test", "--kv-blocks", "512", "--engine", "2:kv-blocks=9999"]);
    let setup = arguments.simulate.setup(1).expect("a setup");
    assert_eq!((setup.engines[0].max_model_len, setup.engines[1].max_model_len), (511 * 64, 131_072));
}

#[test]
fn settings_with_a_flag_are_rejected_by_set() {
    use clap::Parser;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        simulate: super::Simulate,
    }
    let parse = |setting: &str| Arguments::try_parse_from(["test", "--set", setting]).map(|given| given.simulate);
    assert!(parse("queue.threshold=0.5").is_ok());
    for (setting, flag) in [("policy=latency", "--policy"), ("seed=9", "--seed"), ("block_size=32", "--block-size")] {
        let refused = parse(setting).map_or_else(|refused| refused.to_string(), |_| String::new());
        assert!(refused.contains(flag), "{setting}: {refused}");
    }
}
