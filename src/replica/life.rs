//! Names of replicas and of their messages.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::names::named;

/// Name of a replica: a number that no other replica of the deployment uses.
///
/// ```
/// assert_eq!(pointsman::ReplicaId(255).to_string(), "00000000000000ff");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReplicaId(pub u64);

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One life of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReplicaLife {
    /// The replica.
    pub replica: ReplicaId,
    /// Number of the life. Its order is a hint of the age only, because clocks may go back between two starts.
    pub incarnation: u64,
}

named! {
    /// Content of a message between replicas.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    pub enum ReplicaTopic {
        /// Load of the sender's own bookings.
        Load = "load",
        /// Ranks of sessions.
        Sessions = "sessions",
        /// Prompts that the sender's decisions place on ranks.
        Speculative = "speculative",
    }
}
