//! Sharing of load, sessions and routed prompts: publishes what the own bookings contribute to each rank, and the sums of
//! what other replicas report.
//!
//! One task per router. It reads the boards of all ranks at intervals, writes summaries to the bus, and writes the sums
//! of received summaries to the cells that the scheduler and the sequence actors read. No decision waits for it. If it
//! panics, it starts again with the next life of its tables; its peers repair them within a second.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use xxhash_rust::xxh3::xxh3_64;

use super::bus::{ReplicaBus, ReplicaMessage};
use super::meters::ReplicaMeters;
use super::routed::RoutedSharing;
use super::sessions::SessionSharing;
use crate::actors::delivery::strand::Strand;
use crate::actors::io::clock::Clock;
use crate::actors::radix::shards::Shards;
use crate::actors::scheduler::{Scheduler, SchedulerMsg};
use crate::actors::views::ReplicaPeers;
use crate::actors::views::block_size::BlockSizeCell;
use crate::actors::views::published::Published;
use crate::actors::views::rank::{RankEntries, RankEntry};
use crate::actors::views::status::RouterStatus;
use crate::actors::views::wake_flag::WakeFlag;
use crate::config::{RouterConfig, SessionAffinity};
use crate::hashing::BASE_SEED;
use crate::load::{BoardLoad, BoardVersion, PeerLoad};
use crate::protocol::{BlockSizeOrigin, Slot, Timestamp, WorkerRank};
use crate::replica::{
    LoadSummary, MessageError, PeerState, PeerTable, RankContribution, RefusedSummary, ReplicaId, ReplicaLayout,
    ReplicaTopic, SummaryWriter, decode_routed,
};

/// Interval of the task while the replica has no load, until a booking. Full summaries remain about a second apart.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);

/// Interval of summaries while no other replica decides on these loads.
const UNREAD_INTERVAL: Duration = Duration::from_millis(100);

/// Time after the last load of another replica in which that replica is expected to decide: longer than the interval of
/// full summaries.
const READING_TIME: Duration = Duration::from_millis(1_500);

/// Number of writes with an idle rank after its change: all that the writer needs.
const WRITES: u8 = 1 + SummaryWriter::REPETITIONS;

/// Dependencies of the task.
#[derive(Clone)]
pub(crate) struct ReplicaSharing {
    pub(crate) bus: Arc<dyn ReplicaBus>,
    pub(crate) config: Arc<RouterConfig>,
    pub(crate) block_size: Arc<BlockSizeCell>,
    pub(crate) clock: Clock,
    pub(crate) ranks: Arc<RankEntries>,
    pub(crate) status: Arc<RouterStatus>,
    pub(crate) scheduler: Arc<Strand<Scheduler>>,
    pub(crate) shards: Arc<Shards>,
    pub(crate) wake: Arc<WakeFlag>,
    pub(crate) replica_peers: Arc<Published<ReplicaPeers>>,
    pub(crate) meters: ReplicaMeters,
}

impl ReplicaSharing {
    /// Starts the task. It ends with the router or the bus.
    pub(crate) fn watch(self) {
        tokio::spawn(async move {
            // Before the first worker, replicas may differ in a size that none of them will use.
            let mut sizes = self.block_size.subscribe();
            tokio::select! {
                biased;
                _ = self.status.down() => return,
                _ = sizes.wait_for(|size| size.origin != BlockSizeOrigin::Awaited) => {}
            }
            while !self.status.is_down() {
                let task = tokio::spawn(SharingTask::new(self.clone()).run());
                match task.await {
                    Ok(TaskEnd::BlockSize) => {}
                    Ok(TaskEnd::Down) => return,
                    Err(error) => {
                        tracing::error!(pool = self.config.pool, %error, "sharing of load failed, starting again");
                    }
                }
            }
        });
    }
}

/// Reason for the end of a task.
enum TaskEnd {
    /// The router or the bus is down.
    Down,
    /// Another block size is in force, and so another layout of all messages.
    BlockSize,
}

