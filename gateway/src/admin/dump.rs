//! Index dumps: as JSON lines, or as a snapshot.
//!
//! A dump contains only hashes, is read from the index in one step, and is sent with backpressure. It is held in memory
//! until sent, about 16 bytes per block and rank.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use pointsman::protocol::WorkerRank;
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;

use super::decisions::blocking;
use super::extract::{Id, ModelAt, model_named};
use super::queries::route_error;
use super::{Admin, DUMPS_MAX};
use crate::formats::openai::ApiError;
use crate::pools::model::Model;

/// Size of a frame, or one longer line.
const FRAME_BYTES: usize = 64 << 10;

/// Header with the number of ranks in a snapshot.
const RANKS: HeaderName = HeaderName::from_static("x-snapshot-ranks");

/// Header with the number of lines.
const LINES: HeaderName = HeaderName::from_static("x-dump-lines");

/// Header with the number of blocks, counted per rank.
const BLOCKS: HeaderName = HeaderName::from_static("x-dump-blocks");

pub(super) async fn dump(State(admin): State<Arc<Admin>>, ModelAt(model): ModelAt) -> Result<Response, ApiError> {
    let permit = permit(&admin)?;
    events(&model, None, permit).await
}

/// A permit for one dump.
fn permit(admin: &Admin) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(&admin.dumps).try_acquire_owned().map_err(|_| {
        let message = format!("the limit of {DUMPS_MAX} concurrent dumps is reached");
        ApiError::overloaded("dumps_in_progress", message, Duration::from_secs(1))
    })
}

/// The contents of the index, or of one rank, as events.
async fn events(model: &Model, rank: Option<WorkerRank>, permit: OwnedSemaphorePermit) -> Result<Response, ApiError> {
    let lost = |lost: pointsman::error::FlushError| {
        ApiError::unavailable(StatusCode::SERVICE_UNAVAILABLE, "no_index", lost.to_string())
    };
    let mut events = model.router.dump_events().await.map_err(lost)?;
    events.retain(|event| rank.is_none_or(|rank| event.rank == rank));
    let blocks: usize = events.iter().map(|event| event.data.block_count()).sum();
    let lines = events.len();
    let mut events = events.into_iter();
    let next = move || {
        let mut lines = Vec::with_capacity(FRAME_BYTES);
        while lines.len() < FRAME_BYTES
            && let Some(event) = events.next()
        {
            serde_json::to_writer(&mut lines, &event).expect("events serialize to JSON");
            lines.push(b'\n');
        }
        (!lines.is_empty()).then(|| lines.into())
    };
    let mut response = streamed(permit, next);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(LINES, HeaderValue::from(lines));
    headers.insert(BLOCKS, HeaderValue::from(blocks));
    Ok(response)
}

/// A body of frames until `next` returns none. Holds the permit of the dump until they are sent.
fn streamed(permit: OwnedSemaphorePermit, mut next: impl FnMut() -> Option<Bytes> + Send + 'static) -> Response {
    let frames = std::iter::from_fn(move || {
        let _held = &permit;
        next().map(Ok::<_, Infallible>)
    });
    Response::new(Body::from_stream(tokio_stream::iter(frames)))
}

/// Query of a dump.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DumpQuery {
    model: String,
    /// `WORKER/RANK`; every rank if absent.
    rank: Option<String>,
    #[serde(default)]
    format: DumpFormat,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DumpFormat {
    /// Bytes of a snapshot, with the positions of the event streams.
    #[default]
    Snapshot,
    /// One JSON event per line.
    Events,
}

/// Parses `WORKER/RANK`, each in one spelling.
fn rank_of(text: &str) -> Option<WorkerRank> {
    let (worker, rank) = text.split_once('/')?;
    let Id(worker) = Id::parse(worker)?;
    let Id(number) = Id::parse(rank)?;
    Some(WorkerRank::new(worker, u32::try_from(number.0).ok()?))
}

pub(super) async fn contents(
    State(admin): State<Arc<Admin>>,
    query: Result<Query<DumpQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let invalid = |message: &str| ApiError::invalid("invalid_query", None, message);
    let Ok(Query(query)) = query else {
        return Err(invalid("the query must have model, and may have rank and format (snapshot or events)"));
    };
    let model = model_named(&query.model, &admin)?;
    let malformed = || invalid("rank must be WORKER/RANK, two numbers in decimal digits without leading zeros");
    let rank = query.rank.as_deref().map(|text| rank_of(text).ok_or_else(malformed)).transpose()?;
    let workers = model.router.workers();
    if rank.is_some_and(|rank| !workers.iter().any(|worker| worker.ranks.contains(&rank))) {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "rank_not_found", "unknown rank"));
    }
    let permit = permit(&admin)?;
    match query.format {
        DumpFormat::Events => events(&model, rank, permit).await,
        DumpFormat::Snapshot => {
            let snapshot = match rank {
                Some(rank) => model.router.snapshot_of_rank(rank).await,
                None => model.router.snapshot().await,
            };
            let snapshot = snapshot.map_err(|down| route_error(down.into()))?;
            let (ranks, blocks) = (snapshot.ranks.len(), snapshot.block_count());
            let mut encoded = Bytes::from(blocking(move || snapshot.encode()).await?);
            let length = encoded.len();
            let next = move || (!encoded.is_empty()).then(|| encoded.split_to(encoded.len().min(FRAME_BYTES)));
            let mut response = streamed(permit, next);
            let headers = response.headers_mut();
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
            headers.insert(RANKS, HeaderValue::from(ranks));
            headers.insert(BLOCKS, HeaderValue::from(blocks));
            Ok(response)
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerId;

    use super::*;

    #[test]
    fn ranks_have_one_spelling() {
        assert_eq!(rank_of("7/1"), Some(WorkerRank::new(WorkerId(7), 1)));
        for text in ["", "7", "7/", "/1", "7/01", "07/1", "7/4294967296", "7/1/1", "a/b"] {
            assert_eq!(rank_of(text), None, "{text:?}");
        }
    }
}
