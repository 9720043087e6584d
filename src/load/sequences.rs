//! Bookings of one rank and the load that follows from them.
//!
//! Tracks each booking's prompt blocks, output blocks and prefill tokens. No order of calls panics, completing and
//! freeing are idempotent, and a rank without bookings has a load of exactly zero. Contains no token arithmetic: a
//! booking includes a computed [`PrefillLoadHint`].
//!
//! The caller selects the rank, publishes the load, and ends the bookings of cancelled requests: nothing expires here.

use std::sync::Arc;

use ahash::AHashMap;

use super::prefill::{PrefillId, PrefillQueue};
use super::prompts::{PromptEnd, PromptTree, block_count, shared_blocks};
use super::sketch::{PromptFingerprint, PromptSketch, SketchCounts};
use super::{BlockSum, OutputBlocks, PrefillCurve, PrefillLoadHint, Weight};
use crate::protocol::{BookingId, SequenceHash, Timestamp};

/// Unfinished bookings of one rank.
///
/// ```
/// use std::sync::Arc;
/// use pointsman::internals::load::{ActiveSequences, Change, PrefillLoadHint, PromptBlocks, RankLoad};
/// use pointsman::internals::protocol::{BookingId, SequenceHash};
/// use pointsman::protocol::Timestamp;
///
/// let now = Timestamp::default();
/// let prompt = |hashes: [u64; 3]| PromptBlocks::Hashed(hashes.map(SequenceHash).into());
/// let mut rank = ActiveSequences::new(true);
///
/// rank.book(BookingId(1), prompt([11, 12, 13]), PrefillLoadHint::new(12, 0, true, None), now)?;
/// let booked = rank.book(BookingId(2), prompt([11, 12, 21]), PrefillLoadHint::new(12, 8, true, None), now)?;
/// assert_eq!((booked.shared_blocks, booked.added_blocks), (2, 1));
/// assert_eq!(rank.load(now), RankLoad { active_blocks: 4, read_blocks: 6, prefill_tokens: 16, requests: 2 });
///
/// assert_eq!(rank.free(BookingId(1), now), Change::Applied);
/// assert_eq!(rank.free(BookingId(1), now), Change::NoChange);
/// assert_eq!(rank.free(BookingId(2), now), Change::Applied);
/// assert_eq!(rank.load(now), RankLoad::default());
/// # Ok::<(), pointsman::internals::load::BookError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ActiveSequences {
    assume_kv_reuse: bool,
    bookings: AHashMap<BookingId, Booking>,
    prompts: PromptTree,
    /// Sketch of the same prompts, for publication.
    sketch: SketchCounts,
    /// Weights of the blocks that are private to one booking: output, and prompts outside the tree.
    private: BlockSum,
    prefills: PrefillQueue,
    /// Blocks that a step reads: those of each booking's prompt and output, shared or not.
    read_blocks: u64,
    /// Sequences of all bookings.
    sequences: u64,
}

/// The complete blocks of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptBlocks {
    /// By sequence hash, in prompt order from the first block: shared with prompts of the same prefix.
    Hashed(Arc<[SequenceHash]>),
    /// By number, for prompts with unknown or untracked content: not shared.
    Counted(u32),
    /// Prompts and copies of one request, each with an output of its own: not shared with other requests.
    Several {
        /// Blocks of all distinct prompts.
        blocks: u32,
        /// Number of outputs.
        sequences: u32,
        /// Prompt blocks that a decode step reads for each of them.
        read_blocks: u32,
    },
}

/// Blocks added by a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookedBlocks {
    /// Leading blocks of the prompt that other bookings of the rank also use.
    pub shared_blocks: u32,
    /// The other blocks of the prompt, each at full weight.
    pub added_blocks: u32,
}

/// Reason for rejecting a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BookError {
    /// The rank has a booking with this id, which is unchanged.
    #[error("booking {0} exists already")]
    Duplicate(BookingId),
}

/// Whether a report changed anything. Reports of unknown bookings are late, not errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The report changed the booking.
    Applied,
    /// The report is a repetition, or the booking has ended or does not exist.
    NoChange,
}

/// Load of a rank at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankLoad {
    /// Sum of the weights of all active prompt and output blocks, rounded half up to whole blocks. Saturates.
    pub active_blocks: u32,
    /// Blocks that a decode step reads: the sum over all bookings of prompt and output blocks. Attention reads a shared
    /// prefix once per request. Saturates.
    pub read_blocks: u32,
    /// Remaining tokens of unfinished prefills.
    pub prefill_tokens: u64,
    /// Number of sequences: that of the bookings, and of the further outputs of a booking. Saturates.
    pub requests: u32,
}

