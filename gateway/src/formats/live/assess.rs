//! Levels and sentences derived from the facts of ranks and models. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use pointsman::{EngineLoadFact, HealthState, KvSourceStatus, RankHealth, StreamState, WorkerEntry, named};
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

named! {
/// Seriousness of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// No problem.
    #[default]
    Ok = "ok",
    /// A state that an operator has caused, or that ends by itself.
    Notice = "notice",
    /// Reduced service or reduced cache hits.
    Warning = "warning",
    /// No service by a rank or by a model.
    Critical = "critical",
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
#[derive(Clone, Debug)]
pub struct RankProblem {
    /// Name of its worker.
    pub engine: String,
    /// Name of the rank.
    pub name: String,
    /// The problem.
    pub problem: Problem,
}

/// An engine that discovery names and that is not registered, or cannot be probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryProblem {
    /// Name of the engine, or of the source.
    pub engine: String,
    /// Whether it is registered.
    pub has_joined: bool,
    /// Cause.
    pub cause: String,
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
            HealthState::Asleep => ("asleep", Level::Notice),
            HealthState::Suspected => ("suspected", Level::Warning),
            HealthState::Stalled { .. } => ("stalled", Level::Warning),
            HealthState::Refusing { .. } => ("refusing", Level::Warning),
            HealthState::Ejected { .. } => ("ejected", Level::Critical),
        };
        if level > Level::Ok {
            status = name;
            problems.push(Problem::new(level, format!("{name}: {reason}")));
        }
    }
    // An engine that does not answer sends neither events nor reports.
    let is_silent =
        status == "ejected" && problems.last().is_some_and(|problem| Complaint::of(&problem.text).is_silent);
    problems.extend(facts.events.filter(|events| events.connected || !is_silent).and_then(of_events));
    if facts.is_cold {
        problems.push(Problem::new(Level::Warning, "index contents lost"));
    }
    if !is_silent && facts.engine.is_some_and(|engine| engine.is_stale) {
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
    /// Registered workers.
    pub engines: usize,
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
    /// Problems of discovery.
    pub discovery: &'a [DiscoveryProblem],
    /// Further problems, such as of predictions.
    pub others: &'a [String],
}

