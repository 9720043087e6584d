//! Embedder code that replaces or extends parts of the scheduler.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::load::PrefillEstimator;
use crate::policy::{Needs, RankFilters, RankPolicy, RankScorer};

/// Code of the embedder that the scheduler calls.
#[derive(Clone, Default)]
pub struct Extensions {
    /// Policy in place of the configured one.
    pub policy: Option<Arc<dyn RankPolicy>>,
    /// Cost terms that are added to the cost of the configured policy. Without effect on policies that compare no costs.
    pub scorers: Vec<Arc<dyn RankScorer>>,
    /// Filters of ranks beside the built-in ones.
    pub filters: RankFilters,
    /// Estimator of prefill durations in place of the learned speeds.
    pub estimator: Option<Arc<PrefillEstimator>>,
    /// Whether the exact load of every rank is queried, also where bounds decide. For comparison with the shortlist:
    /// both place alike.
    #[cfg(any(test, feature = "test-support"))]
    pub queries_every_rank: bool,
}

impl Extensions {
    /// The facts that a decision needs, if its policy needs `needs`.
    #[cfg(any(test, feature = "test-support"))]
    pub(super) fn needs(&self, needs: Needs) -> Needs {
        if self.queries_every_rank { Needs::All } else { needs }
    }

    /// The facts that a decision needs, if its policy needs `needs`.
    #[cfg(not(any(test, feature = "test-support")))]
    pub(super) fn needs(&self, needs: Needs) -> Needs {
        needs
    }

    /// The load facts that the custom policy needs, if there is one. A policy has no bounds of costs, so that `Bounded`
    /// means all ranks, as does a panic.
    pub(super) fn policy_needs(&self) -> Option<Needs> {
        let policy = self.policy.as_ref()?;
        match catch_unwind(AssertUnwindSafe(|| policy.needs())) {
            Ok(needs @ (Needs::Board | Needs::Two | Needs::All)) => Some(needs),
            Ok(Needs::Bounded) | Err(_) => Some(Needs::All),
        }
    }
}

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extensions")
            .field("policy", &self.policy.is_some())
            .field("scorers", &self.scorers.len())
            .field("filters", &self.filters)
            .field("estimator", &self.estimator.is_some())
            .finish()
    }
}
