//! Holds of programs: a call waits while the contexts of other programs fill the caches.
//!
//! Above the capacity of the caches, engines evict exactly the contexts that return, and compute them again and again. A
//! class with a hold limit therefore holds calls of which no eligible rank caches most of the prompt, as long as no rank
//! has room beside the [claims](crate::session::Claims) of other programs. A rank of unknown capacity always has room. At
//! the limit a call is placed anywhere: a hold never rejects. A class can reject the first call of a program instead.
//!
//! Held calls wait in the queue of their class, each in a lane of its own, so that deadlines, limits, shares of tenants and
//! cancellation apply. The excluded ranks are part of the request, so that records replay without claims.

use std::collections::BTreeSet;
use std::time::Duration;

use super::pending::PendingRequest;
use super::state::Pool;
use super::types::Purpose;
use crate::config::{QueueClass, RouterConfig};
use crate::protocol::{BookingId, Slot, Timestamp};
use crate::queue::ClassId;
use crate::session::Claims;

/// Share of a prompt, as a divisor, that no rank may lack for a call that passes.
const LACK_DIVISOR: u32 = 4;

/// Share of the time to a deadline after which a call is not held.
const DUE_PERCENT: u32 = 90;

/// Hold of a class.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramHold {
    limit: Duration,
    /// Whether the first call of a program is rejected where later ones wait.
    pub(super) refuses_starts: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct ProgramHolds {
    /// Holds by class; empty if no class has one.
    pub(super) holds: Box<[Option<ProgramHold>]>,
    pub(super) claims: Claims,
    /// Ends of the holds of waiting calls.
    pub(super) ends: BTreeSet<(Timestamp, BookingId)>,
    /// Ended holds, and the sum of their waits.
    pub(super) ended: (u64, Duration),
}

impl ProgramHolds {
    pub(super) fn new(config: &RouterConfig) -> Self {
        // Without an index, no call would be known to return to its blocks.
        let classes = if config.queue.holds_programs() && config.has_index() {
            config.queue.classes_or_default()
        } else {
            Vec::new()
        };
        let hold = |class: &QueueClass| {
            let limit = Duration::from_millis(class.program_hold_ms?);
            Some(ProgramHold { limit, refuses_starts: class.refuse_program_starts })
        };
        let holds = classes.iter().map(hold).collect();
        Self { holds, claims: Claims::default(), ends: BTreeSet::new(), ended: Default::default() }
    }

    /// Whether a class holds calls.
    #[inline]
    pub(super) fn holds(&self, class: ClassId) -> bool {
        self.hold_of(class).is_some()
    }

    #[inline]
    pub(super) fn hold_of(&self, class: ClassId) -> Option<ProgramHold> {
        self.holds.get(class.0 as usize).copied().flatten()
    }

    /// Time until which a call of this class may be held: before its deadline, so that it is placed rather than rejected.
    pub(super) fn hold_end<T>(&self, pending: &PendingRequest<T>, class: ClassId) -> Option<Timestamp> {
        let ProgramHold { limit, .. } = self.hold_of(class)?;
        let request = &pending.request;
        let options = request.options.as_ref().filter(|options| options.session_id.is_some())?;
        let waits = request.waits.as_ref().filter(|_| request.purpose == Purpose::Book)?;
        let due = options.due.map(|due| due.since(waits.arrival) * DUE_PERCENT / 100);
        Some(waits.arrival + limit.min(due.unwrap_or(limit)))
    }

    /// Slots of the ranks without room for a call with so many cached tokens, in order; none if it passes.
    pub(super) fn full_ranks<T>(
        &self,
        pool: &Pool,
        pending: &PendingRequest<T>,
        class: ClassId,
        cached_tokens: u32,
    ) -> Vec<Slot> {
        let is_over = self.hold_end(pending, class).is_none_or(|end| end <= pool.now);
        if is_over || is_cached(pending.request.prompt_tokens, cached_tokens) {
            return Vec::new();
        }
        let prompt = &pending.request.prompt;
        let full = pool.ranks.as_slice().iter().filter(|rank| {
            let capacity_blocks = rank.about.traits.total_kv_blocks;
            capacity_blocks
                .is_some_and(|blocks| !self.claims.has_room(rank.slot(), blocks, prompt, rank.active_blocks_max()))
        });
        let mut slots: Vec<Slot> = full.map(|rank| rank.slot()).collect();
        slots.sort_unstable();
        slots
    }

    /// A call begins to wait.
    pub(super) fn hold<T>(&mut self, pending: &PendingRequest<T>, class: ClassId) {
        if !pending.full.is_empty() {
            let end = self.hold_end(pending, class).zip(pending.booking());
            self.ends.extend(end);
        }
    }

    /// A call leaves the queue.
    pub(super) fn release<T>(&mut self, pending: &PendingRequest<T>, now: Timestamp) {
        let end = pending.class.and_then(|class| self.hold_end(pending, class));
        if let Some((end, waits)) = end.zip(pending.request.waits.as_ref())
            && self.ends.remove(&(end, waits.booking))
        {
            self.ended.0 += 1;
            self.ended.1 += now.since(waits.arrival);
        }
    }

    /// Ends claims and holds. Returns whether a held call may leave.
    pub(super) fn advance(&mut self, now: Timestamp) -> bool {
        let has_room = self.claims.expire(now);
        has_room || self.ends.first().is_some_and(|(end, _)| *end <= now)
    }

    /// The next time at which a held call may leave without other input.
    pub(super) fn next_room(&self, now: Timestamp) -> Option<Timestamp> {
        self.ends.first()?;
        let hold_end = self.ends.range((now, BookingId(u64::MAX))..).next().map(|(end, _)| *end);
        hold_end.into_iter().chain(self.claims.next_end()).min()
    }
}

/// Whether a rank caches enough of a prompt for a call to pass.
pub(super) fn is_cached(prompt_tokens: u32, cached_tokens: u32) -> bool {
    prompt_tokens.saturating_sub(cached_tokens) <= prompt_tokens / LACK_DIVISOR
}
