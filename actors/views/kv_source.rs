//! Published state of each rank's KV event source.
//!
//! One cell per rank ([`SourceCell`]) with its report ([`KvSourceStatus`]). Readers never wait for a source, and
//! scaling an overlap costs one relaxed load while every source is trusted. Only the rank's ingest writes the cell. The
//! cell of a rank whose events come from the embedder is never written and counts as trusted.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "zmq")]
use crate::ingest::DegradationReason;
use crate::ingest::{BlockName, RestoreState, StreamState};
use crate::protocol::{Timestamp, WorkerRank};

/// State of one rank's KV event stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvSourceStatus {
    /// The rank.
    pub rank: WorkerRank,
    /// Address of the publisher.
    pub endpoint: String,
    /// Whether the subscription is connected.
    pub connected: bool,
    /// True once every message published so far has been applied (trivially true if there were none). Stays true while
    /// the stream is silent.
    pub caught_up: bool,
    /// Stream state, which determines the weight of the rank's overlap.
    pub state: StreamState,
    /// Reason of the degradation; absent for a healthy stream.
    pub reason: Option<String>,
    /// Kinds of events that are not used although they name blocks, with their numbers; absent without any.
    pub unused: Option<String>,
    /// Error that ended the last connection or connection attempt.
    pub last_error: Option<String>,
    /// Number of the last message whose events were sent to the index; absent before the first.
    pub applied: Option<u64>,
    /// Messages received, replayed ones included.
    pub messages: u64,
    /// Time of the last message, on the router's clock; absent before the first.
    pub message_at: Option<Timestamp>,
    /// Progress of the restore from a snapshot; absent without one.
    pub restore: Option<RestoreState>,
    /// Last comparison of the index with the engine's cache; absent before the first.
    pub audit: Option<KvAuditStatus>,
}

/// Last audit of a rank's index contents: see [`Audit`](crate::ingest::Audit).
#[derive(Clone, Debug, PartialEq)]
pub struct KvAuditStatus {
    /// Name of the [`AuditResult`](crate::ingest::AuditResult).
    pub result: &'static str,
    /// Name of the [`AuditCause`](crate::ingest::AuditCause) of an inconclusive result.
    pub cause: Option<&'static str>,
    /// End of the audit, on the router's clock.
    pub at: Timestamp,
    /// End of the last audit without a difference; absent before the first.
    pub equal_at: Option<Timestamp>,
    /// The last difference since the start of the reader.
    pub difference: Option<KvDifferenceStatus>,
}

/// A difference between index and engine.
#[derive(Clone, Debug, PartialEq)]
pub struct KvDifferenceStatus {
    /// Time at which it was found.
    pub at: Timestamp,
    /// End of the last audit without a difference before it, after which it arose.
    pub since: Option<Timestamp>,
    /// Number of blocks that only the index had.
    pub stale_blocks: usize,
    /// Number of blocks that only the engine had.
    pub missing_blocks: usize,
    /// The first of the stale, then of the missing blocks.
    pub examples: Vec<BlockName>,
    /// Correction: `forget` (stale blocks removed), `resync` (replay of the stream) or `wait`.
    pub heal: &'static str,
}

/// Number of ranks with a degraded stream.
pub(crate) type DegradedSources = Arc<AtomicUsize>;

/// State of one rank's source.
#[derive(Debug, Default)]
pub(crate) struct SourceCell {
    /// The report; its endpoint is empty for a rank without a source.
    facts: Mutex<KvSourceStatus>,
    /// Discount on the overlap, in thousandths.
    discount_permille: AtomicU32,
    degraded: DegradedSources,
    /// Whether the engine has computed a prompt of at least one block.
    has_served: AtomicBool,
    /// Whether the reader waits for the first prompt of the engine.
    #[cfg(feature = "zmq")]
    awaits_served: AtomicBool,
    /// Notified at that prompt.
    #[cfg(feature = "zmq")]
    served: tokio::sync::Notify,
    /// Notified when the engine has discarded its cache without an event.
    #[cfg(feature = "zmq")]
    emptied: tokio::sync::Notify,
    /// Locked by the reader task, so that its successor does not overtake events still in its hands.
    #[cfg(feature = "zmq")]
    reader: tokio::sync::Mutex<()>,
}

const PERMILLE: u32 = 1000;

impl SourceCell {
    pub(crate) fn new(rank: WorkerRank, degraded: &DegradedSources) -> Self {
        let mut cell = Self::default();
        (cell.facts().rank, cell.degraded) = (rank, Arc::clone(degraded));
        cell
    }

    /// Scales `blocks` by the weight of its stream state.
    #[inline]
    pub(crate) fn credited(&self, blocks: u32) -> u32 {
        match self.discount_permille.load(Ordering::Relaxed) {
            0 => blocks,
            discount => {
                let credited = u64::from(blocks) * u64::from(PERMILLE - discount) / u64::from(PERMILLE);
                u32::try_from(credited).unwrap_or(blocks)
            }
        }
    }

