//! User-mode instructions of all threads in a run, a figure that is independent of other load on the machine.
//!
//! The counter runs from the start of the router until its shutdown, over both halves of the workload. The loop and the
//! simulated engines are included. Therefore [`RoundRobin`], a router that only selects ranks in rotation, is run in the
//! same way, and its instructions are subtracted from the other figures.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use perf_event::Counter;
use perf_event::events::Hardware;
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, StorageTier, WorkerRank};
use pointsman_bench::Failed;
use pointsman_bench::fleet::Fleet;
use pointsman_bench::targets::{Call, Embedded, Routed, Target};

/// A counter of this process' instructions, shared by the code that opens, starts and reads it.
#[derive(Clone, Default)]
pub(crate) struct Instructions(Arc<Mutex<Option<Counter>>>);

impl Instructions {
    /// Opens a counter, if the system supports and permits it. It covers the threads created afterwards.
    pub(crate) fn open() -> Self {
        let mut builder = perf_event::Builder::new().kind(Hardware::INSTRUCTIONS);
        builder.inherit(true);
        Self(Arc::new(Mutex::new(builder.build().ok())))
    }

    fn with<T>(&self, work: impl FnOnce(&mut Counter) -> std::io::Result<T>) -> Option<T> {
        let mut counter = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counter.as_mut().and_then(|counter| work(counter).ok())
    }

    /// Number of counted instructions.
    pub(crate) fn read(&self) -> Option<u64> {
        self.with(Counter::read)
    }
}

/// A router whose instructions are counted.
pub(crate) struct Metered<T> {
    router: T,
    instructions: Instructions,
}

impl<T> Metered<T> {
    /// Starts the counter.
    pub(crate) fn new(router: T, instructions: &Instructions) -> Self {
        instructions.with(Counter::enable);
        Self { router, instructions: instructions.clone() }
    }
}

impl<T: Target> Target for Metered<T> {
    type Handle = T::Handle;
    type Event = T::Event;

    const NAME: &'static str = T::NAME;

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        T::hash(tokens, block_size)
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> T::Event {
        self.router.event(rank, tier, data)
    }

    async fn route(&self, call: Call) -> Result<Routed<T::Handle>, Failed> {
        self.router.route(call).await
    }

    async fn apply_events(&self, events: Vec<T::Event>) -> Result<(), Failed> {
        self.router.apply_events(events).await
    }

    async fn prefill_completed(&self, handle: &mut T::Handle) -> Result<(), Failed> {
        self.router.prefill_completed(handle).await
    }

    async fn free(&self, handle: T::Handle) -> Result<(), Failed> {
        self.router.free(handle).await
    }

    async fn shutdown(self) {
        self.instructions.with(Counter::disable);
        self.router.shutdown().await;
    }
}

/// Router without state that selects ranks in rotation.
pub(crate) struct RoundRobin {
    fleet: Fleet,
    requests: AtomicU64,
}

impl RoundRobin {
    pub(crate) fn new(fleet: Fleet) -> Self {
        Self { fleet, requests: AtomicU64::new(0) }
    }
}

impl Target for RoundRobin {
    type Handle = ();
    type Event = RouterEvent;

    const NAME: &'static str = "round-robin";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        Embedded::hash(tokens, block_size)
    }

    fn event(&self, rank: WorkerRank, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank, tier, data }
    }

    async fn route(&self, _call: Call) -> Result<Routed<()>, Failed> {
        let turn = self.requests.fetch_add(1, Relaxed) % self.fleet.ranks() as u64;
        let dp_size = u64::from(self.fleet.dp_size);
        let worker = self.fleet.worker_ids().nth((turn / dp_size) as usize).ok_or("a fleet without workers")?;
        Ok(Routed::new(WorkerRank::new(worker, (turn % dp_size) as u32), ()))
    }

    async fn apply_events(&self, _events: Vec<RouterEvent>) -> Result<(), Failed> {
        Ok(())
    }

    async fn prefill_completed(&self, (): &mut ()) -> Result<(), Failed> {
        Ok(())
    }

    async fn free(&self, (): ()) -> Result<(), Failed> {
        Ok(())
    }

    async fn shutdown(self) {}
}
