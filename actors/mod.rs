//! Runtime half of the crate: the actors, their communication, and the handle of embedders.
//!
//! Holds mailboxes, permits, lifecycles and message paths; the pure modules of the crate decide. No actor awaits
//! another, every accepted request receives exactly one reply, and a lost message is reported as lost. A folder imports
//! only from folders below it:
//!
//! ```text
//! handle         what embedders call: router, builder, requests, placements
//! supervisor     lifecycles, restart budget, membership
//! health, engine_load, ingest, discovery, gauges, lease_expiry, replica
//! scheduler      decisions
//! sequence       one rank's bookings
//! radix          prefix index
//! telemetry      instruments
//! views          data that an owner publishes and others read
//! io, delivery   clock, HTTP, sockets; strands and scatter-gather
//! ```

mod delivery;
mod discovery;
mod engine_load;
mod gauges;
mod handle;
mod health;
#[cfg(feature = "zmq")]
mod ingest;
mod io;
mod lease_ender;
mod lease_expiry;
mod radix;
#[cfg(feature = "replicas")]
mod replica;
mod scheduler;
mod sequence;
mod strands;
mod supervisor;
mod telemetry;
mod views;
#[cfg(any(feature = "discovery", feature = "zmq"))]
mod worker_tasks;

#[cfg(feature = "kubernetes")]
pub use discovery::KubernetesPods;
pub use discovery::{DiscoverySource, StaticList};
#[cfg(feature = "discovery")]
pub use discovery::{DnsNames, ProbeOptions, ProbedUrls, WatchedFile};
#[cfg(feature = "http")]
pub use handle::PlacedBody;
pub use handle::{
    AddRequest, DisaggPlacement, Disaggregated, Health, OverlapScores, Placement, PrefillPlacement, RankScores,
    RecordedDecision, Router, RouterBuilder, SharedCache, SharedCacheFailure, SharedSummary,
};
#[cfg(feature = "faults")]
pub use handle::{Fault, Hang};
#[cfg(feature = "tower")]
pub use handle::{PlaceError, PlaceFuture, PlaceRequests, PlacedTarget, PlacementLayer};
pub use io::BoxFuture;
#[cfg(feature = "discovery")]
pub use io::http::{EngineClient, EngineGet, EngineHttpError, PlainEngineClient};
#[cfg(feature = "replicas")]
pub use replica::{BusError, ReplicaBus, ReplicaMember, ReplicaMessage, SnapshotSource, SnapshotStore};
#[cfg(all(feature = "replicas", feature = "test-support"))]
pub use replica::{MemoryBus, MemoryNetwork};
pub use scheduler::PendingClass;
pub use telemetry::RoutePhases;
pub use views::kv_source::{KvAuditStatus, KvDifferenceStatus, KvSourceStatus};
pub use views::rank_report::RankReport;
pub use views::shadows::ShadowTotals;
pub use views::worker::WorkerEntry;
