//! The configuration of one router: the section of each part, and the rules of all.

use std::num::NonZeroU32;

use super::discovery::DiscoveryConfig;
use super::engine_load::EngineLoadConfig;
use super::events::EventsConfig;
use super::health::HealthConfig;
use super::index::IndexConfig;
use super::load::{LoadConfig, PrefillModel};
use super::overload::OverloadConfig;
use super::queue::{self, QueueConfig};
use super::recorder::RecorderConfig;
use super::replicas::ReplicasConfig;
use super::session::SessionConfig;
use super::shadow::ShadowConfig;
use super::shared_cache::SharedCacheConfig;
use super::slow_start::SlowStartConfig;
use super::supervision::SupervisionConfig;
use super::table::settings;
use super::targets::OnTargetMiss;
use super::{ConfigErrors, PoolRole};
use crate::policy::{CostUnit, KvCost, PolicyConfig};
use crate::validation::Problems;

settings! {
    /// Settings of one router: one model, one role, one block size.
    ///
    /// The sections have no names of their own: they are fields with defaults. `docs/configuration.md` lists the
    /// settings of each.
    ///
    /// ```
    /// use pointsman::RouterConfig;
    ///
    /// let config = r#"{ "block_size": 16, "policy": "kv", "index": { "shards": 2 } }"#;
    /// let config: RouterConfig = serde_json::from_str(config)?;
    /// config.validate()?;
    /// assert_eq!((config.index.shards, config.queue.requests_max), (2, 65_536));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct RouterConfig {
        /// The pool's name: a label of every metric. Routers of one process need different names. Default `default`;
        /// letters, digits, `_`, `.` and `-`.
        pool: String = "default".to_owned();
        /// Tokens per KV block; must equal the engines' block size. At least 1. Default: the size that the engines
        /// report ([`WorkerConfig::block_size`](crate::protocol::WorkerConfig::block_size) or their KV events), and
        /// [`RouterConfig::BLOCK_SIZE_ASSUMED`] while none reports any.
        block_size: Option<u32>;
        /// Work of the pool's ranks. Default aggregated.
        role: PoolRole;
        /// Whether prompts are hashed in EAGLE windows (block size + 1 tokens). Default false.
        is_eagle: bool;
        /// Seed of every random tie-break and choice. Default 0.
        seed: u64;
        /// Workers that `start` waits for. Default 0.
        min_initial_workers: u32;
        /// Share of decisions that are traced with all their facts. Default 0, in [0, 1].
        decision_trace: f64;
        /// Effect of latency targets that no rank is predicted to meet, for requests that do not set it. Default
        /// `serve`.
        on_target_miss: OnTargetMiss;
        /// The routing policy and its settings. Default `latency`.
        policy: PolicyConfig;
        /// The prefix index.
        index: IndexConfig;
        /// KV events.
        events: EventsConfig;
        /// Load accounting.
        load: LoadConfig;
        /// Load that engines report.
        engine_load: EngineLoadConfig;
        /// Waiting requests.
        queue: QueueConfig;
        /// Limits beyond which a rank gets no requests.
        overload: OverloadConfig;
        /// Probes and ejection.
        health: HealthConfig;
        /// Higher cost of new and returning ranks.
        slow_start: SlowStartConfig;
        /// The cache that ranks share.
        shared_cache: SharedCacheConfig;
        /// Session affinity.
        session: SessionConfig;
        /// Discovery of workers.
        discovery: DiscoveryConfig;
        /// Restarts of actors.
        supervision: SupervisionConfig;
        /// Policies that decide the same requests without booking.
        shadow: ShadowConfig;
        /// Records of decisions.
        recorder: RecorderConfig;
        /// Load shared with other replicas of the router.
        replicas: ReplicasConfig;
    }
}

impl RouterConfig {
    /// Block size of a pool that configures none while no engine reports any.
    pub const BLOCK_SIZE_ASSUMED: u32 = 64;

