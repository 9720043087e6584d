//! Claims of programs on the caches of ranks.
//!
//! A placed call of a program claims the blocks of its prompt on its rank while it runs. After its end the claim stays for
//! the time in which the program is worth its memory, unless the caller knows that it does not return. The next call of
//! the session replaces it. An auxiliary call, with less than half of the blocks, does not.
//!
//! Blocks of several claims of a rank count once. Claims may exceed the cache of a rank, by calls that were not
//! held. Until enough of them end, the rank gets no further programs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ahash::AHashMap;

use super::SessionId;
use crate::load::{ActiveSequences, PromptBlocks};
use crate::protocol::{BookingId, Slot, Timestamp};

/// Share of a cache that claims may fill.
const FILL_MAX: f64 = 0.95;

/// Claims of a pool. See the module documentation.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::load::PromptBlocks;
/// use pointsman::internals::protocol::{BookingId, Slot};
/// use pointsman::internals::session::{Claims, PlacedCall};
/// use pointsman::{SessionId, protocol::Timestamp};
///
/// let (mut claims, agent, prompt) = (Claims::default(), SessionId::new("task")?, PromptBlocks::Counted(60));
/// let call = PlacedCall { session: &agent, slot: Slot(0), capacity_blocks: 100, prompt: &prompt, prompt_tokens: 960 };
/// claims.begin(BookingId(1), &call, Timestamp(0));
/// assert!(!claims.has_room(Slot(0), 100, &prompt, 60));
/// claims.end(BookingId(1), Duration::from_nanos(5), Timestamp(10));
/// assert_eq!((claims.has_room(Slot(0), 100, &prompt, 0), claims.next_end()), (false, Some(Timestamp(15))));
/// assert!(claims.expire(Timestamp(15)) && claims.has_room(Slot(0), 100, &prompt, 0));
/// # Ok::<(), pointsman::internals::session::SessionIdError>(())
/// ```
#[derive(Debug, Default)]
pub struct Claims {
    claims: AHashMap<BookingId, Claim>,
    /// The idle claim of each session.
    idle: AHashMap<SessionId, BookingId>,
    /// Idle claims by their ends.
    ends: BTreeSet<(Timestamp, BookingId)>,
    ranks: BTreeMap<Slot, RankClaims>,
}

/// A placed call of a program.
#[derive(Clone, Copy, Debug)]
pub struct PlacedCall<'a> {
    /// Session of the call.
    pub session: &'a SessionId,
    /// Slot of its rank.
    pub slot: Slot,
    /// Blocks of the cache of the rank.
    pub capacity_blocks: u32,
    /// Its prompt.
    pub prompt: &'a PromptBlocks,
    /// Length of the prompt.
    pub prompt_tokens: u32,
}

#[derive(Debug)]
struct Claim {
    session: SessionId,
    slot: Slot,
    blocks: u32,
    prompt_tokens: u32,
    /// End of the claim of an idle program.
    end: Option<Timestamp>,
}

#[derive(Debug)]
struct RankClaims {
    capacity_blocks: u32,
    claimed: ActiveSequences,
    /// Running calls, which the load of the rank contains as well.
    running: ActiveSequences,
}

impl Claims {
    /// A call has been placed: its claim replaces the idle one of its session.
    pub fn begin(&mut self, booking: BookingId, call: &PlacedCall<'_>, now: Timestamp) {
        let PlacedCall { session, slot, capacity_blocks, prompt, prompt_tokens } = *call;
        self.withdraw(booking, now);
        let blocks = prompt.block_count();
        if let Some(before) = self.idle_of(session).filter(|before| self.claims[before].blocks / 2 <= blocks) {
            self.withdraw(before, now);
        }
        let rank = self.ranks.entry(slot).or_insert_with(|| RankClaims {
            capacity_blocks,
            claimed: ActiveSequences::new(true),
            running: ActiveSequences::new(true),
        });
        rank.capacity_blocks = capacity_blocks;
        for claims in [&mut rank.claimed, &mut rank.running] {
            let booked = claims.book(booking, prompt.clone(), None, now);
            debug_assert!(booked.is_ok(), "{booking} has been withdrawn");
        }
        let session = session.clone();
        self.claims.insert(booking, Claim { session, slot, blocks, prompt_tokens, end: None });
    }

