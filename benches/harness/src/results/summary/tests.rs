//! Tests of summaries.

use serde_json::Value;

use super::super::tests::{request, run};
use super::*;
use crate::results::{RankSample, write_json};

pub(crate) fn facts() -> Facts {
    Facts {
        policy: "kv".into(),
        consults_index: true,
        workers: 2,
        dp_size: 1,
        seed: 7,
        workload: "chat".into(),
        trace_checksum: None,
        command: "pointsman-bench simulate --seed 7".into(),
        machine: Machine { cores: 2, cpu: "some".into(), kernel: "6.0".into() },
        commit: "unknown".into(),
        client: None,
    }
}

/// A thousand requests, one every 10 ms.
fn thousand() -> Run {
    run((0..1_000).map(|number| request(10 * number)).collect())
}

#[test]
fn a_known_run_has_the_expected_figures() {
    let mut run = thousand();
    run.warmup_requests = 200;
    let on = |at_us, rank, requests| RankSample { at_us, rank, requests };
    run.rank_samples = vec![on(0, 0, 3), on(0, 1, 1)];
    let summary = Summary::new(&run, &facts());
    // Due from 2 s to 9.99 s, the last answer ends at 10.59 s.
    assert_eq!((summary.requests, summary.warmup_requests, summary.answered), (800, 200, 800));
    assert_eq!(summary.duration_seconds, 8.59);
    assert_eq!(summary.requests_per_second, 800.0 / 8.59);
    assert_eq!(summary.output_tokens_per_second, 8_800.0 / 8.59);
    let same = |seconds| Some(Distribution { mean: seconds, p50: seconds, p90: seconds, p99: seconds, count: 800 });
    assert_eq!((summary.ttft_seconds, summary.e2e_seconds), (same(0.1), same(0.6)));
    assert_eq!((summary.queue_seconds, summary.regret_seconds), (same(0.001), same(0.002)));
    assert_eq!((summary.hit_rate, summary.reachable_hit_rate), (Some(0.5), Some(0.6)));
    assert_eq!(summary.load_max_over_mean, Some(1.5));
    assert_eq!(summary.itl_seconds, same(0.05));
    assert_eq!(summary.token_gap_seconds.map(|gaps| gaps.count), Some(10_000));
}

#[test]
fn failures_are_counted_by_reason_and_excluded_from_latency() {
    let failed = |reason: String| RequestRecord { failure: Some(reason), ..request(0) };
    let mut requests: Vec<_> = (0..20).map(|number| failed(format!("reason {number:02}"))).collect();
    requests.extend([failed("reset".into()), failed("reset".into()), request(0)]);
    requests.push(RequestRecord { first_token_us: None, ended_us: None, ..request(0) });
    let summary = Summary::new(&run(requests), &facts());
    assert_eq!((summary.answered, summary.requests), (1, 24));
    assert_eq!(summary.ttft_seconds.map(|ttft| ttft.count), Some(1));
    assert_eq!((summary.failures["reset"], summary.failures["no answer"]), (2, 1));
    assert_eq!(summary.failures.len(), REASONS_MAX + 1);
    assert_eq!(summary.failures.values().sum::<u64>(), 23);
}

#[test]
fn figures_without_measurements_are_absent() {
    let blank = RequestRecord { due_us: 5, sent_us: 5, ..RequestRecord::default() };
    let summary = Summary::new(&run(vec![blank]), &facts());
    assert_eq!((summary.ttft_seconds, summary.e2e_seconds, summary.queue_seconds), (None, None, None));
    assert_eq!((summary.hit_rate, summary.reachable_hit_rate, summary.load_max_over_mean), (None, None, None));
    assert_eq!((summary.decisions_checksum, summary.regret_seconds), (None, None));
    let nothing = Summary::new(&run(Vec::new()), &facts());
    assert_eq!((nothing.requests, nothing.requests_per_second), (0, 0.0));
}

#[test]
fn decisions_checksum_depends_on_order_and_gaps() {
    let at = |rank| RequestRecord { rank, ..request(0) };
    let sum = |ranks: [Option<u32>; 2]| decisions_checksum(&ranks.map(at)).expect("a known rank");
    assert_eq!(sum([Some(1), None]), format!("{:016x}", xxh3_64(&[1, 0, 0, 0, 255, 255, 255, 255])));
    assert_ne!(sum([Some(0), Some(1)]), sum([Some(1), Some(0)]));
}

#[test]
fn json_is_one_line_with_all_documented_keys_and_round_trips() {
    let summary = Summary::new(&thousand(), &facts());
    let mut line = Vec::new();
    write_json(&mut line, &summary).expect("written");
    let line = String::from_utf8(line).expect("text");
    assert_eq!(line.matches('\n').count(), 1);
    let json: Value = serde_json::from_str(&line).expect("json");
    for key in ["ttft_seconds", "itl_seconds", "e2e_seconds", "queue_seconds", "regret_seconds"] {
        for figure in ["mean", "p50", "p90", "p99"] {
            assert!(json[key][figure].is_f64(), "{key}.{figure}: {line}");
        }
    }
    for key in ["hit_rate", "reachable_hit_rate", "workers", "dp_size", "seed", "schema_version"] {
        assert!(json[key].is_number(), "{key}: {line}");
    }
    for key in ["policy", "command", "commit", "workload", "decisions_checksum"] {
        assert!(json[key].is_string(), "{key}: {line}");
    }
    assert_eq!(serde_json::from_str::<Summary>(&line).expect("reads back"), summary);
    let mut again = Vec::new();
    write_json(&mut again, &Summary::new(&thousand(), &facts())).expect("written");
    assert_eq!(line.as_bytes(), again);
}
