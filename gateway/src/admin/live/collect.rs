//! Collects a [`LiveSnapshot`] from the routers of all models.
//!
//! Reads the published state of the routers. Two facts need a message to an actor, and a hung actor delays a snapshot by
//! at most [`REPLY_WAIT`].

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use pointsman::protocol::{Timestamp, WorkerRank};
use pointsman::{DiscoveryStatus, EngineLoadFact, Health, KvSourceStatus, RankHealth, RankReport, Router, WorkerEntry};
use tokio::time::{Instant, timeout};

use super::window::{self, HitWindow};
use crate::formats::live::assess;
use crate::formats::live::assess::{DiscoveryProblem, Level, ModelFacts, Problem, RankFacts, RankProblem};
use crate::formats::live::names::{rank_name, worker_name};
use crate::formats::live::{
    ClassState, EngineState, EventsState, HitsState, LegPair, LegResult, LegsState, LiveSnapshot, ModelState,
    RANKS_MAX, RankState, ReplicaState, ShadowState,
};
use crate::pools::disaggregation::PrefillResult;
use crate::pools::model::{Model, PrefillSide};
use crate::pools::rank_names::RankNames;
use crate::pools::serving::Pools;

/// Longest wait for the reply of an actor.
const REPLY_WAIT: Duration = Duration::from_millis(200);

/// State between snapshots, by model.
#[derive(Default)]
pub(super) struct Windows(BTreeMap<String, HitWindow>);

/// State of all models. `number` is that of the snapshot.
pub(super) async fn snapshot(pools: &Pools, windows: &mut Windows, number: u64, at_unix_ms: u64) -> LiveSnapshot {
    let mut models = Vec::new();
    windows.0.retain(|name, _| pools.models.all().iter().any(|model| model.settings.name == *name));
    for model in pools.models.all() {
        let window = windows.0.entry(model.settings.name.clone()).or_default();
        models.push(state_of(model, window).await);
    }
    let level = models.iter().map(|model| model.level).max().unwrap_or(Level::Critical);
    let sentence = match models.as_slice() {
        [] => "No model is configured.".to_owned(),
        [model] => model.sentence.clone(),
        // One sentence per model with a problem.
        models => {
            let problems = models.iter().filter(|model| model.level > Level::Ok);
            let problems: Vec<String> = problems.map(|model| format!("{}: {}", model.name, model.sentence)).collect();
            match problems.is_empty() {
                true => format!("All {} models serve.", models.len()),
                false => problems.join(" "),
            }
        }
    };
    LiveSnapshot { version: env!("CARGO_PKG_VERSION").to_owned(), at_unix_ms, number, level, sentence, models }
}

/// Facts about the ranks of one router.
struct Facts {
    workers: std::sync::Arc<[WorkerEntry]>,
    health: Option<BTreeMap<WorkerRank, RankHealth>>,
    events: BTreeMap<WorkerRank, KvSourceStatus>,
    engines: BTreeMap<WorkerRank, EngineLoadFact>,
    reports: BTreeMap<WorkerRank, RankReport>,
    router: Health,
    now: Timestamp,
}

impl Facts {
    async fn of(router: &Router) -> Self {
        let health = timeout(REPLY_WAIT, router.rank_health()).await.ok().and_then(Result::ok);
        Self {
            workers: router.workers(),
            health: health.map(|health| health.into_iter().map(|health| (health.rank, health)).collect()),
            events: router.kv_sources().into_iter().map(|source| (source.rank, source)).collect(),
            engines: router.engine_loads().into_iter().filter_map(|(rank, load)| Some((rank, load?))).collect(),
            reports: router.rank_reports().into_iter().map(|report| (report.rank, report)).collect(),
            router: router.health(),
            now: router.now(),
        }
    }

