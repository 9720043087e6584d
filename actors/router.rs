//! The handle: what an embedder holds of a router.
//!
//! Owns the edge: hashing, leases, permits, retries of what was lost. Promises that every call ends in a placement, a
//! rejection that says why, or an error, and that tokens stay in the task that brought them. Leaves decisions to the
//! scheduler and counting to the sequence actors.

mod builder;
mod request;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ractor::ActorRef;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

pub use builder::RouterBuilder;
pub use request::{AddRequest, BestMatch, Prompt, RouteRequest};

use super::gather::Leg;
use super::placement::Placement;
use super::radix::{OverlapNext, RadixMsg, shard_of};
use super::scheduler::{Answered, SchedulerMsg, Ticket};
use super::shared::{Hold, Phase, Shared};
use super::supervisor::SupervisorMsg;
use crate::config::RouterConfig;
use crate::directory::Lease;
use crate::error::{Down, FlushError, MembershipError, RequestError, RouteError};
use crate::load::Weight;
use crate::protocol::{RouterEvent, WorkerConfig, WorkerId, WorkerRank};
use crate::schedule::{Decision, PotentialLoad, Purpose, Request, Target};
use request::Prepared;

/// Times a request that was lost with an actor is tried again.
const ATTEMPTS_MAX: u32 = 6;

/// How long one try waits for the lost actor's restart.
const RESTART_WAIT: Duration = Duration::from_millis(200);

/// How long a shutdown waits for the actors themselves.
const STOP_WAIT: Duration = Duration::from_millis(200);

/// One registered worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerEntry {
    /// Its id.
    pub worker: WorkerId,
    /// Its configuration.
    pub config: WorkerConfig,
    /// Its ranks.
    pub ranks: Vec<WorkerRank>,
}

/// How a router is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// `Ok` while it takes requests.
    pub state: Result<(), Down>,
    /// Registered ranks.
    pub ranks: usize,
    /// Ranks whose cache contents were lost and must be sent again: routing to them goes by load alone.
    pub cold: BTreeSet<WorkerRank>,
    /// Actors restarted since the start.
    pub restarts: u64,
    /// Bookings and requests that have not ended.
    pub leases: usize,
}

/// A running router of one pool: one model, one role, one block size.
///
/// Cheap to clone. Dropping the last handle stops every actor. Must be used inside a tokio runtime with time enabled.
#[derive(Clone)]
pub struct Router {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    supervisor: ActorRef<SupervisorMsg>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.supervisor.stop(None);
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("health", &self.health()).finish()
    }
}

// Requests.
impl Router {
    /// Prepares a router. Nothing runs until [`RouterBuilder::start`].
    pub fn builder(config: RouterConfig) -> RouterBuilder {
        RouterBuilder::new(config)
    }

    /// Places a request: chooses its rank and books it there, in one step.
    ///
    /// Costs one hash of the prompt on the calling task, and for an idle router no thread is woken. Cancel-safe:
    /// dropping the future frees whatever was booked.
    ///
    /// # Errors
    /// See [`RouteError`]. A request that was lost with an actor is tried again before it is given up.
    pub async fn route(&self, request: RouteRequest<'_>) -> Result<Placement, RouteError> {
        let request_id = request.request_id.ok_or(RouteError::MissingRequestId)?;
        let prepared = Prepared::new(&self.shared().config, &request)?;
        let mut attempts = 0;
        loop {
            let (hold, decision) = self.book(request_id, &prepared, Target::Any).await?;
            // A rank that was removed meanwhile has ended the booking.
            if let Some(seat) = self.shared().seat(decision.slot, decision.generation) {
                let hashes = request.routing_hashes.then(|| prepared.hashes()).flatten();
                return Ok(Placement::new(hold, seat, BestMatch::new(&decision, &self.shared().config, hashes)));
            }
            attempts += 1;
            if attempts == ATTEMPTS_MAX {
                return Err(RouteError::Lost { attempts });
            }
        }
    }

