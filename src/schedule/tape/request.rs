//! Bytes of a recorded request: its facts without content. Prompts are fingerprints, sessions their last rank.

use std::sync::Arc;

use super::reads::Last;
use crate::config::RouterConfigOverride;
use crate::load::{PromptBlocks, PromptFingerprint};
use crate::protocol::{Generation, SequenceHash, Slot, Timestamp};
use crate::queue::ClassId;
use crate::record::bytes::{Reader, Recorded, put_number, put_signed, put_text, recorded, recorded_variants};
use crate::schedule::pending::PendingRequest;
use crate::schedule::types::{Purpose, Request, Target};
use crate::schedule::{ResolvedOptions, ResolvedTargets};
use crate::select::{Constraints, Pin, PinMode, RankOverlap, SharedHits, TierOverlap};

const OPTIONS: u64 = 1;
const SESSION: u64 = 1 << 1;
const CLASS: u64 = 1 << 2;
const SHARED_CACHE: u64 = 1 << 3;
const PARENT: u64 = 1 << 4;
const EXACTLY: u64 = 1 << 5;
const BEGINS: u64 = 1 << 6;
const FULL: u64 = 1 << 7;
/// The purpose in the upper bits.
const PURPOSE_SHIFT: u8 = 8;

impl<T> PendingRequest<T> {
    /// Writes the facts at its evaluation. `parent` is the earlier request of the batch with the longest common prefix: its
    /// distance and the common blocks.
    pub(super) fn put(
        &self,
        to: &mut Vec<u8>,
        last: &mut Last,
        (id, parent): (&str, Option<(usize, u32)>),
        is_current: impl Fn(&RankOverlap) -> bool,
    ) {
        let request = &self.request;
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let purpose = match request.purpose {
            Purpose::Book => 0,
            Purpose::Report => 1,
            Purpose::LoadSnapshot => 2,
            Purpose::Explain => 3,
        };
        let flags = flag(request.options.is_some(), OPTIONS)
            | flag(self.session.is_some(), SESSION)
            | flag(self.class.is_some(), CLASS)
            | flag(!request.shared_cache.ranges().is_empty(), SHARED_CACHE)
            | flag(parent.is_some(), PARENT)
            | flag(request.target != Target::Any, EXACTLY)
            | flag(self.begins, BEGINS)
            | flag(!self.full.is_empty(), FULL)
            | purpose << PURPOSE_SHIFT;
        put_number(to, flags);
        last.put_number(to, self.number);
        put_text(to, id);
        put_number(to, request.prompt_tokens.into());
        put_number(to, request.prompt.block_count().into());
        let bits = self.fingerprint.bits();
        to.push(bits.len() as u8);
        to.extend_from_slice(bits);
        put_overlaps(to, &request.overlaps, is_current);
        put_present(to, self.session.as_ref());
        put_present(to, self.class.map(|class| class.0).as_ref());
        if !self.full.is_empty() {
            put_number(to, self.full.len() as u64);
            self.full.iter().for_each(|slot| put_number(to, slot.0.into()));
        }
        put_present(to, parent.as_ref());
        if !request.shared_cache.ranges().is_empty() {
            let ranges = request.shared_cache.ranges();
            put_number(to, ranges.len() as u64);
            ranges.iter().for_each(|range| (range.start, range.end).put(to));
        }
        if let Target::Exactly { rank, cached_tokens, expected_duration } = request.target {
            rank.put(to);
            (cached_tokens, expected_duration).put(to);
        }
        if let Some(options) = request.options.as_deref() {
            options.put(to);
        }
    }
}

