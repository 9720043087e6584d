//! Shell of an index shard, with the contents of the engines' caches that it must equal.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use pointsman::index::{Index, Overlaps};
use pointsman::protocol::{EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier, WorkerRank};
use pointsman::select::{RankOverlap, TierOverlap};

use super::{Gateway, Surroundings};
use crate::letter::{Letter, OverlapJoin, Tag};
use crate::net::Actor;

pub(super) struct Shard {
    pub(super) index: Index,
    found: Overlaps,
    /// Ranks whose contents were lost and must be sent again.
    pub(super) cold: BTreeSet<WorkerRank>,
    incarnation: u32,
    /// Contents that the index must have, by rank. Unknown ones are absent.
    pub(super) tags: BTreeMap<WorkerRank, Tag>,
}

impl Gateway {
    pub(super) fn start_shard(&mut self, shard: usize, incarnation: u32, cold: &[WorkerRank]) {
        let mut index = Index::new();
        for entry in self.table.values() {
            if self.shard_of(entry.rank) == shard && self.membership.worker_at(entry.slot).is_some() {
                index.register(entry.rank, entry.slot, entry.generation);
            }
        }
        let cold = cold.iter().copied().collect();
        let (found, tags) = (Overlaps::default(), BTreeMap::new());
        self.shards[shard] = Some(Shard { index, found, cold, incarnation, tags });
    }

    pub(super) fn on_shard(&mut self, shard: usize, letter: Letter, around: &mut Surroundings<'_>) {
        let Some(mut state) = self.shards[shard].take() else { return }; // the message is lost
        match letter {
            Letter::Overlap(join) => self.on_overlap(&mut state, &join, around),
            Letter::Apply { events, only, tag } => {
                for rank in state.apply(&events, only, tag) {
                    let letter = Letter::Warmed(rank, state.incarnation);
                    self.send(Actor::Shard(shard), Actor::Supervisor, letter, around);
                }
                if let Some(event) = events.first() {
                    state.check(event.rank, around);
                    if let Some(entry) = self.table.get(&only.0).filter(|entry| entry.generation == only.1)
                        && let Some(slot) = state.index.slot_of(event.rank)
                    {
                        entry.cells.holdings.publish(state.index.held_blocks_of(slot), around.net.now);
                    }
                }
            }
            Letter::Register(entry) => {
                let place = (Some(entry.slot), entry.generation);
                let known = (state.index.slot_of(entry.rank), state.index.generation(entry.slot));
                if state.index.register(entry.rank, entry.slot, entry.generation) && known != place {
                    state.tags.remove(&entry.rank);
                }
            }
            Letter::Unregister(rank) => {
                state.index.remove_rank(rank);
                state.tags.remove(&rank);
            }
            Letter::Dump(mut recorded, generation, tag) => {
                let slot = state.index.slot_of(recorded.rank);
                let is_known = slot.is_some_and(|slot| state.index.generation(slot) == generation)
                    && !state.cold.contains(&recorded.rank);
                if let Some(dump) = state.index.dump_rank(recorded.rank).filter(|_| is_known) {
                    (recorded.events, recorded.evicted_blocks) = (dump.events, dump.evicted_blocks);
                    self.disk.insert(recorded.rank, super::Recorded { snapshot: *recorded, tag });
                }
            }
            _ => unreachable!("no message of a shard"),
        }
        self.shards[shard] = Some(state);
    }

    /// Replies to an overlap query, and compares the reply with the contents of the caches.
    fn on_overlap(&self, state: &mut Shard, join: &Rc<OverlapJoin>, around: &Surroundings<'_>) {
        state.index.overlaps(&join.hashes, &mut state.found);
        for hit in state.found.hits() {
            let entry = self.table.get(&hit.slot).filter(|entry| entry.generation == state.index.generation(hit.slot));
            if let (Some(entry), Some(prompt)) = (entry, &join.prompt)
                && let Some(tag) = state.tags.get(&entry.rank)
            {
                let held = around.engines[tag.engine].contents(tag);
                let truth = prompt.names().take_while(|name| held.contains(name)).count();
                let is_true = if tag.is_exact {
                    hit.device_blocks as usize == truth
                } else {
                    hit.device_blocks as usize <= truth
                };
                assert!(is_true, "overlap of {} is {} blocks, the engine holds {truth}", entry.rank, hit.device_blocks);
            }
            let credit = entry.map_or(1.0, |entry| entry.credit.get());
            let device_blocks = (f64::from(hit.device_blocks) * credit) as u32;
            let overlap = TierOverlap { device_blocks, ..TierOverlap::default() };
            let generation = state.index.generation(hit.slot);
            join.found.borrow_mut().push(RankOverlap { slot: hit.slot, generation, overlap });
        }
    }
}

impl Shard {
    /// Applies the events of one rank. Returns ranks whose contents begin to arrive again.
    fn apply(&mut self, events: &[RouterEvent], only: (Slot, Generation), tag: Option<Tag>) -> Vec<WorkerRank> {
        let Some(rank) = events.first().map(|event| event.rank) else { return Vec::new() };
        if self.index.slot_of(rank) != Some(only.0) || self.index.generation(only.0) != only.1 {
            return Vec::new();
        }
        let mut warmed = Vec::new();
        for event in events {
            self.index.apply(event);
            if matches!(event.data, KvEvent::Cleared) && self.cold.remove(&rank) {
                warmed.push(rank);
            }
        }
        let is_clear = matches!(events, [RouterEvent { data: KvEvent::Cleared, .. }]);
        // Contents that began before the start of this shard are unknown.
        if self.cold.contains(&rank) || !is_clear && !self.tags.contains_key(&rank) {
            self.tags.remove(&rank);
        } else if let Some(tag) = tag {
            self.tags.insert(rank, tag);
        } else {
            self.tags.remove(&rank);
        }
        warmed
    }

    /// Compares the names of a rank with the contents of its engine's cache.
    fn check(&self, rank: WorkerRank, around: &Surroundings<'_>) {
        let Some(tag) = self.tags.get(&rank) else { return };
        let truth = around.engines[tag.engine].contents(tag);
        let names = self.index.names_of(rank);
        if tag.is_exact {
            assert_eq!(names.len(), truth.len(), "blocks of {rank} at {tag:?}: index {names:?}, engine {truth:?}");
        }
        let is_held =
            |(tier, EngineHash(name)): &(StorageTier, EngineHash)| *tier == StorageTier::Device && truth.contains(name);
        let other = names.iter().find(|name| !is_held(name));
        assert!(other.is_none(), "index of {rank} has {other:?} at {tag:?}, the engine does not");
    }
}