    /// The rank that [`Router::route`] would choose now. Books nothing and needs no request id.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn find_best_match(&self, request: RouteRequest<'_>) -> Result<BestMatch, RouteError> {
        let prepared = Prepared::new(&self.shared().config, &request)?;
        let hashes = request.routing_hashes.then(|| prepared.hashes()).flatten();
        match self.ask(&prepared, Purpose::Report).await? {
            Answered::Placed(decision) => Ok(BestMatch::new(&decision, &self.shared().config, hashes)),
            Answered::Rejected(reason) => Err(reason.into()),
            Answered::Surveyed(_) => Err(RouteError::Lost { attempts: 0 }),
        }
    }

    /// What every rank's load would be with this request on it, in rank order. Books nothing.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn potential_loads(&self, request: RouteRequest<'_>) -> Result<Vec<PotentialLoad>, RouteError> {
        let prepared = Prepared::new(&self.shared().config, &request)?;
        match self.ask(&prepared, Purpose::Survey).await? {
            Answered::Surveyed(loads) => Ok(loads),
            Answered::Rejected(reason) => Err(reason.into()),
            Answered::Placed(_) => Err(RouteError::Lost { attempts: 0 }),
        }
    }

    /// Books a request on a rank that the embedder has chosen. The booking lasts until [`Router::free`].
    ///
    /// # Errors
    /// See [`RouteError`]; [`RouteError::UnknownRank`] when the rank is not registered.
    pub async fn add_request(&self, request: AddRequest<'_>) -> Result<(), RouteError> {
        let AddRequest { rank, cached_tokens, expected_prefill_duration, .. } = request;
        let prepared = Prepared::new(&self.shared().config, &request.as_route())?;
        let prepared = if cached_tokens.is_some() { prepared.without_overlap() } else { prepared };
        let target = Target::Exactly { rank, cached_tokens, expected_duration: expected_prefill_duration };
        let (hold, _) = self.book(request.request_id, &prepared, target).await?;
        hold.leave_to_id();
        Ok(())
    }

    /// The request's first token is out. Again is harmless.
    ///
    /// # Errors
    /// When no booking has the id.
    pub fn mark_prefill_completed(&self, request_id: &str) -> Result<(), RequestError> {
        let lease = self.lease(request_id)?;
        if lease.complete_prefill() {
            self.look(&lease);
        }
        Ok(())
    }

    /// One more block of the request's output is there; `decay` as in [`Placement::output_block`].
    ///
    /// # Errors
    /// When no booking has the id, or the decay is outside [0, 1].
    pub fn add_output_block(&self, request_id: &str, decay: Option<f64>) -> Result<(), RequestError> {
        let decay = decay.map(Weight::new).transpose()?;
        let lease = self.lease(request_id)?;
        lease.push_output_block(decay);
        self.look(&lease);
        Ok(())
    }

    /// Ends a request's booking.
    ///
    /// # Errors
    /// When no booking has the id.
    pub fn free(&self, request_id: &str) -> Result<(), RequestError> {
        let lease = self.lease(request_id)?;
        lease.mark_freed();
        self.shared().end(&lease);
        Ok(())
    }

    fn lease(&self, request_id: &str) -> Result<Arc<Lease>, RequestError> {
        self.shared().directory.find(request_id).ok_or_else(|| RequestError::NotFound(request_id.to_owned()))
    }

    fn look(&self, lease: &Arc<Lease>) {
        if let crate::directory::LeaseState::Booked { slot, generation } = lease.state()
            && let Some(seat) = self.shared().seat(slot, generation)
        {
            self.shared().look(&seat, lease);
        }
    }

    /// Books, and tries again what is lost with an actor.
    async fn book(
        &self,
        request_id: &str,
        prepared: &Prepared,
        target: Target,
    ) -> Result<(Hold, Decision), RouteError> {
        for _ in 0..ATTEMPTS_MAX {
            let permit = self.admit()?;
            let restarts = self.shared().status.borrow().restarts;
            let lease = self.shared().directory.enter(request_id, prepared.prompt(), self.shared().clock.now())?;
            let hold = Hold::new(self.shared(), Arc::clone(&lease));
            let answer = self.submit(prepared, target, Purpose::Book, Some(lease), permit);
            match answer.await {
                Ok(Answered::Placed(decision)) => return Ok((hold, decision)),
                Ok(Answered::Rejected(reason)) => return Err(reason.into()),
                Ok(Answered::Surveyed(_)) => {}
                Err(_lost) if hold.lease().is_freed() => return Err(RouteError::Freed),
                Err(_lost) => {
                    drop(hold); // the id is free again for the next try
                    self.wait_for_restart(restarts).await?;
                }
            }
        }
        Err(RouteError::Lost { attempts: ATTEMPTS_MAX })
    }

    /// Asks without booking, and tries again what is lost with an actor.
    async fn ask(&self, prepared: &Prepared, purpose: Purpose) -> Result<Answered, RouteError> {
        for _ in 0..ATTEMPTS_MAX {
            let permit = self.admit()?;
            let restarts = self.shared().status.borrow().restarts;
            match self.submit(prepared, Target::Any, purpose, None, permit).await {
                Ok(answered) => return Ok(answered),
                Err(_lost) => self.wait_for_restart(restarts).await?,
            }
        }
        Err(RouteError::Lost { attempts: ATTEMPTS_MAX })
    }

    /// A place in the waiting room.
    fn admit(&self) -> Result<OwnedSemaphorePermit, RouteError> {
        self.shared().up()?;
        let room = Arc::clone(&self.shared().waiting_room);
        let requests_max = self.shared().config.requests_max;
        room.try_acquire_owned().map_err(|_| RouteError::Overloaded { requests_max })
    }

    /// Sends a request on its way through the shards to the scheduler.
    fn submit(
        &self,
        prepared: &Prepared,
        target: Target,
        purpose: Purpose,
        lease: Option<Arc<Lease>>,
        permit: OwnedSemaphorePermit,
    ) -> oneshot::Receiver<Answered> {
        let (sender, answer) = oneshot::channel();
        let ticket = Ticket { lease, answer: sender, permit };
        let prompt = prepared.prompt();
        let request =
            Request { ticket, prompt, isl_tokens: prepared.isl_tokens(), overlaps: Vec::new(), target, purpose };
        let shared = self.shared();
        let Some(hashes) = prepared.block_hashes().filter(|hashes| !hashes.is_empty() && !shared.shards.is_empty())
        else {
            shared.scheduler.tell(SchedulerMsg::Decide(request));
            return answer;
        };
        let scheduler = Arc::downgrade(&shared.scheduler);
        let next = OverlapNext { hashes: Arc::clone(hashes), request: Mutex::new(Some(request)), scheduler };
        let first = Leg::first(0, next);
        for shard in &shared.shards {
            shard.turn.tell(RadixMsg::Overlap(first.fork()));
        }
        drop(first); // the last leg to go sends the request on
        answer
    }

    /// Waits until something has been restarted since `restarts`, for so long; an error when the router is down.
    async fn wait_for_restart(&self, restarts: u64) -> Result<(), RouteError> {
        let mut status = self.shared().status.subscribe();
        let restarted = status.wait_for(|status| status.restarts > restarts || status.phase != Phase::Serving);
        // Not restarted in time: try anyway, a try costs little.
        drop(tokio::time::timeout(RESTART_WAIT, restarted).await);
        Ok(self.shared().up()?)
    }
}

