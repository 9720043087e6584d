//! Held load: a constant number of requests in flight at a constant rate, with the KV events of their ranks.
//!
//! A pacer thread spawns a task per request. The task routes the request, publishes the events of the chosen rank, and
//! ends the oldest request once more than `inflight` are out. Each request has a shared prefix and blocks of its own;
//! the rank removes as many of its oldest blocks as it stores. Metrics are recorded and rendered every 15 s, as for an
//! embedder with a scraper. Detected hangs are counted; no actor hangs. At the end the residue is counted: bookings, load,
//! waiting requests and index blocks that are left after all requests and a `Cleared` event per rank.

mod rank;
mod report;

use std::collections::VecDeque;
use std::io::Write;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::Args;
use hdrhistogram::Histogram;
use pointsman::error::Down;
use pointsman::protocol::{KvEvent, RouterEvent, StorageTier};
use pointsman::{Placement, Prompt, RankReport, RouteRequest, Router};
use pointsman_trial::engine::EngineConfig;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::Failed;
use crate::fleet::{Fleet, Setup};
use crate::measure::{Stopwatch, process_cpu, rss_bytes};
use crate::progress::Progress;
use crate::replay::{Gaps, Percentiles, pace};
use crate::results::write_figures;
use crate::targets::{Embedded, Target as _, not_started};
use rank::{HeldRank, prompt};
use report::{HoldReport, Resident};

/// Tokens per block.
const BLOCK_SIZE: u32 = 64;

/// Longest recorded route time, a minute in nanoseconds. Longer ones count as this.
const ROUTE_NS_MAX: u64 = 60_000_000_000;

/// Seconds between two renderings of the metrics.
const SCRAPE_S: u64 = 15;

/// Limit of the wait for the end of all bookings. No figure depends on it.
const SETTLE: Duration = Duration::from_secs(30);

/// Holds a constant load on an embedded router and reports route times, memory and residue
#[derive(Args, Clone, Debug)]
pub struct Hold {
    /// Number of simulated workers
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub workers: u32,
    /// Data-parallel ranks per worker
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub dp_size: u32,
    /// Requests in flight
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub inflight: u32,
    /// Requests per second, at even gaps
    #[arg(long, default_value = "2000")]
    pub rate: NonZeroU32,
    /// KV events per request: half of them store two blocks each, half remove two
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub events: u32,
    /// Own KV blocks of a rank, without shared prefixes
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub kv_blocks: u32,
    /// Time before the measurement, in seconds. The caches should fill within it
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub warm_up_s: u32,
    /// Measured time in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// Threads of the runtime shared by requests and router
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub threads: u8,
    /// Print the report as one JSON object
    #[arg(long)]
    pub json: bool,
}

impl Hold {
    /// Runs the load and writes the report. `metrics` renders the metrics of this process.
    ///
    /// # Errors
    /// A request failed, or bookings, load, waiting requests or index blocks were left.
    pub fn run(&self, metrics: impl Fn() -> String + Send + Sync + 'static, out: impl Write) -> Result<(), Failed> {
        let report = crate::runtime(self.threads.into())?.block_on(self.hold(Arc::new(metrics)))?;
        write_figures(out, &report, self.json)?;
        report.violation().map_or(Ok(()), |violation| Err(format!("failed: {violation}").into()))
    }

    async fn hold(&self, metrics: Metrics) -> Result<HoldReport, Failed> {
        let engine = EngineConfig { block_size: BLOCK_SIZE, kv_blocks: 65_537, ..EngineConfig::default() };
        let engines = vec![engine; self.workers as usize];
        let setup = Setup { engines, ..Setup::new(self.workers, self.dp_size) };
        let target = Embedded::start(&setup).await.map_err(not_started::<Embedded>)?;
        let shared = Arc::new(Shared::new(self.clone(), target.router().clone(), setup.fleet, metrics));
        shared.fill().await?;
        let (sender, runtime) = (Arc::clone(&shared), Handle::current());
        let pacer = tokio::task::spawn_blocking(move || sender.send_all(&runtime));
        let (mut tasks, mut report) = pacer.await?;
        while let Some(ended) = tasks.join_next().await {
            ended?;
        }
        shared.finish(&mut report).await?;
        target.shutdown().await;
        Ok(report)
    }
}

/// Renders the metrics of this process.
type Metrics = Arc<dyn Fn() -> String + Send + Sync>;

/// Samples above 0 whose lines begin with `name`, without it.
fn samples(page: &str, name: &str) -> Vec<String> {
    let samples = page.lines().filter_map(|line| line.strip_prefix(name));
    samples.filter(|sample| !sample.ends_with(" 0")).map(str::to_owned).collect()
}

/// State shared by the tasks of requests.
struct Shared {
    hold: Hold,
    router: Router,
    fleet: Fleet,
    ranks: Vec<Mutex<HeldRank>>,
    held: Mutex<VecDeque<Placement>>,
    route_ns: Mutex<Histogram<u64>>,
    ended: AtomicU64,
    events: AtomicU64,
    failures: Mutex<Vec<String>>,
    metrics: Metrics,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, ROUTE_NS_MAX, 3).expect("the bounds are valid")
}

impl Shared {
    fn new(hold: Hold, router: Router, fleet: Fleet, metrics: Metrics) -> Self {
        Self {
            ranks: (0..fleet.ranks()).map(|n| Mutex::new(HeldRank::new(n, hold.kv_blocks as usize))).collect(),
            held: Mutex::new(VecDeque::with_capacity(hold.inflight as usize + 1)),
            route_ns: Mutex::new(histogram()),
            ended: AtomicU64::new(0),
            events: AtomicU64::new(0),
            failures: Mutex::default(),
            metrics,
            hold,
            router,
            fleet,
        }
    }