    /// Shortest expected prefill wait of the ranks without a serious problem.
    fn least_wait(&self, assessed: &[Assessed<'_>]) -> Duration {
        serving(assessed).map(|rank| self.wait(rank.rank)).min().unwrap_or_default()
    }

    /// Fewest requests that wait in the engine of a rank without a serious problem; 0 without a recent report.
    fn least_engine_waiting(&self, assessed: &[Assessed<'_>]) -> u32 {
        let engine = |rank: &Assessed<'_>| self.engines.get(&rank.rank).filter(|engine| !engine.is_stale);
        let waiting = |rank| engine(rank).and_then(|engine| engine.waiting).unwrap_or_default();
        serving(assessed).map(waiting).min().unwrap_or_default()
    }

    fn wait(&self, rank: WorkerRank) -> Duration {
        self.reports.get(&rank).map_or(Duration::ZERO, |report| report.prefill_wait)
    }
}

/// A rank with its problems.
struct Assessed<'a> {
    rank: WorkerRank,
    worker: &'a WorkerEntry,
    status: &'static str,
    problems: Vec<Problem>,
}

impl Assessed<'_> {
    fn name(&self) -> String {
        rank_name(&self.worker.config.endpoint, self.rank.rank)
    }

    fn level(&self) -> Level {
        self.problems.first().map_or(Level::Ok, |problem| problem.level)
    }
}

/// Ranks without a serious problem, of workers that take requests.
fn serving<'a, 'b>(assessed: &'a [Assessed<'b>]) -> impl Iterator<Item = &'a Assessed<'b>> {
    assessed.iter().filter(|rank| rank.level() < Level::Critical && rank.worker.takes_requests())
}

async fn state_of(model: &Model, window: &mut HitWindow) -> ModelState {
    let router = &model.router;
    let (facts, now) = (Facts::of(router).await, Instant::now());
    window.sample(&facts.reports, now);
    let pending = queue_of(router).await;
    let has_queue = pending.is_some();
    let queue = pending.filter(|_| router.config().queue.is_enabled()).unwrap_or_default();
    let replicas = replicas_of(router);
    let mut assessed: Vec<Assessed<'_>> =
        facts.workers.iter().flat_map(|worker| worker.ranks.iter().map(|rank| assess(&facts, worker, *rank))).collect();
    let names = RankNames::of(model);
    let others = other_sentences(model, &facts, &names, has_queue);
    let eligible = router.eligible_ranks();
    let down = facts.router.state.err().map(|down| down.to_string());
    let rank_problem = |rank: &Assessed<'_>| {
        let engine = worker_name(&rank.worker.config.endpoint).to_owned();
        Some(RankProblem { engine, name: rank.name(), problem: rank.problems.first()?.clone() })
    };
    let rank_problems: Vec<_> = assessed.iter().filter_map(rank_problem).collect();
    let (level, sentence) = assess::model(
        &ModelFacts {
            down: down.as_deref(),
            engines: facts.workers.len(),
            registered: assessed.len(),
            eligible,
            least_wait: facts.least_wait(&assessed),
            least_engine_waiting: facts.least_engine_waiting(&assessed),
            active_requests: facts.reports.values().map(|report| report.active_requests).sum(),
            queue: &queue,
            replicas: &replicas,
            discovery: &discovery_problems(router, &facts.workers, &rank_problems),
            others: &others,
        },
        &rank_problems,
    );
    let registered = assessed.len();
    let hits: BTreeMap<WorkerRank, HitsState> =
        facts.reports.values().map(|report| (report.rank, window.hits(report, now))).collect();
    // Whole powers of two of the wait, so that ranks with about the same load keep their places.
    let busy = |rank: &Assessed<'_>| facts.wait(rank.rank).as_secs().checked_ilog2().map_or(0, |log| log + 1);
    assessed.sort_by_key(|rank| (Reverse(rank.level()), Reverse(busy(rank)), rank.rank));
    let placements = hits.values().map(|hits| hits.placements).sum();
    let ranks = assessed.into_iter().take(RANKS_MAX).map(|rank| rank_state(&facts, rank, &hits)).collect();
    let (rates, course) = model.meters.activity.course();
    ModelState {
        name: model.settings.name.clone(),
        role: model.role.name().to_owned(),
        policy: router.config().policy.name().to_owned(),
        block_size: router.block_size(),
        level,
        sentence,
        leases: facts.router.leases as u64,
        ranks_registered: registered as u64,
        ranks_eligible: eligible as u64,
        ranks,
        rates,
        course,
        hits: window::sum(hits.into_values()),
        queue,
        replicas,
        decisions: model.meters.activity.decisions(),
        shadows: shadows_of(router, placements),
        legs: model.prefill.as_ref().map(|side| legs_of(side, &names)),
    }
}

