//! Trials of the router without GPUs.
//!
//! [`engine`] is a deterministic model of one engine rank and [`workload`] reads traces and generates requests; both are
//! pure. With the feature `mock`, [`mock`] serves the model over HTTP and publishes its KV events, and [`demo`] compares
//! two policies on a fleet of mock engines behind a gateway that its caller starts.

#[cfg(feature = "mock")]
pub mod demo;
pub mod engine;
#[cfg(feature = "mock")]
pub mod mock;
pub mod workload;
