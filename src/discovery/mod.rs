//! What discovery reads, as data in and data out: addresses, files of workers, what engines say of themselves, and what
//! several sources want together.
//!
//! Owns the parsing and the comparing. Promises that nothing read from outside can make it panic, and errors that name
//! the value and its rule. Leaves waiting, files and sockets to the actors.

mod changes;
mod error;
#[cfg(feature = "discovery")]
mod file;
#[cfg(feature = "discovery")]
mod hosts;
mod ids;
#[cfg(feature = "discovery")]
mod named;
#[cfg(feature = "discovery")]
mod probe;
mod union;
mod url;

pub use changes::Changes;
pub use error::{DiscoveryError, EngineError};
#[cfg(feature = "discovery")]
pub use file::{FileError, FileFormat};
pub use ids::{DuplicateId, derived_id, worker_map};
#[cfg(feature = "discovery")]
pub use named::NamedWorker;
#[cfg(feature = "discovery")]
pub use probe::{Described, Engine, Expected, ProbeError};
pub use union::{Conflict, DesiredSets};
pub use url::{HttpUrl, HttpUrlError, without_password};
