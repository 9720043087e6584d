//! Attacks by requests: prompts of bookings and of speculative entries, the waiting queue, and the scheduler.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use pointsman::RouterConfig;
use pointsman::internals::config::QueueConfig;
use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::load::{ActiveSequences, OutputBlocks, PrefillLoadHint, PromptBlocks, Weight};
use pointsman::internals::predict::{SpeculationModel, SpeculativePrompt, SpeculativePrompts};
use pointsman::internals::protocol::{BookingId, Generation, SequenceHash, Slot};
use pointsman::internals::queue::{ClassId, LaneKey, Queue, QueueEntry, TenantKey};
use pointsman::internals::schedule::ResolvedOptions;
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, Timestamp};
use pointsman::test_support::{SampleRequest, SimulatedFleet, mix, rank};

use crate::{attacks, measured};

attacks! {
    distinct_prompts: "book and end prompts without a common block on one rank", "request", 256;
    nested_prompts: "book and end prompts of which each extends the previous one", "block", 64;
    unfinished_prefills: "book prefills, publish the load, end the middle one first", "request", 256;
    decayed_outputs: "report decaying output of nested prompts", "request", 64;
    modelled_evictions: "route prompts of one block past a long one, modelled LRU", "request", 1_024;
    unconfirmed_prompts: "apply events beside n speculative prompts", "event", 256;
    speculative_prefixes: "route prompts of which each extends the previous one", "block", 64;
    blocked_lanes: "dispatch behind n blocked lanes of one tenant", "request", 256;
    blocked_tenants: "dispatch behind n tenants in one blocked lane", "request", 256;
    classes_and_priorities: "queue, reorder, remove from the middle", "request", 1_024;
    unservable_lanes: "reject n lanes of n tenants, without a rank", "request", 256;
    cancelled_arrivals: "cancel requests behind a load query, last first", "request", 256;
    wakes: "free a rank that n waiting requests may not use", "wake", 256;
}

const NOW: Timestamp = Timestamp(1_000_000_000);

/// A prompt whose first block is unique.
fn distinct(n: u64) -> PromptBlocks {
    PromptBlocks::Hashed((0..4).map(|block| SequenceHash(mix(n << 8 | block))).collect())
}

/// The first blocks of one long prompt.
fn nested(blocks: u64) -> Arc<[SequenceHash]> {
    (0..blocks).map(|block| SequenceHash(mix(block))).collect()
}

fn distinct_prompts(size: u64) -> u64 {
    let mut rank = ActiveSequences::new(true);
    let prompts: Vec<_> = (0..size).map(distinct).collect();
    measured(&mut || {
        for (n, prompt) in (0..).zip(&prompts) {
            rank.book(BookingId(n), prompt.clone(), None, NOW).expect("a new booking");
        }
        (0..size).for_each(|n| _ = rank.free(BookingId(n), NOW));
    });
    size
}

/// Books prompts of 1 to `size` blocks, the longest last.
fn book_nested(rank: &mut ActiveSequences, prompts: &[Arc<[SequenceHash]>]) {
    for (n, prompt) in (0..).zip(prompts) {
        rank.book(BookingId(n), PromptBlocks::Hashed(Arc::clone(prompt)), None, NOW).expect("a new booking");
    }
}

fn nested_prompts(size: u64) -> u64 {
    let mut rank = ActiveSequences::new(true);
    let prompts: Vec<_> = (1..=size).map(nested).collect();
    measured(&mut || {
        book_nested(&mut rank, &prompts);
        (0..size).for_each(|n| _ = rank.free(BookingId(n), NOW));
    });
    size * (size + 1) / 2
}

fn unfinished_prefills(size: u64) -> u64 {
    let mut rank = ActiveSequences::new(true);
    measured(&mut || {
        for n in 0..size {
            let seconds = Duration::from_secs(1 + n % 7);
            let hint = PrefillLoadHint::new(1_000, 0, true, Some(seconds));
            rank.book(BookingId(n), PromptBlocks::Counted(8), hint, NOW).expect("a new booking");
            black_box(rank.prefill_curve());
        }
        for n in (size / 2..size).chain(0..size / 2) {
            rank.complete_prefill(BookingId(n), NOW);
            black_box(rank.prefill_curve());
        }
    });
    size
}

