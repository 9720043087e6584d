//! Figures of one run and their JSON form.
//!
//! Equal runs with equal facts give equal bytes: no figure depends on wall time or on the process.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::load::max_over_mean;
use super::prediction::PredictionError;
use super::{Distribution, Facts, Machine, ProgramFigures, RequestRecord, Run, Warning, share, validity};

/// Version of the JSON form. Incremented when a figure changes its name or meaning, but not for additional figures.
pub const SCHEMA_VERSION: u32 = 1;

/// Maximum number of distinct failure reasons; further ones are combined.
const REASONS_MAX: usize = 16;

/// Key of the combined reasons beyond [`REASONS_MAX`].
const OTHER_REASONS: &str = "other reasons";

/// Figures of one run with its settings and environment.
///
/// All figures cover the measured requests: those after the warm-up. All times are in seconds. A figure without
/// measurements is absent (`null` in JSON).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// [`SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// Selection policy or endpoint.
    pub policy: String,
    /// Number of workers; 0 if unknown.
    pub workers: u32,
    /// Number of ranks per worker; 0 if unknown.
    pub dp_size: u32,
    /// Seed of the router's random choices and of a generated workload.
    pub seed: u64,
    /// Name of the workload.
    pub workload: String,
    /// XXH3-64 of the trace file in hex; none for a generated workload.
    pub trace_checksum: Option<String>,
    /// XXH3-64 in hex of the rank numbers of all requests (including the warm-up) in the workload's order, each as four
    /// little-endian bytes, `ff ff ff ff` for none. None if ranks are not observable.
    pub decisions_checksum: Option<String>,
    /// Number of measured requests, including failed ones.
    pub requests: u64,
    /// Number of warm-up requests, which are excluded from all figures.
    pub warmup_requests: u64,
    /// Number of completely answered requests. Latencies only cover these.
    pub answered: u64,
    /// Number of failed requests by reason.
    pub failures: BTreeMap<String, u64>,
    /// Time from the arrival of the first measured request to the end of the last answer.
    pub duration_seconds: f64,
    /// Completely answered requests divided by the duration.
    pub requests_per_second: f64,
    /// Output tokens divided by the duration, including those of incomplete answers.
    pub output_tokens_per_second: f64,
    /// Time from the arrival time to the first token.
    pub ttft_seconds: Option<Distribution>,
    /// Mean gap between the tokens of an answer, with equal weight for each answer of at least two tokens. AIPerf's
    /// name is inter-token latency, vLLM's bench calls it time per output token.
    pub itl_seconds: Option<Distribution>,
    /// Gaps between tokens, with equal weight for each gap. vLLM's bench calls them inter-token latency.
    pub token_gap_seconds: Option<Distribution>,
    /// Time from the arrival time to the last token.
    pub e2e_seconds: Option<Distribution>,
    /// Time in the router: from sending to the routing decision.
    pub queue_seconds: Option<Distribution>,
    /// Prompt tokens that engines found cached divided by all prompt tokens, over requests whose engines report it.
    pub hit_rate: Option<f64>,
    /// Prompt tokens cached on the best eligible rank at the decision divided by all prompt tokens. This is the hit
    /// rate of a router that always follows the cache, at each decision, given the caches from its own earlier
    /// decisions.
    pub reachable_hit_rate: Option<f64>,
    /// Prompt tokens that some rank had computed before, divided by all computed ones.
    #[serde(default)]
    pub recomputed_share: Option<f64>,
    /// Figures of programs, if the workload has them.
    #[serde(default)]
    pub programs: Option<ProgramFigures>,
    /// Estimated delay of first tokens relative to the oracle's choice of rank, by the oracle's model.
    pub regret_seconds: Option<Distribution>,
    /// Error of predicted times to the first token.
    pub predicted_ttft_error: Option<PredictionError>,
    /// Requests of the most loaded rank divided by the mean of all ranks, both averaged over the duration. 1 is even.
    pub load_max_over_mean: Option<f64>,
    /// Number of sequences that engines preempted, warm-up included.
    #[serde(default)]
    pub preemptions: Option<u64>,
    /// Validity warnings for these figures.
    pub warnings: Vec<Warning>,
    /// Command line of the run.
    pub command: String,
    /// Machine of the run.
    pub machine: Machine,
    /// Commit of the build, or `unknown`; see [`super::facts::commit`].
    pub commit: String,
}

