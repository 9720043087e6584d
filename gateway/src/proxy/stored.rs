//! Responses that engines store, by id: the worker of each.
//!
//! Engines keep responses in their own memory. Each id is a session of the model, bound to the rank that has answered, so the
//! bounds of sessions apply and replicas share them. Without tenants the workers are queried for an unknown id, for example
//! that of an earlier process.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{EngineClient as _, EngineGet, EngineHttpError, SessionId, WorkerEntry};
use serde::Deserialize;

use crate::formats::events::each_data;
use crate::formats::openai::{ApiError, Endpoint, RESERVED, hashed};
use crate::pools::model::Model;
use crate::pools::models::Models;

/// Workers that are queried for one unknown id.
const QUERIED_MAX: usize = 64;

/// Time limit of these queries.
const QUERY_TIME_MAX: Duration = Duration::from_secs(2);

/// Maximum length of a stored response in such a query. A longer one exists, too.
const QUERY_BYTES_MAX: usize = 64 << 10;

/// Longest id.
const ID_BYTES_MAX: usize = 256;

/// The session of a response.
fn session_of(tenant: Option<&str>, id: &str) -> SessionId {
    let digest = hashed(&[tenant.unwrap_or_default(), "\n", id].concat());
    SessionId::new(&format!("{RESERVED}response {digest}")).expect("of 42 bytes")
}

/// Records the rank of a response from its first bytes, if they have its id.
pub(super) fn record(tenant: Option<&str>, start: &[u8], model: &Model, rank: WorkerRank) {
    if let Some(id) = response_id(start) {
        model.router.bind_session(&session_of(tenant, &id), rank);
    }
}

/// The model and the worker that store a response.
///
/// # Errors
/// 404 for an unknown id.
pub(super) async fn owner(models: &Models, tenant: Option<&str>, id: &str) -> Result<(Arc<Model>, WorkerId), ApiError> {
    let session = session_of(tenant, id);
    let known = models.of_clients().map(async |model| {
        let worker = model.router.session_rank(&session).await?.worker;
        let is_there = model.router.workers().iter().any(|entry| entry.worker == worker);
        is_there.then(|| (Arc::clone(model), worker))
    });
    if let Some(known) = join_all(known).await.into_iter().flatten().next() {
        return Ok(known);
    }
    // Another tenant may own the response.
    let located = if tenant.is_some() { None } else { located(models, id).await };
    let (model, WorkerEntry { worker, ranks, .. }) = located.ok_or_else(|| ApiError::response_not_found(id))?;
    ranks.first().into_iter().for_each(|rank| model.router.bind_session(&session, *rank));
    Ok((model, worker))
}

/// Queries all workers for a response. A single one answers the request itself.
async fn located(models: &Models, id: &str) -> Option<(Arc<Model>, WorkerEntry)> {
    let mut workers = Vec::new();
    for model in models.of_clients() {
        let all = model.router.workers();
        let taking = all.iter().filter(|entry| entry.takes_requests());
        workers.extend(taking.map(|entry| (Arc::clone(model), entry.clone())));
    }
    if let [only] = &workers[..] {
        return Some(only.clone());
    }
    // Ids in bodies may be any text.
    let path = format!("/v1/responses/{id}");
    if Endpoint::of_path(&path) != Some(Endpoint::Response) {
        return None;
    }
    workers.truncate(QUERIED_MAX);
    let mut queries = Vec::new();
    for (model, worker) in workers {
        let url = [worker.config.endpoint.trim_end_matches('/'), &path].concat();
        let (timeout, bytes_max) = (QUERY_TIME_MAX, QUERY_BYTES_MAX);
        let get = EngineGet { url, api_key_file: worker.config.api_key_file.clone(), timeout, bytes_max };
        queries.push(async move {
            let found = matches!(model.access.get(get).await, Ok(_) | Err(EngineHttpError::TooLong(_)));
            found.then_some((model, worker))
        });
    }
    join_all(queries).await.into_iter().flatten().next()
}

/// The id of a response in its first bytes: JSON, or events with the response in the first one. In JSON that is not complete
/// the id precedes the output, as in the engines.
fn response_id(start: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Stored {
        id: String,
    }
    #[derive(Deserialize)]
    struct Event {
        response: Stored,
    }
    let text =
        str::from_utf8(start).unwrap_or_else(|error| str::from_utf8(&start[..error.valid_up_to()]).unwrap_or(""));
    let id = if text.trim_start().starts_with('{') {
        let whole = serde_json::from_str::<Stored>(text).ok().map(|stored| stored.id);
        whole.or_else(|| Some(text.trim_start().strip_prefix("{\"id\":\"")?.split('"').next()?.to_owned()))
    } else {
        serde_json::from_str::<Event>(&each_data(text).next()?).ok().map(|event| event.response.id)
    };
    id.filter(|id| (1..=ID_BYTES_MAX).contains(&id.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_from_responses_and_events() {
        for (start, expected) in [
            (r#"{"object":"response","output":[{"id":"msg_1"}],"id":"resp_1"}"#, Some("resp_1")),
            (r#" {"id":"resp_1","output":[{"id":"msg"#, Some("resp_1")),
            (r#"{"output":[{"id":"msg_1"},{"#, None),
            ("event: response.created\ndata: {\"type\":\"x\",\"response\":{\"id\":\"resp_2\"}}\n\n", Some("resp_2")),
            ("data: {\"response\":\r\ndata: {\"id\":\"resp_3\"}}\r\n\r\ndata: {}", Some("resp_3")),
            ("data:{\"response\":{\"id\":\"\"}}\n\n", None),
            (": comment\n\n", None),
            ("{\"error\":1}", None),
            ("", None),
        ] {
            assert_eq!(response_id(start.as_bytes()).as_deref(), expected, "{start}");
        }
    }
}
