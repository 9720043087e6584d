//! View of the loads that records every read.

use super::load_view::LoadView;
use super::tape::Tape;
use crate::engine_load::EngineLoad;
use crate::load::{BoardLoad, BoardVersion, PeerLoad, PlacementRate, PredictionBias, PublishedSpeed, SpeedSample};
use crate::protocol::{Slot, Timestamp};

/// Loads whose reads are recorded on a [`Tape`].
#[derive(Clone, Copy, Debug)]
pub struct TapedLoads<'a, V> {
    loads: &'a V,
    tape: &'a Tape,
}

impl<'a, V: LoadView> TapedLoads<'a, V> {
    /// Records the reads of `loads`.
    #[must_use]
    pub fn new(loads: &'a V, tape: &'a Tape) -> Self {
        Self { loads, tape }
    }
}

impl<V: LoadView> LoadView for TapedLoads<'_, V> {
    fn take_changed(&self, changed: &mut Vec<Slot>) {
        let before = changed.len();
        self.loads.take_changed(changed);
        self.tape.read_changed(&changed[before..]);
    }

    /// Reads the other cells of the rank as well, which a later explanation or another policy uses.
    #[inline]
    fn board(&self, slot: Slot, seen: &mut BoardVersion) -> Option<BoardLoad> {
        let load = self.tape.read_board(slot, || self.loads.board(slot, seen))?;
        self.speed_sample(slot);
        self.held_blocks(slot);
        self.index_changed_at(slot);
        self.engine_load(slot);
        Some(load)
    }

    #[inline]
    fn speed(&self, slot: Slot) -> PublishedSpeed {
        self.tape.read_speed(slot, || self.loads.speed_sample(slot), |speed| speed.published())
    }

    fn speed_sample(&self, slot: Slot) -> SpeedSample {
        self.tape.read_speed(slot, || self.loads.speed_sample(slot), |speed| speed.sample())
    }

    #[inline]
    fn speed_weights(&self, slot: Slot, now: Timestamp) -> [f64; 2] {
        self.tape.read_speed(slot, || self.loads.speed_sample(slot), |speed| speed.weights(now))
    }

    #[inline]
    fn prediction_bias(&self, slot: Slot, now: Timestamp) -> PredictionBias {
        self.tape.read_speed(slot, || self.loads.speed_sample(slot), |speed| speed.bias_at(now))
    }

    #[inline]
    fn output_tokens(&self, slot: Slot) -> Option<f64> {
        self.tape.read_speed(slot, || self.loads.speed_sample(slot), |speed| speed.output_tokens())
    }

    #[inline]
    fn held_blocks(&self, slot: Slot) -> u32 {
        self.tape.read_held_blocks(slot, || self.loads.held_blocks(slot))
    }

    #[inline]
    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp> {
        self.tape.read_index_changed_at(slot, || self.loads.index_changed_at(slot))
    }

    #[inline]
    fn engine_load(&self, slot: Slot) -> Option<EngineLoad> {
        self.tape.read_engine_load(slot, || self.loads.engine_load(slot))
    }

    #[inline]
    fn peer_load(&self, slot: Slot) -> PeerLoad {
        self.tape.read_peers(slot, || self.loads.peer_load(slot))
    }

    #[inline]
    fn peer_arrivals(&self) -> PlacementRate {
        self.tape.read_arrivals(self.loads.peer_arrivals())
    }

    #[inline]
    fn replicas_ahead(&self, passed: Option<Timestamp>, head: Timestamp) -> usize {
        self.loads.replicas_ahead(passed, head)
    }

    #[inline]
    fn tape(&self) -> Option<&Tape> {
        Some(self.tape)
    }
}
