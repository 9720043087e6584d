//! Prefix index under memory budgets: remaining hit rate, and cost of enforcing a budget.
//!
//! Sixteen ranks serve 40,000 open conversations of up to eight turns over 64 system prompts. A conversation stays on
//! its rank; recent ones continue more often. At its end the engine removes its blocks and a new conversation starts.
//! There are two million events. The engines hold far more blocks than fit into the smaller budgets. The load is
//! repeated with turns of twelve blocks and of one block; the latter gives short runs, so that the nodes dominate the
//! index.
//!
//! For each load a table is printed on stderr: found share of the prompts, found share of the held blocks, maximum
//! bytes after any event, time per stored block including the evictions it caused, and time of the slowest event.

#![expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]

use std::time::{Duration, Instant};

use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
use pointsman::test_support::{mix, rank};

const EVENTS: u64 = 2_000_000;
const RANKS: u64 = 16;
const OPEN: u64 = 40_000;
const TURNS: u64 = 8;
const SYSTEM_PROMPTS: u64 = 64;
const SYSTEM_BLOCKS: u64 = 20;
const MIB: u64 = 1 << 20;

#[derive(Clone, Copy)]
struct Conversation {
    id: u64,
    turns: u64,
}

impl Conversation {
    fn rank(self) -> u64 {
        mix(self.id) % RANKS
    }

    /// Blocks up to the end of a turn. A hash depends on the prefix: on the system prompt or the conversation.
    fn blocks(self, turns: u64, turn_blocks: u64) -> impl Iterator<Item = StoredBlock> {
        let system = mix(self.id ^ 0x5757) % SYSTEM_PROMPTS;
        let shared = (0..SYSTEM_BLOCKS).map(move |at| mix(system << 32 | at));
        let own = (0..turns * turn_blocks).map(move |at| mix(mix(self.id) ^ at));
        shared.chain(own).map(|n| StoredBlock { engine_hash: EngineHash(mix(n)), block_hash: BlockHash(n) })
    }
}

#[derive(Default)]
struct Outcome {
    queried: u64,
    held: u64,
    found: u64,
    stored: u64,
    bytes_most: usize,
    evicted: u64,
    refused: u64,
    applying: Duration,
    slowest: Duration,
}

fn run(budget: Option<u64>, turn_blocks: u64) -> Outcome {
    let mut index = Index::new();
    for slot in 0..RANKS {
        index.register(rank(slot), Slot(slot as u32), Generation(1));
    }
    index.set_budget(budget);
    let mut open: Vec<_> = (0..OPEN).map(|id| Conversation { id, turns: 0 }).collect();
    let (mut next_id, mut events, mut draw) = (OPEN, 0, 0);
    let (mut outcome, mut overlaps) = (Outcome::default(), Overlaps::default());
    while events < EVENTS {
        draw = mix(draw);
        // The square of a random number: half of the queries are for a quarter of the conversations.
        let at = draw >> 32;
        let conversation = &mut open[((((at * at) >> 32) * OPEN) >> 32) as usize];
        let rank = rank(conversation.rank());
        let mut event = |data, stored: u64, queried: Option<(&[BlockHash], Slot)>| {
            if let Some((hashes, slot)) = queried {
                index.overlaps(hashes, &mut overlaps);
                let hit = overlaps.hits().iter().find(|hit| hit.slot == slot);
                outcome.found += hit.map_or(0, |hit| u64::from(hit.device_blocks));
            }
            let event = RouterEvent { rank, tier: StorageTier::Device, data };
            let start = Instant::now();
            let applied = index.apply(&event);
            let time = start.elapsed();
            outcome.applying += time;
            outcome.slowest = outcome.slowest.max(time);
            outcome.stored += stored;
            outcome.evicted += applied.evicted;
            outcome.refused += applied.unknown_parents;
            outcome.bytes_most = outcome.bytes_most.max(index.bytes_used());
            events += 1;
        };
        if conversation.turns == TURNS {
            // The blocks of the system prompt remain for other conversations.
            let blocks = conversation.blocks(TURNS, turn_blocks).skip(SYSTEM_BLOCKS as usize);
            let mut names: Vec<_> = blocks.map(|block| block.engine_hash).collect();
            names.reverse();
            event(KvEvent::Removed { blocks: names }, 0, None);
            *conversation = Conversation { id: next_id, turns: 0 };
            next_id += 1;
            continue;
        }
        let prompt: Vec<_> = conversation.blocks(conversation.turns + 1, turn_blocks).collect();
        let hashes: Vec<_> = prompt.iter().map(|block| block.block_hash).collect();
        let held = (SYSTEM_BLOCKS + conversation.turns * turn_blocks) as usize;
        let parent = (conversation.turns > 0).then(|| prompt[held - 1].engine_hash);
        let known = if parent.is_some() { held } else { 0 };
        conversation.turns += 1;
        let slot = Slot(rank.worker.0 as u32);
        event(KvEvent::Stored { parent, blocks: prompt[known..].to_vec() }, turn_blocks, Some((&hashes, slot)));
        outcome.queried += hashes.len() as u64;
        outcome.held += held as u64;
    }
    outcome
}

fn main() {
    // Cargo also runs benches as tests, with other arguments.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    // `cargo bench --bench index_budget -- 12/64` runs one row: blocks per turn, and MiB.
    let (long, short) = ([None, Some(256), Some(64), Some(32), Some(16)], [None, Some(8), Some(4)]);
    for (turn_blocks, budgets) in [(12, &long[..]), (1, &short[..])] {
        eprintln!("turns of {turn_blocks} blocks");
        eprintln!("| budget MiB | hit rate | of held | most MiB | evicted | refused | ns a block | slowest event µs |");
        eprintln!("|---|---|---|---|---|---|---|---|");
        for &budget in budgets {
            let bytes_max = budget.map(|mib| mib * MIB);
            let budget = budget.map_or("none".to_owned(), |mib: u64| mib.to_string());
            let outcome = run(bytes_max, turn_blocks);
            eprintln!(
                "| {budget} | {:.3} | {:.3} | {:.1} | {} | {} | {:.1} | {} |",
                outcome.found as f64 / outcome.queried as f64,
                outcome.found as f64 / outcome.held as f64,
                outcome.bytes_most as f64 / MIB as f64,
                outcome.evicted,
                outcome.refused,
                outcome.applying.as_nanos() as f64 / outcome.stored as f64,
                outcome.slowest.as_micros(),
            );
        }
    }
}
