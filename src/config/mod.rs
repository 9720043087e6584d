//! One router's configuration: every setting, its unit, default and rule, in one validated struct.
//!
//! Owns the settings and their check. Promises that a value that passed [`RouterConfig::validate`] can be used
//! without another look. Leaves reading files and environments to embedders.

mod derived;
mod kv_events;
mod overrides;
mod pools;
mod problems;
mod queue;

use serde::{Deserialize, Serialize};

pub use kv_events::UseKvEvents;
pub use overrides::RouterConfigOverride;
pub(crate) use problems::Problems;
pub use problems::{ConfigError, ConfigErrors};
pub use queue::{QueueClass, QueueOrder, UncachedBucket};

use crate::select::Policy;

/// What the ranks of a pool do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolRole {
    /// Prefill and decode on the same rank.
    #[default]
    Aggregated,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

/// Which ranks the scheduler asks for their exact load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fanout {
    /// Only those that can win, by the load board's bounds. Places exactly like [`Fanout::All`].
    #[default]
    Shortlist,
    /// Every eligible rank.
    All,
}

/// How cache contents are modelled where engines send no events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApproximatePolicy {
    /// A routed prompt is taken to stay cached for `approximate_ttl_ms`.
    #[default]
    Ttl,
    /// A rank is taken to hold as many blocks as it says it has, the least recently used going first; a rank whose
    /// capacity is not known falls back to the time to live.
    Lru,
}

/// Where the expected duration of a prefill comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefillModel {
    /// Nowhere: prefill load stands until the prefill is reported complete.
    #[default]
    None,
    /// Learned per rank from reported prefills, in tokens a second: prefill load falls with time.
    Learned,
}

/// What a session's earlier rank means for its next request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionAffinity {
    /// Nothing.
    Off,
    /// Its cost is lowered by `session_weight`: a preference that cost can overrule.
    #[default]
    Soft,
    /// It is the only one, while it is there and can be reached; where it is overloaded, so is the session.
    Hard,
}

