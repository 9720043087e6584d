//! Levels and sentences derived from the facts of ranks and models. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use pointsman::engine_load::EngineLoadFact;
use pointsman::health::{HealthState, RankHealth};
use pointsman::ingest::StreamState;
use pointsman::protocol::WorkerRank;
use pointsman::{KvSourceStatus, WorkerEntry};
use serde::{Deserialize, Serialize};

use super::{ClassState, ReplicaState};

/// Expected prefill wait on the least loaded rank from which a model is overloaded.
pub const OVERLOAD_WAIT: Duration = Duration::from_secs(2);

/// Requests that wait in the engine with the fewest from which a model is overloaded.
pub const OVERLOAD_ENGINE_WAITING: u32 = 4;

/// Age of the oldest waiting request from which a queue is a problem.
pub const QUEUE_AGE_SECONDS: f64 = 2.0;

/// Maximum number of problems in a sentence.
const CLAUSES_MAX: usize = 3;

/// Seriousness of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// No problem.
    #[default]
    Ok,
    /// A state that an operator has caused, or that ends by itself.
    Notice,
    /// Reduced service or reduced cache hits.
    Warning,
    /// No service by a rank or by a model.
    Critical,
}

impl Level {
    /// Name in the encoding and on displays.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Its level.
    pub level: Level,
    /// Description, without the rank.
    pub text: String,
}

/// The most serious problem of a rank.
#[derive(Clone, Copy, Debug)]
pub struct RankProblem<'a> {
    /// Its rank.
    pub rank: WorkerRank,
    /// The problem.
    pub problem: &'a Problem,
}

impl Problem {
    fn new(level: Level, text: impl Into<String>) -> Self {
        Self { level, text: text.into() }
    }
}

/// Facts about one rank.
#[derive(Clone, Copy, Debug)]
pub struct RankFacts<'a> {
    /// Its worker.
    pub worker: &'a WorkerEntry,
    /// Health; `None` if the health actor did not respond.
    pub health: Option<&'a RankHealth>,
    /// KV event stream, for a rank with one.
    pub events: Option<&'a KvSourceStatus>,
    /// Load as reported by the engine.
    pub engine: Option<&'a EngineLoadFact>,
    /// Whether its index contents were lost.
    pub is_cold: bool,
}

/// Status of a rank and its problems, the most serious first.
#[must_use]
pub fn rank(facts: &RankFacts<'_>) -> (&'static str, Vec<Problem>) {
    let mut problems = Vec::new();
    let mut status = "serving";
    if facts.worker.cordoned {
        status = "cordoned";
        problems.push(Problem::new(Level::Notice, "cordoned"));
    }
    if facts.worker.draining {
        status = "draining";
        problems.push(Problem::new(Level::Notice, "draining"));
    }
    if let Some(RankHealth { state, reason, .. }) = facts.health {
        let (name, level) = match state {
            HealthState::Healthy => ("", Level::Ok),
            HealthState::Suspected => ("suspected", Level::Warning),
            HealthState::Refusing { .. } => ("refusing", Level::Warning),
            HealthState::Ejected { .. } => ("ejected", Level::Critical),
        };
        if level > Level::Ok {
            status = name;
            problems.push(Problem::new(level, format!("{name}: {reason}")));
        }
    }
    problems.extend(facts.events.and_then(of_events));
    if facts.is_cold {
        problems.push(Problem::new(Level::Warning, "index contents lost"));
    }
    if facts.engine.is_some_and(|engine| engine.is_stale) {
        problems.push(Problem::new(Level::Notice, "no recent load report of the engine"));
    }
    problems.sort_by_key(|problem| Reverse(problem.level));
    (status, problems)
}

