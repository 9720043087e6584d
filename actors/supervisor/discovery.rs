//! Discovery: what the sources want, compared with what runs.
//!
//! Owns the sources, the last good set of each, and what was said of them. Promises that after each message and each
//! pass the workers are those that the sources name, beside those added by hand, and that trouble is told once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::Counter;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::Mutex;

use super::membership::{Removal, RemovalAnswer};
use super::{Role, State, SupervisorMsg, Worker};
use crate::actors::discovery::{AnySource, Assignment, DiscoveryStatus, Follower, FollowerMsg, News};
use crate::actors::shared::Shared;
use crate::discovery::{Conflict, DesiredSets};
use crate::protocol::{WorkerConfig, WorkerId};

/// The sources and what they want.
#[derive(Default)]
pub(super) struct Sources {
    followed: Vec<Followed>,
    desired: DesiredSets,
    /// A drill: the next news is kept and nothing is done about it.
    #[cfg(feature = "faults")]
    pub(super) misses_next: bool,
}

struct Followed {
    source: Arc<Mutex<Box<dyn AnySource>>>,
    errors: Counter,
    /// Whom to tell of drills.
    #[cfg_attr(not(feature = "faults"), allow(dead_code, reason = "nobody else speaks to it"))]
    actor: ActorRef<FollowerMsg>,
}

/// A worker that a source has stopped naming. Dropped when its last booking has ended.
pub(super) struct Departure {
    shared: Arc<Shared>,
    source: usize,
    worker: WorkerId,
}

impl Drop for Departure {
    fn drop(&mut self) {
        let Self { shared, source, worker } = self;
        shared
            .discovery
            .send_if_modified(|statuses| statuses.get_mut(*source).is_some_and(|status| status.leaving.remove(worker)));
    }
}

impl State {
    /// Begins to follow a source; the earlier ones go before it.
    pub(super) async fn on_follow(
        &mut self,
        name: String,
        source: Box<dyn AnySource>,
    ) -> Result<(), ActorProcessingErr> {
        let number = self.sources.followed.len();
        if number == 0 {
            self.pass_again_and_again();
        }
        let errors = self.shared.meters.pool.counter("pointsman_discovery_errors_total", &[("source", &name)]);
        let status = DiscoveryStatus { source: name, ..DiscoveryStatus::default() };
        self.shared.discovery.send_modify(|statuses| statuses.push(status));
        let source = Arc::new(Mutex::new(source));
        let actor = self.start_follower(number, &source).await?;
        self.sources.followed.push(Followed { source, errors, actor });
        Ok(())
    }

    pub(super) async fn restart_follower(&mut self, number: usize) -> Result<(), ActorProcessingErr> {
        let Some(followed) = self.sources.followed.get(number) else { return Ok(()) };
        let source = Arc::clone(&followed.source);
        self.sources.followed[number].actor = self.start_follower(number, &source).await?;
        Ok(())
    }

