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

impl Instrument {
    /// Unit by the name's ending; absent for ratios.
    fn unit(&self) -> Option<Unit> {
        match self.name.trim_end_matches("_total").rsplit('_').next() {
            Some("seconds") => Some(Unit::Seconds),
            Some("bytes") => Some(Unit::Bytes),
            Some("ratio" | "rate" | "bias") => None,
            _ => Some(Unit::Count),
        }
    }
}

/// Rows of the table: kind, name, labels besides `pool`, and description.
macro_rules! instruments {
    ($($kind:ident $name:literal [$($label:literal),*] = $help:literal;)*) => {
        /// In the order of `docs/metrics.md`.
        pub(crate) const INSTRUMENTS: &[Instrument] = &[
            $(Instrument { name: $name, kind: InstrumentKind::$kind, labels: &[$($label),*], help: $help },)*
        ];
    };
}

instruments! {
    Counter "pointsman_decisions_total" ["outcome", "reason"] =
        "Booking requests by result: `outcome` is `placed`, `rejected` or `error`.";
    Histogram "pointsman_phase_duration_seconds" ["phase"] =
        "Time of a placed request in `phase`: `hash`, `overlap`, `decide`, `book`, and `total`. Sampled.";
    Counter "pointsman_prompt_tokens_total" [] = "Prompt tokens of placed requests.";
    Counter "pointsman_cached_tokens_total" ["stage"] =
        "Cached prompt tokens: `reachable` on the eligible rank with the longest match, `selected` on the chosen rank, \
         `delivered` as reported by the embedder.";
    Histogram "pointsman_overlap_ratio" [] = "Weighted cached tokens on the chosen rank as a share of the prompt.";
    Histogram "pointsman_reachable_overlap_ratio" [] =
        "Cached tokens on the eligible rank with the longest match as a share of the prompt.";
    Counter "pointsman_overlap_forgone_total" [] =
        "Placed requests on a rank whose match is shorter than that of another eligible rank.";
    Counter "pointsman_overlap_forgone_blocks_total" [] =
        "Blocks by which these matches are shorter than the longest one, over all tiers.";
    Counter "pointsman_prediction_tokens_total" ["side"] =
        "Cached tokens of requests with a report: `predicted` at placement, and `delivered`.";
    Histogram "pointsman_prediction_error_tokens" ["result"] =
        "Difference between predicted and delivered tokens; `result` of the prediction is `over`, `under` or `exact`.";
    Histogram "pointsman_predicted_ttft_error_seconds" ["result"] =
        "Difference between predicted and actual time to first token, `early` or `late`. Policy `latency` only.";
    Histogram "pointsman_prediction_ratio" ["target"] =
        "Observed time as a multiple of the predicted one, of the time to first token (`ttft`) or the mean time \
         between tokens (`itl`). 1 is exact.";
    Counter "pointsman_targets_total" ["target", "outcome"] =
        "Latency targets by result in the response: `target` is `ttft` or `itl`, `outcome` is `met` or `missed`.";
    Counter "pointsman_never_matched_total" ["kind"] =
        "Alarms: 64 consecutive reports for this `kind` of request contradicted their predictions.";
    Gauge "pointsman_queue_requests" ["class"] = "Waiting requests.";
    Gauge "pointsman_queue_raw_tokens" ["class"] = "Prompt tokens of waiting requests.";
    Gauge "pointsman_queue_cached_tokens" ["class"] =
        "Cached prompt tokens of waiting requests on the eligible rank with the longest match.";
    Gauge "pointsman_queue_oldest_age_seconds" ["class"] = "Age of the oldest waiting request.";
    Counter "pointsman_queue_backpressure_total" ["class", "limit"] =
        "Requests rejected instead of queued, by the violated `limit`.";
    Gauge "pointsman_programs" ["state"] =
        "Known [programs](headers.md#sessions): `active` ones with a call in flight, and `idle` ones.";
    Counter "pointsman_program_returns_total" [] = "Placed calls that extend the context of their agent.";
    Counter "pointsman_program_blocks_total" ["result"] =
        "Blocks of these contexts: `held` by some rank, or `evicted` and computed again.";
    Gauge "pointsman_held_calls" [] = "Calls that wait while [other programs](configuration.md#program-holds) fill the caches.";
    Counter "pointsman_program_holds_total" [] = "Ended holds of such calls.";
    Counter "pointsman_program_hold_seconds_total" [] = "Sum of their waits.";
    Gauge "pointsman_busiest_rank_ratio" [] =
        "Share of the placed requests on the rank with the most, over about the last minute; 0 without requests.";
    Counter "pointsman_rank_placements_total" ["worker", "rank"] = "Requests placed on the rank.";
    Counter "pointsman_rank_prediction_tokens_total" ["worker", "rank", "side"] =
        "Tokens of the rank's requests with a report of cached tokens: of the `prompt`, and cached ones as `predicted` \
         at placement and as `delivered`.";
    Gauge "pointsman_rank_active_requests" ["worker", "rank"] = "Requests booked on the rank.";
    Gauge "pointsman_rank_active_blocks" ["worker", "rank"] = "KV blocks held by the booked requests.";
    Gauge "pointsman_rank_prefill_tokens" ["worker", "rank"] = "Prompt tokens that the rank has still to compute.";
    Gauge "pointsman_rank_held_blocks" ["worker", "rank"] = "Indexed blocks of the rank, over all tiers.";
    Gauge "pointsman_rank_working_set_ratio" ["worker", "rank"] =
        "Contexts of the rank's programs, without shared prompts and those idle for five minutes, as a multiple of its KV \
         cache; only of a known size.";
    Gauge "pointsman_rank_claimed_ratio" ["worker", "rank"] =
        "Blocks that running calls and idle programs claim, as a multiple of the KV cache.";
    Gauge "pointsman_rank_prediction_bias" ["worker", "rank", "target"] =
        "Learned factor that corrects the predictions for the rank, of the time to first token (`ttft`) or between \
         tokens (`itl`).";
    Gauge "pointsman_engine_running_requests" ["worker", "rank"] = "Running requests as last reported by the engine.";
    Gauge "pointsman_engine_waiting_requests" ["worker", "rank"] = "Waiting requests as last reported by the engine.";
    Gauge "pointsman_engine_kv_usage_ratio" ["worker", "rank"] =
        "Used share of the KV cache as last reported by the engine.";
    Gauge "pointsman_engine_load_age_seconds" ["worker", "rank"] = "Age of the last load report of the engine.";
    Counter "pointsman_engine_load_errors_total" ["cause"] =
        "Unusable load reports: a failed `request`, an `empty` page, an invalid `value`, an invalid `message`.";
    Gauge "pointsman_asleep_ranks" [] = "Ranks whose engine sleeps.";
    Gauge "pointsman_ejected_ranks" [] = "Ranks ejected for health.";
    Gauge "pointsman_eligible_ranks" [] = "Ranks that can serve: neither draining, asleep, unavailable nor ejected.";
    Gauge "pointsman_refusing_ranks" [] = "Ranks in a back-off after refused requests or a stall.";
    Gauge "pointsman_stalled_ranks" [] = "Ranks that owe first tokens without progress.";
    Counter "pointsman_ejections_total" ["cause"] =
        "Ejections by cause: failed `probe`s of the engine, or `outcomes` of requests.";
    Gauge "pointsman_ranks" [] = "Registered ranks.";
    Gauge "pointsman_cold_ranks" [] = "Ranks with lost index contents that must be resent.";
    Gauge "pointsman_leases" [] = "Active bookings and pending requests.";
    Counter "pointsman_bookings_expired_total" [] =
        "Bookings by id that expired without a report for `load.booking_liveness_ms`.";
    Gauge "pointsman_gate_permits" ["gate"] =
        "Permits in use: `requests` of `queue.requests_max`, and blocks of `events` of `events.blocks_max` over all \
         shards.";
    Counter "pointsman_kv_event_blocks_total" ["result"] = "Blocks named by KV events, by result in the index.";
    Counter "pointsman_kv_events_refused_total" ["reason"] = "KV events without effect, by `reason`.";
    Gauge "pointsman_kv_sources" ["state"] = "Ranks with a KV event reader, by stream state.";
    Gauge "pointsman_rank_kv_degraded" ["worker", "rank"] =
        "1 while the KV event stream of the rank is degraded (`Router::kv_sources` has the reason), else 0.";
    Counter "pointsman_kv_source_notes_total" ["note"] =
        "Observations in KV event sequences: losses, repetitions, new incarnations, recoveries.";
    Counter "pointsman_kv_source_errors_total" ["cause"] =
        "Failed or ended connections to event sockets, and rejected messages, by `cause`.";
    Counter "pointsman_kv_findings_total" ["finding"] = "Unusable KV events or parts of them, by `finding`.";
    Counter "pointsman_kv_audits_total" ["result"] =
        "Comparisons of the index with the cache of an engine, by `result`: `equal`, `different`, `inconclusive`, \
         `unsupported`.";
    Counter "pointsman_kv_audits_inconclusive_total" ["cause"] = "Inconclusive audits, by `cause`.";
    Counter "pointsman_kv_audit_blocks_total" ["difference"] =
        "Blocks by which index and cache differed: `stale` in the index only, `missing` from the index.";
    Histogram "pointsman_kv_source_heal_seconds" [] = "Time from the degradation of a KV event stream to its recovery.";
    Counter "pointsman_speculative_blocks_total" ["result"] = "Speculative index blocks by result.";
    Gauge "pointsman_speculative_blocks" ["shard"] = "Index blocks that are speculative only.";
    Gauge "pointsman_index_bytes" ["shard"] = "Memory of an index shard.";
    Counter "pointsman_index_evicted_blocks_total" ["shard"] =
        "Blocks evicted by an index shard because of `index.bytes_max`.";
    Histogram "pointsman_shared_cache_hit_rate" [] = "Blocks found in the shared cache as a share of queried blocks.";
    Histogram "pointsman_shared_cache_beyond_blocks" [] =
        "Blocks found in the shared cache beyond the device blocks of the chosen rank.";
    Counter "pointsman_shared_cache_errors_total" ["kind"] =
        "Failed queries of the shared cache: `late`, or with an `error`.";
    Counter "pointsman_discovery_errors_total" ["source"] =
        "Transitions of a discovery `source` to a failure or a partial set; a repeated failure counts once.";
    Gauge "pointsman_discovery_stale_seconds" ["source"] =
        "Age of the last valid set of a discovery `source`: time since the first error after it; 0 without an error.";
    Counter "pointsman_discovery_conflicts_total" [] =
        "Workers named by two sources; the first source takes precedence.";
    Counter "pointsman_restarts_total" ["role"] = "Restarted actors by `role`.";
    Counter "pointsman_hangs_total" ["role"] = "Hung actors by `role`: no progress for `supervision.hang_timeout_ms`.";
    Counter "pointsman_shadow_decisions_total" ["policy"] =
        "Decisions that shadow policies also made, by `policy`; `chosen` is the active one.";
    Counter "pointsman_shadow_agreements_total" ["policy"] = "Of these, decisions for the rank of the active policy.";
    Counter "pointsman_shadow_cached_tokens_total" ["policy"] =
        "Prompt tokens of these decisions that the index held for the rank of the `policy`.";
    Histogram "pointsman_shadow_ttft_seconds" ["policy"] =
        "Predicted time to first token of these decisions on the rank of the `policy`, where prefill speeds are \
         learned.";
    Gauge "pointsman_replica_peers" ["state"] =
        "Other replicas by `state`: `live`, `silent` without recent summaries, `left` after an orderly end.";
    Gauge "pointsman_replica_summary_age_seconds" ["replica"] = "Time since the last summary of a `replica`.";
    Gauge "pointsman_replica_load_seconds" [] =
        "Remaining prefill time of requests of other replicas that this replica adds to its view of the ranks, summed \
         over ranks.";
    Counter "pointsman_replica_summaries_refused_total" ["reason"] =
        "Refused messages: `malformed`, another `layout`, an earlier `incarnation`, too many `ranks` or `peers`.";
    Counter "pointsman_replica_summaries_lost_total" [] =
        "Messages of other replicas that arrived faster than they were applied. Later ones replace them.";
    Counter "pointsman_replica_conflicts_total" [] =
        "Bookings of two replicas on one rank within two intervals of summaries, although another rank had less queued \
         work. Both replicas count them.";
    Counter "pointsman_replica_decisions_dropped_total" [] =
        "Decisions for engines without events that were not shared because of their number.";
}

