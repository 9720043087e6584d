//! Metrics of shadow policies, beside those of the active policy for the same decisions.

use metrics::{Counter, Histogram};

use super::Pool;
use crate::config::RouterConfig;
use crate::policy::PolicyConfig;
use crate::schedule::{AppraisedRank, ShadowReport};

/// Label of the active policy.
const CHOSEN: &str = "chosen";

/// Metrics of one router's shadow policies.
pub(crate) struct ShadowMeters {
    chosen: PolicyMeters,
    /// In the order of the configuration.
    shadows: Vec<PolicyMeters>,
}

/// Metrics of one policy.
struct PolicyMeters {
    decisions: Counter,
    agreements: Counter,
    cached_tokens: Counter,
    ttft: Histogram,
}

impl ShadowMeters {
    /// The meters; `None` if no decision has shadows.
    pub(crate) fn new(pool: &Pool, config: &RouterConfig) -> Option<Self> {
        let policies = &config.shadow.policies;
        let meters = |policy: &PolicyConfig| PolicyMeters::new(pool, policy.name());
        (config.shadow.share > 0.0 && !policies.is_empty())
            .then(|| Self { chosen: PolicyMeters::new(pool, CHOSEN), shadows: policies.iter().map(meters).collect() })
    }

    pub(crate) fn count(&self, report: &ShadowReport) {
        self.chosen.count(&report.chosen, &report.chosen);
        for (meters, (_, shadow)) in self.shadows.iter().zip(&report.shadows) {
            meters.count(shadow, &report.chosen);
        }
    }
}

impl PolicyMeters {
    fn new(pool: &Pool, policy: &str) -> Self {
        let labels = &[("policy", policy)];
        Self {
            decisions: pool.counter("pointsman_shadow_decisions_total", labels),
            agreements: pool.counter("pointsman_shadow_agreements_total", labels),
            cached_tokens: pool.counter("pointsman_shadow_cached_tokens_total", labels),
            ttft: pool.histogram("pointsman_shadow_ttft_seconds", labels),
        }
    }

    fn count(&self, rank: &AppraisedRank, chosen: &AppraisedRank) {
        self.decisions.increment(1);
        self.agreements.increment(u64::from(rank.rank == chosen.rank));
        self.cached_tokens.increment(rank.cached_tokens.into());
        if let Some(seconds) = rank.ttft_seconds {
            self.ttft.record(seconds);
        }
    }
}
