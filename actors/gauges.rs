//! Gauges computed from published views once per [`PERIOD`], without cost per request.
//!
//! Runs as a task until the router is down. A removed rank shows 0 and is not updated again. A stopped router shows 0
//! everywhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::Gauge;
use tokio::time::MissedTickBehavior;

use crate::actors::delivery::gate::Gate;
use crate::actors::delivery::strand::Strand;
use crate::actors::io::clock::Clock;
use crate::actors::radix::shards::Shards;
use crate::actors::scheduler::Scheduler;
use crate::actors::telemetry::{Pool, RankCounters, as_f64};
use crate::actors::views::Views;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::rank_report::RankReport;
use crate::config::RouterConfig;
use crate::directory::Directory;
use crate::engine_load::{EngineLoad, EngineReading};
use crate::ingest::StreamState;
use crate::protocol::{Timestamp, WorkerRank};

/// Maximum age of a gauge value.
const PERIOD: Duration = Duration::from_secs(1);

/// Sources of the gauges.
pub(crate) struct GaugeSources {
    pub(crate) config: Arc<RouterConfig>,
    pub(crate) clock: Clock,
    pub(crate) pool: Pool,
    pub(crate) views: Views,
    pub(crate) directory: Arc<Directory>,
    pub(crate) waiting_room: Arc<Gate>,
    pub(crate) shards: Arc<Shards>,
    pub(crate) scheduler: Arc<Strand<Scheduler>>,
}

impl GaugeSources {
    /// Publishes immediately and then once per [`PERIOD`], until the router is down.
    pub(crate) fn watch(self) {
        let mut gauges = Gauges::new(&self.pool);
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(PERIOD);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !self.views.status.is_down() {
                gauges.publish(&self);
                ticks.tick().await;
            }
        });
    }
}

struct Gauges {
    pool: Pool,
    by_rank: BTreeMap<WorkerRank, RankGauges>,
    rank_counters: RankCounters,
    /// By stream state.
    sources: [(StreamState, ZeroedGauge); 5],
    ranks: ZeroedGauge,
    cold_ranks: ZeroedGauge,
    ejected_ranks: ZeroedGauge,
    eligible_ranks: ZeroedGauge,
    refusing_ranks: ZeroedGauge,
    asleep_ranks: ZeroedGauge,
    leases: ZeroedGauge,
    requests_gate: ZeroedGauge,
    events_gate: ZeroedGauge,
    /// Age of the last valid set by discovery source.
    stale_sources: BTreeMap<String, ZeroedGauge>,
    /// Cloned into a query; the extra reference exists until the scheduler has replied.
    queue_asked: Arc<()>,
}

/// A gauge that is set to 0 on drop.
struct ZeroedGauge(Gauge);

impl Drop for ZeroedGauge {
    fn drop(&mut self) {
        self.0.set(0.0);
    }
}

struct RankGauges {
    requests: ZeroedGauge,
    active_blocks: ZeroedGauge,
    prefill_tokens: ZeroedGauge,
    held_blocks: ZeroedGauge,
    kv_degraded: ZeroedGauge,
    /// Bias of predictions: of the time to first token, and between tokens. Present once learned.
    bias: [Option<ZeroedGauge>; 2],
    /// Present after the first load report of the engine.
    engine: Option<EngineGauges>,
}

/// Load reported by the engine of a rank. A missing value is published as NaN.
struct EngineGauges {
    running: ZeroedGauge,
    waiting: ZeroedGauge,
    kv_usage: ZeroedGauge,
    age_seconds: ZeroedGauge,
}

/// Sum over the entries of a rank.
struct RankSum {
    report: RankReport,
    is_degraded: bool,
    /// Learned bias of predictions.
    bias: [Option<f64>; 2],
    /// Latest load report of the engine.
    engine: Option<EngineLoad>,
    is_torn: bool,
}

impl RankSum {
    fn idle(rank: WorkerRank) -> Self {
        Self { report: RankReport::idle(rank), is_degraded: false, bias: [None; 2], engine: None, is_torn: false }
    }
}

impl Gauges {
    fn new(pool: &Pool) -> Self {
        let gauge = |name| ZeroedGauge(pool.gauge(name, &[]));
        let gate = |gate| ZeroedGauge(pool.gauge("pointsman_gate_permits", &[("gate", gate)]));
        Self {
            by_rank: BTreeMap::new(),
            rank_counters: RankCounters::new(pool),
            sources: StreamState::ALL
                .map(|state| (state, ZeroedGauge(pool.gauge("pointsman_kv_sources", &[("state", state.name())])))),
            ranks: gauge("pointsman_ranks"),
            cold_ranks: gauge("pointsman_cold_ranks"),
            ejected_ranks: gauge("pointsman_ejected_ranks"),
            eligible_ranks: gauge("pointsman_eligible_ranks"),
            refusing_ranks: gauge("pointsman_refusing_ranks"),
            asleep_ranks: gauge("pointsman_asleep_ranks"),
            leases: gauge("pointsman_leases"),
            requests_gate: gate("requests"),
            events_gate: gate("events"),
            stale_sources: BTreeMap::new(),
            queue_asked: Arc::default(),
            pool: pool.clone(),
        }
    }

