//! Shared load under loss, duplication, reordering, jitter and partitions: after a quiet time every replica has the true
//! sums.
//!
//! Replicas with random contributions write summaries into a network that loses and reorders them by seed. The network is
//! a queue of messages with their arrival times, so that many seeds take little time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::load::PlacementRate;
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
use pointsman::{
    ReplicaId, ReplicaLife,
    internals::replica::{
        LoadSummary, PeerState, PeerTable, RankContribution, ReplicaLayout, SummaryKind, SummaryWriter,
    },
};
use pointsman_trial::workload::Rng;

const LAYOUT: ReplicaLayout = ReplicaLayout { block_size: 64, hash_seed: 1 };
const INTERVAL_MS: u64 = 20;

/// 250, or the number in `PROPTEST_CASES`.
#[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
pub(crate) fn seeds() -> u64 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(250)
}

struct Replica {
    life: ReplicaLife,
    writer: SummaryWriter,
    /// Requests by rank, and whether they have changed since the last summary.
    requests: BTreeMap<u32, (u32, bool)>,
    peers: PeerTable,
}

/// Messages on their way between replicas: 30 % are lost, 20 % arrive twice, and each is up to 50 ms late.
pub(crate) struct Network<M> {
    pub(crate) draws: Rng,
    pub(crate) replicas: usize,
    /// By arrival time in milliseconds and number, with their receivers.
    under_way: BTreeMap<(u64, u64), (usize, M)>,
    sent: u64,
    /// Number of the first replica of the second side while the network is divided.
    divided_at: Option<usize>,
}

impl<M: Clone> Network<M> {
    pub(crate) fn new(seed: u64) -> Self {
        let mut draws = Rng::new(seed);
        let replicas = 2 + draws.below(4) as usize;
        Self { draws, replicas, under_way: BTreeMap::new(), sent: 0, divided_at: None }
    }

    pub(crate) fn divide(&mut self) {
        self.divided_at = Some(1 + self.draws.below(self.replicas as u32 - 1) as usize);
    }

    pub(crate) fn join(&mut self) {
        self.divided_at = None;
    }

    /// Sends a message to every reachable replica. A quiet network is not divided.
    pub(crate) fn send(&mut self, from: usize, message: &M, now_ms: u64, is_quiet: bool) {
        for to in (0..self.replicas).filter(|to| *to != from) {
            let is_divided = !is_quiet && self.divided_at.is_some_and(|second| (from < second) != (to < second));
            if is_divided || self.draws.below(100) < 30 {
                continue;
            }
            for _ in 0..1 + u32::from(self.draws.below(100) < 20) {
                self.sent += 1;
                let arrival_ms = now_ms + u64::from(self.draws.below(51));
                self.under_way.insert((arrival_ms, self.sent), (to, message.clone()));
            }
        }
    }

    /// The next message that has arrived, and its receiver.
    pub(crate) fn arrived(&mut self, now_ms: u64) -> Option<(usize, M)> {
        let first = self.under_way.first_entry().filter(|first| first.key().0 <= now_ms)?;
        Some(first.remove())
    }
}

struct World {
    replicas: Vec<Replica>,
    network: Network<(ReplicaLife, Arc<LoadSummary>)>,
}

fn contribution(dp_rank: u32, requests: u32) -> RankContribution {
    RankContribution {
        worker: 1,
        dp_rank,
        active_blocks: 10 * requests,
        read_blocks: 12 * requests,
        requests,
        prefills: 0,
        prefill_tokens: 0,
        unmodelled_tokens: 0,
        prefill_us: 0,
        booked: requests,
    }
}

fn new_replica(id: u64, incarnation: u64) -> Replica {
    let interval = Duration::from_millis(INTERVAL_MS);
    Replica {
        life: ReplicaLife { replica: ReplicaId(id), incarnation },
        writer: SummaryWriter::new(LAYOUT, interval, 0),
        requests: BTreeMap::new(),
        peers: PeerTable::new(LAYOUT),
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let network = Network::new(seed);
        Self { replicas: (0..network.replicas as u64).map(|id| new_replica(id, 1)).collect(), network }
    }

    /// One interval: changes of load, summaries, and arrivals.
    fn step(&mut self, now_ms: u64, is_quiet: bool) {
        if !is_quiet {
            self.disturb();
        }
        for from in 0..self.replicas.len() {
            let Replica { life, writer, requests, peers } = &mut self.replicas[from];
            peers.tick(at(now_ms));
            let all = requests
                .iter_mut()
                .map(|(rank, (requests, has_changed))| (contribution(*rank, *requests), std::mem::take(has_changed)));
            let Some(summary) = writer.write(all, PlacementRate::default(), None, at(now_ms)) else { continue };
            self.network.send(from, &(*life, Arc::new(summary)), now_ms, is_quiet);
        }
        while let Some((to, (from, summary))) = self.network.arrived(now_ms) {
            // Summaries of an earlier life are refused, and have no effect.
            let _ = self.replicas[to].peers.receive(from, &summary, at(now_ms));
        }
    }

    fn disturb(&mut self) {
        let replica = self.network.draws.below(self.replicas.len() as u32) as usize;
        match self.network.draws.below(100) {
            0 => {
                let life = self.replicas[replica].life;
                self.replicas[replica] = new_replica(life.replica.0, life.incarnation + 1);
            }
            1 => self.network.divide(),
            2 | 3 => self.network.join(),
            _ => {
                let (rank, requests) = (self.network.draws.below(6), self.network.draws.below(5));
                self.replicas[replica].requests.insert(rank, (requests, true));
            }
        }
    }

    /// Checks the sums of every replica against the contributions of all others.
    fn check(&self, now_ms: u64, seed: u64) {
        for (own, replica) in self.replicas.iter().enumerate() {
            for rank in 0..6 {
                let others = self.replicas.iter().enumerate().filter(|(other, _)| *other != own);
                let truth: u32 = others.map(|(_, other)| other.requests.get(&rank).map_or(0, |known| known.0)).sum();
                let load = replica.peers.load(WorkerRank::new(WorkerId(1), rank), at(now_ms));
                assert_eq!(
                    (load.requests, load.active_blocks, load.read_blocks),
                    (truth, 10 * truth, 12 * truth),
                    "rank {rank} at replica {own}, seed {seed}"
                );
            }
        }
    }
}

