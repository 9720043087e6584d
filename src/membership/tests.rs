//! Examples.

mod block_sizes;
mod histories;
mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;
use crate::config::{EventMode, PoolRole};
use crate::protocol::{BlockSizeOrigin, KvEventsConfig, PoolBlockSize, WorkerRole};

const RULES: MembershipRules = MembershipRules {
    role: PoolRole::Decode,
    block_size: PoolBlockSize { tokens: 64, origin: BlockSizeOrigin::Awaited },
    index_shards: 1,
    is_eagle: false,
    has_reader: true,
    reads_kv_events: true,
    event_mode: EventMode::On,
    needs_batched_tokens: true,
    source_drain_timeout: Duration::from_secs(60),
    restarts_max: 2,
    restart_window: Duration::from_secs(10),
};

type Place = (Slot, Generation);

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * 1_000_000_000)
}

/// State of the actors after the performed effects.
#[derive(Default)]
struct Performed {
    running: BTreeMap<WorkerRank, (Place, Arc<str>)>,
    restricted: BTreeSet<Place>,
    /// Unacknowledged drains.
    draining: Vec<Place>,
    /// Unacknowledged retirements.
    retiring: Vec<Place>,
    readers: BTreeSet<Slot>,
    timers: Vec<(WorkerId, u64)>,
    cleared: Vec<Slot>,
    started_readers: Vec<Slot>,
    abandoned: Vec<Slot>,
    restarted: Vec<(Child, Vec<WorkerRank>)>,
    block_size: Option<PoolBlockSize>,
    replaced: Vec<Child>,
    failed: bool,
    reports: Vec<MembershipReport>,
    replies: Vec<(u32, Result<usize, MembershipError>)>,
    generations: BTreeMap<Slot, Generation>,
    workers: Vec<PublishedWorker>,
    sources: Vec<DiscoveryStatus>,
    cold: BTreeSet<WorkerRank>,
}

type PublishedWorker = (WorkerId, WorkerConfig, bool, bool);

/// Machine with its performed effects.
struct Pool {
    membership: Membership<u32>,
    done: Performed,
    next_reply: u32,
}

impl Pool {
    fn new(rules: MembershipRules, sources: usize) -> Self {
        let mut pool = Self { membership: Membership::new(rules), done: Performed::default(), next_reply: 0 };
        (0..sources).for_each(|n| pool.step(MembershipInput::SourceAdded(format!("source-{n}"))));
        pool
    }

    fn step(&mut self, input: MembershipInput<u32>) {
        self.step_at(input, at(0));
    }

    fn step_at(&mut self, input: MembershipInput<u32>, now: Timestamp) {
        for effect in self.membership.step(input, now) {
            self.perform(effect);
        }
        self.membership.check_invariants().expect("invariants hold");
        assert_eq!(self.done.workers, self.workers(), "workers are published");
        assert_eq!(self.done.sources, self.membership.sources(), "sources are published");
        assert_eq!(self.done.cold, *self.membership.cold(), "cold ranks are published");
    }

    fn workers(&self) -> Vec<PublishedWorker> {
        let workers = self.membership.workers().iter();
        workers.map(|(id, known)| (*id, known.config.clone(), known.draining, known.cordoned)).collect()
    }

