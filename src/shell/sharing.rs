//! Shell of load sharing: what the own bookings contribute to each rank, and the sums of what other replicas report.
//!
//! Reads the boards of all ranks at intervals and after bookings, writes summaries, and writes the sums of received
//! summaries to the cells that the scheduler and the sequence actors read. No decision waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::Defect;
use crate::load::{ArrivalsCell, BoardChanges, BoardLoad, BoardSlot, BoardVersion, PeerLoad, PeerLoadCell};
use crate::protocol::{Slot, Timestamp, WorkerRank};
use crate::queue::QueueHeads;
use crate::replica::{
    LoadSummary, PeerTable, RankContribution, RefusedSummary, ReplicaId, ReplicaLayout, ReplicaLife, SummaryWriter,
};

/// Interval of summaries while no other replica decides on these loads.
const UNREAD_INTERVAL: Duration = Duration::from_millis(100);

/// Time after the last load of another replica in which that replica is expected to decide: longer than the interval of
/// full summaries.
const READING_TIME: Duration = Duration::from_millis(1_500);

/// Number of writes with an idle rank after its change: all that the writer needs.
const WRITES: u8 = 1 + SummaryWriter::REPETITIONS;

/// Shared cells of a pool.
pub struct SharingCells {
    /// Arrivals at the own replica and at the others.
    pub arrivals: Arc<ArrivalsCell>,
    /// Longest-waiting requests of the replicas.
    pub queue_heads: Arc<QueueHeads>,
    /// Receives the slots of ranks whose sum has changed.
    pub board_changes: Arc<BoardChanges>,
}

/// A rank whose load is shared, with its cells.
pub struct SharedEntry {
    /// The rank.
    pub rank: WorkerRank,
    /// Its slot.
    pub slot: Slot,
    /// Own load.
    pub board: Arc<BoardSlot>,
    /// Receives the load by other replicas.
    pub peers: Arc<PeerLoadCell>,
}

/// Effect of a received summary.
pub struct Reception {
    /// Whether the replica was unknown, or had another life.
    pub is_new: bool,
    /// Whether a load has fallen.
    pub fell: bool,
    /// Bookings of both replicas on a rank at the same time, if another rank would have been idle sooner.
    pub conflicts: u64,
}

/// Shell of load sharing. See the module documentation.
pub struct SharingShell {
    interval: Duration,
    cells: SharingCells,
    writer: SummaryWriter,
    peers: PeerTable,
    /// Time of the last summary with a booking, active or just ended.
    peer_load_at: Option<Timestamp>,
    /// Published longest-waiting requests of the others.
    queue_heads: Vec<Timestamp>,
    /// A booking is published at once, unless another one was within the interval. Without readers the interval is
    /// longer, and the ticks within it publish nothing.
    next_at: Timestamp,
    /// By slot.
    ranks: Vec<Option<SharedRank>>,
    /// Slots of each rank: two while one retires.
    slots: BTreeMap<WorkerRank, Vec<usize>>,
}

/// A rank whose load is shared.
struct SharedRank {
    entry: SharedEntry,
    version: BoardVersion,
    board: BoardLoad,
    has_changed: bool,
    /// Number of writes with this rank, until its next change, if it remains idle.
    writes_left: u8,
    /// Published sum of the other replicas.
    peers: PeerLoad,
    /// Own bookings.
    own: OwnBookings,
    /// By replica: its bookings at its last summary.
    booked: BTreeMap<ReplicaId, u32>,
}

/// Counts of own bookings on a rank, now and before the recent ones.
#[derive(Clone, Copy, Debug, Default)]
struct OwnBookings {
    earlier: u32,
    latest: u32,
    /// Time of the first booking after the earlier ones.
    since: Timestamp,
}

impl OwnBookings {
    fn update(&mut self, booked: u32, interval: Duration, now: Timestamp) {
        if booked != self.latest {
            if now.since(self.since) >= interval {
                (self.earlier, self.since) = (self.latest, now);
            }
            self.latest = booked;
        }
    }

    /// Bookings of the last one to two intervals, which another replica may not have known at its last summary.
    fn recent(&self, booked: u32, interval: Duration, now: Timestamp) -> u32 {
        let before = if now.since(self.since) < interval * 2 { self.earlier } else { self.latest };
        booked.wrapping_sub(before)
    }
}

impl SharingShell {
    /// Without ranks and other replicas. The number of the first summary follows `sequence`, see [`SummaryWriter::new`].
    pub fn new(layout: ReplicaLayout, interval: Duration, sequence: u64, cells: SharingCells) -> Self {
        Self {
            interval,
            cells,
            writer: SummaryWriter::new(layout, interval, sequence),
            peers: PeerTable::new(layout),
            peer_load_at: None,
            queue_heads: Vec::new(),
            next_at: Timestamp::default(),
            ranks: Vec::new(),
            slots: BTreeMap::new(),
        }
    }

