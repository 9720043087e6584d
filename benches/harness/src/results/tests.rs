//! Tests of records.

use hdrhistogram::Histogram;

use super::*;

/// A request with arrival time `at_ms`: placed 1 ms later, first token after 100 ms, last token after 600 ms, and
/// half of its 1,000 prompt tokens cached.
pub(crate) fn request(at_ms: u64) -> RequestRecord {
    let at = at_ms * 1_000;
    RequestRecord {
        due_us: at,
        sent_us: at,
        placed_us: Some(at + 1_000),
        first_token_us: Some(at + 100_000),
        ended_us: Some(at + 600_000),
        prompt_tokens: 1_000,
        output_tokens: 11,
        cached_tokens: Some(500),
        predicted_cached_tokens: Some(500),
        reachable_tokens: Some(600),
        known_tokens: Some(800),
        program: None,
        predicted_ttft_us: Some(90_000),
        regret_us: Some(2_000),
        rank: Some(0),
        failure: None,
    }
}

/// A run of `requests` without warm-up and with a token every 50 ms.
pub(crate) fn run(requests: Vec<RequestRecord>) -> Run {
    let mut itl_us = Histogram::new_with_bounds(1, 60_000_000, 3).expect("bounds");
    itl_us.record_n(50_000, 10 * requests.len() as u64).expect("within bounds");
    let ended_us = requests.iter().filter_map(|request| request.ended_us).max().unwrap_or_default();
    Run { requests, itl_us, rank_samples: Vec::new(), ranks: 2, warmup_requests: 0, ended_us, preemptions: None }
}

#[test]
fn warm_up_requests_are_not_measured() {
    let mut run = run((0..10).map(request).collect());
    run.warmup_requests = 4;
    assert_eq!(run.measured().len(), 6);
    run.warmup_requests = 11;
    assert!(run.measured().is_empty());
}

#[test]
fn latency_of_a_late_request_counts_from_its_arrival_time() {
    let late = RequestRecord { sent_us: 40_000, placed_us: Some(41_000), ..request(0) };
    assert_eq!((late.ttft_us(), late.e2e_us(), late.queue_us()), (Some(100_000), Some(600_000), Some(1_000)));
    assert_eq!(late.gap_us(), Some(50_000.0));
    assert_eq!(RequestRecord { output_tokens: 1, ..late }.gap_us(), None);
}
