//! Recording of the scheduler's inputs: what every decision has read, as bytes.
//!
//! A tape holds copies of the shared cells as the scheduler has last read them, and the bytes of entries that have not
//! been taken. A cell is read at most once between two [`begin`](Tape::begin)s; later reads return the copy, so that a
//! batch depends on one value of each cell. Only differences from the copies are written. Entries before the first
//! keyframe are dropped. `recording` writes the entries, and `replay` reads them.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use crate::engine_load::{EngineLoad, EngineReading};
use crate::load::{BoardLoad, PeerLoad, PlacementRate, SpeedCell, SpeedSample};
use crate::protocol::{Slot, Timestamp};
use crate::record::bytes::{put_f64, put_number, put_optional, put_signed, put_word, put_words};

/// Recorder of one scheduler.
///
/// ```
/// use pointsman::schedule::Tape;
///
/// let tape = Tape::new(br#"{ "policy": "kv" }"#.as_slice().into());
/// assert!(tape.take().bytes.is_empty());
/// ```
#[derive(Debug)]
pub struct Tape {
    cells: RefCell<Vec<CellCopy>>,
    arrivals: Cell<PlacementRate>,
    taped: RefCell<TapedEntries>,
    changed: RefCell<Vec<Slot>>,
    stamp: Cell<u32>,
    /// Time and request number of the last entry, to which the next ones refer.
    pub(super) last: Cell<Last>,
    state: Cell<State>,
    pub(super) settings: Arc<[u8]>,
}

/// Entries since the last call of [`Tape::take`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TapedEntries {
    /// The entries.
    pub bytes: Vec<u8>,
    /// Offset of a keyframe, from which the entries can be replayed without earlier ones.
    pub keyframe_at: Option<usize>,
}

/// Values to which the numbers of an entry are relative.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Last {
    pub(super) now: u64,
    pub(super) number: u64,
}

impl Last {
    pub(super) fn put_time(&mut self, to: &mut Vec<u8>, now: Timestamp) {
        put_signed(to, now.0.wrapping_sub(self.now).cast_signed());
        self.now = now.0;
    }

    pub(super) fn put_number(&mut self, to: &mut Vec<u8>, number: u64) {
        put_signed(to, number.wrapping_sub(self.number).cast_signed());
        self.number = number;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Whether a keyframe has been written.
    is_active: bool,
    wants_segment: bool,
    lacks_ranks: bool,
    lacks_statuses: bool,
}

/// Contents of the cells of one slot at their last reads.
#[derive(Debug, Default)]
pub(super) struct CellCopy {
    board: [u64; BoardLoad::WORDS],
    pub(super) speed: SpeedCell,
    sample: SpeedSample,
    pub(super) held_blocks: u32,
    pub(super) index_changed_at: Option<Timestamp>,
    pub(super) engine_load: Option<EngineLoad>,
    pub(super) peers: PeerLoad,
    /// Stamps of the last reads, by [`ReadCell`].
    read: [u32; 6],
}

/// A cell of a slot.
#[derive(Clone, Copy)]
enum ReadCell {
    Board,
    Speed,
    HeldBlocks,
    IndexChangedAt,
    EngineLoad,
    Peers,
}

/// Kinds of entries.
pub(super) mod entry {
    pub(crate) const KEYFRAME: u8 = 1;
    pub(crate) const PREPARED: u8 = 2;
    pub(crate) const STATUSES: u8 = 3;
    pub(crate) const BATCH: u8 = 4;
    /// Begins the outcomes of a batch.
    pub(crate) const DECIDING: u8 = 5;
    pub(crate) const OUTCOME: u8 = 6;
    pub(crate) const DECIDED: u8 = 7;
    pub(crate) const BOARD: u8 = 16;
    pub(crate) const SPEED: u8 = 17;
    pub(crate) const HELD_BLOCKS: u8 = 18;
    pub(crate) const INDEX_CHANGED_AT: u8 = 19;
    pub(crate) const ENGINE_LOAD: u8 = 20;
    pub(crate) const PEERS: u8 = 21;
    pub(crate) const ARRIVALS: u8 = 22;
}

impl Tape {
    /// A tape of a scheduler with these settings, as JSON. The first entry is a keyframe.
    #[must_use]
    pub fn new(settings: Arc<[u8]>) -> Self {
        Self {
            cells: RefCell::default(),
            arrivals: Cell::default(),
            taped: RefCell::default(),
            changed: RefCell::default(),
            stamp: Cell::new(1),
            last: Cell::default(),
            state: Cell::new(State::default()),
            settings,
        }
    }

    /// Takes the entries.
    #[must_use]
    pub fn take(&self) -> TapedEntries {
        self.taped.take()
    }

    /// Passes the entries to `to`, unless there are none, and keeps their memory.
    pub fn drain(&self, to: impl FnOnce(&[u8], Option<usize>)) {
        let taped = &mut *self.taped.borrow_mut();
        if !self.state.get().is_active {
            taped.bytes.clear();
        } else if !taped.bytes.is_empty() {
            to(&taped.bytes, taped.keyframe_at);
            taped.bytes.clear();
            taped.keyframe_at = None;
        }
    }

