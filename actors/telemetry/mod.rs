//! Telemetry of a router: metrics, and the phases of each request as a span.
//!
//! Each instrument has a handle, created once so that no message resolves one, and a row in `INSTRUMENTS`. Every metric
//! carries the pool, and label values are bounded. A request costs a few counters and no clock read. The embedder
//! provides recorders, buckets and subscribers. It must install the recorder before the router starts, because a handle
//! belongs to the recorder present at its creation.

mod decisions;
#[cfg(feature = "zmq")]
mod ingest;
mod instruments;
mod phases;
mod predictions;
mod rank_counters;
mod shadow;
mod targets;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram};

pub(crate) use decisions::{BookingResult, Decisions};
pub(crate) use instruments::{Count, Counters, CountersOf, Pool, describe};
pub use phases::RoutePhases;
pub(crate) use phases::{PhaseTimestamps, Phases, route_span, trace_decision, trace_hashes};
pub(crate) use predictions::{Prediction, PromptKind};
pub(crate) use rank_counters::RankCounters;
pub(crate) use shadow::ShadowMeters;

use crate::config::{QueueClass, RouterConfig};
use crate::membership::{Child, WatchedActor};
use crate::protocol::Timestamp;
use crate::queue::Depth;
use crate::schedule::Decision;
use predictions::PredictionMeters;
use targets::TargetMeters;

/// Instruments of the edge and of the supervisor.
pub(crate) struct Meters {
    pub(crate) pool: Pool,
    pub(crate) decisions: Decisions,
    pub(crate) phases: Phases,
    pub(crate) predictions: PredictionMeters,
    /// Met and missed latency targets.
    pub(crate) targets: TargetMeters,
    /// Restarts by role of the actor.
    pub(crate) restarts: Counters,
    /// Hangs by role of the actor.
    pub(crate) hangs: Counters,
    /// Present with a shared cache.
    pub(crate) shared_cache: Option<Arc<SharedCacheMeters>>,
    /// Bookings ended because `load.booking_liveness_ms` passed without a report.
    pub(crate) expired: Counter,
    /// Workers named by two sources.
    pub(crate) discovery_conflicts: Counter,
    /// Events received although events are disabled.
    pub(crate) unused_events: Counter,
    #[cfg(feature = "zmq")]
    pub(crate) ingest: ingest::IngestMeters,
    /// Unusable load reports of engines by cause.
    #[cfg(any(feature = "discovery", feature = "zmq"))]
    pub(crate) engine_load_errors: Counters,
    funnel: Funnel,
}

impl Meters {
    pub(crate) fn new(config: &RouterConfig, has_shared_cache: bool) -> Self {
        let pool = Pool::new(&config.pool);
        Self {
            decisions: Decisions::new(&pool, config),
            phases: Phases::new(&pool),
            predictions: PredictionMeters::new(&pool),
            targets: TargetMeters::new(&pool),
            restarts: pool.counters("pointsman_restarts_total", "role", Child::NAMES),
            hangs: pool.counters("pointsman_hangs_total", "role", WatchedActor::ROLES),
            shared_cache: has_shared_cache.then(|| Arc::new(SharedCacheMeters::new(&pool))),
            expired: pool.counter("pointsman_bookings_expired_total", &[]),
            discovery_conflicts: pool.counter("pointsman_discovery_conflicts_total", &[]),
            unused_events: pool.counter("pointsman_kv_events_refused_total", &[("reason", "not_used")]),
            #[cfg(feature = "zmq")]
            ingest: ingest::IngestMeters::new(&pool),
            #[cfg(any(feature = "discovery", feature = "zmq"))]
            engine_load_errors: pool.counters(
                "pointsman_engine_load_errors_total",
                "cause",
                &["request", "empty", "value", "message"],
            ),
            funnel: Funnel::new(&pool),
            pool,
        }
    }

    /// Records a placed request. `knows_overlap` is true if the index was queried for it.
    pub(crate) fn placed(&self, prompt_tokens: u32, block_size: u32, decision: &Decision, knows_overlap: bool) {
        self.funnel.prompt_tokens.increment(u64::from(prompt_tokens));
        if knows_overlap && prompt_tokens > 0 {
            self.funnel.count(prompt_tokens, block_size, decision);
        }
        if let Some(shared_cache) = &self.shared_cache {
            shared_cache.beyond_blocks.record(f64::from(decision.shared_cache_blocks()));
        }
    }

    /// Names of the kinds of requests whose predictions never match.
    pub(crate) fn never_matching(&self) -> impl Iterator<Item = String> {
        self.predictions.never_matching().map(|kind| {
            let kind = kind.name();
            format!("predicted and delivered cached tokens of requests with {kind} prompts never agree: router and engines may hash them differently")
        })
    }

    /// Compares a prediction with the cached tokens that the engine reported.
    pub(crate) fn delivered(&self, prediction: &Prediction, predicted_tokens: u32, delivered_tokens: u32) {
        self.funnel.delivered.increment(u64::from(delivered_tokens));
        if let Some(kind) = prediction.kind {
            self.predictions.count(kind, prediction.is_index_complete, predicted_tokens, delivered_tokens);
        }
    }
}

