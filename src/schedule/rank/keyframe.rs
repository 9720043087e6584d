//! The state of one rank in a keyframe.

use smallvec::SmallVec;

use super::{About, Ahead, Answer, Front, Measured, Rank};
use crate::load::{BoardLoad, BoardVersion, EngineSpeed, RankLoad};
use crate::protocol::WorkerRank;
use crate::record::bytes::{Reader, Recorded, put_words, recorded, recorded_variants, values};
use crate::schedule::view::{Added, View, Wait};
use crate::select::RankTraits;

values! {
    BoardLoad: load, to => put_words(to, &load.to_words()), |from: &mut Reader<'_>| from.words().map(BoardLoad::from_words);
    View: view, to => {
        (view.active_blocks, view.prefill_tokens).put(to);
        (view.requests, view.read_blocks).put(to);
    }, |from: &mut Reader<'_>| Some(View {
        active_blocks: Recorded::read(from)?,
        // The upper bound may be "at least `u64::MAX`".
        prefill_tokens: (from.count()?, from.number()?),
        requests: from.u32()?,
        read_blocks: from.u32()?,
    });
}

// Bookings are those of a batch in progress.
recorded! {
    Rank {
        front, rank, generation, about, seen, seen_at, peers, peer_tokens, ahead_wait, overlay, issued, measured, answer;
        booked: SmallVec::new()
    }
    Front { view, slot, settled; version: BoardVersion::default() }
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
