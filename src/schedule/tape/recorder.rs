//! Entries of the scheduler's state, its batches, and their outcomes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::loads::TapedLoads;
use super::outcome::put_outcome;
use super::reads::{CellCopy, Tape, entry};
use crate::protocol::Timestamp;
use crate::record::bytes::{Recorded, put_number, put_signed};
use crate::schedule::pending::PendingRequest;
use crate::schedule::progress::Progress;
use crate::schedule::state::Pool;
use crate::schedule::types::{Effect, Input, LoadAnswer};
use crate::schedule::{LoadView, Schedule};
use crate::select::RankOverlap;

/// Recorder of one scheduler with the context `T`.
///
/// ```
/// use pointsman::internals::schedule::Recorder;
///
/// let recorder = Recorder::<String>::new(br#"{ "policy": "kv" }"#.as_slice().into(), String::as_str);
/// recorder.drain(|_, _| unreachable!("there are no entries yet"));
/// ```
#[derive(Debug)]
pub struct Recorder<T> {
    tape: Tape,
    settings: Arc<[u8]>,
    id_of: fn(&T) -> &str,
}

impl<T> Recorder<T> {
    /// A recorder of a scheduler with these settings, as JSON. The first entry is a keyframe. Requests are named by
    /// `id_of`.
    #[must_use]
    pub fn new(settings: Arc<[u8]>, id_of: fn(&T) -> &str) -> Self {
        Self { tape: Tape::default(), settings, id_of }
    }

    /// Passes the entries to `to`, unless there are none, and keeps their memory.
    pub fn drain(&self, to: impl FnOnce(&[u8], Option<usize>)) {
        self.tape.drain(to);
    }

    /// Writes a keyframe before the next batch, so that the entries from there on can be replayed without earlier ones.
    pub fn begin_segment(&self) {
        self.tape.begin_segment();
    }

    /// Performs [`Schedule::step`], and records it.
    pub fn step<V: LoadView>(
        &self,
        schedule: &mut Schedule<T>,
        input: Input<T>,
        loads: &V,
        now: Timestamp,
        effects: &mut VecDeque<Effect<T>>,
    ) {
        let (tape, loads) = (&self.tape, &TapedLoads { loads, tape: &self.tape });
        tape.begin();
        match &input {
            Input::Drain { .. } | Input::Undrain { .. } | Input::Conditions(_) => tape.lacks_statuses.set(true),
            Input::Admit(_) | Input::Describe { .. } | Input::Retire { .. } | Input::Exclusions(_) => {
                tape.lacks_ranks.set(true)
            }
            Input::Loads { batch, answers } if schedule.batch_in_flight() == Some(*batch) => {
                self.record_answers(&mut schedule.pool, answers, now);
            }
            Input::Loads { .. } => tape.lacks_statuses.set(true),
            Input::Request(_) | Input::Cancel(_) | Input::Ended { .. } | Input::Overlaps { .. } | Input::Wake => {}
        }
        schedule.begin(input, loads, now, effects);
        while let Some(progress) = schedule.advance(loads, effects) {
            match progress {
                Progress::Prepared => self.record_prepared(&mut schedule.pool),
                Progress::Listed => self.record_batch(schedule, effects),
                Progress::Decided { verdict, session, is_last } => {
                    tape.write(|to, _| {
                        to.push(entry::OUTCOME);
                        put_outcome(to, verdict, session, effects.back());
                        if is_last {
                            to.push(entry::DECIDED);
                        }
                    });
                }
            }
            self.record_working(&mut schedule.pool);
        }
    }

    /// Writes the start of a batch, or the complete state if the tape lacks it.
    fn record_prepared(&self, pool: &mut Pool) {
        let tape = &self.tape;
        if tape.needs_keyframe(pool.ranks.columns_are_fresh()) {
            let now = pool.now;
            return self.record_keyframe(pool, now, true);
        }
        if tape.lacks_statuses.get() {
            self.record_statuses(pool);
        }
        let changed = tape.changed.take();
        tape.write(|to, last| {
            to.push(entry::PREPARED);
            last.put_time(to, pool.now);
            put_number(to, changed.len() as u64);
            let mut before = -1;
            for slot in &changed {
                put_signed(to, i64::from(slot.0) - before - 1);
                before = i64::from(slot.0);
            }
        });
        tape.reuse(changed);
    }

