//! Causes of unreadiness, and warnings, as sentences for `/ready` and for clients without a worker.
//!
//! Equal causes are counted instead of repeated, and none names a worker, because the response is public. The router's
//! reports provide the facts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use pointsman::config::EventMode;
use pointsman::error::RouteError;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{DiscoveryStatus, HealthState, KvSourceStatus, Rejection, Router, WorkerEntry};
use tokio::time::timeout;

use crate::formats::openai::ApiError;
use crate::pools::model::Model;

/// Timeout of the health query; without a response no rank counts as ejected.
const HEALTH_WAIT: Duration = Duration::from_secs(1);

/// Maximum listed causes.
const CAUSES_MAX: usize = 8;

/// Ejected ranks with their reasons, and the number of sleeping ones.
pub(super) async fn out_of_service(model: &Model) -> (BTreeMap<WorkerRank, String>, usize) {
    let Ok(Ok(report)) = timeout(HEALTH_WAIT, model.router.rank_health()).await else { return Default::default() };
    let asleep = report.iter().filter(|health| health.state == HealthState::Asleep).count();
    let ejected = report.into_iter().filter(|health| matches!(health.state, HealthState::Ejected { .. }));
    (ejected.map(|health| (health.rank, health.reason)).collect(), asleep)
}

/// Reasons why no rank of the model can serve, given the ejected ranks and the number of sleeping ones.
pub(super) fn of_no_rank(model: &Model, (ejected, asleep): (BTreeMap<WorkerRank, String>, usize)) -> Vec<String> {
    let workers = model.router.workers();
    let ranks_of = |is_of: fn(&&WorkerEntry) -> bool| -> usize {
        workers.iter().filter(is_of).map(|worker| worker.ranks.len()).sum()
    };
    let (draining, cordoned) = (ranks_of(|worker| worker.draining), ranks_of(|worker| worker.cordoned));
    let mut causes = Vec::new();
    if workers.is_empty() {
        causes.push("no workers are registered".to_owned());
    }
    for (n, state) in
        [(draining, "draining"), (cordoned, "cordoned"), (asleep, "asleep")].into_iter().filter(|(n, _)| *n > 0)
    {
        causes.push(format!("{} {state}", ranks(n)));
    }
    causes.extend(of_health(ejected.into_values()));
    causes.extend(of_discovery(&model.router.discovery()));
    causes.truncate(CAUSES_MAX);
    causes
}

/// Error of a request without a placement. If no worker is registered, it has the reasons of discovery.
pub(crate) fn placement_error(router: &Router, error: RouteError) -> ApiError {
    let causes = match &error {
        RouteError::Rejected(Rejection::NoRanks) => discovery_problems(&router.discovery(), true),
        _ => BTreeSet::new(),
    };
    let error = ApiError::from(error);
    if causes.is_empty() {
        return error;
    }
    let causes: Vec<String> = causes.into_iter().take(CAUSES_MAX).collect();
    ApiError { message: format!("{}: {}", error.message, causes.join("; ")), ..error }
}

/// Problems with the workers, the index and the tokens of a model, independent of readiness.
pub(super) fn warnings(model: &Model) -> Vec<String> {
    let mut warnings: Vec<String> = discovery_problems(&model.router.discovery(), false).into_iter().collect();
    if model.router.block_size_origin().is_assumed() {
        let tokens = model.router.block_size();
        warnings.push(format!("no worker reports a block size: {tokens} is assumed; router.block_size sets another"));
    }
    if model.router.config().events.mode == EventMode::On && model.router.config().has_index() {
        warnings.extend(of_unread(&model.router.workers()));
    }
    warnings.extend(of_stalled(model.router.stalled().len()));
    warnings.extend(of_sources(model.router.kv_sources()));
    warnings.extend(model.tokens.warnings());
    warnings.extend(of_unreported(&model.router.workers()));
    warnings.truncate(CAUSES_MAX);
    warnings
}

fn ranks(n: usize) -> String {
    if n == 1 { "1 rank".to_owned() } else { format!("{n} ranks") }
}

/// Ejected ranks by their last failure.
fn of_health(reasons: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts = BTreeMap::<String, usize>::new();
    for reason in reasons {
        let last = reason.rsplit_once("the last: ").map_or(reason.as_str(), |(_, last)| last);
        *counts.entry(without_addresses(last)).or_default() += 1;
    }
    counts.into_iter().map(|(reason, n)| format!("{} ejected: {reason}", ranks(n))).collect()
}

/// Unusable addresses of discovery.
fn of_discovery(sources: &[DiscoveryStatus]) -> Vec<String> {
    discovery_problems(sources, true).into_iter().map(|cause| format!("discovery: {cause}")).collect()
}

/// Reasons for which workers are rejected, and the last errors of sources if wanted.
fn discovery_problems(sources: &[DiscoveryStatus], with_errors: bool) -> BTreeSet<String> {
    let refused = sources.iter().flat_map(|source| source.refused.values());
    let refused = refused.map(|reason| format!("worker rejected: {}", without_addresses(reason)));
    let errors = sources.iter().filter_map(|source| source.last_error.as_deref()).filter(|_| with_errors);
    errors.map(without_addresses).chain(refused).collect()
}

