//! Report of an event measurement.

use std::io::{self, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Events;
use super::recording::Recording;
use super::stages::StageTimes;
use crate::results::write_figures;

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
    /// CPU time per stored block in ns. The time includes removals, the number of blocks does not.
    pub ns_per_stored_block: f64,
    /// Millions of stored blocks per second.
    pub million_stored_per_second: f64,
    /// Millions of stored and removed blocks per second. For hashing, equal to the value of stored blocks.
    pub million_named_per_second: f64,
}

impl Stage {
    fn new(stored: u64, named: u64, mut runs: Vec<Duration>) -> Self {
        runs.sort_unstable();
        let at = |idx: usize| Figures::new(stored, named, runs[idx]);
        Self { best: at(0), median: at(runs.len() / 2) }
    }
}

impl Figures {
    fn new(stored: u64, named: u64, cpu: Duration) -> Self {
        let ns_per = |blocks: u64| cpu.as_secs_f64() * 1e9 / blocks.max(1) as f64;
        Self {
            cpu_ms: cpu.as_secs_f64() * 1e3,
            ns_per_stored_block: ns_per(stored),
            million_stored_per_second: 1e3 / ns_per(stored),
            million_named_per_second: 1e3 / ns_per(named),
        }
    }
}

impl EventsReport {
    pub(super) fn new(options: &Events, requests: usize, recording: &Recording, runs: &[StageTimes]) -> Self {
        let Recording { stored_blocks, removed_blocks, .. } = *recording;
        let stage =
            |named, cpu: fn(&StageTimes) -> Duration| Stage::new(stored_blocks, named, runs.iter().map(cpu).collect());
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
    pub fn write(&self, out: impl Write, json: bool) -> io::Result<()> {
        write_figures(out, self, json)
    }
}
