//! The state of one rank in a keyframe.

use smallvec::SmallVec;

use super::{About, Ahead, Answer, Front, Measured, Rank};
use crate::load::{BoardLoad, BoardVersion, EngineSpeed, RankLoad};
use crate::protocol::WorkerRank;
use crate::record::bytes::{Reader, Recorded, put_words, recorded, recorded_variants};
use crate::schedule::view::{Added, View, Wait};
use crate::select::RankTraits;

impl Rank {
    /// Writes the state, except for the bookings of a batch in progress.
    pub(crate) fn put(&self, to: &mut Vec<u8>) {
        let Self { front, rank, generation, about, seen, seen_at, peers, peer_tokens, ahead_wait, overlay, .. } = self;
        (front.slot, *generation).put(to);
        rank.put(to);
        let View { active_blocks, prefill_tokens, requests, read_blocks } = front.view;
        (active_blocks, prefill_tokens).put(to);
        (requests, read_blocks).put(to);
        front.settled.put(to);
        put_words(to, &seen.to_words());
        seen_at.put(to);
        peers.put(to);
        peer_tokens.put(to);
        ahead_wait.put(to);
        overlay.put(to);
        self.issued.put(to);
        self.measured.put(to);
        about.put(to);
        self.answer.put(to);
    }

    /// The inverse of [`put`](Self::put).
    pub(crate) fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (slot, generation) = Recorded::read(from)?;
        let rank = Recorded::read(from)?;
        let view = View {
            active_blocks: Recorded::read(from)?,
            // The upper bound may be "at least `u64::MAX`".
            prefill_tokens: (from.count()?, from.number()?),
            requests: from.u32()?,
            read_blocks: from.u32()?,
        };
        Some(Self {
            front: Front { view, version: BoardVersion::default(), slot, settled: Recorded::read(from)? },
            rank,
            generation,
            seen: BoardLoad::from_words(from.words()?),
            seen_at: Recorded::read(from)?,
            peers: Recorded::read(from)?,
            peer_tokens: Recorded::read(from)?,
            ahead_wait: Recorded::read(from)?,
            overlay: Recorded::read(from)?,
            issued: Recorded::read(from)?,
            measured: Recorded::read(from)?,
            about: Box::new(Recorded::read(from)?),
            answer: Recorded::read(from)?,
            booked: SmallVec::new(),
        })
    }
}

recorded! {
    About { traits, aged_speed, since, slow_start_factor, returned_at, return_factor, recent_work, working_tokens }
    WorkerRank { worker, rank }
    EngineSpeed { work_tokens_per_second, step_seconds, request_seconds, block_seconds }
    RankLoad { active_blocks, read_blocks, prefill_tokens, requests }
    RankTraits { taints, lora_adapters, max_num_batched_tokens, total_kv_blocks }
    Wait { modelled, unmodelled_tokens }
    Added { blocks, read_blocks, prefill_tokens, prefill_duration }
    Ahead { number, added }
    Measured { speed, is_full }
}

recorded_variants! {
    Answer { 0 => Awaited {} 1 => Missed {} 2 => Given { load, shared_blocks } }
}