    fn perform(&mut self, effect: MembershipEffect<u32>) {
        let (workers, done) = (self.workers(), &mut self.done);
        match effect {
            MembershipEffect::UseBlockSize(size) => done.block_size = Some(size),
            MembershipEffect::Replace(child) => done.replaced.push(child),
            MembershipEffect::StartRank { rank, slot, generation, endpoint, restricted, .. } => {
                assert!(done.block_size.is_some(), "the block size is known before the first rank");
                let before = done.generations.insert(slot, generation);
                assert!(before < Some(generation), "a new generation of {slot}");
                assert!(done.retiring.iter().all(|(retiring, _)| *retiring != slot), "{slot} is free");
                let before = done.running.insert(rank, ((slot, generation), endpoint));
                assert!(before.is_none(), "{rank} runs once");
                done.set_restricted((slot, generation), restricted);
            }
            MembershipEffect::DescribeRank { slot, generation, .. } => {
                assert!(done.running.values().any(|(place, _)| *place == (slot, generation)));
            }
            MembershipEffect::RestrictRank { slot, generation, restricted } => {
                done.set_restricted((slot, generation), restricted);
            }
            MembershipEffect::DrainRank { slot, generation } => {
                done.set_restricted((slot, generation), true);
                done.draining.push((slot, generation));
            }
            MembershipEffect::RetireRank { slot, generation } => {
                done.running.retain(|_, (place, _)| *place != (slot, generation));
                done.set_restricted((slot, generation), false);
                assert!(!done.readers.contains(&slot), "the reader stops first");
                done.retiring.push((slot, generation));
            }
            MembershipEffect::ReleaseRank { slot, generation } => {
                let known = done.retiring.iter().position(|place| *place == (slot, generation));
                done.retiring.remove(known.expect("released after its retirement"));
            }
            MembershipEffect::StartReader(slot) => {
                done.readers.insert(slot);
                done.started_readers.push(slot);
            }
            MembershipEffect::StopReader(slot) => assert!(done.readers.remove(&slot), "{slot} was read"),
            MembershipEffect::ClearBlocks(slot) => done.cleared.push(slot),
            MembershipEffect::AbandonReader { slot, .. } => done.abandoned.push(slot),
            MembershipEffect::StartDrainTimer { worker, drain, .. } => done.timers.push((worker, drain)),
            MembershipEffect::Restart { child, lost, .. } => done.restarted.push((child, lost)),
            MembershipEffect::Fail { .. } => done.failed = true,
            MembershipEffect::Report(report) => done.reports.push(report),
            MembershipEffect::PublishCold => done.cold.clone_from(self.membership.cold()),
            MembershipEffect::PublishSources => done.sources = self.membership.sources().to_vec(),
            MembershipEffect::PublishWorkers => done.workers = workers,
            MembershipEffect::Reply { to, result } => {
                assert_eq!(done.workers, workers, "views are published before the reply");
                done.replies.push((to, result));
            }
        }
    }

    /// Sends a request; its reply number.
    fn request(&mut self, input: impl FnOnce(u32) -> MembershipInput<u32>) -> u32 {
        self.next_reply += 1;
        self.step(input(self.next_reply));
        self.next_reply
    }

    fn upsert(&mut self, worker: u64, config: WorkerConfig) -> u32 {
        let (worker, config) = (WorkerId(worker), Box::new(config));
        self.request(|reply| MembershipInput::Upsert { worker, config, reply })
    }

    /// Acknowledges all retirements.
    fn retire_all(&mut self) {
        for (slot, generation) in self.done.retiring.clone() {
            self.step(MembershipInput::RankRetired { slot, generation });
        }
    }

    fn endpoints(&self) -> Vec<(u64, String)> {
        self.membership.workers().iter().map(|(id, known)| (id.0, known.config.endpoint.clone())).collect()
    }

    fn die(&mut self, child: Child, now: Timestamp) {
        let shard_ranks = self.done.running.keys().map(|rank| (*rank, rank.rank == 0)).collect();
        self.step_at(MembershipInput::ChildDied { child, reason: "fault".to_owned(), shard_ranks }, now);
    }
}

impl Performed {
    fn set_restricted(&mut self, place: Place, restricted: bool) {
        if restricted {
            self.restricted.insert(place);
        } else {
            self.restricted.remove(&place);
        }
    }
}

fn publishing(endpoint: &str) -> WorkerConfig {
    let kv_events =
        Some(KvEventsConfig { endpoint: "tcp://h:5557".to_owned(), replay_endpoint: None, topic: String::new() });
    WorkerConfig { kv_events, ..WorkerConfig::at(endpoint) }
}

