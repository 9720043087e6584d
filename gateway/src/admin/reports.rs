//! Read-only reports.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use pointsman::NamedWorker;
use serde_json::{Value, json};

use super::Admin;
use super::extract::ModelAt;
use super::queries::{route_error, to_json};
use super::views::{self, Facts};
use crate::formats::openai::ApiError;
use crate::pools::model::Model;
use crate::settings::ModelSettings;

pub(super) async fn models(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let models: Vec<Value> = admin.pools.get().models.all().iter().map(|model| shown(model)).collect();
    Json(json!({ "models": models }))
}

fn shown(model: &Model) -> Value {
    let (settings, router) = (&model.settings, &model.router);
    let (workers, health) = (router.workers(), router.health());
    json!({
        "name": settings.name,
        "aliases": settings.aliases,
        "upstream_name": settings.upstream_name(),
        "tokens_source": model.tokens.source().name(),
        "block_size": router.block_size(),
        "block_size_origin": router.block_size_origin(),
        "role": router.role(),
        "workers": workers.len(),
        "workers_draining": workers.iter().filter(|worker| worker.draining).count(),
        "workers_cordoned": workers.iter().filter(|worker| worker.cordoned).count(),
        "ranks": health.ranks,
        "ranks_cold": health.cold.len(),
        "leases": health.leases,
    })
}

pub(super) async fn loads(ModelAt(model): ModelAt) -> Result<Json<Value>, ApiError> {
    let pending = model.router.pending().await.map_err(route_error)?;
    let facts = Facts::of(&model.router).await;
    let workers = model.router.workers();
    let ranks: Vec<Value> = workers.iter().flat_map(|worker| &worker.ranks).map(|rank| facts.load(*rank)).collect();
    let requests: u64 = pending.iter().map(|class| class.depth.requests).sum();
    let tokens: u64 = pending.iter().map(|class| class.depth.raw_tokens).sum();
    let classes = pending.iter().map(|class| {
        json!({
            "class": class.class,
            "requests": class.depth.requests,
            "tokens": class.depth.raw_tokens,
            "cached_tokens": class.depth.cached_tokens,
            "oldest_age_seconds": class.oldest_age.map(|age| age.as_secs_f64()),
        })
    });
    let classes: Vec<Value> = classes.collect();
    let pending = json!({ "requests": requests, "tokens": tokens, "classes": classes });
    Ok(Json(json!({ "ranks": ranks, "pending": pending })))
}

pub(super) async fn health(ModelAt(model): ModelAt) -> Json<Value> {
    let router = &model.router;
    let health = router.health();
    let rank_health = router.rank_health().await.unwrap_or_default();
    let ranks = rank_health.iter().map(|rank| with_rank(views::rank_of(rank.rank), views::health(rank, router.now())));
    let kv_sources = router.kv_sources();
    let kv_events =
        kv_sources.iter().map(|source| with_rank(views::rank_of(source.rank), views::kv_events(source, router.now())));
    let discovery = router.discovery();
    Json(json!({
        "up": health.state.is_ok(),
        "down": health.state.err().map(|down| down.to_string()),
        "ranks": ranks.collect::<Vec<_>>(),
        "cold": views::ranks_of(&health.cold),
        "problems": health.problems,
        "restarts": health.restarts,
        "leases": health.leases,
        "kv_events": kv_events.collect::<Vec<_>>(),
        "discovery": discovery.iter().map(|status| views::discovery(status, router.now())).collect::<Vec<_>>(),
    }))
}

/// A report row of a rank.
fn with_rank(mut rank: Value, known: Value) -> Value {
    if let (Value::Object(row), Value::Object(known)) = (&mut rank, known) {
        row.extend(known);
    }
    rank
}

pub(super) async fn config(ModelAt(model): ModelAt) -> Result<Json<Value>, ApiError> {
    to_json(model.router.config()).map(Json)
}

/// The loaded settings; for secrets the names of their files.
pub(super) async fn settings(State(admin): State<Arc<Admin>>) -> Result<Json<Value>, ApiError> {
    let settings = &admin.pools.get().settings;
    let models: Result<Vec<Value>, ApiError> = settings.models.iter().map(model_settings).collect();
    Ok(Json(json!({
        "gateway": to_json(&settings.gateway)?,
        "admin": to_json(&settings.admin)?,
        "models": models?,
        "tenants": to_json(&settings.tenants)?,
    })))
}

fn model_settings(model: &ModelSettings) -> Result<Value, ApiError> {
    let workers = model.workers.iter().map(|NamedWorker { id, config, probe }| {
        json!({ "id": id.map(|id| id.to_string()), "config": config, "probe": probe })
    });
    let workers: Vec<Value> = workers.collect();
    Ok(json!({
        "name": model.name,
        "aliases": model.aliases,
        "upstream_name": model.upstream_name(),
        "workers": workers,
        "workers_file": to_json(&model.workers_file)?,
        "worker_urls": model.worker_urls,
        "worker_names": model.worker_names,
        "kubernetes": to_json(&model.kubernetes)?,
        "disaggregation": to_json(&model.disaggregation)?,
        "tokens": to_json(&model.tokens)?,
        "router": to_json(&model.router)?,
    }))
}