fn decayed_outputs(size: u64) -> u64 {
    let mut rank = ActiveSequences::new(true);
    let prompts: Vec<_> = (1..=size).map(nested).collect();
    book_nested(&mut rank, &prompts);
    let mut output = OutputBlocks::default();
    measured(&mut || {
        for n in (0..size).rev() {
            output.push(Some(Weight::new(0.5).expect("a weight")));
            rank.set_output(BookingId(n), &output);
            rank.free(BookingId(n), NOW);
        }
    });
    size
}

fn speculative(model: SpeculationModel, capacity: Option<u32>) -> SpeculativePrompts {
    let mut entries = SpeculativePrompts::new(model, 1 << 22);
    entries.register(rank(0), Slot(0), Generation(1), capacity);
    entries
}

fn route(entries: &mut SpeculativePrompts, index: &Index, booking: u64, hashes: Arc<[BlockHash]>) {
    let prompt = SpeculativePrompt { hashes, private_blocks: 0 };
    entries.routed(Slot(0), Generation(1), Some(BookingId(booking)), &prompt, index, NOW);
}

fn hashes(blocks: std::ops::Range<u64>) -> Arc<[BlockHash]> {
    blocks.map(|block| BlockHash(mix(block))).collect()
}

fn modelled_evictions(size: u64) -> u64 {
    const TIMES: u64 = 256;
    let index = Index::new();
    let model = SpeculationModel::Lru(Duration::from_secs(1));
    let mut entries = speculative(model, Some(size as u32));
    route(&mut entries, &index, 0, hashes(0..size));
    entries.released(BookingId(0), NOW);
    let prompts: Vec<_> = (1..=TIMES).map(|n| hashes(n << 32..(n << 32) + 1)).collect();
    measured(&mut || {
        for (n, prompt) in (1..).zip(&prompts) {
            route(&mut entries, &index, n, Arc::clone(prompt));
            entries.released(BookingId(n), NOW);
        }
    });
    assert_eq!(entries.counts().evicted, TIMES);
    TIMES
}

fn unconfirmed_prompts(size: u64) -> u64 {
    const EVENTS: u64 = 64;
    let mut index = Index::new();
    index.register(rank(0), Slot(0), Generation(1));
    let mut entries = speculative(SpeculationModel::BesideEvents(Duration::from_secs(1)), None);
    for n in 1..=size {
        route(&mut entries, &index, n, hashes(n << 32..(n << 32) + 64));
    }
    let event = |n| RouterEvent {
        rank: rank(0),
        tier: StorageTier::Device,
        data: KvEvent::Stored {
            parent: None,
            blocks: vec![StoredBlock { engine_hash: EngineHash(n), block_hash: BlockHash(n) }],
        },
    };
    let events: Vec<_> = (0..EVENTS).map(event).collect();
    measured(&mut || {
        for event in &events {
            index.apply(event);
            entries.observe(event, &index);
        }
    });
    EVENTS
}

fn speculative_prefixes(size: u64) -> u64 {
    let index = Index::new();
    let mut entries = speculative(SpeculationModel::Ttl(Duration::from_secs(1)), None);
    let prompts: Vec<_> = (1..=size).map(|blocks| hashes(0..blocks)).collect();
    let mut overlaps = Overlaps::default();
    measured(&mut || {
        for (n, prompt) in (0..).zip(prompts.iter().rev().chain(&prompts)) {
            route(&mut entries, &index, n, Arc::clone(prompt));
            index.overlaps(prompt, &mut overlaps);
            entries.merge_into(prompt, &mut overlaps);
        }
        entries.expire(NOW + Duration::from_secs(2));
    });
    size * (size + 1)
}

fn entry(n: u64, tenant: u64) -> QueueEntry {
    QueueEntry {
        tenant: TenantKey(tenant),
        arrival: NOW + Duration::from_nanos(n),
        prompt_tokens: 100,
        ..QueueEntry::default()
    }
}

