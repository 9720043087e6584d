//! The recorded decisions of a router, written by its scheduler.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::config::{RecorderConfig, RouterConfig};
use crate::protocol::Timestamp;
use crate::record::{DecisionRing, RecordCursor, RecordPart, RecordSegment};
use crate::schedule::{Effect, Input, LiveLoads, Schedule, Tape, TapedLoads};

/// The last recorded decisions. Survives restarts of the scheduler.
#[derive(Debug)]
pub(crate) struct DecisionRecords(Mutex<DecisionRing>);

impl DecisionRecords {
    pub(crate) fn new(config: &RecorderConfig) -> Self {
        Self(Mutex::new(DecisionRing::new(config)))
    }

    pub(crate) fn segments(&self) -> Vec<Arc<RecordSegment>> {
        self.with(|ring| ring.segments())
    }

    /// The entries after `cursor`: see [`DecisionRing::parts_after`].
    pub(crate) fn parts_after(&self, cursor: &mut RecordCursor) -> (Vec<RecordPart>, u64) {
        self.with(|ring| ring.parts_after(cursor))
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, DecisionRing>> {
        match self.0.try_lock() {
            Ok(ring) => Some(ring),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn with<R>(&self, of: impl FnOnce(&mut DecisionRing) -> R) -> R {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Inputs of a scheduler on their way to the record.
pub(crate) struct DecisionTape {
    /// Absent if nothing is recorded.
    tape: Option<Tape>,
    records: Arc<DecisionRecords>,
}

impl DecisionTape {
    /// A tape for a new scheduler.
    pub(crate) fn new(config: &RouterConfig, records: &Arc<DecisionRecords>) -> Self {
        let settings = serde_json::to_vec(config).ok().filter(|_| config.recorder.bytes_max > 0);
        Self { tape: settings.map(|settings| Tape::new(settings.into())), records: Arc::clone(records) }
    }

    /// Performs a step of the schedule, and records it.
    pub(crate) fn step<T>(
        &self,
        schedule: &mut Schedule<T>,
        input: Input<T>,
        (loads, now): (&LiveLoads, Timestamp),
        effects: &mut VecDeque<Effect<T>>,
    ) {
        match &self.tape {
            Some(tape) => schedule.step(input, &TapedLoads::new(loads, tape), now, effects),
            None => schedule.step(input, loads, now, effects),
        }
    }

    /// Adds the steps since the last call to the record.
    pub(crate) fn flush(&self, now: Timestamp) {
        let Some(tape) = &self.tape else { return };
        let mut is_full = false;
        // A reader may hold the lock: the entries then stay on the tape until the next step.
        let Some(mut ring) = self.records.try_lock() else { return };
        tape.drain(|bytes, keyframe_at| is_full = ring.push(bytes, keyframe_at, now));
        drop(ring);
        if is_full {
            tape.begin_segment();
        }
    }
}
