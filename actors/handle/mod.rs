//! The router handle: the API of an embedder.
//!
//! Performs hashing, leases, permits, and retries of lost requests at the edge. Every call returns a placement, a
//! rejection with its reason, or an error.

mod attempts;
#[cfg(feature = "http")]
mod body;
mod builder;
mod decisions;
mod disagg;
mod edge;
mod events;
#[cfg(feature = "faults")]
mod faults;
mod health;
mod inquiry;
mod intake;
mod lease_guard;
mod membership;
mod overlap;
mod placement;
mod rank_report;
pub(crate) mod request;
mod route;
mod router;
mod shared_cache;
#[cfg(feature = "zmq")]
mod snapshot;
#[cfg(feature = "tower")]
mod tower;

#[cfg(feature = "http")]
pub use body::PlacedBody;
pub use builder::RouterBuilder;
pub use decisions::RecordedDecision;
pub use disagg::{DisaggPlacement, Disaggregated, PrefillPlacement};
#[cfg(feature = "faults")]
pub use faults::{Fault, Hang};
pub use inquiry::{OverlapScores, RankScores, SharedSummary};
pub use placement::Placement;
pub use request::AddRequest;
pub use router::{Health, Router};
pub use shared_cache::{SharedCache, SharedCacheFailure};
#[cfg(feature = "tower")]
pub use tower::{PlaceError, PlaceFuture, PlaceRequests, PlacedTarget, PlacementLayer};
