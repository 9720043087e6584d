//! What the closed loop and the simulation drive: a router, as a caller and the engines see it.

use std::error::Error;
use std::future::Future;
use std::num::NonZeroU32;

use pointsman::protocol::{BlockHash, KvEvent, StorageTier, StoredBlock, WorkerRank};

use crate::engine::Change;

/// Why a target refused. Only ever shown.
pub type Refusal = Box<dyn Error + Send + Sync>;

/// One request as a gateway's task hands it to a router.
///
/// Its parts are made before the clock, and freshly: a tokenizer has just written the tokens, and an HTTP layer the id.
#[derive(Debug)]
pub struct Call {
    /// The caller's name for the request, unique in the run.
    pub id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
}

/// Where a request went, and what its caller must give back.
#[derive(Debug)]
pub struct Routed<H> {
    /// The rank chosen.
    pub rank: WorkerRank,
    /// The target's name for the booking.
    pub handle: H,
    /// Prompt tokens that the target believes the rank has cached, where it says.
    pub cached_tokens: Option<u64>,
    /// The time to the first token that the target foresees, in µs, where it does.
    pub ttft_us: Option<u64>,
}

impl<H> Routed<H> {
    /// Went to `rank`; nothing is foreseen.
    pub fn new(rank: WorkerRank, handle: H) -> Self {
        Self { rank, handle, cached_tokens: None, ttft_us: None }
    }
}

/// A router under test.
///
/// Everything that a future here does counts as the router's work, whichever thread does it; so do all threads that
/// the target runs. `hash`, `event` and `encode` are the simulated engines' side and do not count.
pub trait Target: Send + Sync + Sized + 'static {
    /// What ends a booking.
    type Handle: Send + 'static;
    /// A KV event in the router's own vocabulary.
    type Event: Send + 'static;

    /// The target's name in reports.
    const NAME: &'static str;

    /// Content hashes of the complete blocks of `tokens`, as the router will compute them from a request: engines put
    /// them into their events.
    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash>;

    /// What `rank` says of a tier of its cache, in the router's vocabulary. Called in the order in which it is said.
    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> Self::Event;

    /// Appends the events of `change`, which serving `blocks` on `rank` made: the removal first.
    fn encode(&self, rank: WorkerRank, blocks: &[StoredBlock], change: &Change, events: &mut Vec<Self::Event>) {
        let mut push = |data| events.push(self.event(rank, StorageTier::Device, data));
        if !change.removed.is_empty() {
            push(KvEvent::Removed { blocks: change.removed.clone() });
        }
        if !change.stored.is_empty() {
            push(KvEvent::Stored { parent: change.parent(blocks), blocks: blocks[change.stored.clone()].to_vec() });
        }
    }

    /// Picks a rank and books the request on it.
    fn route(&self, call: Call) -> impl Future<Output = Result<Routed<Self::Handle>, Refusal>> + Send;

    /// Takes one rank's events, in order.
    fn apply_events(&self, events: Vec<Self::Event>) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// The request's first token is out.
    fn prefill_completed(&self, handle: &mut Self::Handle) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// One more block of the request's output is there. A target that does not count output need do nothing.
    fn output_block(&self, _handle: &mut Self::Handle) -> impl Future<Output = Result<(), Refusal>> + Send {
        async { Ok(()) }
    }

    /// The engine found so many tokens of the prompt cached. A target that does not learn from it need do nothing.
    fn delivered(&self, _handle: &mut Self::Handle, _cached_tokens: u64) {}

    /// Returns when everything handed over before has been taken in. Only a target with threads of its own need wait.
    fn settle(&self) -> impl Future<Output = Result<(), Refusal>> + Send {
        async { Ok(()) }
    }

    /// Bookings that have not ended, where the target counts them.
    fn bookings(&self) -> Option<usize> {
        None
    }

    /// The request is over.
    fn free(&self, handle: Self::Handle) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Ends the router. Not measured.
    fn shutdown(self) -> impl Future<Output = ()> + Send;
}
