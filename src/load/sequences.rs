//! The bookings of one rank, and the load that follows from them.
//!
//! Owns who is booked and what each booking adds: prompt blocks, output blocks, prefill tokens. Promises that
//! no order of calls panics, that completing and freeing are idempotent, and that a rank without bookings has a
//! load of exactly zero. Does no token arithmetic: a booking brings a finished [`PrefillLoadHint`].
//!
//! Leaves to others the choice of rank, the publication of load, and ending the bookings of callers that are
//! gone: nothing here expires.

use std::sync::Arc;

use ahash::AHashMap;

use super::prefill::{PrefillQueue, Ticket};
use super::prompts::{PromptEnd, PromptTree, block_count, shared_blocks};
use super::sketch::{PromptMark, PromptSketch, SketchCounts};
use super::{BlockSum, OutputBlocks, PrefillCurve, PrefillLoadHint, Weight};
use crate::protocol::{BookingId, SequenceHash, Timestamp};

/// What one rank has been given and has not finished.
///
/// ```
/// use std::sync::Arc;
/// use pointsman::load::{ActiveSequences, Change, PrefillLoadHint, PromptBlocks, RankLoad};
/// use pointsman::protocol::{BookingId, SequenceHash, Timestamp};
///
/// let now = Timestamp::default();
/// let prompt = |hashes: [u64; 3]| PromptBlocks::Hashed(hashes.map(SequenceHash).into());
/// let mut rank = ActiveSequences::new(true);
///
/// rank.book(BookingId(1), prompt([11, 12, 13]), PrefillLoadHint::new(12, 0, true, None), now)?;
/// let booked = rank.book(BookingId(2), prompt([11, 12, 21]), PrefillLoadHint::new(12, 8, true, None), now)?;
/// assert_eq!((booked.shared_blocks, booked.added_blocks), (2, 1));
/// assert_eq!(rank.load(now), RankLoad { active_blocks: 4, prefill_tokens: 16, requests: 2 });
///
/// assert_eq!(rank.free(BookingId(1), now), Change::Applied);
/// assert_eq!(rank.free(BookingId(1), now), Change::NoChange);
/// assert_eq!(rank.free(BookingId(2), now), Change::Applied);
/// assert_eq!(rank.load(now), RankLoad::default());
/// # Ok::<(), pointsman::load::BookError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ActiveSequences {
    assume_kv_reuse: bool,
    bookings: AHashMap<BookingId, Booking>,
    prompts: PromptTree,
    /// The same prompts, for publication.
    sketch: SketchCounts,
    /// Weights of the blocks that belong to one booking only by nature: output, and prompts not in the tree.
    private: BlockSum,
    prefills: PrefillQueue,
}

/// The complete blocks of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptBlocks {
    /// By sequence hash, in prompt order, from the first block on: shared with prompts that begin the same.
    Hashed(Arc<[SequenceHash]>),
    /// By number alone, for prompts whose content is not known or not to be tracked: shared with nobody.
    Counted(u32),
}

/// What a booking has added to its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Booked {
    /// Leading blocks of the prompt that other bookings on the rank use, too.
    pub shared_blocks: u32,
    /// The other blocks of the prompt, each at full weight.
    pub added_blocks: u32,
}

/// Why a booking was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BookError {
    /// The rank has a booking of this id, which stays as it is.
    #[error("booking {0} exists already")]
    Duplicate(BookingId),
}

/// Whether a report told the rank something new. Reports for unknown bookings are late ones, and no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It did.
    Applied,
    /// It had been told before, or the booking has ended, or never began.
    NoChange,
}

/// The load of one rank at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankLoad {
    /// Weights of all active prompt and output blocks, rounded to whole blocks, half a block up. Saturates.
    pub active_blocks: u32,
    /// Tokens of un-finished prefills that are still to be computed.
    pub prefill_tokens: u64,
    /// Bookings.
    pub requests: u32,
}

/// What a prompt would find on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    /// Active blocks without it, as in [`RankLoad`].
    pub active_blocks: u32,
    /// Its leading blocks that are active already.
    pub shared_blocks: u32,
    /// Active blocks with it: booking it adds the other blocks at full weight. Saturates.
    pub potential_blocks: u32,
}

#[derive(Clone, Debug)]
struct Booking {
    prompt: Charge,
    /// The output as last seen.
    output: OutputBlocks,
    /// The place in line, until the prefill is reported complete.
    prefill: Option<Ticket>,
    /// Whether it will be.
    is_reported: bool,
}

/// Where the blocks of a prompt are accounted for.
#[derive(Clone, Copy, Debug)]
enum Charge {
    Shared { end: PromptEnd, mark: PromptMark },
    Private { blocks: u32, weight: Weight },
}

impl ActiveSequences {
    /// A rank without bookings.
    ///
    /// `assume_kv_reuse` says whether requests that run at the same time share the blocks of a common prefix,
    /// and read them once a step. An engine without cascade attention reads them once per request; for such a
    /// one, every prompt counts in full, as if nobody else had it.
    #[must_use]
    pub fn new(assume_kv_reuse: bool) -> Self {
        Self {
            assume_kv_reuse,
            bookings: AHashMap::new(),
            prompts: PromptTree::new(),
            sketch: SketchCounts::new(),
            private: BlockSum::default(),
            prefills: PrefillQueue::default(),
        }
    }

