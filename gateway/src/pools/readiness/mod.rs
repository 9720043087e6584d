//! Liveness and readiness probes.
//!
//! Live: no router has failed permanently; only a process restart repairs that. Ready: not draining, and some model has
//! a rank that can serve and is warm. Warm means that the caches of all ranks were known once without a loss since
//! then, or that the warm-up time is over. The response lists causes without naming workers, and a silent engine does
//! not make the gateway unready. The routers provide the facts.

pub(crate) mod causes;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use pointsman::error::Down;
use pointsman::{KvSourceStatus, StreamState};
use serde::{Deserialize, Serialize};

use super::latest::Latest;
use super::model::Model;
use super::serving::Pools;
use crate::formats::openai::ApiError;

/// Facts about the ranks of one model.
#[derive(Clone, Debug, Default)]
struct Ranks {
    /// Whether the router accepts requests.
    router_up: bool,
    /// Hung actors that the router needs.
    hung: Vec<String>,
    /// Registered ranks.
    registered: usize,
    /// Whether a worker is registered that does not drain.
    has_worker: bool,
    /// Ranks that can serve.
    eligible: usize,
    /// Ejected ranks, counted only if none can serve.
    ejected: usize,
    /// Ranks whose index contents were lost.
    cold: usize,
    /// Ranks with unknown cache contents, including cold ones.
    unknown: usize,
    /// Whether all ranks were known at some time.
    was_warm: bool,
    /// Reasons why no rank can serve.
    causes: Vec<String>,
    /// Pending part of the warm start.
    warm_start: Option<String>,
    /// Whether requests wait for a first worker.
    holds_requests: bool,
}

impl Ranks {
    fn is_warm(&self) -> bool {
        self.router_up && self.hung.is_empty() && self.eligible > 0 && self.unknown == 0
    }
}

/// Readiness with reasons.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ReadinessReport {
    ready: bool,
    reasons: Vec<String>,
    /// Problems that do not affect readiness.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

impl ReadinessReport {
    fn not_ready(reasons: Vec<String>) -> Self {
        Self { ready: false, reasons, warnings: Vec::new() }
    }
}

/// Evaluates the given models.
fn report(draining: bool, warm_up_over: bool, models: &[(&str, Ranks)]) -> ReadinessReport {
    if draining {
        return ReadinessReport::not_ready(vec!["the gateway is shutting down".to_owned()]);
    }
    let mut reasons = Vec::new();
    for (name, ranks) in models {
        match not_ready_reason(ranks, warm_up_over) {
            None => return ReadinessReport { ready: true, reasons: Vec::new(), warnings: Vec::new() },
            Some(reason) => reasons.push(format!("model {name:?}: {reason}")),
        }
    }
    if reasons.is_empty() {
        reasons.push("no model is configured".to_owned());
    }
    ReadinessReport::not_ready(reasons)
}

fn not_ready_reason(ranks: &Ranks, warm_up_over: bool) -> Option<String> {
    let Ranks { router_up, registered, eligible, ejected, cold, unknown, was_warm, .. } = *ranks;
    let Ranks { causes, warm_start, has_worker, holds_requests, .. } = ranks;
    // Ranks that join later, or disconnect, do not end readiness.
    let unknown = if was_warm { cold } else { unknown };
    if !router_up {
        Some("the router is down".to_owned())
    } else if !ranks.hung.is_empty() {
        Some(format!("hung: {}", ranks.hung.join(", ")))
    } else if !has_worker && *holds_requests {
        None // requests must arrive, so that engines are started for them
    } else if eligible == 0 {
        let ejected = (ejected > 0).then(|| format!("{ejected} of {registered} are ejected"));
        let causes: Vec<String> = ejected.into_iter().chain(causes.iter().cloned()).collect();
        Some(match causes.is_empty() {
            true => "no rank can serve".to_owned(),
            false => format!("no rank can serve: {}", causes.join("; ")),
        })
    } else if unknown > 0 && !warm_up_over {
        let warm_start = warm_start.iter().map(|pending| format!(": {pending}")).collect::<String>();
        Some(format!("the caches of {unknown} ranks are not known yet{warm_start}"))
    } else {
        None
    }
}