/// Level and state of a model in one sentence, given the most serious problem of each rank with one: each cause once, with
/// its engines or ranks, and the consequence last.
pub fn model(facts: &ModelFacts<'_>, rank_problems: &[RankProblem]) -> (Level, String) {
    let ModelFacts { registered, eligible, .. } = *facts;
    let mut problems = Vec::new();
    if let Some(down) = facts.down {
        problems.push(Problem::new(Level::Critical, down));
    } else if registered == 0 {
        problems.push(Problem::new(Level::Critical, "no worker is registered"));
    }
    problems.extend(of_load(facts));
    problems.extend(of_ranks(rank_problems, facts));
    problems.extend(of_discovery(facts.discovery));
    let silent = facts.replicas.iter().filter(|replica| replica.state == "silent").count();
    if silent > 0 {
        problems.push(Problem::new(Level::Warning, format!("{} silent", counted_noun(silent, "replica"))));
    }
    problems.extend(facts.others.iter().map(|text| Problem::new(Level::Warning, text.as_str())));
    problems.sort_by_key(|problem| Reverse(problem.level));
    let serves_nobody = facts.down.is_none() && registered > 0 && eligible == 0;
    let level = problems.first().map(|problem| problem.level).max(serves_nobody.then_some(Level::Critical));
    let Some(level) = level else {
        let active = counted_noun(usize::try_from(facts.active_requests).unwrap_or(usize::MAX), "active request");
        let sentence = match registered {
            1 => format!("The rank serves, with {active}."),
            _ => format!("All {registered} ranks serve, with {active}."),
        };
        return (Level::Ok, sentence);
    };
    let rest = problems.len().saturating_sub(CLAUSES_MAX);
    let mut clauses: Vec<String> = problems.into_iter().take(CLAUSES_MAX).map(|problem| problem.text).collect();
    if rest > 0 {
        clauses.push(counted_noun(rest, "further problem"));
    }
    if serves_nobody {
        clauses.push("no rank can serve".to_owned());
    } else if facts.down.is_none() && eligible < registered {
        clauses.push(format!("{eligible} of {registered} ranks {}", if eligible == 1 { "serves" } else { "serve" }));
    }
    (level, format!("{}.", capitalized(&clauses.join("; "))))
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

/// The problems of ranks, each once with its engines or ranks.
fn of_ranks(problems: &[RankProblem], facts: &ModelFacts<'_>) -> Vec<Problem> {
    let mut groups = BTreeMap::<(Reverse<Level>, Complaint), Vec<&RankProblem>>::new();
    for known in problems {
        groups.entry((Reverse(known.problem.level), Complaint::of(&known.problem.text))).or_default().push(known);
    }
    let shown = |((level, complaint), ranks): ((Reverse<Level>, Complaint), Vec<&RankProblem>)| {
        let engines: BTreeSet<&str> = ranks.iter().map(|rank| rank.engine.as_str()).collect();
        let is_of_engines = complaint.is_of_engine || facts.registered == facts.engines;
        let subject = match (is_of_engines, ranks.as_slice()) {
            (true, _) => Subject { noun: "engine", names: engines.into_iter().collect(), of: facts.engines },
            (false, ranks) => {
                let names = ranks.iter().map(|rank| rank.name.as_str()).collect();
                Subject { noun: "rank", names, of: facts.registered }
            }
        };
        Problem::new(level.0, complaint.clause(&subject))
    };
    groups.into_iter().map(shown).collect()
}

/// Problems of discovery, each cause once with its engines.
fn of_discovery(problems: &[DiscoveryProblem]) -> Vec<Problem> {
    let mut groups = BTreeMap::<(bool, String), BTreeSet<&str>>::new();
    for DiscoveryProblem { engine, has_joined, cause } in problems {
        groups.entry((*has_joined, cause_of(cause))).or_default().insert(engine);
    }
    let shown = |((has_joined, cause), engines): ((bool, String), BTreeSet<&str>)| {
        let subject = Subject { noun: "engine", of: 0, names: engines.into_iter().collect() };
        let verb = match (has_joined, subject.names.len()) {
            (true, _) => "cannot be probed",
            (false, 1) => "has not joined",
            (false, _) => "have not joined",
        };
        Problem::new(Level::Warning, format!("{subject} {verb} ({cause})"))
    };
    groups.into_iter().map(shown).collect()
}

/// A problem of a rank, apart from its rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Complaint {
    /// Verb in the singular and the plural; absent for a description.
    verb: Option<(&'static str, &'static str)>,
    text: String,
    /// Whether the engine does not answer.
    is_silent: bool,
    /// Whether all ranks of an engine have it alike.
    is_of_engine: bool,
}

impl Complaint {
    fn of(problem: &str) -> Self {
        let (status, reason) = problem.split_once(": ").unwrap_or((problem, ""));
        let cause = cause_of(reason);
        let is_silent = UNREACHABLE.iter().any(|unreachable| cause.starts_with(unreachable));
        let verb = match status {
            "ejected" | "suspected" if is_silent => ("does not answer", "do not answer"),
            "ejected" => ("is ejected", "are ejected"),
            "suspected" => ("is suspected", "are suspected"),
            "stalled" => ("is stalled", "are stalled"),
            "refusing" => ("refuses requests", "refuse requests"),
            "cordoned" => ("is cordoned", "are cordoned"),
            "draining" => ("is draining", "are draining"),
            "KV event stream not connected" => ("has no KV event stream", "have no KV event stream"),
            _ => return Self { verb: None, text: problem.to_owned(), is_silent: false, is_of_engine: false },
        };
        Self { verb: Some(verb), text: cause, is_silent, is_of_engine: is_silent || reason.is_empty() }
    }

