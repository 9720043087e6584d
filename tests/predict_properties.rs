//! Speculative entries compared with slow literal models, decision by decision.
//!
//! Prompts are short and made of few blocks, so they share prefixes, contain each other and recur. There are two
//! models: a list of remembered prompts for both kinds that age, and a list of block copies for the modeled LRU.
//! `PROPTEST_CASES` sets the number of cases.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::predict::{SpeculationCounts, SpeculationModel, SpeculativePrompt, SpeculativePrompts};
use pointsman::internals::protocol::{BookingId, Generation, Slot};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, Timestamp, WorkerId, WorkerRank,
};
use proptest::prelude::*;
use proptest::sample::Index as Pick;

const RANKS: u64 = 3;
const TTL_MS: u64 = 100;
const TTL: Duration = Duration::from_millis(TTL_MS);

type Prompt = Vec<u64>;

#[derive(Clone, Debug)]
enum Op {
    Route { rank: u64, stale: bool, prompt: Prompt, private: u32, booked: bool },
    Output { pick: Pick, blocks: u32 },
    Release { pick: Pick },
    Wait { ms: u64 },
    Store { rank: u64, prompt: Prompt, from: Pick, lower_tier: bool },
    Evict { rank: u64, prompt: Prompt, from: Pick },
    Clear { rank: u64 },
    Seat { rank: u64, slot: u32, generation: u32, capacity: Option<u32> },
    Remove { rank: u64 },
}

fn prompt() -> impl Strategy<Value = Prompt> {
    prop::collection::vec(0..2_u64, 0..9)
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let rank = 0..RANKS;
    let route = (rank.clone(), prop::bool::weighted(0.05), prompt(), 0..3_u32, prop::bool::weighted(0.8));
    let store = (rank.clone(), prompt(), any::<Pick>(), prop::bool::weighted(0.2));
    let seat = (rank.clone(), 0..4_u32, 1..4_u32, prop::option::weighted(0.7, 0..16_u32));
    let op = prop_oneof![
        20 => route.prop_map(|(rank, stale, prompt, private, booked)| Op::Route { rank, stale, prompt, private, booked }),
        4 => (any::<Pick>(), 0..4_u32).prop_map(|(pick, blocks)| Op::Output { pick, blocks }),
        12 => any::<Pick>().prop_map(|pick| Op::Release { pick }),
        6 => (0..TTL_MS).prop_map(|ms| Op::Wait { ms }),
        10 => store.prop_map(|(rank, prompt, from, lower_tier)| Op::Store { rank, prompt, from, lower_tier }),
        5 => (rank.clone(), prompt(), any::<Pick>()).prop_map(|(rank, prompt, from)| Op::Evict { rank, prompt, from }),
        1 => rank.clone().prop_map(|rank| Op::Clear { rank }),
        1 => seat.prop_map(|(rank, slot, generation, capacity)| Op::Seat { rank, slot, generation, capacity }),
        1 => rank.prop_map(|rank| Op::Remove { rank }),
    ];
    prop::collection::vec(op, 1..80)
}

fn name_of(rank: u64) -> WorkerRank {
    WorkerRank::new(WorkerId(rank), 0)
}

fn hashes(prompt: &[u64]) -> Vec<BlockHash> {
    prompt.iter().copied().map(BlockHash).collect()
}

/// Engines derive a block's name from its content and its prefix.
fn engine_hash(prefix: &[u64]) -> EngineHash {
    EngineHash(prefix.iter().fold(1, |name, block| name << 2 | block))
}

fn held(index: &Index, slot: u32, prompt: &[u64]) -> usize {
    let mut overlaps = Overlaps::default();
    index.overlaps(&hashes(prompt), &mut overlaps);
    overlaps.hits().iter().find(|hit| hit.slot == Slot(slot)).map_or(0, |hit| hit.device_blocks as usize)
}

