//! Replay of the pure scheduler: the same inputs, times and load reads give the same effects, even if the loads change
//! concurrently during the recorded run.

use pointsman::internals::config::{OverloadConfig, QueueConfig, SlowStartConfig};
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::vec::IntoIter;

use pointsman::RouterConfig;
use pointsman::internals::engine_load::EngineLoad;
use pointsman::internals::load::{BoardLoad, BoardVersion, PromptBlocks, RankLoad, SpeedCell, SpeedSample};
use pointsman::internals::protocol::{BookingId, Generation, SequenceHash, Slot};
use pointsman::internals::schedule::{
    Admission, Effect, Extensions, Input, LiveLoads, LoadAnswer, LoadView, Purpose, RankCells, Request, Schedule, Waits,
};
use pointsman::policy::Policy;
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
use pointsman::test_support::mix;
use pointsman::{
    RankTraits,
    internals::select::{RankOverlap, TierOverlap},
};

use crate::changing_cells;

const RANKS: u32 = 6;
const INPUTS: u64 = 1_500;

/// One result of a [`LoadView`].
#[derive(Clone, Copy, Debug, PartialEq)]
enum LoadRead {
    /// One of the slots that may have changed, or their end.
    Changed,
    ChangedEnd,
    Board(Option<BoardLoad>, BoardVersion),
    Speed(SpeedSample),
    HeldBlocks(u32),
    IndexChangedAt(Option<Timestamp>),
    EngineLoad(Option<EngineLoad>),
}

/// Records every read of the live cells.
struct RecordingLoads<'a> {
    live: &'a LiveLoads,
    reads: RefCell<Vec<(Slot, LoadRead)>>,
}

impl RecordingLoads<'_> {
    fn record<R: Copy>(&self, slot: Slot, value: R, read: impl Fn(R) -> LoadRead) -> R {
        self.reads.borrow_mut().push((slot, read(value)));
        value
    }
}

impl LoadView for RecordingLoads<'_> {
    fn take_changed(&self, changed: &mut Vec<Slot>) {
        let before = changed.len();
        self.live.take_changed(changed);
        let mut reads = self.reads.borrow_mut();
        reads.extend(changed[before..].iter().map(|slot| (*slot, LoadRead::Changed)));
        reads.push((Slot(0), LoadRead::ChangedEnd));
    }

    fn board(&self, slot: Slot, seen: &mut BoardVersion) -> Option<BoardLoad> {
        let load = self.live.board(slot, seen);
        self.record(slot, load, |load| LoadRead::Board(load, *seen))
    }

    fn with_speed<R>(&self, slot: Slot, read: impl FnOnce(&SpeedCell) -> R) -> R {
        let sample = self.live.with_speed(slot, SpeedCell::sample);
        read(&cell_of(&self.record(slot, sample, LoadRead::Speed)))
    }

    fn held_blocks(&self, slot: Slot) -> u32 {
        self.record(slot, self.live.held_blocks(slot), LoadRead::HeldBlocks)
    }

    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp> {
        self.record(slot, self.live.index_changed_at(slot), LoadRead::IndexChangedAt)
    }

    fn engine_load(&self, slot: Slot) -> Option<EngineLoad> {
        self.record(slot, self.live.engine_load(slot), LoadRead::EngineLoad)
    }
}

fn cell_of(sample: &SpeedSample) -> SpeedCell {
    let cell = SpeedCell::default();
    cell.restore(sample);
    cell
}

/// Returns recorded reads in their order.
struct ReplayedLoads(RefCell<IntoIter<(Slot, LoadRead)>>);

macro_rules! replayed {
    ($view:expr, $slot:expr, $read:pat => $value:expr) => {
        match $view.0.borrow_mut().next() {
            Some((slot, $read)) if slot == $slot => $value,
            other => panic!("the replay reads {} of {:?}, recorded was {other:?}", stringify!($read), $slot),
        }
    };
}

impl LoadView for ReplayedLoads {
    fn take_changed(&self, changed: &mut Vec<Slot>) {
        loop {
            match self.0.borrow_mut().next() {
                Some((slot, LoadRead::Changed)) => changed.push(slot),
                Some((_, LoadRead::ChangedEnd)) => return,
                other => panic!("the replay takes the changed slots, recorded was {other:?}"),
            }
        }
    }

    fn board(&self, slot: Slot, seen: &mut BoardVersion) -> Option<BoardLoad> {
        replayed!(self, slot, LoadRead::Board(load, version) => {
            *seen = version;
            load
        })
    }

    fn with_speed<R>(&self, slot: Slot, read: impl FnOnce(&SpeedCell) -> R) -> R {
        replayed!(self, slot, LoadRead::Speed(sample) => read(&cell_of(&sample)))
    }

    fn held_blocks(&self, slot: Slot) -> u32 {
        replayed!(self, slot, LoadRead::HeldBlocks(blocks) => blocks)
    }

    fn index_changed_at(&self, slot: Slot) -> Option<Timestamp> {
        replayed!(self, slot, LoadRead::IndexChangedAt(at) => at)
    }

    fn engine_load(&self, slot: Slot) -> Option<EngineLoad> {
        replayed!(self, slot, LoadRead::EngineLoad(load) => load)
    }
}

