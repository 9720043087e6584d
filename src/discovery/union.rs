//! Union of the worker sets of several sources.
//!
//! Keeps the last valid set of each source, in the configured order of the sources. If two sources name the same worker,
//! the first takes precedence, and each conflict is reported once.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

/// The sets of all sources.
///
/// ```
/// use pointsman::discovery::DesiredSets;
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

/// A worker named by two sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The worker.
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
        let mut union = BTreeMap::new();
        for (source, set) in &self.sets {
            for (worker, config) in set {
                union.entry(*worker).or_insert((*source, config));
            }
        }
        union
    }

    fn conflicts(&self) -> BTreeSet<Conflict> {
        let union = self.union();
        let named = self.sets.iter().flat_map(|(source, set)| set.keys().map(move |worker| (*worker, *source)));
        let conflicts = named.filter_map(|(worker, ignored)| {
            let (heard, _) = union.get(&worker)?;
            (*heard != ignored).then_some(Conflict { worker, heard: *heard, ignored })
        });
        conflicts.collect()
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