struct SharingTask {
    sharing: ReplicaSharing,
    pool: Arc<str>,
    interval: Duration,
    writer: SummaryWriter,
    peers: PeerTable,
    /// Time of the last summary with a booking, active or just ended.
    peer_load_at: Option<Timestamp>,
    /// Published longest-waiting requests of the others.
    queue_heads: Vec<Timestamp>,
    /// Present if sessions are remembered.
    sessions: Option<SessionSharing>,
    /// Present if caches are derived from decisions.
    routed: Option<RoutedSharing>,
    layout: ReplicaLayout,
    /// By slot.
    ranks: Vec<Option<SharedRank>>,
    /// Slots of each rank: two while one retires.
    slots: BTreeMap<WorkerRank, Vec<usize>>,
    /// Version of the rank entries in `ranks`.
    entries_version: Option<u64>,
}

/// A rank whose load is shared.
struct SharedRank {
    entry: Arc<RankEntry>,
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

impl SharingTask {
    fn new(sharing: ReplicaSharing) -> Self {
        let layout = ReplicaLayout { block_size: sharing.block_size.tokens(), hash_seed: BASE_SEED };
        let interval = Duration::from_millis(sharing.config.replicas.interval_ms);
        let pool: Arc<str> = Arc::from(&*sharing.config.pool);
        let sessions = (sharing.config.session.affinity != SessionAffinity::Off)
            .then(|| SessionSharing::new(Arc::clone(&sharing.bus), Arc::clone(&pool), Arc::clone(&sharing.scheduler)));
        let routed = RoutedSharing::of(&sharing.config, &sharing.bus, &pool, layout, &sharing.shards);
        Self {
            pool,
            sessions,
            routed,
            layout,
            interval,
            writer: SummaryWriter::new(layout, interval, first_sequence()),
            peers: PeerTable::new(layout),
            peer_load_at: None,
            queue_heads: Vec::new(),
            ranks: Vec::new(),
            slots: BTreeMap::new(),
            entries_version: None,
            sharing,
        }
    }

