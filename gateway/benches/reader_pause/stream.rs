//! Events of a busy cache: an endless, deterministic sequence of stores and removals.
//!
//! Each prompt takes four stores of two to five blocks. Once the cache is full, each store is followed by the removal
//! of as many blocks of the oldest prompts, the last block of a prompt first.

use std::collections::{BTreeSet, VecDeque};

use pointsman_trial::workload::mix;
use rmp::encode;

/// Tokens per block.
pub(super) const BLOCK_SIZE: u64 = 16;
pub(super) const CAPACITY_BLOCKS: usize = 20_000;
pub(super) const EVENTS_PER_SECOND: u64 = 20_000;

const STORES_PER_PROMPT: u64 = 4;

/// One KV event.
pub(super) enum Event {
    /// Blocks of a prompt, starting with block `from`.
    Stored { prompt: u64, from: u64, blocks: u64 },
    /// Blocks by name.
    Removed(Vec<u64>),
}

/// Simulated cache.
#[derive(Default)]
pub(super) struct Stream {
    prompt: u64,
    stores: u64,
    blocks: u64,
    /// Cached prompts and the number of cached blocks of each.
    held: VecDeque<(u64, u64)>,
    held_blocks: usize,
    to_remove: u64,
}

impl Stream {
    /// Number of the prompt being stored.
    pub(super) fn prompt(&self) -> u64 {
        self.prompt
    }

    pub(super) fn next_event(&mut self) -> Event {
        if self.to_remove > 0 {
            return Event::Removed(self.evict());
        }
        if self.stores == STORES_PER_PROMPT {
            (self.prompt, self.stores, self.blocks) = (self.prompt + 1, 0, 0);
        }
        let (from, blocks) = (self.blocks, store_blocks(self.prompt, self.stores));
        (self.stores, self.blocks) = (self.stores + 1, from + blocks);
        match self.held.back_mut() {
            Some((prompt, held)) if *prompt == self.prompt => *held += blocks,
            Some(_) | None => self.held.push_back((self.prompt, blocks)),
        }
        self.held_blocks += blocks as usize;
        if self.held_blocks > CAPACITY_BLOCKS {
            self.to_remove = blocks;
        }
        Event::Stored { prompt: self.prompt, from, blocks }
    }

    fn evict(&mut self) -> Vec<u64> {
        let mut names = Vec::new();
        while self.to_remove > 0 {
            let (prompt, held) = self.held.front_mut().expect("a full cache holds something");
            *held -= 1;
            names.push(name(*prompt, *held));
            if *held == 0 {
                self.held.pop_front();
            }
            self.to_remove -= 1;
            self.held_blocks -= 1;
        }
        names
    }

    /// Names of all cached blocks.
    pub(super) fn held(&self) -> BTreeSet<u64> {
        self.held.iter().flat_map(|(prompt, held)| (0..*held).map(|block| name(*prompt, block))).collect()
    }
}

/// All tokens of a prompt.
pub(super) fn tokens(prompt: u64) -> Vec<u32> {
    let blocks = (0..STORES_PER_PROMPT).map(|store| store_blocks(prompt, store)).sum();
    (0..blocks).flat_map(|block| block_tokens(prompt, block)).collect()
}

fn store_blocks(prompt: u64, store: u64) -> u64 {
    2 + mix(prompt ^ (store << 60)) % 4
}

fn name(prompt: u64, block: u64) -> u64 {
    mix(prompt.wrapping_mul(64).wrapping_add(block))
}

fn block_tokens(prompt: u64, block: u64) -> impl Iterator<Item = u32> {
    let name = name(prompt, block);
    (0..BLOCK_SIZE).map(move |at| (mix(name ^ at) % 100_000) as u32)
}

/// A batch in vLLM's format: `[ts, events, rank]` with events as arrays.
pub(super) fn batch(stream: &mut Stream, number: u64, events: u64) -> Vec<u8> {
    const FITS: &str = "a vector takes all";
    let mut out = Vec::with_capacity(1024);
    encode::write_array_len(&mut out, 3).expect(FITS);
    encode::write_f64(&mut out, 1.7e9 + number as f64 / 1e3).expect(FITS);
    encode::write_array_len(&mut out, events as u32).expect(FITS);
    for _ in 0..events {
        match stream.next_event() {
            Event::Stored { prompt, from, blocks } => {
                encode::write_array_len(&mut out, 7).expect(FITS);
                encode::write_str(&mut out, "BlockStored").expect(FITS);
                encode::write_array_len(&mut out, blocks as u32).expect(FITS);
                for block in from..from + blocks {
                    encode::write_uint(&mut out, name(prompt, block)).expect(FITS);
                }
                match from.checked_sub(1) {
                    Some(parent) => drop(encode::write_uint(&mut out, name(prompt, parent)).expect(FITS)),
                    None => encode::write_nil(&mut out).expect(FITS),
                }
                encode::write_array_len(&mut out, (blocks * BLOCK_SIZE) as u32).expect(FITS);
                for token in (from..from + blocks).flat_map(|block| block_tokens(prompt, block)) {
                    encode::write_uint(&mut out, token.into()).expect(FITS);
                }
                encode::write_uint(&mut out, BLOCK_SIZE).expect(FITS);
                encode::write_nil(&mut out).expect(FITS); // lora_id
                encode::write_str(&mut out, "GPU").expect(FITS);
            }
            Event::Removed(names) => {
                encode::write_array_len(&mut out, 3).expect(FITS);
                encode::write_str(&mut out, "BlockRemoved").expect(FITS);
                encode::write_array_len(&mut out, names.len() as u32).expect(FITS);
                for name in names {
                    encode::write_uint(&mut out, name).expect(FITS);
                }
                encode::write_str(&mut out, "GPU").expect(FITS);
            }
        }
    }
    encode::write_uint(&mut out, 0).expect(FITS); // rank
    out
}