    /// Writes a keyframe before the next batch, so that the entries from there on can be replayed without earlier ones.
    pub fn begin_segment(&self) {
        self.state.set(State { wants_segment: true, ..self.state.get() });
    }

    /// The next reads are of the present cells.
    pub(super) fn begin(&self) {
        self.stamp.set(self.stamp.get().wrapping_add(1));
    }

    /// Ranks have joined, left or changed.
    pub(super) fn lose_ranks(&self) {
        self.state.set(State { lacks_ranks: true, ..self.state.get() });
    }

    /// The status of a rank has changed.
    pub(super) fn lose_statuses(&self) {
        self.state.set(State { lacks_statuses: true, ..self.state.get() });
    }

    /// Whether the next batch begins with a keyframe. One that only begins a segment waits for a moment at which it
    /// changes nothing (`is_free`).
    pub(super) fn needs_keyframe(&self, is_free: bool) -> bool {
        let State { is_active, wants_segment, .. } = self.state.get();
        !is_active || self.lacks_ranks() || wants_segment && is_free
    }

    /// Whether ranks have joined, left or changed since the last keyframe.
    pub(super) fn lacks_ranks(&self) -> bool {
        let State { is_active, lacks_ranks, .. } = self.state.get();
        is_active && lacks_ranks
    }

    pub(super) fn lacks_statuses(&self) -> bool {
        let State { is_active, lacks_statuses, .. } = self.state.get();
        is_active && lacks_statuses
    }

    /// Writes an entry or a part of it.
    #[inline]
    pub(super) fn write(&self, put: impl FnOnce(&mut Vec<u8>, &mut Last)) {
        let mut last = self.last.get();
        put(&mut self.taped.borrow_mut().bytes, &mut last);
        self.last.set(last);
    }

    /// Begins an entry with the complete state. If it `begins_segment`, no earlier entry is needed from here on. Entries
    /// before the first keyframe are dropped.
    pub(super) fn begin_keyframe(&self, begins_segment: bool) {
        let State { is_active, wants_segment, .. } = self.state.get();
        let taped = &mut *self.taped.borrow_mut();
        if !is_active {
            taped.bytes.clear();
        }
        if begins_segment {
            taped.keyframe_at = Some(taped.bytes.len());
        }
        self.state.set(State { is_active: true, wants_segment: wants_segment && !begins_segment, ..State::default() });
    }

    /// The statuses of all ranks have been written.
    pub(super) fn has_statuses(&self) {
        self.state.set(State { lacks_statuses: false, ..self.state.get() });
    }

    /// The copies of the cells of a slot.
    pub(super) fn with_cells<R>(&self, slot: Slot, of: impl FnOnce(&CellCopy) -> R) -> R {
        let mut cells = self.cells.borrow_mut();
        of(of_slot(&mut cells, slot))
    }

    pub(super) fn arrivals_read(&self) -> PlacementRate {
        self.arrivals.get()
    }

    /// Slots that were reported as changed since the last call.
    pub(super) fn take_changed(&self) -> Vec<Slot> {
        self.changed.take()
    }

    /// Gives the memory of [`take_changed`](Self::take_changed) back.
    pub(super) fn reuse(&self, mut changed: Vec<Slot>) {
        changed.clear();
        self.changed.replace(changed);
    }

    pub(super) fn read_changed(&self, changed: &[Slot]) {
        self.changed.borrow_mut().extend_from_slice(changed);
    }

    /// A board's snapshot, if it is new. Later reads of the batch return nothing new.
    #[inline]
    pub(super) fn read_board(&self, slot: Slot, read: impl FnOnce() -> Option<BoardLoad>) -> Option<BoardLoad> {
        let mut cells = self.cells.borrow_mut();
        let cell = of_slot(&mut cells, slot);
        if !cell.is_due(ReadCell::Board, self.stamp.get()) {
            return None;
        }
        let load = read()?;
        let words = load.to_words();
        let before = std::mem::replace(&mut cell.board, words);
        let reads = &mut self.taped.borrow_mut().bytes;
        put_slot(reads, entry::BOARD, slot);
        let mut mask = 0_u32;
        for at in 0..BoardLoad::WORDS {
            mask |= u32::from(words[at] != before[at]) << at;
        }
        put_number(reads, mask.into());
        while mask != 0 {
            put_word(reads, words[mask.trailing_zeros() as usize]);
            mask &= mask - 1;
        }
        Some(load)
    }

    /// Copies the speed cell, and passes the copy to `of`.
    #[inline]
    pub(super) fn read_speed<R>(
        &self,
        slot: Slot,
        read: impl FnOnce() -> SpeedSample,
        of: impl FnOnce(&SpeedCell) -> R,
    ) -> R {
        let mut cells = self.cells.borrow_mut();
        let cell = of_slot(&mut cells, slot);
        if cell.is_due(ReadCell::Speed, self.stamp.get()) {
            let sample = read();
            if sample != cell.sample {
                let before = std::mem::replace(&mut cell.sample, sample);
                cell.speed.restore(&sample);
                put_speed(&mut self.taped.borrow_mut().bytes, slot, &before, &sample);
            }
        }
        of(&cell.speed)
    }