impl Summary {
    /// Computes the figures and warnings of `run` with `facts`.
    #[must_use]
    pub fn new(run: &Run, facts: &Facts) -> Self {
        let measured = run.measured();
        let answered = || measured.iter().filter(|request| request.answered());
        let from_us = measured.iter().map(|request| request.due_us).min().unwrap_or(run.ended_us);
        let duration_seconds = run.ended_us.saturating_sub(from_us) as f64 / 1e6;
        let per_second = |count: u64| if duration_seconds > 0.0 { count as f64 / duration_seconds } else { 0.0 };
        Self {
            schema_version: SCHEMA_VERSION,
            policy: facts.policy.clone(),
            workers: facts.workers,
            dp_size: facts.dp_size,
            seed: facts.seed,
            workload: facts.workload.clone(),
            trace_checksum: facts.trace_checksum.clone(),
            decisions_checksum: decisions_checksum(&run.requests),
            requests: measured.len() as u64,
            warmup_requests: (run.requests.len() - measured.len()) as u64,
            answered: answered().count() as u64,
            failures: failures(measured),
            duration_seconds,
            requests_per_second: per_second(answered().count() as u64),
            output_tokens_per_second: per_second(measured.iter().map(|request| request.output_tokens).sum()),
            ttft_seconds: Distribution::of_us(answered().filter_map(RequestRecord::ttft_us)),
            itl_seconds: Distribution::of_us(
                answered().filter_map(RequestRecord::gap_us).map(|gap| gap.round() as u64),
            ),
            token_gap_seconds: Distribution::of_histogram(&run.itl_us),
            e2e_seconds: Distribution::of_us(answered().filter_map(RequestRecord::e2e_us)),
            queue_seconds: Distribution::of_us(answered().filter_map(RequestRecord::queue_us)),
            hit_rate: token_share(measured, |request| request.cached_tokens),
            reachable_hit_rate: token_share(measured, reachable_tokens),
            recomputed_share: recomputed_share(measured),
            programs: ProgramFigures::of(run),
            regret_seconds: Distribution::of_us(answered().filter_map(|request| request.regret_us)),
            predicted_ttft_error: PredictionError::of(measured),
            load_max_over_mean: max_over_mean(&run.rank_samples, run.ranks, from_us, run.ended_us),
            preemptions: run.preemptions,
            warnings: validity::warnings(run, facts),
            command: facts.command.clone(),
            machine: facts.machine.clone(),
            commit: facts.commit.clone(),
        }
    }
}

/// Reachable tokens of a request, unless its hit is unknown because it failed, so that both rates cover the same
/// requests.
fn reachable_tokens(request: &RequestRecord) -> Option<u64> {
    request.reachable_tokens.filter(|_| request.cached_tokens.is_some() || request.failure.is_none())
}

/// Share of `tokens` in the prompt tokens of the requests for which `tokens` is known.
fn token_share(requests: &[RequestRecord], tokens: impl Fn(&RequestRecord) -> Option<u64>) -> Option<f64> {
    let known = requests.iter().filter_map(|request| Some((tokens(request)?, request.prompt_tokens)));
    let (part, whole) = known.fold((0, 0), |(part, whole), (tokens, prompt)| (part + tokens, whole + prompt));
    share(part, whole)
}

fn recomputed_share(requests: &[RequestRecord]) -> Option<f64> {
    let known = requests.iter().filter_map(|request| Some((request, request.cached_tokens?, request.known_tokens?)));
    let (again, all) = known.fold((0, 0), |(again, all), (request, cached, known)| {
        (again + known.saturating_sub(cached), all + request.prompt_tokens.saturating_sub(cached))
    });
    share(again, all)
}

/// Number of failed requests by reason; the rarest reasons are combined.
fn failures(requests: &[RequestRecord]) -> BTreeMap<String, u64> {
    let mut reasons = BTreeMap::<&str, u64>::new();
    for request in requests.iter().filter(|request| !request.answered()) {
        *reasons.entry(request.failure.as_deref().unwrap_or("no answer")).or_default() += 1;
    }
    let mut reasons: Vec<(&str, u64)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let rest: u64 = reasons.iter().skip(REASONS_MAX).map(|(_, count)| count).sum();
    let mut kept: BTreeMap<String, u64> =
        reasons.into_iter().take(REASONS_MAX).map(|(reason, count)| (reason.to_owned(), count)).collect();
    if rest > 0 {
        *kept.entry(OTHER_REASONS.to_owned()).or_default() += rest;
    }
    kept
}

fn decisions_checksum(requests: &[RequestRecord]) -> Option<String> {
    let seen = requests.iter().any(|request| request.rank.is_some());
    let bytes = || requests.iter().flat_map(|request| request.rank.unwrap_or(u32::MAX).to_le_bytes());
    seen.then(|| format!("{:016x}", xxh3_64(&bytes().collect::<Vec<u8>>())))
}

#[cfg(test)]
pub(crate) mod tests;
