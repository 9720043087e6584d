//! The state of one rank in a keyframe.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{About, Ahead, Answer, Front, Measured, Rank};
use crate::load::{BoardLoad, BoardVersion, EngineSpeed, PeerLoad, PublishedSpeed, RankLoad};
use crate::protocol::{Generation, Slot, Timestamp, WorkerId, WorkerRank};
use crate::record::bytes::{Reader, put_duration, put_f64, put_number, put_optional, put_text, put_words};
use crate::schedule::latency::recent::RecentWork;
use crate::schedule::view::{Added, View, Wait};
use crate::select::RankTraits;

impl Rank {
    /// Writes the state, except for the bookings of a batch in progress.
    pub(crate) fn put(&self, to: &mut Vec<u8>) {
        let Self { front, rank, generation, about, seen, seen_at, peers, peer_tokens, ahead_wait, .. } = self;
        put_number(to, front.slot.0.into());
        put_number(to, generation.0.into());
        put_number(to, rank.worker.0);
        put_number(to, rank.rank.into());
        put_traits(to, &about.traits);
        let View { active_blocks, prefill_tokens, requests, read_blocks } = front.view;
        for number in [active_blocks.0, active_blocks.1, prefill_tokens.0, prefill_tokens.1] {
            put_number(to, number);
        }
        put_number(to, requests.into());
        put_number(to, read_blocks.into());
        to.push(front.settled.into());
        put_words(to, &seen.to_words());
        put_number(to, seen_at.0);
        put_words(to, &peers.to_words());
        put_number(to, *peer_tokens);
        put_duration(to, ahead_wait.modelled);
        put_number(to, ahead_wait.unmodelled_tokens);
        put_number(to, self.issued.into());
        put_number(to, self.overlay.len() as u64);
        for Ahead { number, added } in &self.overlay {
            put_number(to, (*number).into());
            put_added(to, added);
        }
        put_speed(to, &self.measured.speed);
        to.push(self.measured.is_full.into());
        put_optional(to, about.aged_speed, |to, (published, aged)| {
            published.to_words().iter().for_each(|word| put_number(to, (*word).into()));
            put_speed(to, &aged);
        });
        put_number(to, about.since.0);
        put_number(to, about.returned_at.0);
        put_f64(to, about.slow_start_factor);
        put_f64(to, about.return_factor);
        put_f64(to, about.recent_work.to_f64());
        match &self.answer {
            None => to.push(0),
            Some(Answer::Awaited) => to.push(1),
            Some(Answer::Missed) => to.push(2),
            Some(Answer::Given { load, shared_blocks }) => {
                to.push(3);
                put_load(to, load);
                put_number(to, shared_blocks.len() as u64);
                shared_blocks.iter().for_each(|blocks| put_number(to, (*blocks).into()));
            }
        }
    }