fn replicas_of(router: &Router) -> Vec<ReplicaState> {
    let states = router.replica_peers().into_iter().map(|peer| ReplicaState {
        replica: peer.life.replica.to_string(),
        state: peer.state.name().to_owned(),
        summary_age_seconds: peer.summary_age.as_secs_f64(),
        weight: peer.weight,
    });
    states.collect()
}

/// Sentences about problems that no rank has.
fn other_sentences(model: &Model, facts: &Facts, names: &RankNames<'_>, has_queue: bool) -> Vec<String> {
    let mut others: Vec<String> = other_problems(facts).map(|problem| names.in_text(problem)).collect();
    let failing = |source: DiscoveryStatus| {
        let error = source.last_error.filter(|error| of_engine(error).is_none())?;
        Some(format!("discovery source {}: {error}", source.source))
    };
    others.extend(model.router.discovery().into_iter().filter_map(failing));
    others.extend(model.tokens.warnings());
    if facts.router.state.is_ok() && (facts.health.is_none() || !has_queue) {
        others.push("an actor of the router does not respond".to_owned());
    }
    others
}

fn assess<'a>(facts: &Facts, worker: &'a WorkerEntry, rank: WorkerRank) -> Assessed<'a> {
    let (status, problems) = assess::rank(&RankFacts {
        worker,
        health: facts.health.as_ref().and_then(|health| health.get(&rank)),
        events: facts.events.get(&rank),
        engine: facts.engines.get(&rank),
        is_cold: facts.router.cold.contains(&rank),
    });
    Assessed { rank, worker, status, problems }
}

/// Problems that no rank has: of predictions, of workers without events. Those of event streams are problems of their
/// ranks.
fn other_problems(facts: &Facts) -> impl Iterator<Item = &str> {
    let reasons: Vec<&str> = facts.events.values().filter_map(|source| source.reason.as_deref()).collect();
    let is_of_stream = move |problem: &&String| reasons.iter().any(|reason| problem.contains(reason));
    facts.router.problems.iter().filter(move |problem| !is_of_stream(problem)).map(String::as_str)
}

/// Problems of discovery, without those of engines whose ranks have problems of their own: the cause is the same.
fn discovery_problems(router: &Router, workers: &[WorkerEntry], ranks: &[RankProblem]) -> Vec<DiscoveryProblem> {
    let mut problems = Vec::new();
    for source in router.discovery() {
        let refused = source.refused.values().map(String::as_str);
        let errors = source.last_error.iter().flat_map(|error| error.split("; "));
        let errors = errors.chain(refused).filter_map(of_engine);
        for (engine, cause) in errors.map(|(url, cause)| (worker_name(url).to_owned(), cause)) {
            if ranks.iter().all(|rank| rank.engine != engine) {
                let has_joined = workers.iter().any(|entry| worker_name(&entry.config.endpoint) == engine);
                problems.push(DiscoveryProblem { engine, has_joined, cause: cause.to_owned() });
            }
        }
    }
    problems
}

/// The URL of an engine and the cause, of an error of discovery that names it.
fn of_engine(error: &str) -> Option<(&str, &str)> {
    error.split_once(": ").filter(|(url, _)| url.contains("://"))
}

