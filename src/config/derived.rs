//! What follows from a configuration: the parts that others want of it, ready for use.

use std::num::NonZeroU32;
use std::time::Duration;

use super::{Fanout, PoolRole, PrefillModel, QueueClass, RouterConfig};
use crate::select::{KvCost, Needs, Policy, TierWeights};

/// Credit of a block that only the shared cache has, where nothing else is said.
const SHARED_CACHE_MULTIPLIER: f64 = 0.5;

impl RouterConfig {
    /// The classes that requests wait in: those configured, or the one that stands for all.
    ///
    /// ```
    /// use pointsman::config::RouterConfig;
    ///
    /// let config = RouterConfig { queue_threshold: Some(2.0), ..RouterConfig::default() };
    /// let classes = config.classes();
    /// assert_eq!((classes[0].name.as_str(), classes[0].busy_prefill_frac), ("default", Some(2.0)));
    /// ```
    #[must_use]
    pub fn classes(&self) -> Vec<QueueClass> {
        let mut classes = self.queue_classes.clone();
        if classes.is_empty() {
            classes.push(QueueClass { order: self.queue_policy, ..QueueClass::named("default") });
        }
        for class in classes.iter_mut().filter(|class| !class.has_threshold()) {
            class.busy_prefill_frac = self.queue_threshold;
        }
        classes
    }

    /// Whether a request may ask for a class or family of this name.
    #[must_use]
    pub fn knows_class(&self, name: &str) -> bool {
        let named = |class: &QueueClass| class.name == name || class.family.as_deref() == Some(name);
        self.classes().iter().any(named)
    }

    /// Whether any request may ever have to wait for a rank.
    #[must_use]
    pub fn queueing(&self) -> bool {
        self.queue_threshold.is_some() || self.queue_classes.iter().any(QueueClass::has_threshold)
    }

    /// `max_num_batched_tokens` of a rank whose worker does not state it, where nothing is configured: the default of
    /// `vllm serve` on GPUs with 70 GiB or more (2,048 on smaller ones), and of SGLang's `chunked_prefill_size` on many.
    pub const UNSTATED_BATCHED_TOKENS: u32 = 8_192;

    /// `max_num_batched_tokens` of a rank whose worker does not state it.
    #[must_use]
    pub fn batched_tokens_where_unstated(&self) -> u32 {
        self.unstated_batched_tokens.unwrap_or(Self::UNSTATED_BATCHED_TOKENS)
    }

    /// Whether a limit on a rank's load is a share of its `max_num_batched_tokens`.
    #[must_use]
    pub fn depends_on_batched_tokens(&self) -> bool {
        self.overload_prefill_frac.is_some() || self.classes().iter().any(|class| class.busy_prefill_frac.is_some())
    }

    /// The block size as hashing wants it. A zero, which validation refuses, counts as 1.
    #[must_use]
    pub fn block_size_nonzero(&self) -> NonZeroU32 {
        NonZeroU32::new(self.block_size).unwrap_or(NonZeroU32::MIN)
    }

    /// The parameters of the `kv` cost.
    #[must_use]
    pub fn kv_cost(&self) -> KvCost {
        KvCost {
            overlap_score_credit: self.overlap_score_credit,
            overlap_score_credit_decay: self.overlap_score_credit_decay,
            prefill_load_scale: self.prefill_load_scale,
            active_request_weight: self.decode_active_request_weight,
            tier_weights: self.tier_weights(),
            shared_cache_multiplier: self.shared_cache_multiplier.unwrap_or(SHARED_CACHE_MULTIPLIER),
            track_prefill_tokens: self.track_prefill_tokens,
            decode_only: self.role == PoolRole::Decode && !self.track_prefill_tokens && self.has_index(),
            block_size: self.block_size,
        }
    }

    /// Whether ranks learn how fast their engines are, and prefill load falls with time at that pace.
    #[must_use]
    pub fn learns_speed(&self) -> bool {
        self.policy == Policy::Latency || self.prefill_load_model == PrefillModel::Learned
    }

    /// Worth of the lower tiers.
    #[must_use]
    pub fn tier_weights(&self) -> TierWeights {
        TierWeights { host: self.host_cache_hit_weight, disk: self.disk_cache_hit_weight }
    }

    /// Whether overlap counts for anything, so that an index is kept.
    #[must_use]
    pub fn has_index(&self) -> bool {
        self.overlap_score_credit > 0.0
    }

    /// What the scheduler must know before it decides a request that is drawn for at `temperature`.
    #[must_use]
    pub fn needs_at(&self, temperature: f64) -> Needs {
        let needs = self.policy.needs(temperature, self.overlap_score_credit_decay);
        if self.fanout == Fanout::All { Needs::All } else { needs }
    }

    /// How long a load query may take.
    #[must_use]
    pub fn load_query_timeout(&self) -> Duration {
        Duration::from_millis(self.load_query_timeout_ms)
    }
}