fn of_events(events: &KvSourceStatus) -> Option<Problem> {
    let state = events.state;
    let reason = events.reason.as_deref();
    if !events.connected {
        let error = events.last_error.as_deref().or(reason).unwrap_or("no connection yet");
        return Some(Problem::new(Level::Warning, format!("KV event stream not connected: {error}")));
    }
    let level = match state {
        StreamState::Live => return None,
        StreamState::Recovering => Level::Notice,
        // An engine without requests has nothing to publish.
        StreamState::Silent if reason.is_none() => return None,
        StreamState::Cold | StreamState::Mismatched | StreamState::Silent => Level::Warning,
    };
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    Some(Problem::new(level, format!("KV events {}{reason}", state.name())))
}

/// Facts about one model, besides its ranks.
#[derive(Clone, Copy, Debug)]
pub struct ModelFacts<'a> {
    /// Reason if the router is down.
    pub down: Option<&'a str>,
    /// Registered ranks.
    pub registered: usize,
    /// Ranks that can serve.
    pub eligible: usize,
    /// Shortest expected prefill wait of the ranks that can serve.
    pub least_wait: Duration,
    /// Fewest requests that wait in the engine of a rank that can serve; 0 if an engine does not report them.
    pub least_engine_waiting: u32,
    /// Booked requests.
    pub active_requests: u64,
    /// Waiting requests by class.
    pub queue: &'a [ClassState],
    /// Other replicas.
    pub replicas: &'a [ReplicaState],
    /// Further problems, of discovery or of predictions.
    pub others: &'a [String],
}

/// Level and state of a model in one sentence, given the most serious problem of each rank with one.
#[must_use]
pub fn model(facts: &ModelFacts<'_>, rank_problems: &[RankProblem<'_>]) -> (Level, String) {
    let ModelFacts { registered, eligible, .. } = *facts;
    let mut problems = Vec::new();
    if let Some(down) = facts.down {
        problems.push(Problem::new(Level::Critical, down));
    } else if registered == 0 {
        problems.push(Problem::new(Level::Critical, "no worker is registered"));
    } else if eligible == 0 {
        problems.push(Problem::new(Level::Critical, "no rank can serve"));
    }
    problems.extend(of_load(facts));
    problems.extend(counted(rank_problems, registered));
    let silent = facts.replicas.iter().filter(|replica| replica.state == "silent").count();
    if silent > 0 {
        problems.push(Problem::new(Level::Warning, format!("{} silent", counted_noun(silent, "replica"))));
    }
    problems.extend(facts.others.iter().map(|text| Problem::new(Level::Warning, text.as_str())));
    problems.sort_by_key(|problem| Reverse(problem.level));
    let Some(level) = problems.first().map(|problem| problem.level) else {
        let active = counted_noun(usize::try_from(facts.active_requests).unwrap_or(usize::MAX), "active request");
        let sentence = match registered {
            1 => format!("The rank serves, with {active}."),
            _ => format!("All {registered} ranks serve, with {active}."),
        };
        return (Level::Ok, sentence);
    };
    let rest = problems.len().saturating_sub(CLAUSES_MAX);
    let clauses: Vec<&str> = problems.iter().take(CLAUSES_MAX).map(|problem| problem.text.as_str()).collect();
    let rest = if rest > 0 { format!("; {}", counted_noun(rest, "further problem")) } else { String::new() };
    (level, format!("{}{rest}.", capitalized(&clauses.join("; "))))
}

