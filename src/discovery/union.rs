//! Union of the worker sets of several sources.
//!
//! Keeps the last valid set of each source, in the configured order of the sources. If two sources name the same worker,
//! or the same engine under two ids, the first takes precedence, and each conflict is reported once.

use std::collections::{BTreeMap, BTreeSet};

use super::url::HttpUrl;
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

/// The sets of all sources.
///
/// ```
/// use pointsman::internals::discovery::DesiredSets;
/// use pointsman::protocol::{WorkerConfig, WorkerId, WorkerMap};
///
/// let set = |endpoint: &str| WorkerMap::from([(WorkerId(1), WorkerConfig::at(endpoint))]);
/// let mut desired = DesiredSets::default();
/// desired.set(1, set("http://second"));
/// desired.set(0, set("http://first"));
/// assert_eq!(desired.union()[&WorkerId(1)].1.endpoint, "http://first");
/// ```
#[derive(Debug, Default)]
pub struct DesiredSets {
    /// By source; absent before its first set.
    sets: BTreeMap<usize, WorkerMap>,
    known_conflicts: BTreeSet<Conflict>,
}

/// A worker or its engine, named twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The worker that is ignored.
    pub worker: WorkerId,
    /// The source that takes precedence.
    pub heard: usize,
    /// The source that is ignored.
    pub ignored: usize,
}

impl DesiredSets {
    /// Replaces the set of `source`. Returns the new conflicts.
    pub fn set(&mut self, source: usize, workers: WorkerMap) -> Vec<Conflict> {
        self.sets.insert(source, workers);
        let conflicts = self.conflicts();
        let new = conflicts.difference(&self.known_conflicts).copied().collect();
        self.known_conflicts = conflicts;
        new
    }

    /// The set of `source`; `None` before its first one.
    #[must_use]
    pub fn of(&self, source: usize) -> Option<&WorkerMap> {
        self.sets.get(&source)
    }

    /// Every desired worker with its source. Linear in all sets.
    #[must_use]
    pub fn union(&self) -> BTreeMap<WorkerId, (usize, &WorkerConfig)> {
        self.resolved().0
    }

    fn conflicts(&self) -> BTreeSet<Conflict> {
        self.resolved().1
    }

    /// The union, and the ignored workers. Draining workers may share an engine: a replaced pod ends while its successor
    /// starts at the same address.
    fn resolved(&self) -> (BTreeMap<WorkerId, (usize, &WorkerConfig)>, BTreeSet<Conflict>) {
        let (mut union, mut conflicts) = (BTreeMap::<WorkerId, (usize, &WorkerConfig)>::new(), BTreeSet::new());
        let mut engines = BTreeMap::<String, usize>::new();
        for (source, set) in &self.sets {
            for (worker, config) in set {
                let engine = HttpUrl::engine_key(&config.endpoint).filter(|_| !config.drain);
                let of_engine = engine.as_ref().and_then(|engine| engines.get(engine)).copied();
                match union.get(worker).map(|(heard, _)| *heard).or(of_engine) {
                    Some(heard) => drop(conflicts.insert(Conflict { worker: *worker, heard, ignored: *source })),
                    None => {
                        engines.extend(engine.map(|engine| (engine, *source)));
                        union.insert(*worker, (*source, config));
                    }
                }
            }
        }
        (union, conflicts)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;

    fn set(workers: &[(u64, &str)]) -> WorkerMap {
        workers.iter().map(|(id, endpoint)| (WorkerId(*id), WorkerConfig::at(*endpoint))).collect()
    }

    #[test]
    fn a_conflict_is_new_once() {
        let mut desired = DesiredSets::default();
        assert!(desired.set(0, set(&[(1, "a"), (2, "a")])).is_empty());
        let conflict = Conflict { worker: WorkerId(2), heard: 0, ignored: 1 };
        assert_eq!(desired.set(1, set(&[(2, "b"), (3, "b")])), [conflict]);
        assert!(desired.set(1, set(&[(2, "c"), (3, "b")])).is_empty(), "reported before");
        assert!(desired.set(0, set(&[(1, "a")])).is_empty(), "resolved");
        assert_eq!(desired.union()[&WorkerId(2)].1.endpoint, "c", "no earlier source remains");
        assert_eq!(desired.set(0, set(&[(2, "a")])), [conflict], "and it is back");
    }

    #[test]
    fn an_engine_with_two_ids_is_the_worker_of_the_first_source() {
        let mut desired = DesiredSets::default();
        assert!(desired.set(1, set(&[(1, "http://localhost:1"), (2, "http://e:1")])).is_empty());
        let conflict = Conflict { worker: WorkerId(1), heard: 0, ignored: 1 };
        assert_eq!(desired.set(0, set(&[(3, "http://127.0.0.1:1/")])), [conflict]);
        assert_eq!(desired.union().into_keys().collect::<Vec<_>>(), [WorkerId(2), WorkerId(3)]);
        let mut drained = set(&[(3, "http://127.0.0.1:1/")]);
        drained.values_mut().for_each(|config| config.drain = true);
        desired.set(0, drained);
        assert_eq!(desired.union().len(), 3, "a draining worker does not exclude its successor");
        let within = Conflict { worker: WorkerId(8), heard: 2, ignored: 2 };
        assert_eq!(desired.set(2, set(&[(7, "http://e:2"), (8, "http://E:2")])), [within], "within one source");
    }

    proptest! {
        #[test]
        fn the_first_source_of_a_worker_takes_precedence(
            said in vec((0..4_usize, btree_map(0..6_u64, "[ab]", 0..4)), 0..12)
        ) {
            let mut desired = DesiredSets::default();
            let mut last: Vec<BTreeMap<u64, String>> = vec![BTreeMap::new(); 4];
            for (source, named) in said {
                let set = named.iter().map(|(id, name)| (WorkerId(*id), WorkerConfig::at(name.as_str()))).collect();
                desired.set(source, set);
                last[source] = named;
                for id in 0..6 {
                    let first = last.iter().enumerate().find_map(|(source, named)| Some((source, named.get(&id)?)));
                    let union = desired.union();
                    let heard = union.get(&WorkerId(id)).map(|(source, config)| (*source, &config.endpoint));
                    prop_assert_eq!(heard, first);
                }
            }
        }
    }
}