// Events.
impl Router {
    /// Applies KV events, each rank's in the order given, also across calls that were awaited one after the other.
    ///
    /// Waits while a shard has `event_blocks_max` blocks of events waiting. Does nothing where no index is kept. What
    /// is odd about an event is counted, not an error: `pointsman_kv_events_refused_total`.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Down> {
        self.shared().up()?;
        match self.shared().shards.len() {
            0 => Ok(()),
            1 => self.apply_to(0, events).await,
            shards => {
                let mut by_shard: Vec<Vec<RouterEvent>> = vec![Vec::new(); shards];
                for event in events {
                    by_shard[shard_of(event.rank, shards)].push(event);
                }
                for (shard, events) in by_shard.into_iter().enumerate().filter(|(_, events)| !events.is_empty()) {
                    self.apply_to(shard, events).await?;
                }
                Ok(())
            }
        }
    }

    async fn apply_to(&self, shard: usize, events: Vec<RouterEvent>) -> Result<(), Down> {
        let blocks: usize = events.iter().map(|event| event.data.block_count()).sum();
        // A batch larger than the gate takes all of it; an event that names no block still takes a place.
        let weight = u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, self.shared().config.event_blocks_max);
        let shard = &self.shared().shards[shard];
        let gate: Arc<Semaphore> = Arc::clone(&shard.gate);
        let permit = gate.acquire_many_owned(weight).await.map_err(|_| Down::Stopped)?;
        shard.turn.tell(RadixMsg::Apply { events, permit });
        Ok(())
    }

    /// Ranks whose cache contents were lost with an index shard, as they change. Send each of them again: a
    /// `Cleared` event, then everything the rank holds. From the `Cleared` on it counts as known.
    #[must_use]
    pub fn resyncs(&self) -> watch::Receiver<BTreeSet<WorkerRank>> {
        self.shared().cold.subscribe()
    }

    /// Returns when every event accepted before this call has been applied.
    ///
    /// # Errors
    /// When the router is down, or a shard was lost with events that had been accepted.
    pub async fn flush(&self) -> Result<(), FlushError> {
        self.each_shard(RadixMsg::Flush).await.map(drop)
    }

    /// Everything the index holds, as events that rebuild it, parents first. Reflects every event accepted before this
    /// call.
    ///
    /// # Errors
    /// When the router is down, or a shard was lost before it answered.
    pub async fn dump_events(&self) -> Result<Vec<RouterEvent>, FlushError> {
        Ok(self.each_shard(RadixMsg::Dump).await?.into_iter().flatten().collect())
    }

    async fn each_shard<T>(&self, question: impl Fn(oneshot::Sender<T>) -> RadixMsg) -> Result<Vec<T>, FlushError> {
        self.shared().up()?;
        let mut asked = Vec::new();
        for shard in &self.shared().shards {
            let (sender, answer) = oneshot::channel();
            shard.turn.tell(question(sender));
            asked.push(answer);
        }
        let mut answers = Vec::new();
        for answer in asked {
            match answer.await {
                Ok(answer) => answers.push(answer),
                Err(_lost) => return Err(self.shared().up().err().map_or(FlushError::Lost, FlushError::Down)),
            }
        }
        Ok(answers)
    }
}