/// Operations and queries of a model.
trait Model {
    fn register(&mut self, rank: u64, capacity: Option<u64>, anew: bool);
    fn remove(&mut self, rank: u64);
    fn route(&mut self, rank: u64, prompt: &[u64], booking: Option<(BookingId, u32)>, real: usize, now: u64);
    fn output(&mut self, _: BookingId, _: u32) {}
    fn release(&mut self, _: BookingId) {}
    fn expire(&mut self, now: u64);
    /// The rank's events have changed its blocks. `depth` returns the new overlap of a prompt.
    fn observe(&mut self, _: u64, _cleared: bool, _depth: &dyn Fn(&[u64]) -> usize) {}
    fn depth(&self, rank: u64, prompt: &[u64]) -> usize;
    fn believed(&self) -> usize;
    fn counts(&self) -> SpeculationCounts;
}

/// Prompts that age.
struct Remembered {
    beside_events: bool,
    blocks_max: usize,
    stamps: u64,
    ranks: BTreeMap<u64, AgingRank>,
    counts: SpeculationCounts,
}

#[derive(Default)]
struct AgingRank {
    /// Oldest first.
    prompts: Vec<Memory>,
    /// Every remembered prefix, and whether it was speculative.
    blocks: BTreeMap<Prompt, bool>,
    /// Time at which each prefix was last routed to this rank, even if its entry has ended.
    last_routed: BTreeMap<Prompt, u64>,
}

struct Memory {
    prompt: Prompt,
    stamp: u64,
    at: u64,
    real: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Why {
    Confirmed,
    Expired,
    Retracted,
    Evicted,
}

impl Remembered {
    fn drop_one(&mut self, rank: u64, at: usize, why: Why) {
        let of_rank = self.ranks.get_mut(&rank).expect("a rank");
        let gone = of_rank.prompts.remove(at);
        for blocks in 1..=gone.prompt.len() {
            let prefix = &gone.prompt[..blocks];
            if of_rank.prompts.iter().any(|memory| memory.prompt.starts_with(prefix)) {
                continue;
            }
            if !of_rank.blocks.remove(prefix).expect("remembered prompts are indexed") {
                continue;
            }
            *match why {
                Why::Confirmed => &mut self.counts.confirmed,
                Why::Expired if !self.beside_events => &mut self.counts.expired,
                Why::Expired if blocks <= gone.real => &mut self.counts.confirmed,
                Why::Expired => &mut self.counts.wrong,
                Why::Retracted => &mut self.counts.retracted,
                Why::Evicted => &mut self.counts.evicted,
            } += 1;
        }
    }

    fn forget(&mut self, rank: u64) {
        while self.ranks.get(&rank).is_some_and(|of_rank| !of_rank.prompts.is_empty()) {
            self.drop_one(rank, 0, Why::Retracted);
        }
    }
}

impl Model for Remembered {
    fn register(&mut self, rank: u64, _: Option<u64>, anew: bool) {
        if anew {
            self.forget(rank);
            self.ranks.insert(rank, AgingRank::default());
        }
    }

    fn remove(&mut self, rank: u64) {
        self.forget(rank);
        self.ranks.remove(&rank);
    }

    fn route(&mut self, rank: u64, prompt: &[u64], _: Option<(BookingId, u32)>, real: usize, now: u64) {
        let Some(of_rank) = self.ranks.get_mut(&rank) else { return };
        for blocks in 1..=prompt.len() {
            of_rank.last_routed.insert(prompt[..blocks].to_vec(), now);
        }
        if real == prompt.len() {
            return;
        }
        for blocks in 1..=prompt.len() {
            of_rank.blocks.entry(prompt[..blocks].to_vec()).or_insert_with(|| {
                self.counts.speculated += u64::from(blocks > real);
                blocks > real
            });
        }
        of_rank.prompts.retain(|memory| !prompt.starts_with(&memory.prompt));
        self.stamps += 1;
        of_rank.prompts.push(Memory { prompt: prompt.to_vec(), stamp: self.stamps, at: now, real });
        let named = |model: &Self| -> usize {
            model.ranks.values().flat_map(|of_rank| &of_rank.prompts).map(|memory| memory.prompt.len()).sum()
        };
        while named(self) > self.blocks_max {
            let oldest = |(rank, of_rank): (&u64, &AgingRank)| Some((of_rank.prompts.first()?.stamp, *rank));
            let (_, rank) = self.ranks.iter().filter_map(oldest).min().expect("not empty");
            self.drop_one(rank, 0, Why::Evicted);
        }
    }