/// Dispatches 64 requests of a free lane behind `blocked` requests, given as pairs of a tenant and a lane.
fn dispatches(blocked: impl Iterator<Item = (u64, u64)>) -> u64 {
    const TIMES: u64 = 64;
    let mut queue = Queue::new(&RouterConfig::default());
    let mut n = 0;
    for (tenant, lane) in blocked {
        queue.push(n, ClassId(0), LaneKey(lane), entry(n, tenant), ());
        n += 1;
    }
    (n..n + TIMES)
        .for_each(|n| queue.push(n, ClassId(0), LaneKey(0), QueueEntry { prompt_tokens: 10_000, ..entry(n, 0) }, ()));
    measured(&mut || {
        for _ in 0..TIMES {
            assert!(queue.pop(NOW, |_, lane, ()| lane == LaneKey(0)).is_some());
        }
    });
    TIMES
}

fn blocked_lanes(size: u64) -> u64 {
    dispatches((1..=size).map(|lane| (0, lane)))
}

fn blocked_tenants(size: u64) -> u64 {
    dispatches((1..=size).map(|tenant| (tenant, 1)))
}

fn classes_and_priorities(size: u64) -> u64 {
    let mut queue = Queue::new(&RouterConfig::default());
    measured(&mut || {
        for n in 0..size {
            let draw = mix(n);
            let priority = QueueEntry {
                strict_priority: draw as u32 % 16,
                priority_jump: (draw % 100) as f64,
                ..entry(n, draw % size)
            };
            queue.push(n, ClassId(0), LaneKey(draw % 64), QueueEntry { due: Some(Timestamp(draw)), ..priority }, ());
        }
        (0..size).for_each(|n| queue.set_cached_tokens(n, mix(n) as u32 % 100));
        (0..size).filter(|n| !mix(*n).is_multiple_of(4)).for_each(|n| _ = queue.remove(n));
        while queue.pop_expired(Timestamp(u64::MAX)).is_some() {}
    });
    size
}

/// A fleet with queueing whose ranks are busy.
fn busy_fleet(ranks: u64) -> SimulatedFleet {
    let queue = QueueConfig { threshold: Some(0.0), overlap_refresh_after_ms: 10_000, ..QueueConfig::default() };
    let mut fleet = SimulatedFleet::new(RouterConfig { queue, ..RouterConfig::default() }, ranks as usize);
    (0..ranks).for_each(|worker| fleet.occupy(worker, worker, 64));
    fleet
}

/// A request in a lane of its own, of a tenant of its own.
fn of_own_lane(n: u64) -> SampleRequest {
    let options = ResolvedOptions {
        tenant: TenantKey(n),
        lora_name: Some(format!("adapter {n}").into()),
        ..ResolvedOptions::default()
    };
    SampleRequest { prompt: n, ..SampleRequest::from(options) }
}

fn unservable_lanes(size: u64) -> u64 {
    let mut fleet = busy_fleet(1);
    for n in 0..size {
        fleet.request(1_000 + n, &of_own_lane(n));
    }
    assert_eq!(fleet.waiting(), size);
    measured(&mut || fleet.retire(0));
    assert_eq!(fleet.waiting(), 0);
    size
}

fn cancelled_arrivals(size: u64) -> u64 {
    let mut fleet = SimulatedFleet::new(RouterConfig::default(), 2);
    fleet.responds_at_once = false;
    for n in 0..size {
        fleet.request(n, &SampleRequest { prompt: n, ..SampleRequest::default() });
    }
    assert_eq!(fleet.open_queries.len(), 1);
    measured(&mut || (1..size).rev().for_each(|n| fleet.cancel(n)));
    size
}

fn wakes(size: u64) -> u64 {
    const TIMES: u64 = 32;
    let mut fleet = busy_fleet(2);
    for n in 0..size {
        fleet.request(1_000 + n, &of_own_lane(n));
    }
    let mut last = 0;
    measured(&mut || {
        for _ in 0..TIMES {
            fleet.complete_prefill(last);
            fleet.wake();
            last = *fleet.booked().last().expect("a booked request");
        }
    });
    TIMES
}