    /// Writes a batch and the slots that it queries. Without any, its outcomes follow.
    fn record_batch(&self, schedule: &Schedule<T>, effects: &VecDeque<Effect<T>>) {
        let Some(batch) = schedule.in_flight.as_ref().or(schedule.deciding.as_ref()) else { return };
        let (requests, pool) = (&batch.requests, &schedule.pool);
        let slots = match effects.back() {
            Some(Effect::Query(query)) if batch.queried => query.slots.as_slice(),
            _ => &[],
        };
        self.tape.write(|to, last| {
            to.push(entry::BATCH);
            put_number(to, requests.len() as u64);
            for (in_batch, pending) in requests.iter().enumerate() {
                let of_batch = ((self.id_of)(&pending.request.context), parent_of(in_batch, requests));
                let is_current = |known: &RankOverlap| pool.ranks.position_of(known.slot, known.generation).is_some();
                pending.put(to, last, of_batch, is_current);
            }
            put_number(to, slots.len() as u64);
            slots.iter().for_each(|slot| put_number(to, slot.0.into()));
            if !batch.queried {
                to.push(entry::DECIDING);
                last.put_time(to, pool.now);
                to.push(0);
            }
        });
    }

    /// Begins the outcomes of a batch with the replies to its queries, before these apply. Replies of earlier generations
    /// have no effect.
    fn record_answers(&self, pool: &mut Pool, answers: &[LoadAnswer], now: Timestamp) {
        let now = pool.now.max(now);
        let (is_active, lacks_ranks) = (self.tape.is_active.get(), self.tape.lacks_ranks.get());
        if is_active && lacks_ranks {
            self.record_keyframe(pool, now, false);
        } else if is_active && self.tape.lacks_statuses.get() {
            self.record_statuses(pool);
        }
        let is_current = |answer: &&LoadAnswer| pool.ranks.position_of(answer.slot, answer.generation).is_some();
        let current = answers.iter().filter(is_current);
        self.tape.write(|to, last| {
            to.push(entry::DECIDING);
            last.put_time(to, now);
            to.push(1);
            put_number(to, current.clone().count() as u64);
            for LoadAnswer { slot, load, shared_blocks, .. } in current {
                slot.put(to);
                load.put(to);
                shared_blocks.put(to);
            }
        });
    }

    /// Writes the working sets that have changed.
    fn record_working(&self, pool: &mut Pool) {
        let changes = pool.ranks.take_working_changes();
        if changes.is_empty() {
            return;
        }
        let changed = || changes.iter().filter_map(|slot| Some((*slot, pool.ranks.position_in(*slot)?)));
        self.tape.write(|to, _| {
            to.push(entry::WORKING);
            put_number(to, changed().count() as u64);
            for (slot, position) in changed() {
                (slot, pool.ranks.as_slice()[position].about.working_tokens).put(to);
            }
        });
    }

    fn record_statuses(&self, pool: &Pool) {
        self.tape.write(|to, _| {
            to.push(entry::STATUSES);
            pool.ranks.put_statuses(to);
        });
        self.tape.lacks_statuses.set(false);
    }

    fn record_keyframe(&self, pool: &mut Pool, now: Timestamp, begins_segment: bool) {
        let tape = &self.tape;
        tape.reuse(tape.changed.take());
        tape.begin_keyframe(begins_segment);
        let arrivals = tape.arrivals.get();
        tape.write(|to, last| {
            to.push(entry::KEYFRAME);
            put_number(to, self.settings.len() as u64);
            to.extend_from_slice(&self.settings);
            put_number(to, now.0);
            (last.now, last.number) = (now.0, 0);
            put_number(to, pool.turns);
            pool.typical.put(to);
            pool.arrival_rate.put(to);
            pool.ranks.put(to);
            arrivals.put(to);
            put_number(to, pool.ranks.as_slice().len() as u64);
        });
        for rank in pool.ranks.as_slice() {
            let slot = rank.slot();
            let put = |to: &mut Vec<u8>, cells: &CellCopy| {
                slot.put(to);
                cells.speed.sample().put(to);
                cells.held_blocks.put(to);
                cells.index_changed_at.put(to);
                cells.engine_load.put(to);
            };
            tape.with_cells(slot, |cells| tape.write(|to, _| put(to, cells)));
        }
    }
}

/// Distance to the earlier request of the batch with the longest common prefix, and the common blocks; `None` if there
/// is none. The common prefixes of all pairs follow: each is the least on the path between two requests.
fn parent_of<T>(in_batch: usize, requests: &VecDeque<PendingRequest<T>>) -> Option<(usize, u32)> {
    let prompt = &requests[in_batch].request.prompt;
    let earlier = requests.iter().take(in_batch).enumerate();
    let shared = earlier.map(|(at, other)| (at, prompt.shared_blocks(&other.request.prompt)));
    let (at, blocks) = shared.max_by_key(|(_, blocks)| *blocks).filter(|(_, blocks)| *blocks > 0)?;
    Some((in_batch - at, blocks))
}