    /// Books a request: its prompt blocks at full weight, but for those that are active already and keep
    /// their weights, and its prefill at the end of the line.
    ///
    /// To restore a lost rank, book what is known of in order of [`BookingId`], each at the time at which it
    /// was booked first, and then report outputs and completions. Other orders do no harm: the line stands in
    /// the order of calls.
    ///
    /// O(edges on the prompt's path × log blocks), whatever the length of the prompt.
    ///
    /// # Errors
    /// [`BookError::Duplicate`] when the id is booked; nothing changes then.
    pub fn book(
        &mut self,
        booking: BookingId,
        prompt: PromptBlocks,
        prefill: Option<PrefillLoadHint>,
        now: Timestamp,
    ) -> Result<Booked, BookError> {
        if self.bookings.contains_key(&booking) {
            return Err(BookError::Duplicate(booking));
        }
        self.prefills.settle(now);
        let blocks = prompt.block_count();
        let (prompt, shared_blocks) = match prompt {
            PromptBlocks::Hashed(hashes) if self.assume_kv_reuse => {
                let mark = PromptMark::of(&hashes);
                self.sketch.add(&mark);
                let (end, shared_blocks) = self.prompts.insert(hashes);
                (Charge::Shared { end, mark }, shared_blocks)
            }
            PromptBlocks::Hashed(_) | PromptBlocks::Counted(_) => {
                self.private.add(Weight::ONE.times(blocks));
                (Charge::Private { blocks, weight: Weight::ONE }, 0)
            }
        };
        let is_reported = prefill.is_some_and(PrefillLoadHint::is_reported);
        let prefill = prefill.map(|hint| self.prefills.push(hint, now));
        self.bookings.insert(booking, Booking { prompt, output: OutputBlocks::default(), prefill, is_reported });
        Ok(Booked { shared_blocks, added_blocks: blocks - shared_blocks })
    }

    /// Reports that a prefill is done: what was left of its tokens is gone, and its turn, if it had it, passes
    /// to the next in line.
    pub fn complete_prefill(&mut self, booking: BookingId, now: Timestamp) -> Change {
        let Some(known) = self.bookings.get_mut(&booking) else { return Change::NoChange };
        let Some(ticket) = known.prefill.take() else { return Change::NoChange };
        if known.is_reported {
            self.prefills.report(ticket, now);
        } else {
            self.prefills.complete(ticket, now);
        }
        Change::Applied
    }

    /// Brings what is known of a booking's output up to its caller's account of it.
    ///
    /// If a decay was reported since the last look, the part of the prompt that no other booking depends on
    /// takes on the last one, too. What others share keeps its weight, even after they have gone, until the
    /// next decay.
    pub fn set_output(&mut self, booking: BookingId, output: &OutputBlocks) -> Change {
        let Some(known) = self.bookings.get_mut(&booking) else { return Change::NoChange };
        let seen = std::mem::replace(&mut known.output, *output);
        if seen == *output {
            return Change::NoChange;
        }
        self.private.sub(seen.weighted());
        self.private.add(output.weighted());
        if output.reweighed_since(&seen) {
            match &mut known.prompt {
                Charge::Shared { end, .. } => self.prompts.reweigh(*end, output.decay()),
                Charge::Private { blocks, weight } => {
                    self.private.sub(weight.times(*blocks));
                    *weight = output.decay();
                    self.private.add(weight.times(*blocks));
                }
            }
        }
        Change::Applied
    }

    /// Ends a booking: its output, what it alone needed of its prompt, and what was left of its prefill go.
    pub fn free(&mut self, booking: BookingId, now: Timestamp) -> Change {
        let Some(Booking { prompt, output, prefill, is_reported }) = self.bookings.remove(&booking) else {
            return Change::NoChange;
        };
        self.prefills.settle(now);
        if let Some(ticket) = prefill {
            if is_reported && output.block_count() > 0 {
                self.prefills.was_not_reported();
            }
            self.prefills.complete(ticket, now);
        }
        self.private.sub(output.weighted());
        match prompt {
            Charge::Shared { end, mark } => {
                self.sketch.remove(&mark);
                self.prompts.remove(end);
            }
            Charge::Private { blocks, weight } => self.private.sub(weight.times(blocks)),
        }
        debug_assert!(!self.is_empty() || self.load(now) == RankLoad::default(), "a residue at rest");
        Change::Applied
    }