async fn report_on(pools: &Pools, models: &[&Arc<Model>]) -> ReadinessReport {
    let warm_up_over = pools.readiness.is_warm_up_over();
    let mut ranks = Vec::with_capacity(models.len());
    for model in models {
        let mut facts = ranks_of(model, warm_up_over).await;
        facts.holds_requests = pools.settings.gateway.hold_without_endpoints_ms > 0;
        ranks.push((model.settings.name.as_str(), facts));
    }
    report(pools.readiness.is_draining(), warm_up_over, &ranks)
}

/// Whether the gateway is ready.
pub(crate) async fn is_ready(pools: &Pools) -> bool {
    report_on(pools, &pools.models.all().iter().collect::<Vec<_>>()).await.ready
}

/// Facts about one model from its router.
async fn ranks_of(model: &Model, warm_up_over: bool) -> Ranks {
    let health = model.router.health();
    let sources = model.router.kv_sources();
    let mut unknown: BTreeSet<_> =
        sources.iter().filter(|source| !is_known(source)).map(|source| source.rank).collect();
    let was_warm = model.was_warm.load(Ordering::Relaxed);
    let eligible = model.router.eligible_ranks();
    // Queried only if they affect the result.
    let matters = eligible == 0 || !unknown.is_empty() && !was_warm && !warm_up_over;
    let (ejected, asleep) = if matters { causes::out_of_service(model).await } else { Default::default() };
    unknown.retain(|rank| !ejected.contains_key(rank));
    unknown.extend(&health.cold);
    let ranks = Ranks {
        router_up: health.state.is_ok(),
        hung: health.hung.iter().filter(|actor| actor.is_essential()).map(ToString::to_string).collect(),
        registered: health.ranks,
        has_worker: model.router.workers().iter().any(|worker| !worker.draining),
        eligible,
        ejected: ejected.len(),
        cold: health.cold.len(),
        unknown: unknown.len(),
        was_warm,
        causes: if eligible == 0 { causes::of_no_rank(model, (ejected, asleep)) } else { Vec::new() },
        warm_start: model.warm_start.pending(&sources),
        holds_requests: false,
    };
    model.was_warm.fetch_or(ranks.is_warm(), Ordering::Relaxed);
    ranks
}

/// An engine whose stream was read to its end without events is silent and known.
fn is_known(source: &KvSourceStatus) -> bool {
    source.caught_up || source.state == StreamState::Live
}

/// `/live` with its alias `/health`, and `/ready`, for clients and operators.
pub(crate) fn routes() -> Router<Latest<Pools>> {
    Router::new().route("/live", get(live)).route("/health", get(live)).route("/ready", get(ready))
}

/// A router with an exhausted restart budget stays failed: the process supervisor should restart the process.
async fn live(State(pools): State<Arc<Pools>>) -> Response {
    let failed: Vec<&str> = pools
        .models
        .all()
        .iter()
        .filter(|model| model.router.health().state == Err(Down::Failed))
        .map(|model| model.settings.name.as_str())
        .collect();
    if failed.is_empty() {
        return "live\n".into_response();
    }
    let actual = format!("the router of model {} has failed for good: restart the process\n", failed.join(", "));
    (StatusCode::SERVICE_UNAVAILABLE, actual).into_response()
}

/// Query of `/ready`.
#[derive(Deserialize)]
struct ReadyQuery {
    /// Name or alias of a model; any model if absent.
    model: Option<String>,
}