/// Settings of one router: one model, one role, one block size.
///
/// ```
/// use pointsman::config::RouterConfig;
///
/// let config: RouterConfig = serde_json::from_str(r#"{ "block_size": 16, "seed": 7 }"#)?;
/// config.validate()?;
/// assert_eq!(config.requests_max, 65_536);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// The pool's name: every metric carries it. Routers of one process want different ones. Default `default`; letters,
    /// digits, `_`, `.` and `-`.
    pub pool: String,
    /// Tokens a KV block; must be the engines' own. Default 64, at least 1.
    pub block_size: u32,
    /// What the pool's ranks do. Default aggregated.
    pub role: PoolRole,
    /// Whether prompts are hashed in EAGLE windows (block size + 1 tokens). Default false.
    pub is_eagle: bool,
    /// How a rank is chosen. Default `latency`.
    pub policy: Policy,
    /// Credit of a device block against computing it. 0 builds no index at all. Default 1, 0 to 1e9.
    pub overlap_score_credit: f64,
    /// How fast that credit shrinks on ranks busy with prefill. Default 0 (not at all), 0 to 1e9.
    pub overlap_score_credit_decay: f64,
    /// Weight of a block of prefill against a block held. Default 1, 0 to 1e9.
    pub prefill_load_scale: f64,
    /// Cost of each active request, in blocks. Default 0, 0 to 1e9.
    pub decode_active_request_weight: f64,
    /// Worth of a host-pinned block as a share of a device block. Default 0.75, in [0, 1].
    pub host_cache_hit_weight: f64,
    /// Worth of a block on disk or in an external store. Default 0.25, in [0, 1].
    pub disk_cache_hit_weight: f64,
    /// Randomness of policies that compare costs, `latency` and `kv`; 0 takes the least cost. Default 0, 0 to 1e9.
    pub temperature: f64,
    /// Whether active requests with a common prefix share its blocks on a rank. An engine without cascade
    /// attention wants false. Default true.
    pub assume_kv_reuse: bool,
    /// Whether prompt and output blocks of active requests count. Default true.
    pub track_active_blocks: bool,
    /// Whether prefill tokens still to compute count. Default true.
    pub track_prefill_tokens: bool,
    /// Shards of the prefix index, 1 to 64; ranks are spread over them. Every query visits every shard: raise it for
    /// event rate only. Default 1.
    pub index_shards: u32,
    /// Which ranks are asked for their exact load. Default `shortlist`.
    pub fanout: Fanout,
    /// How long a load query may take before the board's values stand in, in milliseconds. Default 5, at least 1.
    pub load_query_timeout_ms: u64,
    /// Requests waiting for an answer at once; one more is refused. Default 65,536, at least 1.
    pub requests_max: u32,
    /// Blocks named by KV events that one shard may have waiting; senders wait beyond. Default 1,048,576, at least 1.
    pub event_blocks_max: u32,
    /// Share of a rank's `max_num_batched_tokens` in prefill tokens beyond which it is busy, so that requests wait.
    /// Default none: nothing ever waits. Not negative.
    pub queue_threshold: Option<f64>,
    /// `max_num_batched_tokens` of ranks whose worker does not state it. Default none:
    /// [`RouterConfig::UNSTATED_BATCHED_TOKENS`]. At least 1.
    pub unstated_batched_tokens: Option<u32>,
    /// Order of the queue where there are no classes. Default `fcfs`.
    pub queue_policy: QueueOrder,
    /// Classes of waiting requests. Default none: one class, `default`. Nothing waits while neither a class nor
    /// `queue_threshold` says when a rank is busy.
    pub queue_classes: Vec<QueueClass>,
    /// The family of requests that name no class. Default none: the first class.
    pub queue_default_family: Option<String>,
    /// Buckets of uncached tokens, by which a family chooses among its classes.
    pub queue_uncached_buckets: Vec<UncachedBucket>,
    /// Age at which a waiting request's overlap is asked for again, in milliseconds; 0 never. Default 10,000.
    pub overlap_refresh_after_ms: u64,
    /// Share of its `total_kv_blocks` beyond which a rank is overloaded and gets nothing. Default none. Not negative.
    pub overload_blocks_frac: Option<f64>,
    /// Prefill tokens beyond which a rank is overloaded. Default none.
    pub overload_prefill_tokens: Option<u64>,
    /// The same as a share of its `max_num_batched_tokens`. Default none. Not negative.
    pub overload_prefill_frac: Option<f64>,
    /// How full a new rank's cache must be, as a share of its capacity (of the median rank's fill where that is not
    /// known), before it is charged like the others; until then its cost is higher. Default 0 (at once), in [0, 1].
    pub slow_start_fill: f64,
    /// The longest a slow start lasts, in milliseconds. Default 60,000, at least 1.
    pub slow_start_max_ms: u64,
    /// Waiting requests that an engine reports for a rank beyond which the rank is overloaded. What is older than
    /// `engine_load_stale_ms` counts for nothing. Default none.
    pub overload_engine_waiting: Option<u32>,
    /// Share of its KV cache in use, as its engine reports it, beyond which a rank is overloaded. Default none. Between 0
    /// and 1.
    pub overload_engine_kv_usage: Option<f64>,
    /// How often each engine is asked whether it is well, in milliseconds; 0 never. Needs the feature `discovery` and an
    /// `http://` endpoint. Default 5,000.
    pub health_probe_interval_ms: u64,
    /// How long such a question may take, in milliseconds. Default 2,000, at least 1.
    pub health_probe_timeout_ms: u64,
    /// Failed probes in a row that eject an engine's ranks. Default 3, at least 1.
    pub health_failures_max: u32,
    /// Good probes in a row that bring them back. Default 2, at least 1.
    pub health_successes_min: u32,
    /// Failed requests in a row, as the embedder reports them, that eject a rank; at 0 failed and refused requests are
    /// ignored. Default 5.
    pub outcome_failures_max: u32,
    /// How long they eject it for the first time, in milliseconds; the n-th time n times as long, up to 300,000.
    /// Default 30,000, 1 to 300,000.
    pub ejection_ms: u64,
    /// Share of the ranks that may be ejected on suspicion at once: at least one where there are two or more, and never the
    /// last that can serve; 0 ejects none. Ranks that are down (failed probes, failed connections) do not count. Default
    /// 0.5, in [0, 1].
    pub ejected_share_max: f64,
    /// How long a rank that returns costs more, ten times as much at first, in milliseconds; 0 not at all. Default
    /// 10,000.
    pub slow_start_return_ms: u64,
    /// How often an engine's page of metrics is read for its load, in milliseconds; 0 never. Default 1,000.
    pub engine_load_interval_ms: u64,
    /// Age at which a load that an engine reported counts as unknown, in milliseconds. Default 5,000, at least 1.
    pub engine_load_stale_ms: u64,
    /// Whether engines report what they cache. Without, the index follows the router's own decisions; with `auto` it does
    /// so for workers that report nothing. Default true.
    pub use_kv_events: UseKvEvents,
    /// How cache contents are modelled without events. Default `ttl`.
    pub approximate_policy: ApproximatePolicy,
    /// How long a routed prompt counts as cached without events, in milliseconds. Default 120,000, at least 1.
    pub approximate_ttl_ms: u64,
    /// With events of all workers: how long a routed prompt counts as cached until the engine says so itself, in milliseconds.
    /// Default none: not before it says so. At least 1.
    pub predicted_ttl_ms: Option<u64>,
    /// Blocks that predictions may name, over all ranks; the oldest go first. Default 4,194,304, at least 1.
    pub predicted_blocks_max: u32,
    /// Bytes that the index may take, shared evenly by the ranks; what is least likely to be hit goes first. Default
    /// none: as much as the engines report. At least 1 MiB.
    pub index_bytes_max: Option<u64>,
    /// Credit of a block that only the shared cache has, against computing it. Default: 0.5 where a shared cache is
    /// given, in [0, 1].
    pub shared_cache_multiplier: Option<f64>,
    /// How long a request waits for the shared cache, in milliseconds. Default 5, at least 1.
    pub shared_cache_timeout_ms: u64,
    /// Where expected prefill durations come from. Default `none`.
    pub prefill_load_model: PrefillModel,
    /// What a session's earlier rank means. Default `soft`.
    pub session_affinity: SessionAffinity,
    /// Strength of a soft affinity: the rank's cost is multiplied by exp(-tanh(weight)). Default 0.5, 0 to 1e9.
    pub session_weight: f64,
    /// How long an idle session is remembered, in milliseconds. Default 3,600,000, at least 1.
    pub session_ttl_ms: u64,
    /// Sessions remembered; the longest idle goes first. Default 65,536, at least 1.
    pub sessions_max: u32,
    /// How long a booking made by id lasts without any sign of life, in milliseconds. One whose placement is held lasts
    /// as long as that. Default 300,000, at least 1,000.
    pub booking_liveness_ms: u64,
    /// Whether reported output blocks count. Default true.
    pub track_output_blocks: bool,
    /// Share of decisions that are traced with all they were based on. Default 0, in [0, 1].
    pub decision_trace: f64,
    /// How often what discovery wants is compared with what runs, beside whenever a source says something new, in
    /// milliseconds. Default 5,000, at least 1.
    pub discovery_interval_ms: u64,
    /// Workers that `start` waits for. Default 0.
    pub min_initial_workers: u32,
    /// Actors restarted within `restart_window_ms` before the router gives up. Default 32.
    pub restarts_max: u32,
    /// The window of `restarts_max`, in milliseconds. Default 10,000, at least 1.
    pub restart_window_ms: u64,
    /// Seed of every tie and draw. Default 0.
    pub seed: u64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            pool: "default".to_owned(),
            block_size: 64,
            role: PoolRole::default(),
            is_eagle: false,
            policy: Policy::default(),
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            decode_active_request_weight: 0.0,
            host_cache_hit_weight: 0.75,
            disk_cache_hit_weight: 0.25,
            temperature: 0.0,
            assume_kv_reuse: true,
            track_active_blocks: true,
            track_prefill_tokens: true,
            index_shards: 1,
            fanout: Fanout::default(),
            load_query_timeout_ms: 5,
            requests_max: 65_536,
            event_blocks_max: 1 << 20,
            queue_threshold: None,
            unstated_batched_tokens: None,
            queue_policy: QueueOrder::default(),
            queue_classes: Vec::new(),
            queue_default_family: None,
            queue_uncached_buckets: Vec::new(),
            overlap_refresh_after_ms: 10_000,
            overload_blocks_frac: None,
            overload_prefill_tokens: None,
            overload_prefill_frac: None,
            slow_start_fill: 0.0,
            slow_start_max_ms: 60_000,
            overload_engine_waiting: None,
            overload_engine_kv_usage: None,
            health_probe_interval_ms: 5_000,
            health_probe_timeout_ms: 2_000,
            health_failures_max: 3,
            health_successes_min: 2,
            outcome_failures_max: 5,
            ejection_ms: 30_000,
            ejected_share_max: 0.5,
            slow_start_return_ms: 10_000,
            engine_load_interval_ms: 1_000,
            engine_load_stale_ms: 5_000,
            use_kv_events: UseKvEvents::Yes,
            approximate_policy: ApproximatePolicy::default(),
            approximate_ttl_ms: 120_000,
            predicted_ttl_ms: None,
            predicted_blocks_max: 1 << 22,
            index_bytes_max: None,
            shared_cache_multiplier: None,
            shared_cache_timeout_ms: 5,
            prefill_load_model: PrefillModel::default(),
            session_affinity: SessionAffinity::default(),
            session_weight: 0.5,
            session_ttl_ms: 3_600_000,
            sessions_max: 65_536,
            booking_liveness_ms: 300_000,
            track_output_blocks: true,
            decision_trace: 0.0,
            discovery_interval_ms: 5_000,
            min_initial_workers: 0,
            restarts_max: 32,
            restart_window_ms: 10_000,
            seed: 0,
        }
    }
}

