//! Measured stages: hashing alone, decoding with hashing, and both with the index.
//!
//! The decoder hashes during decoding, so the cost of decoding is only known as the difference to separate hashing of
//! the same tokens. Separate hashing reads the tokens from memory, while the decoder has just produced them. The
//! difference therefore slightly underestimates decoding.

use std::hint::black_box;
use std::time::Duration;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::index::Index;
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::wire::{Decoder, DecoderLimits, Findings, WireConfig};
use pointsman::protocol::{RouterEvent, WorkerId, WorkerRank};

use super::Events;
use super::recording::Recording;
use crate::Failed;
use crate::measure::thread_cpu;

/// CPU times of one run of all stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageTimes {
    /// Hashing of the stored tokens from memory.
    pub(super) hash: Duration,
    /// Decoding from bytes to events.
    pub(super) decode_hash: Duration,
    /// Decoding from bytes into the index.
    pub(super) decode_hash_apply: Duration,
}

/// Runs each stage once, with new decoders and an empty index.
pub(super) fn run(options: &Events, recording: &Recording) -> Result<StageTimes, Failed> {
    let scheme = HashScheme::new(options.block_size);
    let (hash, ()) = timed(|| {
        let hasher = BlockHasher::new(scheme);
        let mut rest = &recording.tokens[..];
        for n_tokens in &recording.store_tokens {
            let (tokens, behind) = rest.split_at(*n_tokens);
            hasher.hashes(tokens, &MmBlocks::NONE).for_each(|hash| _ = black_box(hash));
            rest = behind;
        }
    });

    let mut decoders = decoders(options);
    let (decode_hash, read) = timed(|| decode(&mut decoders, recording, |event| _ = black_box(event)));
    read.check(recording)?;

    let mut decoders = self::decoders(options);
    let mut index = Index::new();
    for engine in 0..options.ranks {
        index.register(rank(engine), Slot(engine), Generation(1));
    }
    let (decode_hash_apply, read) = timed(|| decode(&mut decoders, recording, |event| _ = index.apply(event)));
    read.check(recording)?;
    if index.held_blocks() != recording.held_blocks {
        let (index, engines) = (index.held_blocks(), recording.held_blocks);
        return Err(format!("the index holds {index} blocks at the end, but the engines hold {engines}").into());
    }
    Ok(StageTimes { hash, decode_hash, decode_hash_apply })
}

/// Results of the decoders.
#[derive(Default)]
struct Read {
    stored_blocks: u64,
    findings: Findings,
}

impl Read {
    fn check(&self, recording: &Recording) -> Result<(), Failed> {
        if self.stored_blocks == recording.stored_blocks && self.findings.is_empty() {
            return Ok(());
        }
        let (used, sent, findings) = (self.stored_blocks, recording.stored_blocks, self.findings);
        Err(format!("the decoder used {used} of {sent} stored blocks, findings {findings:?}").into())
    }
}

fn decode(decoders: &mut [Decoder], recording: &Recording, mut then: impl FnMut(&RouterEvent)) -> Read {
    let mut read = Read::default();
    let mut events = Vec::new();
    for message in &recording.messages {
        events.clear();
        let report = decoders[message.engine as usize].decode(&message.payload, &mut events);
        read.stored_blocks += u64::from(report.stored_blocks);
        read.findings += report.findings;
        events.iter().for_each(&mut then);
    }
    read
}

fn decoders(options: &Events) -> Vec<Decoder> {
    let config = |engine| WireConfig {
        rank: rank(engine),
        ranks: 0..1,
        block_size: options.block_size,
        is_eagle: false,
        limits: DecoderLimits::default(),
    };
    (0..options.ranks).map(|engine| Decoder::new(config(engine))).collect()
}

fn rank(engine: u32) -> WorkerRank {
    WorkerRank::new(WorkerId(engine.into()), 0)
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let begun = thread_cpu();
    let done = work();
    (thread_cpu() - begun, done)
}
