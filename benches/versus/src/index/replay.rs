//! Measurement of one index in one process: cost of stores, removals and queries, and memory.

use std::hint::black_box;
use std::time::Duration;

use clap::{Args, ValueEnum};
use perf_event::Counter;
use perf_event::events::Hardware;
use pointsman_bench::cli::Common;
use pointsman_bench::measure::Stopwatch;
use pointsman_bench::target::Refusal;
use pointsman_trial::workload::mix;
use serde::{Deserialize, Serialize};

use crate::medians::median;

use super::load::{Load, Step};
use super::subject::{KvIndex, Pointsman, Radix, Subject};

/// An index under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// Pointsman's index
    Pointsman,
    /// `ChainIndex` of kv-index
    KvIndex,
    /// `RadixTree` of dynamo-kv-router
    Radix,
}

impl Which {
    /// All indexes, Pointsman's first.
    pub const ALL: [Self; 3] = [Self::Pointsman, Self::KvIndex, Self::Radix];

    /// Name on a command line and in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pointsman => "pointsman",
            Self::KvIndex => "kv-index",
            Self::Radix => "radix",
        }
    }
}

/// Arguments of a replay of one index in this process.
#[derive(Args, Clone, Debug)]
pub struct Replay {
    /// The index
    #[arg(long, value_enum)]
    pub index: Which,
    /// Number of ranks whose caches the index tracks
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// Arguments shared with other runs.
    #[command(flatten)]
    pub common: Common,
}

/// Cost of a stored block, a removed block and a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Cost per stored block.
    pub store: f64,
    /// Cost per removed block.
    pub remove: f64,
    /// Cost per query: the median for times, the mean for instructions.
    pub query: f64,
}

/// Time per block in the median event, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Events {
    /// Median over store events.
    pub store: f64,
    /// Median over removal events.
    pub remove: f64,
}

/// Results of one timed process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timed {
    /// Times in ns.
    pub time_ns: Costs,
    /// Times per block of the median event, without pauses of the machine and without rare maintenance work.
    pub event_median_ns: Events,
    /// 99th percentile of query times in ns.
    pub query_p99_ns: f64,
    /// User-mode instructions, if the system counts them.
    pub instructions: Option<Costs>,
    /// Number of blocks stored in the measured half.
    pub stored_blocks: u64,
    /// Number of blocks removed in the measured half.
    pub removed_blocks: u64,
    /// Digests of all query results: for all prompts before the measured half, then for all after it.
    pub answers: Vec<u64>,
}

/// Results of one process with a counting allocator.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Heap {
    /// Number of held blocks over all ranks; a block on several ranks counts for each.
    pub held_blocks: usize,
    /// Bytes allocated and not freed since the creation of the index.
    pub heap_bytes: usize,
    /// Number of those bytes that are reserved and never used, as reported by the index.
    pub reserved_bytes: usize,
}

impl Heap {
    /// Used bytes per held block.
    #[must_use]
    pub fn bytes_a_block(&self) -> f64 {
        (self.heap_bytes - self.reserved_bytes) as f64 / self.held_blocks as f64
    }
}

impl Replay {
    fn load(&self) -> Result<Load, Refusal> {
        let Common { block_size, kv_blocks, seed, .. } = self.common;
        Ok(Load::new(self.common.prompts()?, block_size, self.ranks, kv_blocks, seed))
    }

    /// Measures times, instructions and query results.
    ///
    /// # Errors
    /// The workload cannot be read.
    pub fn time(&self) -> Result<Timed, Refusal> {
        let load = self.load()?;
        Ok(match self.index {
            Which::Pointsman => time::<Pointsman>(&load),
            Which::KvIndex => time::<KvIndex>(&load),
            Which::Radix => time::<Radix>(&load),
        })
    }

    /// Measures memory after the first half. `live_bytes` returns the bytes that are allocated and not freed.
    ///
    /// # Errors
    /// The workload cannot be read.
    pub fn weigh(&self, live_bytes: impl Fn() -> usize) -> Result<Heap, Refusal> {
        let load = self.load()?;
        Ok(match self.index {
            Which::Pointsman => weigh::<Pointsman>(&load, live_bytes),
            Which::KvIndex => weigh::<KvIndex>(&load, live_bytes),
            Which::Radix => weigh::<Radix>(&load, live_bytes),
        })
    }
}

/// Creates an index and applies the first half. Each event is created, applied and dropped before the next one.
fn warmed<S: Subject>(load: &Load) -> S {
    let mut subject = S::new(load.ranks);
    for step in &load.warm {
        if !step.removed.is_empty() {
            subject.apply(S::removal(step));
        }
        if !step.stored.is_empty() {
            subject.apply(S::store(step));
        }
    }
    subject
}

fn weigh<S: Subject>(load: &Load, live_bytes: impl Fn() -> usize) -> Heap {
    let before = live_bytes();
    let subject = warmed::<S>(load);
    let heap_bytes = live_bytes() - before;
    Heap { held_blocks: load.held_blocks[0], heap_bytes, reserved_bytes: subject.reserved_bytes() }
}

