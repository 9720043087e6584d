//! Replicas: several routers over one fleet that share their load.
//!
//! Each replica books its own requests and waits for no other one. It publishes a [`LoadSummary`] of what its bookings
//! contribute to the load of each rank, several times a second; [`SummaryWriter`] selects the content. A [`PeerTable`]
//! holds the last summaries of all other replicas and computes their sum per rank, and their arrivals.
//!
//! Replicas also share the ranks of sessions: [`crate::session::Sessions`] merges them.
//!
//! Summaries are state, not changes of counters: a lost one is repaired by the next, and a repeated or reordered one has
//! no effect. Nothing is acknowledged. The transport and the clock are outside this module.

#[cfg(feature = "replicas")]
mod codec;
mod life;
mod peer;
#[cfg(feature = "replicas")]
mod routed;
#[cfg(feature = "replicas")]
mod sessions;
mod summary;
mod table;
mod writer;

#[cfg(feature = "replicas")]
pub use codec::{MESSAGE_VERSION, MessageError};
pub use life::{ReplicaId, ReplicaLife, ReplicaTopic};
#[cfg(feature = "replicas")]
pub use routed::{ROUTED_BLOCKS_MAX, RoutedPrompt, RoutedPrompts, decode_routed, encode_routed};
#[cfg(feature = "replicas")]
pub use sessions::{SESSIONS_MAX, decode_sessions, encode_sessions};
pub use summary::{LoadSummary, RankContribution, ReplicaLayout, SummaryKind};
pub use table::{PeerState, PeerStatus, PeerTable, Received, RefusedSummary};
pub use writer::SummaryWriter;