    /// A tick: reads the boards. Returns the next summary, if one is due, and whether a load of other replicas has fallen.
    pub fn on_tick(&mut self, now: Timestamp) -> (Option<LoadSummary>, bool) {
        let has_readers = self.has_readers(now);
        let mut summary = None;
        if has_readers || self.may_write(now) {
            self.read_boards(now);
            summary = self.write(now);
            if summary.is_some() && !has_readers {
                self.next_at = now + self.summary_interval(now);
            }
        }
        let changed = self.peers.tick(now);
        (summary, self.publish_peers(&changed, now))
    }

    /// A booking, while [`SharingShell::may_write`]. Returns the next summary.
    pub fn on_booked(&mut self, now: Timestamp) -> Option<LoadSummary> {
        if !self.read_boards(now) {
            return None;
        }
        self.next_at = now + self.summary_interval(now);
        self.write(now)
    }

    /// Whether a booking is published at once.
    pub fn may_write(&self, now: Timestamp) -> bool {
        now >= self.next_at
    }

    /// Applies a summary of another replica.
    ///
    /// # Errors
    /// [`RefusedSummary`].
    pub fn receive(
        &mut self,
        from: ReplicaLife,
        summary: &LoadSummary,
        now: Timestamp,
    ) -> Result<Reception, RefusedSummary> {
        let received = self.peers.receive(from, summary, now)?;
        if summary.ranks.iter().any(|rank| rank.booked > 0) {
            self.peer_load_at = Some(now);
        }
        let fell = self.publish_peers(&received.changed, now);
        Ok(Reception { is_new: received.is_new, fell, conflicts: self.count_conflicts(&received.changed, now) })
    }

    /// The last summary, at the end of the replica.
    pub fn last(&mut self) -> LoadSummary {
        self.writer.last()
    }

    /// Whether there is nothing to publish except full summaries.
    pub fn is_idle(&self) -> bool {
        self.writer.is_idle()
    }

    /// The other replicas.
    pub fn peers(&self) -> &PeerTable {
        &self.peers
    }

    /// Minimum time between two summaries.
    fn summary_interval(&self, now: Timestamp) -> Duration {
        if self.has_readers(now) { self.interval } else { self.interval.max(UNREAD_INTERVAL) }
    }

    /// Whether other replicas decide on the loads of this one.
    fn has_readers(&self, now: Timestamp) -> bool {
        !self.queue_heads.is_empty() || self.peer_load_at.is_some_and(|at| now.since(at) < READING_TIME)
    }

    /// The next summary, if one is due.
    fn write(&mut self, now: Timestamp) -> Option<LoadSummary> {
        let rate = self.cells.arrivals.own(now);
        let contributions = self.contributions(now);
        self.writer.write(contributions.into_iter(), rate, self.cells.queue_heads.own(), now)
    }

    /// Reads the boards of all ranks, and returns whether one has changed since the last summary.
    fn read_boards(&mut self, now: Timestamp) -> bool {
        let mut has_changed = false;
        if Defect::BoardsUnread.is_planted() {
            return false;
        }
        for rank in self.ranks.iter_mut().flatten() {
            if let Some(board) = rank.entry.board.read_since(&mut rank.version) {
                (rank.board, rank.has_changed) = (board, true);
                rank.own.update(rank.board.applied, self.interval, now);
            }
            if rank.has_changed {
                rank.writes_left = WRITES;
                has_changed = true;
            }
        }
        has_changed
    }

    /// Follows joined and left ranks, given all of them in the order of slots. New ranks take the known load of other
    /// replicas. Returns whether a load has fallen.
    pub fn follow(&mut self, entries: Vec<SharedEntry>, now: Timestamp) -> bool {
        for rank in &mut self.ranks {
            rank.take_if(|rank| {
                let at = entries.binary_search_by_key(&rank.entry.slot, |entry| entry.slot);
                !at.is_ok_and(|at| Arc::ptr_eq(&entries[at].board, &rank.entry.board))
            });
        }
        let mut new = Vec::new();
        for entry in entries {
            let slot = entry.slot.index();
            if self.ranks.len() <= slot {
                self.ranks.resize_with(slot + 1, || None);
            }
            self.ranks[slot].get_or_insert_with(|| {
                new.push(entry.rank);
                SharedRank::new(entry)
            });
        }
        self.slots.clear();
        for (slot, rank) in self.ranks.iter().enumerate().filter_map(|(slot, rank)| Some((slot, rank.as_ref()?))) {
            self.slots.entry(rank.entry.rank).or_default().push(slot);
        }
        self.publish_peers(&new, now)
    }

