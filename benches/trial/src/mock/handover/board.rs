//! State of disaggregated serving in one engine, shared by its request handlers.
//!
//! Wraps the [`Ledger`] with a lock, a clock and waiting. Leases expire by timers. A restart clears all transfers,
//! changes the engine ids, and ends every wait. Guards close what a dropped request leaves. Blocks are freed outside the
//! lock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::ledger::{Claim, Grant, HandoverCounters, Ledger, Refusal};
use super::transfer::{self, Push, TransferError};
use super::{EngineFacts, LoadFailure};
use crate::driver::{ClientOptions, HttpClient};
use crate::mock::rank::RequestGuard;

/// Blocks of a finished prefill, freed on drop.
struct HeldBlocks {
    #[expect(dead_code, reason = "held for its drop")]
    guard: RequestGuard,
    claimed: oneshot::Sender<()>,
}

/// Disaggregated serving of one engine.
pub(crate) struct HandoverBoard {
    pub(crate) facts: EngineFacts,
    pub(crate) failure: LoadFailure,
    pub(crate) lease: Duration,
    started: Instant,
    state: Mutex<BoardState>,
    /// Notified at every change that a wait may depend on.
    changed: Notify,
    /// Connections to other engines, one per transfer.
    client: HttpClient,
}

#[derive(Default)]
struct BoardState {
    ledger: Ledger<HeldBlocks>,
    /// Pushed transfers without a decode leg, with their deadlines.
    arrivals: BTreeMap<String, (Push, Instant)>,
    /// Keys of the decode legs in progress.
    decodes: BTreeSet<String>,
    /// Abort signals of the requests in progress, by request id.
    aborts: BTreeMap<String, Arc<watch::Sender<bool>>>,
    /// Number of restarts.
    epoch: u64,
    /// Random per incarnation.
    engine_id: u64,
}

/// Reasons for a wait to end without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    Timeout,
    /// The engine restarted.
    Restarted,
}

impl HandoverBoard {
    pub(crate) fn new(facts: EngineFacts, failure: LoadFailure, lease: Duration) -> Arc<Self> {
        let options = ClientOptions { timeout: lease, connections_max: 0, ..ClientOptions::default() };
        Arc::new(Self {
            facts,
            failure,
            lease,
            started: Instant::now(),
            state: Mutex::new(BoardState { engine_id: random(), ..BoardState::default() }),
            changed: Notify::new(),
            client: HttpClient::new(&options).expect("no option can be invalid"),
        })
    }

    pub(crate) fn counters(&self) -> HandoverCounters {
        self.expire();
        self.lock().ledger.counters
    }

    /// Changes the counters of requests.
    pub(crate) fn count(&self, change: impl FnOnce(&mut HandoverCounters)) {
        change(&mut self.lock().ledger.counters);
    }

