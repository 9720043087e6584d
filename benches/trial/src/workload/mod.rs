//! What a fleet is asked, and when: workloads read from traces or invented by generators.
//!
//! Owns the form of a workload, the readers of [`trace`]s and the [`generate`]rs. Promises that the same trace, or the
//! same generator and seed, gives the same requests on every machine, in order of arrival. Leaves to others who serves
//! them, and how fast.
//!
//! A prompt is a list of [`Segment`]s, runs of tokens that a name stands for, so that a workload of an hour takes
//! kilobytes a request until somebody asks for its [tokens](Request::tokens).
//!
//! ```
//! use pointsman_trial::workload::{Request, Segment};
//!
//! let system = Segment { id: 7, tokens: 512 };
//! let ask = |id| Request { arrival_us: 0, prompt: vec![system, Segment { id, tokens: 100 }], output_tokens: 50, session: None };
//! let (first, second) = (ask(1).tokens(), ask(2).tokens());
//! assert_eq!((first.len(), &first[..512]), (612, &second[..512]));
//! assert_ne!(first[512..], second[512..]);
//! ```

pub mod generate;
mod rng;
pub mod trace;

use std::num::NonZeroU32;

pub use rng::{Rng, mix};

/// Token ids are drawn below this.
pub const VOCABULARY: u32 = 128_000;

/// Longest prompt and longest answer that a trace or a generator may ask for: 16 Mi tokens, far beyond any model and
/// far below what could exhaust a machine.
pub const LENGTH_MAX: u32 = 1 << 24;

/// Most requests of a workload: a bound on memory, some gigabytes.
pub const REQUESTS_MAX: usize = 20_000_000;

/// The token ids of one prompt.
pub type Prompt = Box<[u32]>;

/// What a fleet is asked in one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Says where it comes from, for a reader.
    pub name: String,
    /// In order of arrival.
    pub requests: Vec<Request>,
    /// Whether the requests' arrivals are kept, or each waits for another's end.
    pub arrivals: Arrivals,
    /// XXH3-64 of the trace file's bytes, in hex; absent for what was generated.
    pub trace_checksum: Option<String>,
}

/// What lets a request be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrivals {
    /// Its [arrival](Request::arrival_us), whatever became of others: what independent users do.
    #[default]
    OpenLoop,
    /// The end of one before it, with so many in flight from the start; arrivals mean nothing. A slow fleet is asked
    /// less, so such a run says little of waiting times.
    Concurrency(NonZeroU32),
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it is sent, in µs after the start.
    pub arrival_us: u64,
    /// What it asks. Equal leading segments are equal prefixes.
    pub prompt: Vec<Segment>,
    /// Tokens it will be answered with: engines generate as many, routers are not told.
    pub output_tokens: u32,
    /// The conversation or the agent that it belongs to.
    pub session: Option<u64>,
}

/// A run of tokens: the first `tokens` of the endless one that `id` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Names the run. Equal names, equal tokens.
    pub id: u64,
    /// Length in tokens.
    pub tokens: u32,
}

impl Workload {
    /// The same requests, arriving `factor` times as fast. A closed loop stays as it is.
    ///
    /// ```
    /// use pointsman_trial::workload::generate::Generator;
    ///
    /// let workload = "shared-prefix:requests=10".parse::<Generator>()?.generate(1);
    /// let last_us = workload.requests[9].arrival_us;
    /// assert_eq!(workload.sped_up(2.0).requests[9].arrival_us, (last_us + 1) / 2);
    /// # Ok::<(), pointsman_trial::workload::generate::SettingsError>(())
    /// ```
    ///
    /// # Panics
    /// `factor` is not a positive finite number.
    #[must_use]
    pub fn sped_up(mut self, factor: f64) -> Self {
        assert!(factor.is_finite() && factor > 0.0, "a workload cannot be sped up by {factor}");
        for request in &mut self.requests {
            request.arrival_us = (request.arrival_us as f64 / factor).round() as u64;
        }
        self
    }

    /// The token ids of every prompt, 4 bytes a token: what a router reads as one slice is one allocation.
    #[must_use]
    pub fn prompts(&self) -> Vec<Prompt> {
        self.requests.iter().map(|request| request.tokens().into_boxed_slice()).collect()
    }

    /// Sorts by arrival; of requests that arrive together the earlier listed stay first.
    fn sort(&mut self) {
        self.requests.sort_by_key(|request| request.arrival_us);
    }
}

impl Request {
    /// Length of the prompt in tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt.iter().map(|segment| u64::from(segment.tokens)).sum()
    }

    /// The prompt's token ids.
    #[must_use]
    pub fn tokens(&self) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(usize::try_from(self.prompt_tokens()).unwrap_or_default());
        for segment in &self.prompt {
            let mut rng = Rng::new(segment.id);
            tokens.extend((0..segment.tokens).map(|_| rng.below(VOCABULARY)));
        }
        tokens
    }
}