    /// Stores the shared prefixes on every rank.
    async fn fill(&self) -> Result<(), Down> {
        for RankReport { rank, .. } in self.router.rank_reports() {
            let Some(n) = self.fleet.index(rank) else { continue };
            let stored = lock(&self.ranks[n]).fill();
            let events = stored.into_iter().map(|data| RouterEvent { rank, tier: StorageTier::Device, data });
            self.router.apply_events(events.collect()).await?;
        }
        Ok(())
    }

    /// The pacer: spawns each request at its time, and samples the resident memory every second.
    fn send_all(self: Arc<Self>, runtime: &Handle) -> (JoinSet<()>, HoldReport) {
        let rate = u64::from(self.hold.rate.get());
        let (warm_up, measured) = (u64::from(self.hold.warm_up_s) * rate, u64::from(self.hold.seconds) * rate);
        let (mut tasks, mut report, mut rss) = (JoinSet::new(), HoldReport::default(), Vec::new());
        let (mut started, mut cpu) = (Stopwatch::start(), process_cpu());
        let progress = Progress::new((self.hold.warm_up_s + self.hold.seconds) as usize, "seconds");
        let mut numbers = 0..warm_up + measured;
        let next = || {
            let n = numbers.next()?;
            if n == warm_up {
                *lock(&self.route_ns) = histogram();
                (started, cpu) = (Stopwatch::start(), process_cpu());
                (report.routed, report.events) = (self.ended.load(Relaxed), self.events.load(Relaxed));
                report.index_blocks[0] = self.index_blocks();
            }
            if n >= warm_up && (n - warm_up).is_multiple_of(rate) {
                rss.extend(rss_bytes());
            }
            progress.add(usize::from((n + 1).is_multiple_of(rate)));
            if n.is_multiple_of(SCRAPE_S * rate) {
                let metrics = Arc::clone(&self.metrics);
                drop(runtime.spawn_blocking(move || drop(metrics())));
            }
            Some(n)
        };
        pace(&Gaps::even(self.hold.rate), 0, next, |n, arrival| {
            tasks.spawn_on(Arc::clone(&self).request(n, arrival), runtime);
            while tasks.try_join_next().is_some() {}
        });
        report.wall_s = started.elapsed().as_secs_f64();
        report.cpu_s = (process_cpu() - cpu).as_secs_f64();
        rss.extend(rss_bytes());
        report.rss = Resident::of(&rss);
        report.routed = self.ended.load(Relaxed) - report.routed;
        report.events = self.events.load(Relaxed) - report.events;
        report.inflight = lock(&self.held).len();
        let times = std::mem::replace(&mut *lock(&self.route_ns), histogram());
        let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|share| times.value_at_quantile(share) as f64 / 1e3);
        (report.route_us, report.route_us_max) = (Percentiles { p50, p99, p999 }, max);
        report.index_blocks[1] = self.index_blocks();
        (tasks, report)
    }

    fn index_blocks(&self) -> u64 {
        self.router.rank_reports().iter().map(|rank| rank.held_blocks).sum()
    }

    async fn request(self: Arc<Self>, n: u64, arrival: Stopwatch) {
        let tokens = prompt(n);
        let routed = self.router.route(RouteRequest::new(n.to_string(), Prompt::Tokens(&tokens))).await;
        let route_ns = u64::try_from(arrival.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let placement = match routed {
            Ok(placement) => placement,
            Err(error) => return lock(&self.failures).push(error.to_string()),
        };
        lock(&self.route_ns).saturating_record(route_ns);
        let Some(rank) = self.fleet.index(placement.rank()) else {
            return lock(&self.failures).push(format!("rank {} is not in the fleet", placement.rank()));
        };
        let changes = lock(&self.ranks[rank]).serve(&tokens, self.hold.events);
        let rank = placement.rank();
        let events: Vec<_> =
            changes.into_iter().map(|data| RouterEvent { rank, tier: StorageTier::Device, data }).collect();
        self.events.fetch_add(events.len() as u64, Relaxed);
        if let Err(error) = self.router.apply_events(events).await {
            lock(&self.failures).push(error.to_string());
        }
        placement.prefill_completed();
        self.ended.fetch_add(1, Relaxed);
        let oldest = {
            let mut held = lock(&self.held);
            held.push_back(placement);
            if held.len() > self.hold.inflight as usize { held.pop_front() } else { None }
        };
        drop(oldest);
    }

    /// Ends all requests, clears the ranks and counts the residue.
    async fn finish(&self, report: &mut HoldReport) -> Result<(), Failed> {
        lock(&self.held).clear();
        let cleared = self.router.rank_reports().into_iter().map(|RankReport { rank, .. }| RouterEvent {
            rank,
            tier: StorageTier::Device,
            data: KvEvent::Cleared,
        });
        self.router.apply_events(cleared.collect()).await?;
        self.router.flush().await?;
        let waited = Stopwatch::start();
        loop {
            report.left_waiting = 0;
            for class in self.router.pending().await? {
                report.left_waiting += class.depth.requests;
            }
            report.left_bookings = self.router.health().leases;
            report.left_blocks = self.router.rank_reports().iter().map(|rank| rank.active_blocks).sum();
            report.left_index_blocks = self.index_blocks();
            if report.has_no_residue() || waited.elapsed() > SETTLE {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        report.restarts = self.router.health().restarts;
        report.hangs = samples(&(self.metrics)(), "pointsman_hangs_total{");
        report.failures = std::mem::take(&mut *lock(&self.failures));
        Ok(())
    }
}