    /// Address of the engine for engines on this machine.
    pub(crate) fn reachable(&self) -> SocketAddr {
        let address = self.facts.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port()),
            IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), address.port()),
            IpAddr::V4(_) | IpAddr::V6(_) => address,
        }
    }

    /// Engine id of a rank in this incarnation.
    pub(crate) fn engine_id(&self, rank: u16) -> String {
        engine_id(self.lock().engine_id, rank)
    }

    /// A transfer key that no earlier incarnation of the engine used.
    pub(crate) fn numeric_key(&self, request: u64) -> u64 {
        // 53 bits, which every JSON parser preserves.
        crate::mock::faults::splitmix(self.lock().engine_id ^ request) >> 11
    }

    /// Clears all transfers, at a restart or shutdown of the engine.
    pub(crate) fn restart(&self) {
        let mut state = self.lock();
        let lost = state.ledger.clear();
        state.arrivals.clear();
        state.epoch += 1;
        state.engine_id = random();
        drop(state);
        drop(lost);
        self.changed.notify_waiters();
    }

    /// Registers a request until the guard is dropped. `rid` is the name of the request for [`Self::abort`].
    pub(crate) fn run(self: &Arc<Self>, rid: Option<&str>) -> RunningLeg {
        let mut state = self.lock();
        state.ledger.counters.running_now += 1;
        let abort = Arc::new(watch::Sender::new(false));
        let rid = rid.map(str::to_owned);
        if let Some(rid) = &rid {
            state.aborts.insert(rid.clone(), Arc::clone(&abort));
        }
        RunningLeg { board: Arc::clone(self), epoch: state.epoch, rid, abort, decode_key: None, is_torn_by_drop: false }
    }

    /// Aborts the request with this id. Returns whether it exists.
    pub(crate) fn abort(&self, rid: &str) -> bool {
        let mut state = self.lock();
        state.ledger.counters.abort_requests += 1;
        let abort = state.aborts.get(rid).cloned();
        drop(state);
        abort.map(|abort| abort.send_replace(true)).is_some()
    }

    /// Opens a transfer for a prefill leg; none if the key is in use.
    pub(crate) fn open(self: &Arc<Self>, key: &str) -> Option<OpenTransfer> {
        self.expire();
        let mut state = self.lock();
        let is_open = state.ledger.open(key);
        let transfer =
            OpenTransfer { board: Arc::clone(self), key: key.to_owned(), epoch: state.epoch, closes_on_drop: true };
        drop(state);
        self.changed.notify_waiters();
        if is_open {
            return Some(transfer);
        }
        transfer.leave();
        None
    }

    /// Serves a claim of a decode engine.
    ///
    /// # Errors
    /// See [`Refusal`]. A claim that waits is never pending: it is unknown at its timeout.
    pub(crate) async fn claim(&self, claim: &Claim) -> Result<Grant, Refusal> {
        let epoch = self.lock().epoch;
        let mut connection = None;
        let unknown = || Refusal::Unknown(claim.key.clone());
        let claimed = self.wait(epoch, |state| {
            match state.ledger.claim(claim) {
                // A transfer may begin after its claim.
                Err(Refusal::Unknown(_) | Refusal::Pending) if claim.waits => {}
                result => return Some(result),
            }
            // Its prefill leg may have been replaced by another one with the same key.
            if state.ledger.connect(&claim.key, &mut connection) {
                self.changed.notify_waiters();
            }
            None
        });
        let (grant, blocks) = claimed.await.unwrap_or_else(|_| Err(unknown()))?;
        // The prefill leg may have left.
        let _ = blocks.claimed.send(());
        Ok(grant)
    }

    /// Claims a transfer at the prefill engine at `address`, at most for the lease time.
    pub(crate) async fn claim_at(&self, address: &str, claim: &Claim) -> Result<Grant, TransferError> {
        transfer::claim(&self.client, address, claim).await
    }

    /// Pushes a transfer to the decode engine at `address`, at most for the lease time. Returns whether it took it.
    pub(crate) async fn push_to(&self, address: &str, push: &Push) -> bool {
        transfer::push(&self.client, address, push).await
    }

    /// Stores a pushed transfer until its decode leg takes it.
    pub(crate) fn arrive(&self, push: Push) {
        let deadline = Instant::now() + self.lease;
        let mut state = self.lock();
        state.arrivals.retain(|_, (_, deadline)| *deadline > Instant::now());
        state.arrivals.insert(push.key.clone(), (push, deadline));
        drop(state);
        self.changed.notify_waiters();
    }

    /// Waits for a pushed transfer and takes it.
    pub(crate) async fn arrival(&self, key: &str) -> Result<Push, NoResult> {
        let epoch = self.lock().epoch;
        self.wait(epoch, |state| state.arrivals.remove(key).map(|(push, _)| push)).await
    }

    /// Waits until `check` returns a result, at most for the lease time.
    async fn wait<T>(&self, epoch: u64, mut check: impl FnMut(&mut BoardState) -> Option<T>) -> Result<T, NoResult> {
        let deadline = Instant::now() + self.lease;
        loop {
            // Registered before the check, so that no notification is lost between check and wait.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            self.expire();
            {
                let mut state = self.lock();
                if state.epoch != epoch {
                    return Err(NoResult::Restarted);
                }
                if let Some(result) = check(&mut state) {
                    return Ok(result);
                }
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = sleep_until(deadline) => return Err(NoResult::Timeout),
            }
        }
    }

    fn expire(&self) {
        let now_ms = self.now_ms();
        let expired = self.lock().ledger.expire(now_ms);
        if !expired.is_empty() {
            drop(expired);
            self.changed.notify_waiters();
        }
    }

    /// Milliseconds since the start of the engine.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Transfer of a prefill leg. Closed on drop unless it is left open.
pub(crate) struct OpenTransfer {
    board: Arc<HandoverBoard>,
    pub(crate) key: String,
    epoch: u64,
    closes_on_drop: bool,
}

