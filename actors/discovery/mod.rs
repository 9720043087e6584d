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

#[cfg(feature = "discovery")]
pub use dns::DnsNames;
#[cfg(feature = "discovery")]
pub use file::WatchedFile;
pub(crate) use follower::{Assignment, Follower, FollowerMsg, SourceReport};
#[cfg(feature = "discovery")]
pub use prober::ProbeOptions;
pub(crate) use source::AnySource;
pub use source::{DiscoverySource, StaticList};
#[cfg(feature = "discovery")]
pub use urls::ProbedUrls;
