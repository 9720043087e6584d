//! Entries of the tape: the scheduler's state, its batches, and their outcomes.
//!
//! Without a tape none of this costs anything.

use std::collections::VecDeque;

use super::rank::put_load;
use super::recorded::RequestParts;
use super::state::Pool;
use super::tape::{Tape, entry, put_engine_load};
use super::{LoadAnswer, LoadView, PendingRequest, Schedule};
use crate::load::SpeedSample;
use crate::protocol::Slot;
use crate::record::bytes::{put_f64, put_number, put_signed};

impl<T> Schedule<T> {
    /// Sets how requests are named on a tape; by default they have no name.
    pub fn name_requests(&mut self, id_of: fn(&T) -> &str) {
        self.id_of = id_of;
    }

    /// Records the start of a batch, or the complete state if the tape lacks it.
    pub(super) fn record_prepared<V: LoadView>(&mut self, loads: &V) {
        let Some(tape) = loads.tape() else { return };
        if tape.needs_keyframe(self.pool.ranks.columns_are_fresh()) {
            self.record_keyframe(tape, true);
            return;
        }
        if tape.lacks_statuses() {
            self.record_statuses(tape);
        }
        let changed = tape.take_changed();
        tape.write(|to, last| {
            to.push(entry::PREPARED);
            last.put_time(to, self.pool.now);
            put_number(to, changed.len() as u64);
            let mut before = -1;
            for slot in &changed {
                put_signed(to, i64::from(slot.0) - before - 1);
                before = i64::from(slot.0);
            }
        });
        tape.reuse(changed);
    }

    /// Records a batch and the slots that it queries.
    pub(super) fn record_batch<V: LoadView>(&self, requests: &VecDeque<PendingRequest<T>>, slots: &[Slot], loads: &V) {
        let Some(tape) = loads.tape() else { return };
        tape.write(|to, last| {
            to.push(entry::BATCH);
            put_number(to, requests.len() as u64);
            for (in_batch, pending) in requests.iter().enumerate() {
                let parts = RequestParts {
                    number: pending.number,
                    id: (self.id_of)(&pending.request.context),
                    fingerprint: &pending.fingerprint,
                    request: &pending.request,
                    session: pending.session,
                    class: pending.class,
                    parent: parent_of(in_batch, requests),
                };
                parts.put(to, last, |known| self.pool.ranks.position_of(known.slot, known.generation).is_some());
            }
            put_number(to, slots.len() as u64);
            slots.iter().for_each(|slot| put_number(to, slot.0.into()));
        });
    }

    /// Begins the outcomes of a batch with the replies to its queries, before these apply. Replies of earlier generations
    /// have no effect.
    pub(super) fn record_answers<V: LoadView>(&mut self, loads: &V, answers: &[LoadAnswer]) {
        let Some(tape) = loads.tape() else { return };
        if tape.lacks_ranks() {
            self.record_keyframe(tape, false);
        } else if tape.lacks_statuses() {
            self.record_statuses(tape);
        }
        let is_current = |answer: &&LoadAnswer| self.pool.ranks.position_of(answer.slot, answer.generation).is_some();
        let current = answers.iter().filter(is_current);
        tape.write(|to, last| {
            to.push(entry::DECIDING);
            last.put_time(to, self.pool.now);
            to.push(1);
            put_number(to, current.clone().count() as u64);
            for LoadAnswer { slot, load, shared_blocks, .. } in current {
                put_number(to, slot.0.into());
                put_load(to, load);
                put_number(to, shared_blocks.len() as u64);
                shared_blocks.iter().for_each(|blocks| put_number(to, (*blocks).into()));
            }
        });
    }

    /// Begins the outcomes of a batch without queries.
    pub(super) fn record_decision<V: LoadView>(&self, queried: bool, loads: &V) {
        let Some(tape) = loads.tape().filter(|_| !queried) else { return };
        tape.write(|to, last| {
            to.push(entry::DECIDING);
            last.put_time(to, self.pool.now);
            to.push(0);
        });
    }

    /// Ends the outcomes of a batch.
    pub(super) fn record_decided<V: LoadView>(&self, loads: &V) {
        if let Some(tape) = loads.tape() {
            tape.write(|to, _| to.push(entry::DECIDED));
        }
    }

    fn record_statuses(&self, tape: &Tape) {
        tape.write(|to, _| {
            to.push(entry::STATUSES);
            self.pool.ranks.put_statuses(to);
        });
        tape.has_statuses();
    }

    fn record_keyframe(&mut self, tape: &Tape, begins_segment: bool) {
        tape.reuse(tape.take_changed());
        tape.begin_keyframe(begins_segment);
        let Pool { ranks, typical, arrival_rate, turns, now, .. } = &mut self.pool;
        tape.write(|to, last| {
            to.push(entry::KEYFRAME);
            put_number(to, tape.settings.len() as u64);
            to.extend_from_slice(&tape.settings);
            put_number(to, now.0);
            (last.now, last.number) = (now.0, 0);
            put_number(to, *turns);
            typical.put(to);
            arrival_rate.put(to);
            ranks.put(to);
        });
        let arrivals = tape.arrivals_read();
        tape.write(|to, _| {
            put_f64(to, arrivals.placements_per_second);
            put_f64(to, arrivals.work_per_second);
            put_number(to, self.pool.ranks.as_slice().len() as u64);
        });
        for rank in self.pool.ranks.as_slice() {
            let slot = rank.slot();
            let put = |to: &mut Vec<u8>, cells: &super::tape::CellCopy| {
                put_number(to, slot.0.into());
                let words: [u32; SpeedSample::WORDS] = cells.speed.sample().to_words();
                words.iter().for_each(|word| put_number(to, (*word).into()));
                put_number(to, cells.held_blocks.into());
                put_number(to, cells.index_changed_at.map_or(0, |at| at.0.saturating_add(1)));
                put_engine_load(to, cells.engine_load);
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
