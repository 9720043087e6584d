//! A request in the scheduler.

use super::Request;
use super::rank::ProjectedPrompt;
use crate::load::PromptFingerprint;
use crate::protocol::{BookingId, Slot, Timestamp, WorkerRank};
use crate::queue::ClassId;
use crate::select::RankOverlap;

#[derive(Debug)]
pub(super) struct PendingRequest<T> {
    pub(super) number: u64,
    /// Fingerprint of the prompt for the sketches of ranks.
    pub(super) fingerprint: PromptFingerprint,
    pub(super) request: Request<T>,
    /// Last rank of its session at its last evaluation.
    pub(super) session: Option<WorkerRank>,
    /// Whether its program has to begin somewhere: no rank holds half of the prompt.
    pub(super) begins: bool,
    /// Class whose busy ranks it avoids; absent for requests that never wait.
    pub(super) class: Option<ClassId>,
    /// Slots of ranks whose caches are full of other programs, in order.
    pub(super) full: Vec<Slot>,
    /// Longest overlap of a rank, in device blocks.
    pub(super) longest_blocks: u32,
    /// Time of its overlap; absent for requests that never waited.
    pub(super) overlaps_at: Option<Timestamp>,
    /// Whether its caller left during the query.
    pub(super) cancelled: bool,
}

impl<T> PendingRequest<T> {
    /// A request that has not been evaluated.
    pub(super) fn new(
        number: u64,
        fingerprint: PromptFingerprint,
        request: Request<T>,
        session: Option<WorkerRank>,
    ) -> Self {
        Self {
            number,
            fingerprint,
            longest_blocks: longest_blocks(&request.overlaps),
            request,
            session,
            begins: false,
            class: None,
            full: Vec::new(),
            overlaps_at: None,
            cancelled: false,
        }
    }

    /// Its booking, if it can wait and be cancelled.
    pub(super) fn booking(&self) -> Option<BookingId> {
        self.request.waits.as_ref().map(|waits| waits.booking)
    }

    pub(super) fn candidate(&self, in_batch: usize) -> ProjectedPrompt<'_> {
        let prompt = &self.request.prompt;
        ProjectedPrompt {
            prompt,
            block_count: u64::from(prompt.block_count()),
            fingerprint: &self.fingerprint,
            in_batch,
        }
    }

    /// Longest overlap of a rank over all tiers, in blocks.
    pub(super) fn held_blocks(&self) -> u32 {
        self.request.overlaps.iter().map(|known| known.overlap.total_blocks()).max().unwrap_or(0)
    }

    /// Of the blocks that an active request of a rank shares, those that count as cached there. A prefix that another rank
    /// has cached already does not: otherwise all requests for a hot prefix follow the first one that computes a copy of
    /// it, and wait for its prefill while other ranks stay idle.
    pub(super) fn awaited_blocks(&self, shared_blocks: u64) -> u64 {
        if shared_blocks > u64::from(self.longest_blocks) { shared_blocks } else { 0 }
    }
}

/// Longest of these overlaps, in device blocks.
pub(super) fn longest_blocks(overlaps: &[RankOverlap]) -> u32 {
    overlaps.iter().map(|known| known.overlap.device_blocks).max().unwrap_or(0)
}
