//! What a fleet is asked, and when: workloads read from traces or invented by generators.
//!
//! Owns the form of a workload. Promises that the same trace, or the same generator and seed, gives the same requests
//! on every machine, in order of arrival. Leaves to others who serves them, and how fast.
//!
//! A prompt is a list of [`Segment`]s, runs of tokens that a name stands for, so that a workload of an hour takes
//! kilobytes a request until somebody asks for its [tokens](Request::tokens).
//!
//! ```
//! use workload::{Request, Segment};
//!
//! let system = Segment { id: 7, tokens: 512 };
//! let ask = |id| Request { arrival_us: 0, prompt: vec![system, Segment { id, tokens: 100 }], output_tokens: 50, session: None };
//! let (first, second) = (ask(1).tokens(), ask(2).tokens());
//! assert_eq!((first.len(), &first[..512]), (612, &second[..512]));
//! assert_ne!(first[512..], second[512..]);
//! ```

mod rng;

pub use rng::{Rng, mix};

/// Token ids are drawn below this.
pub const VOCABULARY: u32 = 128_000;

/// What a fleet is asked in one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Says where it comes from, for a reader.
    pub name: String,
    /// In order of arrival.
    pub requests: Vec<Request>,
    /// XXH3-64 of the trace file's bytes, in hex; absent for what was generated.
    pub trace_checksum: Option<String>,
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
