use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ahash::AHashSet;
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, StorageTier, WorkerId, WorkerRank};

use super::*;
use crate::fleet::Fleet;
use crate::progress::Progress;
use crate::replay::state::Workload;
use crate::targets::Routed;
use pointsman_trial::workload::generate::Chat;

const FLEET: Fleet = Fleet { workers: 2, dp_size: 2 };
const KV_BLOCKS: usize = 400;
pub(crate) const INFLIGHT: usize = 16;
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
        let held = Mutex::new(vec![AHashSet::new(); FLEET.ranks()]);
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

    async fn route(&self, call: Call) -> Result<Routed<String>, Failed> {
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

    async fn apply_events(&self, events: Vec<Self::Event>) -> Result<(), Failed> {
        assert!(!events.is_empty());
        tokio::task::yield_now().await;
        let mut held = self.held.lock().expect("alive");
        for (rank, event) in events {
            let held = &mut held[FLEET.index(rank).expect("known")];
            match event.clone() {
                KvEvent::Stored { parent, blocks } => {
                    assert!(parent.is_none_or(|parent| held.contains(&parent)), "stored behind an unknown block");
                    held.extend(blocks.iter().map(|block| block.engine_hash));
                }
                KvEvent::Removed { blocks } => {
                    for block in blocks {
                        assert!(held.remove(&block), "removed an unknown block");
                    }
                }
                KvEvent::Offloaded { .. }
                | KvEvent::Cleared
                | KvEvent::TierCleared
                | KvEvent::GroupStored { .. }
                | KvEvent::GroupRemoved { .. } => panic!("{event:?} of a device"),
            }
        }
        Ok(())
    }

    async fn prefill_completed(&self, handle: &mut String) -> Result<(), Failed> {
        assert!(self.booked.lock().expect("alive").contains(handle));
        Ok(())
    }

    async fn free(&self, handle: String) -> Result<(), Failed> {
        assert!(self.booked.lock().expect("alive").remove(&handle));
        Ok(())
    }

    async fn shutdown(self) {
        let held = self.held.lock().expect("alive");
        assert!(held.iter().all(|held| held.len() <= KV_BLOCKS), "caches overflow");
    }
}

/// A loop over 400 requests, on a runtime of two threads.
pub(crate) fn on_two_threads(
    target: Strict,
    run: impl AsyncFnOnce(LoopState<Strict>) -> Result<Figures, Failed>,
) -> Result<Figures, Failed> {
    let mut chats = Chat { sessions: 400, ..Chat::default() }.generate(1);
    chats.requests.truncate(400);
    let workload = Workload::prepare::<Strict>(chats.prompts(), BLOCK_SIZE, 1);
    let state = LoopState::new(target, workload, FLEET, KV_BLOCKS, Progress::new(0, "requests"));
    crate::runtime(2)?.block_on(run(state))
}

fn run_strict(target: Strict, count: usize, take_turns: bool) -> Result<Figures, Failed> {
    on_two_threads(target, async |state| run(state, INFLIGHT, count, take_turns).await)
}

#[test]
fn every_booking_ends_and_events_stay_in_order_for_any_number_of_clients() {
    for (clients, take_turns) in [(1, false), (7, false), (7, true)] {
        let target = Strict::new(None);
        let booked = Arc::clone(&target.booked);
        let outcome = run_strict(target, clients, take_turns).expect("runs");
        assert!(booked.lock().expect("alive").is_empty());
        assert_eq!(outcome.requests, 200);
        assert!(outcome.hit_rate > 0.0 && outcome.hit_rate < 1.0 && outcome.event_blocks_per_request > 1.0);
        assert!((1.0..2.0).contains(&outcome.load_max_over_mean), "{}", outcome.load_max_over_mean);
    }
}

#[test]
fn a_rejection_names_target_operation_and_request() {
    let error = run_strict(Strict::new(Some("request-250")), 1, false).expect_err("refused");
    assert_eq!(error.to_string(), "strict could not route request 250: queue full");
}
