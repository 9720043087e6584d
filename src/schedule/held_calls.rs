//! Calls of programs in the schedule: those that are held, and the claims of the others.

use std::time::Duration;

use super::Schedule;
use super::pending::PendingRequest;
use super::program_holds::is_cached;
use crate::load::work_tokens;
use crate::protocol::{BookingId, Slot, WorkerRank};
use crate::session::PlacedCall;

/// Time for which an idle program keeps its claim, as a multiple of that of the computation of its context.
const KEEP_FACTOR: f64 = 2.0;

impl<T> Schedule<T> {
    /// Whether an arrival may be held.
    pub(super) fn may_hold(&mut self, pending: &PendingRequest<T>) -> bool {
        let has_program = pending.request.options.as_ref().is_some_and(|options| options.session_id.is_some());
        let class = if has_program { self.class_of(pending).ok() } else { None };
        class.is_some_and(|(class, cached_tokens)| {
            self.program_holds.hold_end(pending, class).is_some()
                && !is_cached(pending.request.prompt_tokens, cached_tokens)
        })
    }

    /// Claims the blocks of a placed call of a program on the rank in `slot`.
    pub(super) fn claim(&mut self, pending: &PendingRequest<T>, slot: Slot) {
        if self.program_holds.holds.is_empty() {
            return;
        }
        let booking = pending.booking();
        let session = pending.request.options.as_ref().and_then(|options| options.session_id.as_ref());
        let rank = self.pool.ranks.position_in(slot).map(|position| &self.pool.ranks.as_slice()[position]);
        let capacity_blocks = rank.and_then(|rank| rank.about.traits.total_kv_blocks);
        if let Some((booking, (session, capacity_blocks))) = booking.zip(session.zip(capacity_blocks)) {
            let (prompt, prompt_tokens) = (&pending.request.prompt, pending.request.prompt_tokens);
            let call = PlacedCall { session, slot, capacity_blocks, prompt, prompt_tokens };
            self.program_holds.claims.begin(booking, &call, self.pool.now);
        }
    }

    /// A booked call of a program has ended.
    pub(super) fn on_ended(&mut self, booking: BookingId, is_stop: bool) {
        let Some((slot, prompt_tokens)) = self.program_holds.claims.running(booking) else { return };
        let rank = self.pool.ranks.position_in(slot).map(|position| &self.pool.ranks.as_slice()[position]);
        let typical = self.pool.typical.speed;
        let speed =
            rank.filter(|_| self.active.settings.pool.models_prefill).map_or(typical, |rank| rank.measured().speed);
        let keep = if is_stop { 0.0 } else { KEEP_FACTOR * speed.prefill(work_tokens(prompt_tokens, 0)) };
        let keep = Duration::try_from_secs_f64(keep).unwrap_or(Duration::ZERO);
        self.program_holds.claims.end(booking, keep, self.pool.now);
        self.look_again = true;
    }

    /// Claimed blocks of ranks with known capacity, as multiples of it; empty if no class holds calls.
    pub fn claims(&self) -> impl Iterator<Item = (WorkerRank, f64)> {
        let ranks = self.pool.ranks.as_slice().iter().filter(|_| !self.program_holds.holds.is_empty());
        let ranks = ranks.filter(|rank| rank.about.traits.total_kv_blocks.is_some());
        ranks.map(|rank| (rank.rank, self.program_holds.claims.ratio(rank.slot())))
    }

    /// Held calls, the ended holds, and the sum of their waits.
    #[must_use]
    pub fn holds(&self) -> (usize, u64, Duration) {
        let (ended, waited) = self.program_holds.ended;
        (self.program_holds.ends.len(), ended, waited)
    }
}
