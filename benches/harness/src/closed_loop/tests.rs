use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ahash::AHashSet;
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, StorageTier, WorkerId, WorkerRank};

use super::*;
use crate::fleet::Fleet;
use crate::target::{Call, Refusal, Routed};
use pointsman_trial::workload::generate::Conversations;

pub(crate) const SHAPE: Shape = Shape { fleet: Fleet { workers: 2, dp_size: 2 }, kv_blocks: 400, inflight: 16 };
const BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(64).expect("not zero");

/// Target that selects ranks in rotation and checks the loop: events arrive in order, and every booking ends once.
pub(crate) struct Strict {
    turn: AtomicU64,
    held: Mutex<Vec<AHashSet<EngineHash>>>,
    pub(crate) booked: Arc<Mutex<AHashSet<String>>>,
    /// Maximum number of simultaneous bookings so far.
    pub(crate) booked_max: Arc<AtomicU64>,
    refuse: Option<&'static str>,
}

impl Strict {
    pub(crate) fn new(refuse: Option<&'static str>) -> Self {
        let held = Mutex::new(vec![AHashSet::new(); SHAPE.fleet.ranks()]);
        Self { turn: AtomicU64::new(0), held, booked: Arc::default(), booked_max: Arc::default(), refuse }
    }

    fn rank_of(turn: u64) -> WorkerRank {
        WorkerRank::new(WorkerId(1 + turn % 2), (turn / 2 % 2) as u32)
    }
}

impl Target for Strict {
    type Handle = String;
    type Event = (WorkerRank, KvEvent);

    const NAME: &'static str = "strict";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        let content = |block: &[u32]| {
            block.iter().fold(0, |hash, &token| pointsman_trial::workload::mix(hash + u64::from(token)))
        };
        tokens.chunks_exact(block_size.get() as usize).map(|block| BlockHash(content(block))).collect()
    }

    fn event(&self, rank: WorkerRank, _: StorageTier, data: KvEvent) -> Self::Event {
        (rank, data)
    }

    async fn route(&self, call: Call) -> Result<Routed<String>, Refusal> {
        if self.refuse == Some(call.id.as_str()) {
            return Err("queue full".into());
        }
        {
            let mut booked = self.booked.lock().expect("alive");
            assert!(booked.insert(call.id.clone()));
            self.booked_max.fetch_max(booked.len() as u64, Relaxed);
        }
        tokio::task::yield_now().await;
        Ok(Routed::new(Self::rank_of(self.turn.fetch_add(1, Relaxed)), call.id))
    }

    async fn apply_events(&self, events: Vec<Self::Event>) -> Result<(), Refusal> {
        assert!(!events.is_empty());
        tokio::task::yield_now().await;
        let mut held = self.held.lock().expect("alive");
        for (rank, event) in events {
            let held = &mut held[SHAPE.fleet.index(rank).expect("known")];
            match event {
                KvEvent::Stored { parent, blocks } => {
                    assert!(parent.is_none_or(|parent| held.contains(&parent)), "stored behind an unknown block");
                    held.extend(blocks.iter().map(|block| block.engine_hash));
                }
                KvEvent::Removed { blocks } => {
                    for block in blocks {
                        assert!(held.remove(&block), "removed an unknown block");
                    }
                }
                KvEvent::Cleared => panic!("engines send no Cleared event"),
            }
        }
        Ok(())
    }

    async fn prefill_completed(&self, handle: &mut String) -> Result<(), Refusal> {
        assert!(self.booked.lock().expect("alive").contains(handle));
        Ok(())
    }

    async fn free(&self, handle: String) -> Result<(), Refusal> {
        assert!(self.booked.lock().expect("alive").remove(&handle));
        Ok(())
    }

    async fn shutdown(self) {
        let held = self.held.lock().expect("alive");
        assert!(held.iter().all(|held| held.len() <= SHAPE.kv_blocks), "caches overflow");
    }
}

/// A workload of 400 requests, on a runtime of two threads.
pub(crate) fn on_two_threads(
    run: impl AsyncFnOnce(Workload) -> Result<Outcome, LoopError>,
) -> Result<Outcome, LoopError> {
    let conversations = Conversations { requests: 400, ..Conversations::default() }.generate(1);
    let workload = Workload::prepare::<Strict>(conversations.prompts(), BLOCK_SIZE);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("runtime");
    runtime.block_on(run(workload))
}

fn run_strict(target: Strict, count: usize, take_turns: bool) -> Result<Outcome, LoopError> {
    let clients = Clients { count, take_turns };
    on_two_threads(async |workload| run(target, workload, SHAPE, clients, None, Progress::new(0, "requests")).await)
}

#[test]
fn every_booking_ends_and_events_stay_in_order_for_any_number_of_clients() {
    for (clients, take_turns) in [(1, false), (7, false), (7, true)] {
        let target = Strict::new(None);
        let booked = Arc::clone(&target.booked);
        let outcome = run_strict(target, clients, take_turns).expect("runs");
        assert!(booked.lock().expect("alive").is_empty());
        assert_eq!((outcome.requests, outcome.route_ns.len()), (200, 200));
        assert!((1..outcome.prompt_blocks).contains(&outcome.cached_blocks));
        assert!(outcome.event_blocks >= outcome.prompt_blocks - outcome.cached_blocks);
        assert!((1.0..2.0).contains(&outcome.load_max_over_mean), "{}", outcome.load_max_over_mean);
    }
}

#[test]
fn a_rejection_names_target_operation_and_request() {
    let error = run_strict(Strict::new(Some("request-250")), 1, false).expect_err("refused");
    assert_eq!(error.to_string(), "strict could not route request 250: queue full");
}
