//! The recorded decisions of a router, written by its scheduler.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::config::{RecorderConfig, RouterConfig};
use crate::protocol::Timestamp;
use crate::record::{DecisionRing, RecordCursor, RecordPart, RecordSegment};
use crate::schedule::{Effect, Input, LiveLoads, Recorder, Schedule};
use crate::shell::scheduler::Decider;

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

/// A schedule whose steps are recorded.
pub(crate) struct RecordedSchedule<T> {
    pub(crate) schedule: Schedule<T>,
    /// Absent if nothing is recorded.
    recorder: Option<Recorder<T>>,
    records: Arc<DecisionRecords>,
}

impl<T> RecordedSchedule<T> {
    /// A new schedule, whose requests are named by `id_of`.
    pub(crate) fn new(
        schedule: Schedule<T>,
        config: &RouterConfig,
        records: &Arc<DecisionRecords>,
        id_of: fn(&T) -> &str,
    ) -> Self {
        let settings = serde_json::to_vec(config).ok().filter(|_| config.recorder.bytes_max > 0);
        let recorder = settings.map(|settings| Recorder::new(settings.into(), id_of));
        Self { schedule, recorder, records: Arc::clone(records) }
    }

    /// Adds the steps since the last call to the record.
    pub(crate) fn flush(&self, now: Timestamp) {
        let Some(recorder) = &self.recorder else { return };
        let mut is_full = false;
        // A reader may hold the lock: the entries then stay on the tape until the next step.
        let Some(mut ring) = self.records.try_lock() else { return };
        recorder.drain(|bytes, keyframe_at| is_full = ring.push(bytes, keyframe_at, now));
        drop(ring);
        if is_full {
            recorder.begin_segment();
        }
    }
}

impl<T> Decider<T> for RecordedSchedule<T> {
    fn step(&mut self, input: Input<T>, loads: &LiveLoads, now: Timestamp, effects: &mut VecDeque<Effect<T>>) {
        match &self.recorder {
            Some(recorder) => recorder.step(&mut self.schedule, input, loads, now, effects),
            None => self.schedule.step(input, loads, now, effects),
        }
    }

    fn schedule(&self) -> &Schedule<T> {
        &self.schedule
    }
}
