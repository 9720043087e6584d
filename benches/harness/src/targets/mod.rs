//! Routers under test, for the loops in real and in virtual time: their interface, and Pointsman's own.

mod embedded;

use std::future::Future;
use std::num::NonZeroU32;

use pointsman::protocol::{BlockHash, KvEvent, StorageTier, StoredBlock, WorkerRank};

pub use embedded::Embedded;

use crate::Failed;
use crate::engine::Change;

/// One request as a gateway passes it to a router.
///
/// Its parts are created before the measured time, as new allocations: in a gateway, a tokenizer has just produced the
/// tokens, and the HTTP layer the id.
#[derive(Debug)]
pub struct Call {
    /// The caller's id of the request, unique in the run.
    pub id: String,
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Session of the request, if the caller names one.
    pub session: Option<String>,
}

/// Placement of a request and the handle of its booking.
#[derive(Debug)]
pub struct Routed<H> {
    /// The chosen rank.
    pub rank: WorkerRank,
    /// The target's handle of the booking.
    pub handle: H,
    /// Prompt tokens that the target expects to be cached on the rank, if it reports them.
    pub cached_tokens: Option<u64>,
    /// Predicted time to the first token in µs, if the target has one.
    pub ttft_us: Option<u64>,
}

impl<H> Routed<H> {
    /// Creates a placement on `rank` without predictions.
    pub fn new(rank: WorkerRank, handle: H) -> Self {
        Self { rank, handle, cached_tokens: None, ttft_us: None }
    }
}

/// A router under test.
///
/// All work of the futures counts as the router's, on any thread, and so do all threads of the target. `hash`, `event`
/// and `encode` belong to the simulated engines and do not count.
pub trait Target: Send + Sync + Sized + 'static {
    /// Handle of a booking.
    type Handle: Send + 'static;
    /// KV event in the router's format.
    type Event: Send + 'static;

    /// Name of the target in reports.
    const NAME: &'static str;

    /// Content hashes of the complete blocks of `tokens`, as the router computes them for a request. The simulated
    /// engines use them in their events.
    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash>;

    /// Creates an event of `rank` for a tier of its cache. Called in order of the events.
    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> Self::Event;

    /// Appends the events of `change`, the result of serving `blocks` on `rank`. The removal comes first.
    fn encode(&self, rank: WorkerRank, blocks: &[StoredBlock], change: &Change, events: &mut Vec<Self::Event>) {
        let mut push = |data| events.push(self.event(rank, StorageTier::Device, data));
        if !change.removed.is_empty() {
            push(KvEvent::Removed { blocks: change.removed.clone() });
        }
        if !change.stored.is_empty() {
            push(KvEvent::Stored { parent: change.parent(blocks), blocks: blocks[change.stored.clone()].to_vec() });
        }
    }

    /// Selects a rank and books the request on it.
    fn route(&self, call: Call) -> impl Future<Output = Result<Routed<Self::Handle>, Failed>> + Send;

    /// Applies events of one rank, in order.
    fn apply_events(&self, events: Vec<Self::Event>) -> impl Future<Output = Result<(), Failed>> + Send;

    /// Rank of the decode leg, if the rank of [`Routed`] only computes the prompt. The default returns none, for targets
    /// with one pool.
    fn decode_rank(&self, _handle: &Self::Handle) -> Option<WorkerRank> {
        None
    }

    /// Reports the first token of a request, and before it the end of its prefill leg, if it has one.
    fn prefill_completed(&self, handle: &mut Self::Handle) -> impl Future<Output = Result<(), Failed>> + Send;

    /// Reports one more output block of a request. The default does nothing, for targets that do not count output.
    fn output_block(&self, _handle: &mut Self::Handle) -> impl Future<Output = Result<(), Failed>> + Send {
        async { Ok(()) }
    }

    /// Reports the number of cached prompt tokens from the engine. The default does nothing, for targets that do not
    /// use it.
    fn delivered(&self, _handle: &mut Self::Handle, _cached_tokens: u64) {}

    /// Returns when all earlier input has been processed. Only targets with their own threads need to wait.
    fn settle(&self) -> impl Future<Output = Result<(), Failed>> + Send {
        async { Ok(()) }
    }

    /// Number of active bookings, if the target counts them.
    fn bookings(&self) -> Option<usize> {
        None
    }

    /// Checks that nothing is left after the last request. The default does nothing, for targets that do not count it.
    fn check_empty(&self) -> impl Future<Output = Result<(), Failed>> + Send {
        async { Ok(()) }
    }

    /// Frees the booking of a completed request.
    fn free(&self, handle: Self::Handle) -> impl Future<Output = Result<(), Failed>> + Send;

    /// Stops the router. Not measured.
    fn shutdown(self) -> impl Future<Output = ()> + Send;
}

/// Error for a target that rejected `step` of a request, given by its position in the workload.
pub(crate) fn refused<T: Target>(step: &'static str, request: usize) -> impl FnOnce(Failed) -> Failed {
    move |reason| format!("{} could not {step} request {request}: {reason}", T::NAME).into()
}

/// Error for a target that could not be started.
pub(crate) fn not_started<T: Target>(reason: Failed) -> Failed {
    format!("cannot start {}: {reason}", T::NAME).into()
}

/// Error for a target that placed a request on a rank outside the fleet.
pub(crate) fn misplaced<T: Target>(request: usize, rank: WorkerRank) -> Failed {
    format!("{} placed request {request} on {rank}, which is not in the fleet", T::NAME).into()
}
