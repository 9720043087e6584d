//! Load and replay harness of Pointsman.
//!
//! A [`workload`] provides requests, a [`targets::Target`] is the router under test: Pointsman, or in `benches/versus`
//! Dynamo's router, so that both run exactly the same loops. The loops:
//!
//! - [`replay`]: a closed or an open loop in real time over engines that respond immediately. Measures the cost of routing
//!   and the cache hits.
//! - [`simulate`]: engines with modelled durations, in virtual time. Measures the latency that users of a fleet would see.
//! - [`load`]: real endpoints over HTTP, by the clients of [`pointsman_trial::driver`], as in [`drill`] and in the demo.
//!
//! Runs over time give a [`results::Run`], from which [`results`] computes the figures and warnings of one report.
//! [`compare`] and [`suite`] compare policies and endpoints by it.
//!
//! The harness uses the router through its public API only.

use std::error::Error;
use std::io;
use std::path::Path;

pub mod compare;
pub mod drill;
pub mod engine;
pub mod fleet;
pub mod load;
pub mod measure;
mod progress;
pub mod replay;
pub mod results;
pub mod simulate;
pub mod source;
pub mod suite;
pub mod targets;

pub use pointsman_trial::workload;

/// Reason for the end of a run, for display only.
pub type Failed = Box<dyn Error + Send + Sync>;

/// Description of a failed operation on a file.
pub(crate) fn unusable<E: std::fmt::Display>(operation: &str, path: &Path) -> impl FnOnce(E) -> Failed {
    let subject = format!("cannot {operation} {}", path.display());
    move |error| format!("{subject}: {error}").into()
}

/// Runtime with this number of threads.
pub(crate) fn runtime(threads: usize) -> Result<tokio::runtime::Runtime, Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    runtime.map_err(|error: io::Error| format!("cannot start a runtime of {threads} threads: {error}").into())
}