    /// Own contributions by rank, each with whether it has changed since the last call, without ranks that have been idle
    /// for some calls.
    fn contributions(&mut self, now: Timestamp) -> Vec<(RankContribution, bool)> {
        let mut contributions: Vec<(RankContribution, bool)> = Vec::new();
        for rank in self.ranks.iter_mut().flatten().filter(|rank| rank.writes_left > 0) {
            let contribution = rank.contribution(now);
            rank.writes_left = if contribution.is_idle() { rank.writes_left - 1 } else { WRITES };
            contributions.push((contribution, std::mem::take(&mut rank.has_changed)));
        }
        contributions.sort_by_key(|(contribution, _)| contribution.rank());
        contributions.dedup_by(|(other, has_other_changed), (sum, has_changed)| {
            let is_same = other.rank() == sum.rank();
            if is_same {
                *sum = both(sum, other);
                *has_changed |= *has_other_changed;
            }
            is_same
        });
        contributions
    }

    /// Writes the sums of the other replicas on these ranks. Returns whether one has fallen.
    fn publish_peers(&mut self, changed: &[WorkerRank], now: Timestamp) -> bool {
        self.cells.arrivals.publish_peers(self.peers.arrivals(now));
        let heads = self.peers.queue_heads(now);
        self.cells.queue_heads.publish_peers(&heads);
        let mut fell = self.queue_heads != heads;
        self.queue_heads = heads;
        for rank in changed {
            let load = self.peers.load(*rank, now);
            for slot in self.slots.get(rank).into_iter().flatten() {
                let Some(shared) = &mut self.ranks[*slot] else { continue };
                fell |= load.requests < shared.peers.requests || load.prefill < shared.peers.prefill;
                shared.peers = shared.peers.followed_by(load);
                if !Defect::SumsUnpublished.is_planted() {
                    shared.entry.peers.publish(&shared.peers);
                }
                self.cells.board_changes.insert(Slot(u32::try_from(*slot).unwrap_or(u32::MAX)));
            }
        }
        fell
    }

    /// Number of new bookings of other replicas on ranks with recent own ones, if another rank would have been idle sooner.
    fn count_conflicts(&mut self, changed: &[WorkerRank], now: Timestamp) -> u64 {
        let mut conflicts = 0;
        let wait = |rank: &SharedRank| rank.board.prefill.wait(now).0 + rank.peers.prefill;
        let mut least = None;
        for rank in changed {
            let booked: Vec<(ReplicaId, u32)> = self.peers.booked(*rank).collect();
            for slot in self.slots.get(rank).into_iter().flatten() {
                let Some(shared) = &mut self.ranks[*slot] else { continue };
                let booked_here = shared.entry.board.read().unwrap_or(shared.board).applied;
                let own = shared.own.recent(booked_here, self.interval, now);
                let mut both = 0;
                for (replica, peer) in &booked {
                    let Some(before) = shared.booked.insert(*replica, *peer) else { continue };
                    let peer = peer.wrapping_sub(before);
                    // A restarted sequence actor counts from 0 again.
                    let is_counted = peer < u32::MAX / 2 && own < u32::MAX / 2;
                    both += u64::from(if is_counted { peer.min(own) } else { 0 });
                }
                if both > 0 {
                    let own_wait = wait(shared);
                    let ranks = &self.ranks;
                    let least =
                        *least.get_or_insert_with(|| ranks.iter().flatten().map(wait).min().unwrap_or_default());
                    conflicts += if own_wait > least { both } else { 0 };
                }
            }
        }
        conflicts
    }
}

impl SharedRank {
    fn new(entry: SharedEntry) -> Self {
        Self {
            entry,
            version: BoardVersion::default(),
            board: BoardLoad::default(),
            has_changed: true,
            writes_left: WRITES,
            peers: PeerLoad::default(),
            own: OwnBookings::default(),
            booked: BTreeMap::new(),
        }
    }

    fn contribution(&self, now: Timestamp) -> RankContribution {
        let curve = &self.board.prefill;
        let ((modelled, unmodelled_tokens), (_, tokens)) = (curve.wait(now), curve.bounds(now));
        let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        let WorkerRank { worker, rank } = self.entry.rank;
        RankContribution {
            worker: worker.0,
            dp_rank: rank,
            active_blocks: self.board.active_blocks,
            read_blocks: self.board.read_blocks,
            requests: self.board.requests,
            prefills: self.board.prefills,
            prefill_tokens: count(tokens.saturating_sub(unmodelled_tokens)),
            unmodelled_tokens: count(unmodelled_tokens),
            prefill_us: u32::try_from(modelled.as_micros()).unwrap_or(u32::MAX),
            booked: self.board.applied,
        }
    }
}

/// Sum of two contributions to one rank.
fn both(a: &RankContribution, b: &RankContribution) -> RankContribution {
    RankContribution {
        active_blocks: a.active_blocks.saturating_add(b.active_blocks),
        read_blocks: a.read_blocks.saturating_add(b.read_blocks),
        requests: a.requests.saturating_add(b.requests),
        prefills: a.prefills.saturating_add(b.prefills),
        prefill_tokens: a.prefill_tokens.saturating_add(b.prefill_tokens),
        unmodelled_tokens: a.unmodelled_tokens.saturating_add(b.unmodelled_tokens),
        prefill_us: a.prefill_us.saturating_add(b.prefill_us),
        booked: a.booked.wrapping_add(b.booked),
        ..*a
    }
}
