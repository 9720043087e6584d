//! Measurement of the router's cost of KV events, with the events that a fleet would publish for a trace.
//!
//! Defines the arguments and the execution. The fleet is simulated and its batches are encoded before the measurement
//! (`recording`). Then one thread hashes, decodes and indexes them repeatedly (`stages`). No router, no socket and no
//! other thread is involved. The result is the maximum event throughput of one core, without the transport.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;
use pointsman_trial::kv_events::Dialect;
use pointsman_trial::workload::Prompt;
use serde::{Deserialize, Serialize};

use crate::Failed;
use crate::progress::Progress;
use crate::source;

mod recording;
mod report;
mod stages;
#[cfg(test)]
mod tests;

pub use report::{EventsReport, Figures, Stage};

/// Arguments of one measurement.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Trace with the prompts (Mooncake's or Alibaba's JSON lines); without it conversations are
    /// generated
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Number of single-rank engines, which serve the requests in rotation
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: u32,
    /// Tokens per KV block
    #[arg(long, default_value = "64")]
    pub block_size: NonZeroU32,
    /// KV blocks per engine
    #[arg(long, default_value_t = 7168)]
    pub kv_blocks: u32,
    /// Tokens generated per request; the default is the mean of the conversation trace
    #[arg(long, default_value_t = 343, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub output_tokens: u32,
    /// Layout of an event
    #[arg(long, value_enum, default_value_t)]
    pub dialect: Dialect,
    /// Number of requests from the workload [default: the whole trace, or 4000 generated]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(skip)]
    pub limit: Option<u32>,
    /// Number of runs of each stage
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Seed of a generated workload and of generated tokens
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print the report as one JSON object
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl Events {
    /// Prepares the batches, measures all stages and creates the report. Needs memory for all batches, about 0.4 KiB
    /// per stored block of 64 tokens, and the same again for the tokens.
    ///
    /// # Errors
    /// The workload cannot be read, an engine rejects it, or decoder or index disagree with the engines.
    pub fn run(&self) -> Result<EventsReport, Failed> {
        let prompts = self.prompts()?;
        let requests = prompts.len();
        let recording = recording::record(self, &prompts)?;
        drop(prompts);
        let progress = Progress::new(self.repeat as usize, "runs");
        let counted = |_| stages::run(self, &recording).inspect(|_| progress.add(1));
        let runs = (0..self.repeat).map(counted).collect::<Result<Vec<_>, _>>()?;
        Ok(EventsReport::new(self, requests, &recording, &runs))
    }

    fn prompts(&self) -> Result<Vec<Prompt>, Failed> {
        Ok(source::prompts(self.trace.as_deref(), self.limit, self.seed)?)
    }
}
