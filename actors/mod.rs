//! The actors: who owns which state, who talks to whom, and the handle that embedders hold.
//!
//! Owns mailboxes, turns, permits, lifecycles and the way of a message. Promises that no actor awaits another,
//! that every accepted request is answered exactly once, and that what is lost is answered as lost. Leaves
//! every decision to the pure modules of the crate.
//!
//! ```text
//!                Supervisor           lifecycles, restart budget, membership
//!      ┌────────┬─────┴─────┬────────┐
//!   Ingest    Radix     Scheduler  Sequence
//!   events    prefix    decisions  one rank's
//!   in        index                bookings
//! ```

#[cfg(feature = "http")]
mod body;
mod clock;
mod disagg;
mod discovery;
mod engine_load;
#[cfg(feature = "zmq")]
mod engine_socket;
#[cfg(feature = "faults")]
mod faults;
mod gather;
mod health;
#[cfg(feature = "discovery")]
mod http;
#[cfg(feature = "zmq")]
mod ingest;
mod kv_source;
mod liveness;
#[cfg(any(feature = "discovery", feature = "zmq"))]
mod per_worker;
mod placement;
mod predict;
mod radix;
mod router;
mod scheduler;
mod sequence;
mod shared;
mod shared_cache;
mod supervisor;
mod telemetry;
#[cfg(feature = "tower")]
mod tower;
mod turn;

#[cfg(feature = "http")]
pub use body::PlacedBody;
pub use disagg::{DisaggPlacement, Disaggregated};
pub use discovery::{DiscoverySource, DiscoveryStatus, StaticList};
#[cfg(feature = "discovery")]
pub use discovery::{DnsNames, ProbeOptions, ProbedUrls, WatchedFile};
#[cfg(feature = "faults")]
pub use faults::{Fault, Wedge};
pub use kv_source::KvSourceStatus;
pub use placement::Placement;
pub use router::{
    AddRequest, BestMatch, CacheHit, Health, OverlapScores, Prompt, RankScores, RouteRequest, Router, RouterBuilder,
    SharedSummary, WorkerEntry,
};
pub use scheduler::PendingClass;
pub use shared_cache::{SharedCache, SharedCacheAnswer, SharedCacheError, SharedCacheFailure};
#[cfg(feature = "tower")]
pub use tower::{InputPrompt, PlaceError, PlaceFuture, PlaceRequests, PlacedTarget, PlacementInput, PlacementLayer};