    fn publish(&mut self, sources: &GaugeSources) {
        let GaugeSources { config, clock, views, directory, waiting_room, shards, scheduler, .. } = sources;
        let (entries, now) = (views.ranks.all(), clock.now());
        self.publish_ranks(&entries, now);
        self.rank_counters.sweep(&entries, now);
        self.cold_ranks.0.set(as_f64(views.cold.borrow().len() as u64));
        for status in views.discovery.borrow().iter() {
            let gauge =
                || ZeroedGauge(self.pool.gauge("pointsman_discovery_stale_seconds", &[("source", &status.source)]));
            let gauge = self.stale_sources.entry(status.source.clone()).or_insert_with(gauge);
            gauge.0.set(status.stale_for(clock.now()).as_secs_f64());
        }
        let exclusions = views.exclusions.get();
        self.ejected_ranks.0.set(as_f64((exclusions.ejected.len() + exclusions.down.len()) as u64));
        self.eligible_ranks.0.set(as_f64(views.eligible_ranks() as u64));
        self.refusing_ranks.0.set(as_f64(exclusions.refusing.len() as u64));
        self.asleep_ranks.0.set(as_f64(exclusions.asleep.len() as u64));
        self.leases.0.set(as_f64(directory.len() as u64));
        self.requests_gate.0.set(as_f64(waiting_room.taken()));
        self.events_gate.0.set(as_f64(shards.queued_blocks()));
        // One query at a time, so that queries to a hung scheduler do not accumulate.
        if config.queue.is_enabled() && Arc::strong_count(&self.queue_asked) == 1 {
            let asked = Arc::clone(&self.queue_asked);
            scheduler.query("ShowQueue", move |scheduler| {
                scheduler.show_queue();
                drop(asked);
                || {}
            });
        }
    }

    fn publish_ranks(&mut self, entries: &[Arc<RankEntry>], now: Timestamp) {
        let mut sums: BTreeMap<WorkerRank, RankSum> = BTreeMap::new();
        let mut by_state = [0_u64; 5];
        for entry in entries {
            let sum = sums.entry(entry.rank).or_insert_with(|| RankSum::idle(entry.rank));
            if let Some(state) = entry.source.state() {
                by_state[state as usize] += 1;
                sum.is_degraded = state != StreamState::Live;
            }
            for (latest, bias) in sum.bias.iter_mut().zip(entry.speed.bias()) {
                *latest = bias.or(*latest);
            }
            // The previous values stay for another period.
            sum.is_torn |= !sum.report.add(entry, now);
            sum.engine = entry.engine_load.read().or(sum.engine);
        }
        self.by_rank.retain(|rank, _| sums.contains_key(rank));
        self.ranks.0.set(as_f64(sums.len() as u64));
        for (state, gauge) in &self.sources {
            gauge.0.set(as_f64(by_state[*state as usize]));
        }
        for (rank, sum) in sums {
            let gauges = self.by_rank.entry(rank).or_insert_with(|| RankGauges::new(&self.pool, rank));
            gauges.set(&sum);
            gauges.set_bias(&self.pool, rank, sum.bias);
            if let Some(load) = sum.engine {
                gauges.engine.get_or_insert_with(|| EngineGauges::new(&self.pool, rank)).set(&load, now);
            }
        }
    }
}

impl RankGauges {
    fn new(pool: &Pool, rank: WorkerRank) -> Self {
        let (worker, rank) = (rank.worker.0.to_string(), rank.rank.to_string());
        let gauge = |name| ZeroedGauge(pool.gauge(name, &[("worker", &worker), ("rank", &rank)]));
        Self {
            requests: gauge("pointsman_rank_active_requests"),
            active_blocks: gauge("pointsman_rank_active_blocks"),
            prefill_tokens: gauge("pointsman_rank_prefill_tokens"),
            held_blocks: gauge("pointsman_rank_held_blocks"),
            kv_degraded: gauge("pointsman_rank_kv_degraded"),
            bias: [None, None],
            engine: None,
        }
    }

    fn set_bias(&mut self, pool: &Pool, rank: WorkerRank, bias: [Option<f64>; 2]) {
        for ((gauge, target), bias) in self.bias.iter_mut().zip(["ttft", "itl"]).zip(bias) {
            let Some(bias) = bias else { continue };
            let new = || {
                let (worker, rank) = (rank.worker.0.to_string(), rank.rank.to_string());
                let labels = &[("worker", worker.as_str()), ("rank", &rank), ("target", target)];
                ZeroedGauge(pool.gauge("pointsman_rank_prediction_bias", labels))
            };
            gauge.get_or_insert_with(new).0.set(bias);
        }
    }

    fn set(&self, sum: &RankSum) {
        self.kv_degraded.0.set(as_f64(u64::from(sum.is_degraded)));
        if sum.is_torn {
            return;
        }
        self.requests.0.set(as_f64(sum.report.active_requests));
        self.active_blocks.0.set(as_f64(sum.report.active_blocks));
        self.prefill_tokens.0.set(as_f64(sum.report.prefill_tokens));
        self.held_blocks.0.set(as_f64(sum.report.held_blocks));
    }
}

impl EngineGauges {
    fn new(pool: &Pool, rank: WorkerRank) -> Self {
        let (worker, rank) = (rank.worker.0.to_string(), rank.rank.to_string());
        let gauge = |name| ZeroedGauge(pool.gauge(name, &[("worker", &worker), ("rank", &rank)]));
        Self {
            running: gauge("pointsman_engine_running_requests"),
            waiting: gauge("pointsman_engine_waiting_requests"),
            kv_usage: gauge("pointsman_engine_kv_usage_ratio"),
            age_seconds: gauge("pointsman_engine_load_age_seconds"),
        }
    }

    fn set(&self, load: &EngineLoad, now: Timestamp) {
        let EngineReading { running, waiting, kv_usage, sleep: _ } = load.reading;
        self.running.0.set(running.map_or(f64::NAN, f64::from));
        self.waiting.0.set(waiting.map_or(f64::NAN, f64::from));
        self.kv_usage.0.set(kv_usage.unwrap_or(f64::NAN));
        self.age_seconds.0.set(now.since(load.at).as_secs_f64());
    }
}