fn at(millis: u64) -> Timestamp {
    Timestamp(millis * 1_000_000)
}

/// 20 full summaries in a row are lost with a probability of 10^-10. In the quiet time a step takes a tenth of a second.
#[test]
fn sums_are_true_after_a_quiet_time() {
    for seed in 0..seeds() {
        let mut world = World::new(seed);
        let steps = 20 + u64::from(world.network.draws.below(60));
        (0..steps).for_each(|step| world.step(step * INTERVAL_MS, false));
        let quiet_ms = |step: u64| steps * INTERVAL_MS + step * 100;
        (0..=200).for_each(|step| world.step(quiet_ms(step), true));
        world.check(quiet_ms(200), seed);
    }
}

fn summary(sequence: u64, kind: SummaryKind, ranks: &[(u32, u32)]) -> LoadSummary {
    LoadSummary {
        layout: LAYOUT,
        sequence,
        interval_ms: 20,
        placements_per_second: 4.0,
        work_per_second: 0.5,
        longest_wait_ms: None,
        kind,
        ranks: ranks.iter().map(|&(rank, requests)| contribution(rank, requests)).collect(),
    }
}

const LIFE: ReplicaLife = ReplicaLife { replica: ReplicaId(1), incarnation: 5 };

fn requests(peers: &PeerTable, rank: u32, millis: u64) -> u32 {
    peers.load(WorkerRank::new(WorkerId(1), rank), at(millis)).requests
}

#[test]
fn the_share_of_a_silent_replica_fades() {
    let mut peers = PeerTable::new(LAYOUT);
    peers.receive(LIFE, &summary(1, SummaryKind::Full, &[(0, 10)]), at(0)).expect("applied");
    assert_eq!((requests(&peers, 0, 1_200), peers.arrivals(at(1_200)).work_per_second), (10, 0.5));
    let after = |millis| {
        let status = peers.statuses(at(millis)).next().expect("one replica");
        (status.state, requests(&peers, 0, millis))
    };
    assert_eq!(after(1_260), (PeerState::Live, 10));
    assert_eq!(after(6_260), (PeerState::Silent, 5));
    assert_eq!(after(11_300), (PeerState::Silent, 0));
    assert_eq!(peers.arrivals(at(1_300)).work_per_second, 0.0, "a silent replica is assumed to place nothing");
    let rank = WorkerRank::new(WorkerId(1), 0);
    assert_eq!(peers.tick(at(6_260)), [rank]);
    assert_eq!((peers.tick(at(12_000)), peers.tick(at(12_020))), (vec![rank], vec![]));
}

/// The clock of a restarted replica may be earlier.
#[test]
fn an_unknown_incarnation_is_a_later_life_and_a_replaced_one_an_earlier_one() {
    let mut peers = PeerTable::new(LAYOUT);
    let life = |incarnation| ReplicaLife { incarnation, ..LIFE };
    for (n, incarnation) in [5, 9, 4].into_iter().enumerate() {
        let received = peers.receive(life(incarnation), &summary(1, SummaryKind::Full, &[(n as u32, 10)]), at(0));
        assert!(received.expect("applied").is_new, "{incarnation}");
        assert_eq!((0..3).map(|rank| requests(&peers, rank, 0)).sum::<u32>(), 10, "the earlier load has gone");
    }
    let late = |peers: &mut PeerTable, millis| peers.receive(life(9), &summary(2, SummaryKind::Full, &[]), at(millis));
    assert_eq!(late(&mut peers, 1_260).map_err(|error| error.name().to_owned()), Err("incarnation".to_owned()));
    assert!(late(&mut peers, 1_300).expect("applied").is_new, "its successor is silent");
}

/// Prefills of several replicas on one rank progress together, at one second per second.
#[test]
fn queued_prefills_of_all_replicas_share_the_rank() {
    let mut peers = PeerTable::new(LAYOUT);
    for (id, prefill_us) in [(1, 3_000_000), (2, 1_000_000)] {
        let mut of = summary(1, SummaryKind::Full, &[(0, 1)]);
        (of.ranks[0].prefill_us, of.ranks[0].prefill_tokens) = (prefill_us, 1_000);
        let life = ReplicaLife { replica: ReplicaId(id), incarnation: 1 };
        peers.receive(life, &of, at(0)).expect("applied");
    }
    let load = peers.load(WorkerRank::new(WorkerId(1), 0), at(1_000));
    assert_eq!((load.prefill, load.prefill_tokens), (Duration::from_secs(3), 1_500));
}
