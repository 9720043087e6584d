//! Pointsman picks, for every LLM request, the engine rank that will serve it fastest.

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

pub use config::RouterConfig;