    fn clause(&self, subject: &Subject<'_>) -> String {
        let Some((one, many)) = self.verb else { return format!("{subject:#}: {}", self.text) };
        let verb = if subject.names.len() == 1 { one } else { many };
        if self.text.is_empty() { format!("{subject} {verb}") } else { format!("{subject} {verb} ({})", self.text) }
    }
}

/// Beginnings of the causes of an engine that does not answer.
const UNREACHABLE: [&str; 6] =
    ["connection refused", "could not connect", "no connection", "no response", "timed out", "timeout"];

/// Engines or ranks with a problem. The alternate form of a single one is its name alone.
struct Subject<'a> {
    noun: &'static str,
    names: Vec<&'a str>,
    /// Number of all of them; 0 if unknown.
    of: usize,
}

impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { noun, names, of } = self;
        match (names.as_slice(), of) {
            ([name], 0 | 1) => write!(f, "{noun} {name}"),
            ([name], _) if f.alternate() => write!(f, "{noun} {name}"),
            ([name], of) => write!(f, "1 of {of} {noun}s, {name},"),
            (names, 0) => write!(f, "{} {noun}s", names.len()),
            (names, of) if names.len() == *of => write!(f, "all {of} {noun}s"),
            (names, of) => write!(f, "{} of {of} {noun}s", names.len()),
        }
    }
}

