//! Table of all instruments: name, kind, unit, labels and description.
//!
//! Handles are checked against this table, recorders receive its descriptions, and `docs/metrics.md` lists it.

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram, Label, SharedString, Unit};

/// One metric.
#[derive(Debug)]
pub(crate) struct Instrument {
    pub(crate) name: &'static str,
    pub(crate) kind: InstrumentKind,
    /// Absent for ratios.
    pub(crate) unit: Option<Unit>,
    /// Labels besides `pool`, which every instrument carries.
    pub(crate) labels: &'static [&'static str],
    pub(crate) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstrumentKind {
    Counter,
    Gauge,
    Histogram,
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Instrument {
    Instrument { name, kind: InstrumentKind::Counter, unit: Some(Unit::Count), labels, help }
}

const fn gauge(name: &'static str, unit: Unit, labels: &'static [&'static str], help: &'static str) -> Instrument {
    Instrument { name, kind: InstrumentKind::Gauge, unit: Some(unit), labels, help }
}

const fn histogram(
    name: &'static str,
    unit: Option<Unit>,
    labels: &'static [&'static str],
    help: &'static str,
) -> Instrument {
    Instrument { name, kind: InstrumentKind::Histogram, unit, labels, help }
}

const RANK: &[&str] = &["worker", "rank"];
const CLASS: &[&str] = &["class"];

/// In the order of `docs/metrics.md`.
pub(crate) const INSTRUMENTS: &[Instrument] = &[
    counter(
        "pointsman_decisions_total",
        &["outcome", "reason"],
        "Booking requests by result: `outcome` is `placed`, `rejected` or `error`.",
    ),
    histogram(
        "pointsman_phase_duration_seconds",
        Some(Unit::Seconds),
        &["phase"],
        "Time of a placed request in `phase`: `hash`, `overlap`, `decide`, `book`, and `total`. Sampled.",
    ),
    counter("pointsman_prompt_tokens_total", &[], "Prompt tokens of placed requests."),
    counter(
        "pointsman_cached_tokens_total",
        &["stage"],
        "Cached prompt tokens: `reachable` on the eligible rank with the longest match, `selected` on the chosen rank, \
         `delivered` as reported by the embedder.",
    ),
    histogram(
        "pointsman_overlap_ratio",
        None,
        &[],
        "Weighted cached tokens on the chosen rank as a share of the prompt.",
    ),
    histogram(
        "pointsman_reachable_overlap_ratio",
        None,
        &[],
        "Cached tokens on the eligible rank with the longest match as a share of the prompt.",
    ),
    counter(
        "pointsman_overlap_forgone_total",
        &[],
        "Placed requests on a rank whose match is shorter than that of another eligible rank.",
    ),
    counter(
        "pointsman_overlap_forgone_blocks_total",
        &[],
        "Blocks by which these matches are shorter than the longest one, over all tiers.",
    ),
    counter(
        "pointsman_prediction_tokens_total",
        &["side"],
        "Cached tokens of requests with a report: `predicted` at placement, and `delivered`.",
    ),
    histogram(
        "pointsman_prediction_error_tokens",
        Some(Unit::Count),
        &["result"],
        "Difference between predicted and delivered tokens; `result` of the prediction is `over`, `under` or `exact`.",
    ),
    histogram(
        "pointsman_predicted_ttft_error_seconds",
        Some(Unit::Seconds),
        &["result"],
        "Difference between predicted and actual time to first token, `early` or `late`. Policy `latency` only.",
    ),
    histogram(
        "pointsman_prediction_ratio",
        None,
        &["target"],
        "Observed time as a multiple of the predicted one, of the time to first token (`ttft`) or the mean time between \
         tokens (`itl`). 1 is exact.",
    ),
    counter(
        "pointsman_targets_total",
        &["target", "outcome"],
        "Latency targets by result in the response: `target` is `ttft` or `itl`, `outcome` is `met` or `missed`.",
    ),
    counter(
        "pointsman_never_matched_total",
        &["kind"],
        "Alarms: 64 consecutive reports for this `kind` of request contradicted their predictions.",
    ),
    gauge("pointsman_queue_requests", Unit::Count, CLASS, "Waiting requests."),
    gauge("pointsman_queue_raw_tokens", Unit::Count, CLASS, "Prompt tokens of waiting requests."),
    gauge(
        "pointsman_queue_cached_tokens",
        Unit::Count,
        CLASS,
        "Cached prompt tokens of waiting requests on the eligible rank with the longest match.",
    ),
    gauge("pointsman_queue_oldest_age_seconds", Unit::Seconds, CLASS, "Age of the oldest waiting request."),
    counter(
        "pointsman_queue_backpressure_total",
        &["class", "limit"],
        "Requests rejected instead of queued, by the violated `limit`.",
    ),
    Instrument {
        name: "pointsman_busiest_rank_ratio",
        kind: InstrumentKind::Gauge,
        unit: None,
        labels: &[],
        help: "Share of the placed requests on the rank with the most, over about the last minute; 0 without requests.",
    },
    counter("pointsman_rank_placements_total", RANK, "Requests placed on the rank."),
    counter(
        "pointsman_rank_prediction_tokens_total",
        &["worker", "rank", "side"],
        "Tokens of the rank's requests with a report of cached tokens: of the `prompt`, and cached ones as `predicted` at \
         placement and as `delivered`.",
    ),
    gauge("pointsman_rank_active_requests", Unit::Count, RANK, "Requests booked on the rank."),
    gauge("pointsman_rank_active_blocks", Unit::Count, RANK, "KV blocks held by the booked requests."),
    gauge("pointsman_rank_prefill_tokens", Unit::Count, RANK, "Prompt tokens that the rank has still to compute."),
    gauge("pointsman_rank_held_blocks", Unit::Count, RANK, "Indexed blocks of the rank, over all tiers."),
    Instrument {
        name: "pointsman_rank_prediction_bias",
        kind: InstrumentKind::Gauge,
        unit: None,
        labels: &["worker", "rank", "target"],
        help: "Learned factor that corrects the predictions for the rank, of the time to first token (`ttft`) or between \
               tokens (`itl`).",
    },
    gauge("pointsman_engine_running_requests", Unit::Count, RANK, "Running requests as last reported by the engine."),
    gauge("pointsman_engine_waiting_requests", Unit::Count, RANK, "Waiting requests as last reported by the engine."),
    Instrument {
        name: "pointsman_engine_kv_usage_ratio",
        kind: InstrumentKind::Gauge,
        unit: None,
        labels: RANK,
        help: "Used share of the KV cache as last reported by the engine.",
    },
    gauge("pointsman_engine_load_age_seconds", Unit::Seconds, RANK, "Age of the last load report of the engine."),
    counter(
        "pointsman_engine_load_errors_total",
        &["cause"],
        "Unusable load reports: a failed `request`, an `empty` page, an invalid `value`, an invalid `message`.",
    ),
    gauge("pointsman_asleep_ranks", Unit::Count, &[], "Ranks whose engine sleeps."),
    gauge("pointsman_ejected_ranks", Unit::Count, &[], "Ranks ejected for health."),
    gauge(
        "pointsman_eligible_ranks",
        Unit::Count,
        &[],
        "Ranks that can serve: neither draining, asleep, unavailable nor ejected.",
    ),
    gauge("pointsman_refusing_ranks", Unit::Count, &[], "Ranks in a back-off after refused requests."),
    counter(
        "pointsman_ejections_total",
        &["cause"],
        "Ejections by cause: failed `probe`s of the engine, or `outcomes` of requests.",
    ),
    gauge("pointsman_ranks", Unit::Count, &[], "Registered ranks."),
    gauge("pointsman_cold_ranks", Unit::Count, &[], "Ranks with lost index contents that must be resent."),
    gauge("pointsman_leases", Unit::Count, &[], "Active bookings and pending requests."),
    counter(
        "pointsman_bookings_expired_total",
        &[],
        "Bookings by id that expired without a report for `load.booking_liveness_ms`.",
    ),
    gauge(
        "pointsman_gate_permits",
        Unit::Count,
        &["gate"],
        "Permits in use: `requests` of `queue.requests_max`, and blocks of `events` of `events.blocks_max` over all shards.",
    ),
    counter("pointsman_kv_event_blocks_total", &["result"], "Blocks named by KV events, by result in the index."),
    counter("pointsman_kv_events_refused_total", &["reason"], "KV events without effect, by `reason`."),
    gauge("pointsman_kv_sources", Unit::Count, &["state"], "Ranks with a KV event reader, by stream state."),
    gauge(
        "pointsman_rank_kv_degraded",
        Unit::Count,
        RANK,
        "1 while the KV event stream of the rank is degraded (`Router::kv_sources` has the reason), else 0.",
    ),
    counter(
        "pointsman_kv_source_notes_total",
        &["note"],
        "Observations in KV event sequences: losses, repetitions, new incarnations, recoveries.",
    ),
    counter(
        "pointsman_kv_source_errors_total",
        &["cause"],
        "Failed or ended connections to event sockets, and rejected messages, by `cause`.",
    ),
    counter("pointsman_kv_findings_total", &["finding"], "Unusable KV events or parts of them, by `finding`."),
    counter(
        "pointsman_kv_audits_total",
        &["result"],
        "Comparisons of the index with the cache of an engine, by `result`: `equal`, `different`, `inconclusive`, `unsupported`.",
    ),
    counter("pointsman_kv_audits_inconclusive_total", &["cause"], "Inconclusive audits, by `cause`."),
    counter(
        "pointsman_kv_audit_blocks_total",
        &["difference"],
        "Blocks by which index and cache differed: `stale` in the index only, `missing` from the index.",
    ),
    histogram(
        "pointsman_kv_source_heal_seconds",
        Some(Unit::Seconds),
        &[],
        "Time from the degradation of a KV event stream to its recovery.",
    ),
    counter("pointsman_speculative_blocks_total", &["result"], "Speculative index blocks by result."),
    gauge("pointsman_speculative_blocks", Unit::Count, &["shard"], "Index blocks that are speculative only."),
    gauge("pointsman_index_bytes", Unit::Bytes, &["shard"], "Memory of an index shard."),
    counter(
        "pointsman_index_evicted_blocks_total",
        &["shard"],
        "Blocks evicted by an index shard because of `index.bytes_max`.",
    ),
    histogram(
        "pointsman_shared_cache_hit_rate",
        None,
        &[],
        "Blocks found in the shared cache as a share of queried blocks.",
    ),
    histogram(
        "pointsman_shared_cache_beyond_blocks",
        Some(Unit::Count),
        &[],
        "Blocks found in the shared cache beyond the device blocks of the chosen rank.",
    ),
    counter(
        "pointsman_shared_cache_errors_total",
        &["kind"],
        "Failed queries of the shared cache: `late`, or with an `error`.",
    ),
    counter(
        "pointsman_discovery_errors_total",
        &["source"],
        "Transitions of a discovery `source` to a failure or a partial set; a repeated failure counts once.",
    ),
    gauge(
        "pointsman_discovery_stale_seconds",
        Unit::Seconds,
        &["source"],
        "Age of the last valid set of a discovery `source`: time since the first error after it; 0 without an error.",
    ),
    counter(
        "pointsman_discovery_conflicts_total",
        &[],
        "Workers named by two sources; the first source takes precedence.",
    ),
    counter("pointsman_restarts_total", &["role"], "Restarted actors by `role`."),
    counter(
        "pointsman_hangs_total",
        &["role"],
        "Hung actors by `role`: no progress for `supervision.hang_timeout_ms`.",
    ),
    counter(
        "pointsman_shadow_decisions_total",
        &["policy"],
        "Decisions that shadow policies also made, by `policy`; `chosen` is the active one.",
    ),
    counter("pointsman_shadow_agreements_total", &["policy"], "Of these, decisions for the rank of the active policy."),
    counter(
        "pointsman_shadow_cached_tokens_total",
        &["policy"],
        "Prompt tokens of these decisions that the index held for the rank of the `policy`.",
    ),
    histogram(
        "pointsman_shadow_ttft_seconds",
        Some(Unit::Seconds),
        &["policy"],
        "Predicted time to first token of these decisions on the rank of the `policy`, where prefill speeds are learned.",
    ),
    gauge(
        "pointsman_replica_peers",
        Unit::Count,
        &["state"],
        "Other replicas by `state`: `live`, `silent` without recent summaries, `left` after an orderly end.",
    ),
    gauge(
        "pointsman_replica_summary_age_seconds",
        Unit::Seconds,
        &["replica"],
        "Time since the last summary of a `replica`.",
    ),
    gauge(
        "pointsman_replica_load_seconds",
        Unit::Seconds,
        &[],
        "Remaining prefill time of requests of other replicas that this replica adds to its view of the ranks, summed over \
         ranks.",
    ),
    counter(
        "pointsman_replica_summaries_refused_total",
        &["reason"],
        "Refused messages: `malformed`, another `layout`, an earlier `incarnation`, too many `ranks` or `peers`.",
    ),
    counter(
        "pointsman_replica_summaries_lost_total",
        &[],
        "Messages of other replicas that arrived faster than they were applied. Later ones replace them.",
    ),
    counter(
        "pointsman_replica_conflicts_total",
        &[],
        "Bookings of two replicas on one rank within two intervals of summaries, although another rank had less queued \
         work. Both replicas count them.",
    ),
    counter(
        "pointsman_replica_decisions_dropped_total",
        &[],
        "Decisions for engines without events that were not shared because of their number.",
    ),
];

/// Describes each instrument to the recorder.
pub(crate) fn describe() {
    for &Instrument { name, kind, unit, help, .. } in INSTRUMENTS {
        metrics::with_recorder(|recorder| match kind {
            InstrumentKind::Counter => recorder.describe_counter(name.into(), unit, help.into()),
            InstrumentKind::Gauge => recorder.describe_gauge(name.into(), unit, help.into()),
            InstrumentKind::Histogram => recorder.describe_histogram(name.into(), unit, help.into()),
        });
    }
}

/// Creates handles with the name of the pool. Only instruments of [`INSTRUMENTS`], with exactly their labels, are
/// created.
#[derive(Clone)]
pub(crate) struct Pool(SharedString);

impl Pool {
    pub(crate) fn new(name: &str) -> Self {
        Self(SharedString::from_shared(Arc::from(name)))
    }

    pub(crate) fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        metrics::counter!(name, self.labels(InstrumentKind::Counter, name, labels))
    }

    pub(crate) fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        metrics::gauge!(name, self.labels(InstrumentKind::Gauge, name, labels))
    }

    pub(crate) fn histogram(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Histogram {
        metrics::histogram!(name, self.labels(InstrumentKind::Histogram, name, labels))
    }

    fn labels(&self, kind: InstrumentKind, name: &'static str, labels: &[(&'static str, &str)]) -> Vec<Label> {
        let has = |known: &Instrument| labels.iter().map(|(label, _)| label).eq(known.labels);
        debug_assert!(
            INSTRUMENTS.iter().any(|known| (known.name, known.kind) == (name, kind) && has(known)),
            "{name} is not in INSTRUMENTS with these labels"
        );
        let labels = labels.iter().map(|(label, value)| Label::new(*label, (*value).to_owned()));
        std::iter::once(Label::new("pool", self.0.clone())).chain(labels).collect()
    }
}
