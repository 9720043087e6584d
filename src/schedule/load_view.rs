//! Load state that the scheduler reads during a step.
//!
//! The state is shared with other actors and changes between two reads. [`Schedule::step`](super::Schedule::step)
//! therefore takes it as an argument: [`LiveLoads`] reads the shared cells, a test or a replay supplies recorded reads.
//! The same inputs, reads and times give the same effects.

use std::sync::Arc;

use crate::engine_load::{EngineLoad, EngineLoadCell};
use crate::index::Holdings;
use crate::load::{
    ArrivalsCell, BoardChanges, BoardLoad, BoardSlot, BoardVersion, EngineSpeed, PeerLoad, PeerLoadCell, PlacementRate,
    SpeedCell,
};
use crate::protocol::{Slot, Timestamp};
use crate::queue::QueueHeads;

/// Load, speed and cache state of the admitted ranks, by slot.
///
/// The scheduler reads only slots between their `Admit` and their `Retire`. Every answer may change from one read to
/// the next.
pub trait LoadView {
    /// Adds to `changed` the slots whose boards may have newer snapshots than at the last call. Also adds vacant slots.
    fn take_changed(&self, changed: &mut Vec<Slot>);

    /// The board's snapshot if it is newer than `seen`, which then moves to its version. `None` if it is not newer or a
    /// write is in progress.
    fn board(&self, slot: Slot, seen: &mut BoardVersion) -> Option<BoardLoad>;

    /// Passes what the rank's sequence actor has published beside its board to `read`.
    fn with_speed<R>(&self, slot: Slot, read: impl FnOnce(&SpeedCell) -> R) -> R;

    /// KV blocks that the index holds for the rank, counted once per tier.
    fn held_blocks(&self, slot: Slot) -> u32;

    /// Time of the rank's last KV event.
    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp>;

    /// The load that the rank's engine last reported.
    fn engine_load(&self, slot: Slot) -> Option<EngineLoad>;

    /// Load by the bookings of other replicas; none by default.
    fn peer_load(&self, _slot: Slot) -> PeerLoad {
        PeerLoad::default()
    }

    /// Arrivals at other replicas; none by default.
    fn peer_arrivals(&self) -> PlacementRate {
        PlacementRate::default()
    }

    /// Number of other replicas whose longest-waiting request arrived after `passed` and before `head`; none by default.
    fn replicas_ahead(&self, _passed: Option<Timestamp>, _head: Timestamp) -> usize {
        0
    }
}

/// The shared cells of one rank. Each has one writer.
#[derive(Clone, Debug, Default)]
pub struct RankCells {
    /// Load, written by the rank's sequence actor.
    pub board: Arc<BoardSlot>,
    /// Compute speed, written by the rank's sequence actor.
    pub speed: Arc<SpeedCell>,
    /// Index size, written by the rank's index shard.
    pub holdings: Arc<Holdings>,
    /// Engine-reported load, written by the engine-load actor.
    pub engine_load: Arc<EngineLoadCell>,
    /// Load by other replicas, written by the replica actor.
    pub peers: Arc<PeerLoadCell>,
}

/// The current contents of the ranks' shared cells.
///
/// ```
/// use pointsman::internals::load::{BoardLoad, BoardVersion};
/// use pointsman::internals::protocol::Slot;
/// use pointsman::internals::schedule::{LiveLoads, LoadView, RankCells};
///
/// let (mut loads, cells) = (LiveLoads::default(), RankCells::default());
/// loads.insert(Slot(3), cells.clone());
/// cells.board.publish(&BoardLoad { requests: 2, ..BoardLoad::default() });
/// let mut seen = BoardVersion::default();
/// assert_eq!(loads.board(Slot(3), &mut seen).map(|load| load.requests), Some(2));
/// let mut changed = Vec::new();
/// loads.take_changed(&mut changed);
/// assert_eq!((changed, loads.board(Slot(3), &mut seen)), (vec![Slot(3)], None));
/// ```
#[derive(Debug, Default)]
pub struct LiveLoads {
    by_slot: Vec<RankCells>,
    changes: Arc<BoardChanges>,
    arrivals: Arc<ArrivalsCell>,
    heads: Arc<QueueHeads>,
    /// Slots of boards that report their changes to another reader.
    polled: Vec<Slot>,
}

