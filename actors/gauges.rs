//! Gauges computed from published views once per [`PERIOD`], without cost per request.
//!
//! Runs as a task until the router is down. A removed rank shows 0 and is not updated again. A stopped router shows 0
//! everywhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::time::MissedTickBehavior;

use crate::actors::delivery::gate::Gate;
use crate::actors::delivery::strand::Strand;
use crate::actors::io::clock::Clock;
use crate::actors::radix::shards::Shards;
use crate::actors::scheduler::{ProgramReport, Scheduler};
use crate::actors::telemetry::{Pool, RankCounters, as_f64};
use crate::actors::views::Views;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::rank_report::RankReport;
use crate::directory::Directory;
use crate::engine_load::EngineLoad;
use crate::ingest::StreamState;
use crate::protocol::{Timestamp, WorkerRank};
use crate::session::Returns;

/// Maximum age of a gauge value.
const PERIOD: Duration = Duration::from_secs(1);

/// Sources of the gauges.
pub(crate) struct GaugeSources {
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
    fleet: GaugeSet,
    by_rank: BTreeMap<WorkerRank, GaugeSet>,
    rank_counters: RankCounters,
    programs: ProgramMeters,
}

/// Meters of programs, from the replies of the scheduler.
struct ProgramMeters {
    returns: Counter,
    held_blocks: Counter,
    evicted_blocks: Counter,
    holds: Counter,
    hold_seconds: Counter,
    /// Returns at the last reply.
    seen: Returns,
    /// Outstanding reply, of which there is at most one.
    answer: Option<oneshot::Receiver<ProgramReport>>,
}

impl ProgramMeters {
    fn new(pool: &Pool) -> Self {
        let blocks = |result| pool.counter("pointsman_program_blocks_total", &[("result", result)]);
        Self {
            returns: pool.counter("pointsman_program_returns_total", &[]),
            held_blocks: blocks("held"),
            evicted_blocks: blocks("evicted"),
            holds: pool.counter("pointsman_program_holds_total", &[]),
            hold_seconds: pool.counter("pointsman_program_hold_seconds_total", &[]),
            seen: Returns::default(),
            answer: None,
        }
    }

    /// Shows the last reply and requests the next one, with the metrics of the queue. One query at a time, so that
    /// queries to a hung scheduler do not accumulate.
    fn publish(&mut self, sources: &GaugeSources, fleet: &mut GaugeSet, by_rank: &mut BTreeMap<WorkerRank, GaugeSet>) {
        let reply = self.answer.as_mut().map(oneshot::Receiver::try_recv);
        if matches!(reply, Some(Err(TryRecvError::Empty))) {
            return;
        }
        self.answer = Some(sources.scheduler.ask(|scheduler| {
            scheduler.show_queue();
            scheduler.programs()
        }));
        let Some(Ok(report)) = reply else { return };
        let Returns { calls, held_blocks, evicted_blocks, holds, hold_seconds } = report.returns.since(self.seen);
        self.seen = report.returns;
        self.holds.increment(holds);
        self.hold_seconds.increment(hold_seconds);
        self.returns.increment(calls);
        self.held_blocks.increment(held_blocks);
        self.evicted_blocks.increment(evicted_blocks);
        let active = sources.directory.programs();
        for (state, count) in [("active", active), ("idle", report.programs.saturating_sub(active))] {
            fleet.set_of("pointsman_programs", Some(("state", state)), as_f64(count as u64));
        }
        fleet.set("pointsman_held_calls", as_f64(report.held as u64));
        let ratios = [
            ("pointsman_rank_working_set_ratio", report.working_sets),
            ("pointsman_rank_claimed_ratio", report.claims),
        ];
        for (name, ratios) in ratios {
            for (rank, ratio) in ratios {
                if let Some(gauges) = by_rank.get_mut(&rank) {
                    gauges.set(name, ratio);
                }
            }
        }
    }
}

