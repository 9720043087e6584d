//! Metrics of shadow policies, beside those of the active policy for the same decisions.

use std::sync::Arc;

use metrics::{Counter, Histogram};

use super::Pool;
use crate::actors::views::published::Published;
use crate::actors::views::shadows::ShadowTotals;
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
    /// In the same order.
    totals: Vec<ShadowTotals>,
    published: Arc<Published<Vec<ShadowTotals>>>,
}

/// Metrics of one policy.
struct PolicyMeters {
    decisions: Counter,
    agreements: Counter,
    cached_tokens: Counter,
    ttft: Histogram,
}

impl ShadowMeters {
    /// The meters; `None` if no decision has shadows. Totals continue those that are published.
    pub(crate) fn new(
        pool: &Pool,
        config: &RouterConfig,
        published: &Arc<Published<Vec<ShadowTotals>>>,
    ) -> Option<Self> {
        let policies = &config.shadow.policies;
        let mut totals = published.get().to_vec();
        if totals.is_empty() {
            totals = policies.iter().map(|policy| ShadowTotals::new(policy.name())).collect();
        }
        let meters = |policy: &PolicyConfig| PolicyMeters::new(pool, policy.name());
        (config.shadow.share > 0.0 && !policies.is_empty()).then(|| Self {
            chosen: PolicyMeters::new(pool, CHOSEN),
            shadows: policies.iter().map(meters).collect(),
            totals,
            published: Arc::clone(published),
        })
    }

    pub(crate) fn count(&mut self, report: &ShadowReport) {
        self.chosen.count(&report.chosen, &report.chosen);
        for ((meters, totals), (_, shadow)) in self.shadows.iter().zip(&mut self.totals).zip(&report.shadows) {
            meters.count(shadow, &report.chosen);
            add(totals, shadow, &report.chosen);
        }
        self.published.set(self.totals.clone());
    }
}

fn add(totals: &mut ShadowTotals, shadow: &AppraisedRank, chosen: &AppraisedRank) {
    totals.decisions += 1;
    totals.agreements += u64::from(shadow.rank == chosen.rank);
    totals.cached_tokens += u64::from(shadow.cached_tokens);
    totals.chosen_cached_tokens += u64::from(chosen.cached_tokens);
    if let (Some(of_shadow), Some(of_chosen)) = (shadow.ttft_seconds, chosen.ttft_seconds) {
        totals.predictions += 1;
        totals.ttft_seconds += of_shadow;
        totals.chosen_ttft_seconds += of_chosen;
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