impl LiveLoads {
    /// No cells. Their boards report to `changes`, which must have no other reader.
    #[must_use]
    pub fn new(changes: Arc<BoardChanges>, arrivals: Arc<ArrivalsCell>, heads: Arc<QueueHeads>) -> Self {
        Self { changes, arrivals, heads, ..Self::default() }
    }

    /// Adds the cells of the rank in `slot`, before its `Admit`.
    pub fn insert(&mut self, slot: Slot, cells: RankCells) {
        if self.by_slot.len() <= slot.index() {
            self.by_slot.resize_with(slot.index() + 1, RankCells::default);
        }
        self.polled.retain(|polled| *polled != slot);
        if !cells.board.report_to(&self.changes, slot) {
            self.polled.push(slot);
        }
        self.changes.insert(slot);
        self.by_slot[slot.index()] = cells;
    }

    /// Reports every board as changed, for the next reader of the changes.
    pub fn report_all(&self) {
        (0..self.by_slot.len()).for_each(|slot| self.changes.insert(Slot(u32::try_from(slot).unwrap_or(u32::MAX))));
    }

    /// Drops the cells of the rank in `slot`, after its `Retire`.
    pub fn remove(&mut self, slot: Slot) {
        if let Some(cells) = self.by_slot.get_mut(slot.index()) {
            *cells = RankCells::default();
        }
        self.polled.retain(|polled| *polled != slot);
    }

    /// Publishes the pool's typical speed to every rank's sequence actor, and its arrivals to other replicas: performs
    /// [`Effect::PublishTypical`](super::Effect::PublishTypical).
    pub fn publish_typical(&self, typical: &EngineSpeed, rate: PlacementRate, now: Timestamp) {
        self.arrivals.publish_own(rate, now);
        for cells in &self.by_slot {
            cells.speed.publish_typical(typical);
        }
    }
}

impl LoadView for LiveLoads {
    #[inline]
    fn take_changed(&self, changed: &mut Vec<Slot>) {
        for first in self.changes.take() {
            let slots = (first..self.by_slot.len()).step_by(BoardChanges::SLOTS);
            changed.extend(slots.map(|slot| Slot(u32::try_from(slot).unwrap_or(u32::MAX))));
        }
        changed.extend_from_slice(&self.polled);
    }

    #[inline]
    fn board(&self, slot: Slot, seen: &mut BoardVersion) -> Option<BoardLoad> {
        self.by_slot[slot.index()].board.read_since(seen)
    }

    #[inline]
    fn with_speed<R>(&self, slot: Slot, read: impl FnOnce(&SpeedCell) -> R) -> R {
        read(&self.by_slot[slot.index()].speed)
    }

    #[inline]
    fn held_blocks(&self, slot: Slot) -> u32 {
        self.by_slot[slot.index()].holdings.held_blocks()
    }

    #[inline]
    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp> {
        self.by_slot[slot.index()].holdings.changed_at()
    }

    #[inline]
    fn engine_load(&self, slot: Slot) -> Option<EngineLoad> {
        self.by_slot[slot.index()].engine_load.read()
    }

    #[inline]
    fn peer_load(&self, slot: Slot) -> PeerLoad {
        self.by_slot[slot.index()].peers.read()
    }

    #[inline]
    fn peer_arrivals(&self) -> PlacementRate {
        self.arrivals.peers()
    }

    #[inline]
    fn replicas_ahead(&self, passed: Option<Timestamp>, head: Timestamp) -> usize {
        self.heads.peers_between(passed, head)
    }
}
