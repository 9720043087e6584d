//! Discovery sources of workers, each followed by an actor.
//!
//! Defines the trait of sources, and the sources of this crate. Every value of a source reaches the supervisor, even if
//! actors die in between. A source that fails or panics is polled again. The supervisor keeps the last valid set of each
//! source and reconciles it with the registered workers.

#[cfg(feature = "discovery")]
mod dns;
#[cfg(feature = "discovery")]
mod file;
mod follower;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg(feature = "discovery")]
mod prober;
#[cfg(feature = "discovery")]
mod publisher;
mod source;
#[cfg(feature = "discovery")]
mod urls;

#[cfg(feature = "discovery")]
pub use dns::DnsNames;
#[cfg(feature = "discovery")]
pub use file::WatchedFile;
pub(crate) use follower::{Assignment, Follower, FollowerMsg, SourceReport};
#[cfg(feature = "kubernetes")]
pub use kubernetes::KubernetesPods;
#[cfg(feature = "discovery")]
pub use prober::ProbeOptions;
pub(crate) use source::AnySource;
pub use source::{DiscoverySource, StaticList};
#[cfg(feature = "discovery")]
pub use urls::ProbedUrls;