    async fn run(mut self) -> TaskEnd {
        let (mut sizes, layout_tokens) = (self.sharing.block_size.subscribe(), self.layout.block_size);
        let mut messages = self.sharing.bus.subscribe();
        let status = Arc::clone(&self.sharing.status);
        // Replicas that publish at the same instants would also decide on equal views.
        let life = self.sharing.bus.life();
        let hash = xxh3_64(&life.replica.0.to_le_bytes());
        let phase = self.interval.mul_f64((hash >> 11) as f64 / (1_u64 << 53) as f64);
        let mut ticks = interval_at(Instant::now() + phase, self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let booked = Arc::clone(&self.sharing.ranks.booked);
        // A booking is published at once, unless another one was within the interval. Without readers the interval is
        // longer, and the ticks within it publish nothing.
        let mut next_at = Instant::now();
        let end = loop {
            tokio::select! {
                biased;
                _ = status.down() => break TaskEnd::Down,
                changed = sizes.wait_for(|size| size.tokens != layout_tokens) => match changed {
                    Ok(_) => break TaskEnd::BlockSize,
                    Err(_) => break TaskEnd::Down,
                },
                _ = ticks.tick() => {
                    let has_readers = self.has_readers();
                    if has_readers || Instant::now() >= next_at {
                        self.read_boards();
                        if self.write() && !has_readers {
                            next_at = Instant::now() + self.summary_interval();
                        }
                    }
                    self.on_tick();
                    if self.is_idle() {
                        ticks.reset_after(self.interval.max(IDLE_INTERVAL));
                    }
                }
                () = booked.notified(), if Instant::now() >= next_at => {
                    if self.read_boards() {
                        next_at = Instant::now() + self.summary_interval();
                        ticks.reset();
                        self.write();
                    }
                }
                message = messages.recv() => match message {
                    Ok(message) => self.on_message(&message),
                    Err(RecvError::Lagged(lost)) => self.sharing.meters.lost(lost),
                    Err(RecvError::Closed) => break TaskEnd::Down,
                }
            }
        };
        let last = self.writer.last();
        self.publish(&last);
        end
    }

    fn is_idle(&self) -> bool {
        self.writer.is_idle() && self.sessions.as_ref().is_none_or(SessionSharing::is_idle)
    }

    fn publish(&self, summary: &LoadSummary) {
        self.sharing.bus.publish(&self.pool, ReplicaTopic::Load, summary.encode().into());
    }

    /// Minimum time between two summaries.
    fn summary_interval(&self) -> Duration {
        if self.has_readers() { self.interval } else { self.interval.max(UNREAD_INTERVAL) }
    }

    /// Whether other replicas decide on the loads of this one.
    fn has_readers(&self) -> bool {
        let now = self.sharing.clock.now();
        !self.queue_heads.is_empty() || self.peer_load_at.is_some_and(|at| now.since(at) < READING_TIME)
    }

    fn on_tick(&mut self) {
        let now = self.sharing.clock.now();
        let changed = self.peers.tick(now);
        self.publish_peers(&changed, now);
        if let Some(sessions) = &mut self.sessions {
            let live = self.peers.statuses(now).filter(|peer| peer.state == PeerState::Live).count();
            sessions.on_tick(u32::try_from(live).unwrap_or(u32::MAX).saturating_add(1));
        }
        if let Some(routed) = &mut self.routed {
            let dropped = routed.on_tick();
            self.sharing.meters.routed_dropped(dropped);
        }
        if self.sharing.meters.is_due(now) {
            let statuses: Vec<_> = self.peers.statuses(now).collect();
            let prefill = self.peers.ranks().into_iter().map(|rank| self.peers.load(rank, now).prefill).sum();
            self.sharing.meters.show(&statuses, prefill, now);
            self.sharing.replica_peers.set(ReplicaPeers { at: now, statuses });
        }
    }

    /// Publishes the next summary, if one is due. Returns whether one was.
    fn write(&mut self) -> bool {
        let now = self.sharing.clock.now();
        let rate = self.sharing.ranks.arrivals.own(now);
        let contributions = self.contributions(now);
        let queue_head = self.sharing.ranks.queue_heads.own();
        let summary = self.writer.write(contributions.into_iter(), rate, queue_head, now);
        summary.inspect(|summary| self.publish(summary)).is_some()
    }

    /// Reads the boards of all ranks, and returns whether one has changed since the last summary. New ranks take the known
    /// load of other replicas.
    fn read_boards(&mut self) -> bool {
        let version = self.sharing.ranks.version();
        if self.entries_version != Some(version) {
            self.entries_version = Some(version);
            self.read_entries();
        }
        let (mut has_changed, now) = (false, self.sharing.clock.now());
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

    /// Follows joined and left ranks.
    fn read_entries(&mut self) {
        let entries = self.sharing.ranks.all();
        for rank in &mut self.ranks {
            rank.take_if(|rank| {
                let at = entries.binary_search_by_key(&rank.entry.slot, |entry| entry.slot);
                !at.is_ok_and(|at| Arc::ptr_eq(&entries[at], &rank.entry))
            });
        }
        let mut new = Vec::new();
        for entry in &entries {
            let slot = entry.slot.index();
            if self.ranks.len() <= slot {
                self.ranks.resize_with(slot + 1, || None);
            }
            self.ranks[slot].get_or_insert_with(|| {
                new.push(entry.rank);
                SharedRank::new(Arc::clone(entry))
            });
        }
        self.slots.clear();
        for (slot, rank) in self.ranks.iter().enumerate().filter_map(|(slot, rank)| Some((slot, rank.as_ref()?))) {
            self.slots.entry(rank.entry.rank).or_default().push(slot);
        }
        self.publish_peers(&new, self.sharing.clock.now());
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

    fn on_message(&mut self, message: &ReplicaMessage) {
        if message.pool != self.pool {
            return;
        }
        match message.topic {
            ReplicaTopic::Load => self.on_load(message),
            ReplicaTopic::Sessions => {
                match self.sessions.as_ref().map(|sessions| sessions.on_message(&message.payload)) {
                    Some(Ok(lost)) => self.sharing.meters.lost(lost),
                    Some(Err(error)) => self.on_malformed(message, &error),
                    None => {}
                }
            }
            ReplicaTopic::Speculative => self.on_routed(message),
        }
    }

    fn on_routed(&mut self, message: &ReplicaMessage) {
        let Some(routed) = &self.routed else { return };
        match decode_routed(&message.payload) {
            Ok((layout, prompts)) if layout == self.layout => {
                let dropped = routed.receive(prompts);
                self.sharing.meters.routed_dropped(dropped);
            }
            Ok((got, _)) => {
                let error = RefusedSummary::Layout { got, want: self.layout };
                self.sharing.meters.refused(message.from, error.name(), &error, self.sharing.clock.now());
            }
            Err(error) => self.on_malformed(message, &error),
        }
    }

    fn on_malformed(&mut self, message: &ReplicaMessage, error: &MessageError) {
        let now = self.sharing.clock.now();
        self.sharing.meters.refused(message.from, "malformed", error, now);
    }

    fn on_load(&mut self, message: &ReplicaMessage) {
        let now = self.sharing.clock.now();
        let summary = match LoadSummary::decode(&message.payload) {
            Ok(summary) => summary,
            Err(error) => return self.on_malformed(message, &error),
        };
        match self.peers.receive(message.from, &summary, now) {
            Ok(received) => {
                if summary.ranks.iter().any(|rank| rank.booked > 0) {
                    self.peer_load_at = Some(now);
                }
                if received.is_new {
                    let (pool, life) = (&*self.pool, message.from);
                    tracing::info!(pool, replica = %life.replica, incarnation = life.incarnation, "replica found");
                }
                self.publish_peers(&received.changed, now);
                self.count_conflicts(&received.changed, now);
            }
            Err(error) => self.sharing.meters.refused(message.from, error.name(), &error, now),
        }
    }

    /// Writes the sums of the other replicas on these ranks.
    fn publish_peers(&mut self, changed: &[WorkerRank], now: Timestamp) {
        let entries = &self.sharing.ranks;
        entries.arrivals.publish_peers(self.peers.arrivals(now));
        let heads = self.peers.queue_heads(now);
        entries.queue_heads.publish_peers(&heads);
        let mut fell = self.queue_heads != heads;
        self.queue_heads = heads;
        for rank in changed {
            let load = self.peers.load(*rank, now);
            for slot in self.slots.get(rank).into_iter().flatten() {
                let Some(shared) = &mut self.ranks[*slot] else { continue };
                fell |= load.requests < shared.peers.requests || load.prefill < shared.peers.prefill;
                shared.peers = shared.peers.followed_by(load);
                shared.entry.peers.publish(&shared.peers);
                entries.board_changes.insert(Slot(u32::try_from(*slot).unwrap_or(u32::MAX)));
            }
        }
        if fell && self.sharing.wake.take() {
            self.sharing.scheduler.tell(SchedulerMsg::Wake { at: None });
        }
    }

    /// Counts new bookings of other replicas on ranks with recent own ones, if another rank would have been idle sooner.
    fn count_conflicts(&mut self, changed: &[WorkerRank], now: Timestamp) {
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
        self.sharing.meters.conflicts(conflicts);
    }
}

/// First number of the summaries of a task: above those of all earlier tasks of this process, whose life is the same.
fn first_sequence() -> u64 {
    static TASKS: AtomicU64 = AtomicU64::new(0);
    TASKS.fetch_add(1, Ordering::Relaxed) << 32
}

impl SharedRank {
    fn new(entry: Arc<RankEntry>) -> Self {
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
