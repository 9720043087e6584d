//! Last summaries of all other replicas, and their sums.

use std::collections::BTreeMap;
use std::time::Duration;

use super::peer::{FADE, Peer};
use super::{LoadSummary, ReplicaId, ReplicaLayout, ReplicaLife};
use crate::load::{PeerLoad, PlacementRate};
use crate::names::named;
use crate::protocol::{Timestamp, WorkerRank};

/// The other replicas of one pool.
///
/// ```
/// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
/// use pointsman::internals::replica::{LoadSummary, PeerTable, RankContribution, ReplicaLayout, SummaryKind};
/// use pointsman::{ReplicaId, ReplicaLife};
///
/// let layout = ReplicaLayout { block_size: 64, hash_seed: 1 };
/// let rank = RankContribution {
///     worker: 7, dp_rank: 0, active_blocks: 100, read_blocks: 120, requests: 3,
///     prefills: 0, prefill_tokens: 0, unmodelled_tokens: 0, prefill_us: 0, booked: 3,
/// };
/// let summary = LoadSummary {
///     layout, sequence: 1, interval_ms: 20, placements_per_second: 5.0, work_per_second: 0.5,
///     longest_wait_ms: None, kind: SummaryKind::Full, ranks: vec![rank],
/// };
/// let mut peers = PeerTable::new(layout);
/// let life = ReplicaLife { replica: ReplicaId(1), incarnation: 1 };
/// peers.receive(life, &summary, Timestamp(0))?;
/// assert_eq!(peers.load(WorkerRank::new(WorkerId(7), 0), Timestamp(0)).requests, 3);
/// # Ok::<(), pointsman::internals::replica::RefusedSummary>(())
/// ```
#[derive(Debug)]
pub struct PeerTable {
    layout: ReplicaLayout,
    peers: BTreeMap<ReplicaId, Peer>,
}

/// Reason for refusing a summary. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedSummary {
    /// The sender counts other blocks.
    #[error("replica has blocks of {} tokens with hash seed {}, must be {} and {}",
        .got.block_size, .got.hash_seed, .want.block_size, .want.hash_seed)]
    Layout {
        /// Layout of the sender.
        got: ReplicaLayout,
        /// Own layout.
        want: ReplicaLayout,
    },
    /// The summary is from an earlier life of a restarted replica.
    #[error("summary is from incarnation {got} of a replica that has incarnation {latest}")]
    Incarnation {
        /// Incarnation of the sender.
        got: u64,
        /// Latest incarnation.
        latest: u64,
    },
    /// The summary lists too many ranks.
    #[error("summary lists {ranks} ranks, must be at most {}", PeerTable::RANKS_MAX)]
    Ranks {
        /// Number of ranks.
        ranks: usize,
    },
    /// There are too many replicas.
    #[error("replica is number {}, must be at most {}", PeerTable::PEERS_MAX + 1, PeerTable::PEERS_MAX)]
    Peers,
}

impl RefusedSummary {
    /// Name in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Layout { .. } => "layout",
            Self::Incarnation { .. } => "incarnation",
            Self::Ranks { .. } => "ranks",
            Self::Peers => "peers",
        }
    }
}

/// Effect of a summary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Ranks whose sums may have changed.
    pub changed: Vec<WorkerRank>,
    /// Whether the replica was unknown, or had another life.
    pub is_new: bool,
}

named! {
    /// State of another replica.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum PeerState {
        /// Its summaries arrive.
        Live = "live",
        /// Its summaries have stopped, and its share fades.
        Silent = "silent",
        /// It has ended in order.
        Left = "left",
    }
}

/// Report on another replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerStatus {
    /// Its life.
    pub life: ReplicaLife,
    /// Its state.
    pub state: PeerState,
    /// Time since its last summary.
    pub summary_age: Duration,
    /// Number of its newest summary.
    pub sequence: u64,
    /// Factor of its share, below 1 while it fades.
    pub weight: f64,
}

/// Time without messages after which a replica is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(60);

impl PeerTable {
    /// Maximum number of ranks of one summary.
    pub const RANKS_MAX: usize = 65_536;

    /// Maximum number of other replicas.
    pub const PEERS_MAX: usize = 64;

    /// A table without replicas.
    #[must_use]
    pub fn new(layout: ReplicaLayout) -> Self {
        Self { layout, peers: BTreeMap::new() }
    }