    fn expire(&mut self, now: u64) {
        for rank in 0..RANKS {
            while let Some(oldest) = self.ranks.get(&rank).and_then(|of_rank| of_rank.prompts.first())
                && oldest.at + TTL_MS <= now
            {
                self.drop_one(rank, 0, Why::Expired);
            }
            let Some(of_rank) = self.ranks.get_mut(&rank) else { continue };
            of_rank.last_routed.retain(|_, at| *at + TTL_MS > now);
            if !self.beside_events && self.counts.evicted == 0 {
                let believed: Vec<_> = of_rank.blocks.keys().collect();
                assert_eq!(believed, of_rank.last_routed.keys().collect::<Vec<_>>(), "the models agree");
            }
        }
    }

    fn observe(&mut self, rank: u64, cleared: bool, depth: &dyn Fn(&[u64]) -> usize) {
        if !self.beside_events {
            return;
        }
        if cleared {
            return self.forget(rank);
        }
        let mut at = 0;
        while let Some(memory) = self.ranks.get_mut(&rank).and_then(|of_rank| of_rank.prompts.get_mut(at)) {
            let real = depth(&memory.prompt);
            if real == memory.prompt.len() {
                self.drop_one(rank, at, Why::Confirmed);
            } else if real < memory.real {
                self.drop_one(rank, at, Why::Retracted);
            } else {
                memory.real = real;
                at += 1;
            }
        }
    }

    fn depth(&self, rank: u64, prompt: &[u64]) -> usize {
        let Some(of_rank) = self.ranks.get(&rank) else { return 0 };
        (1..=prompt.len()).take_while(|blocks| of_rank.blocks.contains_key(&prompt[..*blocks])).count()
    }

    fn believed(&self) -> usize {
        self.ranks.values().map(|of_rank| of_rank.blocks.len()).sum()
    }

    fn counts(&self) -> SpeculationCounts {
        self.counts
    }
}

/// Block copies in caches of known capacity. Entries of ranks without a capacity age.
struct Copies {
    aging: Remembered,
    ranks: BTreeMap<u64, CappedRank>,
    bookings: BTreeMap<BookingId, (u64, Prompt, u32)>,
    epochs: u64,
    speculated: u64,
    evicted: u64,
    retracted: u64,
}

#[derive(Default)]
struct CappedRank {
    capacity: u64,
    /// Users, and the epoch of the last release.
    blocks: BTreeMap<Prompt, (u32, u64)>,
    /// Released private blocks: epoch, position, id.
    private: BTreeSet<(u64, Reverse<usize>, u64)>,
    ids: u64,
}

impl Copies {
    fn acquire(&mut self, rank: u64, prompt: &[u64]) {
        let of_rank = self.ranks.get_mut(&rank).expect("a capped rank");
        for blocks in 1..=prompt.len() {
            let block = of_rank.blocks.entry(prompt[..blocks].to_vec()).or_insert_with(|| {
                self.speculated += 1;
                (0, 0)
            });
            block.0 += 1;
        }
    }

    fn give_back(&mut self, rank: u64, prompt: &[u64], private: u32) {
        self.epochs += 1;
        let of_rank = self.ranks.get_mut(&rank).expect("a capped rank");
        for blocks in 1..=prompt.len() {
            let block = of_rank.blocks.get_mut(&prompt[..blocks]).expect("blocks in use stay");
            *block = (block.0 - 1, self.epochs);
        }
        for n in 0..private as usize {
            of_rank.ids += 1;
            of_rank.private.insert((self.epochs, Reverse(prompt.len() + 1 + n), of_rank.ids));
        }
    }

