//! What the gateway reports of itself: metrics, logs, access lines and traces.
//!
//! Types and recorders only. The owner of a fact counts it.

pub(crate) mod access;
pub(crate) mod activity;
pub(crate) mod clock;
pub(crate) mod log;
pub mod metric;
pub(crate) mod otlp;
pub(crate) mod page;
pub(crate) mod process;
pub(crate) mod requests;
mod series;
pub(crate) mod throttle;
pub(crate) mod trace;
mod trace_context;
pub(crate) mod window;
