//! Cost of a paused KV event reader: one publisher sends 20,000 events a second over real sockets, its reader is paused
//! for five seconds, and two clients place requests throughout.
//!
//! The publisher is a separate process, so the measured memory is the router's. It is a PUB socket with a high-water
//! mark, beyond which it drops messages as ZeroMQ does, and it has a replay ring. Half of its events store two to five
//! blocks of 16 tokens; the other half remove as many blocks. For each case the benchmark prints the stream states and
//! notes, the time from the end of the pause until the rank is live and caught up, decision latency before, during and
//! after the pause, and memory. At the end the index must hold exactly the blocks in the publisher's cache, whatever
//! was lost.
//!
//! ```sh
//! cargo bench -p pointsman-gateway --bench reader_pause
//! ```

#![expect(clippy::disallowed_types, clippy::print_stdout, reason = "a benchmark reads the clock and prints")]

#[path = "reader_pause/notes.rs"]
mod notes;
#[path = "reader_pause/publisher.rs"]
mod publisher;
#[path = "reader_pause/stream.rs"]
mod stream;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pointsman::protocol::{KvEvent, KvEventsConfig, WorkerConfig, WorkerId, WorkerRank};
use pointsman::{Fault, KvSourceStatus, Prompt, RouteRequest, Router, RouterConfig, StreamState};
use tokio::time::{interval, sleep};

use publisher::Progress;
use stream::{BLOCK_SIZE, CAPACITY_BLOCKS, Stream, tokens};

const BEFORE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_secs(5);
const AFTER: Duration = Duration::from_secs(5);

/// The rank whose reader is paused, and the number of other workers, which publish no events.
const READ: WorkerRank = WorkerRank::new(WorkerId(0), 0);
const OTHERS: u64 = 7;

/// Lag at which a rank counts as caught up: the messages published within this time, in milliseconds.
const ON_THE_WAY_MS: u64 = 20;

/// Configuration of one publisher.
struct Case {
    name: &'static str,
    events_per_message: u64,
    /// Messages queued for a slow reader; further messages are dropped.
    high_water_mark: usize,
    ring_messages: usize,
}

const CASES: [Case; 4] = [
    Case {
        name: "4 events a message, as engines are set up",
        events_per_message: 4,
        high_water_mark: 100_000,
        ring_messages: 10_000,
    },
    Case {
        name: "1 event a message, as engines are set up",
        events_per_message: 1,
        high_water_mark: 100_000,
        ring_messages: 10_000,
    },
    Case {
        name: "4 events a message, loses early, all in the ring",
        events_per_message: 4,
        high_water_mark: 1_000,
        ring_messages: 100_000,
    },
    Case {
        name: "4 events a message, loses early, more than the ring has",
        events_per_message: 4,
        high_water_mark: 1_000,
        ring_messages: 2_000,
    },
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("threads can be had");
    if arguments.first().is_some_and(|command| command == publisher::COMMAND) {
        return runtime.block_on(publisher::run(&arguments[1..]));
    }
    if !arguments.iter().any(|argument| argument == "--bench") {
        return; // `cargo test` builds and runs it without `--bench`
    }
    let notes = notes::install();
    for case in &CASES {
        runtime.block_on(run(case, &notes));
    }
}

/// The publisher's process, killed on drop.
struct Publisher {
    process: Child,
    port: u16,
}

