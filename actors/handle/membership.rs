//! Registration, drain, status and shutdown calls of the router handle.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use super::router::{Health, Router};
use crate::actors::discovery::DiscoverySource;
use crate::actors::health::HealthMsg;
use crate::actors::io::memory::memory_bytes;
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::strands::Strands;
use crate::actors::supervisor::{MembershipReply, SupervisorMsg};
use crate::actors::views::Views;
use crate::actors::views::kv_source::KvSourceStatus;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::status::RouterPhase;
use crate::actors::views::worker::WorkerEntry;
use crate::config::{EventMode, PoolRole, RouterConfig};
use crate::error::{Down, MembershipError};
use crate::membership::{DiscoveryStatus, MembershipInput};
use crate::protocol::{BlockSizeOrigin, Timestamp, WorkerConfig, WorkerId};
use crate::select::RankConditions;

/// Longest wait of a shutdown for the actors to stop.
const STOP_WAIT: Duration = Duration::from_millis(200);

impl Router {
    /// Registers a worker or changes its configuration. Returns when its ranks can be chosen.
    ///
    /// A different endpoint counts as a different engine: the bookings and cache contents of the old one are dropped. A
    /// different number of ranks adds or removes the difference.
    ///
    /// # Errors
    /// When the configuration breaks a rule, or the router is down.
    pub async fn upsert_worker(&self, worker: WorkerId, config: WorkerConfig) -> Result<(), MembershipError> {
        let config = Box::new(config);
        self.change(|reply| MembershipInput::Upsert { worker, config, reply }).await.map(drop)
    }

    /// Follows one more discovery source, with the lowest precedence: see
    /// [`RouterBuilder::discovery`](crate::RouterBuilder::discovery).
    ///
    /// # Errors
    /// When the router is down.
    pub fn follow(&self, source: impl DiscoverySource) -> Result<(), Down> {
        let (name, source) = (source.name(), Box::new(source));
        self.supervisor().send_message(SupervisorMsg::Follow { name, source }).map_err(|_| Down::Failed)
    }

    /// Removes a worker. When this returns, all its bookings have ended and it cannot be chosen. A worker in a
    /// discovery source stays removed until the source has stopped naming it, or until [`Router::undrain_worker`].
    ///
    /// # Errors
    /// When the worker is not registered, or the router is down.
    pub async fn remove_worker(&self, worker: WorkerId) -> Result<(), MembershipError> {
        self.change(|reply| MembershipInput::Remove { worker, reply }).await.map(drop)
    }

    /// Stops new work for a worker, and removes it at the end of its last booking or after `deadline`, which ends the
    /// remaining bookings. Returns the number of bookings ended by the deadline.
    ///
    /// The drain continues if the caller drops this future. A worker in a discovery source stays removed until the
    /// source has stopped naming it, or until [`Router::undrain_worker`].
    ///
    /// # Errors
    /// When the worker is not registered, is already draining, is removed or undrained during the call, or the router
    /// is down.
    pub async fn drain_worker(&self, worker: WorkerId, deadline: Duration) -> Result<usize, MembershipError> {
        self.change(|reply| MembershipInput::Drain { worker, deadline, reply }).await
    }

    /// Reverts a drain or a removal. A draining worker accepts work again, and the caller of the drain receives
    /// [`MembershipError::Undrained`]. A drained or removed worker that a discovery source still names is registered
    /// again with the configuration of the source; [`DiscoveryStatus::removed`] lists these workers.
    ///
    /// # Errors
    /// When the worker is registered and not draining, when its source drains it, when no drain or removal exists, or
    /// the router is down.
    pub async fn undrain_worker(&self, worker: WorkerId) -> Result<(), MembershipError> {
        self.change(|reply| MembershipInput::Undrain { worker, reply }).await.map(drop)
    }

