//! Records of a run over time, on a simulated fleet or a real endpoint.
//!
//! Contains the unaggregated facts of each request and each rank. All times are in µs since the start of the run, by
//! one clock. The readers compute percentiles, ratios and warnings.

use std::io::{self, Write};
use std::str::FromStr;

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::Value;

/// A whole run.
#[derive(Clone, Debug)]
pub struct Run {
    /// One record per request, in the workload's order.
    pub requests: Vec<RequestRecord>,
    /// Gaps between the tokens of an answer in µs, over all measured requests.
    pub itl_us: Histogram<u64>,
    /// Samples of ranks in order of time; empty if ranks are not observable.
    pub rank_samples: Vec<RankSample>,
    /// Number of ranks in the fleet; 0 if unknown.
    pub ranks: u32,
    /// Number of initial requests that only warm caches and are excluded from all figures.
    pub warmup_requests: usize,
    /// End of the last answer.
    pub ended_us: u64,
    /// Number of sequences that engines preempted, warm-up included; none if not observable.
    pub preemptions: Option<u64>,
}

/// Record of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestRecord {
    /// Arrival time according to the workload.
    pub due_us: u64,
    /// Time of sending; later than the arrival time if the client was late.
    pub sent_us: u64,
    /// Time of the routing decision; none if not observable.
    pub placed_us: Option<u64>,
    /// Time of the first token.
    pub first_token_us: Option<u64>,
    /// Time of the last token.
    pub ended_us: Option<u64>,
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of output tokens.
    pub output_tokens: u64,
    /// Prompt tokens that the engine found cached; none if the engine does not report it.
    pub cached_tokens: Option<u64>,
    /// Prompt tokens that the router expected to be cached on the rank.
    pub predicted_cached_tokens: Option<u64>,
    /// Prompt tokens cached on the best eligible rank at the time of the decision.
    pub reachable_tokens: Option<u64>,
    /// Prompt tokens that some rank had been given to compute before.
    pub known_tokens: Option<u64>,
    /// Number of its program, if the workload has programs.
    pub program: Option<u32>,
    /// Time to the first token that the router predicted, in µs.
    pub predicted_ttft_us: Option<u64>,
    /// Estimated delay of the first token relative to the oracle's choice of rank, in µs, by the oracle's model.
    pub regret_us: Option<u64>,
    /// Dense number of the serving rank.
    pub rank: Option<u32>,
    /// Reason for a missing or incomplete answer.
    pub failure: Option<String>,
}

/// State of one rank at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankSample {
    /// Time of the sample.
    pub at_us: u64,
    /// Dense number of the rank.
    pub rank: u32,
    /// Number of running and waiting requests.
    pub requests: u32,
}

/// Writes one line of JSON.
pub(crate) fn write_json(mut out: impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)
}

/// Writes a report as one line of JSON, or as text with one line per field; names of nested fields are joined by dots.
pub(crate) fn write_figures(mut out: impl Write, report: &impl Serialize, json: bool) -> io::Result<()> {
    if json {
        return write_json(out, report);
    }
    write_fields(&mut out, "", &serde_json::to_value(report)?)
}

fn write_fields(out: &mut impl Write, name: &str, value: &Value) -> io::Result<()> {
    let dot = if name.is_empty() { "" } else { "." };
    match value {
        Value::Object(fields) => {
            fields.iter().try_for_each(|(field, value)| write_fields(out, &format!("{name}{dot}{field}"), value))
        }
        Value::Number(number) if number.is_f64() => {
            writeln!(out, "{name:<42} {:.6}", number.as_f64().unwrap_or_default())
        }
        Value::String(text) => writeln!(out, "{name:<42} {text}"),
        other => writeln!(out, "{name:<42} {other}"),
    }
}

/// Extent of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// Share of the requests, from 0 to 1.
    Share(f64),
    /// Number of requests.
    Requests(usize),
}

impl Warmup {
    /// Number of warm-up requests out of `requests`.
    #[must_use]
    pub fn of(self, requests: usize) -> usize {
        match self {
            Self::Share(share) => (requests as f64 * share) as usize,
            Self::Requests(count) => count.min(requests),
        }
    }
}

impl FromStr for Warmup {
    type Err = String;

    /// Parses `10%` or a count.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is neither a count of requests nor a share such as 10%");
        match text.strip_suffix('%') {
            Some(percent) => {
                let percent: f64 = percent.parse().map_err(|_| wrong())?;
                (0.0..=100.0).contains(&percent).then_some(Self::Share(percent / 100.0)).ok_or_else(wrong)
            }
            None => text.parse().map(Self::Requests).map_err(|_| wrong()),
        }
    }
}