    /// What booking this prompt would make of the active blocks.
    ///
    /// O(edges on the prompt's path × log blocks), whatever the length of the prompt.
    ///
    /// ```
    /// use pointsman::load::{ActiveSequences, PromptBlocks};
    /// use pointsman::protocol::{BookingId, SequenceHash, Timestamp};
    ///
    /// let prompt = |hashes: &[u64]| PromptBlocks::Hashed(hashes.iter().copied().map(SequenceHash).collect());
    /// let mut rank = ActiveSequences::new(true);
    /// rank.book(BookingId(1), prompt(&[11, 12, 13]), None, Timestamp::default())?;
    /// let projection = rank.project(&prompt(&[11, 12, 21, 22]));
    /// assert_eq!((projection.shared_blocks, projection.potential_blocks), (2, 5));
    /// assert_eq!(rank.project(&PromptBlocks::Counted(4)).potential_blocks, 7);
    /// # Ok::<(), pointsman::load::BookError>(())
    /// ```
    #[must_use]
    pub fn project(&self, prompt: &PromptBlocks) -> Projection {
        let shared_blocks = match prompt {
            PromptBlocks::Hashed(hashes) if self.assume_kv_reuse => self.prompts.shared_blocks(hashes),
            PromptBlocks::Hashed(_) | PromptBlocks::Counted(_) => 0,
        };
        let active_blocks = self.active_blocks();
        let potential_blocks = active_blocks.saturating_add(prompt.block_count() - shared_blocks);
        Projection { active_blocks, shared_blocks, potential_blocks }
    }

    /// The load at `now`; at the last change, if that is later.
    ///
    /// O(prefills whose modelled turns have passed since the last change).
    #[must_use]
    pub fn load(&self, now: Timestamp) -> RankLoad {
        RankLoad {
            active_blocks: self.active_blocks(),
            prefill_tokens: self.prefills.tokens(now),
            requests: u32::try_from(self.bookings.len()).unwrap_or(u32::MAX),
        }
    }

    /// How the prefill tokens go down from the last change on, for publication.
    ///
    /// O(un-finished prefills).
    #[must_use]
    pub fn prefill_curve(&self) -> PrefillCurve {
        self.prefills.curve()
    }

    /// Weights of all active prompt and output blocks together, in blocks, before rounding.
    #[must_use]
    pub fn weighted_blocks(&self) -> f64 {
        self.weighted().fraction()
    }

    /// What a newcomer can share with the active prompts at most, for publication.
    #[must_use]
    pub fn sketch(&self) -> PromptSketch {
        self.sketch.sketch()
    }

    /// Whether nothing is booked. All loads are exactly zero then.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bookings.is_empty()
    }

    fn active_blocks(&self) -> u32 {
        self.weighted().rounded()
    }

    fn weighted(&self) -> BlockSum {
        self.prompts.weighted() + self.private
    }

    /// Counts everything again. For tests.
    ///
    /// O(bookings + edges).
    ///
    /// # Panics
    /// If a sum is off, or a structure is inconsistent.
    pub fn check_invariants(&self) {
        self.prompts.check_invariants();
        self.prefills.check_invariants();
        let (mut ends, mut private) = (0, BlockSum::default());
        for (_, booking) in std::collections::BTreeMap::from_iter(&self.bookings) {
            private.add(booking.output.weighted());
            match booking.prompt {
                Charge::Shared { .. } => ends += 1,
                Charge::Private { blocks, weight } => private.add(weight.times(blocks)),
            }
        }
        assert_eq!(ends, self.prompts.prompt_count(), "a prompt without a booking, or the reverse");
        assert_eq!(private, self.private, "the sum of private weights is off");
        let waiting = self.bookings.values().filter(|booking| booking.prefill.is_some()).count();
        assert!(self.prefills.unfinished() <= waiting, "a prefill without a booking");
        if self.is_empty() {
            assert_eq!(self.private, BlockSum::default(), "a residue at rest");
            assert_eq!(self.sketch(), PromptSketch::default(), "a residue at rest");
            assert_eq!(self.prompts.weighted(), BlockSum::default(), "a residue at rest");
            assert_eq!(self.prefills.tokens(Timestamp::default()), 0, "a residue at rest");
        }
    }
}

impl PromptBlocks {
    /// Number of complete blocks.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        match self {
            Self::Hashed(hashes) => block_count(hashes),
            Self::Counted(blocks) => *blocks,
        }
    }

    /// Where it stands in ranks' sketches of their active prompts.
    #[must_use]
    pub fn mark(&self) -> PromptMark {
        match self {
            Self::Hashed(hashes) => PromptMark::of(hashes),
            Self::Counted(_) => PromptMark::unshared(),
        }
    }

    /// Leading blocks that both prompts have. O(log blocks).
    ///
    /// ```
    /// use pointsman::load::PromptBlocks;
    /// use pointsman::protocol::SequenceHash;
    ///
    /// let prompt = |hashes: &[u64]| PromptBlocks::Hashed(hashes.iter().copied().map(SequenceHash).collect());
    /// assert_eq!(prompt(&[11, 12, 13]).shared_blocks(&prompt(&[11, 12, 21, 22])), 2);
    /// assert_eq!(prompt(&[11, 12]).shared_blocks(&PromptBlocks::Counted(2)), 0);
    /// ```
    #[must_use]
    pub fn shared_blocks(&self, other: &Self) -> u32 {
        match (self, other) {
            (Self::Hashed(ours), Self::Hashed(theirs)) => shared_blocks(ours, theirs),
            (Self::Hashed(_) | Self::Counted(_), _) => 0,
        }
    }
}

#[cfg(test)]
mod tests;
