//! Bytes of a recorded request: its facts without content. Prompts are fingerprints, sessions their last rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::reads::Last;
use crate::config::RouterConfigOverride;
use crate::load::{PromptBlocks, PromptFingerprint};
use crate::protocol::{Generation, SequenceHash, Slot, Timestamp, WorkerId, WorkerRank};
use crate::queue::ClassId;
use crate::record::bytes::{Reader, put_duration, put_f64, put_number, put_optional, put_signed, put_text};
use crate::schedule::types::{Purpose, Request, Target};
use crate::schedule::{ResolvedOptions, ResolvedTargets};
use crate::select::{Constraints, Pin, PinMode, RankOverlap, SharedHits, TierOverlap};

/// Facts of a request at its evaluation.
pub(super) struct RecordedRequest {
    pub(super) number: u64,
    pub(super) fingerprint: PromptFingerprint,
    /// Contents are replaced: prompts of one batch share prefixes of the recorded lengths.
    pub(super) request: Request<Box<str>>,
    pub(super) session: Option<WorkerRank>,
    pub(super) class: Option<ClassId>,
}

/// Parts of a pending request, as the scheduler has them.
pub(super) struct RequestParts<'a, T> {
    pub(super) number: u64,
    pub(super) id: &'a str,
    pub(super) fingerprint: &'a PromptFingerprint,
    pub(super) request: &'a Request<T>,
    pub(super) session: Option<WorkerRank>,
    pub(super) class: Option<ClassId>,
    /// The earlier request of the batch with the longest common prefix: its distance and the common blocks.
    pub(super) parent: Option<(usize, u32)>,
}

const OPTIONS: u8 = 1;
const SESSION: u8 = 1 << 1;
const CLASS: u8 = 1 << 2;
const SHARED_CACHE: u8 = 1 << 3;
const PARENT: u8 = 1 << 4;
const EXACTLY: u8 = 1 << 5;
/// The purpose in the upper bits.
const PURPOSE_SHIFT: u8 = 6;

impl<T> RequestParts<'_, T> {
    pub(super) fn put(&self, to: &mut Vec<u8>, last: &mut Last, is_current: impl Fn(&RankOverlap) -> bool) {
        let request = self.request;
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let purpose = match request.purpose {
            Purpose::Book => 0,
            Purpose::Report => 1,
            Purpose::LoadSnapshot => 2,
            Purpose::Explain => 3,
        };
        to.push(
            flag(request.options.is_some(), OPTIONS)
                | flag(self.session.is_some(), SESSION)
                | flag(self.class.is_some(), CLASS)
                | flag(!request.shared_cache.ranges().is_empty(), SHARED_CACHE)
                | flag(self.parent.is_some(), PARENT)
                | flag(request.target != Target::Any, EXACTLY)
                | purpose << PURPOSE_SHIFT,
        );
        last.put_number(to, self.number);
        put_text(to, self.id);
        put_number(to, request.prompt_tokens.into());
        put_number(to, request.prompt.block_count().into());
        let bits = self.fingerprint.bits();
        to.push(bits.len() as u8);
        to.extend_from_slice(bits);
        put_overlaps(to, &request.overlaps, is_current);
        if let Some(session) = self.session {
            put_rank(to, session);
        }
        if let Some(class) = self.class {
            put_number(to, class.0.into());
        }
        if let Some((distance, blocks)) = self.parent {
            put_number(to, distance as u64);
            put_number(to, blocks.into());
        }
        if !request.shared_cache.ranges().is_empty() {
            let ranges = request.shared_cache.ranges();
            put_number(to, ranges.len() as u64);
            for range in ranges {
                put_number(to, range.start.into());
                put_number(to, range.end.into());
            }
        }
        if let Target::Exactly { rank, cached_tokens, expected_duration } = request.target {
            put_rank(to, rank);
            put_optional(to, cached_tokens, |to, tokens| put_number(to, tokens.into()));
            put_optional(to, expected_duration, put_duration);
        }
        if let Some(options) = request.options.as_deref() {
            put_options(to, options);
        }
    }
}

