//! Where workers come from: sources, each of them followed by an actor.
//!
//! Owns the trait that sources implement, and the sources that come with the router. Promises that a value that was
//! given reaches the supervisor, whoever dies meanwhile, and that a source that fails or panics is asked again. Leaves
//! comparing with what runs to the supervisor, which keeps the last good set of each source.

#[cfg(feature = "discovery")]
mod dns;
#[cfg(feature = "discovery")]
mod file;
mod follower;
#[cfg(feature = "discovery")]
mod prober;
mod source;
#[cfg(feature = "discovery")]
mod urls;

use std::collections::{BTreeMap, BTreeSet};

#[cfg(feature = "discovery")]
pub use dns::DnsNames;
#[cfg(feature = "discovery")]
pub use file::WatchedFile;
pub(crate) use follower::{Assignment, Follower, FollowerMsg};
#[cfg(feature = "discovery")]
pub use prober::ProbeOptions;
pub(crate) use source::AnySource;
pub use source::{DiscoverySource, StaticList};
#[cfg(feature = "discovery")]
pub use urls::ProbedUrls;

use crate::discovery::DiscoveryError;
use crate::protocol::{WorkerId, WorkerMap};

/// What a source has to say.
pub(crate) enum News {
    /// These are the workers.
    Desired(WorkerMap),
    /// It has no new set; the last good one stands.
    Failed(DiscoveryError),
    /// It has closed: its workers stay as they are.
    Closed,
}

/// How a source of workers is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryStatus {
    /// Its name.
    pub source: String,
    /// Workers that it names, used or not.
    pub workers: usize,
    /// What it complained of last, if it has not said a good set since.
    pub last_error: Option<String>,
    /// Whether it has said its last.
    pub closed: bool,
    /// Workers that it names and that cannot be used, with the reason.
    pub refused: BTreeMap<WorkerId, String>,
    /// Workers that it names no longer and whose last bookings have not ended. A worker that is neither here nor among
    /// [`Router::workers`](crate::Router::workers) is never chosen again.
    pub leaving: BTreeSet<WorkerId>,
    /// Workers that it names and that stay away because they were drained or removed by hand, with their endpoints. See
    /// [`Router::undrain_worker`](crate::Router::undrain_worker).
    pub removed: BTreeMap<WorkerId, String>,
}