    /// Stops new work for a worker. Its requests continue, its KV events are still read, and it stays registered, even
    /// if discovery or the embedder changes its configuration. A cordon ends with [`Router::uncordon_worker`] or with
    /// the removal of the worker. Repeated calls have no effect.
    ///
    /// # Errors
    /// When the worker is not registered, is draining, or the router is down.
    pub async fn cordon_worker(&self, worker: WorkerId) -> Result<(), MembershipError> {
        self.change(|reply| MembershipInput::Cordon { worker, cordoned: true, reply }).await.map(drop)
    }

    /// Ends a cordon. Repeated calls have no effect.
    ///
    /// # Errors
    /// As [`Router::cordon_worker`].
    pub async fn uncordon_worker(&self, worker: WorkerId) -> Result<(), MembershipError> {
        self.change(|reply| MembershipInput::Cordon { worker, cordoned: false, reply }).await.map(drop)
    }

    /// Sets the rank conditions that the router cannot observe: overloaded and unavailable ranks. The value replaces
    /// the previous one. After this returns it applies to every decision.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn set_conditions(&self, conditions: RankConditions) -> Result<(), Down> {
        self.views().status.up()?;
        publish_conditions(self.views(), self.strands(), conditions);
        let before = self.views().status.state();
        self.strands().scheduler.tell(SchedulerMsg::Conditions);
        // If a dying scheduler drops the reply, its successor starts with these conditions.
        let applied = self.strands().scheduler.ask(|_| ());
        let _ = self.views().status.reply_of(applied, before).await;
        self.views().status.up()
    }

    /// Registers workers by id alone, with one rank and no endpoint, for embedders that dispatch requests themselves.
    /// Registered workers remain unchanged.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn register_workers(&self, workers: impl IntoIterator<Item = WorkerId>) -> Result<(), MembershipError> {
        for worker in workers {
            if !self.workers().iter().any(|known| known.worker == worker) {
                self.upsert_worker(worker, WorkerConfig::at("")).await?;
            }
        }
        Ok(())
    }

    /// The registered workers, by id.
    #[must_use]
    pub fn workers(&self) -> Arc<[WorkerEntry]> {
        self.views().fleet.workers()
    }

    /// The registered workers, as a watch, for instance to wait for the first one.
    ///
    /// ```
    /// # async fn example(router: &pointsman::Router) {
    /// let mut workers = router.watch_workers();
    /// let found = workers.wait_for(|workers| workers.iter().any(|worker| worker.takes_requests())).await;
    /// # drop(found);
    /// # }
    /// ```
    #[must_use]
    pub fn watch_workers(&self) -> watch::Receiver<Arc<[WorkerEntry]>> {
        self.views().fleet.subscribe()
    }

    /// Memory available to the process in bytes: that of the machine or the smallest limit of its cgroups. `None` if the
    /// system reports none.
    ///
    /// ```
    /// assert!(pointsman::Router::memory_bytes().is_none_or(|bytes| bytes > 1 << 20));
    /// ```
    #[must_use]
    pub fn memory_bytes() -> Option<u64> {
        memory_bytes()
    }

    /// Present time of the router's clock, which starts with the router. [`DiscoveryStatus::stale_for`] takes it.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.edge().clock.now()
    }

    /// Status of each source of workers, in the order of their addition.
    #[must_use]
    pub fn discovery(&self) -> Vec<DiscoveryStatus> {
        self.views().discovery.borrow().clone()
    }

    /// Health of the router.
    #[must_use]
    pub fn health(&self) -> Health {
        Health {
            state: self.views().status.up(),
            ranks: self.workers().iter().map(|worker| worker.ranks.len()).sum(),
            cold: self.views().cold.borrow().clone(),
            problems: self.problems(),
            hung: self.views().hung.get().to_vec(),
            restarts: self.views().status.restarts(),
            leases: self.intake().directory.len(),
        }
    }

    fn problems(&self) -> Vec<String> {
        let statuses = self.kv_sources();
        let unused = statuses.iter().filter_map(|KvSourceStatus { rank, unused, .. }| {
            Some(format!("KV events of rank {rank} are partly unused: {}", unused.as_ref()?))
        });
        let unused: Vec<_> = unused.collect();
        let sources = statuses.into_iter().filter_map(|KvSourceStatus { rank, state, reason, last_error, .. }| {
            let last_error = last_error.map(|error| format!("; last error: {error}")).unwrap_or_default();
            Some(format!("KV events of rank {rank} are {}: {}{last_error}", state.name(), reason?))
        });
        let hung = self.views().hung.get();
        let hung = hung.iter().map(|actor| format!("{actor} hangs"));
        hung.chain(sources).chain(unused).chain(self.unread()).chain(self.edge().meters.never_matching()).collect()
    }

    /// Ranks in service without any applied KV event, although events are enabled.
    fn unread(&self) -> Vec<String> {
        let config = self.config();
        let consequence = match config.events.mode {
            EventMode::On if config.has_index() => "the rank is chosen by load and sessions alone",
            EventMode::Auto if config.has_index() => "its index entries are speculative",
            EventMode::On | EventMode::Auto | EventMode::Off => return Vec::new(),
        };
        let mut entries = self.views().ranks.all();
        entries.retain(|entry| entry.source.is_unread() && entry.cells.holdings.changed_at().is_none());
        entries.sort_by_key(|entry| entry.rank);
        let problem = |entry: &Arc<RankEntry>| {
            format!(
                "no KV event of rank {} ({}) has been applied although it serves requests, so {consequence}: give its \
                 worker an event endpoint (kv_events), or set events.mode to auto or off",
                entry.rank, entry.endpoint
            )
        };
        entries.iter().map(problem).collect()
    }

    /// Block size in force, in tokens. Without [`RouterConfig::block_size`] it follows from the workers, and may change as
    /// [`Router::block_size_origin`] describes; prompts that an embedder hashes itself, and KV events that it supplies,
    /// then have the wrong size. An embedder that does either configures the size.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.edge().block_size.tokens()
    }

    /// Origin of [`Router::block_size`].
    #[must_use]
    pub fn block_size_origin(&self) -> BlockSizeOrigin {
        self.edge().block_size.get().origin
    }

    /// Role of the pool.
    #[must_use]
    pub fn role(&self) -> PoolRole {
        self.config().role
    }

    /// Configuration of the router.
    #[must_use]
    pub fn config(&self) -> &RouterConfig {
        &self.edge().config
    }

    /// Maximum context length of the workers, above which prompts are rejected. `None` if unknown for any worker.
    #[must_use]
    pub fn max_model_len(&self) -> Option<u32> {
        self.views().fleet.prompt_limits().model_len
    }

    /// Stops the router: rejects new requests, waits until all bookings have ended or `deadline` has passed, then stops
    /// every actor. Returns the number of remaining bookings.
    pub async fn shutdown(self, deadline: Duration) -> usize {
        let (status, directory) = (&self.views().status, &self.intake().directory);
        status.enter(RouterPhase::Draining);
        // Polled, so that requests bear no cost for the shutdown.
        let at_rest = async {
            while !directory.is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        drop(tokio::time::timeout(deadline, at_rest).await);
        let left = directory.len();
        // Stopping is fast unless an actor hangs; `STOP_WAIT` bounds the wait for it.
        drop(self.supervisor().get_cell().stop_and_wait(None, Some(STOP_WAIT)).await);
        status.enter(RouterPhase::Stopped);
        left
    }

    async fn change(
        &self,
        input: impl FnOnce(MembershipReply) -> MembershipInput<MembershipReply>,
    ) -> Result<usize, MembershipError> {
        self.views().status.up()?;
        let (sender, reply) = oneshot::channel();
        self.supervisor().send_message(SupervisorMsg::Membership(input(sender))).map_err(|_| Down::Failed)?;
        // A dying supervisor drops the request without a reply.
        tokio::select! {
            biased;
            Ok(result) = reply => result,
            down = self.views().status.down() => Err(down.into()),
        }
    }
}

/// Publishes the embedder's rank conditions. The scheduler must be notified afterwards.
pub(super) fn publish_conditions(views: &Views, strands: &Strands, conditions: RankConditions) {
    views.conditions.set(conditions);
    strands.health.tell(HealthMsg::MembersChanged); // an ejected rank may be needed now
}