// Workers and lifecycle.
impl Router {
    /// Adds a worker, or changes one. Returns when its ranks can be chosen.
    ///
    /// Another endpoint counts as another engine: bookings and cache contents of the old one are gone. Another number
    /// of ranks adds or removes just those.
    ///
    /// # Errors
    /// When the configuration breaks a rule, or the router is down.
    pub async fn upsert_worker(&self, worker: WorkerId, config: WorkerConfig) -> Result<(), MembershipError> {
        self.change(|answer| SupervisorMsg::Upsert { worker, config, answer }).await
    }

    /// Removes a worker. When this returns, all its bookings have ended and it is never chosen again.
    ///
    /// # Errors
    /// When there is no such worker, or the router is down.
    pub async fn remove_worker(&self, worker: WorkerId) -> Result<(), MembershipError> {
        self.change(|answer| SupervisorMsg::Remove { worker, answer }).await
    }

    /// Registers workers by id alone, single-rank and without endpoint, for embedders that dispatch by themselves.
    /// Workers that are registered stay as they are.
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
        Arc::clone(&self.shared().workers.borrow())
    }

    /// How the router is.
    #[must_use]
    pub fn health(&self) -> Health {
        Health {
            state: self.shared().up(),
            ranks: self.workers().iter().map(|worker| worker.ranks.len()).sum(),
            cold: self.shared().cold.borrow().clone(),
            restarts: self.shared().status.borrow().restarts,
            leases: self.shared().directory.len(),
        }
    }

    /// The router's configuration.
    #[must_use]
    pub fn config(&self) -> &RouterConfig {
        &self.shared().config
    }

    /// Stops the router: refuses new requests, waits until all bookings have ended or `deadline` has passed, stops
    /// every actor. Returns the number of bookings that had not ended.
    pub async fn shutdown(self, deadline: Duration) -> usize {
        let shared = Arc::clone(self.shared());
        shared.enter(Phase::Draining);
        drop(tokio::time::timeout(deadline, shared.at_rest()).await);
        let left = shared.directory.len();
        // Stopping takes no time of its own, unless an actor is stuck; nobody waits for that one.
        drop(self.supervisor().get_cell().stop_and_wait(None, Some(STOP_WAIT)).await);
        shared.enter(Phase::Stopped);
        left
    }

    async fn change(
        &self,
        change: impl FnOnce(oneshot::Sender<Result<(), MembershipError>>) -> SupervisorMsg,
    ) -> Result<(), MembershipError> {
        self.shared().up()?;
        let (sender, answer) = oneshot::channel();
        self.supervisor().send_message(change(sender)).map_err(|_| Down::Failed)?;
        // A supervisor that dies may take the question with it unanswered.
        tokio::select! {
            biased;
            Ok(result) = answer => result,
            down = self.shared().down() => Err(down.into()),
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    pub(super) fn supervisor(&self) -> &ActorRef<SupervisorMsg> {
        &self.inner.supervisor
    }
}