    /// The inverse of [`put`](Self::put).
    pub(crate) fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (slot, generation) = (Slot(from.u32()?), Generation(from.u32()?));
        let rank = WorkerRank::new(WorkerId(from.number()?), from.u32()?);
        let traits = Arc::new(read_traits(from)?);
        let view = View {
            active_blocks: (from.count()?, from.count()?),
            // The upper bound may be "at least `u64::MAX`".
            prefill_tokens: (from.count()?, from.number()?),
            requests: from.u32()?,
            read_blocks: from.u32()?,
        };
        let settled = from.u8()? != 0;
        let (seen, seen_at) = (BoardLoad::from_words(from.words()?), Timestamp(from.number()?));
        let (peers, peer_tokens) = (PeerLoad::from_words(from.words()?), from.count()?);
        let ahead_wait = Wait { modelled: from.duration()?, unmodelled_tokens: from.count()? };
        let issued = from.u32()?;
        let overlay = from.list(|from| Some(Ahead { number: from.u32()?, added: read_added(from)? }))?;
        let measured = Measured { speed: read_speed(from)?, is_full: from.u8()? != 0 };
        let aged_speed = from.optional(|from| {
            let words = [from.u32()?, from.u32()?, from.u32()?, from.u32()?];
            Some((PublishedSpeed::from_words(words), read_speed(from)?))
        })?;
        let (since, returned_at) = (Timestamp(from.number()?), Timestamp(from.number()?));
        let (slow_start_factor, return_factor) = (from.f64()?, from.f64()?);
        let recent_work = RecentWork::from_f64(from.f64()?);
        let answer = match from.u8()? {
            0 => None,
            1 => Some(Answer::Awaited),
            2 => Some(Answer::Missed),
            3 => Some(Answer::Given { load: read_load(from)?, shared_blocks: from.list(Reader::u32)?.into() }),
            _ => return None,
        };
        let about = About { traits, aged_speed, since, slow_start_factor, returned_at, return_factor, recent_work };
        Some(Self {
            front: Front { view, version: BoardVersion::default(), slot, settled },
            rank,
            generation,
            about: Box::new(about),
            seen,
            seen_at,
            peers,
            peer_tokens,
            ahead_wait,
            overlay: VecDeque::from(overlay),
            issued,
            measured,
            answer,
            booked: SmallVec::new(),
        })
    }
}

pub(crate) fn put_speed(to: &mut Vec<u8>, speed: &EngineSpeed) {
    let EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds } = *speed;
    [work_tokens_per_second, step_seconds, request_seconds, block_seconds].into_iter().for_each(|n| put_f64(to, n));
}

pub(crate) fn read_speed(from: &mut Reader<'_>) -> Option<EngineSpeed> {
    Some(EngineSpeed {
        work_tokens_per_second: from.f64()?,
        step_seconds: from.f64()?,
        request_seconds: from.f64()?,
        block_seconds: from.f64()?,
    })
}

pub(crate) fn put_load(to: &mut Vec<u8>, load: &RankLoad) {
    let RankLoad { active_blocks, read_blocks, prefill_tokens, requests } = *load;
    let numbers = [active_blocks.into(), read_blocks.into(), prefill_tokens, requests.into()];
    numbers.into_iter().for_each(|number| put_number(to, number));
}

pub(crate) fn read_load(from: &mut Reader<'_>) -> Option<RankLoad> {
    Some(RankLoad {
        active_blocks: from.u32()?,
        read_blocks: from.u32()?,
        prefill_tokens: from.count()?,
        requests: from.u32()?,
    })
}

fn put_added(to: &mut Vec<u8>, added: &Added) {
    put_number(to, added.blocks.0);
    put_number(to, added.blocks.1);
    put_number(to, added.read_blocks.into());
    put_number(to, added.prefill_tokens);
    put_optional(to, added.prefill_duration, put_duration);
}

fn read_added(from: &mut Reader<'_>) -> Option<Added> {
    Some(Added {
        blocks: (from.count()?, from.count()?),
        read_blocks: from.u32()?,
        prefill_tokens: from.count()?,
        prefill_duration: from.optional(Reader::duration)?,
    })
}

fn put_traits(to: &mut Vec<u8>, traits: &RankTraits) {
    for texts in [&traits.taints, &traits.lora_adapters] {
        put_number(to, texts.len() as u64);
        texts.iter().for_each(|text| put_text(to, text));
    }
    for count in [traits.max_num_batched_tokens, traits.total_kv_blocks] {
        put_optional(to, count, |to, count| put_number(to, count.into()));
    }
}

fn read_traits(from: &mut Reader<'_>) -> Option<RankTraits> {
    let text = |from: &mut Reader<'_>| from.text().map(str::to_owned);
    Some(RankTraits {
        taints: from.list(text)?.into_iter().collect(),
        lora_adapters: from.list(text)?.into_iter().collect(),
        max_num_batched_tokens: from.optional(Reader::u32)?,
        total_kv_blocks: from.optional(Reader::u32)?,
    })
}
