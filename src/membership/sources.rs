//! Discovery sources: last valid sets, and reconciliation with the registered workers.

use std::collections::{BTreeMap, BTreeSet};

use super::removals::{Completion, PendingRemoval};
use super::{DiscoveryStatus, Membership, MembershipReport, SourceUpdate};
use crate::discovery::{Conflict, DiscoveryError};
use crate::error::MembershipError;
use crate::protocol::{Timestamp, WorkerConfig, WorkerId, WorkerMap};

/// Difference between named and registered workers.
#[derive(Default)]
struct Difference {
    /// Registered workers of discovery that no source names, with the source that added them.
    departed: Vec<(WorkerId, usize)>,
    /// Named workers to register or change, with the source that has precedence.
    changed: Vec<(WorkerId, usize, WorkerConfig)>,
    /// Registered workers that their source drains from now on.
    drained: Vec<WorkerId>,
    /// Draining workers that their source no longer drains.
    undrained: Vec<WorkerId>,
}

/// Errors of rejected workers, by source.
type Refused = BTreeMap<usize, BTreeMap<WorkerId, String>>;

impl<R> Membership<R> {
    pub(super) fn on_source_added(&mut self, name: String) {
        self.statuses.push(DiscoveryStatus { source: name, ..DiscoveryStatus::default() });
        self.outbox.sources_changed = true;
    }

    pub(super) fn on_source_updated(&mut self, source: usize, update: SourceUpdate, now: Timestamp) {
        if source >= self.statuses.len() {
            return;
        }
        self.outbox.sources_changed = true;
        match update {
            SourceUpdate::Workers(workers) => self.on_source_workers(source, workers),
            SourceUpdate::Failed(error) => self.on_source_failed(source, &error, now),
            SourceUpdate::Closed => self.statuses[source].closed = true,
        }
    }

    fn on_source_workers(&mut self, source: usize, mut workers: WorkerMap) {
        workers.retain(|_, config| self.rules.role.uses(config.role));
        let count = workers.values().filter(|config| !config.drain).count();
        for conflict in self.desired.set(source, workers) {
            self.report_conflict(conflict);
        }
        let status = &mut self.statuses[source];
        status.workers = count;
        status.failing_since = None;
        if status.last_error.take().is_some() {
            let source = status.source.clone();
            self.outbox.report(MembershipReport::SourceRecovered { source, workers: count });
        }
    }

    fn report_conflict(&mut self, conflict: Conflict) {
        let Conflict { worker, heard, ignored } = conflict;
        let endpoint = self.endpoint_at(worker, heard).or_else(|| self.endpoint_at(worker, ignored));
        let (used, ignored) = (self.source_name(Some(heard)), self.source_name(Some(ignored)));
        self.outbox.report(MembershipReport::Conflict { worker, endpoint, used, ignored });
    }

    fn on_source_failed(&mut self, source: usize, error: &DiscoveryError, now: Timestamp) {
        let error = error.to_string();
        let status = &mut self.statuses[source];
        status.failing_since.get_or_insert(now);
        if status.last_error.as_ref() != Some(&error) {
            status.last_error = Some(error.clone());
            let workers = self.desired.of(source).map(WorkerMap::len);
            let source = status.source.clone();
            self.outbox.report(MembershipReport::SourceFailed { source, error, workers });
        }
    }

    /// Registers, changes and removes workers until they are those that the sources name.
    pub(super) fn reconcile(&mut self) {
        let Difference { departed, changed, drained, undrained } = self.difference();
        self.refresh_removed();
        departed.into_iter().for_each(|(worker, source)| self.depart(worker, Some(source)));
        drained.into_iter().for_each(|worker| self.drain_by_source(worker));
        undrained.into_iter().for_each(|worker| self.undrain_by_source(worker));
        let mut refused = Refused::new();
        for (worker, source, config) in changed {
            let endpoint = config.endpoint.clone();
            if let Err(error) = self.upsert(worker, config, Some(source)) {
                let reason = match error {
                    MembershipError::Config { error, .. } => error.to_string(),
                    error => error.to_string(),
                };
                refused.entry(source).or_default().insert(worker, format!("{endpoint}: {reason}"));
            }
        }
        self.set_refused(refused);
    }

