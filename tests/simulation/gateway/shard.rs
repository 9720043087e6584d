//! Index shards: start of the shipped shell, its effects, and the contents of the engines' caches that it must equal.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::select::RankOverlap;
use pointsman::internals::shell::shard::{
    OverlapQueryToken, RegisteredRank, ShardCells, ShardEffect, ShardMsg, ShardShell, SourceState, shard_of,
};
use pointsman::internals::shell::supervisor::SupervisedRank;
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, Timestamp, WorkerRank};

use super::{Entry, Gateway, Surroundings};
use crate::letter::{Letter, OverlapJoin, Tag, ToShard};
use crate::net::Actor;

pub(super) struct Shard {
    pub(super) shell: ShardShell<EntrySource>,
    incarnation: u32,
    /// Contents that the index must have, by rank. Unknown ones are absent.
    pub(super) tags: BTreeMap<WorkerRank, Tag>,
}

/// A rank, as its shard and the supervisor see it.
pub(crate) struct EntrySource(pub(super) Rc<Entry>);

impl SupervisedRank for EntrySource {
    fn rank(&self) -> WorkerRank {
        self.0.rank
    }

    fn generation(&self) -> Generation {
        self.0.generation
    }

    fn is_indexed(&self) -> bool {
        self.0.cells.holdings.changed_at().is_some()
    }
}

impl SourceState for EntrySource {
    fn credited(&self, blocks: u32) -> u32 {
        self.0.credited(blocks)
    }

    fn is_read(&self) -> bool {
        true
    }
}

/// Overlap query with the overlaps of one shard.
pub(crate) struct OverlapQuery(Rc<OverlapJoin>, RefCell<Vec<RankOverlap>>);

impl OverlapQuery {
    pub(crate) fn new(join: &Rc<OverlapJoin>) -> Self {
        Self(Rc::clone(join), RefCell::default())
    }
}

impl OverlapQueryToken for OverlapQuery {
    fn hashes(&self) -> &[BlockHash] {
        &self.0.hashes
    }

    fn reusable_blocks(&self) -> u32 {
        u32::MAX
    }

    fn extend(&self, overlaps: impl Iterator<Item = RankOverlap>) {
        self.1.borrow_mut().extend(overlaps);
    }
}

impl Gateway {
    pub(super) fn start_shard(&mut self, shard: usize, incarnation: u32, cold: &[WorkerRank], now: Timestamp) {
        let is_here = |entry: &&Rc<Entry>| {
            self.shard_of(entry.rank) == shard && self.membership().worker_at(entry.slot).is_some()
        };
        let ranks = self.table().filter(is_here).map(registered);
        let current = Arc::clone(&self.shard_incarnations[shard]);
        current.set(incarnation);
        let cells = ShardCells { degraded: Arc::clone(&self.degraded), incarnation: (current, incarnation) };
        let shell = ShardShell::new(&self.settings.config, cells, ranks, cold.iter().copied().collect(), &now);
        self.shards[shard] = Some(Shard { shell, incarnation, tags: BTreeMap::new() });
    }

    pub(super) fn on_shard(&mut self, shard: usize, letter: ToShard, around: &mut Surroundings<'_>) {
        let Some(mut state) = self.shards[shard].take() else { return }; // the message is lost
        let (msg, tag) = match letter {
            ToShard::Step(msg, tag) => (msg, tag),
            ToShard::Dump(mut recorded, generation, tag) => {
                if let Some(dump) = state.shell.dump_rank(recorded.rank, generation) {
                    assert!(!state.shell.is_cold(recorded.rank), "a snapshot of {}, which is cold", recorded.rank);
                    (recorded.events, recorded.evicted_blocks) = (dump.events, dump.evicted_blocks);
                    self.disk.insert(recorded.rank, super::Recorded { snapshot: *recorded, tag });
                }
                self.shards[shard] = Some(state);
                return;
            }
        };
        let is_degraded = |entry: &&Rc<Entry>| entry.credit.get() < 1.0;
        self.degraded.store(self.table().filter(is_degraded).count(), std::sync::atomic::Ordering::Relaxed);
        let applied = state.before(&msg, tag);
        let removed = if let ShardMsg::Remove(rank) = &msg { Some(*rank) } else { None };
        let mut effects = Vec::new();
        state.shell.step(msg, &around.net.now, &mut effects);
        for effect in effects {
            match effect {
                ShardEffect::Replied(query) => self.check_overlaps(&state, query, around),
                ShardEffect::Resynced(rank) => {
                    let letter = Letter::Warmed(rank, state.incarnation);
                    self.send(Actor::Shard(shard), Actor::Supervisor, letter, around);
                }
                ShardEffect::Applied(_) => assert!(applied.is_some(), "events of an earlier generation were applied"),
                ShardEffect::UnknownRank(_) => {}
            }
        }
        let kept = removed.filter(|rank| state.shell.index().slot_of(*rank).is_some());
        assert!(kept.is_none(), "shard {shard} keeps {kept:?}, which is removed");
        if let Some((rank, tag)) = applied {
            state.after(rank, tag, around);
        }
        self.shards[shard] = Some(state);
    }