/// Effect of booking a prompt on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    /// Active blocks without the prompt, as in [`RankLoad`].
    pub active_blocks: u32,
    /// Leading blocks of the prompt that are already active.
    pub shared_blocks: u32,
    /// Active blocks with the prompt, whose other blocks count at full weight. Saturates.
    pub potential_blocks: u32,
}

#[derive(Clone, Debug)]
struct Booking {
    prompt: Charge,
    /// Blocks of the prompt that a step reads, for all sequences.
    read_blocks: u64,
    sequences: u32,
    /// The output at the last read.
    output: OutputBlocks,
    /// The queued prefill, until it is reported complete.
    prefill: Option<PrefillId>,
    /// Whether the end of the prefill will be reported.
    is_reported: bool,
}

/// Accounting of a prompt's blocks.
#[derive(Clone, Copy, Debug)]
enum Charge {
    Shared { end: PromptEnd, fingerprint: PromptFingerprint },
    Private { blocks: u32, weight: Weight },
}

impl ActiveSequences {
    /// Creates a rank without bookings.
    ///
    /// `assume_kv_reuse`: whether concurrent requests share the blocks of a common prefix and read them once per step.
    /// An engine without cascade attention reads them once per request; then every prompt counts in full.
    #[must_use]
    pub fn new(assume_kv_reuse: bool) -> Self {
        Self {
            assume_kv_reuse,
            bookings: AHashMap::new(),
            prompts: PromptTree::new(),
            sketch: SketchCounts::new(),
            private: BlockSum::default(),
            prefills: PrefillQueue::default(),
            read_blocks: 0,
            sequences: 0,
        }
    }

    /// Books a request: its prompt blocks at full weight, except active ones, which keep their weights, and its prefill
    /// at the end of the queue.
    ///
    /// To restore a lost rank, book the known bookings in order of [`BookingId`], each with its original time, and then
    /// report outputs and completions. Other orders are harmless: the prefill queue has the order of the calls.
    ///
    /// O(edges on the prompt's path × log blocks), independent of the length of the prompt.
    ///
    /// # Errors
    /// [`BookError::Duplicate`] if the id is booked; nothing changes in that case.
    pub fn book(
        &mut self,
        booking: BookingId,
        prompt: PromptBlocks,
        prefill: Option<PrefillLoadHint>,
        now: Timestamp,
    ) -> Result<BookedBlocks, BookError> {
        if self.bookings.contains_key(&booking) {
            return Err(BookError::Duplicate(booking));
        }
        self.prefills.advance(now);
        let (blocks, (sequences, read_blocks)) = (prompt.block_count(), prompt.decodes());
        self.read_blocks += read_blocks;
        self.sequences += u64::from(sequences);
        let (prompt, shared_blocks) = match prompt {
            PromptBlocks::Hashed(hashes) if self.assume_kv_reuse => {
                let fingerprint = PromptFingerprint::of(&hashes);
                self.sketch.add(&fingerprint);
                let (end, shared_blocks) = self.prompts.insert(hashes);
                (Charge::Shared { end, fingerprint }, shared_blocks)
            }
            PromptBlocks::Hashed(_) | PromptBlocks::Counted(_) | PromptBlocks::Several { .. } => {
                self.private.add(Weight::ONE.times(blocks));
                (Charge::Private { blocks, weight: Weight::ONE }, 0)
            }
        };
        let is_reported = prefill.is_some_and(PrefillLoadHint::is_reported);
        let prefill = prefill.map(|hint| self.prefills.push(hint, now));
        let output = OutputBlocks::default();
        self.bookings.insert(booking, Booking { prompt, read_blocks, sequences, output, prefill, is_reported });
        Ok(BookedBlocks { shared_blocks, added_blocks: blocks - shared_blocks })
    }

    /// Reports the completion of a prefill: removes its remaining tokens, and starts the next prefill if it was the
    /// first in the queue.
    pub fn complete_prefill(&mut self, booking: BookingId, now: Timestamp) -> Change {
        let Some(known) = self.bookings.get_mut(&booking) else { return Change::NoChange };
        let Some(id) = known.prefill.take() else { return Change::NoChange };
        if known.is_reported {
            self.prefills.report(id, now);
        } else {
            self.prefills.complete(id, now);
        }
        Change::Applied
    }