/// Prompt tokens by cache stage (reachable, chosen, delivered), and placements on ranks without the longest match.
struct Funnel {
    prompt_tokens: Counter,
    reachable: Counter,
    selected: Counter,
    delivered: Counter,
    overlap_ratio: Histogram,
    reachable_overlap_ratio: Histogram,
    forgone: Counter,
    forgone_blocks: Counter,
}

impl Funnel {
    fn new(pool: &Pool) -> Self {
        let cached = |stage| pool.counter("pointsman_cached_tokens_total", &[("stage", stage)]);
        Self {
            prompt_tokens: pool.counter("pointsman_prompt_tokens_total", &[]),
            reachable: cached("reachable"),
            selected: cached("selected"),
            delivered: cached("delivered"),
            overlap_ratio: pool.histogram("pointsman_overlap_ratio", &[]),
            reachable_overlap_ratio: pool.histogram("pointsman_reachable_overlap_ratio", &[]),
            forgone: pool.counter("pointsman_overlap_forgone_total", &[]),
            forgone_blocks: pool.counter("pointsman_overlap_forgone_blocks_total", &[]),
        }
    }

    fn count(&self, prompt_tokens: u32, block_size: u32, decision: &Decision) {
        // With windowed prompts, the last window may extend one token beyond the prompt.
        let reachable = decision.reachable_blocks().saturating_mul(block_size).min(prompt_tokens);
        let weighted = decision.cached_tokens().min(prompt_tokens);
        self.reachable.increment(u64::from(reachable));
        self.selected.increment(u64::from(decision.predicted_cached_tokens()));
        self.reachable_overlap_ratio.record(f64::from(reachable) / f64::from(prompt_tokens));
        self.overlap_ratio.record(f64::from(weighted) / f64::from(prompt_tokens));
        let forgone = decision.forgone_blocks();
        if forgone > 0 {
            self.forgone.increment(1);
            self.forgone_blocks.increment(forgone.into());
        }
    }
}

/// Results of shared cache queries.
pub(crate) struct SharedCacheMeters {
    /// Queries without a response in time.
    pub(crate) late: Counter,
    errors: Counter,
    hit_rate: Histogram,
    beyond_blocks: Histogram,
}

impl SharedCacheMeters {
    fn new(pool: &Pool) -> Self {
        let failed = |kind| pool.counter("pointsman_shared_cache_errors_total", &[("kind", kind)]);
        Self {
            late: failed("late"),
            errors: failed("error"),
            hit_rate: pool.histogram("pointsman_shared_cache_hit_rate", &[]),
            beyond_blocks: pool.histogram("pointsman_shared_cache_beyond_blocks", &[]),
        }
    }

    /// Counts a query's result: `held` of `queried` blocks.
    pub(crate) fn count_hits(&self, held: u32, queried: usize) {
        let queried = u32::try_from(queried).unwrap_or(u32::MAX).max(1);
        self.hit_rate.record(f64::from(held.min(queried)) / f64::from(queried));
    }

    /// Counts a failed query.
    pub(crate) fn count_error(&self) {
        self.errors.increment(1);
    }
}

/// Gauges of waiting requests, in the order of the classes. Dropping it sets them to 0.
pub(crate) struct QueueMeters(Vec<ClassMeters>);

struct ClassMeters {
    requests: Gauge,
    raw_tokens: Gauge,
    cached_tokens: Gauge,
    oldest_age: Gauge,
}

impl QueueMeters {
    pub(crate) fn new(config: &RouterConfig) -> Self {
        let pool = Pool::new(&config.pool);
        let class = |class: QueueClass| {
            let gauge = |name| pool.gauge(name, &[("class", class.name.as_str())]);
            ClassMeters {
                requests: gauge("pointsman_queue_requests"),
                raw_tokens: gauge("pointsman_queue_raw_tokens"),
                cached_tokens: gauge("pointsman_queue_cached_tokens"),
                oldest_age: gauge("pointsman_queue_oldest_age_seconds"),
            }
        };
        Self(config.queue.classes_or_default().into_iter().map(class).collect())
    }

    pub(crate) fn show<'a>(&self, depths: impl Iterator<Item = (&'a str, Depth)>, now: Timestamp) {
        for (meters, (_, depth)) in self.0.iter().zip(depths) {
            meters.show(depth, now);
        }
    }
}

impl ClassMeters {
    fn show(&self, depth: Depth, now: Timestamp) {
        self.requests.set(as_f64(depth.requests));
        self.raw_tokens.set(as_f64(depth.raw_tokens));
        self.cached_tokens.set(as_f64(depth.cached_tokens));
        self.oldest_age.set(depth.oldest.map_or(0.0, |oldest| now.since(oldest).as_secs_f64()));
    }
}

impl Drop for QueueMeters {
    fn drop(&mut self) {
        self.0.iter().for_each(|meters| meters.show(Depth::default(), Timestamp::default()));
    }
}

/// Gauge value of a count. Above 2^53 it is rounded.
pub(crate) fn as_f64(count: u64) -> f64 {
    count as f64
}
