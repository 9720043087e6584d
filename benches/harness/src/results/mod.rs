//! The report of runs over time: records, comparable figures and validity warnings.
//!
//! Contains the [`Summary`] of a run, and its JSON. Equal runs and equal [`Facts`] give equal bytes. A figure
//! without measurements is absent instead of zero. Warnings are part of the summary. Other modules execute runs and
//! compare them.
//!
//! Latencies count from the arrival time of a request, not from its sending: otherwise a late client would hide the
//! delay that it causes.

pub mod distribution;
pub mod facts;
pub mod load;
pub mod prediction;
mod programs;
mod record;
pub mod reporting;
pub mod summary;
pub(crate) mod table;
pub(crate) mod text;
pub mod validity;

pub use distribution::Distribution;
pub use facts::{Facts, Machine};
pub use programs::ProgramFigures;
pub use record::{RankSample, RequestRecord, Run, Warmup};
pub(crate) use record::{write_figures, write_json};
pub use reporting::Reporting;
pub use summary::{SCHEMA_VERSION, Summary};
pub use validity::{ClientHealth, Gate, Warning};

impl Run {
    /// The measured requests, without the warm-up.
    #[must_use]
    pub fn measured(&self) -> &[RequestRecord] {
        self.requests.get(self.warmup_requests..).unwrap_or_default()
    }
}

impl RequestRecord {
    /// Returns whether the answer is complete.
    #[must_use]
    pub fn answered(&self) -> bool {
        self.failure.is_none() && self.first_token_us.is_some() && self.ended_us.is_some()
    }

    /// Time from the arrival time to the first token, in µs.
    #[must_use]
    pub fn ttft_us(&self) -> Option<u64> {
        Some(self.first_token_us?.saturating_sub(self.due_us))
    }

    /// Time from the arrival time to the last token, in µs.
    #[must_use]
    pub fn e2e_us(&self) -> Option<u64> {
        Some(self.ended_us?.saturating_sub(self.due_us))
    }

    /// Time from sending to the routing decision, in µs: the queueing time in the router.
    #[must_use]
    pub fn queue_us(&self) -> Option<u64> {
        Some(self.placed_us?.saturating_sub(self.sent_us))
    }

    /// Mean gap between tokens in µs; none for answers of fewer than two tokens.
    #[must_use]
    pub fn gap_us(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(self.ended_us?.saturating_sub(self.first_token_us?) as f64 / gaps as f64)
    }
}

/// `part` divided by `whole`; none if `whole` is 0.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
pub(crate) mod tests;
