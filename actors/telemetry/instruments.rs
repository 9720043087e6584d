//! Every instrument there is: name, kind, unit, labels, and what it tells.
//!
//! Owns the one table that handles are checked against, that recorders are told of, and that `docs/metrics.md` shows.

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram, Label, SharedString, Unit};

/// One metric.
#[derive(Debug)]
pub(crate) struct Instrument {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Absent for ratios.
    pub(crate) unit: Option<Unit>,
    /// Beside `pool`, which every one carries.
    pub(crate) labels: &'static [&'static str],
    pub(crate) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Instrument {
    Instrument { name, kind: Kind::Counter, unit: Some(Unit::Count), labels, help }
}

const fn gauge(name: &'static str, unit: Unit, labels: &'static [&'static str], help: &'static str) -> Instrument {
    Instrument { name, kind: Kind::Gauge, unit: Some(unit), labels, help }
}

const fn histogram(
    name: &'static str,
    unit: Option<Unit>,
    labels: &'static [&'static str],
    help: &'static str,
) -> Instrument {
    Instrument { name, kind: Kind::Histogram, unit, labels, help }
}

const RANK: &[&str] = &["worker", "rank"];
const CLASS: &[&str] = &["class"];

/// In the order of `docs/metrics.md`.
pub(crate) const INSTRUMENTS: &[Instrument] = &[
    counter(
        "pointsman_decisions_total",
        &["outcome", "reason"],
        "Requests for a booking, by what became of them: `outcome` is `placed`, `rejected` or `error`.",
    ),
    histogram(
        "pointsman_phase_duration_seconds",
        Some(Unit::Seconds),
        &["phase"],
        "Time a placed request spent in `phase`: `hash`, `overlap`, `decide`, `book`, and in `total`. Sampled.",
    ),
    counter("pointsman_prompt_tokens_total", &[], "Prompt tokens of routed requests that were placed."),
    counter(
        "pointsman_cached_tokens_total",
        &["stage"],
        "Those of them that were cached: `reachable` on the eligible rank that has most, `selected` on the one chosen, \
         `delivered` as the embedder reports.",
    ),
    histogram(
        "pointsman_overlap_ratio",
        None,
        &[],
        "Effective cached tokens on the chosen rank, as a share of the prompt.",
    ),
    histogram(
        "pointsman_reachable_overlap_ratio",
        None,
        &[],
        "Cached tokens on the eligible rank that has most, as a share of the prompt.",
    ),
    counter(
        "pointsman_prediction_tokens_total",
        &["side"],
        "Cached tokens of requests that were reported, as `predicted` when they were placed and as `delivered`.",
    ),
    histogram(
        "pointsman_prediction_error_tokens",
        Some(Unit::Count),
        &["result"],
        "How far the two are apart, by whether the prediction was `over`, `under` or `exact`.",
    ),
    histogram(
        "pointsman_predicted_ttft_error_seconds",
        Some(Unit::Seconds),
        &["result"],
        "How far first tokens came from when they were expected, by whether that was `early` or `late`. With policy `latency`.",
    ),
    counter(
        "pointsman_never_matched_total",
        &["kind"],
        "Alarms: 64 reports in a row of this `kind` of request contradicted their predictions.",
    ),
    gauge("pointsman_queue_requests", Unit::Count, CLASS, "Requests that wait."),
    gauge("pointsman_queue_raw_tokens", Unit::Count, CLASS, "Prompt tokens of requests that wait."),
    gauge(
        "pointsman_queue_cached_tokens",
        Unit::Count,
        CLASS,
        "Those of them that are cached on the eligible rank that has most.",
    ),
    gauge("pointsman_queue_oldest_age_seconds", Unit::Seconds, CLASS, "How long the oldest of them has waited."),
    counter(
        "pointsman_queue_backpressure_total",
        &["class", "limit"],
        "Requests refused because they would have had to wait and might not, by the `limit` that said so.",
    ),
    gauge("pointsman_rank_active_requests", Unit::Count, RANK, "Requests booked on the rank."),
    gauge("pointsman_rank_active_blocks", Unit::Count, RANK, "Blocks that they guard."),
    gauge("pointsman_rank_prefill_tokens", Unit::Count, RANK, "Prompt tokens that the rank has yet to compute."),
    gauge("pointsman_rank_held_blocks", Unit::Count, RANK, "Blocks that the index knows on the rank, over all tiers."),
    gauge("pointsman_engine_running_requests", Unit::Count, RANK, "Requests that the rank's engine last said it runs."),
    gauge("pointsman_engine_waiting_requests", Unit::Count, RANK, "Requests that it last said wait in its queue."),
    Instrument {
        name: "pointsman_engine_kv_usage_ratio",
        kind: Kind::Gauge,
        unit: None,
        labels: RANK,
        help: "Share of its KV cache that it last said is in use.",
    },
    gauge("pointsman_engine_load_age_seconds", Unit::Seconds, RANK, "How long ago it last said anything."),
    counter(
        "pointsman_engine_load_errors_total",
        &["cause"],
        "What engines said of their load and could not be used: a `request` without answer, an `empty` page, a `value` \
         that is none, a `message` that is none.",
    ),
    gauge("pointsman_ejected_ranks", Unit::Count, &[], "Ranks that are out of service for their health."),
    gauge(
        "pointsman_eligible_ranks",
        Unit::Count,
        &[],
        "Ranks that can serve: neither draining, unavailable nor ejected.",
    ),
    gauge("pointsman_refusing_ranks", Unit::Count, &[], "Ranks in a back-off after refused requests."),
    counter(
        "pointsman_ejections_total",
        &["cause"],
        "Ranks put out of service, by what spoke against them: a `probe` of the engine, or `outcomes` of requests.",
    ),
    gauge("pointsman_ranks", Unit::Count, &[], "Ranks that are there."),
    gauge("pointsman_cold_ranks", Unit::Count, &[], "Ranks whose cache contents were lost and must be sent again."),
    gauge("pointsman_leases", Unit::Count, &[], "Bookings and requests that have not ended."),
    counter(
        "pointsman_bookings_expired_total",
        &[],
        "Bookings by id that were ended because nothing was heard of them for `booking_liveness_ms`.",
    ),
    gauge(
        "pointsman_gate_permits",
        Unit::Count,
        &["gate"],
        "Permits in use: `requests` of `requests_max`, and blocks of `events` of `event_blocks_max` over all shards.",
    ),
    counter(
        "pointsman_kv_event_blocks_total",
        &["result"],
        "Blocks named by KV events, by what the index did with them.",
    ),
    counter("pointsman_kv_events_refused_total", &["reason"], "KV events that changed nothing, by `reason`."),
    gauge(
        "pointsman_kv_sources",
        Unit::Count,
        &["trust"],
        "Ranks whose KV events the router reads by itself, by how far they are trusted.",
    ),
    gauge(
        "pointsman_rank_kv_doubted",
        Unit::Count,
        RANK,
        "1 while the rank's KV events are read and in doubt (`Router::kv_sources` says why), else 0.",
    ),
    counter(
        "pointsman_kv_source_notes_total",
        &["note"],
        "What was noticed in the sequence of KV events: losses, repetitions, new incarnations, recoveries.",
    ),
    counter(
        "pointsman_kv_source_errors_total",
        &["cause"],
        "Connections to engines' event sockets that failed or ended, and messages that were refused, by `cause`.",
    ),
    counter(
        "pointsman_kv_findings_total",
        &["finding"],
        "KV events, or parts of them, that could not be used, by what was found.",
    ),
    histogram(
        "pointsman_kv_source_heal_seconds",
        Some(Unit::Seconds),
        &[],
        "From the first doubt in a rank's KV events until they were trusted again.",
    ),
    counter("pointsman_predicted_blocks_total", &["result"], "Blocks predicted to be cached, by what became of them."),
    gauge(
        "pointsman_believed_blocks",
        Unit::Count,
        &["shard"],
        "Blocks that are taken to be cached on predictions alone.",
    ),
    gauge("pointsman_index_bytes", Unit::Bytes, &["shard"], "Memory that an index shard takes."),
    counter(
        "pointsman_index_evicted_blocks_total",
        &["shard"],
        "Blocks that an index shard forgot to stay within `index_bytes_max`.",
    ),
    histogram(
        "pointsman_shared_cache_hit_rate",
        None,
        &[],
        "Blocks that the shared cache had, as a share of those it was asked for.",
    ),
    histogram(
        "pointsman_shared_cache_beyond_blocks",
        Some(Unit::Count),
        &[],
        "Blocks that the shared cache had beyond the chosen rank's device blocks.",
    ),
    counter(
        "pointsman_shared_cache_errors_total",
        &["kind"],
        "Questions that the shared cache did not answer: `late`, or with an `error`.",
    ),
    counter(
        "pointsman_discovery_errors_total",
        &["source"],
        "Times a `source` of workers came to have no set to give, or one that lacks some; the same trouble again is not counted again.",
    ),
    counter("pointsman_discovery_conflicts_total", &[], "Workers that two sources name: the first given is heard."),
    counter("pointsman_restarts_total", &["role"], "Actors that died, by `role`."),
];