impl Publisher {
    fn start(case: &Case) -> Self {
        let Case { events_per_message, high_water_mark, ring_messages, .. } = case;
        let arguments = [*events_per_message, *high_water_mark as u64, *ring_messages as u64, messages(case)];
        let mut process = Command::new(std::env::current_exe().expect("path of this program"))
            .arg(publisher::COMMAND)
            .args(arguments.map(|argument| argument.to_string()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the publisher starts");
        let mut line = String::new();
        let output = process.stdout.take().expect("stream is piped");
        BufReader::new(output).read_line(&mut line).expect("the publisher names its port");
        Self { port: line.trim().parse().expect("a port"), process }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Number of messages that the publisher sends.
fn messages(case: &Case) -> u64 {
    (BEFORE + PAUSE + AFTER).as_secs() * stream::EVENTS_PER_SECOND / case.events_per_message
}

async fn run(case: &Case, notes: &notes::Notes) {
    let publisher = Publisher::start(case);
    let kv_events = KvEventsConfig {
        endpoint: format!("tcp://127.0.0.1:{}", publisher.port),
        replay_endpoint: Some(format!("tcp://127.0.0.1:{}", publisher.port + 1)),
        topic: String::new(),
    };
    let router = Router::builder(RouterConfig { block_size: Some(BLOCK_SIZE as u32), ..RouterConfig::default() });
    let router = router.start().await.expect("the router starts");
    let read = WorkerConfig {
        total_kv_blocks: Some(CAPACITY_BLOCKS as u32),
        kv_events: Some(kv_events),
        ..WorkerConfig::at("http://127.0.0.1:1")
    };
    router.upsert_worker(READ.worker, read).await.expect("router is running");
    router.register_workers((1..=OTHERS).map(WorkerId)).await.expect("worker registered");

    let progress = Arc::new(Progress::default());
    let polling = tokio::spawn(publisher::poll_progress(publisher.port + 2, Arc::clone(&progress)));
    let seen = Arc::new(Seen { begun: Instant::now(), ..Seen::default() });
    let deciding =
        [0, 1].map(|client| tokio::spawn(decide(router.clone(), client, Arc::clone(&progress), Arc::clone(&seen))));
    let sampling = tokio::spawn(sample(Arc::clone(&seen)));
    let watcher = Watcher { router: router.clone(), progress, case };

    sleep(BEFORE).await;
    let (noted_before, rss_before) = (notes.all(), rss_bytes());
    seen.phase.store(1, Ordering::Relaxed);
    let holding = router.clone();
    let hang = tokio::task::spawn_blocking(move || holding.hang(Fault::Ingest(READ))).await.expect("hang injected");
    let hang = hang.expect("the reader exists");
    sleep(PAUSE).await;
    let lag = watcher.lag();
    seen.phase.store(2, Ordering::Relaxed);
    let since = Instant::now();
    std::thread::spawn(move || drop(hang));
    let (noticed, caught_up) = watcher.caught_up(since).await;
    sleep(AFTER.saturating_sub(since.elapsed())).await;
    watcher.ended().await;
    for task in deciding {
        task.abort();
    }
    sampling.abort();
    polling.abort();

    assert_exact(&router, case).await;
    println!("{}", case.name);
    println!("  behind by {lag} messages at the pause's end; {noticed}; caught up after {:.0} ms", ms(caught_up));
    println!("  notes: {}", notes::since(&noted_before, &notes.all()));
    for (phase, name) in ["before", "during", "after"].iter().enumerate() {
        println!("  decisions {name:<7} {}", seen.latencies(phase));
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let peak = seen.rss_peak.load(Ordering::Relaxed);
    println!("  memory: {:.1} MiB before, {:.1} peak, {:.1} after", mib(rss_before), mib(peak), mib(rss_bytes()));
}

/// Observes the event source of the measured rank.
struct Watcher<'a> {
    router: Router,
    progress: Arc<Progress>,
    case: &'a Case,
}

impl Watcher<'_> {
    fn source(&self) -> KvSourceStatus {
        self.router.kv_sources().into_iter().find(|source| source.rank == READ).expect("the rank has a source")
    }

    /// Published messages that are not applied yet.
    fn lag(&self) -> u64 {
        let applied = self.source().applied.map_or(0, |applied| applied + 1);
        self.progress.published.load(Ordering::Relaxed).saturating_sub(applied)
    }

    /// Stream states after the pause, with times, and the time until the rank is live and caught up.
    async fn caught_up(&self, since: Instant) -> (String, Duration) {
        let on_the_way = ON_THE_WAY_MS * stream::EVENTS_PER_SECOND / 1_000 / self.case.events_per_message;
        let mut went = vec![StreamState::Live.name().to_owned()];
        let (mut trust, mut pace) = (StreamState::Live, interval(Duration::from_millis(1)));
        loop {
            let (lag, source) = (self.lag(), self.source());
            if source.state != trust {
                trust = source.state;
                went.push(format!("{} at {:.0} ms", trust.name(), ms(since.elapsed())));
            }
            if trust == StreamState::Live && lag <= on_the_way {
                return (went.join(", "), since.elapsed());
            }
            assert!(since.elapsed() < Duration::from_secs(60), "behind by {lag}: {source:?}");
            pace.tick().await;
        }
    }

    /// Waits until every published message is applied.
    async fn ended(&self) {
        let (begun, mut pace) = (Instant::now(), interval(Duration::from_millis(5)));
        while self.source().applied != Some(messages(self.case) - 1) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", self.source());
            pace.tick().await;
        }
        self.router.flush().await.expect("the router is up");
    }
}

async fn assert_exact(router: &Router, case: &Case) {
    let mut known = BTreeSet::new();
    for event in router.dump_events().await.expect("the router is up") {
        match event.data {
            KvEvent::Stored { blocks, .. } => known.extend(blocks.iter().map(|block| block.engine_hash.0)),
            KvEvent::Offloaded { .. } => {}
            KvEvent::Removed { .. } | KvEvent::Cleared | KvEvent::TierCleared => panic!("one tier has no holes"),
            KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => panic!("the engine has one cache group"),
        }
    }
    let mut stream = Stream::default();
    (0..messages(case) * case.events_per_message).for_each(|_| drop(stream.next_event()));
    let held = stream.held();
    let (missing, gone) = (held.difference(&known).count(), known.difference(&held).count());
    assert!(missing == 0 && gone == 0, "{}: {missing} blocks are missing, {gone} are gone", case.name);
}

/// Measurements by phase: before, during and after the pause.
#[derive(Debug)]
struct Seen {
    begun: Instant,
    phase: AtomicU64,
    latencies_us: [std::sync::Mutex<Vec<(u32, bool)>>; 3],
    rss_peak: AtomicU64,
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            phase: AtomicU64::default(),
            latencies_us: Default::default(),
            rss_peak: AtomicU64::default(),
        }
    }
}

