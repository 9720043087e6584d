//! Worker management: list, add, change, drain, remove.
//!
//! Validates worker configurations. A change that violates a rule has no effect; changes run one at a time and to
//! completion. The router handles requests on changed workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{MethodRouter, post};
use pointsman::error::MembershipError;
use pointsman::protocol::{LoadSource, WorkerConfig, WorkerId};
use pointsman::{DiscoveryStatus, HttpUrl, NamedWorker, Router, WorkerEntry};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Admin;
use super::audit::Change;
use super::extract::{Body, ClientAddress, JsonObject, ModelAt, WorkerAt, not_understood};
use super::views::Facts;
use crate::formats::openai::ApiError;
use crate::pools::model::Model;
use crate::settings::Settings;

/// Maximum drain time.
const DRAIN_MS_MAX: u64 = 24 * 60 * 60 * 1000;

pub(super) async fn list(ModelAt(model): ModelAt) -> Json<Value> {
    let facts = Facts::of(&model.router).await;
    let workers: Vec<Value> = model.router.workers().iter().map(|entry| facts.worker(entry)).collect();
    let removed = model.router.discovery().into_iter().flat_map(|DiscoveryStatus { source, removed, .. }| {
        let shown =
            move |(id, url): (WorkerId, String)| json!({ "id": id.to_string(), "endpoint": url, "source": source });
        removed.into_iter().map(shown)
    });
    let removed: Vec<Value> = removed.collect();
    Json(json!({ "workers": workers, "removed": removed }))
}

pub(super) async fn add(
    State(admin): State<Arc<Admin>>,
    ModelAt(model): ModelAt,
    peer: ClientAddress,
    Body(config): Body<WorkerConfig>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    // Other spellings of the endpoint are the same worker.
    let endpoint = HttpUrl::parse(&config.endpoint).map_or_else(|_| config.endpoint.clone(), |url| url.endpoint());
    let id = WorkerId::derived(&endpoint);
    set(WorkerAt { admin, model, id, peer }, "add", Known::Stays, |_| Ok(config)).await
}

pub(super) async fn put(
    worker: WorkerAt,
    Body(config): Body<WorkerConfig>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    set(worker, "put", Known::Changes, |_| Ok(config)).await
}

pub(super) async fn patch(
    worker: WorkerAt,
    Body(fields): Body<JsonObject>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let id = worker.id;
    let patched = move |known: Option<&WorkerEntry>| {
        let known = known.ok_or(MembershipError::UnknownWorker(id)).map_err(membership_error)?;
        patched(&known.config, fields).map_err(|error| not_understood(&error))
    };
    set(worker, "patch", Known::Changes, patched).await
}

/// The configuration with replaced fields; `null` selects the default. The JSON texts are merged, so that field rules
/// equal those of a whole configuration.
fn patched(config: &WorkerConfig, JsonObject(fields): JsonObject) -> Result<WorkerConfig, serde_json::Error> {
    let mut whole: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&serde_json::to_string(config)?)?;
    for (name, value) in fields {
        if value.get() == "null" && whole.contains_key(&name) {
            whole.remove(&name);
        } else {
            whole.insert(name, value);
        }
    }
    serde_json::from_str(&serde_json::to_string(&whole)?)
}

/// Handling of a registered worker with another configuration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Keep it and reject the request.
    Stays,
    /// Replace its configuration.
    Changes,
}

/// Adds or replaces a worker, given its present state.
async fn set(
    WorkerAt { admin, model, id, peer }: WorkerAt,
    what: &'static str,
    becomes: Known,
    config: impl FnOnce(Option<&WorkerEntry>) -> Result<WorkerConfig, ApiError> + Send + 'static,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let change = Change::new(what, &model, id, peer);
    let router = model.router.clone();
    let work = async move {
        let _turn = admin.changes.lock().await;
        let known = find(&router, id);
        let config = reachable(config(known.as_ref())?)?;
        check_key_file(&config, known.as_ref(), &admin.pools.get().settings)?;
        let detail = format!("{} rank(s) at {}", config.data_parallel_size, config.endpoint);
        if let Some(other) = same_engine(&router, id, &config) {
            return Err(is_worker(&other));
        }
        match &known {
            // The worker stays assigned to its source.
            Some(known) if known.config == config && !known.draining => {}
            Some(known) if becomes == Known::Stays => return Err(exists(known)),
            _ => router.upsert_worker(id, config).await.map_err(membership_error)?,
        }
        Ok((known.is_none(), detail))
    };
    let is_new = change.carry_out(work).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(shown(&model, id).await)))
}