fn time<S: Subject>(load: &Load) -> Timed {
    let mut subject = warmed::<S>(load);
    let mut answers = digests(&mut subject, load);
    let mut query_times_ns = Vec::with_capacity(load.prompts.len());
    let mut clock = Clock::default();
    for prompt in &load.prompts {
        let time = clock.query(&mut subject, prompt);
        query_times_ns.push(time.as_nanos() as f64);
    }
    churn(&mut subject, &load.timed, &mut clock);
    answers.extend(digests(&mut subject, load));
    drop(subject);

    query_times_ns.sort_by(f64::total_cmp);
    let percentile_ns = |percent: usize| query_times_ns[(query_times_ns.len() - 1) * percent / 100];
    let per = |spent: Duration, blocks: u64| spent.as_nanos() as f64 / blocks as f64;
    Timed {
        time_ns: Costs {
            store: per(clock.storing, clock.stored),
            remove: per(clock.removing, clock.removed),
            query: percentile_ns(50),
        },
        event_median_ns: Events {
            store: median(clock.store_events.iter().copied()).unwrap_or_default(),
            remove: median(clock.remove_events.iter().copied()).unwrap_or_default(),
        },
        query_p99_ns: percentile_ns(99),
        instructions: instructions::<S>(load),
        stored_blocks: clock.stored,
        removed_blocks: clock.removed,
        answers,
    }
}

/// Digest of each query result. Not measured.
fn digests<S: Subject>(subject: &mut S, load: &Load) -> Vec<u64> {
    let mut digest = |prompt: &Vec<_>| {
        let answer = subject.run(&mut S::query(prompt));
        let mut scores = subject.scores(&answer);
        scores.sort_unstable();
        scores.iter().fold(1, |digest, &(rank, blocks)| mix(digest ^ u64::from(rank) << 32 ^ u64::from(blocks)))
    };
    load.prompts.iter().map(&mut digest).collect()
}

/// Measures operations on an index.
trait Meter {
    fn remove<S: Subject>(&mut self, subject: &mut S, step: &Step);
    fn store<S: Subject>(&mut self, subject: &mut S, step: &Step);
}

fn churn<S: Subject>(subject: &mut S, steps: &[Step], meter: &mut impl Meter) {
    for step in steps {
        if !step.removed.is_empty() {
            meter.remove(subject, step);
        }
        if !step.stored.is_empty() {
            meter.store(subject, step);
        }
    }
}

/// Measures time. An event has about a hundred blocks, so the cost of reading a clock is negligible. The time of a
/// query includes it, about 40 ns.
#[derive(Default)]
struct Clock {
    removing: Duration,
    storing: Duration,
    removed: u64,
    stored: u64,
    /// Times per block by event, in ns.
    remove_events: Vec<f64>,
    store_events: Vec<f64>,
}

impl Clock {
    fn query<S: Subject>(&mut self, subject: &mut S, prompt: &[pointsman::protocol::BlockHash]) -> Duration {
        let mut query = S::query(prompt);
        let watch = Stopwatch::start();
        let answer = subject.run(black_box(&mut query));
        let time = watch.elapsed();
        drop(black_box(answer));
        time
    }
}

impl Meter for Clock {
    fn remove<S: Subject>(&mut self, subject: &mut S, step: &Step) {
        let event = S::removal(step);
        let watch = Stopwatch::start();
        subject.apply(event);
        let time = watch.elapsed();
        self.removing += time;
        self.removed += step.removed.len() as u64;
        self.remove_events.push(time.as_nanos() as f64 / step.removed.len() as f64);
    }

    fn store<S: Subject>(&mut self, subject: &mut S, step: &Step) {
        let event = S::store(step);
        let watch = Stopwatch::start();
        subject.apply(event);
        let time = watch.elapsed();
        self.storing += time;
        self.stored += step.stored.len() as u64;
        self.store_events.push(time.as_nanos() as f64 / step.stored.len() as f64);
    }
}

/// Counts the instructions of this thread. Starting and stopping a counter is work of the kernel, which is not counted.
struct InstructionMeter {
    removing: Counter,
    storing: Counter,
    removed: u64,
    stored: u64,
}

/// Creates a stopped counter; none without support or permission of the system.
fn counter() -> Option<Counter> {
    perf_event::Builder::new().kind(Hardware::INSTRUCTIONS).build().ok()
}

fn counted<T>(counter: &mut Counter, work: impl FnOnce() -> T) -> T {
    counter.enable().expect("a counter of our own can be started");
    let done = work();
    counter.disable().expect("a counter of our own can be stopped");
    done
}

fn read(counter: &mut Counter) -> f64 {
    counter.read().expect("a counter of our own can be read") as f64
}

impl Meter for InstructionMeter {
    fn remove<S: Subject>(&mut self, subject: &mut S, step: &Step) {
        let event = S::removal(step);
        counted(&mut self.removing, || subject.apply(event));
        self.removed += step.removed.len() as u64;
    }

    fn store<S: Subject>(&mut self, subject: &mut S, step: &Step) {
        let event = S::store(step);
        counted(&mut self.storing, || subject.apply(event));
        self.stored += step.stored.len() as u64;
    }
}

/// Repeats the replay with a count of instructions.
fn instructions<S: Subject>(load: &Load) -> Option<Costs> {
    let mut meter = InstructionMeter { removing: counter()?, storing: counter()?, removed: 0, stored: 0 };
    let mut queries = counter()?;
    let mut subject = warmed::<S>(load);
    for prompt in &load.prompts {
        let mut query = S::query(prompt);
        drop(counted(&mut queries, || subject.run(black_box(&mut query))));
    }
    churn(&mut subject, &load.timed, &mut meter);
    Some(Costs {
        store: read(&mut meter.storing) / meter.stored as f64,
        remove: read(&mut meter.removing) / meter.removed as f64,
        query: read(&mut queries) / load.prompts.len() as f64,
    })
}