/// Gauges with the same first labels, created with their first values. On drop they are set to 0.
struct GaugeSet {
    pool: Pool,
    labels: Vec<(&'static str, String)>,
    /// By name and the value of an own last label.
    gauges: BTreeMap<(&'static str, String), Gauge>,
}

impl GaugeSet {
    fn new(pool: &Pool, labels: Vec<(&'static str, String)>) -> Self {
        Self { pool: pool.clone(), labels, gauges: BTreeMap::new() }
    }

    fn set(&mut self, name: &'static str, value: f64) {
        self.set_of(name, None, value);
    }

    fn set_of(&mut self, name: &'static str, own: Option<(&'static str, &str)>, value: f64) {
        let key = (name, own.map_or_else(String::new, |(_, value)| value.to_owned()));
        let new = || {
            let common = self.labels.iter().map(|(label, value)| (*label, value.as_str()));
            self.pool.gauge(name, &common.chain(own).collect::<Vec<_>>())
        };
        self.gauges.entry(key).or_insert_with(new).set(value);
    }
}

impl Drop for GaugeSet {
    fn drop(&mut self) {
        self.gauges.values().for_each(|gauge| gauge.set(0.0));
    }
}

/// Sum over the entries of a rank.
#[derive(Default)]
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
    fn show(&self, gauges: &mut GaugeSet, now: Timestamp) {
        gauges.set("pointsman_rank_kv_degraded", as_f64(u64::from(self.is_degraded)));
        if !self.is_torn {
            gauges.set("pointsman_rank_active_requests", as_f64(self.report.active_requests));
            gauges.set("pointsman_rank_active_blocks", as_f64(self.report.active_blocks));
            gauges.set("pointsman_rank_prefill_tokens", as_f64(self.report.prefill_tokens));
            gauges.set("pointsman_rank_held_blocks", as_f64(self.report.held_blocks));
        }
        for (target, bias) in ["ttft", "itl"].into_iter().zip(self.bias) {
            if let Some(bias) = bias {
                gauges.set_of("pointsman_rank_prediction_bias", Some(("target", target)), bias);
            }
        }
        if let Some(EngineLoad { reading, at, .. }) = &self.engine {
            gauges.set("pointsman_engine_running_requests", reading.running.map_or(f64::NAN, f64::from));
            gauges.set("pointsman_engine_waiting_requests", reading.waiting.map_or(f64::NAN, f64::from));
            gauges.set("pointsman_engine_kv_usage_ratio", reading.kv_usage.unwrap_or(f64::NAN));
            gauges.set("pointsman_engine_load_age_seconds", now.since(*at).as_secs_f64());
        }
    }
}

impl Gauges {
    fn new(pool: &Pool) -> Self {
        Self {
            fleet: GaugeSet::new(pool, Vec::new()),
            by_rank: BTreeMap::new(),
            rank_counters: RankCounters::new(pool),
            programs: ProgramMeters::new(pool),
        }
    }

    fn publish(&mut self, sources: &GaugeSources) {
        let GaugeSources { clock, views, directory, waiting_room, shards, .. } = sources;
        let (entries, now) = (views.ranks.all(), clock.now());
        self.publish_ranks(&entries, now);
        self.rank_counters.sweep(&entries, now);
        for status in views.discovery.borrow().iter() {
            let stale = status.stale_for(clock.now()).as_secs_f64();
            self.fleet.set_of("pointsman_discovery_stale_seconds", Some(("source", &status.source)), stale);
        }
        let exclusions = views.exclusions.get();
        let counts = [
            ("pointsman_cold_ranks", views.cold.borrow().len()),
            ("pointsman_ejected_ranks", exclusions.ejected.len() + exclusions.down.len()),
            ("pointsman_eligible_ranks", views.eligible_ranks()),
            ("pointsman_stalled_ranks", entries.iter().filter(|entry| entry.stalls.is_overdue(now)).count()),
            ("pointsman_refusing_ranks", exclusions.refusing.len()),
            ("pointsman_asleep_ranks", exclusions.asleep.len()),
            ("pointsman_leases", directory.len()),
        ];
        for (name, count) in counts {
            self.fleet.set(name, as_f64(count as u64));
        }
        for (gate, permits) in [("requests", waiting_room.taken()), ("events", shards.queued_blocks())] {
            self.fleet.set_of("pointsman_gate_permits", Some(("gate", gate)), as_f64(permits));
        }
        self.programs.publish(sources, &mut self.fleet, &mut self.by_rank);
    }

    fn publish_ranks(&mut self, entries: &[Arc<RankEntry>], now: Timestamp) {
        let mut sums: BTreeMap<WorkerRank, RankSum> = BTreeMap::new();
        let mut by_state = [0_u64; 5];
        for entry in entries {
            let sum = sums.entry(entry.rank).or_insert_with(|| RankSum {
                report: RankReport { rank: entry.rank, ..RankReport::default() },
                ..RankSum::default()
            });
            if let Some(state) = entry.source.state() {
                by_state[state as usize] += 1;
                sum.is_degraded = state != StreamState::Live;
            }
            for (latest, bias) in sum.bias.iter_mut().zip(entry.cells.speed.bias()) {
                *latest = bias.or(*latest);
            }
            // The previous values stay for another period.
            sum.is_torn |= !sum.report.add(entry, now);
            sum.engine = entry.cells.engine_load.read().or(sum.engine);
        }
        self.by_rank.retain(|rank, _| sums.contains_key(rank));
        self.fleet.set("pointsman_ranks", as_f64(sums.len() as u64));
        for (state, count) in StreamState::ALL.into_iter().zip(by_state) {
            self.fleet.set_of("pointsman_kv_sources", Some(("state", state.name())), as_f64(count));
        }
        for (rank, sum) in sums {
            let labels = || vec![("worker", rank.worker.0.to_string()), ("rank", rank.rank.to_string())];
            let new = || GaugeSet::new(&self.fleet.pool, labels());
            sum.show(self.by_rank.entry(rank).or_insert_with(new), now);
        }
    }
}
