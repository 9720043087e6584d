//! One router's configuration: every setting, its unit, default and rule.
//!
//! Each section is a struct in its own file; the settings of a policy are in [`crate::policy`]. A value that passed
//! [`RouterConfig::validate`] can be used without another check. Reading files and environments is left to embedders.

pub(crate) mod discovery;
pub(crate) mod engine_load;
pub(crate) mod events;
pub(crate) mod health;
pub(crate) mod index;
pub(crate) mod load;
pub(crate) mod overload;
mod overrides;
mod pools;
pub(crate) mod queue;
pub(crate) mod recorder;
pub(crate) mod replicas;
pub(crate) mod router;
pub(crate) mod session;
pub(crate) mod shadow;
pub(crate) mod shared_cache;
pub(crate) mod slow_start;
pub(crate) mod supervision;
pub(crate) mod table;
mod targets;

use serde::{Deserialize, Serialize};

pub use events::EventMode;
pub(crate) use health::HealthConfig;
pub use index::SpeculativeModel;
pub(crate) use index::{IndexConfig, SpeculativeConfig};
pub(crate) use load::LoadConfig;
pub use load::PrefillModel;
pub use overrides::RouterConfigOverride;
pub use queue::{QueueClass, QueueOrder, UncachedBucket};
pub(crate) use recorder::RecorderConfig;
pub(crate) use router::RouterConfig;
pub use session::SessionAffinity;
pub(crate) use supervision::SupervisionConfig;
pub use targets::OnTargetMiss;

pub use crate::validation::ConfigErrors;

use crate::protocol::WorkerRole;

/// Work of the ranks of a pool.
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

impl PoolRole {
    /// Whether a pool of this role uses workers of the given role, as sources of discovery name them.
    ///
    /// ```
    /// use pointsman::config::PoolRole;
    /// use pointsman::protocol::WorkerRole;
    ///
    /// assert!(PoolRole::Prefill.uses(Some(WorkerRole::Both)) && PoolRole::Prefill.uses(None));
    /// assert!(!PoolRole::Aggregated.uses(Some(WorkerRole::Prefill)));
    /// ```
    #[must_use]
    pub fn uses(self, role: Option<WorkerRole>) -> bool {
        match role {
            None | Some(WorkerRole::Both) => true,
            Some(WorkerRole::Prefill) => self == Self::Prefill,
            Some(WorkerRole::Decode) => self == Self::Decode,
        }
    }
}

#[cfg(test)]
mod tests;
