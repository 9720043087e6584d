//! Derived ids for workers without an explicit id.
//!
//! The same endpoint has the same id in every process and release. Duplicate ids are errors, so no worker silently
//! replaces another.

use xxhash_rust::xxh3::xxh3_64;

use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

/// Id of a worker without an explicit one: xxh3-64 of its endpoint text, with seed 0.
///
/// ```
/// use pointsman::discovery::derived_id;
///
/// assert_eq!(derived_id("http://10.0.0.7:8000").0, 14_500_815_841_305_278_805);
/// ```
#[must_use]
pub fn derived_id(endpoint: &str) -> WorkerId {
    WorkerId(xxh3_64(endpoint.as_bytes()))
}

/// Two workers with the same id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("workers at {first:?} and {second:?} both have the id {worker}, ids must differ")]
pub struct DuplicateId {
    /// The id.
    pub worker: WorkerId,
    /// Endpoint of the first worker.
    pub first: String,
    /// Endpoint of the second worker.
    pub second: String,
}

/// Builds a set from workers with an explicit id and workers with a [derived](derived_id) one.
///
/// # Errors
/// Two workers with the same id, explicit or derived.
pub fn worker_map(
    workers: impl IntoIterator<Item = (Option<WorkerId>, WorkerConfig)>,
) -> Result<WorkerMap, DuplicateId> {
    let mut map = WorkerMap::new();
    for (id, config) in workers {
        let worker = id.unwrap_or_else(|| derived_id(&config.endpoint));
        if let Some(other) = map.get(&worker) {
            return Err(DuplicateId { worker, first: other.endpoint.clone(), second: config.endpoint });
        }
        map.insert(worker, config);
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_given_or_derived_and_never_shared() {
        let named = |id: Option<u64>, endpoint: &str| (id.map(WorkerId), WorkerConfig::at(endpoint));
        let map = worker_map([named(Some(7), "a"), named(None, "b")]).expect("two workers");
        assert_eq!(map.keys().copied().collect::<Vec<_>>(), [WorkerId(7), derived_id("b")]);
        let error = worker_map([named(None, "b"), named(Some(derived_id("b").0), "c")]).expect_err("one id");
        assert_eq!((error.first.as_str(), error.second.as_str()), ("b", "c"));
        assert!(worker_map([named(None, "b"), named(None, "b")]).is_err(), "an engine has one place in the set");
    }
}
