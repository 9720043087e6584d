//! One index in one process: what it takes to store, remove and answer, and what its memory is.

use std::hint::black_box;
use std::time::Duration;

use clap::{Args, ValueEnum};
use perf_event::Counter;
use perf_event::events::Hardware;
use pointsman_bench::cli::Common;
use pointsman_bench::measure::Stopwatch;
use pointsman_bench::target::Refusal;
use serde::{Deserialize, Serialize};
use pointsman_trial::workload::mix;

use crate::medians::median;

use super::load::{Load, Step};
use super::subject::{KvIndex, Pointsman, Radix, Subject};

/// An index to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// Ours
    Pointsman,
    /// `ChainIndex` of kv-index
    KvIndex,
    /// `RadixTree` of dynamo-kv-router
    Radix,
}

impl Which {
    /// All of them, ours first.
    pub const ALL: [Self; 3] = [Self::Pointsman, Self::KvIndex, Self::Radix];

    /// Its name on a command line and in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pointsman => "pointsman",
            Self::KvIndex => "kv-index",
            Self::Radix => "radix",
        }
    }
}

/// A replay of one index in this process.
#[derive(Args, Clone, Debug)]
pub struct Replay {
    /// The index
    #[arg(long, value_enum)]
    pub index: Which,
    /// Ranks whose caches the index follows
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// What it shares with other runs.
    #[command(flatten)]
    pub common: Common,
}

/// What a stored block, a removed one and a question cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// A block.
    pub store: f64,
    /// A block.
    pub remove: f64,
    /// A question: the median of the times, the mean of instructions.
    pub question: f64,
}

/// What a block costs in the median event, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Events {
    /// Of the stores.
    pub store: f64,
    /// Of the removals.
    pub remove: f64,
}

/// What one timed process says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timed {
    /// In ns.
    pub time_ns: Costs,
    /// The same of the median event: no pause of the machine's is in it, nor what seldom has to be done.
    pub event_median_ns: Events,
    /// 99 of 100 questions are answered within this, in ns.
    pub question_p99_ns: f64,
    /// User-mode instructions, where the system counts them.
    pub instructions: Option<Costs>,
    /// Blocks stored in the measured half.
    pub stored_blocks: u64,
    /// Blocks removed in it.
    pub removed_blocks: u64,
    /// A digest of each answer: to all prompts before the measured half, then to all after it.
    pub answers: Vec<u64>,
}

/// What one process that counts allocations says.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Heap {
    /// Blocks that the ranks hold, a block of several ranks counted for each.
    pub held_blocks: usize,
    /// Bytes allocated and not freed since before the index was made.
    pub heap_bytes: usize,
    /// Those of them that are set aside and never yet used, as the index itself tells.
    pub reserved_bytes: usize,
}

impl Heap {
    /// Bytes in use for each held block.
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

    /// Measures times, instructions and answers.
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

    /// Measures memory after the first half, by `live_bytes`: what the allocator has given and not got back.
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

/// An index that the first half has filled. Each event is made, taken and gone before the next.
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
    let mut questions_ns = Vec::with_capacity(load.prompts.len());
    let mut clock = Clock::default();
    for prompt in &load.prompts {
        let time = clock.question(&mut subject, prompt);
        questions_ns.push(time.as_nanos() as f64);
    }
    churn(&mut subject, &load.timed, &mut clock);
    answers.extend(digests(&mut subject, load));
    drop(subject);

    questions_ns.sort_by(f64::total_cmp);
    let question_ns = |percent: usize| questions_ns[(questions_ns.len() - 1) * percent / 100];
    let per = |spent: Duration, blocks: u64| spent.as_nanos() as f64 / blocks as f64;
    Timed {
        time_ns: Costs {
            store: per(clock.storing, clock.stored),
            remove: per(clock.removing, clock.removed),
            question: question_ns(50),
        },
        event_median_ns: Events {
            store: median(clock.store_events.iter().copied()).unwrap_or_default(),
            remove: median(clock.remove_events.iter().copied()).unwrap_or_default(),
        },
        question_p99_ns: question_ns(99),
        instructions: instructions::<S>(load),
        stored_blocks: clock.stored,
        removed_blocks: clock.removed,
        answers,
    }
}

/// One number for each answer. Not measured.
fn digests<S: Subject>(subject: &mut S, load: &Load) -> Vec<u64> {
    let mut digest = |prompt: &Vec<_>| {
        let answer = subject.ask(&mut S::question(prompt));
        let mut scores = subject.scores(&answer);
        scores.sort_unstable();
        scores.iter().fold(1, |digest, &(rank, blocks)| mix(digest ^ u64::from(rank) << 32 ^ u64::from(blocks)))
    };
    load.prompts.iter().map(&mut digest).collect()
}

/// Meters what is done to an index.
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

/// Meters time. An event has a hundred blocks or so, which hide what reading a clock costs; a question's time has that
/// in it, some 40 ns.
#[derive(Default)]
struct Clock {
    removing: Duration,
    storing: Duration,
    removed: u64,
    stored: u64,
    /// By event: ns a block.
    remove_events: Vec<f64>,
    store_events: Vec<f64>,
}

impl Clock {
    fn question<S: Subject>(&mut self, subject: &mut S, prompt: &[pointsman::protocol::BlockHash]) -> Duration {
        let mut question = S::question(prompt);
        let watch = Stopwatch::start();
        let answer = subject.ask(black_box(&mut question));
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

/// Meters instructions of this thread. Starting and stopping a counter is the kernel's work, which it does not count.
struct Instructions {
    removing: Counter,
    storing: Counter,
    removed: u64,
    stored: u64,
}

/// A counter that stands still; none where the system or its rights do not let one be had.
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

impl Meter for Instructions {
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

/// The same once more, counting instructions.
fn instructions<S: Subject>(load: &Load) -> Option<Costs> {
    let mut meter = Instructions { removing: counter()?, storing: counter()?, removed: 0, stored: 0 };
    let mut asking = counter()?;
    let mut subject = warmed::<S>(load);
    for prompt in &load.prompts {
        let mut question = S::question(prompt);
        drop(counted(&mut asking, || subject.ask(black_box(&mut question))));
    }
    churn(&mut subject, &load.timed, &mut meter);
    Some(Costs {
        store: read(&mut meter.storing) / meter.stored as f64,
        remove: read(&mut meter.removing) / meter.removed as f64,
        question: read(&mut asking) / load.prompts.len() as f64,
    })
}
