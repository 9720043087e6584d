//! New names of router settings that were flat before 0.2, for the error of an unknown key.

const MOVED: [(&str, &str); 53] = [
    ("overlap_score_credit", "policy.overlap_score_credit"),
    ("overlap_score_credit_decay", "policy.overlap_score_credit_decay"),
    ("prefill_load_scale", "policy.prefill_load_scale"),
    ("decode_active_request_weight", "policy.active_request_weight"),
    ("shared_cache_multiplier", "policy.shared_cache_multiplier"),
    ("temperature", "policy.temperature"),
    ("host_cache_hit_weight", "index.host_hit_weight"),
    ("disk_cache_hit_weight", "index.disk_hit_weight"),
    ("index_shards", "index.shards"),
    ("index_bytes_max", "index.bytes_max"),
    ("approximate_policy", "index.speculative.model"),
    ("approximate_ttl_ms", "index.speculative.ttl_ms"),
    ("predicted_ttl_ms", "index.speculative.with_events_ttl_ms"),
    ("use_kv_events", "events.mode"),
    ("event_blocks_max", "events.blocks_max"),
    ("assume_kv_reuse", "load.assume_kv_reuse"),
    ("track_active_blocks", "load.track_active_blocks"),
    ("track_prefill_tokens", "load.track_prefill_tokens"),
    ("track_output_blocks", "load.track_output_blocks"),
    ("prefill_load_model", "load.prefill_model"),
    ("booking_liveness_ms", "load.booking_liveness_ms"),
    ("engine_load_interval_ms", "engine_load.interval_ms"),
    ("engine_load_stale_ms", "engine_load.stale_ms"),
    ("requests_max", "queue.requests_max"),
    ("queue_threshold", "queue.threshold"),
    ("unstated_batched_tokens", "queue.unstated_batched_tokens"),
    ("queue_policy", "queue.order"),
    ("queue_classes", "queue.classes"),
    ("queue_default_family", "queue.default_family"),
    ("queue_uncached_buckets", "queue.uncached_buckets"),
    ("overlap_refresh_after_ms", "queue.overlap_refresh_after_ms"),
    ("overload_blocks_frac", "overload.blocks_frac"),
    ("overload_prefill_tokens", "overload.prefill_tokens"),
    ("overload_prefill_frac", "overload.prefill_frac"),
    ("overload_engine_waiting", "overload.engine_waiting"),
    ("overload_engine_kv_usage", "overload.engine_kv_usage"),
    ("health_probe_interval_ms", "health.probe_interval_ms"),
    ("health_probe_timeout_ms", "health.probe_timeout_ms"),
    ("health_failures_max", "health.probe_failures_max"),
    ("health_successes_min", "health.probe_successes_min"),
    ("outcome_failures_max", "health.outcome_failures_max"),
    ("ejection_ms", "health.ejection_ms"),
    ("ejected_share_max", "health.ejected_share_max"),
    ("slow_start_fill", "slow_start.fill"),
    ("slow_start_max_ms", "slow_start.max_ms"),
    ("slow_start_return_ms", "slow_start.return_ms"),
    ("shared_cache_timeout_ms", "shared_cache.timeout_ms"),
    ("session_affinity", "session.affinity"),
    ("session_weight", "session.weight"),
    ("session_ttl_ms", "session.ttl_ms"),
    ("sessions_max", "session.sessions_max"),
    ("discovery_interval_ms", "discovery.interval_ms"),
    ("restarts_max", "supervision.restarts_max"),
];

/// The new name of a setting.
pub(super) fn new_name(old: &str) -> Option<&'static str> {
    MOVED.iter().find(|(moved, _)| *moved == old).map(|(_, new)| *new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fields::router_fields;

    #[test]
    fn moved_settings_have_valid_new_names() {
        let fields = router_fields();
        for (old, new) in MOVED {
            assert!(fields.iter().any(|field| field.name == new), "{new}");
            assert!(fields.iter().all(|field| field.name != old), "{old}");
        }
    }
}