async fn ready(State(pools): State<Arc<Pools>>, query: Result<Query<ReadyQuery>, QueryRejection>) -> Response {
    let Ok(Query(query)) = query else { return ApiError::query_invalid().into_response() };
    let models: Option<Vec<_>> = match &query.model {
        None => Some(pools.models.all().iter().collect()),
        Some(name) => pools.models.find(name).map(|(model, _)| vec![model]),
    };
    let Some(models) = models else {
        let report = ReadinessReport::not_ready(vec!["unknown model".to_owned()]);
        return (StatusCode::NOT_FOUND, Json(report)).into_response();
    };
    let report = report_on(&pools, &models).await;
    let mut warnings = Vec::new();
    for model in models.into_iter().filter(|_| !pools.readiness.is_draining()) {
        let name = model.settings.name.as_str();
        warnings.extend(causes::warnings(model).into_iter().map(|warning| format!("model {name:?}: {warning}")));
    }
    let report = ReadinessReport { warnings, ..report };
    let status = if report.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(report)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_requires_one_model_with_a_warm_rank() {
        let ranks = |eligible, unknown| Ranks { router_up: true, eligible, unknown, ..Ranks::default() };
        let (good, cold, none, down) = (ranks(2, 0), ranks(2, 1), ranks(0, 0), Ranks::default());
        // Warm before; since then a rank has joined or disconnected, or the index has lost its contents.
        let joined = Ranks { was_warm: true, ..cold.clone() };
        let lost = Ranks { cold: 1, ..joined.clone() };
        let refused = Ranks { causes: vec!["a cause".to_owned(), "another".to_owned()], ..none.clone() };
        // Ready without reasons.
        type Case<'a> = (bool, bool, &'a [(&'a str, Ranks)], &'a [&'a str]);
        let cases: &[Case<'_>] = &[
            (false, false, &[("a", good.clone())], &[]),
            (false, false, &[("a", none.clone()), ("b", good.clone())], &[]),
            (false, true, &[("a", cold.clone())], &[]),
            (false, false, &[("a", joined.clone())], &[]),
            (false, true, &[("a", lost.clone())], &[]),
            (false, false, &[("a", Ranks { holds_requests: true, ..none.clone() })], &[]),
            (false, false, &[("a", Ranks { registered: 1, holds_requests: true, ..none.clone() })], &[]),
            (
                false,
                false,
                &[("a", Ranks { has_worker: true, holds_requests: true, ..none.clone() })],
                &["model \"a\": no rank can serve"],
            ),
            (false, false, &[("a", refused)], &["model \"a\": no rank can serve: a cause; another"]),
            (false, false, &[("a", lost.clone())], &["model \"a\": the caches of 1 ranks are not known yet"]),
            (false, false, &[("a", Ranks { eligible: 0, ..joined })], &["model \"a\": no rank can serve"]),
            (false, false, &[("a", cold)], &["model \"a\": the caches of 1 ranks are not known yet"]),
            (
                false,
                false,
                &[("a", Ranks { registered: 4, ejected: 3, ..none.clone() })],
                &["model \"a\": no rank can serve: 3 of 4 are ejected"],
            ),
            (
                false,
                true,
                &[("a", none), ("b", down)],
                &["model \"a\": no rank can serve", "model \"b\": the router is down"],
            ),
            (
                false,
                true,
                &[("a", Ranks { hung: vec!["supervisor".to_owned()], ..good.clone() })],
                &["model \"a\": hung: supervisor"],
            ),
            (false, true, &[], &["no model is configured"]),
            (true, true, &[("a", good)], &["the gateway is shutting down"]),
        ];
        for (draining, warm_up_over, models, expected) in cases {
            let actual = report(*draining, *warm_up_over, models);
            let reasons: Vec<&str> = actual.reasons.iter().map(String::as_str).collect();
            assert_eq!((actual.ready, reasons.as_slice()), (expected.is_empty(), *expected));
        }
    }

    #[test]
    fn warm_requires_eligible_ranks_with_known_caches() {
        let good = Ranks { router_up: true, eligible: 2, ..Ranks::default() };
        assert!(good.is_warm());
        for not in [
            Ranks { router_up: false, ..good.clone() },
            Ranks { eligible: 0, ..good.clone() },
            Ranks { unknown: 1, ..good.clone() },
            Ranks { cold: 1, unknown: 1, was_warm: true, ..good.clone() },
        ] {
            assert!(!not.is_warm(), "{not:?}");
        }
    }
}