impl RecordedRequest {
    /// Reads a request. `prompt_at` returns the prompt at a distance in its batch, `generation_in` the generation of the
    /// present rank in a slot, and `blocks_left` counts down from [`BLOCKS_MAX`].
    pub(super) fn read<'p>(
        from: &mut Reader<'_>,
        last: &mut Last,
        prompt_at: impl Fn(usize) -> Option<&'p PromptBlocks>,
        generation_in: impl Fn(Slot) -> Option<Generation>,
        blocks_left: &mut u32,
    ) -> Option<Self> {
        let flags = from.u8()?;
        let number = last.read_number(from)?;
        let id = from.text()?;
        let (prompt_tokens, block_count) = (from.u32()?, from.u32()?);
        let bits = from.length()?;
        let bits = from.bytes(bits)?;
        // A prompt without a fingerprint shares no blocks.
        let fingerprint = PromptFingerprint::from_bits(bits, if bits.is_empty() { 0 } else { block_count })?;
        let overlaps = read_overlaps(from, generation_in)?;
        let session = if flags & SESSION != 0 { Some(read_rank(from)?) } else { None };
        let class = if flags & CLASS != 0 { Some(ClassId(from.u32()?)) } else { None };
        let parent = if flags & PARENT != 0 { Some((from.usize()?, from.u32()?)) } else { None };
        let shared_cache = if flags & SHARED_CACHE != 0 {
            SharedHits::new(from.list(|from| Some(from.u32()?..from.u32()?))?)
        } else {
            SharedHits::default()
        };
        let target = if flags & EXACTLY != 0 {
            let rank = read_rank(from)?;
            let (cached_tokens, expected_duration) = (from.optional(Reader::u32)?, from.optional(Reader::duration)?);
            Target::Exactly { rank, cached_tokens, expected_duration }
        } else {
            Target::Any
        };
        let options = if flags & OPTIONS != 0 { Some(Box::new(read_options(from)?)) } else { None };
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
        Some(Self { number, fingerprint, request, session, class })
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
    let mut last = (-1, 0);
    for (at, known) in overlaps.iter().enumerate() {
        let (slot, blocks) = (i64::from(known.slot.0), i64::from(known.overlap.device_blocks));
        let before = std::mem::replace(&mut last, (slot, blocks));
        if to[codes_at + at] == IN_FULL {
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

pub(super) fn put_rank(to: &mut Vec<u8>, rank: WorkerRank) {
    put_number(to, rank.worker.0);
    put_number(to, rank.rank.into());
}

pub(super) fn read_rank(from: &mut Reader<'_>) -> Option<WorkerRank> {
    Some(WorkerRank::new(WorkerId(from.number()?), from.u32()?))
}

fn put_options(to: &mut Vec<u8>, options: &ResolvedOptions) {
    let ResolvedOptions { constraints, lora_name, expected_output_tokens, targets, overrides, .. } = options;
    let bits = [
        !constraints.is_empty(),
        lora_name.is_some(),
        expected_output_tokens.is_some(),
        options.usual_output_tokens.is_some(),
        options.output_tokens_max.is_some(),
        options.not_streamed,
        targets.is_some(),
        !overrides.is_empty(),
    ];
    to.push(bits.into_iter().zip(0..).fold(0, |flags, (bit, at)| flags | u8::from(bit) << at));
    if bits[0] {
        put_constraints(to, constraints);
    }
    if let Some(name) = lora_name {
        put_text(to, name);
    }
    if let Some(tokens) = expected_output_tokens {
        put_number(to, (*tokens).into());
    }
    if let Some(tokens) = options.usual_output_tokens {
        put_f64(to, tokens);
    }
    if let Some(tokens) = options.output_tokens_max {
        put_number(to, tokens.into());
    }
    if let Some(targets) = targets {
        put_targets(to, targets);
    }
    if bits[7] {
        put_overrides(to, overrides);
    }
}

fn read_options(from: &mut Reader<'_>) -> Option<ResolvedOptions> {
    let flags = from.u8()?;
    let has = |bit: u8| flags >> bit & 1 == 1;
    let mut options = ResolvedOptions { not_streamed: has(5), ..ResolvedOptions::default() };
    if has(0) {
        options.constraints = read_constraints(from)?;
    }
    if has(1) {
        options.lora_name = Some(from.text()?.into());
    }
    if has(2) {
        options.expected_output_tokens = Some(from.u32()?);
    }
    if has(3) {
        options.usual_output_tokens = Some(from.f64()?);
    }
    if has(4) {
        options.output_tokens_max = Some(from.u32()?);
    }
    if has(6) {
        options.targets = Some(read_targets(from)?);
    }
    if has(7) {
        options.overrides = read_overrides(from)?;
    }
    Some(options)
}

fn put_constraints(to: &mut Vec<u8>, constraints: &Constraints) {
    put_optional(to, constraints.allowed_workers.as_ref(), |to, allowed| {
        put_number(to, allowed.len() as u64);
        allowed.iter().for_each(|worker| put_number(to, worker.0));
    });
    put_number(to, constraints.excluded_ranks.len() as u64);
    constraints.excluded_ranks.iter().for_each(|rank| put_rank(to, *rank));
    put_optional(to, constraints.pin, |to, Pin { worker, rank, mode }| {
        put_number(to, worker.0);
        put_optional(to, rank, |to, rank| put_number(to, rank.into()));
        to.push((mode == PinMode::Soft).into());
    });
    put_number(to, constraints.required_taints.len() as u64);
    constraints.required_taints.iter().for_each(|taint| put_text(to, taint));
    put_number(to, constraints.preferred_taints.len() as u64);
    for (taint, weight) in &constraints.preferred_taints {
        put_text(to, taint);
        put_f64(to, *weight);
    }
}

fn read_constraints(from: &mut Reader<'_>) -> Option<Constraints> {
    Some(Constraints {
        allowed_workers: from
            .optional(|from| Some(from.list(|from| from.number().map(WorkerId))?.into_iter().collect()))?,
        excluded_ranks: from.list(read_rank)?.into_iter().collect(),
        pin: from.optional(|from| {
            let (worker, rank) = (WorkerId(from.number()?), from.optional(Reader::u32)?);
            Some(Pin { worker, rank, mode: if from.u8()? == 0 { PinMode::Hard } else { PinMode::Soft } })
        })?,
        required_taints: from.list(|from| from.text().map(str::to_owned))?.into_iter().collect(),
        preferred_taints: from
            .list(|from| Some((from.text()?.to_owned(), from.f64()?)))?
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
    })
}

fn put_targets(to: &mut Vec<u8>, targets: &ResolvedTargets) {
    let ResolvedTargets { ttft, ttft_due, itl, rejects } = *targets;
    put_optional(to, ttft, put_duration);
    put_optional(to, ttft_due, |to, due| put_number(to, due.0));
    put_optional(to, itl, put_duration);
    to.push(rejects.into());
}

fn read_targets(from: &mut Reader<'_>) -> Option<ResolvedTargets> {
    let duration = |from: &mut Reader<'_>| from.optional(|from| from.number().map(Duration::from_nanos));
    Some(ResolvedTargets {
        ttft: duration(from)?,
        ttft_due: from.optional(|from| from.number().map(Timestamp))?,
        itl: duration(from)?,
        rejects: from.u8()? != 0,
    })
}

fn put_overrides(to: &mut Vec<u8>, overrides: &RouterConfigOverride) {
    let RouterConfigOverride { overlap_score_credit, prefill_load_scale, temperature, .. } = *overrides;
    for weight in [overlap_score_credit, prefill_load_scale, temperature, overrides.shared_cache_multiplier] {
        put_optional(to, weight, put_f64);
    }
    for is_set in [overrides.assume_kv_reuse, overrides.track_prefill_tokens] {
        put_optional(to, is_set, |to, is_set| to.push(is_set.into()));
    }
}

fn read_overrides(from: &mut Reader<'_>) -> Option<RouterConfigOverride> {
    let flag = |from: &mut Reader<'_>| from.optional(|from| Some(from.u8()? != 0));
    Some(RouterConfigOverride {
        overlap_score_credit: from.optional(Reader::f64)?,
        prefill_load_scale: from.optional(Reader::f64)?,
        temperature: from.optional(Reader::f64)?,
        shared_cache_multiplier: from.optional(Reader::f64)?,
        assume_kv_reuse: flag(from)?,
        track_prefill_tokens: flag(from)?,
    })
}
