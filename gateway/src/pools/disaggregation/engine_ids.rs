//! Engine ids of prefill workers with the Mooncake connector.
//!
//! A decode rank names the engine that it reads from. vLLM's bootstrap server lists the ids of its ranks at `/query`
//! (reference: vLLM, Mooncake connector). They are read once per worker and again after a failure.

use std::collections::BTreeMap;
use std::time::Duration;

use ahash::AHashMap;
use axum::body::Bytes;
use axum::http::Request;
use http_body_util::{BodyExt as _, Full, Limited};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::timeout;

use crate::net::upstream::{Upstream, UpstreamError};

/// Time limit of a query.
const QUERY_MAX: Duration = Duration::from_secs(2);

/// Maximum length of a response.
const BYTES_MAX: usize = 1 << 20;

/// Maximum number of known workers. Workers that have left are not removed one by one.
const WORKERS_MAX: usize = 4_096;

/// Engine ids by bootstrap address and data-parallel rank.
#[derive(Default)]
pub(super) struct EngineIds(Mutex<AHashMap<String, BTreeMap<u32, String>>>);

/// One rank in the response of `/query`.
#[derive(Deserialize)]
struct Entry {
    engine_id: String,
}

impl EngineIds {
    /// The id of a rank.
    ///
    /// # Errors
    /// A failed query, or a response without the rank.
    pub(super) async fn of(&self, upstream: &Upstream, address: &str, rank: u32) -> Result<String, UpstreamError> {
        if let Some(id) = self.known(address, rank) {
            return Ok(id);
        }
        let ids =
            timeout(QUERY_MAX, query(upstream, address)).await.unwrap_or(Err(UpstreamError::Timeout(QUERY_MAX)))?;
        let missing = || UpstreamError::Broken(format!("{address}/query has no data-parallel rank {rank}"));
        let id = ids.get(&rank).cloned().ok_or_else(missing)?;
        let mut known = self.0.lock();
        if known.len() >= WORKERS_MAX {
            known.clear();
        }
        known.insert(address.to_owned(), ids);
        Ok(id)
    }

    pub(super) fn forget(&self, address: &str) {
        self.0.lock().remove(address);
    }

    fn known(&self, address: &str, rank: u32) -> Option<String> {
        // The table is consistent after every statement.
        self.0.lock().get(address)?.get(&rank).cloned()
    }
}

async fn query(upstream: &Upstream, address: &str) -> Result<BTreeMap<u32, String>, UpstreamError> {
    let url = format!("{address}/query");
    let request = Request::get(&url).body(Full::new(Bytes::new())).map_err(|_| UpstreamError::Address(url.clone()))?;
    let response = upstream.send(request).await?;
    if !response.status().is_success() {
        return Err(UpstreamError::Status(response.status()));
    }
    let body = Limited::new(response.into_body(), BYTES_MAX).collect().await;
    let body = body.map_err(|error| UpstreamError::Broken(error.to_string()))?.to_bytes();
    ids_of(&body).map_err(|error| UpstreamError::Broken(format!("{url}: {error}")))
}

fn ids_of(body: &[u8]) -> Result<BTreeMap<u32, String>, serde_json::Error> {
    let entries: BTreeMap<u32, Entry> = serde_json::from_slice(body)?;
    Ok(entries.into_iter().map(|(rank, entry)| (rank, entry.engine_id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_ids_and_other_fields_are_ignored() {
        let ids = ids_of(br#"{"0": {"engine_id": "a", "tp": 1}, "3": {"engine_id": "b"}}"#).expect("valid");
        assert_eq!(ids, BTreeMap::from([(0, "a".to_owned()), (3, "b".to_owned())]));
        for wrong in [&b"[]"[..], br#"{"x": {"engine_id": "a"}}"#, br#"{"0": {}}"#, b""] {
            assert!(ids_of(wrong).is_err(), "{}", String::from_utf8_lossy(wrong));
        }
    }
}