    /// Removes a worker that its source no longer names, or that has drained.
    pub(super) fn depart(&mut self, worker: WorkerId, source: Option<usize>) {
        let Some(source) = source else { return };
        if let Some(status) = self.statuses.get_mut(source) {
            status.leaving.insert(worker);
            self.outbox.sources_changed = true;
        }
        self.remove(worker, Completion::Departed { source, worker });
    }

    /// Also moves workers to the source that has precedence now, and ends what no source names from `withheld`.
    fn difference(&mut self) -> Difference {
        let by_source: BTreeSet<WorkerId> =
            self.workers.keys().copied().filter(|worker| self.is_drained_by_source(*worker)).collect();
        let union = self.desired.union();
        let mut difference = Difference::default();
        for (worker, registered) in &self.workers {
            let source = registered.source.filter(|_| !union.contains_key(worker));
            difference.departed.extend(source.map(|source| (*worker, source)));
        }
        self.withheld.retain(|worker| union.contains_key(worker));
        for (worker, (source, config)) in union {
            let is_current = match self.workers.get_mut(&worker) {
                None => config.drain || self.withheld.contains(&worker),
                Some(registered) if registered.draining && !by_source.contains(&worker) => true,
                Some(registered) => match &mut registered.source {
                    None => true, // added by the embedder
                    Some(named_by) => {
                        *named_by = source;
                        match (registered.draining, config.drain) {
                            (false, true) => difference.drained.push(worker),
                            (true, false) => difference.undrained.push(worker),
                            (false, false) | (true, true) => {}
                        }
                        config.drain || registered.config == *config
                    }
                },
            };
            if !is_current {
                difference.changed.push((worker, source, config.clone()));
            }
        }
        difference
    }

    /// A worker that left a source twice leaves until its last rank has retired.
    pub(super) fn finish_departure(&mut self, source: usize, worker: WorkerId) {
        let is_same = |removal: &PendingRemoval<R>| matches!(removal.completion, Completion::Departed { source: s, worker: w } if (s, w) == (source, worker));
        if self.removals.iter().any(is_same) {
            return;
        }
        if let Some(status) = self.statuses.get_mut(source) {
            self.outbox.sources_changed |= status.leaving.remove(&worker);
        }
    }

    /// Updates [`DiscoveryStatus::removed`] of all sources.
    pub(super) fn refresh_removed(&mut self) {
        for (source, status) in self.statuses.iter_mut().enumerate() {
            let Some(named) = self.desired.of(source) else { continue };
            let removed = named.iter().filter(|(worker, _)| self.withheld.contains(worker));
            let removed: BTreeMap<_, _> = removed.map(|(worker, config)| (*worker, config.endpoint.clone())).collect();
            if status.removed != removed {
                status.removed = removed;
                self.outbox.sources_changed = true;
            }
        }
    }

    fn set_refused(&mut self, mut refused: Refused) {
        for source in 0..self.statuses.len() {
            let refused = refused.remove(&source).unwrap_or_default();
            let known = std::mem::take(&mut self.statuses[source].refused);
            for (&worker, error) in refused.iter().filter(|(worker, error)| known.get(worker) != Some(error)) {
                let (endpoint, error) = (self.endpoint_at(worker, source), error.clone());
                self.outbox.report(MembershipReport::WorkerRefused { worker, endpoint, error });
            }
            self.outbox.sources_changed |= known != refused;
            self.statuses[source].refused = refused;
        }
    }

    /// Endpoint of a worker in the set of a source.
    fn endpoint_at(&self, worker: WorkerId, source: usize) -> Option<String> {
        let config = self.desired.of(source)?.get(&worker)?;
        Some(config.endpoint.clone())
    }

    /// Whether a source names the worker.
    pub(super) fn is_named(&self, worker: WorkerId) -> bool {
        (0..self.statuses.len()).filter_map(|source| self.desired.of(source)).any(|set| set.contains_key(&worker))
    }
}