impl Seen {
    fn latencies(&self, phase: usize) -> String {
        let mut all = self.latencies_us[phase].lock().expect("lock not poisoned").clone();
        all.sort_unstable();
        let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize].0;
        let hits = all.iter().filter(|(_, hit)| *hit).count();
        format!("p50 {} µs, p99 {} µs, {} decisions, {hits} with overlap", at(0.5), at(0.99), all.len())
    }
}

/// Routes a request every millisecond. Every second prompt is one that the measured rank stored recently.
async fn decide(router: Router, client: u64, progress: Arc<Progress>, seen: Arc<Seen>) {
    let mut pace = interval(Duration::from_micros(1_000));
    for n in 0_u64.. {
        pace.tick().await;
        let known = progress.prompt.load(Ordering::Relaxed).saturating_sub(100 + n % 400);
        let tokens = tokens(if n % 2 == 0 { known } else { u64::MAX - n });
        let id = format!("{client}-{n}");
        let begun = Instant::now();
        let placement = router.route(RouteRequest::new(&id, Prompt::Tokens(&tokens))).await.expect("placed");
        let took = u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX);
        let hit = placement.overlap().total_blocks() > 0;
        let phase = usize::try_from(seen.phase.load(Ordering::Relaxed)).expect("phase is 0, 1 or 2");
        // The first half second is warm-up.
        if seen.begun.elapsed() > Duration::from_millis(500) {
            seen.latencies_us[phase].lock().expect("lock not poisoned").push((took, hit));
        }
    }
}

async fn sample(seen: Arc<Seen>) {
    let mut pace = interval(Duration::from_millis(20));
    loop {
        pace.tick().await;
        seen.rss_peak.fetch_max(rss_bytes(), Ordering::Relaxed);
    }
}

/// Resident memory of this process; 0 without /proc.
fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0) * 4096
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