/// Ranks without readable KV events.
fn of_unread(workers: &[WorkerEntry]) -> Option<String> {
    let all: Vec<_> =
        workers.iter().flat_map(|entry| entry.config.ranks(entry.worker).map(move |rank| (entry, rank))).collect();
    let is_read =
        |entry: &WorkerEntry, rank: WorkerRank| entry.config.kv_events_of(rank.rank).is_ok_and(|of| of.is_some());
    let unread = all.iter().filter(|(entry, rank)| !is_read(entry, *rank)).count();
    (unread > 0)
        .then(|| format!("{unread} of {} ranks have no KV event endpoint: their caches are not known", all.len()))
}

fn of_stalled(stalled: usize) -> Option<String> {
    (stalled > 0).then(|| format!("{} without progress, although first tokens are owed", ranks(stalled)))
}

/// Facts that engines do not report, by reason.
fn of_unreported(workers: &[WorkerEntry]) -> Vec<String> {
    let mut reasons = BTreeMap::<String, (BTreeSet<&str>, BTreeSet<WorkerId>)>::new();
    for entry in workers {
        for (fact, reason) in &entry.config.unreported {
            let (facts, without) = reasons.entry(without_addresses(reason)).or_default();
            facts.insert(fact);
            without.insert(entry.worker);
        }
    }
    let shown = |(reason, (facts, without)): (String, (BTreeSet<&str>, BTreeSet<WorkerId>))| {
        let facts = facts.into_iter().collect::<Vec<_>>().join(", ");
        format!("{} of {} workers do not report {facts}: {reason}", without.len(), workers.len())
    };
    reasons.into_iter().map(shown).collect()
}

/// Ranks with unusable KV events, by cause.
fn of_sources(sources: Vec<KvSourceStatus>) -> Vec<String> {
    let mut problems = BTreeMap::<&'static str, (usize, String)>::new();
    for source in sources {
        if let Some(reason) = source.reason {
            problems.entry(source.state.name()).or_insert((0, reason)).0 += 1;
        }
        if let Some(unused) = source.unused {
            problems.entry("partly unused").or_insert((0, unused)).0 += 1;
        }
    }
    let shown = |(state, (n, reason)): (&str, (usize, String))| {
        format!("KV events of {} {state}: {}", ranks(n), without_addresses(&reason))
    };
    problems.into_iter().map(shown).collect()
}

/// A sentence with "a worker" in place of each address.
fn without_addresses(text: &str) -> String {
    let is_address = |word: &str| word.contains("://") || word.parse::<SocketAddr>().is_ok();
    let shown = text.split(' ').map(|word| {
        let bare = word.trim_end_matches([',', ';', ':', '.', ')', '"']);
        if is_address(bare.trim_start_matches(['(', '"'])) {
            format!("a worker{}", &word[bare.len()..])
        } else {
            word.to_owned()
        }
    });
    shown.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerConfig;

    use super::*;

    #[test]
    fn equal_causes_are_counted_without_worker_names() {
        let reasons = [
            "5 requests in a row failed, the last: could not connect",
            "9 requests in a row failed, the last: could not connect",
        ];
        let other = "3 probes in a row failed, the last: cannot connect: 10.0.0.1:80: refused";
        let causes = of_health(reasons.into_iter().chain([other]).map(str::to_owned));
        assert_eq!(causes, ["1 rank ejected: cannot connect: a worker: refused", "2 ranks ejected: could not connect"]);
        let status = DiscoveryStatus {
            source: "urls".to_owned(),
            workers: 0,
            last_error: Some("http://10.0.0.7:8000: its ranks are {0, 2}, must be in a row".to_owned()),
            failing_since: None,
            closed: false,
            refused: BTreeMap::new(),
            leaving: BTreeSet::new(),
            removed: BTreeMap::new(),
        };
        let causes = of_discovery(&[status.clone(), status]);
        assert_eq!(causes, ["discovery: a worker: its ranks are {0, 2}, must be in a row"]);
    }

    #[test]
    fn facts_that_engines_do_not_report_are_counted() {
        let worker = |n, unreported: &[&str]| {
            let reason = |fact: &&str| ((*fact).to_owned(), "/metrics: response status is 404, must be 200".to_owned());
            let unreported = unreported.iter().map(reason).collect();
            let config = WorkerConfig { unreported, ..WorkerConfig::at("http://e") };
            WorkerEntry { worker: WorkerId(n), config, ranks: Vec::new(), draining: false, cordoned: false }
        };
        assert_eq!(
            of_unreported(&[worker(1, &["load"]), worker(2, &[]), worker(3, &["load", "KV cache size"])]),
            ["2 of 3 workers do not report KV cache size, load: /metrics: response status is 404, must be 200"]
        );
    }
}
