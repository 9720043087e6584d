//! Loads as a tape has recorded them.

use std::cell::{Cell, RefCell};

use super::reads::entry;
use crate::engine_load::EngineLoad;
use crate::load::{BoardLoad, BoardVersion, PeerLoad, PlacementRate, SpeedCell, SpeedSample};
use crate::protocol::{Slot, Timestamp};
use crate::record::bytes::{Reader, Recorded};
use crate::schedule::LoadView;
use crate::schedule::ranks::SLOTS_MAX;

/// The cells of every slot at the last recorded reads.
#[derive(Debug, Default)]
pub(super) struct ReplayLoads {
    /// By slot. Boxes keep the table small, if damaged bytes name a large slot.
    cells: Vec<Option<Box<ReplayCell>>>,
    changed: RefCell<Vec<Slot>>,
    arrivals: PlacementRate,
}

#[derive(Debug, Default)]
struct ReplayCell {
    words: [u64; BoardLoad::WORDS],
    /// A snapshot that was read in this batch.
    news: Cell<Option<BoardLoad>>,
    speed: SpeedCell,
    held_blocks: u32,
    index_changed_at: Option<Timestamp>,
    engine_load: Option<EngineLoad>,
    peers: PeerLoad,
}

impl ReplayLoads {
    /// Sets the slots that the next batch reads.
    pub(super) fn set_changed(&self, changed: Vec<Slot>) {
        *self.changed.borrow_mut() = changed;
    }

    /// The board and the peers of a rank at a keyframe.
    pub(super) fn restore(
        &mut self,
        slot: Slot,
        board: &BoardLoad,
        peers: PeerLoad,
        from: &mut Reader<'_>,
    ) -> Option<()> {
        let cell = self.cell(slot)?;
        (cell.words, cell.peers) = (board.to_words(), peers);
        cell.news.set(None);
        cell.speed.restore(&Recorded::read(from)?);
        cell.held_blocks = from.u32()?;
        cell.index_changed_at = Recorded::read(from)?;
        cell.engine_load = Recorded::read(from)?;
        Some(())
    }

    pub(super) fn set_arrivals(&mut self, arrivals: PlacementRate) {
        self.arrivals = arrivals;
    }

    /// Applies a read of a cell.
    pub(super) fn apply(&mut self, kind: u8, from: &mut Reader<'_>) -> Option<()> {
        if kind == entry::ARRIVALS {
            self.arrivals = PlacementRate::read(from)?;
            return Some(());
        }
        let cell = self.cell(Slot(from.u32()?))?;
        match kind {
            entry::BOARD => {
                let mask = from.number()?;
                for (at, word) in cell.words.iter_mut().enumerate() {
                    if mask >> at & 1 == 1 {
                        *word = from.word()?;
                    }
                }
                cell.news.set(Some(BoardLoad::from_words(cell.words)));
            }
            entry::SPEED => {
                let mask = from.number()?;
                let mut words = cell.speed.sample().to_words();
                for (at, word) in words.iter_mut().enumerate() {
                    if mask >> at & 1 == 1 {
                        *word = u32::from_le_bytes(from.bytes(4)?.try_into().ok()?);
                    }
                }
                cell.speed.restore(&SpeedSample::from_words(words));
            }
            entry::HELD_BLOCKS => cell.held_blocks = from.u32()?,
            entry::INDEX_CHANGED_AT => cell.index_changed_at = Recorded::read(from)?,
            entry::ENGINE_LOAD => cell.engine_load = Recorded::read(from)?,
            entry::PEERS => cell.peers = Recorded::read(from)?,
            _ => return None,
        }
        Some(())
    }

    fn cell(&mut self, slot: Slot) -> Option<&mut ReplayCell> {
        (slot.index() < SLOTS_MAX).then_some(())?;
        if self.cells.len() <= slot.index() {
            self.cells.resize_with(slot.index() + 1, || None);
        }
        self.cells.get_mut(slot.index()).map(|cell| &mut **cell.get_or_insert_default())
    }

    fn of<R: Default>(&self, slot: Slot, read: impl FnOnce(&ReplayCell) -> R) -> R {
        self.cells.get(slot.index()).and_then(Option::as_deref).map(read).unwrap_or_default()
    }
}

impl LoadView for ReplayLoads {
    fn take_changed(&self, changed: &mut Vec<Slot>) {
        changed.append(&mut self.changed.borrow_mut());
    }

    fn board(&self, slot: Slot, _: &mut BoardVersion) -> Option<BoardLoad> {
        self.of(slot, |cell| cell.news.take())
    }

    fn with_speed<R>(&self, slot: Slot, read: impl FnOnce(&SpeedCell) -> R) -> R {
        match self.cells.get(slot.index()).and_then(Option::as_deref) {
            Some(cell) => read(&cell.speed),
            None => read(&SpeedCell::default()),
        }
    }

    fn held_blocks(&self, slot: Slot) -> u32 {
        self.of(slot, |cell| cell.held_blocks)
    }

    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp> {
        self.of(slot, |cell| cell.index_changed_at)
    }

    fn engine_load(&self, slot: Slot) -> Option<EngineLoad> {
        self.of(slot, |cell| cell.engine_load)
    }

    fn peer_load(&self, slot: Slot) -> PeerLoad {
        self.of(slot, |cell| cell.peers)
    }

    fn peer_arrivals(&self) -> PlacementRate {
        self.arrivals
    }
}