impl RouterConfig {
    /// Largest weight, scale, credit, decay or temperature: costs stay finite whatever the load.
    pub const WEIGHT_MAX: f64 = 1e9;

    /// Most index shards.
    pub const INDEX_SHARDS_MAX: u32 = 64;

    /// Smallest budget of an index.
    pub const INDEX_BYTES_MIN: u64 = 1 << 20;

    /// Longest ejection, in milliseconds.
    pub const EJECTION_MS_MAX: u64 = 300_000;

    /// Checks every rule.
    ///
    /// # Errors
    /// Every field that breaks its rule.
    pub fn validate(&self) -> Result<(), ConfigErrors> {
        let mut problems = Problems::default();
        problems.check("pool", &self.pool, queue::is_name(&self.pool), queue::NAME_RULE);
        let not_negative = [
            ("overlap_score_credit", self.overlap_score_credit),
            ("overlap_score_credit_decay", self.overlap_score_credit_decay),
            ("prefill_load_scale", self.prefill_load_scale),
            ("decode_active_request_weight", self.decode_active_request_weight),
            ("temperature", self.temperature),
            ("session_weight", self.session_weight),
        ];
        for (field, value) in not_negative {
            problems.check(field, value, (0.0..=Self::WEIGHT_MAX).contains(&value), "between 0 and 1e9");
        }
        let shares = [
            ("host_cache_hit_weight", Some(self.host_cache_hit_weight)),
            ("disk_cache_hit_weight", Some(self.disk_cache_hit_weight)),
            ("slow_start_fill", Some(self.slow_start_fill)),
            ("overload_engine_kv_usage", self.overload_engine_kv_usage),
            ("ejected_share_max", Some(self.ejected_share_max)),
            ("shared_cache_multiplier", self.shared_cache_multiplier),
            ("decision_trace", Some(self.decision_trace)),
        ];
        for (field, value) in shares {
            problems.check_given(field, value, |value| (0.0..=1.0).contains(value), "between 0 and 1");
        }
        let thresholds = [
            ("queue_threshold", self.queue_threshold),
            ("overload_blocks_frac", self.overload_blocks_frac),
            ("overload_prefill_frac", self.overload_prefill_frac),
        ];
        for (field, value) in thresholds {
            let holds = |value: &f64| value.is_finite() && *value >= 0.0;
            problems.check_given(field, value, holds, "finite and not negative");
        }
        let positive = [
            ("block_size", Some(u64::from(self.block_size))),
            ("load_query_timeout_ms", Some(self.load_query_timeout_ms)),
            ("unstated_batched_tokens", self.unstated_batched_tokens.map(u64::from)),
            ("requests_max", Some(u64::from(self.requests_max))),
            ("event_blocks_max", Some(u64::from(self.event_blocks_max))),
            ("slow_start_max_ms", Some(self.slow_start_max_ms)),
            ("health_probe_timeout_ms", Some(self.health_probe_timeout_ms)),
            ("health_failures_max", Some(u64::from(self.health_failures_max))),
            ("health_successes_min", Some(u64::from(self.health_successes_min))),
            ("engine_load_stale_ms", Some(self.engine_load_stale_ms)),
            ("approximate_ttl_ms", Some(self.approximate_ttl_ms)),
            ("predicted_ttl_ms", self.predicted_ttl_ms),
            ("predicted_blocks_max", Some(u64::from(self.predicted_blocks_max))),
            ("shared_cache_timeout_ms", Some(self.shared_cache_timeout_ms)),
            ("session_ttl_ms", Some(self.session_ttl_ms)),
            ("sessions_max", Some(u64::from(self.sessions_max))),
            ("discovery_interval_ms", Some(self.discovery_interval_ms)),
            ("restart_window_ms", Some(self.restart_window_ms)),
        ];
        for (field, value) in positive {
            problems.check_given(field, value, |value| *value > 0, "at least 1");
        }
        let liveness_ms = self.booking_liveness_ms;
        problems.check("booking_liveness_ms", liveness_ms, liveness_ms >= 1_000, "at least 1000");
        let holds = (1..=Self::EJECTION_MS_MAX).contains(&self.ejection_ms);
        problems.check("ejection_ms", self.ejection_ms, holds, "1 to 300000");
        let shards = self.index_shards;
        problems.check("index_shards", shards, (1..=Self::INDEX_SHARDS_MAX).contains(&shards), "1 to 64");
        let holds = |bytes: &u64| *bytes >= Self::INDEX_BYTES_MIN;
        problems.check_given("index_bytes_max", self.index_bytes_max, holds, "at least 1048576 (1 MiB)");
        queue::check_classes(&self.queue_classes, &self.queue_uncached_buckets, &mut problems);
        self.check_combinations(&mut problems);
        problems.into_result()
    }

    /// Settings that make no sense beside others.
    fn check_combinations(&self, problems: &mut Problems) {
        let events = self.use_kv_events;
        let lru = self.approximate_policy == ApproximatePolicy::Lru;
        problems.check(
            "approximate_policy",
            "lru",
            !(lru && events.reads_events()),
            "ttl unless use_kv_events is false",
        );
        if let Some(ttl_ms) = self.predicted_ttl_ms {
            problems.check(
                "predicted_ttl_ms",
                ttl_ms,
                events == UseKvEvents::Yes,
                "absent unless use_kv_events is true",
            );
        }
        let learns = self.prefill_load_model == PrefillModel::Learned;
        let tracks = self.track_prefill_tokens;
        problems.check("prefill_load_model", "learned", !learns || tracks, "none where track_prefill_tokens is false");
        if let Some(family) = &self.queue_default_family {
            let known = self.queue_classes.iter().any(|class| class.family.as_ref() == Some(family));
            problems.check("queue_default_family", family, known, "the family of one of queue_classes");
        }
    }
}

#[cfg(test)]
mod tests;
