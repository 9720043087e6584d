//! Handling of requests whose latency targets no rank is predicted to meet.

use serde::{Deserialize, Serialize};

use crate::names::named;

named! {
    /// Effect of latency targets that no eligible rank is predicted to meet.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum OnTargetMiss {
        /// The request is served by the rank that misses the fewest targets.
        #[default]
        Serve = "serve",
        /// The request is rejected immediately.
        Reject = "reject",
    }
}

impl OnTargetMiss {
    /// Parses a name; `None` if it is unknown.
    ///
    /// ```
    /// use pointsman::config::OnTargetMiss;
    ///
    /// assert_eq!(OnTargetMiss::from_name("reject"), Some(OnTargetMiss::Reject));
    /// assert_eq!(OnTargetMiss::from_name("Reject"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Serve, Self::Reject].into_iter().find(|known| known.name() == name)
    }
}
