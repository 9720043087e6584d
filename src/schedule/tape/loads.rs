//! View of the loads that records every read.

use super::reads::{ReadCell, Tape, entry};
use crate::engine_load::EngineLoad;
use crate::load::{BoardLoad, BoardVersion, PeerLoad, PlacementRate, SpeedCell};
use crate::protocol::{Slot, Timestamp};
use crate::schedule::LoadView;

/// Loads whose reads are recorded on a [`Tape`].
#[derive(Clone, Copy, Debug)]
pub(super) struct TapedLoads<'a, V> {
    pub(super) loads: &'a V,
    pub(super) tape: &'a Tape,
}

impl<V: LoadView> LoadView for TapedLoads<'_, V> {
    /// Begins a batch: the next reads are of the present cells.
    fn take_changed(&self, changed: &mut Vec<Slot>) {
        self.tape.begin();
        let before = changed.len();
        self.loads.take_changed(changed);
        self.tape.changed.borrow_mut().extend_from_slice(&changed[before..]);
    }

    /// Reads the other cells of the rank as well, which a later explanation or another policy uses.
    #[inline]
    fn board(&self, slot: Slot, seen: &mut BoardVersion) -> Option<BoardLoad> {
        let load = self.tape.read_board(slot, || self.loads.board(slot, seen))?;
        self.with_speed(slot, |_| ());
        self.held_blocks(slot);
        self.index_changed_at(slot);
        self.engine_load(slot);
        Some(load)
    }

    #[inline]
    fn with_speed<R>(&self, slot: Slot, read: impl FnOnce(&SpeedCell) -> R) -> R {
        self.tape.read_speed(slot, || self.loads.with_speed(slot, SpeedCell::sample), read)
    }

    #[inline]
    fn held_blocks(&self, slot: Slot) -> u32 {
        let kind = (ReadCell::HeldBlocks, entry::HELD_BLOCKS);
        self.tape.read_cell(slot, kind, || self.loads.held_blocks(slot), |cell| &mut cell.held_blocks)
    }

    #[inline]
    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp> {
        let kind = (ReadCell::IndexChangedAt, entry::INDEX_CHANGED_AT);
        self.tape.read_cell(slot, kind, || self.loads.index_changed_at(slot), |cell| &mut cell.index_changed_at)
    }

    #[inline]
    fn engine_load(&self, slot: Slot) -> Option<EngineLoad> {
        let kind = (ReadCell::EngineLoad, entry::ENGINE_LOAD);
        self.tape.read_cell(slot, kind, || self.loads.engine_load(slot), |cell| &mut cell.engine_load)
    }

    #[inline]
    fn peer_load(&self, slot: Slot) -> PeerLoad {
        let kind = (ReadCell::Peers, entry::PEERS);
        self.tape.read_cell(slot, kind, || self.loads.peer_load(slot), |cell| &mut cell.peers)
    }

    #[inline]
    fn peer_arrivals(&self) -> PlacementRate {
        self.tape.read_arrivals(self.loads.peer_arrivals())
    }

    #[inline]
    fn replicas_ahead(&self, passed: Option<Timestamp>, head: Timestamp) -> usize {
        self.loads.replicas_ahead(passed, head)
    }
}
