//! Splitting of batches into pieces of bounded cost.
//!
//! The pieces have the same effect in the same order. Each has at most a given number of blocks; an event without
//! blocks counts as one.

use crate::protocol::{KvEvent, RouterEvent};

/// Splits a batch into pieces of at most `blocks_max` blocks, at least 1. Longer events are split as well, each part of
/// a store behind the previous part.
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
            if filled + weight(&part) > blocks_max {
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
    match data {
        KvEvent::Stored { mut parent, blocks } if blocks.len() > blocks_max => blocks
            .chunks(blocks_max)
            .map(|part| {
                let parent = std::mem::replace(&mut parent, part.last().map(|block| block.engine_hash));
                of(KvEvent::Stored { parent, blocks: part.to_vec() })
            })
            .collect(),
        KvEvent::Offloaded { mut parent, blocks } if blocks.len() > blocks_max => blocks
            .chunks(blocks_max)
            .map(|part| {
                let parent = std::mem::replace(&mut parent, part.last().map(|(name, _)| *name));
                of(KvEvent::Offloaded { parent, blocks: part.to_vec() })
            })
            .collect(),
        KvEvent::Removed { blocks } if blocks.len() > blocks_max => {
            blocks.chunks(blocks_max).map(|part| of(KvEvent::Removed { blocks: part.to_vec() })).collect()
        }
        KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks } if blocks.len() > blocks_max => blocks
            .chunks(blocks_max)
            .map(|part| of(KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks: part.to_vec() }))
            .collect(),
        KvEvent::GroupRemoved { group, blocks } if blocks.len() > blocks_max => {
            blocks.chunks(blocks_max).map(|part| of(KvEvent::GroupRemoved { group, blocks: part.to_vec() })).collect()
        }
        data @ (KvEvent::Stored { .. }
        | KvEvent::Offloaded { .. }
        | KvEvent::Removed { .. }
        | KvEvent::Cleared
        | KvEvent::TierCleared
        | KvEvent::GroupStored { .. }
        | KvEvent::GroupRemoved { .. }) => vec![of(data)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{BlockHash, EngineHash, StorageTier, StoredBlock, WorkerId, WorkerRank};

    fn event(data: KvEvent) -> RouterEvent {
        RouterEvent { rank: WorkerRank::new(WorkerId(1), 0), tier: StorageTier::Device, data }
    }

    fn stored(parent: Option<u64>, names: std::ops::Range<u64>) -> RouterEvent {
        let blocks = names.map(|n| StoredBlock { engine_hash: EngineHash(n), block_hash: BlockHash(n) }).collect();
        event(KvEvent::Stored { parent: parent.map(EngineHash), blocks })
    }

    #[test]
    fn parts_of_a_store_are_chained() {
        let cut = pieces(vec![stored(Some(9), 10..15)], 2);
        assert_eq!(cut, [[stored(Some(9), 10..12)], [stored(Some(11), 12..14)], [stored(Some(13), 14..15)]]);
    }

    #[test]
    fn events_share_pieces_and_count_at_least_one_block() {
        let batch = vec![stored(None, 0..2), event(KvEvent::Cleared), stored(None, 2..4), event(KvEvent::Cleared)];
        assert_eq!(pieces(batch.clone(), 6), [&batch[..]]);
        let cut = pieces(batch.clone(), 3);
        assert_eq!(cut, [&batch[..2], &batch[2..]]);
        assert_eq!(pieces(batch.clone(), 0).len(), 6, "at least one block per piece");
        assert_eq!(pieces(Vec::new(), 3), [Vec::new()]);
    }
}
