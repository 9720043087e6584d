//! Load of the index replay: the events of simulated caches that serve a workload, and the prompts of its queries.
//!
//! Each request is sent to a pseudo-random rank, so that prefixes spread over ranks. The rank's [`Engine`] evicts its
//! least recently used leaves. The first half of the requests fills the caches and causes evictions before the
//! measurement.

use std::num::NonZeroU32;

use pointsman::protocol::{BlockHash, EngineHash, StoredBlock};
use pointsman_bench::engine::{Change, Engine, name_blocks};
use pointsman_bench::targets::{Embedded, Target};
use pointsman_bench::workload::Prompt;
use pointsman_trial::workload::mix;

/// Events of one request on a rank. The removal comes first, because it makes room.
#[derive(Clone, Debug)]
pub struct Step {
    /// Number of the rank, from 0.
    pub rank: u32,
    /// Evicted blocks.
    pub removed: Vec<EngineHash>,
    /// Parent of the stored blocks.
    pub parent: Option<EngineHash>,
    /// Stored blocks.
    pub stored: Vec<StoredBlock>,
}

/// A load.
#[derive(Debug)]
pub struct Load {
    /// Number of ranks.
    pub ranks: u32,
    /// Steps that fill the caches.
    pub warm: Vec<Step>,
    /// Measured steps.
    pub timed: Vec<Step>,
    /// Block hashes of every request.
    pub prompts: Vec<Vec<BlockHash>>,
    /// Numbers of blocks in the caches after `warm` and after `timed`.
    pub held_blocks: [usize; 2],
}

impl Load {
    /// Computes the load of `prompts` on `ranks` ranks with `blocks_max` blocks each.
    #[must_use]
    pub fn new(prompts: Vec<Prompt>, block_size: NonZeroU32, ranks: u32, blocks_max: usize, seed: u64) -> Self {
        let mut engines: Vec<Engine> = (0..ranks).map(|_| Engine::new(blocks_max)).collect();
        let (mut steps, mut hashed) = (Vec::with_capacity(prompts.len()), Vec::with_capacity(prompts.len()));
        let (half, mut change, mut held_warm) = (prompts.len() / 2, Change::default(), 0);
        for (number, prompt) in (0_u64..).zip(prompts) {
            if steps.len() == half {
                held_warm = engines.iter().map(Engine::held).sum();
            }
            let hashes = Embedded::hash(&prompt, block_size);
            let blocks = name_blocks(&hashes);
            let rank = mix(seed ^ mix(number)) % u64::from(ranks);
            engines[rank as usize].serve(&blocks, &mut change);
            steps.push(Step {
                rank: rank as u32,
                removed: change.removed.clone(),
                parent: change.parent(&blocks),
                stored: blocks[change.stored.clone()].to_vec(),
            });
            hashed.push(hashes);
        }
        let timed = steps.split_off(half);
        let held_blocks = [held_warm, engines.iter().map(Engine::held).sum()];
        Self { ranks, warm: steps, timed, prompts: hashed, held_blocks }
    }
}
