//! Derived ids for workers without an explicit id.
//!
//! The same endpoint has the same id in every process and release. Duplicate ids and engines are errors, so no worker
//! silently replaces another, and no engine is two workers.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64;

use super::url::HttpUrl;
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

impl WorkerId {
    /// Id of a worker without an explicit one: xxh3-64 of its endpoint text, with seed 0.
    ///
    /// ```
    /// use pointsman::protocol::WorkerId;
    ///
    /// assert_eq!(WorkerId::derived("http://10.0.0.7:8000").0, 14_500_815_841_305_278_805);
    /// ```
    #[must_use]
    pub fn derived(endpoint: &str) -> Self {
        Self(xxh3_64(endpoint.as_bytes()))
    }
}

/// Two workers of one source that cannot both be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DuplicateWorker {
    /// The same id.
    #[error("workers at {first:?} and {second:?} both have the id {worker}, ids must differ")]
    Id {
        /// The id.
        worker: WorkerId,
        /// Endpoint of the first worker.
        first: String,
        /// Endpoint of the second worker.
        second: String,
    },
    /// The same engine. As two workers it would appear half as loaded as it is.
    #[error("workers at {first:?} and {second:?} are the same engine, which must be named once")]
    Engine {
        /// Endpoint of the first worker.
        first: String,
        /// Endpoint of the second worker.
        second: String,
    },
}

/// Builds a set from workers with an explicit id and workers with a [derived](WorkerId::derived) one.
///
/// # Errors
/// Two workers with the same id, explicit or derived, or two HTTP endpoints of the same engine.
pub fn worker_map(
    workers: impl IntoIterator<Item = (Option<WorkerId>, WorkerConfig)>,
) -> Result<WorkerMap, DuplicateWorker> {
    let (mut map, mut engines) = (WorkerMap::new(), BTreeMap::<String, String>::new());
    for (id, config) in workers {
        let second = config.endpoint.clone();
        if let Some(key) = HttpUrl::engine_key(&second)
            && let Some(first) = engines.insert(key, second.clone())
        {
            return Err(DuplicateWorker::Engine { first, second });
        }
        let worker = id.unwrap_or_else(|| WorkerId::derived(&second));
        if let Some(other) = map.insert(worker, config) {
            return Err(DuplicateWorker::Id { worker, first: other.endpoint, second });
        }
    }
    Ok(map)
}