    fn evict(&mut self, rank: u64) {
        loop {
            let of_rank = self.ranks.get_mut(&rank).expect("a capped rank");
            let in_use = self.bookings.values().filter(|(at, ..)| *at == rank).map(|(.., private)| *private as usize);
            let resident = of_rank.blocks.len() + of_rank.private.len() + in_use.sum::<usize>();
            if resident as u64 <= of_rank.capacity {
                return;
            }
            let idle = of_rank.blocks.iter().filter(|(_, (users, _))| *users == 0);
            let block = idle.map(|(prefix, (_, epoch))| (*epoch, Reverse(prefix.len()), prefix.clone())).min();
            let private = of_rank.private.first().copied();
            match (block, private) {
                (Some((epoch, at, _)), Some(private)) if (private.0, private.1) < (epoch, at) => {
                    of_rank.private.remove(&private);
                }
                (Some((.., prefix)), _) => {
                    of_rank.blocks.remove(&prefix);
                    self.evicted += 1;
                }
                (None, Some(private)) => drop(of_rank.private.remove(&private)),
                (None, None) => return,
            }
        }
    }
}

impl Model for Copies {
    fn register(&mut self, rank: u64, capacity: Option<u64>, anew: bool) {
        let was_capped = self.ranks.contains_key(&rank);
        match capacity {
            Some(capacity) if was_capped && !anew => {
                self.ranks.get_mut(&rank).expect("known").capacity = capacity;
                self.evict(rank);
            }
            Some(capacity) => {
                self.remove(rank);
                self.ranks.insert(rank, CappedRank { capacity, ..CappedRank::default() });
            }
            None => {
                let anew = anew || was_capped;
                if anew {
                    self.remove(rank);
                }
                self.aging.register(rank, None, anew);
            }
        }
    }

    fn remove(&mut self, rank: u64) {
        self.aging.remove(rank);
        self.bookings.retain(|_, (at, ..)| *at != rank);
        self.retracted += self.ranks.remove(&rank).map_or(0, |of_rank| of_rank.blocks.len() as u64);
    }

    fn route(&mut self, rank: u64, prompt: &[u64], booking: Option<(BookingId, u32)>, _: usize, now: u64) {
        if !self.ranks.contains_key(&rank) {
            return self.aging.route(rank, prompt, None, 0, now);
        }
        self.acquire(rank, prompt);
        match booking {
            Some((booking, private)) => drop(self.bookings.insert(booking, (rank, prompt.to_vec(), private))),
            None => self.give_back(rank, prompt, 0),
        }
        self.evict(rank);
    }

    fn output(&mut self, booking: BookingId, blocks: u32) {
        let Some((rank, _, private)) = self.bookings.get_mut(&booking) else { return };
        *private += blocks;
        let rank = *rank;
        self.evict(rank);
    }

    fn release(&mut self, booking: BookingId) {
        let Some((rank, prompt, private)) = self.bookings.remove(&booking) else { return };
        self.give_back(rank, &prompt, private);
        self.evict(rank);
    }

    fn expire(&mut self, now: u64) {
        self.aging.expire(now);
    }

    fn depth(&self, rank: u64, prompt: &[u64]) -> usize {
        let Some(of_rank) = self.ranks.get(&rank) else { return self.aging.depth(rank, prompt) };
        (1..=prompt.len()).take_while(|blocks| of_rank.blocks.contains_key(&prompt[..*blocks])).count()
    }

    fn believed(&self) -> usize {
        self.aging.believed() + self.ranks.values().map(|of_rank| of_rank.blocks.len()).sum::<usize>()
    }

    fn counts(&self) -> SpeculationCounts {
        let aging = self.aging.counts;
        SpeculationCounts {
            speculated: aging.speculated + self.speculated,
            evicted: aging.evicted + self.evicted,
            retracted: aging.retracted + self.retracted,
            ..aging
        }
    }
}

/// The implementation beside its model.
struct Run<M> {
    model: M,
    lru: bool,
    predictions: SpeculativePrompts,
    index: Index,
    /// By rank: slot, generation, capacity.
    seats: BTreeMap<u64, (u32, u32, Option<u32>)>,
    bookings: Vec<BookingId>,
    routed: u64,
    now_ms: u64,
}

impl<M: Model> Run<M> {
    fn new(kind: SpeculationModel, blocks_max: u64, model: M) -> Self {
        let mut run = Self {
            model,
            lru: matches!(kind, SpeculationModel::Lru(_)),
            predictions: SpeculativePrompts::new(kind, blocks_max),
            index: Index::new(),
            seats: BTreeMap::new(),
            bookings: Vec::new(),
            routed: 0,
            now_ms: 0,
        };
        for rank in 0..RANKS {
            run.seat(rank, rank as u32, 1, (rank < 2).then_some(10));
        }
        run
    }

