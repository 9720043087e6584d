//! The state of one rank in a keyframe.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{About, Ahead, Answer, Front, Measured, Rank};
use crate::load::{BoardLoad, BoardVersion, EngineSpeed, PeerLoad, PublishedSpeed, RankLoad};
use crate::protocol::WorkerRank;
use crate::record::bytes::{Reader, Recorded, put_number, put_words, recorded};
use crate::schedule::latency::recent::RecentWork;
use crate::schedule::view::{Added, View, Wait};
use crate::select::RankTraits;

impl Rank {
    /// Writes the state, except for the bookings of a batch in progress.
    pub(crate) fn put(&self, to: &mut Vec<u8>) {
        let Self { front, rank, generation, about, seen, seen_at, peers, peer_tokens, ahead_wait, .. } = self;
        (front.slot, *generation).put(to);
        rank.put(to);
        about.traits.put(to);
        let View { active_blocks, prefill_tokens, requests, read_blocks } = front.view;
        (active_blocks, prefill_tokens).put(to);
        (requests, read_blocks).put(to);
        front.settled.put(to);
        put_words(to, &seen.to_words());
        seen_at.put(to);
        put_words(to, &peers.to_words());
        peer_tokens.put(to);
        ahead_wait.put(to);
        self.issued.put(to);
        put_number(to, self.overlay.len() as u64);
        self.overlay.iter().for_each(|ahead| ahead.put(to));
        self.measured.put(to);
        about.aged_speed.map(|(published, aged)| (published.to_words(), aged)).put(to);
        (about.since, about.returned_at).put(to);
        (about.slow_start_factor, about.return_factor).put(to);
        about.recent_work.to_f64().put(to);
        match &self.answer {
            None => to.push(0),
            Some(Answer::Awaited) => to.push(1),
            Some(Answer::Missed) => to.push(2),
            Some(Answer::Given { load, shared_blocks }) => {
                to.push(3);
                load.put(to);
                shared_blocks.put(to);
            }
        }
    }

    /// The inverse of [`put`](Self::put).
    pub(crate) fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (slot, generation) = Recorded::read(from)?;
        let rank = Recorded::read(from)?;
        let traits = Arc::new(Recorded::read(from)?);
        let view = View {
            active_blocks: Recorded::read(from)?,
            // The upper bound may be "at least `u64::MAX`".
            prefill_tokens: (from.count()?, from.number()?),
            requests: from.u32()?,
            read_blocks: from.u32()?,
        };
        let settled = Recorded::read(from)?;
        let (seen, seen_at) = (BoardLoad::from_words(from.words()?), Recorded::read(from)?);
        let (peers, peer_tokens) = (PeerLoad::from_words(from.words()?), from.count()?);
        let ahead_wait = Recorded::read(from)?;
        let issued = from.u32()?;
        let overlay: Vec<Ahead> = Recorded::read(from)?;
        let measured = Recorded::read(from)?;
        let aged_speed: Option<([u32; 4], EngineSpeed)> = Recorded::read(from)?;
        let aged_speed = aged_speed.map(|(words, aged)| (PublishedSpeed::from_words(words), aged));
        let (since, returned_at) = Recorded::read(from)?;
        let (slow_start_factor, return_factor) = Recorded::read(from)?;
        let recent_work = RecentWork::from_f64(from.f64()?);
        let answer = match from.u8()? {
            0 => None,
            1 => Some(Answer::Awaited),
            2 => Some(Answer::Missed),
            3 => Some(Answer::Given { load: Recorded::read(from)?, shared_blocks: Recorded::read(from)? }),
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

recorded! {
    WorkerRank { worker, rank }
    EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds }
    RankLoad { active_blocks, read_blocks, prefill_tokens, requests }
    RankTraits { taints, lora_adapters, max_num_batched_tokens, total_kv_blocks }
    Wait { modelled, unmodelled_tokens }
    Added { blocks, read_blocks, prefill_tokens, prefill_duration }
    Ahead { number, added }
    Measured { speed, is_full }
}