fn prompt(n: u64) -> PromptBlocks {
    let (family, length) = (mix(n) % 7, 1 + mix(n ^ 77) % 30);
    PromptBlocks::Hashed((0..length).map(|block| SequenceHash(mix(family << 32 | block))).collect())
}

/// Publishes the `n`th state of every cell. Speeds are constant, and age, in every other 400 inputs of 40 s.
fn publish(cells: &[RankCells], boards: &[BoardLoad], n: u64) {
    changing_cells::publish(cells, boards, n, Timestamp(100_000_000 * n), !(n / 400).is_multiple_of(2));
}

fn config(policy: Policy) -> RouterConfig {
    RouterConfig {
        block_size: Some(16),
        seed: 5,
        policy: policy.into(),
        queue: QueueConfig { threshold: Some(0.4), ..QueueConfig::default() },
        overload: OverloadConfig { engine_waiting: Some(10), ..OverloadConfig::default() },
        slow_start: SlowStartConfig { fill: 0.5, ..SlowStartConfig::default() },
        ..RouterConfig::default()
    }
}

fn request(n: u64) -> Request<u64> {
    let prompt = prompt(n);
    let overlap = |slot: u32| RankOverlap {
        slot: Slot(slot),
        generation: Generation(1),
        overlap: TierOverlap {
            device_blocks: (mix(n ^ u64::from(slot)) % 8) as u32 % (prompt.block_count() + 1),
            ..TierOverlap::default()
        },
    };
    let purpose = match n % 10 {
        0 => Purpose::Explain,
        1 => Purpose::LoadSnapshot,
        2 => Purpose::Report,
        _ => Purpose::Book,
    };
    let waits = Waits { booking: BookingId(n), arrival: Timestamp(100_000_000 * n), block_hashes: None };
    Request {
        overlaps: (0..RANKS).filter(|slot| mix(n + u64::from(*slot)).is_multiple_of(3)).map(overlap).collect(),
        purpose,
        waits: Some(Box::new(waits)),
        ..Request::new(n, prompt.clone(), prompt.block_count() * 16)
    }
}

/// Effects of a fixed stream of inputs. `between` runs before each input.
fn effects_of<V: LoadView>(policy: Policy, loads: &V, between: impl Fn(u64)) -> Vec<String> {
    let mut schedule = Schedule::<u64>::new(config(policy), 0, Extensions::default());
    let (mut effects, mut log) = (VecDeque::new(), Vec::new());
    for slot in 0..RANKS {
        let rank = WorkerRank::new(WorkerId(u64::from(slot)), 0);
        let traits = RankTraits { total_kv_blocks: Some(5_000), ..RankTraits::default() };
        let admission = Admission { traits: Arc::new(traits), ..Admission::new(rank, Slot(slot), Generation(1)) };
        schedule.step(Input::Admit(admission), loads, Timestamp(0), &mut effects);
    }
    for n in 0..INPUTS {
        between(n);
        let now = Timestamp(100_000_000 * n);
        let input = if n % 5 == 4 { Input::Wake } else { Input::Request(request(n)) };
        schedule.step(input, loads, now, &mut effects);
        while let Some(effect) = effects.pop_front() {
            log.push(format!("{effect:?}"));
            if let Effect::Query(query) = effect {
                let answer = |slot: &Slot| LoadAnswer {
                    slot: *slot,
                    generation: Generation(1),
                    load: RankLoad { requests: (mix(query.batch) % 5) as u32, ..RankLoad::default() },
                    shared_blocks: query.prompts.iter().map(|_| 0).collect(),
                };
                let answers = query.slots.iter().map(answer).collect();
                schedule.step(Input::Loads { batch: query.batch, answers }, loads, now, &mut effects);
            }
        }
    }
    log
}

#[test]
fn recorded_reads_replay_to_equal_effects() {
    for policy in Policy::ALL {
        let (cells, loads) = ([(); RANKS as usize].map(|()| RankCells::default()), changing_cells::boards(prompt));
        let mut live = LiveLoads::default();
        for (slot, cells) in (0..RANKS).zip(&cells) {
            live.insert(Slot(slot), cells.clone());
        }
        let idle = effects_of(policy, &live, |_| {});
        let recording = RecordingLoads { live: &live, reads: RefCell::default() };
        let done = AtomicBool::new(false);
        let recorded = std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in (INPUTS..).take_while(|_| !done.load(Ordering::Relaxed)) {
                    publish(&cells[1..], &loads, n); // concurrently with the steps
                }
            });
            let recorded = effects_of(policy, &recording, |n| publish(&cells[..1], &loads, n));
            done.store(true, Ordering::Relaxed);
            recorded
        });
        assert_ne!(recorded, idle, "{policy:?}: the loads matter");
        let reads = recording.reads.into_inner();
        if policy == Policy::Latency {
            let kinds: BTreeSet<String> = reads.iter().map(|(_, read)| kind(read)).collect();
            assert_eq!(kinds.len(), 7, "all kinds of reads occur: {kinds:?}");
        }
        let replayed = ReplayedLoads(RefCell::new(reads.into_iter()));
        assert_eq!(effects_of(policy, &replayed, |_| {}), recorded, "{policy:?}");
        assert_eq!(replayed.0.into_inner().next(), None, "{policy:?}: every recorded read is repeated");
    }
}

fn kind(read: &LoadRead) -> String {
    let kind: Discriminant<LoadRead> = discriminant(read);
    format!("{kind:?}")
}
