//! Report of an event measurement.

use std::io::{self, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::recording::Recording;
use super::stages::{StageTimes, Took};
use super::{Dialect, Events};
use crate::results::write_json;

/// Figures of all stages, with the arguments of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventsReport {
    /// Hashing of the stored tokens alone.
    pub hash: Stage,
    /// Decoding from bytes to router events, including hashing.
    pub decode_hash: Stage,
    /// Decoding, hashing, and application to the index.
    pub decode_hash_apply: Stage,
    /// Number of blocks in store events.
    pub stored_blocks: u64,
    /// Number of blocks in removal events.
    pub removed_blocks: u64,
    /// Size of all batches in bytes.
    pub bytes: u64,
    /// Number of batches.
    pub messages: usize,
    /// Number of requests that the engines served.
    pub requests: usize,
    /// Arguments of the run.
    #[serde(flatten)]
    pub options: Events,
}

/// Figures of one stage. Each run covers all batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Run with the least CPU time, the most meaningful one on a shared machine.
    pub best: Figures,
    /// Median run by CPU time; the slower one of the two for an even number.
    pub median: Figures,
}

/// Figures of one run of a stage. Times per block are CPU times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// CPU time in ms.
    pub cpu_ms: f64,
    /// Wall time in ms.
    pub wall_ms: f64,
    /// CPU time per stored block in ns. The time includes removals, the number of blocks does not.
    pub ns_per_stored_block: f64,
    /// CPU time per stored or removed block in ns. For hashing, which excludes removals, equal to the value per stored
    /// block.
    pub ns_per_named_block: f64,
    /// Millions of stored blocks per second.
    pub million_stored_per_second: f64,
    /// Millions of stored and removed blocks per second. For hashing, equal to the value of stored blocks.
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
    pub(super) fn new(options: &Events, requests: usize, recording: &Recording, runs: &[StageTimes]) -> Self {
        let Recording { stored_blocks, removed_blocks, .. } = *recording;
        let stage =
            |named, took: fn(&StageTimes) -> Took| Stage::new(stored_blocks, named, runs.iter().map(took).collect());
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
            options: options.clone(),
        }
    }

    /// Writes the report as one line of JSON or as text.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, mut out: impl Write, json: bool) -> io::Result<()> {
        if json {
            return write_json(out, self);
        }
        let options = &self.options;
        writeln!(
            out,
            "{} requests on {} ranks of {} blocks of {} tokens, events as {}, {} runs, one thread",
            self.requests,
            options.ranks,
            options.kv_blocks,
            options.block_size,
            match options.dialect {
                Dialect::Map => "maps",
                Dialect::Array => "arrays",
            },
            options.repeat
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