    fn now(&self) -> Timestamp {
        Timestamp::default() + Duration::from_millis(self.now_ms)
    }

    fn seat(&mut self, rank: u64, slot: u32, generation: u32, capacity: Option<u32>) {
        let occupant = self.seats.iter().find(|(_, seat)| seat.0 == slot).map(|(rank, seat)| (*rank, *seat));
        self.predictions.register(name_of(rank), Slot(slot), Generation(generation), capacity);
        self.index.register(name_of(rank), Slot(slot), Generation(generation));
        let mut anew = true;
        match occupant {
            Some((_, (_, seated, _))) if seated > generation => return,
            Some((there, (_, seated, _))) if (there, seated) == (rank, generation) => anew = false,
            Some((there, _)) => {
                self.seats.remove(&there);
                self.model.remove(there);
            }
            None => {}
        }
        self.seats.insert(rank, (slot, generation, capacity));
        self.model.register(rank, capacity.map(u64::from), anew);
    }

    fn held(&self, rank: u64, prompt: &[u64]) -> usize {
        self.seats.get(&rank).map_or(0, |(slot, ..)| held(&self.index, *slot, prompt))
    }

    fn apply(&mut self, rank: u64, tier: StorageTier, data: KvEvent) {
        let event = RouterEvent { rank: name_of(rank), tier, data };
        self.index.apply(&event);
        self.predictions.observe(&event, &self.index);
        let Self { model, index, seats, .. } = self;
        let depth = |prompt: &[u64]| seats.get(&rank).map_or(0, |(slot, ..)| held(index, *slot, prompt));
        if tier == StorageTier::Device {
            model.observe(rank, event.data == KvEvent::Cleared, &depth);
        }
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Route { rank, stale, prompt, private, booked } => {
                let Some((slot, generation, capacity)) = self.seats.get(rank).copied() else { return };
                let generation = if *stale { generation - 1 } else { generation };
                let booking = booked.then_some(BookingId(self.routed));
                self.routed += 1;
                let guess = SpeculativePrompt { hashes: hashes(prompt).into(), private_blocks: *private };
                let real = self.held(*rank, prompt);
                let is_claimed = self.lru && capacity.is_some() && *booked;
                for _again in 0..if is_claimed { 2 } else { 1 } {
                    let (slot, generation) = (Slot(slot), Generation(generation));
                    self.predictions.routed(slot, generation, booking, &guess, &self.index, self.now());
                }
                if *stale {
                    return;
                }
                self.bookings.extend(booking);
                self.model.route(*rank, prompt, booking.map(|booking| (booking, *private)), real, self.now_ms);
            }
            Op::Output { pick, blocks } => {
                let Some(booking) = self.pick(pick) else { return };
                self.predictions.output_blocks(booking, *blocks);
                self.model.output(booking, *blocks);
            }
            Op::Release { pick } => {
                let Some(booking) = self.pick(pick) else { return };
                self.predictions.released(booking, self.now());
                self.model.release(booking);
            }
            Op::Wait { ms } => {
                self.now_ms += ms;
                self.predictions.expire(self.now());
                self.model.expire(self.now_ms);
            }
            Op::Store { rank, prompt, from, lower_tier } => {
                let from = from.index(prompt.len() + 1);
                let block = |n: usize| StoredBlock {
                    engine_hash: engine_hash(&prompt[..=n]),
                    block_hash: BlockHash(prompt[n]),
                };
                let parent = (from > 0).then(|| engine_hash(&prompt[..from]));
                let tier = if *lower_tier { StorageTier::Disk } else { StorageTier::Device };
                self.apply(*rank, tier, KvEvent::Stored { parent, blocks: (from..prompt.len()).map(block).collect() });
            }
            Op::Evict { rank, prompt, from } => {
                let from = from.index(prompt.len() + 1);
                let blocks = (from..prompt.len()).map(|n| engine_hash(&prompt[..=n])).collect();
                self.apply(*rank, StorageTier::Device, KvEvent::Removed { blocks });
            }
            Op::Clear { rank } => self.apply(*rank, StorageTier::Device, KvEvent::Cleared),
            Op::Seat { rank, slot, generation, capacity } => self.seat(*rank, *slot, *generation, *capacity),
            Op::Remove { rank } => {
                self.predictions.remove_rank(name_of(*rank));
                self.index.remove_rank(name_of(*rank));
                self.seats.remove(rank);
                self.model.remove(*rank);
            }
        }
    }