/// Overload by the queue, by the backlog of every rank, or by the queues of the engines.
fn of_load(facts: &ModelFacts<'_>) -> Option<Problem> {
    let waiting: u64 = facts.queue.iter().map(|class| class.requests).sum();
    let oldest = facts.queue.iter().filter_map(|class| class.oldest_age_seconds).fold(0.0, f64::max);
    if waiting > 0 {
        let (prefix, level) =
            if oldest >= QUEUE_AGE_SECONDS { ("overloaded: ", Level::Warning) } else { ("", Level::Notice) };
        let waiting = counted_noun(usize::try_from(waiting).unwrap_or(usize::MAX), "waiting request");
        return Some(Problem::new(level, format!("{prefix}{waiting}, the oldest for {oldest:.1} s")));
    }
    if facts.eligible == 0 {
        return None;
    }
    if facts.least_wait >= OVERLOAD_WAIT {
        let wait = facts.least_wait.as_secs_f64();
        let text = format!("overloaded: every rank has at least {wait:.1} s of prefill left");
        return Some(Problem::new(Level::Warning, text));
    }
    let waiting = facts.least_engine_waiting;
    (waiting >= OVERLOAD_ENGINE_WAITING).then(|| {
        let text = format!("overloaded: at least {waiting} requests wait in the engine of every rank");
        Problem::new(Level::Warning, text)
    })
}