    /// Updates a booking's output from its caller's summary.
    ///
    /// If a decay was reported since the last read, the unshared part of the prompt also takes the last decay. Shared
    /// blocks keep their weight, also after the other bookings end, until the next decay.
    pub fn set_output(&mut self, booking: BookingId, output: &OutputBlocks) -> Change {
        let Some(known) = self.bookings.get_mut(&booking) else { return Change::NoChange };
        let seen = std::mem::replace(&mut known.output, *output);
        if seen == *output {
            return Change::NoChange;
        }
        self.private.sub(seen.weighted());
        self.private.add(output.weighted());
        self.read_blocks =
            (self.read_blocks + u64::from(output.block_count())).saturating_sub(seen.block_count().into());
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

    /// Ends a booking: removes its output, the unshared blocks of its prompt, and the remainder of its prefill.
    pub fn free(&mut self, booking: BookingId, now: Timestamp) -> Change {
        let Some(ended) = self.bookings.remove(&booking) else { return Change::NoChange };
        let Booking { prompt, read_blocks, sequences, output, prefill, is_reported } = ended;
        self.prefills.advance(now);
        if let Some(id) = prefill {
            if is_reported && output.block_count() > 0 {
                self.prefills.was_not_reported();
            }
            self.prefills.complete(id, now);
        }
        self.private.sub(output.weighted());
        self.read_blocks = self.read_blocks.saturating_sub(read_blocks + u64::from(output.block_count()));
        self.sequences -= u64::from(sequences);
        match prompt {
            Charge::Shared { end, fingerprint } => {
                self.sketch.remove(&fingerprint);
                self.prompts.remove(end);
            }
            Charge::Private { blocks, weight } => self.private.sub(weight.times(blocks)),
        }
        debug_assert!(!self.is_empty() || self.load(now) == RankLoad::default(), "an idle rank has no residue");
        Change::Applied
    }

    /// Projection of booking this prompt.
    ///
    /// O(edges on the prompt's path × log blocks), independent of the length of the prompt.
    ///
    /// ```
    /// use pointsman::internals::load::{ActiveSequences, PromptBlocks};
    /// use pointsman::internals::protocol::{BookingId, SequenceHash};
    /// use pointsman::protocol::Timestamp;
    ///
    /// let prompt = |hashes: &[u64]| PromptBlocks::Hashed(hashes.iter().copied().map(SequenceHash).collect());
    /// let mut rank = ActiveSequences::new(true);
    /// rank.book(BookingId(1), prompt(&[11, 12, 13]), None, Timestamp::default())?;
    /// let projection = rank.project(&prompt(&[11, 12, 21, 22]));
    /// assert_eq!((projection.shared_blocks, projection.potential_blocks), (2, 5));
    /// assert_eq!(rank.project(&PromptBlocks::Counted(4)).potential_blocks, 7);
    /// # Ok::<(), pointsman::internals::load::BookError>(())
    /// ```
    #[must_use]
    pub fn project(&self, prompt: &PromptBlocks) -> Projection {
        let shared_blocks = match prompt {
            PromptBlocks::Hashed(hashes) if self.assume_kv_reuse => self.prompts.shared_blocks(hashes),
            PromptBlocks::Hashed(_) | PromptBlocks::Counted(_) | PromptBlocks::Several { .. } => 0,
        };
        let active_blocks = self.active_blocks();
        let potential_blocks = active_blocks.saturating_add(prompt.block_count() - shared_blocks);
        Projection { active_blocks, shared_blocks, potential_blocks }
    }

    /// The load at `now`, or at the last change if that is later.
    ///
    /// O(prefills whose modelled end has passed since the last change).
    #[must_use]
    pub fn load(&self, now: Timestamp) -> RankLoad {
        RankLoad {
            active_blocks: self.active_blocks(),
            read_blocks: u32::try_from(self.read_blocks).unwrap_or(u32::MAX),
            prefill_tokens: self.prefills.tokens(now),
            requests: u32::try_from(self.sequences).unwrap_or(u32::MAX),
        }
    }

    /// Number of prefills that are not known to be complete.
    #[must_use]
    pub fn unfinished_prefills(&self) -> u32 {
        u32::try_from(self.prefills.unfinished()).unwrap_or(u32::MAX)
    }

    /// The decrease of the prefill tokens from the last change on, for publication.
    ///
    /// O(1).
    #[must_use]
    pub fn prefill_curve(&self) -> PrefillCurve {
        self.prefills.curve()
    }

    /// Sum of the weights of all active prompt and output blocks, in blocks, before rounding.
    #[must_use]
    pub fn weighted_blocks(&self) -> f64 {
        self.weighted().fraction()
    }

    /// Sketch of the active prompts, for publication.
    #[must_use]
    pub fn sketch(&self) -> PromptSketch {
        self.sketch.sketch()
    }

    /// The bookings, in any order.
    #[cfg(any(test, feature = "test-support"))]
    pub fn bookings(&self) -> impl Iterator<Item = BookingId> {
        self.bookings.keys().copied()
    }

    /// Whether there is no booking. All loads are then exactly zero.
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

    /// Recounts everything, for tests.
    ///
    /// O(bookings + edges).
    ///
    /// # Panics
    /// If a sum is wrong, or a structure is inconsistent.
    pub fn check_invariants(&self) {
        self.prompts.check_invariants();
        self.prefills.check_invariants();
        let (mut ends, mut private, mut read_blocks, mut sequences) = (0, BlockSum::default(), 0, 0);
        for (_, booking) in std::collections::BTreeMap::from_iter(&self.bookings) {
            private.add(booking.output.weighted());
            read_blocks += booking.read_blocks + u64::from(booking.output.block_count());
            sequences += u64::from(booking.sequences);
            match booking.prompt {
                Charge::Shared { .. } => ends += 1,
                Charge::Private { blocks, weight } => private.add(weight.times(blocks)),
            }
        }
        assert_eq!(ends, self.prompts.prompt_count(), "a prompt without a booking, or the reverse");
        assert_eq!((read_blocks, sequences), (self.read_blocks, self.sequences), "the sum of decodes is wrong");
        assert_eq!(private, self.private, "the sum of private weights is wrong");
        let waiting = self.bookings.values().filter(|booking| booking.prefill.is_some()).count();
        assert!(self.prefills.unfinished() <= waiting, "a prefill without a booking");
        if self.is_empty() {
            assert_eq!(self.private, BlockSum::default(), "an idle rank has no residue");
            assert_eq!(self.sketch(), PromptSketch::default(), "an idle rank has no residue");
            assert_eq!(self.prompts.weighted(), BlockSum::default(), "an idle rank has no residue");
            assert_eq!(self.prefills.tokens(Timestamp::default()), 0, "an idle rank has no residue");
        }
    }
}

impl PromptBlocks {
    /// Number of complete blocks.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        match self {
            Self::Hashed(hashes) => block_count(hashes),
            Self::Counted(blocks) | Self::Several { blocks, .. } => *blocks,
        }
    }

    /// Number of sequences, and the prompt blocks that a decode step reads for all of them.
    fn decodes(&self) -> (u32, u64) {
        match self {
            Self::Hashed(_) | Self::Counted(_) => (1, self.block_count().into()),
            Self::Several { sequences, read_blocks, .. } => {
                (*sequences, u64::from(*sequences) * u64::from(*read_blocks))
            }
        }
    }

    /// The prompt's fingerprint for lookups in ranks' sketches.
    #[must_use]
    pub fn fingerprint(&self) -> PromptFingerprint {
        match self {
            Self::Hashed(hashes) => PromptFingerprint::of(hashes),
            Self::Counted(_) | Self::Several { .. } => PromptFingerprint::unshared(),
        }
    }

    /// Number of common leading blocks. O(log blocks).
    ///
    /// ```
    /// use pointsman::internals::load::PromptBlocks;
    /// use pointsman::internals::protocol::SequenceHash;
    ///
    /// let prompt = |hashes: &[u64]| PromptBlocks::Hashed(hashes.iter().copied().map(SequenceHash).collect());
    /// assert_eq!(prompt(&[11, 12, 13]).shared_blocks(&prompt(&[11, 12, 21, 22])), 2);
    /// assert_eq!(prompt(&[11, 12]).shared_blocks(&PromptBlocks::Counted(2)), 0);
    /// ```
    #[must_use]
    pub fn shared_blocks(&self, other: &Self) -> u32 {
        match (self, other) {
            (Self::Hashed(ours), Self::Hashed(theirs)) => shared_blocks(ours, theirs),
            (Self::Hashed(_) | Self::Counted(_) | Self::Several { .. }, _) => 0,
        }
    }
}

#[cfg(test)]
mod tests;