impl PendingRequest<Box<str>> {
    /// Reads a request, whose contents are replaced: prompts of one batch share prefixes of the recorded lengths.
    /// `prompt_at` returns the prompt at a distance in its batch, `generation_in` the generation of the present rank in a
    /// slot, and `blocks_left` counts down from [`BLOCKS_MAX`].
    pub(super) fn read<'p>(
        from: &mut Reader<'_>,
        last: &mut Last,
        prompt_at: impl Fn(usize) -> Option<&'p PromptBlocks>,
        generation_in: impl Fn(Slot) -> Option<Generation>,
        blocks_left: &mut u32,
    ) -> Option<Self> {
        let flags = from.number()?;
        let number = last.read_number(from)?;
        let id = from.text()?;
        let (prompt_tokens, block_count) = (from.u32()?, from.u32()?);
        let bits = from.length()?;
        let bits = from.bytes(bits)?;
        // A prompt without a fingerprint shares no blocks.
        let fingerprint = PromptFingerprint::from_bits(bits, if bits.is_empty() { 0 } else { block_count })?;
        let overlaps = read_overlaps(from, generation_in)?;
        let session = read_if(flags & SESSION != 0, from)?;
        let class = read_if(flags & CLASS != 0, from)?.map(ClassId);
        let full = if flags & FULL != 0 { from.list(|from| from.u32().map(Slot))? } else { Vec::new() };
        let parent: Option<(usize, u32)> = read_if(flags & PARENT != 0, from)?;
        let shared_cache = if flags & SHARED_CACHE != 0 {
            SharedHits::new(from.list(|from| Some(from.u32()?..from.u32()?))?)
        } else {
            SharedHits::default()
        };
        let target = if flags & EXACTLY != 0 {
            let (rank, (cached_tokens, expected_duration)) = Recorded::read(from)?;
            Target::Exactly { rank, cached_tokens, expected_duration }
        } else {
            Target::Any
        };
        let options = read_if(flags & OPTIONS != 0, from)?;
        let purpose = match flags >> PURPOSE_SHIFT {
            0 => Purpose::Book,
            1 => Purpose::Report,
            2 => Purpose::LoadSnapshot,
            _ => Purpose::Explain,
        };
        let parent = match parent {
            Some((distance, blocks)) => Some((prompt_at(distance)?, blocks)),
            None => None,
        };
        let prompt = substitute(number, block_count, !bits.is_empty(), parent, blocks_left)?;
        let request = Request {
            overlaps,
            shared_cache,
            target,
            purpose,
            options,
            ..Request::new(id.into(), prompt, prompt_tokens)
        };
        let begins = flags & BEGINS != 0;
        Some(Self { begins, class, full, ..Self::new(number, fingerprint, request, session) })
    }
}

/// Bound of the blocks of all prompts of a batch in a record, so that damaged bytes cause no large allocation.
pub(super) const BLOCKS_MAX: u32 = 1 << 22;

/// A prompt of `block_count` blocks with unique contents, except for the leading blocks of `parent`.
fn substitute(
    number: u64,
    block_count: u32,
    is_hashed: bool,
    parent: Option<(&PromptBlocks, u32)>,
    blocks_left: &mut u32,
) -> Option<PromptBlocks> {
    if !is_hashed {
        return Some(PromptBlocks::Counted(block_count));
    }
    let shared = match parent {
        Some((PromptBlocks::Hashed(hashes), blocks)) if blocks <= block_count => hashes.get(..blocks as usize)?,
        Some(_) => return None,
        None => &[],
    };
    *blocks_left = blocks_left.checked_sub(block_count)?;
    let own = |block: u64| SequenceHash(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ block << 1 | 1);
    let hashes: Arc<[SequenceHash]> =
        shared.iter().copied().chain((shared.len() as u64..block_count.into()).map(own)).collect();
    Some(PromptBlocks::Hashed(hashes))
}

impl Last {
    pub(super) fn read_number(&mut self, from: &mut Reader<'_>) -> Option<u64> {
        self.number = self.number.wrapping_add_signed(from.signed()?);
        Some(self.number)
    }

    pub(super) fn read_time(&mut self, from: &mut Reader<'_>) -> Option<Timestamp> {
        self.now = self.now.wrapping_add_signed(from.signed()?);
        Some(Timestamp(self.now))
    }
}

/// Overlap of another generation than the present one of its slot, which follows: it may join before the decision.
const OTHER: u64 = 1;
/// Blocks in lower tiers follow.
const LOWER: u64 = 1 << 1;

/// Code of an overlap that is written in full.
const IN_FULL: u8 = u8::MAX;

