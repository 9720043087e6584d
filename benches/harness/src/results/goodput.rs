//! Goodput: requests answered within given limits. A failed request counts, and is never good.

use serde::{Deserialize, Serialize};

use crate::results::RequestRecord;

/// Latency limits of a good answer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Time from the arrival time to the first token, in ms.
    pub ttft_ms: f64,
    /// Mean gap between the answer's tokens, in ms. A single long gap is tolerated.
    pub itl_ms: f64,
}

impl Default for Limits {
    /// 2 s to the first token and 100 ms per token: the patience and the reading speed of a chat user.
    fn default() -> Self {
        Self { ttft_ms: 2_000.0, itl_ms: 100.0 }
    }
}

/// Goodput of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The limits.
    pub limits: Limits,
    /// Requests per second within both limits, over the run's duration.
    pub requests_per_second: f64,
    /// Share of all measured requests, including failed ones.
    pub share: f64,
}

impl Goodput {
    /// Computes the goodput of `requests` over `duration_seconds`; none without requests or duration.
    #[must_use]
    pub fn of(requests: &[RequestRecord], limits: Limits, duration_seconds: f64) -> Option<Self> {
        let good = requests.iter().filter(|request| is_good(request, limits)).count() as f64;
        let is_measured = !requests.is_empty() && duration_seconds > 0.0;
        is_measured.then(|| Self {
            limits,
            requests_per_second: good / duration_seconds,
            share: good / requests.len() as f64,
        })
    }
}

fn is_good(request: &RequestRecord, limits: Limits) -> bool {
    let prompt = request.ttft_us().is_some_and(|ttft| ttft as f64 <= limits.ttft_ms * 1e3);
    request.answered() && prompt && request.gap_us().is_none_or(|gap| gap <= limits.itl_ms * 1e3)
}

#[cfg(test)]
mod tests {
    use super::super::tests::request;
    use super::*;

    #[test]
    fn an_answer_at_its_limits_is_good() {
        // 100 ms to the first token, 50 ms per token.
        let share =
            |ttft_ms, itl_ms| Goodput::of(&[request(0)], Limits { ttft_ms, itl_ms }, 2.0).expect("not empty").share;
        assert_eq!((share(100.0, 50.0), share(99.9, 50.0), share(100.0, 49.9)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn failures_count_but_are_never_good() {
        let failed = RequestRecord { failure: Some("reset".into()), ..request(0) };
        let unanswered = RequestRecord { first_token_us: None, ended_us: None, ..request(0) };
        let single = RequestRecord { output_tokens: 1, ..request(0) };
        let of = Goodput::of(&[failed, unanswered, single, request(0)], Limits::default(), 4.0).expect("requests");
        assert_eq!((of.share, of.requests_per_second), (0.5, 0.5));
        assert_eq!(Goodput::of(&[], Limits::default(), 4.0), None);
    }
}