fn rank_state(facts: &Facts, assessed: Assessed<'_>, hits: &BTreeMap<WorkerRank, HitsState>) -> RankState {
    let (name, level) = (assessed.name(), assessed.level());
    let Assessed { rank, worker, status, problems } = assessed;
    let report = facts.reports.get(&rank);
    RankState {
        name,
        worker: rank.worker.to_string(),
        rank: rank.rank,
        endpoint: worker.config.endpoint.clone(),
        level,
        status: status.to_owned(),
        problems: problems.into_iter().map(|problem| problem.text).collect(),
        active_requests: report.map_or(0, |report| report.active_requests),
        prefill_tokens: report.map_or(0, |report| report.prefill_tokens),
        prefill_wait_seconds: facts.wait(rank).as_secs_f64(),
        active_blocks: report.map_or(0, |report| report.active_blocks),
        total_blocks: worker.config.total_kv_blocks.map(u64::from),
        held_blocks: report.map_or(0, |report| report.held_blocks),
        hits: hits.get(&rank).copied().unwrap_or_default(),
        engine: facts.engines.get(&rank).map(|load| EngineState {
            running: load.running,
            waiting: load.waiting,
            kv_usage: load.kv_usage,
            age_seconds: load.age.as_secs_f64(),
            is_stale: load.is_stale,
        }),
        events: facts.events.get(&rank).map(|source| EventsState {
            state: source.state.name().to_owned(),
            is_connected: source.connected,
            messages: source.messages,
            message_age_seconds: source.message_at.map(|at| facts.now.since(at).as_secs_f64()),
        }),
    }
}

/// Waiting requests by class; `None` if the router does not reply.
async fn queue_of(router: &Router) -> Option<Vec<ClassState>> {
    let pending = timeout(REPLY_WAIT, router.pending()).await.ok().and_then(Result::ok)?;
    let classes = pending.iter().map(|pending| ClassState {
        class: pending.class.clone(),
        requests: pending.depth.requests,
        tokens: pending.depth.raw_tokens,
        oldest_age_seconds: pending.oldest_age.map(|age| age.as_secs_f64()),
    });
    Some(classes.collect())
}

#[expect(clippy::cast_precision_loss, reason = "means are shown with few digits")]
#[expect(clippy::cast_possible_truncation, reason = "the cast of a float saturates")]
fn shadows_of(router: &Router, placements: u64) -> Vec<ShadowState> {
    let shadows = router.shadow_totals().into_iter().map(|totals| {
        let mean = |seconds: f64| (totals.predictions > 0).then(|| seconds / totals.predictions as f64);
        let saved = i128::from(totals.chosen_cached_tokens) - i128::from(totals.cached_tokens);
        ShadowState {
            policy: totals.policy.to_owned(),
            decisions: totals.decisions,
            agreements: totals.agreements,
            saved_tokens: i64::try_from(saved).unwrap_or(i64::MAX),
            saved_tokens_estimate: (saved as f64 * placements as f64 / totals.decisions.max(1) as f64) as i64,
            chosen_ttft_seconds: mean(totals.chosen_ttft_seconds),
            ttft_seconds: mean(totals.ttft_seconds),
        }
    });
    shadows.collect()
}

fn legs_of(PrefillSide { model, pool }: &PrefillSide, names: &RankNames<'_>) -> LegsState {
    let prefill_names = RankNames::of(model);
    let mut pairs = pool.legs.pairs();
    pairs.sort_by_key(|(pair, legs)| (Reverse(*legs), *pair));
    pairs.truncate(RANKS_MAX);
    let pair = |((prefill, decode), requests): ((WorkerRank, WorkerRank), u64)| LegPair {
        prefill: prefill_names.name(prefill),
        decode: names.name(decode),
        requests,
    };
    let result = |(result, requests): (PrefillResult, u64)| LegResult { result: result.name().to_owned(), requests };
    LegsState {
        prefill_model: model.settings.name.clone(),
        results: pool.legs.results().into_iter().map(result).collect(),
        pairs: pairs.into_iter().map(pair).collect(),
    }
}