    /// Checks every rule, also that no setting is without effect beside the others.
    ///
    /// # Errors
    /// Every field that breaks its rule.
    pub fn validate(&self) -> Result<(), ConfigErrors> {
        let mut problems = Problems::default();
        problems.check("pool", &self.pool, queue::is_name(&self.pool), queue::NAME_RULE);
        problems.positive("block_size", self.block_size.unwrap_or(1));
        problems.share("decision_trace", self.decision_trace);
        let rule = "serve unless prefill speeds are learned: policy latency, or load.prefill_model learned";
        let holds = self.on_target_miss == OnTargetMiss::Serve || self.learns_speed();
        problems.check("on_target_miss", self.on_target_miss.name(), holds, rule);
        self.policy.check(&mut problems);
        self.index.check(self.events.mode, &mut problems);
        self.events.check(&mut problems);
        self.load.check(self.policy.kind(), &mut problems);
        self.engine_load.check(&mut problems);
        self.queue.check(self.uses_batched_tokens(), &mut problems);
        self.overload.check(&mut problems);
        self.health.check(&mut problems);
        self.slow_start.check(&mut problems);
        self.shared_cache.check(&mut problems);
        self.session.check(&self.policy, &mut problems);
        self.discovery.check(&mut problems);
        self.shadow.check(&mut problems);
        self.recorder.check(&mut problems);
        self.replicas.check(&mut problems);
        problems.into_result()
    }

    /// Whether a limit on a rank's load is a share of its `max_num_batched_tokens`.
    #[must_use]
    pub fn uses_batched_tokens(&self) -> bool {
        let mut classes = self.queue.classes_or_default().into_iter();
        self.overload.prefill_frac.is_some() || classes.any(|class| class.busy_prefill_frac.is_some())
    }

    /// The configured block size, or else [`RouterConfig::BLOCK_SIZE_ASSUMED`]. `Router::block_size` has the size in
    /// force.
    #[must_use]
    pub fn block_size_or_assumed(&self) -> u32 {
        self.block_size.unwrap_or(Self::BLOCK_SIZE_ASSUMED)
    }

    /// [`RouterConfig::block_size_or_assumed`] as hashing needs it. 0, which validation refuses, counts as 1.
    #[must_use]
    pub fn block_size_nonzero(&self) -> NonZeroU32 {
        NonZeroU32::new(self.block_size_or_assumed()).unwrap_or(NonZeroU32::MIN)
    }

    /// Whether overlap has any effect, so that an index is kept.
    #[must_use]
    pub fn has_index(&self) -> bool {
        self.index.enabled && self.policy.counts_overlap()
    }

    /// Default of `index.bytes_max` for one of `routers` routers in a process with this much memory: an equal share of a
    /// quarter, or of 1 GiB if the memory is unknown. A block takes about 45 bytes, so a quarter of 16 GiB holds 90
    /// million blocks.
    ///
    /// ```
    /// use pointsman::RouterConfig;
    ///
    /// assert_eq!(RouterConfig::index_bytes_max(Some(16 << 30), 4), 1 << 30);
    /// ```
    #[must_use]
    pub fn index_bytes_max(memory_bytes: Option<u64>, routers: usize) -> u64 {
        let all = memory_bytes.map_or(1 << 30, |bytes| bytes / 4);
        (all / routers.max(1) as u64).max(IndexConfig::BYTES_MIN)
    }

    /// Number of index shards.
    #[must_use]
    pub fn index_shards(&self) -> u32 {
        if self.has_index() { self.index.shards } else { 0 }
    }

    /// The parameters of the `kv` cost. Without an index overlap has no credit.
    #[must_use]
    pub fn kv_cost(&self) -> KvCost {
        let kv = self.policy.kv();
        let track_prefill_tokens = self.load.track_prefill_tokens;
        KvCost {
            overlap_score_credit: if self.index.enabled { kv.overlap_score_credit } else { 0.0 },
            overlap_score_credit_decay: kv.overlap_score_credit_decay,
            prefill_load_scale: kv.prefill_load_scale,
            active_request_weight: kv.active_request_weight,
            tier_weights: self.index.tier_weights(),
            shared_cache_multiplier: kv.shared_cache_multiplier,
            track_prefill_tokens,
            decode_only: self.role == PoolRole::Decode && !track_prefill_tokens && self.has_index(),
            block_size: self.block_size_or_assumed(),
        }
    }

    /// Whether the prefill speed of each rank is learned, so that prefill load decreases with time.
    #[must_use]
    pub fn learns_speed(&self) -> bool {
        self.policy.kind().cost_unit() == Some(CostUnit::Seconds) || self.load.prefill_model == PrefillModel::Learned
    }
}