    /// Compares the overlaps of a query with the contents of the caches.
    fn check_overlaps(&self, state: &Shard, query: OverlapQuery, around: &Surroundings<'_>) {
        let OverlapQuery(join, found) = query;
        for found in found.into_inner() {
            let entry = self.entry(found.slot).filter(|entry| entry.generation == found.generation);
            if let (Some(entry), Some(prompt)) = (entry, &join.prompt)
                && let Some(tag) = state.tags.get(&entry.rank)
            {
                let held = around.engines[tag.engine].contents(tag);
                let truth = entry.credited(prompt.names().take_while(|name| held.contains(name)).count() as u32);
                let blocks = found.overlap.device_blocks;
                let is_true = if tag.is_exact { blocks == truth } else { blocks <= truth };
                assert!(is_true, "overlap of {} is {blocks} blocks, the engine holds {truth}", entry.rank);
            }
            join.found.borrow_mut().push(found);
        }
    }

    /// Number of the shard of a rank.
    pub(super) fn shard_of(&self, rank: WorkerRank) -> usize {
        shard_of(rank, self.shards.len())
    }
}

/// Registration of a rank at its shard.
pub(super) fn registered(entry: &Rc<Entry>) -> RegisteredRank<EntrySource> {
    let Entry { rank, slot, generation, .. } = **entry;
    let (holdings, source) = (Arc::clone(&entry.cells.holdings), EntrySource(Rc::clone(entry)));
    RegisteredRank { rank, slot, generation, holdings, source, capacity_blocks: None }
}

impl Shard {
    fn is_there(&self, rank: WorkerRank, (slot, generation): (Slot, Generation)) -> bool {
        let index = self.shell.index();
        index.slot_of(rank) == Some(slot) && index.generation(slot) == generation
    }

    /// Forgets the expected contents of other and removed ranks. Returns the rank of events to apply, with the expected
    /// contents.
    fn before(
        &mut self,
        msg: &ShardMsg<OverlapQuery, (), EntrySource>,
        tag: Option<Tag>,
    ) -> Option<(WorkerRank, Option<Tag>)> {
        match msg {
            ShardMsg::Apply { events, only, .. } => {
                let rank = events.first()?.rank;
                let is_clear = matches!(events[..], [RouterEvent { data: KvEvent::Cleared, .. }]);
                // Contents that began before the start of this shard are unknown.
                let is_known = is_clear || !self.shell.is_cold(rank) && self.tags.contains_key(&rank);
                only.filter(|place| self.is_there(rank, *place)).map(|_| (rank, tag.filter(|_| is_known)))
            }
            ShardMsg::Register(RegisteredRank { rank, slot, generation, .. }) => {
                let place = (*slot, *generation);
                // A rank of an earlier generation is not registered.
                if !self.is_there(*rank, place) && self.shell.index().generation(*slot) <= *generation {
                    self.tags.remove(rank);
                }
                None
            }
            ShardMsg::Remove(rank) => {
                self.tags.remove(rank);
                None
            }
            _ => None,
        }
    }

    /// Compares the names of a rank with the contents of its engine's cache.
    fn after(&mut self, rank: WorkerRank, tag: Option<Tag>, around: &Surroundings<'_>) {
        let Some(tag) = tag.filter(|_| !self.shell.is_cold(rank)) else {
            self.tags.remove(&rank);
            return;
        };
        self.tags.insert(rank, tag);
        let truth = around.engines[tag.engine].contents(&tag);
        let names = self.shell.index().names_of(rank);
        if tag.is_exact {
            assert_eq!(names.len(), truth.len(), "blocks of {rank} at {tag:?}: index {names:?}, engine {truth:?}");
        }
        let is_held =
            |(tier, EngineHash(name)): &(StorageTier, EngineHash)| *tier == StorageTier::Device && truth.contains(name);
        let other = names.iter().find(|name| !is_held(name));
        assert!(other.is_none(), "index of {rank} has {other:?} at {tag:?}, the engine does not");
    }
}
