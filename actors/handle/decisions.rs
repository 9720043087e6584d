//! Recorded decisions: the last ones, and the candidate table of one as it was then.

use std::time::Duration;

use serde::Serialize;

use super::router::Router;
use crate::policy::Policy;
use crate::protocol::{Timestamp, WorkerRank};
use crate::record::{RecordCursor, RecordPart};
use crate::schedule::{ExplainedRank, Explanation, RecordedChoice, Replay, ReplayedDecision};

/// A recorded decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecordedDecision {
    /// Number of the decision.
    pub number: u64,
    /// Request id; empty for queries without one.
    pub request_id: String,
    /// Time since the decision, in seconds.
    pub age_seconds: f64,
    /// Active policy.
    pub policy: Policy,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Whether it booked; a query only reports.
    pub books: bool,
    /// The chosen rank.
    pub chosen: Option<WorkerRank>,
    /// Reason for no choice.
    pub rejection: Option<String>,
    /// Prompt tokens that the index held for the chosen rank.
    pub cached_tokens: u32,
    /// Predicted time to first token, if the policy predicts it.
    pub predicted_ttft_seconds: Option<f64>,
    /// The eligible rank with the next lowest cost, if the policy compares costs.
    pub runner_up: Option<WorkerRank>,
    /// Cost of the runner-up minus that of the chosen rank: seconds under `latency`, blocks under `kv`. Negative where
    /// costs tie or a temperature chose.
    pub margin: Option<f64>,
}

impl Router {
    /// The last recorded decisions with numbers above `after`, at most `limit`, newest last. Replays a segment of the
    /// record: call it outside the threads of the runtime.
    #[must_use]
    pub fn recorded_decisions(&self, limit: usize, after: Option<u64>) -> Vec<RecordedDecision> {
        let mut listed: Vec<RecordedDecision> = Vec::new();
        for segment in self.views().decisions.segments().iter().rev() {
            let wanted = limit - listed.len();
            if wanted == 0 {
                break;
            }
            let mut times: Vec<(Timestamp, u64)> = Vec::new();
            let visit = &mut |decision: ReplayedDecision| times.push((decision.at, decision.number));
            // Damage cannot occur in memory.
            let _ = replay(|_, _| false).feed(&segment.bytes, visit);
            let first = times.len().saturating_sub(wanted);
            let numbers: Vec<u64> = times[first..].iter().map(|(_, number)| *number).collect();
            let numbers: Vec<u64> =
                numbers.into_iter().filter(|number| after.is_none_or(|after| *number > after)).collect();
            if numbers.is_empty() {
                break;
            }
            let known = numbers.clone();
            let mut found = Vec::new();
            let visit = &mut |decision: ReplayedDecision| {
                if numbers.contains(&decision.number) {
                    found.push(self.listed(&decision));
                }
            };
            let _ = replay(move |number, _| known.contains(&number)).feed(&segment.bytes, visit);
            found.extend(listed);
            listed = found;
        }
        listed
    }

    /// The recorded decisions of a request, with the candidate tables as they were then, oldest first. They have its id,
    /// or its id with a suffix after `/`, as the bookings of the gateway's attempts have. Replays parts of the record: call
    /// it outside the threads of the runtime.
    #[must_use]
    pub fn recorded_decisions_of(&self, request_id: &str) -> Vec<(RecordedDecision, Explanation)> {
        let is_wanted = {
            let id = request_id.to_owned();
            move |known: &str| {
                known.strip_prefix(id.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        };
        let mut found = Vec::new();
        for segment in self.views().decisions.segments() {
            if !segment.mentions(request_id) {
                continue;
            }
            let is_wanted = is_wanted.clone();
            let visit = &mut |mut decision: ReplayedDecision| {
                if let Some(explanation) = decision.explanation.take() {
                    let explained = ReplayedDecision { explanation: Some(explanation.clone()), ..decision };
                    found.push((self.listed(&explained), *explanation));
                }
            };
            let _ = replay(move |_, id| is_wanted(id)).feed(&segment.bytes, visit);
        }
        found
    }

    /// The recorded entries after `cursor`, which is advanced, and the number of segments of which entries were dropped
    /// from memory before. For files: see [`RecordFile`](crate::record::RecordFile).
    #[must_use]
    pub fn records_after(&self, cursor: &mut RecordCursor) -> (Vec<RecordPart>, u64) {
        self.views().decisions.parts_after(cursor)
    }

    fn listed(&self, decision: &ReplayedDecision) -> RecordedDecision {
        let (chosen, rejection, cached_tokens, predicted_ttft) = match &decision.recorded {
            RecordedChoice::Rank { rank, cached_tokens, predicted_ttft } => {
                (Some(*rank), None, *cached_tokens, *predicted_ttft)
            }
            RecordedChoice::Rejected(reason) => (None, Some(reason.clone()), 0, None),
            RecordedChoice::Deferred => (None, None, 0, None),
        };
        let runner_up = decision.explanation.as_deref().and_then(|explanation| runner_up(explanation, chosen?));
        RecordedDecision {
            number: decision.number,
            request_id: decision.id.clone(),
            age_seconds: self.edge().clock.now().since(decision.at).as_secs_f64(),
            policy: decision.policy,
            prompt_tokens: decision.prompt_tokens,
            books: decision.books,
            chosen,
            rejection,
            cached_tokens,
            predicted_ttft_seconds: predicted_ttft.as_ref().map(Duration::as_secs_f64),
            runner_up: runner_up.map(|(rank, _)| rank),
            margin: runner_up.map(|(_, margin)| margin),
        }
    }
}

/// The eligible rank with the lowest cost beside the chosen one, and how much higher its cost is.
fn runner_up(explanation: &Explanation, chosen: WorkerRank) -> Option<(WorkerRank, f64)> {
    let compares_costs = matches!(explanation.policy, Policy::Kv | Policy::Latency);
    let is_chosen = |row: &&ExplainedRank| row.facts.rank == chosen;
    let cost = explanation.ranks.iter().find(is_chosen).filter(|_| compares_costs)?.cost_max;
    let others = explanation.ranks.iter().filter(|row| !is_chosen(row) && row.excluded_by.is_none());
    let next = others.min_by(|a, b| a.cost_max.total_cmp(&b.cost_max))?;
    Some((next.facts.rank, next.cost_max - cost))
}

fn replay(explains: impl Fn(u64, &str) -> bool + Send + 'static) -> Replay {
    Replay::following(|bytes| serde_json::from_slice(bytes).map_err(|error| error.to_string())).explaining(explains)
}
