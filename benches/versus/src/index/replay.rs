//! Measurement of one index in one process: cost of stores, removals and queries, and memory.

use std::hint::black_box;
use std::time::Duration;

use clap::{Args, ValueEnum};
use perf_event::Counter;
use perf_event::events::Hardware;
use pointsman_bench::Failed;
use pointsman_bench::measure::Stopwatch;
use pointsman_bench::replay::Common;
use pointsman_trial::workload::mix;
use serde::{Deserialize, Serialize};

use super::load::{Load, Step};
use super::subject::{KvIndex, Pointsman, Radix, Subject};

/// An index under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
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

/// Results of one timed process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timed {
    /// Times in ns.
    pub time_ns: Costs,
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
    fn load(&self) -> Result<Load, Failed> {
        let Common { block_size, kv_blocks, seed, .. } = self.common;
        Ok(Load::new(self.common.prompts()?, block_size, self.ranks, kv_blocks, seed))
    }

    /// Measures times, instructions and query results.
    ///
    /// # Errors
    /// The workload cannot be read.
    pub fn time(&self) -> Result<Timed, Failed> {
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
    pub fn weigh(&self, live_bytes: impl Fn() -> usize) -> Result<Heap, Failed> {
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
    churn(&mut subject, &load.warm, &mut Meters { store: Unmeasured, remove: Unmeasured });
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
    let mut query_times_ns: Vec<f64> = Vec::with_capacity(load.prompts.len());
    for prompt in &load.prompts {
        let mut query = S::query(prompt);
        let watch = Stopwatch::start();
        let answer = subject.run(black_box(&mut query));
        let time = watch.elapsed();
        drop(black_box(answer));
        query_times_ns.push(time.as_nanos() as f64);
    }
    let mut clocks = Meters::<Clock>::default();
    churn(&mut subject, &load.timed, &mut clocks);
    answers.extend(digests(&mut subject, load));
    drop(subject);

    query_times_ns.sort_by(f64::total_cmp);
    let percentile_ns = |percent: usize| query_times_ns[(query_times_ns.len() - 1) * percent / 100];
    let Meters { store, remove } = clocks;
    let per_block = |clock: &Clock| clock.spent.as_nanos() as f64 / clock.blocks as f64;
    Timed {
        time_ns: Costs { store: per_block(&store), remove: per_block(&remove), query: percentile_ns(50) },
        query_p99_ns: percentile_ns(99),
        instructions: instructions::<S>(load),
        stored_blocks: store.blocks,
        removed_blocks: remove.blocks,
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

/// Measures the application of events.
trait Meter {
    fn measure(&mut self, blocks: usize, work: impl FnOnce());
}

/// One meter for each kind of event.
#[derive(Default)]
struct Meters<M> {
    store: M,
    remove: M,
}

fn churn<S: Subject, M: Meter>(subject: &mut S, steps: &[Step], meters: &mut Meters<M>) {
    for step in steps {
        if !step.removed.is_empty() {
            let event = S::removal(step);
            meters.remove.measure(step.removed.len(), || subject.apply(event));
        }
        if !step.stored.is_empty() {
            let event = S::store(step);
            meters.store.measure(step.stored.len(), || subject.apply(event));
        }
    }
}

struct Unmeasured;

impl Meter for Unmeasured {
    fn measure(&mut self, _blocks: usize, work: impl FnOnce()) {
        work();
    }
}

/// Measures time. An event has about a hundred blocks, so the cost of reading a clock is negligible. The time of a
/// query includes it, about 40 ns.
#[derive(Default)]
struct Clock {
    spent: Duration,
    blocks: u64,
}

impl Meter for Clock {
    fn measure(&mut self, blocks: usize, work: impl FnOnce()) {
        let watch = Stopwatch::start();
        work();
        self.spent += watch.elapsed();
        self.blocks += blocks as u64;
    }
}

/// Counts the instructions of this thread. Starting and stopping a counter is work of the kernel, which is not counted.
struct InstructionMeter {
    counter: Counter,
    units: u64,
}

impl InstructionMeter {
    /// A stopped counter; none without support or permission of the system.
    fn new() -> Option<Self> {
        let counter = perf_event::Builder::new().kind(Hardware::INSTRUCTIONS).build().ok()?;
        Some(Self { counter, units: 0 })
    }

    fn mean(mut self) -> f64 {
        self.counter.read().expect("a counter of our own can be read") as f64 / self.units as f64
    }
}

impl Meter for InstructionMeter {
    fn measure(&mut self, units: usize, work: impl FnOnce()) {
        self.counter.enable().expect("a counter of our own can be started");
        work();
        self.counter.disable().expect("a counter of our own can be stopped");
        self.units += units as u64;
    }
}

/// Repeats the replay with a count of instructions.
fn instructions<S: Subject>(load: &Load) -> Option<Costs> {
    let mut meters = Meters { store: InstructionMeter::new()?, remove: InstructionMeter::new()? };
    let mut queries = InstructionMeter::new()?;
    let mut subject = warmed::<S>(load);
    for prompt in &load.prompts {
        let mut query = S::query(prompt);
        let mut answer = None;
        queries.measure(1, || answer = Some(subject.run(black_box(&mut query))));
        drop(black_box(answer));
    }
    churn(&mut subject, &load.timed, &mut meters);
    Some(Costs { store: meters.store.mean(), remove: meters.remove.mean(), query: queries.mean() })
}
