//! What engines' events cost a router, on the events that a fleet would send for a trace.
//!
//! Owns the arguments and the steps from them to a report. The fleet is modelled and its batches are written before any
//! clock runs (`recording`); then one thread hashes, decodes and indexes them, again and again (`stages`). There
//! is no router, no socket and no other thread in it: it is the ceiling of what one core takes in, and nothing of how
//! events get there.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use pointsman::wire::Findings;
use pointsman_trial::engine::{ConfigError, Refused};
use pointsman_trial::kv_events::{self, Encoder};
use pointsman_trial::workload::Prompt;
use pointsman_trial::workload::trace::TraceError;
use serde::{Deserialize, Serialize};

use crate::source;

mod recording;
mod report;
mod stages;
#[cfg(test)]
mod tests;

pub use report::{EventsReport, Figures, Stage};

/// How the engines write an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// As a map, like vLLM from 0.24 on
    #[default]
    Map,
    /// As an array, like vLLM before
    Array,
}

impl Dialect {
    /// Writer of the events of an engine of one rank.
    fn encoder(self, block_size: u32) -> Encoder {
        let layout = match self {
            Self::Map => kv_events::Dialect::VllmMap,
            Self::Array => kv_events::Dialect::VllmArray,
        };
        Encoder { format: layout.into(), block_size, rank: 0, lora_ids: Arc::default() }
    }
}

/// One measurement.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Events {
    /// Trace to take prompts from (Mooncake's or Alibaba's JSON lines, Azure's table); conversations are generated when absent
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Engines of one rank each; requests go to them in turn
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: u32,
    /// Tokens of a KV block
    #[arg(long, default_value = "64")]
    pub block_size: NonZeroU32,
    /// KV blocks of one engine's memory
    #[arg(long, default_value_t = 7168)]
    pub kv_blocks: u32,
    /// Tokens that each request generates; the default is the conversation trace's mean
    #[arg(long, default_value_t = 343, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub output_tokens: u32,
    /// How the engines write an event
    #[arg(long, value_enum, default_value_t)]
    pub dialect: Dialect,
    /// Requests to take from the workload [default: the whole trace, or 4000 generated]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// How often each stage is run
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Seed of a generated workload and of generated tokens
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print the report as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    /// The trace is broken.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No engine can be like this.
    #[error("no engine can serve the workload: {0}")]
    Config(#[from] ConfigError),
    /// An engine does not take a request.
    #[error("an engine refused a request: {0}")]
    Refused(#[from] Refused),
    /// The decoder did not use all that was sent, so its figures would be of something else.
    #[error("the decoder used {used} of {sent} stored blocks, findings {findings:?}")]
    Unread {
        /// Stored blocks that it used.
        used: u64,
        /// Stored blocks of all batches.
        sent: u64,
        /// What it found odd.
        findings: Box<Findings>,
    },
    /// The index does not hold what the engines do, so its figures would be of something else.
    #[error("the index holds {index} blocks at the end, the engines {engines}")]
    Differs {
        /// Blocks that the index holds.
        index: usize,
        /// Blocks that the engines hold.
        engines: usize,
    },
}

impl Events {
    /// Prepares the batches, measures and reports. Takes memory for all batches, some 0.4 KiB a stored block of 64
    /// tokens, and once more for the tokens.
    ///
    /// # Errors
    /// The workload cannot be read, no engine can serve it, or what came out is not what was sent.
    pub fn run(&self) -> Result<EventsReport, EventsError> {
        let prompts = self.prompts()?;
        let requests = prompts.len();
        let recording = recording::record(self, &prompts)?;
        drop(prompts);
        let runs = (0..self.repeat).map(|_| stages::run(self, &recording)).collect::<Result<Vec<_>, _>>()?;
        Ok(EventsReport::new(self, requests, &recording, &runs))
    }

    fn prompts(&self) -> Result<Vec<Prompt>, TraceError> {
        source::prompts(self.trace.as_deref(), self.limit, self.seed)
    }
}
