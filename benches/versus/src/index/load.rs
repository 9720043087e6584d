//! What is replayed: the events of simulated caches that serve a workload, and the prompts asked for.
//!
//! Each request goes to a rank that a draw picks, so that prefixes spread over ranks; the rank's
//! [`Engine`] evicts its least recently used leaves. The first half of the requests fills and churns the caches
//! before anything is measured.

use std::num::NonZeroU32;

use pointsman::protocol::{BlockHash, EngineHash, StoredBlock};
use pointsman_bench::embedded::Embedded;
use pointsman_bench::engine::{Change, Engine, name_blocks};
use pointsman_bench::target::Target;
use pointsman_bench::workload::Prompt;
use pointsman_trial::workload::mix;

/// A rank's events of one request, the removal first: it makes room.
#[derive(Clone, Debug)]
pub struct Step {
    /// The rank, from 0.
    pub rank: u32,
    /// Blocks evicted.
    pub removed: Vec<EngineHash>,
    /// The block that the stored ones follow.
    pub parent: Option<EngineHash>,
    /// Blocks stored.
    pub stored: Vec<StoredBlock>,
}

/// A load.
#[derive(Debug)]
pub struct Load {
    /// Number of ranks.
    pub ranks: u32,
    /// Fills the caches.
    pub warm: Vec<Step>,
    /// Is measured.
    pub timed: Vec<Step>,
    /// Every request's block hashes.
    pub prompts: Vec<Vec<BlockHash>>,
    /// Blocks that the caches hold after `warm`, and after `timed`.
    pub held_blocks: [usize; 2],
}

impl Load {
    /// The load that `prompts` make on `ranks` ranks of `blocks_max` blocks each.
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