/// Another worker with the same engine, which would appear half as loaded as it is.
fn same_engine(router: &Router, id: WorkerId, config: &WorkerConfig) -> Option<WorkerEntry> {
    let key = HttpUrl::engine_key(&config.endpoint)?;
    let is_same = |entry: &&WorkerEntry| HttpUrl::engine_key(&entry.config.endpoint).as_ref() == Some(&key);
    router.workers().iter().filter(|entry| entry.worker != id && !entry.draining).find(is_same).cloned()
}

fn is_worker(other: &WorkerEntry) -> ApiError {
    let url = HttpUrl::without_password(&other.config.endpoint);
    let message = format!("the engine at {url} is worker {}: one engine is one worker", other.worker);
    conflict("worker_exists", message)
}

/// The worker is registered; adding it would drop its ranks and event sources if the body lacks them.
fn exists(known: &WorkerEntry) -> ApiError {
    let (id, url, ranks) = (known.worker, HttpUrl::without_password(&known.config.endpoint), known.ranks.len());
    let message = format!(
        "worker {id} at {url} is registered with {ranks} rank(s) and another configuration: change it with PATCH, or \
         replace it with PUT"
    );
    conflict("worker_exists", message)
}

/// The present state of the worker; only its id if it has been removed.
async fn shown(model: &Model, id: WorkerId) -> Value {
    match find(&model.router, id) {
        Some(entry) => Facts::of(&model.router).await.worker(&entry),
        None => json!({ "id": id.to_string() }),
    }
}

fn find(router: &Router, id: WorkerId) -> Option<WorkerEntry> {
    router.workers().iter().find(|entry| entry.worker == id).cloned()
}

pub(super) async fn remove(WorkerAt { admin, model, id, peer }: WorkerAt) -> Result<Json<Value>, ApiError> {
    let router = model.router.clone();
    let work = async move {
        let _turn = admin.changes.lock().await;
        router.remove_worker(id).await.map_err(membership_error)?;
        Ok(((), String::new()))
    };
    Change::new("remove", &model, id, peer).carry_out(work).await?;
    Ok(Json(json!({ "id": id.to_string(), "removed": true })))
}

/// Options of a drain.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Drain {
    timeout_ms: u64,
}

pub(super) async fn drain(
    WorkerAt { model, id, peer, .. }: WorkerAt,
    Body(Drain { timeout_ms }): Body<Drain>,
) -> Result<Json<Value>, ApiError> {
    if timeout_ms > DRAIN_MS_MAX {
        return Err(broken(format!("timeout_ms is {timeout_ms}, must be at most {DRAIN_MS_MAX}")));
    }
    let change = Change::new("drain", &model, id, peer);
    change.write("started", &format!("timeout_ms is {timeout_ms}"));
    let router = model.router.clone();
    let work = async move {
        let cut_off = router.drain_worker(id, Duration::from_millis(timeout_ms)).await.map_err(membership_error)?;
        Ok((cut_off, format!("{cut_off} booking(s) cut off")))
    };
    let cut_off = change.carry_out(work).await?;
    Ok(Json(json!({ "id": id.to_string(), "removed": true, "cut_off": cut_off })))
}

/// Route of a change without options. Responds with the resulting state of the worker.
pub(super) fn state_change<F>(what: &'static str, change: fn(Router, WorkerId) -> F) -> MethodRouter<Arc<Admin>>
where
    F: Future<Output = Result<(), MembershipError>> + Send + 'static,
{
    post(async move |WorkerAt { admin, model, id, peer }: WorkerAt| {
        let router = model.router.clone();
        let work = async move {
            let _turn = admin.changes.lock().await;
            change(router, id).await.map_err(membership_error)?;
            Ok(((), String::new()))
        };
        Change::new(what, &model, id, peer).carry_out(work).await?;
        Ok::<_, ApiError>(Json(shown(&model, id).await))
    })
}

/// The configuration with reachable addresses: wildcard hosts of sockets are replaced by the worker's host.
fn reachable(config: WorkerConfig) -> Result<WorkerConfig, ApiError> {
    let refused = |field: &str, address: &str, rule: &str| {
        broken(format!("{field} {:?} is refused: {rule}", HttpUrl::without_password(address)))
    };
    let endpoint = config.endpoint.clone();
    let scheme = endpoint.split_once("://").map_or("", |(scheme, _)| scheme);
    if !["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
        return Err(refused("endpoint", &endpoint, "must begin with http:// or https://"));
    }
    if endpoint.contains('?') {
        return Err(refused("endpoint", &endpoint, "must have no query"));
    }
    let named = NamedWorker::at(&endpoint, &config);
    let config = named.map_err(|error| refused("endpoint", &endpoint, &error.rule))?.config;
    if !config.health_path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
        return Err(refused("health_path", &config.health_path, "must consist of visible ASCII characters"));
    }
    if let Some(LoadSource::Metrics(url)) = &config.load {
        HttpUrl::parse(url).map_err(|error| refused("load.metrics", url, &error.rule))?;
    }
    Ok(config)
}