/// Describes each instrument to the recorder.
pub(crate) fn describe() {
    for instrument in INSTRUMENTS {
        let (name, unit, help) = (instrument.name.into(), instrument.unit(), instrument.help.into());
        metrics::with_recorder(|recorder| match instrument.kind {
            InstrumentKind::Counter => recorder.describe_counter(name, unit, help),
            InstrumentKind::Gauge => recorder.describe_gauge(name, unit, help),
            InstrumentKind::Histogram => recorder.describe_histogram(name, unit, help),
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

    /// Counters of one metric by the values of its label, which exist from the start: alerts need the increase from 0.
    pub(crate) fn counters(&self, name: &'static str, label: &'static str, values: &[&'static str]) -> Counters {
        Counters(values.iter().map(|value| (*value, self.counter(name, &[(label, value)]))).collect())
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

/// Counters of one metric by the value of its label.
pub(crate) struct Counters(Vec<(&'static str, Counter)>);

impl Counters {
    /// Adds to the counter of a known value.
    pub(crate) fn add(&self, value: &str, count: u64) {
        let counter = self.0.iter().find(|(known, _)| *known == value);
        debug_assert!(counter.is_some(), "{value} is a value of the label");
        if let Some((_, counter)) = counter {
            counter.increment(count);
        }
    }
}

/// Reads a count in `T`.
type ReadCount<T> = fn(&T) -> u64;

/// Metric, label and value of a count in `T`.
pub(crate) type Count<T> = (&'static str, (&'static str, &'static str), ReadCount<T>);

/// Counters of the counts in `T`.
pub(crate) struct CountersOf<T>(Vec<(Counter, ReadCount<T>)>);

impl<T> CountersOf<T> {
    pub(crate) fn new(pool: &Pool, counts: &[Count<T>]) -> Self {
        Self(counts.iter().map(|(name, label, of)| (pool.counter(name, &[*label]), *of)).collect())
    }

    /// Adds the increase from `before` to `now`.
    pub(crate) fn add(&self, now: &T, before: &T) {
        for (counter, of) in &self.0 {
            let increase = of(now) - of(before);
            if increase > 0 {
                counter.increment(increase);
            }
        }
    }
}