    pub(super) fn read_held_blocks(&self, slot: Slot, read: impl FnOnce() -> u32) -> u32 {
        let mut cells = self.cells.borrow_mut();
        let cell = of_slot(&mut cells, slot);
        if cell.is_due(ReadCell::HeldBlocks, self.stamp.get()) {
            let held_blocks = read();
            if held_blocks != std::mem::replace(&mut cell.held_blocks, held_blocks) {
                let reads = &mut self.taped.borrow_mut().bytes;
                put_slot(reads, entry::HELD_BLOCKS, slot);
                put_number(reads, held_blocks.into());
            }
        }
        cell.held_blocks
    }

    pub(super) fn read_index_changed_at(
        &self,
        slot: Slot,
        read: impl FnOnce() -> Option<Timestamp>,
    ) -> Option<Timestamp> {
        let mut cells = self.cells.borrow_mut();
        let cell = of_slot(&mut cells, slot);
        if cell.is_due(ReadCell::IndexChangedAt, self.stamp.get()) {
            let changed_at = read();
            if changed_at != std::mem::replace(&mut cell.index_changed_at, changed_at) {
                let reads = &mut self.taped.borrow_mut().bytes;
                put_slot(reads, entry::INDEX_CHANGED_AT, slot);
                put_number(reads, changed_at.map_or(0, |at| at.0.saturating_add(1)));
            }
        }
        cell.index_changed_at
    }

    pub(super) fn read_engine_load(&self, slot: Slot, read: impl FnOnce() -> Option<EngineLoad>) -> Option<EngineLoad> {
        let mut cells = self.cells.borrow_mut();
        let cell = of_slot(&mut cells, slot);
        if cell.is_due(ReadCell::EngineLoad, self.stamp.get()) {
            let load = read();
            if load != std::mem::replace(&mut cell.engine_load, load) {
                let reads = &mut self.taped.borrow_mut().bytes;
                put_slot(reads, entry::ENGINE_LOAD, slot);
                put_engine_load(reads, load);
            }
        }
        cell.engine_load
    }

    #[inline]
    pub(super) fn read_peers(&self, slot: Slot, read: impl FnOnce() -> PeerLoad) -> PeerLoad {
        let mut cells = self.cells.borrow_mut();
        let cell = of_slot(&mut cells, slot);
        if cell.is_due(ReadCell::Peers, self.stamp.get()) {
            let load = read();
            if load != cell.peers {
                cell.peers = load;
                let reads = &mut self.taped.borrow_mut().bytes;
                put_slot(reads, entry::PEERS, slot);
                put_words(reads, &load.to_words());
            }
        }
        cell.peers
    }

    pub(super) fn read_arrivals(&self, rate: PlacementRate) -> PlacementRate {
        if rate != self.arrivals.replace(rate) {
            let reads = &mut self.taped.borrow_mut().bytes;
            reads.push(entry::ARRIVALS);
            put_f64(reads, rate.placements_per_second);
            put_f64(reads, rate.work_per_second);
        }
        rate
    }
}

impl CellCopy {
    /// Whether this is the first read of the batch.
    fn is_due(&mut self, cell: ReadCell, stamp: u32) -> bool {
        std::mem::replace(&mut self.read[cell as usize], stamp) != stamp
    }
}

fn of_slot(cells: &mut Vec<CellCopy>, slot: Slot) -> &mut CellCopy {
    if cells.len() <= slot.index() {
        cells.resize_with(slot.index() + 1, CellCopy::default);
    }
    &mut cells[slot.index()]
}

fn put_slot(to: &mut Vec<u8>, kind: u8, slot: Slot) {
    to.push(kind);
    put_number(to, slot.0.into());
}

fn put_speed(to: &mut Vec<u8>, slot: Slot, before: &SpeedSample, sample: &SpeedSample) {
    put_slot(to, entry::SPEED, slot);
    let (before, words) = (before.to_words(), sample.to_words());
    let is_changed = |at: &usize| words[*at] != before[*at];
    let mask = (0..SpeedSample::WORDS).filter(is_changed).fold(0_u64, |mask, at| mask | 1 << at);
    put_number(to, mask);
    for at in (0..SpeedSample::WORDS).filter(is_changed) {
        to.extend_from_slice(&words[at].to_le_bytes());
    }
}

pub(super) fn put_engine_load(to: &mut Vec<u8>, load: Option<EngineLoad>) {
    put_optional(to, load, |to, EngineLoad { reading: EngineReading { running, waiting, kv_usage }, at }| {
        put_number(to, at.0);
        put_optional(to, running, |to, count| put_number(to, count.into()));
        put_optional(to, waiting, |to, count| put_number(to, count.into()));
        put_optional(to, kv_usage, put_f64);
    });
}
