//! Pure part of discovery: addresses, worker files, probe responses of engines, and the union of several sources.
//!
//! Parsing and comparison only. No external input causes a panic, and errors contain the value and the violated rule.
//! The actors wait and access files and sockets.

mod changes;
mod error;
#[cfg(feature = "discovery")]
mod file;
#[cfg(feature = "discovery")]
mod hosts;
mod ids;
#[cfg(feature = "kubernetes")]
mod kubernetes;
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
pub use ids::{DuplicateWorker, worker_map};
#[cfg(feature = "kubernetes")]
pub use kubernetes::{
    KV_EVENTS_PORT, KV_REPLAY_PORT, PodFacts, PodPorts, PodRole, PodWorkers, ROLE_LABEL, ReflectedEvent, ReflectedSet,
    VLLM_KV_EVENTS_PORT, draining_workers, workers_of_pods,
};
#[cfg(feature = "discovery")]
pub use named::{FirstRankEvents, NamedWorker};
#[cfg(feature = "discovery")]
pub use probe::{Described, Engine, EngineFacts, EnginePage, Expected, PageAnswer, ProbeError};
pub use union::{Conflict, DesiredSets};
pub use url::{HttpUrl, HttpUrlError};