#[test]
fn workers_of_another_role_are_ignored_until_their_role_changes() {
    let roles = [None, Some(WorkerRole::Prefill), Some(WorkerRole::Decode), Some(WorkerRole::Both)];
    let set = |roles: &[Option<WorkerRole>]| {
        let worker = |(id, role): (u64, &Option<WorkerRole>)| {
            (WorkerId(id), WorkerConfig { role: *role, ..WorkerConfig::at(id.to_string()) })
        };
        SourceUpdate::Workers((0..).zip(roles).map(worker).collect())
    };
    let cases =
        [(PoolRole::Prefill, vec![0, 1, 3]), (PoolRole::Decode, vec![0, 2, 3]), (PoolRole::Aggregated, vec![0, 3])];
    for (role, expected) in cases {
        let mut pool = Pool::new(MembershipRules { role, ..RULES }, 1);
        let registered = |pool: &Pool| pool.endpoints().into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        let update = |pool: &mut Pool, update| {
            pool.step(MembershipInput::SourceUpdated { source: 0, update });
            pool.step(MembershipInput::Reconcile);
        };
        update(&mut pool, set(&roles));
        assert_eq!(registered(&pool), expected, "{role:?}");
        assert_eq!(pool.done.sources[0].workers, expected.len(), "{role:?}");
        update(&mut pool, set(&[Some(WorkerRole::Both), Some(WorkerRole::Both)]));
        pool.retire_all();
        assert_eq!(registered(&pool), [0, 1], "{role:?}");
    }
}

#[test]
fn only_readers_of_changed_ranks_are_replaced() {
    let mut pool = Pool::new(RULES, 0);
    let publishing = |ports: &[(u32, u16)]| {
        let events = |port: &u16| KvEventsConfig {
            endpoint: format!("tcp://a:{port}"),
            replay_endpoint: None,
            topic: String::new(),
        };
        let kv_events_by_rank = ports.iter().map(|(rank, port)| (*rank, events(port))).collect();
        WorkerConfig { data_parallel_size: 3, kv_events_by_rank, ..WorkerConfig::at("a") }
    };
    let started = |pool: &mut Pool, ports: &[(u32, u16)]| {
        pool.done.started_readers.clear();
        pool.upsert(1, publishing(ports));
        pool.done.started_readers.clone()
    };
    assert_eq!(started(&mut pool, &[(0, 40_000), (1, 40_007), (2, 39_000)]), [Slot(0), Slot(1), Slot(2)]);
    assert_eq!(started(&mut pool, &[(0, 40_000), (1, 41_000), (2, 39_000)]), [Slot(1)], "another port");
    assert_eq!(started(&mut pool, &[(0, 40_000), (2, 39_000)]), []);
    assert_eq!((pool.done.readers.len(), pool.done.cleared.clone()), (2, vec![Slot(1)]), "no reader");
    assert_eq!(pool.done.running.len(), 3, "the rank stays");
    assert_eq!(started(&mut pool, &[(0, 40_000), (1, 41_000), (2, 39_000)]), [Slot(1)], "it is back");
}

#[test]
fn unstated_capacity_is_reported_once() {
    let mut pool = Pool::new(RULES, 0);
    pool.upsert(1, WorkerConfig { max_num_batched_tokens: Some(1), ..WorkerConfig::at("a") });
    pool.upsert(2, WorkerConfig::at("b"));
    pool.upsert(3, WorkerConfig::at("c"));
    let unstated: Vec<_> =
        pool.done.reports.iter().filter(|report| matches!(report, MembershipReport::CapacityUnstated { .. })).collect();
    assert_eq!(unstated, [&MembershipReport::CapacityUnstated { endpoint: "b".to_owned() }]);
}

#[test]
fn the_age_of_a_set_begins_with_the_first_error_after_it() {
    let mut pool = Pool::new(RULES, 1);
    let failed = |reason: &str| MembershipInput::SourceUpdated {
        source: 0,
        update: SourceUpdate::Failed(crate::discovery::DiscoveryError::Other(reason.to_owned())),
    };
    pool.step_at(failed("a"), at(5));
    pool.step_at(failed("b"), at(7));
    let status = &pool.done.sources[0];
    assert_eq!((status.failing_since, status.stale_for(at(9))), (Some(at(5)), at(9).since(at(5))));
    let update = SourceUpdate::Workers(crate::protocol::WorkerMap::new());
    pool.step_at(MembershipInput::SourceUpdated { source: 0, update }, at(9));
    let status = &pool.done.sources[0];
    assert_eq!((status.failing_since, status.stale_for(at(10))), (None, std::time::Duration::ZERO));
}