/// Overlaps relative to the previous one: one byte each, and in full those that differ by more than the slot. Most of
/// them are the same system prompt.
fn put_overlaps(to: &mut Vec<u8>, overlaps: &[RankOverlap], is_current: impl Fn(&RankOverlap) -> bool) {
    put_number(to, overlaps.len() as u64);
    let (codes_at, mut last) = (to.len(), (-1, 0));
    to.extend(overlaps.iter().map(|known| {
        let TierOverlap { device_blocks, host_pinned_blocks, disk_blocks, external_blocks } = known.overlap;
        let (skipped, last_blocks) = (i64::from(known.slot.0) - last.0 - 1, last.1);
        last = (known.slot.0.into(), device_blocks);
        let is_plain = device_blocks == last_blocks
            && host_pinned_blocks | disk_blocks | external_blocks == 0
            && (0..i64::from(IN_FULL)).contains(&skipped)
            && is_current(known);
        if is_plain { skipped as u8 } else { IN_FULL }
    }));
    let facts = |known: &RankOverlap| (i64::from(known.slot.0), i64::from(known.overlap.device_blocks));
    for at in 0..overlaps.len() {
        if to[codes_at + at] == IN_FULL {
            let (known, (slot, blocks)) = (&overlaps[at], facts(&overlaps[at]));
            let before = at.checked_sub(1).map_or((-1, 0), |at| facts(&overlaps[at]));
            put_signed(to, slot - before.0 - 1);
            let lower = lower_tiers(&known.overlap);
            let difference = blocks - before.1;
            let difference = ((difference << 1) ^ (difference >> 63)).cast_unsigned();
            let flags = if is_current(known) { 0 } else { OTHER } | if lower == [0; 3] { 0 } else { LOWER };
            put_number(to, difference << 2 | flags);
            if flags & LOWER != 0 {
                lower.into_iter().for_each(|blocks| put_number(to, blocks.into()));
            }
            if flags & OTHER != 0 {
                put_number(to, known.generation.0.into());
            }
        }
    }
}

fn lower_tiers(overlap: &TierOverlap) -> [u32; 3] {
    [overlap.host_pinned_blocks, overlap.disk_blocks, overlap.external_blocks]
}

fn read_overlaps(
    from: &mut Reader<'_>,
    generation_in: impl Fn(Slot) -> Option<Generation>,
) -> Option<Vec<RankOverlap>> {
    let count = from.length()?;
    let codes = from.bytes(count)?;
    let (mut last_slot, mut last_blocks) = (-1_i64, 0_i64);
    let overlap = |code: &u8| {
        let (skipped, number) = if *code == IN_FULL { (from.signed()?, from.number()?) } else { (i64::from(*code), 0) };
        last_slot = skipped.checked_add(last_slot)?.checked_add(1)?;
        let difference = number >> 2;
        let difference = (difference >> 1).cast_signed() ^ -(difference & 1).cast_signed();
        last_blocks = last_blocks.checked_add(difference)?;
        let [host_pinned_blocks, disk_blocks, external_blocks] =
            if number & LOWER != 0 { [from.u32()?, from.u32()?, from.u32()?] } else { [0; 3] };
        let slot = Slot(u32::try_from(last_slot).ok()?);
        let generation =
            if number & OTHER != 0 { Generation(from.u32()?) } else { generation_in(slot).unwrap_or_default() };
        let device_blocks = u32::try_from(last_blocks).ok()?;
        let overlap = TierOverlap { device_blocks, host_pinned_blocks, disk_blocks, external_blocks };
        Some(RankOverlap { slot, generation, overlap })
    };
    codes.iter().map(overlap).collect()
}

/// Writes a value whose presence a flag states.
fn put_present<T: Recorded>(to: &mut Vec<u8>, value: Option<&T>) {
    if let Some(value) = value {
        value.put(to);
    }
}

fn read_if<T: Recorded>(is_present: bool, from: &mut Reader<'_>) -> Option<Option<T>> {
    if is_present { T::read(from).map(Some) } else { Some(None) }
}

recorded! {
    Constraints unless is_empty { allowed_workers, excluded_ranks, pin, required_taints, preferred_taints }
    Pin { worker, rank, mode }
    ResolvedOptions {
        constraints, lora_name, expected_output_tokens, usual_output_tokens, output_tokens_max, not_streamed, targets,
        overrides; ..Self::default()
    }
    ResolvedTargets { ttft, ttft_due, itl, rejects }
    RouterConfigOverride unless is_empty {
        overlap_score_credit, prefill_load_scale, temperature, shared_cache_multiplier, assume_kv_reuse,
        track_prefill_tokens
    }
}

recorded_variants! {
    PinMode { 0 => Hard {} 1 => Soft {} }
}
