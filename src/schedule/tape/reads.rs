//! Recording of the scheduler's inputs: what every decision has read, as bytes.
//!
//! A tape holds copies of the shared cells as the scheduler has last read them, and the bytes of entries that have not
//! been taken. A cell is read at most once between two [`begin`](Tape::begin)s; later reads return the copy, so that a
//! batch depends on one value of each cell. Only differences from the copies are written. Entries before the first
//! keyframe are dropped.

use std::cell::{Cell, RefCell};

use crate::engine_load::{EngineLoad, EngineReading};
use crate::load::{BoardLoad, PeerLoad, PlacementRate, SpeedCell, SpeedSample};
use crate::protocol::{Slot, Timestamp};
use crate::record::bytes::{Recorded, put_number, put_signed, put_word, recorded};

/// The entries of one scheduler, and copies of the cells that it has read.
#[derive(Debug, Default)]
pub(super) struct Tape {
    cells: RefCell<Vec<CellCopy>>,
    pub(super) arrivals: Cell<PlacementRate>,
    taped: RefCell<TapedEntries>,
    /// Slots that were reported as changed since the last batch.
    pub(super) changed: RefCell<Vec<Slot>>,
    stamp: Cell<u32>,
    /// Time and request number of the last entry, to which the next ones refer.
    last: Cell<Last>,
    /// Whether a keyframe has been written.
    pub(super) is_active: Cell<bool>,
    wants_segment: Cell<bool>,
    /// Whether ranks have joined, left or changed since the last keyframe.
    pub(super) lacks_ranks: Cell<bool>,
    /// Whether the status of a rank has changed since statuses were last written.
    pub(super) lacks_statuses: Cell<bool>,
}

/// Entries since the last call of [`Tape::drain`].
#[derive(Debug, Default)]
struct TapedEntries {
    /// The entries.
    bytes: Vec<u8>,
    /// Offset of a keyframe, from which the entries can be replayed without earlier ones.
    keyframe_at: Option<usize>,
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
pub(super) enum ReadCell {
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
    /// Working sets of ranks.
    pub(crate) const WORKING: u8 = 8;
    pub(crate) const BOARD: u8 = 16;
    pub(crate) const SPEED: u8 = 17;
    pub(crate) const HELD_BLOCKS: u8 = 18;
    pub(crate) const INDEX_CHANGED_AT: u8 = 19;
    pub(crate) const ENGINE_LOAD: u8 = 20;
    pub(crate) const PEERS: u8 = 21;
    pub(crate) const ARRIVALS: u8 = 22;
}

impl Tape {
    /// Passes the entries to `to`, unless there are none, and keeps their memory.
    pub(super) fn drain(&self, to: impl FnOnce(&[u8], Option<usize>)) {
        let taped = &mut *self.taped.borrow_mut();
        if !self.is_active.get() {
            taped.bytes.clear();
        } else if !taped.bytes.is_empty() {
            to(&taped.bytes, taped.keyframe_at);
            taped.bytes.clear();
            taped.keyframe_at = None;
        }
    }

    /// Writes a keyframe before the next batch, so that the entries from there on can be replayed without earlier ones.
    pub(super) fn begin_segment(&self) {
        self.wants_segment.set(true);
    }

    /// The next reads are of the present cells.
    pub(super) fn begin(&self) {
        self.stamp.set(self.stamp.get().wrapping_add(1));
    }

    /// Whether the next batch begins with a keyframe. One that only begins a segment waits for a moment at which it
    /// changes nothing (`is_free`).
    pub(super) fn needs_keyframe(&self, is_free: bool) -> bool {
        !self.is_active.get() || self.lacks_ranks.get() || self.wants_segment.get() && is_free
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
        let taped = &mut *self.taped.borrow_mut();
        if !self.is_active.replace(true) {
            taped.bytes.clear();
        }
        if begins_segment {
            taped.keyframe_at = Some(taped.bytes.len());
            self.wants_segment.set(false);
        }
        self.lacks_ranks.set(false);
        self.lacks_statuses.set(false);
    }

    /// The copies of the cells of a slot.
    pub(super) fn with_cells<R>(&self, slot: Slot, of: impl FnOnce(&CellCopy) -> R) -> R {
        let mut cells = self.cells.borrow_mut();
        of(of_slot(&mut cells, slot))
    }

    /// Gives the memory of taken `changed` slots back.
    pub(super) fn reuse(&self, mut changed: Vec<Slot>) {
        changed.clear();
        self.changed.replace(changed);
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

    /// Copies a cell if this is its first read of the batch, and writes the value if it differs from the copy.
    #[inline]
    pub(super) fn read_cell<R: Copy + PartialEq + Recorded>(
        &self,
        slot: Slot,
        (cell, kind): (ReadCell, u8),
        read: impl FnOnce() -> R,
        copy: impl FnOnce(&mut CellCopy) -> &mut R,
    ) -> R {
        let mut cells = self.cells.borrow_mut();
        let copies = of_slot(&mut cells, slot);
        let is_due = copies.is_due(cell, self.stamp.get());
        let copy = copy(copies);
        if is_due {
            let value = read();
            if value != std::mem::replace(copy, value) {
                let reads = &mut self.taped.borrow_mut().bytes;
                put_slot(reads, kind, slot);
                value.put(reads);
            }
        }
        *copy
    }

    pub(super) fn read_arrivals(&self, rate: PlacementRate) -> PlacementRate {
        if rate != self.arrivals.replace(rate) {
            let reads = &mut self.taped.borrow_mut().bytes;
            reads.push(entry::ARRIVALS);
            rate.put(reads);
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

recorded! {
    EngineLoad { reading, at }
    EngineReading { running, waiting, kv_usage; sleep: None }
    PlacementRate { placements_per_second, work_per_second }
}