/// Tells the recorder what each instrument is.
pub(crate) fn describe() {
    for &Instrument { name, kind, unit, help, .. } in INSTRUMENTS {
        metrics::with_recorder(|recorder| match kind {
            Kind::Counter => recorder.describe_counter(name.into(), unit, help.into()),
            Kind::Gauge => recorder.describe_gauge(name.into(), unit, help.into()),
            Kind::Histogram => recorder.describe_histogram(name.into(), unit, help.into()),
        });
    }
}

/// Makes handles that carry the pool's name. Only what is in [`INSTRUMENTS`], with just its labels, is ever made.
#[derive(Clone)]
pub(crate) struct Pool(SharedString);

impl Pool {
    pub(crate) fn new(name: &str) -> Self {
        Self(SharedString::from_shared(Arc::from(name)))
    }

    pub(crate) fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        metrics::counter!(name, self.labels(Kind::Counter, name, labels))
    }

    pub(crate) fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        metrics::gauge!(name, self.labels(Kind::Gauge, name, labels))
    }

    pub(crate) fn histogram(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Histogram {
        metrics::histogram!(name, self.labels(Kind::Histogram, name, labels))
    }

    fn labels(&self, kind: Kind, name: &'static str, labels: &[(&'static str, &str)]) -> Vec<Label> {
        let has = |known: &Instrument| labels.iter().map(|(label, _)| label).eq(known.labels);
        debug_assert!(
            INSTRUMENTS.iter().any(|known| (known.name, known.kind) == (name, kind) && has(known)),
            "{name} is no such instrument"
        );
        let labels = labels.iter().map(|(label, value)| Label::new(*label, (*value).to_owned()));
        std::iter::once(Label::new("pool", self.0.clone())).chain(labels).collect()
    }
}
