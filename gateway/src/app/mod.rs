//! The gateway as a process: start, routes of the listeners, reloads, signals and stop.
//!
//! The only folder that knows all others.

mod cors;
mod gateway;
pub mod metrics;
mod reload;
pub mod replay;
mod routes;
mod run;
mod running;
pub mod top;

pub use gateway::Gateway;
pub use reload::{LastReload, LoadSettings, ReloadStatus};
pub use run::{Ended, Signal, refuse, run, run_until};
pub use running::GatewayError;