/// A held transfer.
pub(crate) struct HeldTransfer {
    /// Fires when the transfer is claimed, and closes if it ends otherwise.
    pub(crate) claimed: oneshot::Receiver<()>,
    /// End of the lease in milliseconds since the start of the engine.
    pub(crate) expiry_ms: u64,
}

impl OpenTransfer {
    /// Waits until a decode engine has connected.
    pub(crate) async fn connected(&self) -> Result<(), NoResult> {
        self.board.wait(self.epoch, |state| state.ledger.is_connected(&self.key).then_some(())).await
    }

    /// Holds the blocks of the finished prefill until they are claimed, at most for the lease time; none if the engine
    /// restarted.
    pub(crate) fn hold(&self, grant: Grant, prompt: u64, guard: RequestGuard) -> Option<HeldTransfer> {
        let board = &self.board;
        let deadline = Instant::now() + board.lease;
        let expiry_ms = board.now_ms().saturating_add(u64::try_from(board.lease.as_millis()).unwrap_or(u64::MAX));
        let (sender, claimed) = oneshot::channel();
        let blocks = HeldBlocks { guard, claimed: sender };
        let mut state = board.lock();
        if state.epoch != self.epoch {
            return None;
        }
        let engine_id = engine_id(state.engine_id, grant.rank);
        let held = state.ledger.hold(&self.key, grant, prompt, engine_id, expiry_ms, blocks);
        drop(state);
        held.ok()?;
        board.changed.notify_waiters();
        let weak = Arc::downgrade(board);
        tokio::spawn(async move {
            // Timers have a resolution of a millisecond, and the deadline is rounded down to one.
            sleep_until(deadline + Duration::from_millis(1)).await;
            if let Some(board) = weak.upgrade() {
                board.expire();
            }
        });
        Some(HeldTransfer { claimed, expiry_ms })
    }

    /// Reason for a transfer that ended without a claim.
    pub(crate) fn unclaimed(&self) -> NoResult {
        if self.board.lock().epoch == self.epoch { NoResult::Timeout } else { NoResult::Restarted }
    }

    /// Leaves the transfer open after the end of its leg.
    pub(crate) fn leave(mut self) {
        self.closes_on_drop = false;
    }
}

impl Drop for OpenTransfer {
    fn drop(&mut self) {
        let mut state = self.board.lock();
        if self.closes_on_drop && state.epoch == self.epoch {
            let lost = state.ledger.close(&self.key);
            drop(state);
            drop(lost);
            self.board.changed.notify_waiters();
        }
    }
}

/// A request in progress. Its drop ends it.
pub(crate) struct RunningLeg {
    board: Arc<HandoverBoard>,
    epoch: u64,
    rid: Option<String>,
    abort: Arc<watch::Sender<bool>>,
    decode_key: Option<String>,
    /// Whether a drop now cancels a transfer in progress.
    is_torn_by_drop: bool,
}

impl RunningLeg {
    /// Begins the transfer of a decode leg. Returns false if another decode leg has the same key.
    pub(crate) fn begin_transfer(&mut self, key: &str) -> bool {
        if !self.board.lock().decodes.insert(key.to_owned()) {
            return false;
        }
        self.decode_key = Some(key.to_owned());
        self.is_torn_by_drop = true;
        true
    }

    /// Ends the transfer: the first token was generated, or the transfer failed.
    pub(crate) fn end_transfer(&mut self) {
        self.is_torn_by_drop = false;
    }

    /// Signal of an abort. It resolves when the request is aborted.
    pub(crate) fn aborted(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.abort.subscribe();
        async move {
            if receiver.wait_for(|is_aborted| *is_aborted).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Drop for RunningLeg {
    fn drop(&mut self) {
        let mut state = self.board.lock();
        state.ledger.counters.running_now -= 1;
        state.ledger.counters.torn += u64::from(self.is_torn_by_drop && state.epoch == self.epoch);
        if let Some(key) = &self.decode_key {
            state.decodes.remove(key);
        }
        if let Some(rid) = &self.rid
            && state.aborts.get(rid).is_some_and(|abort| Arc::ptr_eq(abort, &self.abort))
        {
            state.aborts.remove(rid);
        }
    }
}

fn engine_id(incarnation: u64, rank: u16) -> String {
    format!("mock-{incarnation:016x}-dp{rank}")
}

/// A random number: two engine processes never share an engine id.
fn random() -> u64 {
    ahash::RandomState::new().hash_one(0)
}
