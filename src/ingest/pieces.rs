//! Splitting of batches into pieces of bounded cost.
//!
//! The pieces have the same effect in the same order. Each has at most a given number of blocks; an event without
//! blocks counts as one.

use crate::protocol::{KvEvent, RouterEvent};

/// Splits a batch into pieces of at most `blocks_max` blocks, at least 1. Longer events are split as well, each part of
/// a store behind the previous part. A store at the start of a prompt may be sixteen times as long: if it is a repeated one,
/// its parts would count as copies.
///
/// ```
/// use pointsman::internals::ingest::pieces;
/// use pointsman::protocol::{EngineHash, KvEvent, RouterEvent, StorageTier, WorkerId, WorkerRank};
///
/// let data = KvEvent::Removed { blocks: (0..5).map(EngineHash).collect() };
/// let event = RouterEvent { rank: WorkerRank::new(WorkerId(1), 0), tier: StorageTier::Device, data };
/// let lengths: Vec<usize> = pieces(vec![event], 2).iter().map(|piece| piece[0].data.block_count()).collect();
/// assert_eq!(lengths, [2, 2, 1]);
/// ```
#[must_use]
pub fn pieces(events: Vec<RouterEvent>, blocks_max: usize) -> Vec<Vec<RouterEvent>> {
    let blocks_max = blocks_max.max(1);
    if events.iter().map(weight).sum::<usize>() <= blocks_max {
        return vec![events];
    }
    let (mut pieces, mut piece, mut filled) = (Vec::new(), Vec::new(), 0);
    for event in events {
        for part in parts(event, blocks_max) {
            if filled > 0 && filled + weight(&part) > blocks_max {
                pieces.push(std::mem::take(&mut piece));
                filled = 0;
            }
            filled += weight(&part);
            piece.push(part);
        }
    }
    pieces.push(piece);
    pieces
}

fn weight(event: &RouterEvent) -> usize {
    event.data.block_count().max(1)
}

fn parts(event: RouterEvent, blocks_max: usize) -> Vec<RouterEvent> {
    let RouterEvent { rank, tier, data } = event;
    let of = |data| RouterEvent { rank, tier, data };
    let longer = if matches!(data, KvEvent::Stored { parent: None, .. }) { 16 } else { 1 };
    match data {
        data if data.block_count() <= longer * blocks_max => vec![of(data)],
        KvEvent::Stored { mut parent, blocks } => cut(&blocks, blocks_max)
            .map(|blocks| {
                let parent = std::mem::replace(&mut parent, blocks.last().map(|block| block.engine_hash));
                of(KvEvent::Stored { parent, blocks })
            })
            .collect(),
        KvEvent::Offloaded { mut parent, blocks } => cut(&blocks, blocks_max)
            .map(|blocks| {
                let parent = std::mem::replace(&mut parent, blocks.last().map(|(name, _)| *name));
                of(KvEvent::Offloaded { parent, blocks })
            })
            .collect(),
        KvEvent::Removed { blocks } => cut(&blocks, blocks_max).map(|blocks| of(KvEvent::Removed { blocks })).collect(),
        KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks } => cut(&blocks, blocks_max)
            .map(|blocks| of(KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks }))
            .collect(),
        KvEvent::GroupRemoved { group, blocks } => {
            cut(&blocks, blocks_max).map(|blocks| of(KvEvent::GroupRemoved { group, blocks })).collect()
        }
        data @ (KvEvent::Cleared | KvEvent::TierCleared) => vec![of(data)],
    }
}

fn cut<T: Clone>(blocks: &[T], blocks_max: usize) -> impl Iterator<Item = Vec<T>> {
    blocks.chunks(blocks_max).map(<[T]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{BlockHash, EngineHash, StorageTier, StoredBlock};

    #[test]
    fn a_store_at_the_start_of_a_prompt_keeps_its_form() {
        let store = |blocks| {
            let block = |n| StoredBlock { engine_hash: EngineHash(n), block_hash: BlockHash(n) };
            let data = KvEvent::Stored { parent: None, blocks: (0..blocks).map(block).collect() };
            RouterEvent { rank: crate::test_support::rank(0), tier: StorageTier::Device, data }
        };
        assert_eq!(pieces(vec![store(32)], 2), [[store(32)]]);
        assert_eq!(pieces(vec![store(33)], 2).len(), 17);
    }
}