    /// Applies a summary from another replica.
    ///
    /// # Errors
    /// See [`RefusedSummary`].
    pub fn receive(
        &mut self,
        from: ReplicaLife,
        summary: &LoadSummary,
        now: Timestamp,
    ) -> Result<Received, RefusedSummary> {
        if summary.layout != self.layout {
            return Err(RefusedSummary::Layout { got: summary.layout, want: self.layout });
        }
        if summary.ranks.len() > Self::RANKS_MAX {
            return Err(RefusedSummary::Ranks { ranks: summary.ranks.len() });
        }
        let mut received = Received::default();
        let known = self.peers.get(&from.replica);
        match known {
            Some(peer) if peer.life == from => {}
            Some(peer) if peer.has_replaced(from.incarnation, now) => {
                return Err(RefusedSummary::Incarnation { got: from.incarnation, latest: peer.life.incarnation });
            }
            None if self.peers.len() >= Self::PEERS_MAX => return Err(RefusedSummary::Peers),
            Some(_) | None => {
                received.is_new = true;
                received.changed.extend(known.into_iter().flat_map(Peer::ranks));
                let peer = Peer::new(from, known, now);
                self.peers.insert(from.replica, peer);
            }
        }
        if let Some(peer) = self.peers.get_mut(&from.replica) {
            peer.apply(summary, now, &mut received.changed);
        }
        received.changed.sort_unstable();
        received.changed.dedup();
        Ok(received)
    }

    /// Fades the shares of silent replicas. Returns the ranks whose sums have changed.
    pub fn tick(&mut self, now: Timestamp) -> Vec<WorkerRank> {
        let mut changed = Vec::new();
        for peer in self.peers.values_mut().filter(|peer| peer.is_silent(now)) {
            changed.extend(peer.ranks());
            if peer.weight(now) == 0.0 {
                peer.ranks.clear();
            }
        }
        self.peers.retain(|_, peer| now.since(peer.received_at) < FORGET_AFTER.max(FADE * 2));
        changed.sort_unstable();
        changed.dedup();
        changed
    }

    /// Load of a rank by all other replicas at `now`.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a count is a count")]
    pub fn load(&self, rank: WorkerRank, now: Timestamp) -> PeerLoad {
        let known = self.peers.values().filter_map(|peer| Some((peer.contribution(rank)?, peer.weight(now))));
        let mut load = PeerLoad { at: now, ..PeerLoad::default() };
        let mut prefills = Vec::new();
        for (known, weight) in known {
            let share = |count: u32| if weight == 1.0 { count } else { (f64::from(count) * weight).ceil() as u32 };
            let of = &known.contribution;
            let add = |sum: &mut u32, count: u32| *sum = sum.saturating_add(share(count));
            add(&mut load.active_blocks, of.active_blocks);
            add(&mut load.read_blocks, of.read_blocks);
            add(&mut load.requests, of.requests);
            add(&mut load.prefills, of.prefills);
            add(&mut load.prefill_tokens, of.prefill_tokens);
            add(&mut load.unmodelled_tokens, of.unmodelled_tokens);
            prefills.push((f64::from(of.prefill_us) * 1e-6 * weight, now.since(known.received_at)));
        }
        // The prefills of all replicas progress together.
        let total: f64 = prefills.iter().map(|(seconds, _)| seconds).sum();
        let left = |(seconds, age): &(f64, Duration)| (seconds - age.as_secs_f64() * seconds / total).max(0.0);
        if total > 0.0 {
            let seconds: f64 = prefills.iter().map(left).sum();
            load.prefill = Duration::from_secs_f64(seconds);
            load.prefill_tokens = (f64::from(load.prefill_tokens) * seconds / total).ceil() as u32;
        }
        load
    }

    /// Bookings of each replica on a rank, as of its last summary.
    pub fn booked(&self, rank: WorkerRank) -> impl Iterator<Item = (ReplicaId, u32)> {
        let booked = move |peer: &Peer| Some((peer.life.replica, peer.contribution(rank)?.contribution.booked));
        self.peers.values().filter_map(booked)
    }

    /// Ranks to which any replica contributes.
    #[must_use]
    pub fn ranks(&self) -> Vec<WorkerRank> {
        let mut ranks: Vec<WorkerRank> = self.peers.values().flat_map(Peer::ranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Sum of the rates of all other replicas.
    #[must_use]
    pub fn arrivals(&self, now: Timestamp) -> PlacementRate {
        let mut sum = PlacementRate::default();
        for peer in self.peers.values() {
            let rate = peer.rate(now);
            sum.placements_per_second += rate.placements_per_second;
            sum.work_per_second += rate.work_per_second;
        }
        sum
    }

    /// Arrival of the longest-waiting request of each live replica with waiting requests, oldest first.
    #[must_use]
    pub fn queue_heads(&self, now: Timestamp) -> Vec<Timestamp> {
        let mut heads: Vec<Timestamp> = self.peers.values().filter_map(|peer| peer.queue_head(now)).collect();
        heads.sort_unstable();
        heads
    }

    /// Reports on all replicas, by id.
    pub fn statuses(&self, now: Timestamp) -> impl Iterator<Item = PeerStatus> {
        self.peers.values().map(move |peer| PeerStatus {
            life: peer.life,
            state: match peer {
                Peer { has_left: true, .. } => PeerState::Left,
                peer if peer.is_silent(now) => PeerState::Silent,
                _ => PeerState::Live,
            },
            summary_age: now.since(peer.received_at),
            sequence: peer.latest_sequence,
            weight: peer.weight(now),
        })
    }
}