    async fn start_follower(
        &mut self,
        number: usize,
        source: &Arc<Mutex<Box<dyn AnySource>>>,
    ) -> Result<ActorRef<FollowerMsg>, ActorProcessingErr> {
        let (supervisor, shared) = (self.myself.clone(), Arc::clone(&self.shared));
        let assignment = Assignment { source: Arc::clone(source), number, supervisor, shared };
        let (actor, _) = Actor::spawn_linked(None, Follower, assignment, self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), Role::Discovery(number));
        Ok(actor)
    }

    /// What has been missed, however that came about, is seen at the next pass.
    fn pass_again_and_again(&self) {
        let (myself, shared) = (self.myself.clone(), Arc::clone(&self.shared));
        let interval = Duration::from_millis(self.shared.config.discovery_interval_ms);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    _ = shared.down() => break,
                    () = tokio::time::sleep(interval) => drop(myself.send_message(SupervisorMsg::Pass)),
                }
            }
        });
    }

    pub(super) async fn on_news(&mut self, source: usize, news: News) -> Result<(), ActorProcessingErr> {
        match news {
            News::Desired(workers) => {
                let count = workers.len();
                let conflicts = self.sources.desired.set(source, workers);
                self.tell_conflicts(&conflicts);
                if let Some(DiscoveryStatus { source: name, last_error: Some(_), .. }) = self.status(source) {
                    let pool = self.shared.config.pool.as_str();
                    tracing::info!(pool, source = name, workers = count, "discovery source recovered");
                }
                self.change_status(source, |status| (status.workers, status.last_error) = (count, None));
            }
            News::Failed(error) => self.tell_error(source, error.to_string()),
            News::Closed => self.change_status(source, |status| status.closed = true),
        }
        #[cfg(feature = "faults")]
        if std::mem::take(&mut self.sources.misses_next) {
            return Ok(());
        }
        self.reconcile().await
    }

    fn tell_conflicts(&self, conflicts: &[Conflict]) {
        let name = |source: usize| self.status(source).map_or(String::new(), |status| status.source);
        for Conflict { worker, heard, ignored } in conflicts {
            let url = self.url_of(*worker, *heard);
            self.shared.meters.discovery_conflicts.increment(1);
            let (heard, ignored) = (name(*heard), name(*ignored));
            tracing::warn!(worker = url, worker_id = %worker, heard, ignored, "two sources name one worker; the first given is heard");
        }
    }

    fn tell_error(&self, source: usize, error: String) {
        if let Some(followed) = self.sources.followed.get(source) {
            followed.errors.increment(1);
        }
        let Some(DiscoveryStatus { source: name, last_error, .. }) = self.status(source) else { return };
        if last_error.as_ref() != Some(&error) {
            let pool = self.shared.config.pool.as_str();
            match self.sources.desired.of(source).map(BTreeMap::len) {
                Some(workers) => {
                    tracing::warn!(
                        pool,
                        source = name,
                        error,
                        workers,
                        "discovery source failed; its last good set of workers stays in force"
                    );
                }
                None => {
                    tracing::warn!(
                        pool,
                        source = name,
                        error,
                        "discovery source failed; it has not returned any workers yet"
                    );
                }
            }
            self.change_status(source, |status| status.last_error = Some(error));
        }
    }

    /// Makes what runs what is wanted.
    pub(super) async fn reconcile(&mut self) -> Result<(), ActorProcessingErr> {
        let union = self.sources.desired.union();
        let gone = |(id, worker): (&WorkerId, &Worker)| {
            worker.source.filter(|_| !union.contains_key(id)).map(|source| (*id, source))
        };
        let gone: Vec<(WorkerId, usize)> = self.workers.iter().filter_map(gone).collect();
        self.drained.retain(|worker| union.contains_key(worker));
        self.show_removed();
        let mut changed: Vec<(WorkerId, usize, WorkerConfig)> = Vec::new();
        for (worker, (source, config)) in &union {
            let is_current = match self.workers.get_mut(worker) {
                // On its way out by hand: not until discovery has stopped naming it.
                None => self.drained.contains(worker),
                Some(known) if known.draining => true,
                Some(known) => match &mut known.source {
                    None => true, // added by hand
                    Some(named_by) => {
                        *named_by = *source;
                        known.config == **config
                    }
                },
            };
            if !is_current {
                changed.push((*worker, *source, (*config).clone()));
            }
        }
        if gone.is_empty() && changed.is_empty() {
            self.show_refused(BTreeMap::new());
            return Ok(());
        }
        let mut is_new = !gone.is_empty();
        for (worker, source) in gone {
            self.depart(worker, source);
        }
        let mut refused: BTreeMap<usize, BTreeMap<WorkerId, String>> = BTreeMap::new();
        for (worker, source, config) in changed {
            match self.on_upsert(worker, config, Some(source)).await? {
                Ok(()) => is_new = true,
                Err(error) => drop(refused.entry(source).or_default().insert(worker, error.to_string())),
            }
        }
        if is_new {
            self.publish_workers();
            self.finish_removals();
        }
        self.show_refused(refused);
        Ok(())
    }

    fn depart(&mut self, worker: WorkerId, source: usize) {
        self.change_status(source, |status| {
            status.leaving.insert(worker);
        });
        let left = self.retire_worker(worker);
        let departure = Departure { shared: Arc::clone(&self.shared), source, worker };
        self.removals.push(Removal { left, answer: RemovalAnswer::Departed(departure) });
    }

    /// Shows which workers of the sources are kept away because they were drained or removed by hand.
    pub(super) fn show_removed(&self) {
        for source in 0..self.sources.followed.len() {
            let Some(named) = self.sources.desired.of(source) else { continue };
            let removed = named.iter().filter(|(worker, _)| self.drained.contains(worker));
            let removed: BTreeMap<_, _> = removed.map(|(worker, config)| (*worker, config.endpoint.clone())).collect();
            if self.status(source).is_some_and(|status| status.removed != removed) {
                self.change_status(source, |status| status.removed = removed);
            }
        }
    }

    /// Workers that cannot be used are left as they were, and told of once.
    fn show_refused(&self, mut refused: BTreeMap<usize, BTreeMap<WorkerId, String>>) {
        for source in 0..self.sources.followed.len() {
            let Some(status) = self.status(source) else { continue };
            let refused = refused.remove(&source).unwrap_or_default();
            for (worker, error) in refused.iter().filter(|(worker, error)| status.refused.get(worker) != Some(error)) {
                let url = self.url_of(*worker, source);
                tracing::warn!(worker = url, worker_id = %worker, error, "discovery names a worker that cannot be used");
            }
            if status.refused != refused {
                self.change_status(source, |status| status.refused = refused);
            }
        }
    }

    /// The endpoint that a source names for a worker.
    fn url_of(&self, worker: WorkerId, source: usize) -> Option<&str> {
        let named = self.sources.desired.of(source).and_then(|set| set.get(&worker));
        named.map(|config| config.endpoint.as_str())
    }

    /// The name of a worker's source in log lines.
    pub(super) fn source_name(&self, source: Option<usize>) -> String {
        let named = source.and_then(|source| self.status(source));
        named.map_or_else(|| "by hand".to_owned(), |status| status.source)
    }

    fn status(&self, source: usize) -> Option<DiscoveryStatus> {
        self.shared.discovery.borrow().get(source).cloned()
    }

    fn change_status(&self, source: usize, change: impl FnOnce(&mut DiscoveryStatus)) {
        self.shared.discovery.send_modify(|statuses| {
            if let Some(status) = statuses.get_mut(source) {
                change(status);
            }
        });
    }

    /// Whether a source names the worker.
    pub(super) fn is_named(&self, worker: WorkerId) -> bool {
        (0..self.sources.followed.len()).filter_map(|n| self.sources.desired.of(n)).any(|set| set.contains_key(&worker))
    }

    #[cfg(feature = "faults")]
    pub(super) fn on_fault_of(&self, source: usize, injected: crate::actors::delivery::fault::InjectedFault) {
        if let Some(followed) = self.sources.followed.get(source) {
            drop(followed.actor.send_message(FollowerMsg::Fault(injected)));
        }
    }
}