/// The last cause in a reason, without its path, its number at the operating system, and counts of failures.
fn cause_of(reason: &str) -> String {
    let first = reason.split_once("the last: ").map_or(reason, |(_, last)| last.split("; ").next().unwrap_or(last));
    let mut cause = first.split(" (os error").next().unwrap_or(first);
    while let Some((_, rest)) =
        cause.split_once(": ").filter(|(head, _)| head.starts_with('/') || *head == "cannot connect")
    {
        cause = rest;
    }
    // "Connection refused", but not "HTTP" or "SSL".
    let mut chars = cause.chars();
    match (chars.next(), chars.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            first.to_lowercase().chain(cause.chars().skip(1)).collect()
        }
        _ => cause.to_owned(),
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
    use pointsman::protocol::{WorkerConfig, WorkerId, WorkerRank};

    use super::*;

    fn entry(draining: bool, cordoned: bool) -> WorkerEntry {
        let (worker, ranks) = (WorkerId(1), vec![WorkerRank::new(WorkerId(1), 0)]);
        WorkerEntry { worker, config: WorkerConfig::at("http://e"), ranks, draining, cordoned }
    }

    fn events(connected: bool, state: StreamState, reason: Option<&str>) -> KvSourceStatus {
        KvSourceStatus {
            endpoint: "tcp://e:1".to_owned(),
            connected,
            state,
            reason: reason.map(str::to_owned),
            ..KvSourceStatus::default()
        }
    }

    fn texts(problems: &[Problem]) -> Vec<(Level, &str)> {
        problems.iter().map(|problem| (problem.level, problem.text.as_str())).collect()
    }

    const IDLE: ModelFacts<'static> = ModelFacts {
        down: None,
        engines: 4,
        registered: 8,
        eligible: 8,
        least_wait: Duration::ZERO,
        least_engine_waiting: 0,
        active_requests: 3,
        queue: &[],
        replicas: &[],
        discovery: &[],
        others: &[],
    };

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
    fn an_engine_that_does_not_answer_has_no_further_problems() {
        let worker = entry(false, false);
        let reason = "3 probes in a row failed, the last: cannot connect: Connection refused (os error 111)".to_owned();
        let ejected = RankHealth { rank: worker.ranks[0], state: HealthState::Ejected { until: None }, reason };
        let events = events(false, StreamState::Silent, None);
        let facts =
            RankFacts { worker: &worker, health: Some(&ejected), events: Some(&events), engine: None, is_cold: false };
        assert_eq!(rank(&facts).1.len(), 1);
    }

    /// Sentence about ranks `ENGINE/RANK` with these problems.
    fn sentence(facts: &ModelFacts<'_>, problems: &[(&'static str, Level, &str)]) -> String {
        let known = problems.iter().map(|(name, level, text)| {
            let engine = name[..name.len() - 2].to_owned();
            RankProblem { engine, name: (*name).to_owned(), problem: Problem::new(*level, *text) }
        });
        model(facts, &known.collect::<Vec<_>>()).1
    }

    #[test]
    fn a_sentence_has_each_cause_once_and_the_consequence() {
        let down = |name, n| {
            let text = match n {
                0 => {
                    "ejected: 3 probes in a row failed, the last: /health: cannot connect: Connection refused (os error 111)"
                }
                _ => {
                    "ejected: 4 probes in a row failed, the last: Connection refused (os error 111); 5 requests in a row \
                      failed, the last: could not connect"
                }
            };
            (name, Level::Critical, text)
        };
        let facts = ModelFacts { eligible: 6, ..IDLE };
        assert_eq!(
            sentence(&facts, &[down("a:1/0", 0), down("a:1/1", 1)]),
            "1 of 4 engines, a:1, does not answer (connection refused); 6 of 8 ranks serve."
        );
        let facts = ModelFacts { eligible: 4, ..IDLE };
        let two = [down("a:1/0", 0), down("a:1/1", 0), down("b:1/0", 0), down("b:1/1", 1)];
        assert_eq!(sentence(&facts, &two), "2 of 4 engines do not answer (connection refused); 4 of 8 ranks serve.");
        let facts = ModelFacts { engines: 1, registered: 2, eligible: 0, ..IDLE };
        assert_eq!(
            sentence(&facts, &[down("a:1/0", 0), down("a:1/1", 0)]),
            "Engine a:1 does not answer (connection refused); no rank can serve."
        );
        let unread = "KV event stream not connected: cannot connect: Connection refused (os error 111)";
        assert_eq!(
            sentence(&IDLE, &[("a:1/0", Level::Warning, unread), ("a:1/1", Level::Warning, unread)]),
            "1 of 4 engines, a:1, has no KV event stream (connection refused)."
        );
        let wrong = ("b:1/1", Level::Warning, "KV events mismatched: the engine's block size is 32");
        assert_eq!(sentence(&IDLE, &[wrong]), "Rank b:1/1: KV events mismatched: the engine's block size is 32.");
        let facts = ModelFacts { eligible: 7, ..IDLE };
        let failing = ("a:1/0", Level::Critical, "ejected: 5 requests in a row failed, the last: status 500");
        assert_eq!(
            sentence(&facts, &[failing, ("b:1/0", Level::Notice, "cordoned")]),
            "1 of 8 ranks, a:1/0, is ejected (status 500); 1 of 4 engines, b:1, is cordoned; 7 of 8 ranks serve."
        );
    }

    #[test]
    fn engines_that_discovery_cannot_add_are_named_with_their_cause() {
        let problem = |engine: &str, has_joined| DiscoveryProblem {
            engine: engine.to_owned(),
            has_joined,
            cause: "/server_info: cannot connect: Connection refused (os error 111)".to_owned(),
        };
        let discovery = [problem("a:1", false)];
        let one = ModelFacts { discovery: &discovery, ..IDLE };
        assert_eq!(model(&one, &[]), (Level::Warning, "Engine a:1 has not joined (connection refused).".to_owned()));
        let discovery = [problem("a:1", false), problem("b:1", false), problem("c:1", true)];
        let three = ModelFacts { discovery: &discovery, registered: 0, eligible: 0, ..IDLE };
        assert_eq!(
            model(&three, &[]).1,
            "No worker is registered; 2 engines have not joined (connection refused); engine c:1 cannot be probed \
             (connection refused)."
        );
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
