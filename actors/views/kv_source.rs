//! What is known of each rank's event source, for others to read.
//!
//! Owns one cell a rank ([`SourceCell`]) and the words it is shown in ([`KvSourceStatus`]). Promises that a reader never
//! waits for a source, and that looking at an overlap costs one relaxed load while every source is trusted. Written by the
//! rank's ingest only; a rank whose events its embedder brings has a cell that nobody writes, and is trusted.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::ingest::{DegradationReason, StreamState};
use crate::protocol::{Timestamp, WorkerRank};

/// How one rank's KV events are doing.
#[derive(Clone, Debug, PartialEq)]
pub struct KvSourceStatus {
    /// The rank.
    pub rank: WorkerRank,
    /// Where it publishes.
    pub endpoint: String,
    /// Whether the subscription stands.
    pub connected: bool,
    /// Whether everything that the publisher has said until now is known, be that nothing: also while it is silent.
    pub caught_up: bool,
    /// How far what the index knows of the rank is trusted.
    pub trust: StreamState,
    /// What is wrong, in words; absent while nothing is.
    pub doubt: Option<String>,
    /// Why the last connection, or attempt at one, ended.
    pub last_error: Option<String>,
    /// Number of the last message whose events have been handed to the index; absent before the first.
    pub applied: Option<u64>,
    /// Messages received, replayed ones included.
    pub messages: u64,
    /// Since the last of them; absent where none has come.
    pub message_age: Option<Duration>,
}

/// How many ranks are credited with less than all they are known to guard.
pub(crate) type DegradedSources = Arc<AtomicUsize>;

/// One rank's cell.
#[derive(Debug)]
pub(crate) struct SourceCell {
    /// Set once, where there is a source.
    endpoint: Mutex<Option<Arc<str>>>,
    connected: AtomicBool,
    caught_up: AtomicBool,
    /// What is taken off the credit, in thousandths.
    discount_permille: AtomicU32,
    trust: Mutex<(StreamState, Option<DegradationReason>)>,
    last_error: Mutex<Option<String>>,
    messages: AtomicU64,
    /// Plus one; 0 before the first.
    applied: AtomicU64,
    /// Plus one; 0 before the first message.
    message_at: AtomicU64,
    degraded: DegradedSources,
    /// Whether the engine has computed a prompt of at least one block.
    has_served: AtomicBool,
    /// Whether the reader is to be told when the engine has served a prompt.
    #[cfg(feature = "zmq")]
    awaits_served: AtomicBool,
    /// Notified then.
    #[cfg(feature = "zmq")]
    served: tokio::sync::Notify,
    /// Held by the task that reads: its successor must not be overtaken by what it still has in hand.
    #[cfg(feature = "zmq")]
    reader: tokio::sync::Mutex<()>,
}

const PERMILLE: u32 = 1000;

impl SourceCell {
    pub(crate) fn new(degraded: &DegradedSources) -> Self {
        Self {
            endpoint: Mutex::new(None),
            connected: AtomicBool::new(false),
            caught_up: AtomicBool::new(false),
            discount_permille: AtomicU32::new(0),
            trust: Mutex::new((StreamState::Live, None)),
            last_error: Mutex::new(None),
            messages: AtomicU64::new(0),
            applied: AtomicU64::new(0),
            message_at: AtomicU64::new(0),
            degraded: Arc::clone(degraded),
            has_served: AtomicBool::new(false),
            #[cfg(feature = "zmq")]
            awaits_served: AtomicBool::new(false),
            #[cfg(feature = "zmq")]
            served: tokio::sync::Notify::new(),
            #[cfg(feature = "zmq")]
            reader: tokio::sync::Mutex::new(()),
        }
    }

    /// So many of `blocks` count.
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

    /// The engine has computed a prompt of at least one block. Costs two relaxed loads unless it is the first one, or the
    /// reader waits for it.
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

    /// Whether the engine has served prompts, and nobody reads its events.
    pub(crate) fn is_unread(&self) -> bool {
        let has_source = self.endpoint.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        !has_source && self.has_served.load(Ordering::Relaxed)
    }