    /// Records that the engine has computed a prompt of at least one block. Costs two relaxed loads, except for the
    /// first prompt or while the reader waits.
    #[inline]
    pub(crate) fn prompt_served(&self) {
        if !self.has_served.load(Ordering::Relaxed) {
            self.has_served.store(true, Ordering::Relaxed);
        }
        #[cfg(feature = "zmq")]
        if self.awaits_served.load(Ordering::Relaxed) && self.awaits_served.swap(false, Ordering::Relaxed) {
            self.served.notify_one();
        }
    }

    /// The engine has discarded its cache, and publishes that with its next step only.
    pub(crate) fn emptied(&self) {
        #[cfg(feature = "zmq")]
        self.emptied.notify_one();
    }

    /// Whether the engine has served prompts but its events are not read.
    pub(crate) fn is_unread(&self) -> bool {
        self.state().is_none() && self.has_served.load(Ordering::Relaxed)
    }

    /// State of the stream; `None` for a rank without a source.
    pub(crate) fn state(&self) -> Option<StreamState> {
        let facts = self.facts();
        (!facts.endpoint.is_empty()).then_some(facts.state)
    }

    /// Whether the index contains every block that the engine has announced, according to its source. True if the
    /// embedder supplies the events.
    pub(crate) fn is_complete(&self) -> bool {
        let facts = self.facts();
        facts.endpoint.is_empty() || facts.state == StreamState::Live && facts.caught_up
    }

    /// Report on the rank's source; `None` without one.
    pub(crate) fn status(&self) -> Option<KvSourceStatus> {
        Some(self.facts().clone()).filter(|facts| !facts.endpoint.is_empty())
    }

    /// The facts, which the ingest of the rank alone changes.
    pub(crate) fn facts(&self) -> MutexGuard<'_, KvSourceStatus> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// For the ingest of a rank, the only writer.
#[cfg(feature = "zmq")]
impl SourceCell {
    /// Begins reading from `endpoint`, with an empty state.
    pub(crate) fn begin(&self, endpoint: &str) {
        endpoint.clone_into(&mut self.facts().endpoint);
        self.start_over();
    }

    /// Ends the source. From here on the embedder supplies the events.
    pub(crate) fn end(&self) {
        self.facts().endpoint.clear();
        self.forget();
    }

    /// Waits until the previous reader has ended, and takes the permit to read.
    pub(crate) async fn read(&self) -> ReaderPermit<'_> {
        let permit = self.reader.lock().await;
        self.start_over();
        ReaderPermit { cell: self, _permit: permit }
    }

    /// Waits until no reader holds the permit, and blocks readers until the returned guard is dropped. `None` if a
    /// reader has been assigned by then.
    pub(crate) async fn once_left(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        let permit = self.reader.lock().await;
        self.state().is_none().then_some(permit)
    }

    /// Resets the state that the reader reports, except counters.
    pub(crate) fn start_over(&self) {
        self.set_connected(false);
        {
            let mut facts = self.facts();
            (facts.restore, facts.audit, facts.unused, facts.applied) = (None, None, None, None);
        }
        self.set_state(StreamState::Recovering, None);
    }

    fn forget(&self) {
        self.set_connected(false);
        self.facts().last_error = None;
        self.facts().unused = None;
        self.set_state(StreamState::Live, None);
    }

    pub(crate) fn set_connected(&self, connected: bool) {
        let mut facts = self.facts();
        (facts.connected, facts.caught_up) = (connected, facts.caught_up && connected);
    }

    pub(crate) fn await_served(&self, awaits_served: bool) {
        self.awaits_served.store(awaits_served, Ordering::Relaxed);
    }

    /// Waits until the engine has served a prompt, if that is awaited.
    pub(crate) async fn served(&self) {
        self.served.notified().await;
    }

    /// Waits until the engine has discarded its cache.
    pub(crate) async fn once_emptied(&self) {
        self.emptied.notified().await;
    }

    pub(crate) fn count_message(&self, now: Timestamp) {
        let mut facts = self.facts();
        (facts.messages, facts.message_at) = (facts.messages + 1, Some(now));
    }

    pub(crate) fn set_state(&self, state: StreamState, reason: Option<DegradationReason>) {
        let discount = ((1.0 - state.credit()) * f64::from(PERMILLE)).round() as u32;
        let before = self.discount_permille.swap(discount.min(PERMILLE), Ordering::Relaxed);
        match (before, discount) {
            (0, 1..) => drop(self.degraded.fetch_add(1, Ordering::Relaxed)),
            (1.., 0) => drop(self.degraded.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        let mut facts = self.facts();
        (facts.state, facts.reason) = (state, reason.map(|reason| reason.to_string()));
    }
}

/// Permit to read a rank's source.
#[cfg(feature = "zmq")]
pub(crate) struct ReaderPermit<'a> {
    cell: &'a SourceCell,
    _permit: tokio::sync::MutexGuard<'a, ()>,
}

#[cfg(feature = "zmq")]
impl Drop for ReaderPermit<'_> {
    fn drop(&mut self) {
        if self.cell.state().is_none() {
            self.cell.forget(); // values written by this reader
        } else {
            self.cell.set_connected(false);
        }
    }
}

impl Drop for SourceCell {
    fn drop(&mut self) {
        if *self.discount_permille.get_mut() > 0 {
            self.degraded.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
