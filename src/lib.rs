//! Pointsman picks, for every LLM request, the engine rank that will serve it fastest.

#[cfg(feature = "runtime")]
#[path = "../actors/mod.rs"]
mod actors;
pub mod config;
pub mod directory;
pub mod error;
pub mod hashing;
pub mod index;
pub mod load;
pub mod protocol;
pub mod schedule;
pub mod select;
pub mod supervision;

#[cfg(feature = "runtime")]
pub use actors::{AddRequest, BestMatch, Health, Placement, Prompt, RouteRequest, Router, RouterBuilder, WorkerEntry};
#[cfg(feature = "faults")]
pub use actors::{Fault, Wedge};
pub use config::RouterConfig;
