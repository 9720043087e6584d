//! Probes: whether the process lives, and whether it should be sent requests.
//!
//! Owns what "ready" means: not on its way out, and some model has a rank that may serve and whose cache contents are
//! known, or the time to get to know them is over. Promises that the answer names no worker. Leaves the facts to the
//! routers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use pointsman::ingest::Trust;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::App;
use super::models::Model;

/// What the gateway itself contributes to being ready.
pub(crate) struct Readiness {
    draining: AtomicBool,
    started: Instant,
    warm_up: Duration,
}

impl Readiness {
    /// From now on, caches have `warm_up` to become known.
    pub(crate) fn new(warm_up: Duration) -> Self {
        Self { draining: AtomicBool::new(false), started: Instant::now(), warm_up }
    }

    /// Not ready any more, for good.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn is_warm_up_over(&self) -> bool {
        self.started.elapsed() >= self.warm_up
    }
}

/// What there is to know of one model's ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Ranks {
    /// Whether the router takes requests.
    router_up: bool,
    /// Those that can serve.
    eligible: usize,
    /// Those whose cache contents are not known, yet or any more.
    unknown: usize,
}

/// Whether to send requests, and if not, why not.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Verdict {
    ready: bool,
    reasons: Vec<String>,
}

/// Over the models in question.
fn verdict(draining: bool, warm_up_over: bool, models: &[(&str, Ranks)]) -> Verdict {
    if draining {
        return Verdict { ready: false, reasons: vec!["the gateway is about to end".to_owned()] };
    }
    let mut reasons = Vec::new();
    for (name, ranks) in models {
        match why_not(*ranks, warm_up_over) {
            None => return Verdict { ready: true, reasons: Vec::new() },
            Some(reason) => reasons.push(format!("model {name:?}: {reason}")),
        }
    }
    if reasons.is_empty() {
        reasons.push("no model is served".to_owned());
    }
    Verdict { ready: false, reasons }
}

fn why_not(ranks: Ranks, warm_up_over: bool) -> Option<String> {
    let Ranks { router_up, eligible, unknown } = ranks;
    if !router_up {
        Some("its router is down".to_owned())
    } else if eligible == 0 {
        Some("no rank can serve".to_owned())
    } else if unknown > 0 && !warm_up_over {
        Some(format!("the caches of {unknown} ranks are not known yet"))
    } else {
        None
    }
}

/// The facts about one model, from its router.
fn ranks_of(model: &Model) -> Ranks {
    let health = model.router.health();
    let mut unknown = health.cold;
    let sources = model.router.kv_sources().into_iter();
    unknown.extend(sources.filter(|source| source.trust != Trust::Live).map(|source| source.rank));
    Ranks { router_up: health.state.is_ok(), eligible: model.router.eligible_ranks(), unknown: unknown.len() }
}

/// `/live` and `/ready`, and `/metrics` where it is wanted.
pub(crate) fn routes(with_metrics: bool) -> Router<Arc<App>> {
    let probes = Router::new().route("/live", get(|| async { "live\n" })).route("/ready", get(ready));
    if with_metrics { probes.route("/metrics", get(metrics)) } else { probes }
}

/// What `/ready` is asked.
#[derive(Deserialize)]
struct Asked {
    /// One model's name or alias; else any will do.
    model: Option<String>,
}

async fn ready(State(app): State<Arc<App>>, Query(asked): Query<Asked>) -> Response {
    let mut models = Vec::new();
    match &asked.model {
        None => models.extend(app.models.all()),
        Some(name) => match app.models.find(name) {
            Some((model, _)) => models.push(model),
            None => {
                let verdict = Verdict { ready: false, reasons: vec!["there is no such model".to_owned()] };
                return (StatusCode::NOT_FOUND, Json(verdict)).into_response();
            }
        },
    }
    let ranks: Vec<_> = models.into_iter().map(|model| (model.settings.name.as_str(), ranks_of(model))).collect();
    let verdict = verdict(app.readiness.is_draining(), app.readiness.is_warm_up_over(), &ranks);
    let status = if verdict.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(verdict)).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    match &app.metrics {
        Some(metrics) => metrics.page().await,
        None => (StatusCode::NOT_FOUND, "the embedding process has a recorder of its own\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_means_that_some_model_can_be_served_well() {
        let ranks = |eligible, unknown| Ranks { router_up: true, eligible, unknown };
        let (good, cold, none, down) = (ranks(2, 0), ranks(2, 1), ranks(0, 0), Ranks::default());
        // Ready where there are no reasons.
        type Case<'a> = (bool, bool, &'a [(&'a str, Ranks)], &'a [&'a str]);
        let cases: &[Case<'_>] = &[
            (false, false, &[("a", good)], &[]),
            (false, false, &[("a", none), ("b", good)], &[]),
            (false, true, &[("a", cold)], &[]),
            (false, false, &[("a", cold)], &["model \"a\": the caches of 1 ranks are not known yet"]),
            (
                false,
                true,
                &[("a", none), ("b", down)],
                &["model \"a\": no rank can serve", "model \"b\": its router is down"],
            ),
            (false, true, &[], &["no model is served"]),
            (true, true, &[("a", good)], &["the gateway is about to end"]),
        ];
        for (draining, warm_up_over, models, expected) in cases {
            let said = verdict(*draining, *warm_up_over, models);
            let reasons: Vec<&str> = said.reasons.iter().map(String::as_str).collect();
            assert_eq!((said.ready, reasons.as_slice()), (expected.is_empty(), *expected));
        }
    }
}