    fn pick(&self, pick: &Pick) -> Option<BookingId> {
        (!self.bookings.is_empty()).then(|| self.bookings[pick.index(self.bookings.len())])
    }

    fn check(&self, probes: &[Prompt]) {
        self.predictions.check_invariants();
        assert_eq!(self.predictions.speculative_blocks(), self.model.believed() as u64);
        assert_eq!(self.predictions.counts(), self.model.counts());
        let mut overlaps = Overlaps::default();
        for probe in probes {
            self.index.overlaps(&hashes(probe), &mut overlaps);
            self.predictions.merge_into(&hashes(probe), &mut overlaps);
            assert!(overlaps.hits().is_sorted_by(|a, b| a.slot < b.slot), "in slot order");
            for (rank, (slot, generation, _)) in &self.seats {
                let hit = overlaps.hits().iter().find(|hit| hit.slot == Slot(*slot));
                let expected = self.model.depth(*rank, probe).max(self.held(*rank, probe));
                assert_eq!(hit.map_or(0, |hit| hit.device_blocks as usize), expected, "{rank} on {probe:?}");
                assert!(hit.is_none_or(|hit| hit.generation == Generation(*generation)));
            }
        }
    }

    fn play(mut self, ops: &[Op]) {
        let prompt_of = |op: &Op| if let Op::Route { prompt, .. } = op { Some(prompt.clone()) } else { None };
        let probes: Vec<_> = ops.iter().filter_map(prompt_of).take(12).collect();
        for op in ops {
            self.step(op);
            self.check(&probes);
        }
        for rank in 0..RANKS {
            self.step(&Op::Remove { rank });
        }
        self.check(&probes);
        assert_eq!(self.predictions.speculative_blocks(), 0, "all state is freed");
    }
}

fn remembered(beside_events: bool, blocks_max: usize) -> Remembered {
    let (ranks, counts) = (BTreeMap::new(), SpeculationCounts::default());
    Remembered { beside_events, blocks_max, stamps: 0, ranks, counts }
}

/// Operations of engines that send no events.
fn without_events(ops: Vec<Op>) -> Vec<Op> {
    ops.into_iter().filter(|op| !matches!(op, Op::Store { .. } | Op::Evict { .. } | Op::Clear { .. })).collect()
}

proptest! {
    #[test]
    fn speculative_prompts_last_their_time_to_live(ops in ops(), blocks_max in prop_oneof![Just(1_000_usize), 0..40_usize]) {
        Run::new(SpeculationModel::Ttl(TTL), blocks_max as u64, remembered(false, blocks_max)).play(&without_events(ops));
    }

    #[test]
    fn a_modelled_cache_matches_its_reference(ops in ops()) {
        let (ranks, bookings) = (BTreeMap::new(), BTreeMap::new());
        let aging = remembered(false, usize::MAX);
        let model = Copies { aging, ranks, bookings, epochs: 0, speculated: 0, evicted: 0, retracted: 0 };
        Run::new(SpeculationModel::Lru(TTL), u64::MAX, model).play(&without_events(ops));
    }

    #[test]
    fn speculative_entries_end_confirmed_wrong_retracted_or_evicted(
        ops in ops(),
        blocks_max in prop_oneof![Just(1_000_usize), 0..40_usize],
    ) {
        let model = remembered(true, blocks_max);
        Run::new(SpeculationModel::BesideEvents(TTL), blocks_max as u64, model).play(&ops);
    }
}
