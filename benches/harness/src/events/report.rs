//! What a measurement of events reports.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::recording::Recording;
use super::stages::{Run, Took};
use super::{Dialect, Events};

/// Figures of all stages, with the arguments that shaped them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventsReport {
    /// Hashing alone of the stored tokens.
    pub hash: Stage,
    /// From bytes to events of the router, hashing included.
    pub decode_hash: Stage,
    /// From bytes into the index.
    pub decode_hash_apply: Stage,
    /// Blocks that stores name.
    pub stored_blocks: u64,
    /// Blocks that removals name.
    pub removed_blocks: u64,
    /// Bytes of all batches.
    pub bytes: u64,
    /// Batches.
    pub messages: usize,
    /// Requests that the engines served.
    pub requests: usize,
    /// The trace, if it was one.
    pub trace: Option<PathBuf>,
    /// Engines, of one rank each.
    pub ranks: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks of one engine's memory.
    pub kv_blocks: u32,
    /// Tokens that each request generated.
    pub output_tokens: u32,
    /// How events were written.
    pub dialect: Dialect,
    /// How often each stage was run.
    pub repeat: u32,
    /// Seed of the workload, where it was generated, and of the generated tokens.
    pub seed: u64,
}

/// What one stage took. Each run is over all batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// The run that took the least CPU time. On a shared machine it says the most.
    pub best: Figures,
    /// The run in the middle by CPU time; of an even number the slower one there.
    pub median: Figures,
}

/// What one run of a stage took. Figures a block are of CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// CPU time in ms.
    pub cpu_ms: f64,
    /// Wall time in ms.
    pub wall_ms: f64,
    /// Over blocks stored, in ns: removals are in the time and not in the blocks.
    pub ns_per_stored_block: f64,
    /// Over blocks stored and removed, in ns. Of hashing, which does not see removals, the same as over those stored.
    pub ns_per_named_block: f64,
    /// Millions of blocks stored in a second.
    pub million_stored_per_second: f64,
    /// Millions of blocks stored and removed in a second. Of hashing the same as of those stored.
    pub million_named_per_second: f64,
}

impl Stage {
    fn new(stored: u64, named: u64, mut runs: Vec<Took>) -> Self {
        runs.sort_unstable_by_key(|took| took.cpu);
        let at = |idx: usize| Figures::new(stored, named, runs[idx]);
        Self { best: at(0), median: at(runs.len() / 2) }
    }
}

impl Figures {
    fn new(stored: u64, named: u64, took: Took) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let ns_per = |blocks: u64| took.cpu.as_secs_f64() * 1e9 / blocks.max(1) as f64;
        Self {
            cpu_ms: ms(took.cpu),
            wall_ms: ms(took.wall),
            ns_per_stored_block: ns_per(stored),
            ns_per_named_block: ns_per(named),
            million_stored_per_second: 1e3 / ns_per(stored),
            million_named_per_second: 1e3 / ns_per(named),
        }
    }

    fn write_row(&self, out: &mut impl Write, stage: &str, run: &str) -> io::Result<()> {
        writeln!(
            out,
            "  {stage:<19} {run:<6} {:>8.0} {:>8.0}    {:>5.0} {:>5.0}     {:>5.2} {:>5.2}",
            self.cpu_ms,
            self.wall_ms,
            self.ns_per_stored_block,
            self.ns_per_named_block,
            self.million_stored_per_second,
            self.million_named_per_second
        )
    }
}

impl EventsReport {
    pub(super) fn new(options: &Events, requests: usize, recording: &Recording, runs: &[Run]) -> Self {
        let Recording { stored_blocks, removed_blocks, .. } = *recording;
        let stage = |named, took: fn(&Run) -> Took| Stage::new(stored_blocks, named, runs.iter().map(took).collect());
        let named_blocks = stored_blocks + removed_blocks;
        Self {
            hash: stage(stored_blocks, |run| run.hash),
            decode_hash: stage(named_blocks, |run| run.decode_hash),
            decode_hash_apply: stage(named_blocks, |run| run.decode_hash_apply),
            stored_blocks,
            removed_blocks,
            bytes: recording.bytes(),
            messages: recording.messages.len(),
            requests,
            trace: options.trace.clone(),
            ranks: options.ranks,
            block_size: options.block_size.get(),
            kv_blocks: options.kv_blocks,
            output_tokens: options.output_tokens,
            dialect: options.dialect,
            repeat: options.repeat,
            seed: options.seed,
        }
    }

    /// Writes the report, as one line of JSON or for a reader.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, mut out: impl Write, json: bool) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut out, self)?;
            return writeln!(out);
        }
        writeln!(
            out,
            "{} requests on {} ranks of {} blocks of {} tokens, events as {}, {} runs, one thread",
            self.requests,
            self.ranks,
            self.kv_blocks,
            self.block_size,
            match self.dialect {
                Dialect::Map => "maps",
                Dialect::Array => "arrays",
            },
            self.repeat
        )?;
        writeln!(
            out,
            "  {} blocks stored, {} removed, {} messages, {} bytes",
            self.stored_blocks, self.removed_blocks, self.messages, self.bytes
        )?;
        writeln!(out, "                                                 ns a block    million blocks/s")?;
        writeln!(out, "                               CPU ms  wall ms   stored named    stored named")?;
        let stages = [
            ("hash", &self.hash),
            ("decode, hash", &self.decode_hash),
            ("decode, hash, apply", &self.decode_hash_apply),
        ];
        for (name, Stage { best, median }) in stages {
            best.write_row(&mut out, name, "best")?;
            median.write_row(&mut out, "", "median")?;
        }
        let [hash, decode_hash, all] = stages.map(|(_, stage)| stage.best.ns_per_stored_block);
        writeln!(
            out,
            "  at best, of {all:.0} ns a stored block {hash:.0} are hashing, {:.0} decoding, {:.0} applying",
            decode_hash - hash,
            all - decode_hash
        )
    }
}