    /// Slot and prompt tokens of a running call with a claim.
    #[must_use]
    pub fn running(&self, booking: BookingId) -> Option<(Slot, u32)> {
        let claim = self.claims.get(&booking).filter(|claim| claim.end.is_none())?;
        Some((claim.slot, claim.prompt_tokens))
    }

    /// A call has ended: its program keeps the claim for a time. No effect on other bookings.
    pub fn end(&mut self, booking: BookingId, keep: Duration, now: Timestamp) {
        if self.running(booking).is_none() {
            return;
        }
        let Claim { ref session, blocks, .. } = self.claims[&booking];
        match self.idle_of(session) {
            _ if keep.is_zero() => return self.withdraw(booking, now),
            Some(before) if self.claims[&before].blocks / 2 > blocks => return self.withdraw(booking, now),
            Some(before) => self.withdraw(before, now),
            None => {}
        }
        let Some(claim) = self.claims.get_mut(&booking) else { return };
        claim.end = Some(now + keep);
        self.idle.insert(claim.session.clone(), booking);
        self.ends.insert((now + keep, booking));
        if let Some(rank) = self.ranks.get_mut(&claim.slot) {
            rank.running.free(booking, now);
        }
    }

    /// Ends claims of idle programs. Returns whether there were any.
    pub fn expire(&mut self, now: Timestamp) -> bool {
        let before = self.ends.len();
        while let Some(&(_, booking)) = self.ends.first().filter(|(end, _)| *end <= now) {
            self.withdraw(booking, now);
        }
        self.ends.len() < before
    }

    /// The earliest end of a claim.
    #[must_use]
    pub fn next_end(&self) -> Option<Timestamp> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// Ends all claims on a rank that has left.
    pub fn forget(&mut self, slot: Slot) {
        if self.ranks.remove(&slot).is_none() {
            return;
        }
        let left: Vec<BookingId> =
            self.claims.iter().filter(|(_, claim)| claim.slot == slot).map(|(booking, _)| *booking).collect();
        left.into_iter().for_each(|booking| self.withdraw(booking, Timestamp::default()));
    }

    /// Whether the claims of a rank leave room for a prompt, if its load is `booked_blocks`. An unused rank always has
    /// room.
    ///
    /// O(edges on the prompt's path × log blocks).
    #[must_use]
    pub fn has_room(&self, slot: Slot, capacity_blocks: u32, prompt: &PromptBlocks, booked_blocks: u64) -> bool {
        let rank = self.ranks.get(&slot);
        let (running, claimed) =
            rank.map_or((0, 0), |rank| (active_blocks(&rank.running), active_blocks(&rank.claimed)));
        // Bookings without a claim and outputs are no part of the claims.
        let taken = u64::from(claimed) + booked_blocks.saturating_sub(running.into());
        let new = || prompt.block_count() - rank.map_or(0, |rank| rank.claimed.project(prompt).shared_blocks);
        let fits = |blocks: u64| blocks as f64 <= FILL_MAX * f64::from(capacity_blocks);
        taken == 0 || fits(taken) && fits(taken + u64::from(new()))
    }

    /// Claimed blocks of a rank as a multiple of its capacity.
    #[must_use]
    pub fn ratio(&self, slot: Slot) -> f64 {
        let ratio = |rank: &RankClaims| f64::from(active_blocks(&rank.claimed)) / f64::from(rank.capacity_blocks);
        self.ranks.get(&slot).map_or(0.0, ratio)
    }

    fn idle_of(&self, session: &SessionId) -> Option<BookingId> {
        self.idle.get(session).copied()
    }

    fn withdraw(&mut self, booking: BookingId, now: Timestamp) {
        let Some(Claim { session, slot, end, .. }) = self.claims.remove(&booking) else { return };
        if let Some(end) = end {
            self.ends.remove(&(end, booking));
            self.idle.remove(&session);
        }
        if let Some(rank) = self.ranks.get_mut(&slot) {
            rank.claimed.free(booking, now);
            rank.running.free(booking, now);
        }
    }

    /// Checks sums and orders, for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn check_invariants(&self) {
        let ends = self.claims.iter().filter_map(|(booking, claim)| Some((claim.end?, *booking)));
        assert_eq!(self.ends, ends.collect());
        assert_eq!(self.idle.len(), self.ends.len(), "one idle claim per session");
    }
}

fn active_blocks(claims: &ActiveSequences) -> u32 {
    claims.project(&PromptBlocks::Counted(0)).active_blocks
}
