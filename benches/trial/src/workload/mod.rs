//! Workloads: requests and their arrival times, read from traces or produced by generators.
//!
//! Contains the [`trace`] readers and the [`generate`] module. The same trace, or the same generator and seed, gives
//! the same requests on every machine, in order of arrival. Serving the requests is up to the caller.
//!
//! A prompt is a list of [`Segment`]s, token runs identified by an id. A workload of an hour thus takes kilobytes per
//! request until the [tokens](Request::tokens) are generated.
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

/// Exclusive upper bound of generated token ids.
pub const VOCABULARY: u32 = 128_000;

/// Maximum length of a prompt or an answer in a trace or a generator: 16 Mi tokens, far above any model and far below
/// the memory limits of a machine.
pub const LENGTH_MAX: u32 = 1 << 24;

/// Maximum number of requests in a workload: a bound on memory, some gigabytes.
pub const REQUESTS_MAX: usize = 20_000_000;

/// An invalid trace or generator, as a message with its place and the violated rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WorkloadError(String);

/// Token ids of one prompt.
pub type Prompt = Box<[u32]>;

/// Requests of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Origin of the workload, for display.
    pub name: String,
    /// Requests in order of arrival.
    pub requests: Vec<Request>,
    /// Open-loop or closed-loop arrivals.
    pub arrivals: Arrivals,
    /// XXH3-64 of the trace file's bytes in hex; none for generated workloads.
    pub trace_checksum: Option<String>,
}

/// Condition for sending a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Arrivals {
    /// The [arrival time](Request::arrival_us), independently of other requests: the behaviour of independent users.
    #[default]
    OpenLoop,
    /// Completion of an earlier request, with this number of requests in flight from the start. Arrival times are
    /// ignored. A slow fleet receives fewer requests, so such a run is not suitable for queueing times.
    Concurrency(NonZeroU32),
    /// Ends of earlier calls of the same program: [`Link`]s.
    Causal {
        /// By request: its place in a program. Calls of a program are adjacent.
        links: Vec<Link>,
        /// Number of live programs from the start, each replaced when its last call has ended. None: the first calls have
        /// arrival times.
        programs: Option<NonZeroU32>,
    },
}

/// Place of a request in a program, that is one task of an agent: a chain or tree of calls with gaps between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Number of the program.
    pub program: u32,
    /// Positions in the workload of the calls that end first, all before this one; empty for the first call.
    pub after: Vec<u32>,
    /// Time in µs from the last of these ends to the arrival: tools, or a person.
    pub gap_us: u64,
    /// Whether the answer ends the agent's turn, so that a person continues. Otherwise it calls tools.
    pub is_stop: bool,
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival time in µs after the start.
    pub arrival_us: u64,
    /// The prompt. Equal leading segments are equal prefixes.
    pub prompt: Vec<Segment>,
    /// Number of output tokens. Engines generate exactly this number; routers do not receive it.
    pub output_tokens: u32,
    /// Conversation or agent of the request.
    pub session: Option<u64>,
}

/// A run of tokens: the first `tokens` of the infinite sequence identified by `id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Id of the sequence. Equal ids mean equal tokens.
    pub id: u64,
    /// Length in tokens.
    pub tokens: u32,
}

impl Workload {
    /// The same requests, arriving `factor` times as fast. Closed loops and gaps within programs are unchanged.
    ///
    /// ```
    /// use pointsman_trial::workload::generate::Generator;
    ///
    /// let workload = "shared-prefix:requests=10".parse::<Generator>()?.generate(1);
    /// let last_us = workload.requests[9].arrival_us;
    /// assert_eq!(workload.sped_up(2.0).requests[9].arrival_us, (last_us + 1) / 2);
    /// # Ok::<(), pointsman_trial::workload::WorkloadError>(())
    /// ```
    ///
    /// # Panics
    /// `factor` is not a positive finite number.
    #[must_use]
    pub fn sped_up(mut self, factor: f64) -> Self {
        assert!(factor.is_finite() && factor > 0.0, "speed-up is {factor}, must be positive and finite");
        for request in &mut self.requests {
            request.arrival_us = (request.arrival_us as f64 / factor).round() as u64;
        }
        self
    }

    /// Token ids of every prompt at 4 bytes per token, in one allocation per prompt, because a router takes a prompt as
    /// one slice.
    #[must_use]
    pub fn prompts(&self) -> Vec<Prompt> {
        self.requests.iter().map(|request| request.tokens().into_boxed_slice()).collect()
    }

    /// Sorts by arrival time; simultaneous requests keep their order.
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

    /// Token ids of the prompt.
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
