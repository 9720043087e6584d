//! Sharing of load, sessions and routed prompts: publishes what the own bookings contribute to each rank, and the sums of
//! what other replicas report.
//!
//! One task per router. [`SharingShell`] decides what to write and which sums to publish. If the task panics, it starts again with the next life of its tables; its peers repair them within a second.

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
use crate::actors::views::rank::RankEntries;
use crate::actors::views::status::RouterStatus;
use crate::actors::views::wake_flag::WakeFlag;
use crate::config::RouterConfig;
use crate::hashing::HashScheme;
use crate::protocol::BlockSizeOrigin;
use crate::replica::{
    LoadSummary, MessageError, PeerState, RefusedSummary, ReplicaLayout, ReplicaTopic, decode_routed,
};
use crate::shell::sharing::{SharedEntry, SharingCells, SharingShell};

/// Interval of the task while the replica has no load, until a booking. Full summaries remain about a second apart.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);

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
    shell: SharingShell,
    pool: Arc<str>,
    interval: Duration,
    sessions: SessionSharing,
    /// Present if caches are derived from decisions.
    routed: Option<RoutedSharing>,
    layout: ReplicaLayout,
    /// Version of the rank entries that the shell follows.
    entries_version: Option<u64>,
}

impl SharingTask {
    fn new(sharing: ReplicaSharing) -> Self {
        let layout = ReplicaLayout { block_size: sharing.block_size.tokens(), hash_seed: HashScheme::BASE_SEED };
        let interval = Duration::from_millis(sharing.config.replicas.interval_ms);
        let pool: Arc<str> = Arc::from(&*sharing.config.pool);
        let (bus, scheduler) = (Arc::clone(&sharing.bus), Arc::clone(&sharing.scheduler));
        let sessions = SessionSharing::new(bus, Arc::clone(&pool), scheduler);
        let routed = RoutedSharing::of(&sharing.config, &sharing.bus, &pool, layout, &sharing.shards);
        let cells = SharingCells {
            arrivals: Arc::clone(&sharing.ranks.arrivals),
            queue_heads: Arc::clone(&sharing.ranks.queue_heads),
            board_changes: Arc::clone(&sharing.ranks.board_changes),
        };
        Self {
            pool,
            sessions,
            routed,
            layout,
            interval,
            shell: SharingShell::new(layout, interval, first_sequence(), cells),
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
        let clock = self.sharing.clock;
        let end = loop {
            tokio::select! {
                biased;
                _ = status.down() => break TaskEnd::Down,
                changed = sizes.wait_for(|size| size.tokens != layout_tokens) => match changed {
                    Ok(_) => break TaskEnd::BlockSize,
                    Err(_) => break TaskEnd::Down,
                },
                _ = ticks.tick() => {
                    self.on_tick();
                    if self.is_idle() {
                        ticks.reset_after(self.interval.max(IDLE_INTERVAL));
                    }
                }
                () = booked.notified(), if self.shell.may_write(clock.now()) => {
                    self.read_entries();
                    if let Some(summary) = self.shell.on_booked(clock.now()) {
                        ticks.reset();
                        self.publish(&summary);
                    }
                }
                message = messages.recv() => match message {
                    Ok(message) => self.on_message(&message),
                    Err(RecvError::Lagged(lost)) => self.sharing.meters.lost(lost),
                    Err(RecvError::Closed) => break TaskEnd::Down,
                }
            }
        };
        let last = self.shell.last();
        self.publish(&last);
        end
    }

    fn is_idle(&self) -> bool {
        self.shell.is_idle() && self.sessions.is_idle()
    }

    fn publish(&self, summary: &LoadSummary) {
        self.sharing.bus.publish(&self.pool, ReplicaTopic::Load, summary.encode().into());
    }

    fn on_tick(&mut self) {
        self.read_entries();
        let now = self.sharing.clock.now();
        let (summary, fell) = self.shell.on_tick(now);
        summary.iter().for_each(|summary| self.publish(summary));
        self.wake_scheduler(fell);
        let live = self.shell.peers().statuses(now).filter(|peer| peer.state == PeerState::Live).count();
        self.sessions.on_tick(u32::try_from(live).unwrap_or(u32::MAX).saturating_add(1));
        if let Some(routed) = &mut self.routed {
            let dropped = routed.on_tick();
            self.sharing.meters.routed_dropped(dropped);
        }
        if self.sharing.meters.is_due(now) {
            let statuses: Vec<_> = self.shell.peers().statuses(now).collect();
            let prefill =
                self.shell.peers().ranks().into_iter().map(|rank| self.shell.peers().load(rank, now).prefill).sum();
            self.sharing.meters.show(&statuses, prefill, now);
            self.sharing.replica_peers.set(ReplicaPeers { at: now, statuses });
        }
    }

    /// Follows joined and left ranks.
    fn read_entries(&mut self) {
        let version = self.sharing.ranks.version();
        if self.entries_version.replace(version) == Some(version) {
            return;
        }
        let entries = self.sharing.ranks.all().into_iter().map(|entry| SharedEntry {
            rank: entry.rank,
            slot: entry.slot,
            board: Arc::clone(&entry.cells.board),
            peers: Arc::clone(&entry.cells.peers),
        });
        let fell = self.shell.follow(entries.collect(), self.sharing.clock.now());
        self.wake_scheduler(fell);
    }

    /// Wakes the scheduler if it waits for falling load.
    fn wake_scheduler(&self, fell: bool) {
        if fell && self.sharing.wake.take() {
            self.sharing.scheduler.tell(SchedulerMsg::Wake { at: None });
        }
    }

    fn on_message(&mut self, message: &ReplicaMessage) {
        if message.pool != self.pool {
            return;
        }
        match message.topic {
            ReplicaTopic::Load => self.on_load(message),
            ReplicaTopic::Sessions => match self.sessions.on_message(&message.payload) {
                Ok(lost) => self.sharing.meters.lost(lost),
                Err(error) => self.on_malformed(message, &error),
            },
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
        match self.shell.receive(message.from, &summary, now) {
            Ok(received) => {
                if received.is_new {
                    let (pool, life) = (&*self.pool, message.from);
                    tracing::info!(pool, replica = %life.replica, incarnation = life.incarnation, "replica found");
                }
                self.wake_scheduler(received.fell);
                self.sharing.meters.conflicts(received.conflicts);
            }
            Err(error) => self.sharing.meters.refused(message.from, error.name(), &error, now),
        }
    }
}

/// First number of the summaries of a task: above those of all earlier tasks of this process, whose life is the same.
fn first_sequence() -> u64 {
    static TASKS: AtomicU64 = AtomicU64::new(0);
    TASKS.fetch_add(1, Ordering::Relaxed) << 32
}