/// The problems of ranks, each once with its rank or the number of its ranks.
fn counted(problems: &[RankProblem<'_>], registered: usize) -> Vec<Problem> {
    let mut ranks = BTreeMap::<(Reverse<Level>, String), Vec<WorkerRank>>::new();
    for RankProblem { rank, problem } in problems {
        ranks.entry((Reverse(problem.level), shortened(&problem.text))).or_default().push(*rank);
    }
    let shown = |((level, text), ranks): ((Reverse<Level>, String), Vec<WorkerRank>)| {
        let who = match ranks.as_slice() {
            [rank] => format!("rank {rank}"),
            ranks => format!("{} of {}", ranks.len(), counted_noun(registered, "rank")),
        };
        Problem::new(level.0, format!("{text} ({who})"))
    };
    ranks.into_iter().map(shown).collect()
}

/// Without the number of failures, which differs between ranks with the same problem.
fn shortened(text: &str) -> String {
    match (text.split_once(": "), text.rsplit_once("the last: ")) {
        (Some((status, _)), Some((_, last))) => format!("{status}: {last}"),
        _ => text.to_owned(),
    }
}

fn counted_noun(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::{WorkerConfig, WorkerId};

    use super::*;

    fn entry(draining: bool, cordoned: bool) -> WorkerEntry {
        let (worker, ranks) = (WorkerId(1), vec![WorkerRank::new(WorkerId(1), 0)]);
        WorkerEntry { worker, config: WorkerConfig::at("http://e"), ranks, draining, cordoned }
    }

    fn events(connected: bool, state: StreamState, reason: Option<&str>) -> KvSourceStatus {
        KvSourceStatus {
            rank: WorkerRank::new(WorkerId(1), 0),
            endpoint: "tcp://e:1".to_owned(),
            connected,
            caught_up: connected,
            state,
            reason: reason.map(str::to_owned),
            last_error: None,
            applied: None,
            messages: 0,
            message_age: None,
            restore: None,
            audit: None,
        }
    }

    fn texts(problems: &[Problem]) -> Vec<(Level, &str)> {
        problems.iter().map(|problem| (problem.level, problem.text.as_str())).collect()
    }

    const IDLE: ModelFacts<'static> = ModelFacts {
        down: None,
        registered: 8,
        eligible: 8,
        least_wait: Duration::ZERO,
        least_engine_waiting: 0,
        active_requests: 3,
        queue: &[],
        replicas: &[],
        others: &[],
    };

    #[test]
    fn a_rank_without_problems_serves() {
        let worker = entry(false, false);
        let healthy = RankHealth { rank: worker.ranks[0], state: HealthState::Healthy, reason: String::new() };
        for events in [None, Some(events(true, StreamState::Live, None)), Some(events(true, StreamState::Silent, None))]
        {
            let facts = RankFacts {
                worker: &worker,
                health: Some(&healthy),
                events: events.as_ref(),
                engine: None,
                is_cold: false,
            };
            assert_eq!(rank(&facts), ("serving", Vec::new()));
        }
    }

    #[test]
    fn the_most_serious_problem_of_a_rank_comes_first() {
        let worker = entry(false, true);
        let reason = "cannot connect".to_owned();
        let ejected = RankHealth { rank: worker.ranks[0], state: HealthState::Ejected { until: None }, reason };
        let events = events(false, StreamState::Silent, None);
        let facts =
            RankFacts { worker: &worker, health: Some(&ejected), events: Some(&events), engine: None, is_cold: true };
        let (status, problems) = rank(&facts);
        assert_eq!(status, "ejected");
        let expected = [
            (Level::Critical, "ejected: cannot connect"),
            (Level::Warning, "KV event stream not connected: no connection yet"),
            (Level::Warning, "index contents lost"),
            (Level::Notice, "cordoned"),
        ];
        assert_eq!(texts(&problems), expected);
    }

    #[test]
    fn a_model_without_problems_is_ok() {
        assert_eq!(model(&IDLE, &[]), (Level::Ok, "All 8 ranks serve, with 3 active requests.".to_owned()));
        let one = ModelFacts { registered: 1, eligible: 1, active_requests: 1, ..IDLE };
        assert_eq!(model(&one, &[]).1, "The rank serves, with 1 active request.");
    }

    #[test]
    fn equal_problems_of_ranks_are_counted() {
        let wrong = Problem::new(Level::Warning, "KV events mismatched: the engine's block size is 32");
        let dead = [3, 4].map(|n| {
            Problem::new(Level::Critical, format!("ejected: {n} requests in a row failed, the last: cannot connect"))
        });
        let problems = [&dead[0], &wrong, &dead[1]];
        let problems: Vec<_> = (0..)
            .zip(problems)
            .map(|(n, problem)| RankProblem { rank: WorkerRank::new(WorkerId(n), 0), problem })
            .collect();
        let (level, sentence) = model(&IDLE, &problems);
        assert_eq!(level, Level::Critical);
        let expected = "Ejected: cannot connect (2 of 8 ranks); KV events mismatched: the engine's block size is 32 \
                        (rank 1/0).";
        assert_eq!(sentence, expected);
    }

    #[test]
    fn a_long_queue_or_a_backlog_everywhere_is_overload() {
        let class = |requests, age| ClassState {
            class: "default".to_owned(),
            requests,
            tokens: 0,
            oldest_age_seconds: Some(age),
        };
        for (age, expected) in [
            (0.4, (Level::Notice, "1 waiting request, the oldest for 0.4 s.")),
            (8.0, (Level::Warning, "Overloaded: 1 waiting request, the oldest for 8.0 s.")),
        ] {
            let (level, sentence) = model(&ModelFacts { queue: &[class(1, age)], ..IDLE }, &[]);
            assert_eq!((level, sentence.as_str()), expected);
        }
        let (level, sentence) = model(&ModelFacts { least_wait: Duration::from_secs(3), ..IDLE }, &[]);
        let expected = (Level::Warning, "Overloaded: every rank has at least 3.0 s of prefill left.");
        assert_eq!((level, sentence.as_str()), expected);
        let (level, _) = model(&ModelFacts { least_engine_waiting: 3, ..IDLE }, &[]);
        assert_eq!(level, Level::Ok);
        let (level, sentence) = model(&ModelFacts { least_engine_waiting: 4, ..IDLE }, &[]);
        let expected = (Level::Warning, "Overloaded: at least 4 requests wait in the engine of every rank.");
        assert_eq!((level, sentence.as_str()), expected);
    }

    #[test]
    fn a_model_that_serves_nobody_is_critical() {
        for (facts, expected) in [
            (ModelFacts { down: Some("the router is shut down"), ..IDLE }, "The router is shut down."),
            (ModelFacts { registered: 0, eligible: 0, ..IDLE }, "No worker is registered."),
            (ModelFacts { eligible: 0, ..IDLE }, "No rank can serve."),
        ] {
            let (level, sentence) = model(&facts, &[]);
            assert_eq!((level, sentence.as_str()), (Level::Critical, expected));
        }
    }
}
