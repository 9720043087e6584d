//! The gateway as a process: start, routes of the listeners, reloads, signals and stop.
//!
//! The only folder that knows all others.

mod cors;
mod gateway;
mod listeners;
pub mod metrics;
mod reload;
mod reload_routes;
pub mod replay;
mod routes;
mod run;
mod running;
pub mod top;

pub use gateway::Gateway;
pub use reload::{LastReload, LoadSettings, ReloadError, ReloadStatus};
pub use run::{Ended, Signal, refuse, run, run_until};
pub use running::GatewayError;