/// An operator may not have the content of an arbitrary file sent to a worker.
fn check_key_file(config: &WorkerConfig, known: Option<&WorkerEntry>, settings: &Settings) -> Result<(), ApiError> {
    let Some(file) = &config.api_key_file else { return Ok(()) };
    let is_known = known.is_some_and(|known| known.config.api_key_file.as_ref() == Some(file));
    if is_known || settings.worker_key_files().iter().any(|(_, named)| named == file) {
        return Ok(());
    }
    Err(broken(format!("api_key_file is {}, must be a key file that the settings name", file.display())))
}

/// A valid request that violates a rule.
fn broken(message: String) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "rule_broken", message)
}

fn conflict(code: &'static str, message: String) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, code, message)
}

fn membership_error(refused: MembershipError) -> ApiError {
    let message = refused.to_string();
    match refused {
        MembershipError::Config { .. } => broken(message),
        MembershipError::UnknownWorker(_) => ApiError::new(StatusCode::NOT_FOUND, "worker_not_found", message),
        MembershipError::Draining(_) | MembershipError::DrainedBySource(_) => conflict("worker_draining", message),
        MembershipError::NotDraining(_) => conflict("worker_not_draining", message),
        MembershipError::Undrained(_) => conflict("drain_undone", message),
        MembershipError::Down(_) => ApiError::unavailable(StatusCode::SERVICE_UNAVAILABLE, "router_down", message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_files_are_those_of_the_settings_or_of_the_worker() {
        let mut settings = Settings::default();
        settings.gateway.worker_api_key_file = Some("/etc/key".into());
        let with = |file: &str| WorkerConfig { api_key_file: Some(file.into()), ..WorkerConfig::at("http://e") };
        let own = with("/own");
        let known = WorkerEntry {
            worker: WorkerId(1),
            config: own.clone(),
            ranks: Vec::new(),
            draining: false,
            cordoned: false,
        };
        for (config, known, is_accepted) in [
            (WorkerConfig::at("http://e"), None, true),
            (with("/etc/key"), None, true),
            (with("/etc/shadow"), None, false),
            (own.clone(), None, false),
            (own, Some(&known), true),
            (with("/etc/shadow"), Some(&known), false),
        ] {
            assert_eq!(check_key_file(&config, known, &settings).is_ok(), is_accepted, "{config:?}");
        }
    }

    #[test]
    fn a_patch_changes_only_its_fields() {
        let known = WorkerConfig { data_parallel_size: 4, total_kv_blocks: Some(9), ..WorkerConfig::at("http://e") };
        let with = |patch: &str| patched(&known, serde_json::from_str(patch)?);
        assert_eq!(with("{}").expect("nothing"), known);
        let fewer = with(r#"{"data_parallel_size":2,"taints":["a100"]}"#).expect("two fields");
        assert_eq!((fewer.data_parallel_size, fewer.total_kv_blocks), (2, Some(9)));
        assert!(fewer.taints.contains("a100"));
        let defaults = with(r#"{"data_parallel_size":null,"total_kv_blocks":null}"#).expect("defaults");
        assert_eq!((defaults.data_parallel_size, defaults.total_kv_blocks), (1, None));
        for wrong in [
            r#"{"endpiont":1}"#,
            r#"{"endpiont":null}"#,
            r#"{"endpoint":null}"#,
            r#"{"taints":1}"#,
            r#"{"data_parallel_size":1,"data_parallel_size":2}"#,
            r#"{"kv_events":{"endpoint":"tcp://a:1","endpoint":"tcp://b:1"}}"#,
            "[]",
            "null",
        ] {
            assert!(with(wrong).is_err(), "{wrong}");
        }
    }
}