    /// How far it is trusted; `None` where the rank has no source.
    pub(crate) fn trust(&self) -> Option<StreamState> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?;
        Some(self.trust.lock().unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Whether every block that the rank's engine has announced is in the index, as far as its source is known; true
    /// where the embedder brings the events.
    pub(crate) fn is_complete(&self) -> bool {
        self.trust().is_none_or(|trust| trust == StreamState::Live && self.caught_up.load(Ordering::Relaxed))
    }

    /// How the rank's source is; `None` where it has none.
    pub(crate) fn status(&self, rank: WorkerRank, now: Timestamp) -> Option<KvSourceStatus> {
        let endpoint = self.endpoint.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let (trust, doubt) = *self.trust.lock().unwrap_or_else(PoisonError::into_inner);
        let message_at = self.message_at.load(Ordering::Relaxed).checked_sub(1).map(Timestamp);
        Some(KvSourceStatus {
            rank,
            endpoint: endpoint.to_string(),
            connected: self.connected.load(Ordering::Relaxed),
            caught_up: self.caught_up.load(Ordering::Relaxed),
            trust,
            doubt: doubt.map(|doubt| doubt.to_string()),
            last_error: self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            applied: self.applied.load(Ordering::Relaxed).checked_sub(1),
            messages: self.messages.load(Ordering::Relaxed),
            message_age: message_at.map(|at| now.since(at)),
        })
    }
}

// For the ingest of a rank, the only one to write.
#[cfg(feature = "zmq")]
impl SourceCell {
    /// The rank is read from `endpoint` from now on, and nothing that was said before is known.
    pub(crate) fn begin(&self, endpoint: &str) {
        *self.endpoint.lock().unwrap_or_else(PoisonError::into_inner) = Some(endpoint.into());
        self.start_over();
    }

    /// There is no source any more: what is known is what the embedder says.
    pub(crate) fn end(&self) {
        *self.endpoint.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.forget();
    }

    /// Waits until whoever read before has ended, and is the one who reads until the answer is dropped.
    pub(crate) async fn read(&self) -> ReaderPermit<'_> {
        let permit = self.reader.lock().await;
        self.start_over();
        ReaderPermit { cell: self, _permit: permit }
    }

    /// Waits until nobody reads, and keeps it so until the answer is dropped; `None` if somebody is to read by then.
    pub(crate) async fn once_left(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        let permit = self.reader.lock().await;
        let is_left = self.endpoint.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        is_left.then_some(permit)
    }

    fn start_over(&self) {
        self.set_connected(false);
        self.applied.store(0, Ordering::Relaxed);
        self.set_trust(StreamState::Recovering, None);
    }

    fn forget(&self) {
        self.set_connected(false);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.set_trust(StreamState::Live, None);
    }

    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
        self.caught_up.fetch_and(connected, Ordering::Relaxed);
    }

    pub(crate) fn await_served(&self, awaits_served: bool) {
        self.awaits_served.store(awaits_served, Ordering::Relaxed);
    }

    /// Waits until the engine has served a prompt, if that is awaited.
    pub(crate) async fn served(&self) {
        self.served.notified().await;
    }

    pub(crate) fn set_caught_up(&self, caught_up: bool) {
        self.caught_up.store(caught_up, Ordering::Relaxed);
    }

    pub(crate) fn set_error(&self, error: String) {
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    pub(crate) fn count_message(&self, now: Timestamp) {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.message_at.store(now.0.saturating_add(1), Ordering::Relaxed);
    }

    pub(crate) fn set_applied(&self, sequence: u64) {
        self.applied.store(sequence.saturating_add(1), Ordering::Relaxed);
    }

    pub(crate) fn set_trust(&self, trust: StreamState, doubt: Option<DegradationReason>) {
        let discount = ((1.0 - trust.credit()) * f64::from(PERMILLE)).round() as u32;
        let before = self.discount_permille.swap(discount.min(PERMILLE), Ordering::Relaxed);
        match (before, discount) {
            (0, 1..) => drop(self.degraded.fetch_add(1, Ordering::Relaxed)),
            (1.., 0) => drop(self.degraded.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        *self.trust.lock().unwrap_or_else(PoisonError::into_inner) = (trust, doubt);
    }
}

/// The right to read a rank's source.
#[cfg(feature = "zmq")]
pub(crate) struct ReaderPermit<'a> {
    cell: &'a SourceCell,
    _permit: tokio::sync::MutexGuard<'a, ()>,
}

#[cfg(feature = "zmq")]
impl Drop for ReaderPermit<'_> {
    fn drop(&mut self) {
        let is_left = self.cell.endpoint.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        if is_left {
            self.cell.forget(); // what the reader has written since
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
